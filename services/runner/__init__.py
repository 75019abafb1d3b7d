"""The runner: executes shards with MLX, one spawned child process each, and serves instances."""
