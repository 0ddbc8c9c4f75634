"""The loop and its parts: groups become a batch, a batch becomes updates, updates become a better policy."""
