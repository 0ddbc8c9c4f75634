"""The schema of a checkpoint's `state.json`. A manifest only proves that nobody changed the file.

References to problems and tensors are checked where they are restored: `fits`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from dapo.errors import CheckpointError
from dapo.types import StopReason, Verdict

Count = Annotated[int, Field(ge=0, lt=2**53)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
REMEDY = (
    "Copy the run anew from where it was made, or delete this checkpoint: the run then resumes from the one before."
)


class StatePart(BaseModel):
    """Strictly typed; unknown keys belong to another version and are ignored."""

    model_config = ConfigDict(strict=True)


class Order(StatePart):
    n_problems: Count
    seed: int
    epoch: Count
    position: Count
    put_off: list[Count]
    step: list[Count]


class MixtureOrder(StatePart):
    n_problems: Count
    turns: list[Count]
    sources: dict[str, Order]


def _order_kind(value: Any) -> str:
    return MIXTURE if isinstance(value, dict) and "sources" in value else PLAIN


PLAIN, MIXTURE = "(one set)", "(mixture)"  # pydantic has them in the place of an error
AnyOrder = Annotated[Annotated[Order, Tag(PLAIN)] | Annotated[MixtureOrder, Tag(MIXTURE)], Discriminator(_order_kind)]


class Acceptance(StatePart):
    accepted: Weight
    tried: Positive
    decay: Positive


class CompletionState(StatePart):
    stop_reason: Annotated[StopReason, Field(strict=False)]
    text: str


class JudgementState(StatePart):
    verdict: Annotated[Verdict, Field(strict=False)]
    value: float
    extracted: str | None = None
    reference: str = ""
    seconds: float = 0.0
    message: str = ""
    graded: bool = False


class WholeGroup(StatePart):
    problem: str
    visit: Count
    prompt: list[Token]
    completions: list[CompletionState]
    judgements: list[JudgementState]


class OpenGroup(StatePart):
    number: Count
    overtaken: Count = 0
    problem: str
    visit: Count
    prompt: list[Token]
    completions: list[CompletionState | None]
    judgements: list[JudgementState | None]


class Wanted(StatePart):
    id: Count
    prompt: list[Token]
    key: dict[str, Any]
    max_new_tokens: Count
    group: Count


class InEngine(StatePart):
    tick: Count
    version: Count
    n_submitted: Count
    n_running: Count
    is_paused: bool
    requests: list[Wanted]
    order: list[Count]
    lengths: list[Count]


class AnswerState(StatePart):
    text: str
    role: str
    called: bool
    failed: bool
    judgement: None = None


class EpisodeState(StatePart):
    said: list[str]
    answers: list[AnswerState]
    due: Count | None


class Episodes(StatePart):
    """An engine of episodes, over another one."""

    tick: Count
    n_submitted: Count
    is_paused: bool
    requests: list[Wanted]
    order: list[Count]
    lengths: list[Count]
    episodes: list[EpisodeState]
    inner: InEngine


def _engine_kind(value: Any) -> str:
    return EPISODES if isinstance(value, dict) and "inner" in value else ENGINE


ENGINE, EPISODES = "(engine)", "(episodes)"
TAGS = (PLAIN, MIXTURE, ENGINE, EPISODES)
AnyEngine = Annotated[
    Annotated[InEngine, Tag(ENGINE)] | Annotated[Episodes, Tag(EPISODES)], Discriminator(_engine_kind)
]


class InFlight(StatePart):
    engine: AnyEngine
    tick: Count
    n_submitted: Count
    groups: list[OpenGroup]
    due: list[Annotated[list[Count], Field(min_length=3, max_length=3)]]


class Sampling(StatePart):
    order: AnyOrder
    acceptance: Acceptance
    held: list[WholeGroup]
    carried: list[WholeGroup]
    in_flight: InFlight
    posteriors: dict[str, Annotated[list[Weight], Field(min_length=2, max_length=2)]]


class ExplainedState(StatePart):
    tokens: Count
    ret: float
    ret_squared: float
    miss: float
    miss_squared: float


class HeldOutFitState(StatePart):
    problems: Count
    explained: ExplainedState


class OrderAlone(StatePart):
    order: AnyOrder


class ModelState(StatePart):
    """Saved with a model that no run can resume from."""

    updates: Count
    bad_updates: Count
    data: str
    sampling: OrderAlone


class RunState(StatePart):
    """What a run resumes from; keys with a default were added in later versions."""

    config: dict[str, Any]
    updates: Count
    bad_updates: Count
    bad_critic_updates: Count = 0
    tokens_per_microbatch: Annotated[int, Field(ge=1)] | None = None
    recomputes_all: bool = False
    value_steps: Count = 0
    held_out_fits: list[HeldOutFitState] = []
    foretold: list[HeldOutFitState] = []  # what `held_out_fits` was called
    data: str
    sampling: Sampling


def check_state(path: Path, state: Any) -> dict[str, Any]:
    """The state as it was read, once it is known to be one; CheckpointError names the first value that is not."""
    is_alone = isinstance(state, dict) and state.get("resumable", True) is False
    try:
        (ModelState if is_alone else RunState).model_validate(state)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"] if part not in TAGS) or "the whole"
        raise no_state(path, f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    assert isinstance(state, dict), "both are tables"
    return state


@contextmanager
def fits(path: Path) -> Iterator[None]:
    """While a state is restored: CheckpointError for problems, tensors or positions that do not exist."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise no_state(path, f"{type(error).__name__}: {error}") from error


def no_state(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: is not what a run writes: {why}.", remedy=REMEDY)
