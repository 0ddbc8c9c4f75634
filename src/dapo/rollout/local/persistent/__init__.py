"""One decode step of a few rows in one launch."""
