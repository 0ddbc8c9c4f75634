"""What is wrong with a run, by name: each finding cites its numbers and says what to do."""
