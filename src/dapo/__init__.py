"""Reinforcement learning for language models with DAPO; GRPO, PPO and VAPO are presets built from the same components.

    import dapo
    result = dapo.train("quickstart", out="runs/first", overrides=["train.steps=5"])

What needs torch is imported when it is first used.
"""

import importlib

TYPE_CHECKING = False  # as type checkers know it; `python -m dapo` must not import more before its path is safe
if TYPE_CHECKING:
    from dapo.config.load import load_recipe
    from dapo.trainer.api import RunResult, train
    from dapo.trainer.observer import Observer
    from dapo.types import Problem, Score

__version__ = "0.1.0"

__all__ = ["Observer", "Problem", "RunResult", "Score", "__version__", "load_recipe", "train"]

_HOME = {
    "Observer": "dapo.trainer.observer",
    "Problem": "dapo.types",
    "RunResult": "dapo.trainer.api",
    "Score": "dapo.types",
    "load_recipe": "dapo.config.load",
    "train": "dapo.trainer.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dapo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
