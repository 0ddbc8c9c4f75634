"""The engine that runs in the trainer's process, on the trainer's own weights."""
