"""The service's gRPC face."""
