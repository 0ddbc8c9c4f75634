"""The ablation ladder: arms that are config diffs, run as ordinary runs, compared with paired intervals."""
