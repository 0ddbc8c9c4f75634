"""A run: its folder, its parts put together from a config, and its state in and out of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dapo.checkpoints.load import Checkpoint, newest_intact, read_checkpoint
from dapo.checkpoints.save import name_of, save_checkpoint
from dapo.checkpoints.sharded import Background, Part, deal_weights, has_slices, read_slices
from dapo.config.load import Resolved, flatten, resolve, to_toml
from dapo.config.model_shapes import model_location, shape_from_config
from dapo.config.plan import memory_of
from dapo.config.schema import Config
from dapo.data.order import ProblemOrder
from dapo.distributed.judge import SharedJudge
from dapo.distributed.shards import Sharding, whole_weights
from dapo.distributed.world import ALONE, World
from dapo.errors import CheckpointError, ConfigError, DiskError, EngineError
from dapo.models.critic import load_critic, save_critic
from dapo.models.load import checkpoint_tensors, load_policy, save_all_but_weights, save_policy
from dapo.models.policy import Policy, add_lora
from dapo.report.chunks import drop_after
from dapo.report.pieces import TokenPieces
from dapo.rewards import VerifierPool
from dapo.rollout.engine import Engine, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.plain.engine import PlainEngine
from dapo.rollout.shared import SharedEngine
from dapo.rollout.vllm import VllmEngine, require_vllm
from dapo.sampling.carry import CarryState
from dapo.sampling.collect import Collector, VerdictJournal
from dapo.sampling.dynamic import AcceptanceRate, Source
from dapo.sampling.predictive import Posteriors, PredictiveSource, counts_in
from dapo.sampling.state import (
    collector_from_state,
    collector_to_state,
    groups_from_state,
    groups_to_state,
    judgement_from_state,
    judgement_to_state,
)
from dapo.tracking.files import append_line, cut_back, read_lines, replace_file
from dapo.tracking.metrics import check_declared
from dapo.trainer.activations import checkpoint_layers
from dapo.trainer.interrupt import check_stop
from dapo.trainer.learner import Learner
from dapo.trainer.observer import Observer
from dapo.trainer.optimizer import Optimizer
from dapo.trainer.problems import EncodedSet, load_encoded
from dapo.trainer.records import token_pieces
from dapo.trainer.source import OrderedSource
from dapo.trainer.track import TrackerObserver
from dapo.trainer.value import ValueLearner
from dapo.types import Group, Judge

# Keys that may differ when a run goes on: they change what is written, when it ends and how fast, not what is learnt.
SAFE_TO_CHANGE = (
    "train.steps",
    "train.max_generated_tokens",
    "train.max_minutes",
    "train.tokens_per_microbatch",
    "train.gradient_checkpointing",
    "model.kernels",
    "train.max_bad_updates",
    "checkpoint.",
    "eval.",
    "rollouts.",
    "tracking.",
    "rewards.workers",
    "data.eval",
    "cluster.",
)


@dataclass(slots=True)
class Run:
    """Everything a run consists of. `trainer.loop.train` is what happens with it."""

    config: Config
    folder: Path
    learner: Learner
    engine: Engine
    judge: Judge
    pool: VerifierPool  # this rank's own judges
    collector: Collector
    problems: EncodedSet
    eval_sets: list[EncodedSet]
    ordered: OrderedSource
    source: Source  # the ordered one, or predictive selection on top of it
    posteriors: Posteriors
    fill: CarryState
    observers: Sequence[Observer]
    world: World = ALONE
    step: int = 0  # steps done
    is_stopping: bool = False  # asked to stop by a signal
    value_steps: int = 0  # steps of value pretraining done
    generated_tokens: int = 0  # written so far, value pretraining included
    seconds: float = 0.0  # of all steps so far, value pretraining included
    spent: str = ""  # the budget that is spent, in words
    saved: str = ""  # name of the newest checkpoint
    started: float = field(default_factory=time.monotonic)
    token_pieces: TokenPieces | None = None
    _boundary: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None
    _background: Background | None = None  # writes checkpoints of a sharded run

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    @property
    def pretrain_steps(self) -> int:
        """Steps of value pretraining this run has before its first own step."""
        critic = self.config.algorithm.critic
        return critic.pretrain_steps if self.learner.value is not None and critic.path is None else 0

    @property
    def is_pretraining(self) -> bool:
        return self.value_steps < self.pretrain_steps

    def remaining_steps(self) -> Iterator[int]:
        while not self.is_complete and not self.world.any(self.is_stopping):
            yield self.step + 1

    def remaining_value_steps(self) -> Iterator[int]:
        while self.is_pretraining and not self.is_spent:
            yield self.value_steps + 1

    @property
    def is_spent(self) -> bool:
        """The budget of tokens or minutes."""
        return bool(self.spent)

    @property
    def is_complete(self) -> bool:
        """All steps done, or the budget spent."""
        return self.step >= self.config.train.steps or self.is_spent

    def spend(self, *lines: Mapping[str, Any]) -> None:
        """Count what steps, or steps of value pretraining, took by their lines. The first rank's clock decides."""
        for line in lines:
            self.generated_tokens += int(line.get("tokens/generated", 0))
            self.seconds += float(line.get("timing.step_s", 0.0))
        train = self.config.train
        if train.max_minutes is not None and self.world.from_first(self.seconds) / 60 >= train.max_minutes:
            self.spent = f"train.max_minutes = {train.max_minutes:g} is spent"
        if train.max_generated_tokens is not None and self.generated_tokens >= train.max_generated_tokens:
            self.spent = f"train.max_generated_tokens = {train.max_generated_tokens} is spent"

    def is_due(self, every_steps: int, step: int) -> bool:
        return every_steps > 0 and step % every_steps == 0

    def on_fill(self, known: int, wanted: int) -> None:
        check_stop(self)
        for observer in self.observers:
            observer.on_fill(known, wanted)

    def on_update(self, done: int, total: int) -> None:
        for observer in self.observers:
            observer.on_update(done, total)

    # -------------------------------------------------------------- what a run writes

    def write_line(self, name: str, line: Mapping[str, Any]) -> None:
        """One line more in a file of the run; the first rank writes for all."""
        if self.world.is_first:
            append_line(self.folder / name, line)

    def track(self, metrics: dict[str, float]) -> None:
        check_declared(metrics)
        self.write_line("metrics.jsonl", metrics)
        self.spend(metrics)
        if self.spent:
            self.event("budget", self.spent)
        for observer in self.observers:
            observer.on_step(metrics)

    def event(self, kind: str, message: str) -> None:
        record = {"step": self.step, "kind": kind, "message": message, "timing.unix_s": time.time()}
        self.write_line("events.jsonl", record)
        for observer in self.observers:
            observer.on_event(kind, message)

    def close(self) -> None:
        self.pool.close()
        if self._background is not None:
            self._background.leave()
        if isinstance(self.engine, (VllmEngine, SharedEngine)):  # vLLM has process groups of its own
            self.engine.close()

    # -------------------------------------------------------------- checkpoint

    def evaluation_is_due(self) -> bool:
        """Before the first step, every so many steps, and after the last."""
        every = self.config.eval.every_steps
        return every > 0 and (self.step % every == 0 or self.is_complete)

    def publish(self) -> None:
        """The engine writes with the newest weights from now on."""
        self.engine.load_weights(self.learner.publish(), version=self.learner.updates)

    def end_step(self, step: int, resolved: Sequence[Group]) -> None:
        """The updates are done: the step cannot be taken back any more. Complete groups teach predictive selection."""
        self.step = step
        self._boundary = None
        if self.config.sampling.predictive:
            for group in resolved:
                self.posteriors.observe(group)

    def end_value_step(self, value_steps: int) -> None:
        """A step of value pretraining is done and cannot be taken back any more."""
        self.value_steps = value_steps
        self._boundary = None

    def sampling_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What the fill of the next step depends on, beside the weights."""
        held, tensors = groups_to_state(self.fill.held, "held")
        carried, more = groups_to_state(self.fill.carried, "carried")
        in_flight, most = collector_to_state(self.collector)
        state = {
            "order": self.ordered.order.state(),
            "acceptance": asdict(self.fill.acceptance),
            "held": held,
            "carried": carried,
            "in_flight": in_flight,
            "posteriors": self.posteriors.to_state(),
        }
        return state, tensors | more | most

    def restore_sampling(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        problems, train = self.problems.by_id, self.config.train
        self.ordered.order = ProblemOrder.restore(state["order"], n_problems=len(problems), seed=train.seed)
        self.collector.forget_all()
        self.fill = CarryState(
            AcceptanceRate(**state["acceptance"]),
            groups_from_state(state["held"], tensors, problems, "held"),
            groups_from_state(state["carried"], tensors, problems, "carried"),
            collector_from_state(self.collector, state["in_flight"], tensors, problems),
        )
        self.posteriors.counts = Posteriors.from_state(state["posteriors"]).counts

    def begin_step(self) -> None:
        """Remember what sampling changes, so that a step cut short can be taken back."""
        self._boundary = self.sampling_state()

    def take_back_step(self) -> None:
        """After an interrupted fill: the state at the last step boundary, weights untouched."""
        if self._boundary is not None:
            self.restore_sampling(*self._boundary)
            self._boundary = None

    def save(self) -> None:
        """Write the state at this step boundary: a resumed run goes on as if it had never stopped.

        Any number of ranks can go on from it. Of a sharded run every rank writes its part, beside what comes next;
        else the first rank writes for all, and then it goes on.
        """
        name = name_of(self.step, self.value_steps if self.is_pretraining else None)
        is_resumable = self.config.checkpoint.resumable
        if self.saved == name or not (is_resumable or self.step):
            return
        state, tensors = self.state()
        if not is_resumable:
            state, tensors = told(state), {}
        if self.learner.is_sharded and self.config.checkpoint.format == "auto":
            self.save_sharded(name, state, tensors)
        else:
            self.save_whole(name, state, tensors)
        self.saved = name

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What the next step depends on beside model and optimizer."""
        sampling, tensors = self.sampling_state()
        state = {
            "config": flatten(self.config.model_dump(mode="json")),
            "updates": self.learner.updates,
            "bad_updates": self.learner.bad_updates,
            "tokens_per_microbatch": self.learner.tokens_per_microbatch,
            "recomputes_all": self.learner.recomputes_all,
            "value_steps": self.value_steps,
            "data": self.problems.checksum,
            "sampling": sampling,
        }
        return state, tensors

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By what their tensors' names begin with in a checkpoint."""
        value = self.learner.value
        return {"optimizer.": self.learner.optimizer} | (
            {} if value is None else {"critic_optimizer.": value.optimizer}
        )

    @property
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """model/ holds the merged weights; going on needs the adapter itself."""
        return self.learner.optimizer.parameters if self.config.model.lora.rank else {}

    def save_whole(self, name: str, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if self.config.checkpoint.resumable:
            for prefix, optimizer in self.optimizers.items():
                tensors |= {f"{prefix}{key}": tensor for key, tensor in optimizer.tensors().items()}
            for key, parameter in self.adapter.items():
                tensors[f"adapter.{key}"] = self.learner.optimizer.whole(key, parameter.detach())
        critic = None if self.learner.value is None else whole_weights(self.learner.value.critic)

        def write_model(folder: Path) -> None:
            save_policy(self.learner.whole, folder)
            if self.learner.value is not None:
                save_critic(self.learner.value.critic, folder / "critic", critic)

        root, keep = self.folder / "checkpoints", self.config.checkpoint.keep
        failure = None
        if self.world.is_first:
            try:
                save_checkpoint(root, name, write_model=write_model, tensors=tensors, state=state, keep=keep)
            except DiskError as error:
                failure = [error.message, error.remedy]
        failure = self.world.from_first(failure)  # all ranks end together, none waits for one that is gone
        if failure is not None:
            raise DiskError(failure[0], remedy=failure[1])

    def save_sharded(self, name: str, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Copy what belongs into it to the host; writing goes on in the background."""
        slices: dict[str, torch.Tensor] = {}
        if self.config.checkpoint.resumable:
            for prefix, optimizer in self.optimizers.items():
                for key, tensor in optimizer.parts().items():
                    (slices if tensor.dim() else tensors)[f"{prefix}{key}"] = tensor
            for key, parameter in self.adapter.items():
                slices[f"adapter.{key}"] = self.learner.optimizer.on_host(key, parameter.detach())
        weights = dict(checkpoint_tensors(self.learner.whole))
        own = deal_weights({key: tensor.nbytes for key, tensor in weights.items()}, self.world.size)[self.world.rank]
        value = self.learner.value
        critic = None if value is None else whole_weights(value.critic, is_kept=self.world.is_first)

        def write_model(folder: Path) -> None:
            save_all_but_weights(self.learner.whole, folder)
            if value is not None:
                save_critic(value.critic, folder / "critic", critic)

        part = Part(
            slices=slices,
            weights={key: weights[key].to("cpu", copy=True).contiguous() for key in own},
            tensors={key: tensor.detach().cpu().clone() for key, tensor in tensors.items()},
            state=state,
            write_model=write_model,
        )
        if self._background is None:
            self._background = Background(self.world)
        self._background.save(self.folder / "checkpoints", name, part, keep=self.config.checkpoint.keep)

    def finish_saving(self) -> None:
        """Until everything that was to be saved is on disk."""
        if self._background is not None:
            self._background.wait()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint's state; weights are already loaded from its model folder."""
        state = checkpoint.state
        if state["data"] != self.problems.checksum:
            raise CheckpointError(
                f"{checkpoint.folder}: was trained on other problems than data.train = {self.config.data.train} holds.",
                remedy="Restore the file, or start a new run.",
            )
        self.step, self.saved = checkpoint.step, checkpoint.folder.name
        self.value_steps = state.get("value_steps", self.pretrain_steps)  # older checkpoints came after the stage
        self.learner.updates, self.learner.bad_updates = state["updates"], state["bad_updates"]
        if state["config"].get("train.tokens_per_microbatch") == self.config.train.tokens_per_microbatch:
            self.learner.tokens_per_microbatch = state.get("tokens_per_microbatch")  # what memory taught it
            self.learner.recomputes_all = state.get("recomputes_all", False)
        policy = self.learner.optimizer
        for name, tensor in with_prefix(checkpoint.tensors, "adapter.").items():
            policy.assign(name, policy.part_of(name, tensor))
        slices = read_slices(checkpoint.folder, self.sharded_like) if has_slices(checkpoint.folder) else {}
        for name, part in with_prefix(slices, "adapter.").items():
            policy.assign(name, part)
        for prefix, optimizer in self.optimizers.items():
            whole, parts = with_prefix(checkpoint.tensors, prefix), with_prefix(slices, prefix)
            optimizer.load_parts(parts | {key: optimizer.part_of_key(key, tensor) for key, tensor in whole.items()})
        self.publish()
        self.collector.journal.version = self.learner.updates
        self.restore_sampling(state["sampling"], checkpoint.tensors)

    def sharded_like(self, key: str) -> torch.Tensor | None:
        """The parameter whose state or adapter is stored under that name."""
        prefix = next((prefix for prefix in self.optimizers if key.startswith(prefix)), None)
        if prefix is None:
            return self.learner.optimizer.parameters.get(key.removeprefix("adapter."))
        return self.optimizers[prefix].parameters.get(key.removeprefix(prefix).partition(".")[2])


def told(state: dict[str, Any]) -> dict[str, Any]:
    """What of a run's state is kept beside a model alone: what its card and its record tell."""
    kept = {key: state[key] for key in ("updates", "bad_updates", "data")}
    return {**kept, "sampling": {"order": state["sampling"]["order"]}, "resumable": False}


def with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# ------------------------------------------------------------------ starting and going on


def start_run(resolved: Resolved, folder: Path, observers: Sequence[Observer] = (), *, world: World = ALONE) -> Run:
    """A new run in a new folder."""
    if world.is_first:
        refuse_existing(folder)
    return begin_run(resolved, folder, observers, world=world)


def refuse_existing(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: exists and is no folder.", remedy="Name a new folder.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"--out {folder}: exists already.",
            remedy=f"Go on with it: dapo resume {folder}. Or name another folder.",
        )


def begin_run(resolved: Resolved, folder: Path, observers: Sequence[Observer] = (), *, world: World = ALONE) -> Run:
    """A run in a folder that is known to be new; its own problems may lie there already."""
    config = resolved.config
    world.barrier()  # the first rank has looked whether it is new
    is_new = world.is_first and not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made: {error.strerror}.", remedy="Name another folder.") from None
    try:
        run = assemble(config, folder, model_location(config.model.path), observers, world=world)
    except BaseException:  # whatever stopped it: leave no empty folder behind
        if is_new:
            folder.rmdir()
        raise
    if world.is_first:
        replace_file(folder / "config.toml", to_toml(config))
    world.barrier()
    return run


def resume_run(
    folder: Path,
    overrides: Sequence[tuple[str, Any]] = (),
    observers: Sequence[Observer] = (),
    *,
    world: World = ALONE,
) -> Run:
    """Go on from the newest intact checkpoint; without one, from the start."""
    config = read_run_config(folder, overrides)
    newest, skipped = world.from_first(newest_intact_of(folder) if world.is_first else None)
    checkpoint = None if newest is None else read_checkpoint(Path(newest))
    if checkpoint is not None:
        refuse_model_alone(checkpoint)
        refuse_changes(config, checkpoint)
    from_base = checkpoint is None or config.model.lora.rank > 0
    path = model_location(config.model.path) if from_base or checkpoint is None else str(checkpoint.model_folder)
    critic = str(checkpoint.model_folder / "critic") if checkpoint is not None else None
    run = assemble(config, folder, path, observers, critic_path=critic, is_start=checkpoint is None, world=world)
    if checkpoint is not None:
        run.restore(checkpoint)
    if world.is_first:
        cut_files_back(run, has_checkpoint=checkpoint is not None)
        if overrides:
            replace_file(folder / "config.toml", to_toml(config))
    world.barrier()
    run.spend(*read_lines(folder / "value.jsonl"), *read_lines(folder / "metrics.jsonl"))
    for message in skipped:
        run.event("checkpoint", message)
    where = f" of value pretraining {run.value_steps}" if run.is_pretraining and run.value_steps else f" {run.step}"
    run.event("resume", f"resumed after step{where}")
    return run


def newest_intact_of(folder: Path) -> tuple[str | None, list[str]]:
    """Where it is, and what was skipped. One rank reads all files to check them; the others take its word."""
    newest, skipped = newest_intact(folder / "checkpoints")
    return (None if newest is None else str(newest)), skipped


def cut_files_back(run: Run, *, has_checkpoint: bool) -> None:
    """What was written after the checkpoint goes: it will be written again."""
    for name in ("metrics.jsonl", "eval.jsonl", "eval_problems.jsonl", "events.jsonl"):
        cut_back(run.folder / name, run.step if has_checkpoint else -1)
    cut_back(run.folder / "value.jsonl", run.value_steps)
    drop_after(run.folder / "rollouts", run.step)


def read_run_config(folder: Path, overrides: Sequence[tuple[str, Any]]) -> Config:
    from dapo.config.load import read_toml, refuse_unknown

    path = folder / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{folder}: is not a run: it has no config.toml.", remedy="Name the folder of a run.")
    keys = flatten(read_toml(path)) | dict(overrides)
    refuse_unknown(keys, "config.toml")
    return resolve(folder.name, keys, {}).config


def refuse_model_alone(checkpoint: Checkpoint) -> None:
    if not checkpoint.state.get("resumable", True):
        raise CheckpointError(
            f"{checkpoint.folder}: holds the model alone (checkpoint.resumable = false): no run can go on from it.",
            remedy=f"Start a new run from that model: --set model.path={checkpoint.model_folder}",
        )


def refuse_changes(config: Config, checkpoint: Checkpoint) -> None:
    """A resumed run must be the same run: only keys that cannot change what is learnt may differ."""
    before, now = checkpoint.state["config"], flatten(config.model_dump(mode="json"))
    changed = [key for key in now if now[key] != before.get(key, now[key])]
    unsafe = [key for key in changed if not key.startswith(SAFE_TO_CHANGE)]
    if unsafe:
        what = ", ".join(f"{key} = {now[key]} (was {before[key]})" for key in unsafe)
        raise ConfigError(
            f"{what}: cannot change in a run that is under way.",
            remedy="Start a new run. Safe to change on resume: "
            + ", ".join(key.rstrip(".") for key in SAFE_TO_CHANGE)
            + ".",
        )


def assemble(
    config: Config,
    folder: Path,
    model_path: str,
    observers: Sequence[Observer],
    *,
    critic_path: str | None = None,
    is_start: bool = True,
    world: World = ALONE,
) -> Run:
    """Load model and data, build engine, verifier, optimizer. A run that goes on gets its state from a checkpoint."""
    if config.rollout.engine == "vllm":
        require_vllm()
    refuse_layout(config, world)
    if config.cluster.backend != "none" and world is ALONE:
        raise ConfigError(
            f"cluster.backend = {config.cluster.backend}: is for `dapo train` and `dapo resume`.",
            remedy="Start them with torchrun, or set cluster.backend = none.",
        )
    is_tracked = bool(config.tracking.to) and world.is_first
    observers = [*observers, *([TrackerObserver(config.tracking.to)] if is_tracked else [])]
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    torch.manual_seed(config.train.seed)
    is_fused = config.model.kernels == "fused"
    policy = load_policy(model_path, dtype=dtype, device=device, revision=config.model.revision, is_fused=is_fused)
    if config.model.lora.rank:
        policy = add_lora(policy, config.model.lora.rank, config.model.lora.alpha)
    learner = make_learner(config, policy, model_path, critic_path, dtype, device, world)
    problems = load_encoded(config.data.train, config, policy.tokenizer, use="train")
    wanted = config.data.eval if config.eval.every_steps else ()
    eval_sets = [load_encoded(name, config, policy.tokenizer, use="eval") for name in wanted]
    engine = make_engine(config, policy, SamplingParams(temperature=config.sampling.temperature), world)
    pool = VerifierPool(
        config.rewards.verifier,
        workers=config.rewards.workers,
        seconds=config.rewards.seconds,
        memory_mb=config.rewards.memory_mb,
        truncated_may_be_correct=config.rewards.truncated_may_be_correct,
    )
    judge: Judge = pool if world.size == 1 else SharedJudge(pool, world)
    collector = Collector(
        engine,
        judge,
        responses_per_prompt=config.sampling.responses_per_prompt,
        max_new_tokens=config.limits.max_response_tokens,
        seed=config.train.seed,
        journal=open_journal(folder / "verdicts.jsonl", is_writer=world.is_first),
    )
    order = ProblemOrder(len(problems.problems), seed=config.train.seed)
    ordered = OrderedSource(problems.problems, problems.prompts, order)
    posteriors = first_posteriors(config, problems) if is_start else Posteriors()
    source: Source = ordered
    if config.sampling.predictive:
        G = config.sampling.responses_per_prompt
        source = PredictiveSource(ordered, posteriors, G=G, seed=config.train.seed)
    run = Run(
        config=config,
        folder=folder,
        learner=learner,
        engine=engine,
        judge=judge,
        pool=pool,
        collector=collector,
        problems=problems,
        eval_sets=eval_sets,
        ordered=ordered,
        source=source,
        posteriors=posteriors,
        fill=CarryState(),
        observers=observers,
        token_pieces=token_pieces(policy.tokenizer) if config.rollouts.every_steps else None,
        world=world,
    )
    for observer in observers:
        observer.on_start(run)
    return run


def refuse_layout(config: Config, world: World) -> None:
    """Refuse engines that cannot share the work of so many ranks."""
    engine, together = config.rollout.engine, config.rollout.tensor_parallel
    if engine == "plain" and world.size > 1:
        raise ConfigError(
            f"rollout.engine = plain: is not built for {world.size} ranks.", remedy="Use local, or one process."
        )
    if world.size % together:
        raise ConfigError(
            f"rollout.tensor_parallel = {together}: {world.size} ranks cannot be divided into groups of {together}.",
            remedy="Start a multiple of it, with cluster.backend = torchrun or ray.",
        )


def open_journal(path: Path, *, is_writer: bool = True) -> VerdictJournal:
    """Clock-dependent verdicts of this run so far; new ones are appended at once. Never cut back: they are replayed."""
    known = {line["key"]: judgement_from_state(line["judgement"]) for line in read_lines(path)}
    if not is_writer:
        return VerdictJournal(known)
    return VerdictJournal(
        known, lambda key, judgement: append_line(path, {"key": key, "judgement": judgement_to_state(judgement)})
    )


def first_posteriors(config: Config, problems: EncodedSet) -> Posteriors:
    """Nothing known, or what a probe of this set has counted."""
    path = config.sampling.posteriors
    if path is None:
        return Posteriors()
    counts = {name: seen for name, seen in counts_in(Path(path)).items() if name in problems.by_id}
    if not counts:
        raise ConfigError(
            f"sampling.posteriors = {path}: holds none of the problems of data.train = {config.data.train}.",
            remedy="Probe that set: dapo data probe FILE --model M --out PATH.",
        )
    return Posteriors(counts=counts)


def make_learner(
    config: Config,
    policy: Policy,
    model_path: str,
    critic_path: str | None,
    dtype: torch.dtype,
    device: str,
    world: World,
) -> Learner:
    train = config.train
    sharding = Sharding(world, device, dtype) if is_sharded(config, policy, device, world) else None

    def optimizer(module: torch.nn.Module) -> Optimizer:
        return Optimizer(
            module.named_parameters(),
            betas=train.betas,
            weight_decay=train.weight_decay,
            grad_clip=train.grad_clip,
            moments=train.moments,
            world=world,
            is_mixed=dtype.itemsize < 4,
        )

    trained = policy if sharding is None else sharding.copy_of(policy, layers_of, shared=[policy.tokenizer])
    if train.gradient_checkpointing is True:
        checkpoint_layers(trained)
    learner = Learner(
        trained, optimizer(trained), world=world, gathered=None if sharding is None else policy.requires_grad_(False)
    )
    if config.has_reference:
        learner.reference = load_policy(
            model_location(config.model.path),
            dtype=dtype,
            device=device,
            revision=config.model.revision,
            is_fused=config.model.kernels == "fused",
        )
        learner.reference.requires_grad_(False)
        if sharding is not None:
            sharding.in_place(learner.reference, layers_of(learner.reference))
    if config.has_critic:
        start = critic_path or config.algorithm.critic.path or model_path
        critic = load_critic(start, dtype=dtype, device=device, is_fused=config.model.kernels == "fused")
        if sharding is not None:
            sharding.in_place(critic, layers_of(critic))
        if train.gradient_checkpointing is True:
            checkpoint_layers(critic)
        learner.value = ValueLearner(critic, optimizer(critic))
    return learner


def layers_of(module: Any) -> list[torch.nn.Module]:
    """What is gathered together when it is sharded: a decoder layer."""
    return list(getattr(module.backbone, "layers", ()))


def is_sharded(config: Config, policy: Policy, device: str, world: World) -> bool:
    """Shard over the ranks? `auto`: where one GPU has not twice the room for weights, gradients and optimizer."""
    shard = config.cluster.shard
    if config.cluster.backend == "none" or (world.size == 1 and shard != "full"):
        return False
    if shard == "auto":
        if device != "cuda":
            return False
        shape = shape_from_config(policy.config.to_dict())
        if shape is None:
            return True
        parts = memory_of(config, shape, is_cuda=True, gpus=1).parts
        held = sum(size for name, size in parts.items() if name not in ("activations", "output head"))
        is_large = 2 * held > torch.cuda.get_device_properties(policy.device).total_memory
    else:
        is_large = shard == "full"
    if is_large and config.train.moments == "int8":
        raise ConfigError(
            "train.moments = int8: 8-bit moments share a scale per 256 weights of a whole tensor, not of a shard.",
            remedy="Use float32 or host, or set cluster.shard = none.",
        )
    return is_large


def make_engine(
    config: Config, policy: Policy, sampling: SamplingParams, world: World = ALONE, *, beside: Engine | None = None
) -> Engine:
    """The engine the config names; with several ranks, all of them as one.

    A second one shares the memory of the engine it is beside.
    """
    if isinstance(beside, (VllmEngine, LocalEngine, SharedEngine)):
        return beside.beside(sampling)
    concurrent = config.rollout.max_concurrent_responses
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    match config.rollout.engine:
        case "vllm":
            together = config.rollout.tensor_parallel
            vllm = VllmEngine(
                policy,
                sampling=sampling,
                max_concurrent=-(-concurrent * together // world.size),
                max_tokens=longest,
                memory_share=config.rollout.vllm.gpu_memory_share,
                tensor_parallel=together,
            )
            if world.size == 1:
                return vllm
            return SharedEngine(vllm, world, max_concurrent=concurrent, ranks_per_engine=together)
        case "plain":
            return PlainEngine(policy, sampling=sampling, max_concurrent=concurrent, max_tokens=longest)
        case "local":
            gib, seats = config.rollout.kv_cache_gib, -(-concurrent // world.size)
            own = LocalEngine(policy, sampling=sampling, max_concurrent=seats, max_tokens=longest, kv_gib=gib)
            return own if world.size == 1 else SharedEngine(own, world, max_concurrent=concurrent)


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    if wanted == "mps":
        raise EngineError(
            "model.device = mps: Apple GPUs are not supported: their torch backend lacks float64 and 64-bit integer "
            "kernels that the sampling noise needs.",
            remedy="Use cpu; the quickstart takes minutes there.",
        )
    if not available.get(wanted):
        raise EngineError(
            f"device {wanted}: this machine's torch sees no such device.", remedy="Use auto, cpu or cuda."
        )
    return wanted


def choose_dtype(wanted: str, device: str) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[wanted]
