"""A run as a page: reads the run folder only, and never imports torch."""
