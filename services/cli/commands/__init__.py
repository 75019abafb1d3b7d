"""One module for each command of `shardring`, imported only when it is asked for."""
