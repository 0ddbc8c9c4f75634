"""The ablation ladder: each arm is a config diff and an ordinary run; arms are compared with paired intervals."""
