"""Several problem sets in one run: whose turn it is, and the prompts of all of them as one."""
