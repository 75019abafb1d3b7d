"""Running files of worked cases, of the formats under tests/vectors, through real processes."""
