"""The topology's part on every node: identity, heartbeats, and probes of other nodes."""
