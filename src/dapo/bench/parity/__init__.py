"""The same config in TRL and here: recorded rollouts through both, and whole training runs."""
