"""Reading the topology and downloads services."""
