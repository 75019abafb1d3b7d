"""What downloads and models are, as frozen data and pure functions."""
