"""`judge:FILE.toml`: the server, the rubric and the budgets, read strictly; a mistake names the file and the key."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dapo.chat_client import is_http
from dapo.config.load import read_toml
from dapo.errors import ConfigError
from dapo.rewards.decision import JUDGE_PREFIX as PREFIX

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
EXAMPLE = '[criteria.correct]\nquestion = "Does the response reach the reference answer?"'


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Criterion(Table):
    """One thing to look at."""

    question: str = Field(min_length=1, description="What the judge is asked about the response.")
    weight: float = Field(1.0, gt=0, description="Of the mean; above 0.")


class Budget(Table):
    """How fast, how long and how dear judging may be."""

    concurrency: int = Field(8, ge=1, le=1024, description="Requests at a time.")
    requests_per_s: float | None = Field(None, gt=0, description="At most so many requests start in a second.")
    timeout_s: float = Field(120.0, gt=0, le=86_400, description="For one reply.")
    wait_s: float = Field(600.0, ge=0, le=10**7, description="How long a run waits for a server that does not answer.")
    max_request_hours: float | None = Field(None, gt=0, description="Time spent in requests, all of them added up.")
    max_usd: float | None = Field(None, gt=0, description="Money spent, by [price].")


class Price(Table):
    """What the server charges; a server of your own charges nothing."""

    usd_per_million_input_tokens: float = Field(0.0, ge=0)
    usd_per_million_output_tokens: float = Field(0.0, ge=0)


class Rubric(Table):
    """A judge as its file describes it."""

    url: str
    model: str = Field(min_length=1)
    criteria: dict[str, Criterion]
    scale: tuple[int, int] = (0, 10)
    pass_at: float = Field(
        0.5, gt=0, le=1, description="Correct from this weighted mean on, 0 and 1 being the scale's ends."
    )
    instruction: str = Field("", description="What else the judge should know.")
    show_reference: bool = Field(True, description="Whether it sees the reference answer.")
    json_schema: bool = Field(False, description="Let the server allow no other form of reply (vLLM, OpenAI).")
    tries: int = Field(3, ge=1, le=20, description="Replies asked for until one can be read.")
    max_tokens: int = Field(1024, ge=1, le=10**6, description="Of a reply.")
    temperature: float = Field(0.0, ge=0, le=10)
    budget: Budget = Budget()
    price: Price = Price()

    @property
    def digest(self) -> str:
        """Of what the judge is asked. Weights and the threshold are not in it: they are applied to what it said."""
        asked = [
            {name: one.question for name, one in self.criteria.items()},
            self.scale, self.instruction, self.show_reference, self.temperature,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    def mean(self, scores: dict[str, float]) -> float:
        """The weighted mean of the criteria, 0 and 1 being the scale's ends."""
        low, high = self.scale
        total = sum(one.weight for one in self.criteria.values())
        return sum(one.weight * (scores[name] - low) / (high - low) for name, one in self.criteria.items()) / total


def read_rubric(name: str) -> Rubric:
    """The judge of `judge:FILE.toml`; ConfigError says which key of which file is wrong."""
    path = file_of(name)
    where = f"rewards.verifier (--verifier) = {name!r}"
    if path.suffix != ".toml" or not path.is_file():
        raise ConfigError(f"{where}: there is no such file.", remedy="Name a TOML file: judge:rubric.toml.")
    tree = read_toml(path)
    if not tree.get("criteria"):
        raise ConfigError(f"{path}: criteria: a rubric needs at least one.", remedy=f"Write\n{EXAMPLE}")
    try:
        rubric = Rubric.model_validate(with_tuple(tree))
    except ValidationError as error:
        raise refused(path, error) from None
    check(rubric, path)
    return rubric


def file_of(name: str) -> Path:
    return Path(name.removeprefix(PREFIX)).expanduser()


def with_tuple(tree: dict[str, Any]) -> dict[str, Any]:
    """TOML has lists only."""
    return {**tree, "scale": tuple(tree["scale"])} if isinstance(tree.get("scale"), list) else tree


def check(rubric: Rubric, path: Path) -> None:
    if not is_http(rubric.url):
        raise ConfigError(
            f"{path}: url = {rubric.url!r}: is no http address.", remedy='Write it as "http://127.0.0.1:8000/v1".'
        )
    low, high = rubric.scale
    if low >= high:
        raise ConfigError(f"{path}: scale = [{low}, {high}]: has no room.", remedy="The lower end first: [0, 10].")
    for name in rubric.criteria:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: criteria.{name!r}: is no name.", remedy="Use letters, digits and _, a letter first."
            )
    price = rubric.price
    if rubric.budget.max_usd and not price.usd_per_million_input_tokens + price.usd_per_million_output_tokens:
        raise ConfigError(
            f"{path}: budget.max_usd = {rubric.budget.max_usd}: nothing has a price.",
            remedy="Set price.usd_per_million_input_tokens and price.usd_per_million_output_tokens.",
        )


def refused(path: Path, error: ValidationError) -> ConfigError:
    """The first thing that is wrong, with its key and value."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{path}: {key}: no such key.", remedy=f"Known are {', '.join(known_keys())}.")
    if first["type"] == "missing":
        return ConfigError(f"{path}: {key}: is missing.", remedy="Add it.")
    return ConfigError(f"{path}: {key} = {first['input']!r}: {first['msg'].lower()}.", remedy="Correct it.")


def known_keys() -> list[str]:
    keys = []
    for name, field in Rubric.model_fields.items():
        inner = field.annotation
        if name == "criteria":
            keys += [f"criteria.NAME.{one}" for one in Criterion.model_fields]
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += [f"{name}.{one}" for one in inner.model_fields]
        else:
            keys.append(name)
    return keys
