"""Topology: which nodes are alive, and which verified links join them."""
