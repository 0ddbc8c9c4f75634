"""A problem set with its prompts as tokens: loaded, cleaned, encoded; what was left out is said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from dapo.config.schema import Config
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
