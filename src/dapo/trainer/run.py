"""A run: its parts, its progress, and the lines that it writes into its folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dapo.checkpoints.sharded import Background
from dapo.config.schema import Config
from dapo.data.encoded import EncodedSet, OrderedSource
from dapo.data.mixture.source import MixtureSource
from dapo.distributed.world import ALONE, World
from dapo.files import append_line
from dapo.learner.critic import HeldOutFit, has_stopped_rising
from dapo.learner.learner import Learner
from dapo.models.policy import Policy
from dapo.report.rollouts.pieces import TokenPieces
from dapo.rewards import VerifierPool, VerifierPools
from dapo.rewards.parts import PartsJudge
from dapo.rollout.engine import Engine
from dapo.rollout.episodes import EpisodeEngine
from dapo.sampling.collect import Collector
from dapo.sampling.dynamic import AcceptanceRate, ProblemSource, SampledGroups, SamplingState
from dapo.sampling.predictive import Posteriors
from dapo.sampling.state import collector_from_state, collector_to_state, groups_from_state, groups_to_state
from dapo.tracking.metrics import check_declared, finite
from dapo.trainer.budget import RunBudget
from dapo.trainer.claim import release
from dapo.trainer.interrupt import check_stop
from dapo.trainer.observer import Observer
from dapo.types import Judge
from dapo.waiting.registry import waiting


@dataclass(slots=True)
class Run:
    """Everything a run consists of. `trainer.loop.train` is what happens with it."""

    config: Config
    folder: Path
    learner: Learner
    engine: Engine
    judge: Judge
    pool: VerifierPool | VerifierPools  # this rank's own verifiers
    parts: PartsJudge | None  # with the further parts of the reward, where there are any; training alone asks it
    collector: Collector
    problems: EncodedSet
    eval_sets: list[EncodedSet]
    ordered: OrderedSource | MixtureSource
    source: ProblemSource  # what prompts are drawn from: the ordered one, or with selection on top of it
    posteriors: Posteriors
    sampling: SamplingState
    observers: Sequence[Observer]
    budget: RunBudget
    world: World = ALONE
    step: int = 0  # steps done
    is_stopping: bool = False  # asked to stop by a signal
    value_steps: int = 0  # steps of value pretraining done
    held_out_fits: list[HeldOutFit] = field(default_factory=list)  # of the critic, one per such step
    saved: str = ""  # name of the newest checkpoint
    started: float = field(default_factory=time.monotonic)
    token_pieces: TokenPieces | None = None
    _step_began: float = 0.0
    _boundary: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None
    background: Background | None = None  # writes checkpoints of a sharded run

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    @property
    def pretrain_steps(self) -> int:
        """Steps of value pretraining this run has at most before its first own step."""
        critic = self.config.algorithm.critic
        if self.learner.critic is None or critic.path is not None:
            return 0
        return math.ceil(critic.pretrain_responses / self.config.responses_per_step)

    @property
    def is_pretraining(self) -> bool:
        """Until the responses are used up, every problem was seen, or the critic's fit to new ones stops improving."""
        is_over = self.ordered.has_seen_all or has_stopped_rising(self.held_out_fits)
        return self.value_steps < self.pretrain_steps and not is_over

    @property
    def is_complete(self) -> bool:
        """All steps done, or the budget spent."""
        return self.step >= self.config.train.steps or self.budget.is_spent

    def remaining_steps(self) -> Iterator[int]:
        while not self.is_complete and not self.world.any(self.is_stopping):
            yield self.step + 1

    def remaining_value_steps(self) -> Iterator[int]:
        while self.is_pretraining and not self.budget.is_spent:
            yield self.value_steps + 1

    def is_due(self, every_steps: int, step: int) -> bool:
        return every_steps > 0 and step % every_steps == 0

    def is_recorded(self, step: int, generated_tokens: int) -> bool:
        """Whether this step's rollouts are recorded: every so many steps, and the first and last step.

        train.steps or the budget of tokens tell which step is the last; a budget of minutes does not.
        """
        every = self.config.records.every_steps
        is_last = step == self.config.train.steps or self.budget.ends_with(generated_tokens)
        return self.is_due(every, step) or (every > 0 and (step == 1 or is_last))

    def evaluation_is_due(self) -> bool:
        """Before the first step, every so many steps, and after the last."""
        every = self.config.eval.every_steps
        return every > 0 and (self.step % every == 0 or self.is_complete)

    # -------------------------------------------------------------- a step, and what sampling changes in it

    @property
    def version(self) -> int:
        """The version of the weights: how many updates they have had."""
        return self.learner.updates

    def begin_step(self) -> None:
        """Save what sampling changes, so that an interrupted step can be rolled back. What is counted begins anew."""
        self._step_began = time.perf_counter()
        self._boundary = self.sampling_state()
        self.collector.journal.version = self.version
        self.engine.take_drafted()
        self.collector.take_spent()
        if isinstance(self.engine, EpisodeEngine):
            self.engine.waited_s()

    def roll_back_step(self) -> None:
        """After interrupted sampling: restore the state at the last step boundary. The weights have not changed."""
        if self._boundary is not None:
            self.restore_sampling(*self._boundary)
            self._boundary = None

    def publish(self) -> None:
        """Load the newest weights into the engine."""
        self.engine.load_weights(self.learner.publish(), version=self.version)

    def end_step(self, step: int, sampled: SampledGroups) -> None:
        """The updates are done, and the step can no longer be rolled back. Posteriors count its groups."""
        self.step = step
        self._boundary = None
        if self.config.keeps_posteriors:
            for group in sampled.resolved:
                self.posteriors.observe(group)
        for message in sampled.events:
            self.event("sampling", message)

    def timing(self, sampled: SampledGroups) -> dict[str, float]:
        """Seconds of the step so far, and its throughput."""
        took, spent = time.perf_counter() - self._step_began, self.collector.take_spent()
        tokens = sampled.accounting.generated_tokens
        metrics = {"timing.rollout_s": sampled.seconds, "timing.verdicts_s": spent.verdicts}
        if isinstance(self.engine, EpisodeEngine):  # few responses may be many episodes, whose environments work
            metrics["timing.environments_s"] = self.engine.waited_s()
        else:
            metrics["timing.tail_s"] = spent.tail
        return metrics | {"timing.step_s": took, "timing.tokens_per_s": tokens / took}

    def drafts(self) -> dict[str, float]:
        """Tokens that were drafted and accepted since this was asked last, by all ranks; {} without drafting."""
        if not self.config.rollout.draft_tokens:
            return {}
        drafted, accepted = zip(*self.world.gather(self.engine.take_drafted()), strict=True)
        return {"engine/drafted": sum(drafted), "engine/accepted": sum(accepted)}

    def end_value_step(self, value_steps: int, fit: HeldOutFit) -> None:
        """A step of value pretraining is done and can no longer be rolled back."""
        self.value_steps = value_steps
        self.held_out_fits.append(fit)
        self._boundary = None

    def sampling_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What sampling the next step depends on, without the weights."""
        held, tensors = groups_to_state(self.sampling.held, "held")
        carried, more = groups_to_state(self.sampling.carried, "carried")
        in_flight, most = collector_to_state(self.collector)
        state = {
            "order": self.ordered.state(),
            "acceptance": asdict(self.sampling.acceptance),
            "held": held,
            "carried": carried,
            "in_flight": in_flight,
            "posteriors": self.posteriors.to_state(),
        }
        return state, tensors | more | most

    def restore_sampling(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        problems = self.problems.by_id
        self.ordered.restore(state["order"])
        self.collector.forget_all()
        self.sampling = SamplingState(
            AcceptanceRate(**state["acceptance"]),
            groups_from_state(state["held"], tensors, problems, "held"),
            groups_from_state(state["carried"], tensors, problems, "carried"),
            collector_from_state(self.collector, state["in_flight"], tensors, problems),
        )
        prompts = {
            problem.id: prompt for problem, prompt in zip(self.problems.problems, self.problems.prompts, strict=True)
        }
        finished = [(group.problem.id, group.prompt_tokens) for group in (*self.sampling.held, *self.sampling.carried)]
        under_way = [(group.problem.id, group.prompt) for group in self.sampling.pending]
        own = [(problem, prompt) for problem, prompt in finished + under_way if not problems[problem].environment]
        if other := [problem for problem, prompt in own if prompts[problem] != prompt]:
            raise ValueError(f"sampling: the prompt of problem {other[0]} is another one")
        self.posteriors.counts = Posteriors.from_state(state["posteriors"]).counts

    # -------------------------------------------------------------- what a run writes and reports

    def write_line(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to a file of the run; only the first rank writes."""
        if self.world.is_first:
            append_line(self.folder / name, line)

    def track(self, metrics: dict[str, float]) -> None:
        check_declared(metrics)
        metrics = finite(metrics)
        self.write_line("metrics.jsonl", metrics)
        self.budget.spend(metrics)
        if self.budget.is_spent:
            self.event("budget", self.budget.spent)
        self.tell(lambda observer: observer.on_step(metrics))

    def event(self, kind: str, message: str) -> None:
        record = {"step": self.step, "kind": kind, "message": message, "timing.unix_s": time.time()}
        self.write_line("events.jsonl", record)
        self.tell(lambda observer: observer.on_event(kind, message))

    def tell(self, call: Callable[[Observer], None]) -> None:
        """Call every observer; one that does not return is named."""
        for observer in self.observers:
            with waiting(f"callback {type(observer).__name__}"):
                call(observer)

    def on_groups(self, known: int, wanted: int) -> None:
        check_stop(self)
        self.tell(lambda observer: observer.on_groups(known, wanted))

    def on_update(self, done: int, total: int) -> None:
        self.tell(lambda observer: observer.on_update(done, total))

    def close(self) -> None:
        if spent := self.pool.spent():
            self.event("judge", spent)
        release(self.folder)
        self.pool.close()
        if self.parts is not None:
            self.parts.close()
        if self.background is not None:
            self.background.leave()
        self.engine.close()
