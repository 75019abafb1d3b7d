"""The placement service: picks the ring of nodes that runs a model. Holds no state."""
