"""The `shardring` command, and what puts a node together."""
