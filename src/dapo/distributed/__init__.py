"""Many processes as one: collectives, sharded modules, verifiers that share the work."""
