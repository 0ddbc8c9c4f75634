"""Training in a notebook: rewards and environments of its cells, and a view of the run as it goes."""
