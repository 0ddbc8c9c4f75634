"""Many processes as one: collectives, sharded modules, judges that share the work."""
