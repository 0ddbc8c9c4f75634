"""The doctor: named findings about a run, each with its numbers and a remedy."""
