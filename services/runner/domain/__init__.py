"""What the runner decides, as plain data and pure functions."""
