"""The runner's I/O: its child processes, other runners, the downloads service."""
