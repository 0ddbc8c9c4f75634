"""Evaluate a model on a problem set, outside of a run: shared by `dapo eval` and `dapo data probe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dapo.checkpoints.load import newest_intact
from dapo.config.model_shapes import model_location
from dapo.data.problems import ProblemSet, load_problems
from dapo.data.prompts import EncodedProblem, PromptFormat, encode_problems
from dapo.environments.builtin import check_environment
from dapo.environments.pool import EnvironmentPool
from dapo.errors import ConfigError
from dapo.evaluation.journal import AnswerJournal
from dapo.evaluation.runner import Answered, Answers, evaluate
from dapo.models.context import refuse_short_context
from dapo.models.device import choose_device, choose_dtype
from dapo.models.load import load_policy
from dapo.models.policy import Policy
from dapo.rewards import VerifierPool
from dapo.rewards.check import check_call, check_verifier
from dapo.rollout.engine import Engine, NoiseKey, SamplingParams
from dapo.rollout.episodes import EpisodeEngine, opened
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.plain.engine import PlainEngine
from dapo.rollout.turn_marks import TurnMarks
from dapo.rollout.vllm.core import require_vllm
from dapo.rollout.vllm.engine import VllmEngine
from dapo.types import Problem

ENGINES: dict[str, type[LocalEngine] | type[PlainEngine] | type[VllmEngine]] = {
    "local": LocalEngine,
    "plain": PlainEngine,
    "vllm": VllmEngine,
}


@dataclass(frozen=True, slots=True)
class OfflineEval:
    """Which model answers which problems, how often and how."""

    model: str  # Hugging Face folder, hub name, run folder, or "bundled"
    data: str
    use: Literal["train", "eval"]
    k: int
    temperature: float
    top_p: float
    max_response_tokens: int
    max_prompt_tokens: int
    template: str
    chat: bool
    verifier: str
    seed: int
    concurrent: int
    device: str
    engine: str = "local"
    environment: str = ""  # answers the model's turns; none: a response is one turn
    environment_key: str = "--environment"  # where that is said
    max_turns: int = 8

    def settings(self, location: str, problems: ProblemSet) -> dict[str, Any]:
        """What decides the responses and their verdicts; what only changes the speed is left out."""
        return {
            "model": location, "data": problems.sha256, "k": self.k, "temperature": self.temperature,
            "top_p": self.top_p, "max_response_tokens": self.max_response_tokens, "template": self.template,
            "chat": self.chat, "seed": self.seed, "verifier": self.verifier,
        } | self._unusual()  # fmt: skip

    def _unusual(self) -> dict[str, Any]:
        """What most evaluations have not, so that their files stay what they are."""
        turns = {"environment": self.environment, "max_turns": self.max_turns} if self.environment else {}
        return turns | ({"engine": self.engine} if self.engine != "local" else {})


@dataclass(frozen=True, slots=True)
class OfflineAnswers:
    """Every problem whose prompt fits, with its k answers."""

    problems: list[Problem]
    answers: Answers
    n_dropped: int  # prompts over the limit


def run_offline_eval(
    plan: OfflineEval,
    *,
    journal: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> OfflineAnswers:
    """Answer every problem k times. A journal keeps each answer at once, and a second attempt starts from them.

    What is cheap to refuse is refused before the model is loaded.
    """
    refuse_plan(plan)
    prompt, location = PromptFormat(plan.template, plan.chat), model_of(plan.model)
    found = load_problems(plan.data, verifier=plan.verifier, use=plan.use)
    file = AnswerJournal(journal, plan.settings(location, found)) if journal is not None else None
    problems = [replace(problem, environment=plan.environment) for problem in found]
    with answering(plan, location, {problem.id: problem for problem in problems}) as (engine, judge, policy):
        encoded, drops = encode_problems(problems, prompt, policy.tokenizer, max_prompt_tokens=plan.max_prompt_tokens)

        def on_answer(answer: Answered, done: int, total: int) -> None:
            if file is not None:
                file.add(answer)
            on_progress(done, total)

        with file or nullcontext():
            answers = evaluate(
                engine,
                judge,
                [item.problem for item in encoded],
                [opening(plan, engine, item, prompt) for item in encoded],
                k=plan.k,
                max_new_tokens=plan.max_response_tokens,
                seed=plan.seed,
                known=file.known if file is not None else {},
                on_answer=on_answer,
            )
    return OfflineAnswers([item.problem for item in encoded], answers, len(drops))


def refuse_plan(plan: OfflineEval) -> None:
    """What needs neither model nor problems to be refused."""
    if not 0 < plan.top_p <= 1:
        raise ConfigError(f"--top-p {plan.top_p}: must lie above 0 and at most 1.")
    if plan.engine not in ENGINES:
        raise ConfigError(f"--engine {plan.engine}: no such engine.", remedy=f"Use {' or '.join(ENGINES)}.")
    if plan.engine == "vllm":
        require_vllm()
    if plan.environment:
        check_environment(plan.environment, plan.environment_key)
    check_verifier(plan.verifier)


@contextmanager
def answering(
    plan: OfflineEval, location: str, problems: Mapping[str, Problem]
) -> Iterator[tuple[Engine, VerifierPool, Policy]]:
    """The model on its engine, with the environment where the plan has one, and who judges. By id, `problems`."""
    device, first = choose_device(plan.device), next(iter(problems.values()))
    with VerifierPool(plan.verifier) as judge, environments_of(plan) as environments:
        check_call(judge, first.answer, first.for_verifier())
        policy = load_policy(location, dtype=choose_dtype("auto", device), device=device)
        refuse_short_context(
            policy,
            max_prompt_tokens=plan.max_prompt_tokens,
            max_response_tokens=plan.max_response_tokens,
            names=("--max-prompt-tokens ", "--max-response-tokens "),
        )
        if environments is not None:
            marks = TurnMarks(policy.tokenizer, chat=plan.chat, eos_ids=policy.eos_ids, key=plan.environment_key)
        engine: Engine = ENGINES[plan.engine](
            policy,
            sampling=SamplingParams(temperature=plan.temperature, top_p=plan.top_p),
            max_concurrent=plan.concurrent,
            max_tokens=plan.max_prompt_tokens + plan.max_response_tokens,
        )
        if environments is not None:
            engine = EpisodeEngine(engine, environments, marks, problems, max_turns=plan.max_turns)
        yield engine, judge, policy


@contextmanager
def environments_of(plan: OfflineEval) -> Iterator[EnvironmentPool | None]:
    if not plan.environment:
        yield None
        return
    with closing(EnvironmentPool([plan.environment], keys={plan.environment: plan.environment_key})) as pool:
        yield pool


def opening(plan: OfflineEval, engine: Engine, item: EncodedProblem, prompt: PromptFormat) -> tuple[int, ...]:
    """The prompt of all responses to a problem, with what its environment adds."""
    key = NoiseKey(plan.seed, "eval", item.problem.id, 0, 0)
    return opened(engine, key, item.tokens, prompt, max_prompt_tokens=plan.max_prompt_tokens)


def model_of(model: str) -> str:
    """Where the model is; of a run, that of its newest intact checkpoint."""
    folder = Path(model)
    if not (folder / "config.toml").is_file():
        return model_location(model)
    checkpoint, _ = newest_intact(folder / "checkpoints")
    if checkpoint is None:
        raise ConfigError(f"--model {model}: this run has no intact checkpoint.", remedy="Name a model folder.")
    return str(checkpoint / "model")
