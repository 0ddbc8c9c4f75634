"""The command line: `main.py` lists the commands, one file per command does the work."""
