"""Reinforcement learning for language models with DAPO; GRPO, PPO and VAPO are presets of the same parts."""

__version__ = "0.1.0"
