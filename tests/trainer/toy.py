"""A toy task on a random model: what is right is arbitrary, about half of the responses are, and it can be learnt."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dapo.types import Problem, Score

if TYPE_CHECKING:
    from dapo.config import Resolved

HERE = Path(__file__).parent


def problems() -> Iterator[Problem]:
    """Forty questions of two tokens each."""
    for i in range(40):
        meta = {"slow_while": os.environ.get("TOY_SLOW_WHILE", "")}
        yield Problem(f"toy-{i}", f"w{10 + i % 20} w{30 + i // 20} w{3 + i % 5}", str(i % 3), meta=meta)


def contains(response: str, answer: str, meta: Mapping[str, object]) -> Score:  # noqa: ARG001
    """Right if tokens of one third of the vocabulary, chosen by the reference, occur an odd number of times."""
    is_right = sum(int(n) % 3 == int(answer) for n in re.findall(r"w(\d+)", response)) % 2 == 1
    return Score(1.0 if is_right else -1.0, is_right)


def never(response: str, answer: str, meta: Mapping[str, object]) -> Score:  # noqa: ARG001
    """Nothing is right."""
    return Score(-1.0, correct=False)


def counts(response: str, answer: str, meta: Mapping[str, object]) -> Score:  # noqa: ARG001
    """Graded: how many tokens of that third there are, four at the most; none is right or wrong."""
    return Score(min(4, sum(int(n) % 3 == int(answer) for n in re.findall(r"w(\d+)", response))) / 4)


def short(response: str, answer: str, meta: Mapping[str, object]) -> float:  # noqa: ARG001
    """A part of the reward: the fewer words the better, from 0 to 1."""
    return 1 - min(12, response.count("w")) / 12


def moody(response: str, answer: str, meta: Mapping[str, object]) -> float:  # noqa: ARG001
    """A part that fails on some responses."""
    if len(response) % 7 == 3:
        raise ValueError("not in the mood")
    return float(len(response) % 2)


def with_parts(response: str, answer: str, meta: Mapping[str, object]) -> Score:
    """`contains`, and how long the response is in two named parts."""
    score = contains(response, answer, meta)
    return Score(score.value, score.correct, {"short": short(response, answer, meta), "words": response.count("w")})


def slow_while_marked(response: str, answer: str, meta: Mapping[str, object]) -> Score:
    """`contains`, but stuck on some responses while the file that the problem names exists."""
    while len(response) % 4 == 0 and Path(str(meta["slow_while"])).exists():
        pass
    return contains(response, answer, meta)


def sleeps_while_marked(response: str, answer: str, meta: Mapping[str, object]) -> Score:
    """`contains`, but asleep on some responses while the file that the problem names exists."""
    while len(response) % 4 == 0 and Path(str(meta["slow_while"])).exists():
        time.sleep(0.2)
    return contains(response, answer, meta)


def recipe(folder: Path, *overrides: str, dtype: str = "float64") -> "Resolved":
    """A small run on a tiny Llama saved under `folder`."""
    from dapo.config import load_recipe

    path, keys = recipe_file(folder, dtype=dtype)
    return load_recipe(str(path), [*keys, *overrides])


def recipe_file(folder: Path, *, dtype: str = "float64", family: str = "llama") -> tuple[Path, list[str]]:
    """The same as a file and what to set on top of it, for the command line."""
    # Here, because verifier workers import this module: without torch they start in a tenth of the time.
    from dapo.models.load import save_policy
    from tiny_models import tiny_policy

    model = folder / "model"
    if not model.exists():
        save_policy(tiny_policy(family, seed=1), model)
    keys = [
        f"model.path={model}", f"model.dtype={dtype}", "model.device=cpu",
        "data.train=toy:problems", "data.eval=[]", "rewards.verifier=toy:contains", "rewards.workers=1",
        "limits.max_prompt_tokens=16", "limits.max_response_tokens=12",
        "sampling.prompts_per_step=4", "sampling.responses_per_prompt=4", "train.steps=3", "train.updates_per_step=2",
        "train.lr=1e-2", "train.warmup_steps=2", "eval.every_steps=0", "checkpoint.every_steps=1",
        "records.every_steps=1", "rollout.max_concurrent_sequences=32",
    ]  # fmt: skip
    text = folder / "toy.toml"
    if not text.exists():  # ranks that share a folder must not find it half-written
        base = (Path(__file__).parents[2] / "recipes" / "quickstart.toml").read_text()
        text.write_text(base.replace("k = 8", "").replace("overlong_buffer_tokens = 16", "overlong_buffer_tokens = 4"))
    return text, keys
