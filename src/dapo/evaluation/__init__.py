"""Evaluation: avg@k, pass@k and maj@k with intervals, on the engine and verifier that training uses."""
