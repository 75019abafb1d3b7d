"""Nodes, links and leases as plain data and rules, free of gRPC and I/O."""
