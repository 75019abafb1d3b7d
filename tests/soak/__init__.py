"""Long runs against a real cluster that look for what is left behind; started by hand."""
