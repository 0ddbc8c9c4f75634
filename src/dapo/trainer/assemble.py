"""The parts of a run, put together from its config: model, data, engine, verifiers, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dapo.config.schema import Config, RewardsConfig
from dapo.config.sources import eval_sources, train_in_words, train_sources
from dapo.data.encoded import EncodedSet, OrderedSource, load_encoded, load_train
from dapo.data.inputs import check_inputs, sources_used
from dapo.data.keys import stable_hash
from dapo.data.mixture.source import MixtureSource
from dapo.data.order import ProblemOrder
from dapo.distributed.judge import SharedJudge
from dapo.distributed.world import ALONE, World
from dapo.errors import ConfigError
from dapo.files import append_line, read_lines, refuse_links
from dapo.learner.learner import is_sharded, make_learner
from dapo.models.context import refuse_short_context
from dapo.models.device import choose_device, choose_dtype, limit_memory
from dapo.models.load import load_policy
from dapo.models.policy import Policy, add_lora
from dapo.rewards import VerifierPool, VerifierPools
from dapo.rewards.judging import JUDGE_FOLDER
from dapo.rewards.parts import PartsJudge
from dapo.rollout.engine import SamplingParams
from dapo.rollout.make import make_engine, make_exact, refuse_float8, refuse_inexact, refuse_layout
from dapo.rollout.vllm.core import require_vllm
from dapo.sampling.collect import Collector, VerdictJournal
from dapo.sampling.dynamic import ProblemSource, SamplingState
from dapo.sampling.predictive import Posteriors, PredictiveSource, RetiringSource, counts_in
from dapo.sampling.state import judgement_from_state, judgement_to_state
from dapo.trainer.budget import RunBudget
from dapo.trainer.episodes import make_environments, opening_of, refuse_environments, with_episodes
from dapo.trainer.observer import Observer
from dapo.trainer.records import token_pieces
from dapo.trainer.run import Run
from dapo.trainer.track import TrackerObserver
from dapo.types import Judge


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
    """Load model and data, build engine, verifier, optimizer. A resumed run gets its state from a checkpoint."""
    refuse_what_cannot_run(config, world)
    is_tracked = bool(config.tracking.to) and world.is_first
    observers = [*observers, *([TrackerObserver(config.tracking.to)] if is_tracked else [])]
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    refuse_inexact(config, device, dtype)
    refuse_float8(config, device, dtype)
    limit_memory(config.model.gpu_memory_gib, device)
    torch.manual_seed(config.train.seed)
    policy = make_policy(config, model_path, dtype, device)
    if config.rollout.exact and is_sharded(config, policy, device, world):
        raise ConfigError(
            "rollout.exact = true: this model is too large for one GPU, and sharded matrices cannot be multiplied "
            "as the engine does.",
            remedy='Set cluster.shard = "none" to try it all the same, or rollout.exact = false.',
        )
    policy.exact = make_exact(config, policy)
    learner = make_learner(config, policy, model_path, critic_path, dtype, device, world)
    problems = load_train(config, policy.tokenizer)
    wanted = eval_sources(config) if config.eval.every_steps else ()
    eval_sets = [load_encoded(source, config, policy.tokenizer, use="eval") for source in wanted]
    journal = open_journal(folder / "verdicts.jsonl", is_writer=world.is_first)
    environments = make_environments(config, policy, world)
    engine = make_engine(config, policy, SamplingParams(temperature=config.sampling.temperature), world)
    if environments is not None:
        engine = with_episodes(config, engine, policy, environments, problems.by_id, journal)
    judged = folder / JUDGE_FOLDER
    pool = make_pools(config, judged, rank=world.rank)
    judge: Judge = pool if world.size == 1 else SharedJudge(pool, world)
    parts = PartsJudge(pool, config.rewards, judged, rank=world.rank) if config.rewards.parts else None
    graded: Judge = pool if parts is None else parts
    collector = Collector(
        engine,
        graded if world.size == 1 else SharedJudge(graded, world),
        responses_per_prompt=config.sampling.responses_per_prompt,
        max_new_tokens=config.limits.max_response_tokens,
        seed=config.train.seed,
        journal=journal,
        opening=opening_of(engine, [problems], config),
    )
    posteriors = first_posteriors(config, problems) if is_start else Posteriors()
    ordered, source = make_source(config, problems, posteriors)
    run = Run(
        config=config,
        folder=folder,
        learner=learner,
        engine=engine,
        judge=judge,
        pool=pool,
        parts=parts,
        collector=collector,
        problems=problems,
        eval_sets=eval_sets,
        ordered=ordered,
        source=source,
        posteriors=posteriors,
        sampling=SamplingState(),
        observers=observers,
        budget=RunBudget(config.train, world),
        token_pieces=token_pieces(policy.tokenizer) if config.records.every_steps else None,
        world=world,
    )
    for one in (*pool.each, *(parts.pools.values() if parts is not None else ())):
        one.on_notice = lambda text: run.event("judge", text)
        one.is_interrupted = lambda: run.is_stopping
    if environments is not None:
        environments.on_notice = lambda text: run.event("environment", text)
    for observer in observers:
        observer.on_start(run)
    return run


def refuse_what_cannot_run(config: Config, world: World) -> None:
    """Before anything is loaded."""
    if config.rollout.engine == "vllm":
        require_vllm()
    refuse_layout(config, world)
    refuse_environments(config)
    check_inputs(config)
    refuse_own_teacher(config)
    if config.cluster.backend != "none" and world is ALONE:
        raise ConfigError(
            f"cluster.backend = {config.cluster.backend}: is for `dapo train` and `dapo resume`.",
            remedy="Start them with torchrun, or set cluster.backend = none.",
        )


def refuse_own_teacher(config: Config) -> None:
    """Distillation alone, from the model that is trained, has nothing to learn."""
    algorithm = config.algorithm
    is_alone = config.has_teacher and algorithm.advantage == "none" and not algorithm.positive_nll
    if is_alone and algorithm.kl.path in (None, config.model.path):
        raise ConfigError(
            f"algorithm.kl.path = {algorithm.kl.path or 'none'}: the teacher would be the model that is trained, and "
            "nothing would be learned.",
            remedy="Name a teacher: --set algorithm.kl.path=FOLDER, a Hugging Face folder or a run's checkpoint "
            "(runs/NAME/checkpoints/STEP/model).",
        )


def make_policy(config: Config, path: str, dtype: torch.dtype, device: str) -> Policy:
    is_fused = config.model.kernels == "fused"
    lora = config.model.lora
    policy = load_policy(
        path,
        dtype=dtype,
        device=device,
        revision=config.model.revision,
        is_fused=is_fused,
        quantization=config.base_quantization,
    )
    refuse_short_context(
        policy,
        max_prompt_tokens=config.limits.max_prompt_tokens,
        max_response_tokens=config.limits.max_response_tokens,
        names=("limits.max_prompt_tokens = ", "limits.max_response_tokens = "),
    )
    if not lora.rank:
        return policy
    return add_lora(
        policy,
        lora.rank,
        lora.alpha,
        target_modules=lora.target_modules,
        rank_stabilized=lora.rank_stabilized,
        dropout=lora.dropout,
    )


def make_pools(config: Config, folder: Path | None = None, *, rank: int = 0) -> VerifierPool | VerifierPools:
    """The run's verifier; in a mixture, or with evaluation sets that have their own, one pool for each verifier."""
    own = make_pool(config.rewards, config.rewards.verifier, folder, rank=rank)
    names = dict.fromkeys(source.verifier for source, _ in sources_used(config))
    others = [make_pool(config.rewards, name, folder, rank=rank) for name in names if name != config.rewards.verifier]
    return VerifierPools(own, others) if others else own


