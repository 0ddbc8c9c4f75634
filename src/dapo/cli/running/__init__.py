"""What `dapo train` and `dapo resume` show of a run: its steps as they come, and how it ended."""
