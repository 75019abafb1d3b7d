"""What runs inside a shard's child process: the only code of Shardring that imports MLX."""
