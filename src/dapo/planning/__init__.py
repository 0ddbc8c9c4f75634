"""What a run will need before it starts: memory, a cluster, how a step scales; the virtual clock for it."""
