"""From problems to the groups a step trains on: engine and verifier together, and dynamic sampling on top."""
