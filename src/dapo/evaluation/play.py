"""One episode, told turn by turn: the model's turns come from its engine, or from whoever sits at the terminal.

The model draws what `dapo eval` would draw for its first response with the same seed and sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from dapo.data.prompts import PromptFormat, encode_problems
from dapo.environments.conversation import Answer, Conversation
from dapo.evaluation.offline import OfflineEval, answering, environments_of, model_of, opening, refuse_plan
from dapo.rewards import VerifierPool
from dapo.rollout.engine import Finished, NoiseKey, Request
from dapo.rollout.episodes import Episode, EpisodeEngine, seed_of
from dapo.types import Judgement, Problem, StopReason, engine_fault


@dataclass(frozen=True, slots=True)
class Spoken:
    """What one side said."""

    who: Literal["prompt", "model", "you", "environment"]
    text: str
    called: bool = False  # a tool, by the turn before
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that is over; without a judgement it was given up."""

    spoken: tuple[Spoken, ...]
    stop_reason: StopReason | None = None
    judgement: Judgement | None = None
    judged_by: str = ""  # the environment, or the verifier's name
    n_tokens: int | None = None  # of the model


class Told:
    """Hands on what was said, each thing once and as it comes."""

    def __init__(self, listen: Callable[[Spoken], None], who: Literal["model", "you"]) -> None:
        self.listen, self.who = listen, who
        self.spoken: list[Spoken] = []

    def tell(self, *new: Spoken) -> None:
        for one in new:
            self.spoken.append(one)
            self.listen(one)

    def catch_up(self, said: Sequence[str], answers: Sequence[Answer]) -> None:
        """Of an episode so far, what is new after the prompt."""
        self.tell(*turns_of(said, answers, self.who)[len(self.spoken) - 1 :])


def turns_of(said: Sequence[str], answers: Sequence[Answer], who: Literal["model", "you"]) -> list[Spoken]:
    """Both sides in turn. An answer without a text ends the episode, and says nothing."""
    turns = []
    for text, answer in zip_longest(said, answers):
        turns.append(Spoken(who, text))
        if answer is not None and answer.text:
            turns.append(Spoken("environment", answer.text, answer.called, answer.failed))
    return turns


def key_of(plan: OfflineEval, problem: Problem) -> NoiseKey:
    return NoiseKey(plan.seed, "eval", problem.id, 0, 0)


def shown(shape: PromptFormat, problem: Problem, added: str) -> Spoken:
    """What the model is asked, without the marks of a chat template."""
    if not shape.chat:
        return Spoken("prompt", shape.text(problem) + added)
    return Spoken("prompt", "\n\n".join(message["content"] for message in shape.chat_of(problem, added)))


def play(plan: OfflineEval, problem: Problem, shape: PromptFormat, listen: Callable[[Spoken], None]) -> Played:
    """The model's episode on a problem."""
    refuse_plan(plan)
    told, key = Told(listen, "model"), key_of(plan, problem)
    with answering(plan, model_of(plan.model), {problem.id: problem}) as (engine, judge, policy):
        (item,), _ = encode_problems([problem], shape, policy.tokenizer, max_prompt_tokens=plan.max_prompt_tokens)
        prompt = opening(plan, engine, item, shape)
        episodes: list[Episode] = []
        engine.submit([Request(0, prompt, key, plan.max_response_tokens, group=0)])
        added = ""
        if isinstance(engine, EpisodeEngine):
            episodes, added = engine.under_way(), engine.environments.opening(problem, seed_of(key))
        told.tell(shown(shape, problem, added))
        finished: list[Finished] = []
        while not finished:
            finished = engine.advance()
            for episode in episodes:
                told.catch_up(episode.said, episode.answers)
        ((_, completion),) = finished
        if len(told.spoken) == 1:
            told.tell(Spoken("model", completion.text))
        if completion.stop_reason is StopReason.ABORTED:
            judgement, by = engine_fault(problem), "engine"
        else:
            judgement, by = judged(
                plan, judge, problem, completion.answer, completion.stop_reason, completion.judgement
            )
        return Played(tuple(told.spoken), completion.stop_reason, judgement, by, completion.n_own)


def play_yourself(
    plan: OfflineEval,
    problem: Problem,
    shape: PromptFormat,
    listen: Callable[[Spoken], None],
    read: Callable[[], str | None],
) -> Played:
    """The same with turns that `read` gives; None gives up. No model is loaded."""
    refuse_plan(plan)
    told, seed = Told(listen, "you"), seed_of(key_of(plan, problem))
    with environments_of(plan) as environments, VerifierPool(plan.verifier) as judge:
        told.tell(shown(shape, problem, environments.opening(problem, seed) if environments is not None else ""))
        said: tuple[str, ...] = ()
        answers: tuple[Answer, ...] = ()
        while not (answers and answers[-1].is_over) and len(said) < plan.max_turns:
            if (text := read()) is None:
                return Played(tuple(told.spoken))
            said += (text,)
            if environments is None:
                answers += (Answer(),)
            else:
                ticket = environments.ask(Conversation("you", problem, seed, said, answers))
                answers += (environments.wait([ticket])[ticket],)
            told.catch_up(said, answers)
        reason = StopReason.EOS if answers[-1].is_over else StopReason.LENGTH
        judgement, by = judged(plan, judge, problem, said[-1], reason, answers[-1].judgement)
    return Played(tuple(told.spoken), reason, judgement, by)


def judged(
    plan: OfflineEval, judge: VerifierPool, problem: Problem, said: str, reason: StopReason, own: Judgement | None
) -> tuple[Judgement, str]:
    """The environment's score, or the verdict on the last turn; with whose it is."""
    if own is not None:
        return own, "environment"
    ticket = judge.submit(problem.task(said, reason))
    return judge.wait([ticket])[ticket], f"verifier {plan.verifier}"
