"""The command line: `main.py` lists the verbs, one file per verb does the work."""
