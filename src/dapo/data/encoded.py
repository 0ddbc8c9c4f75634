"""A problem set with its prompts as tokens, and the order in which a run draws them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dapo.config.schema import Config
from dapo.config.sources import Source, in_schema, is_mixture, train_sources
from dapo.data.names import Use
from dapo.data.order import ProblemOrder
from dapo.data.problems import load_problems
from dapo.data.prompts import PromptFormat, encode_problems
from dapo.errors import DataError
from dapo.types import Problem

Prompted = tuple[Problem, int, tuple[int, ...]]  # (problem, visit, prompt tokens)


@dataclass(frozen=True)
class EncodedSet:
    """Problems and their prompts, index by index. Those of a mixture are its `sources`, one after the other."""

    name: str
    checksum: str
    problems: tuple[Problem, ...]
    prompts: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()
    sources: tuple[EncodedSet, ...] = ()
    format: PromptFormat = field(default_factory=PromptFormat)  # of each source its own

    @cached_property
    def by_id(self) -> dict[str, Problem]:
        return {problem.id: problem for problem in self.problems}


class OrderedSource:
    """The prompts of a set in its order: each problem once per epoch, shuffled, and at most once per step.

    `rewind` takes back the prompts of a step that were submitted and not used.
    """

    def __init__(self, problems: EncodedSet, order: ProblemOrder) -> None:
        self.problems = problems
        self.order = order

    @property
    def n_problems(self) -> int:
        return self.order.n_problems

    @property
    def n_submitted(self) -> int:
        return self.order.n_submitted

    @property
    def has_seen_all(self) -> bool:
        return self.n_submitted >= self.n_problems

    def start_step(self) -> None:
        self.order.start_step()

    def next(self) -> Prompted | None:
        if (drawn := self.order.next()) is None:
            return None
        index, visit = drawn
        return self.problems.problems[index], visit, self.problems.prompts[index]

    def rewind(self, n_used: int) -> None:
        self.order.rewind(n_used)

    def state(self) -> dict[str, Any]:
        return self.order.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Back to `state()`; one of another set or seed is refused."""
        self.order = ProblemOrder.restore(state, n_problems=self.order.n_problems, seed=self.order.seed)


def load_train(config: Config, tokenizer: Any) -> EncodedSet:
    """What data.train names: a set, or the sources of a mixture as one."""
    if not is_mixture(config):
        return load_encoded(train_sources(config)[0], config, tokenizer, use="train")
    sources = train_sources(config)
    parts = [of_mixture(load_encoded(source, config, tokenizer, use="train"), source) for source in sources]
    checksums = json.dumps([[part.name, part.checksum] for part in parts])
    return EncodedSet(
        "+".join(part.name for part in parts),
        hashlib.sha256(checksums.encode()).hexdigest(),
        tuple(problem for part in parts for problem in part.problems),
        tuple(prompt for part in parts for prompt in part.prompts),
        tuple(f"{part.name}: {note}" for part in parts for note in part.notes),
        tuple(parts),
    )


def of_mixture(problems: EncodedSet, source: Source) -> EncodedSet:
    """The problems with their source's name, also in their ids: two sources may ask the same question.

    Where a row names its own data source, a verifier still gets that one.
    """
    named = [
        replace(
            problem,
            id=f"{source.name}/{problem.id}",
            source=source.name,
            meta={"data_source": problem.source, **problem.meta},
        )
        for problem in problems.problems
    ]
    return replace(problems, name=source.name, problems=tuple(named))


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Errors about a set of a table say of which."""
    try:
        yield
    except DataError as error:
        where = f"{source.key}: " if in_schema(source.key) != source.key else ""
        raise DataError(f"{where}{error.message}", remedy=error.remedy) from None


def load_encoded(source: Source, config: Config, tokenizer: Any, *, use: Use) -> EncodedSet:
    """A problem set with its prompts; its problems know their verifier where that is not the run's."""
    with naming(source):
        return encode_source(source, config, tokenizer, use)


def encode_source(source: Source, config: Config, tokenizer: Any, use: Use) -> EncodedSet:
    problems = load_problems(source.path, fields=config.data.fields or None, verifier=source.verifier, use=use)
    own = "" if source.verifier == config.rewards.verifier else source.verifier
    prompt = PromptFormat(source.template, source.chat_template, source.system_prompt)
    told = own or source.environment
    encoded, drops = encode_problems(
        (replace(one, verifier=own, environment=source.environment) for one in problems) if told else problems,
        prompt,
        tokenizer,
        max_prompt_tokens=config.limits.max_prompt_tokens,
    )
    notes = [*problems.notes]
    if drops:
        notes.append(
            f"{len(drops):,} prompts over limits.max_prompt_tokens = {config.limits.max_prompt_tokens} dropped"
        )
    return EncodedSet(
        source.name,
        problems.sha256,
        tuple(item.problem for item in encoded),
        tuple(item.tokens for item in encoded),
        tuple(notes),
        format=prompt,
    )
