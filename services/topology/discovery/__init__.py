"""Finding a cluster on a LAN by DNS-SD."""
