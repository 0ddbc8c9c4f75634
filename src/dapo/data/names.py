"""Known problem sets by name: where the hub has them, at which commit, and their file in a local folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dapo.data.rows import SUFFIXES

ROOT_VARIABLE = "DAPO_DATA"
Use = Literal["train", "eval"]  # what a set is loaded for: which split a known name stands for


@dataclass(frozen=True, slots=True)
class Known:
    """A hub data set pinned to a commit. `files` are looked for first, under the local root, per split."""

    hub: str
    revision: str
    config: str | None
    train: str | None  # split used for training; None: an evaluation set, which has only its own split
    eval: str
    files: dict[str, tuple[str, ...]]

    def split(self, use: Use) -> str:
        return self.train if use == "train" and self.train else self.eval


# Commits of the hub repositories. aime24's file at its commit has the digest of the one in DAPO's own repository
# (sha256 12154e38…877e7).
KNOWN = {
    "dapo-math-17k": Known(
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
        config="default",
        train="train",
        eval="train",
        files={"train": ("dapo_math_17k/dapo_math_17k.parquet", "dapo-math-17k.parquet", "data/dapo-math-17k.parquet")},
    ),
    "aime24": Known(
        hub="BytedTsinghua-SIA/AIME-2024",
        revision="aa49075e24ad594b79fdf0bdcefa735c2181be67",
        config="default",
        train=None,
        eval="train",
        files={"train": ("aime2024/aime-2024.parquet", "aime-2024.parquet", "data/aime-2024.parquet")},
    ),
    "aime25": Known(
        hub="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        config=None,
        train=None,
        eval="test",
        files={"test": ("aime2025/aime-2025.parquet",)},
    ),
    "amc23": Known(
        hub="math-ai/amc23",
        revision="80815d37005feb82cd7f8fbc6901d5d3eff43057",
        config=None,
        train=None,
        eval="test",
        files={"test": ()},
    ),
    "math500": Known(
        hub="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        config=None,
        train=None,
        eval="test",
        files={"test": ()},
    ),
    "gsm8k": Known(
        hub="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        config="main",
        train="train",
        eval="test",
        files={"train": (), "test": ()},
    ),
}


def local_root(root: str | Path | None) -> Path | None:
    """The folder that holds downloaded sets: the one given, else $DAPO_DATA, else none."""
    given = root if root is not None else os.environ.get(ROOT_VARIABLE)
    return Path(given) if given else None


def local_file(name: str, split: str, root: Path) -> Path | None:
    """A known set's file under the root: its usual name, NAME/SPLIT.suffix, or NAME.suffix where it has one split."""
    known = KNOWN[name]
    guesses = list(known.files.get(split, ()))
    guesses += [f"{name}/{split}{suffix}" for suffix in SUFFIXES]
    if len(known.files) == 1:
        guesses += [f"{folder}{name}{suffix}" for suffix in SUFFIXES for folder in ("", f"{name}/")]
    return next((root / guess for guess in guesses if (root / guess).is_file()), None)