def make_pool(rewards: RewardsConfig, verifier: str, folder: Path | None = None, *, rank: int = 0) -> VerifierPool:
    """A verifier with its workers; a judge keeps its verdicts in `folder`."""
    if folder is not None:
        refuse_links(folder.parent, folder.name)
    return VerifierPool(
        verifier,
        workers=rewards.workers,
        seconds=rewards.cpu_seconds,
        memory_mb=rewards.memory_mb,
        truncated_may_be_correct=rewards.truncated_may_be_correct,
        folder=folder,
        rank=rank,
    )


def make_source(
    config: Config, problems: EncodedSet, posteriors: Posteriors
) -> tuple[OrderedSource | MixtureSource, ProblemSource]:
    """Where prompts come from: what keeps their order, and what they are drawn from, by turns in a mixture."""
    seed = config.train.seed
    if not problems.sources:
        ordered = OrderedSource(problems, ProblemOrder(len(problems.problems), seed=seed))
        return ordered, selected(config, ordered, posteriors)
    orders = {
        one.name: OrderedSource(one, ProblemOrder(len(one.problems), seed=stable_hash(f"{seed}/{one.name}")))
        for one in problems.sources
    }
    drawn = [selected(config, order, posteriors) for order in orders.values()]
    mixture = MixtureSource(orders, drawn, [source.weight for source in train_sources(config)])
    return mixture, mixture


def selected(config: Config, ordered: OrderedSource, posteriors: Posteriors) -> ProblemSource:
    """A source in its order, or with predictive selection and retirement on top of it."""
    sampling = config.sampling
    source: ProblemSource = ordered
    if sampling.predictive:
        source = PredictiveSource(source, posteriors, G=sampling.responses_per_prompt, seed=config.train.seed)
    if sampling.retire_above is not None:
        source = RetiringSource(source, posteriors, above=sampling.retire_above)
    return source


def open_journal(path: Path, *, is_writer: bool) -> VerdictJournal:
    """Timeouts and other verdicts that depend on the clock. Resuming replays them, so the file is never truncated."""
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
    probed = counts_in(Path(path))
    own_ids = {problem: problem if not problems.sources else problem.partition("/")[2] for problem in problems.by_id}
    counts = {problem: probed[own] for problem, own in own_ids.items() if own in probed}
    if not counts:
        raise ConfigError(
            f"sampling.posteriors = {path}: holds none of the problems of data.train = {train_in_words(config)}.",
            remedy="Probe that set: dapo data probe FILE --model M --out PATH.",
        )
    return Posteriors(counts=counts)
