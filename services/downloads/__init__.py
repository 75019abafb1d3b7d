"""Downloads: how much of each model is on each node's disk, and fetching what is needed."""
