"""Environments of other packages, run by their own functions within our episodes."""
