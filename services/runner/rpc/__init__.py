"""The runner's gRPC services."""
