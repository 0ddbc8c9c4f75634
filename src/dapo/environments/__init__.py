"""Environments: what answers a model's turn, until it ends the episode with a score."""
