"""What a run waits for: every wait by name, the watchdog that limits it, and who holds it up."""
