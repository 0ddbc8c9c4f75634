"""A problem set with its prompts as tokens, and the order in which a run draws them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from dapo.config.schema import Config
from dapo.data.order import ProblemOrder
from dapo.data.problems import load_problems
from dapo.data.prompts import PromptFormat, encode_problems
from dapo.types import Problem


@dataclass(frozen=True)
class EncodedSet:
    """Problems and their prompts, index by index."""

    name: str
    checksum: str
    problems: tuple[Problem, ...]
    prompts: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def by_id(self) -> dict[str, Problem]:
        return {problem.id: problem for problem in self.problems}


class OrderedSource:
    """The prompts of a run in its order: each problem once per epoch, shuffled, and at most once per step.

    `rewind` takes back the prompts of a step that were submitted and not used.
    """

    def __init__(self, problems: EncodedSet, order: ProblemOrder) -> None:
        self.problems = problems
        self.order = order

    def start_step(self) -> None:
        self.order.start_step()

    def next(self) -> tuple[Problem, int, tuple[int, ...]] | None:
        if (drawn := self.order.next()) is None:
            return None
        index, visit = drawn
        return self.problems.problems[index], visit, self.problems.prompts[index]

    def rewind(self, n_used: int) -> None:
        self.order.rewind(n_used)


def load_encoded(name: str, config: Config, tokenizer: Any, *, use: Literal["train", "eval"]) -> EncodedSet:
    """The set `name` as config.data describes it; `use` is "train" or "eval"."""
    problems = load_problems(name, fields=config.data.fields or None, verifier=config.rewards.verifier, use=use)
    encoded, drops = encode_problems(
        problems,
        PromptFormat(config.data.template, config.data.chat_template),
        tokenizer,
        max_prompt_tokens=config.limits.max_prompt_tokens,
    )
    notes = [*problems.notes]
    if drops:
        notes.append(
            f"{len(drops):,} prompts over limits.max_prompt_tokens = {config.limits.max_prompt_tokens} dropped"
        )
    return EncodedSet(
        name,
        problems.sha256,
        tuple(item.problem for item in encoded),
        tuple(item.tokens for item in encoded),
        tuple(notes),
    )
