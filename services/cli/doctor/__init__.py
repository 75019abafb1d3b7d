"""What is wrong with a cluster's network, in plain words."""
