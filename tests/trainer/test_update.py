"""One update: the same gradient for every micro-batch budget, in float32 too; what its metrics say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from thread_world import on_ranks
from toy import recipe

from dapo.algorithms.diagnostics import ClippedTokens
from dapo.config.schema import Config, CorrectionConfig
from dapo.distributed.world import World
from dapo.learner import update
from dapo.learner.activations import checkpoint_layers
from dapo.learner.batch import Batch, make_batch, split_into_microbatches, split_into_minibatches
from dapo.learner.critic import CriticLearner, apply_gae, token_values
from dapo.learner.dry_run import bytes_beside_activations, shortage_of_any, trained_like
from dapo.learner.forward_passes import compute_old_logp
from dapo.learner.learner import Learner
from dapo.learner.loss_scale import LossScale
from dapo.learner.memory import fit_activations, within_memory
from dapo.learner.metrics import scale_metrics, summarise
from dapo.learner.microbatches import Micro
from dapo.learner.optimizer import Optimizer
from dapo.learner.ragged import Ragged
from dapo.learner.step import Step, StepRecord
from dapo.learner.sums import Sums, Totals
from dapo.learner.update import aggregate_loss, microbatch_loss, record_first, update_policy
from dapo.models.critic import Critic
from dapo.models.dropout import Draw
from dapo.models.fused_layers import keeps_of
from dapo.models.packing import Packed
from dapo.models.policy import Policy
from dapo.trainer.records import new_record
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict
from tiny_models import tiny_policy


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return recipe(tmp_path_factory.mktemp("update")).config


def groups(n: int, G: int = 4) -> list[Group]:
    """Random responses of 1 to 40 tokens, right and wrong in turn."""
    generator = np.random.default_rng(0)
    made = []
    for p in range(n):
        completions = tuple(
            Completion(
                generator.integers(3, 40, length).astype(np.int32),
                np.zeros(length, np.float32),
                np.zeros(length, np.int32),
                StopReason.EOS,
                "",
            )
            for length in generator.integers(1, 41, G)
        )
        judgements = tuple(
            Judgement(Verdict.CORRECT if i % 2 else Verdict.WRONG, 1.0 if i % 2 else -1.0) for i in range(G)
        )
        made.append(Group(Problem(str(p), "", ""), 0, (5, 6, 7), completions, judgements))
    return made


def learner_of(dtype: torch.dtype) -> Learner:
    policy = tiny_policy("llama", dtype=dtype)
    optimizer = Optimizer(policy.named_parameters(), betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0)
    return Learner(policy, optimizer)


def gradient(learner: Learner, batch: Batch, config: Config, budget: int) -> torch.Tensor:
    rows = list(range(len(batch.lengths)))
    learner.policy.zero_grad()
    for micro in split_into_microbatches(batch, rows, budget):
        microbatch_loss(Step(learner, batch, config), Micro(micro), Totals.of(batch, rows), Sums()).backward()
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("mean", ["token", "sequence", "prompt", "constant"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow), (torch.float64, 1e-12)]
)
def test_the_gradient_does_not_depend_on_the_budget(config: Config, mean: str, dtype: torch.dtype, tolerance: float):
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"loss_aggregation": mean})})
    learner = learner_of(dtype)
    batch = make_batch(groups(12), config, dtype)
    compute_old_logp(Step(learner, batch, config))
    with torch.no_grad():  # off policy, so that ratios and clips are at work
        for parameter in learner.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    whole = gradient(learner, batch, config, 16_384)
    for budget in (1, 64, 512, 2_048):
        assert float((gradient(learner, batch, config, budget) - whole).norm() / whole.norm()) < tolerance


def test_an_update_raises_right_and_lowers_wrong_responses(config: Config):
    learner = learner_of(torch.float64)
    batch = make_batch(groups(4), config, torch.float64)
    compute_old_logp(Step(learner, batch, config))
    before = [float(batch.logp_old.row(row).sum()) for row in range(len(batch.lengths))]
    metrics = update_policy(learner, batch, config, step=2)
    assert metrics["updates"] == 2
    compute_old_logp(Step(learner, batch, config))
    moved = np.array([float(batch.logp_old.row(row).sum()) - before[row] for row in range(len(before))])
    right = batch.is_correct.numpy()
    assert moved[right].mean() > 0 > moved[~right].mean()


def test_dropout_is_drawn_anew_for_every_update_and_not_for_old_log_probs(tmp_path: Path):
    """Update n of the run has the key (seed, n); π_old has none, and a pass of its own."""
    keys = ["model.lora.rank=2", "model.lora.dropout=0.1", "train.updates_per_step=2", "train.seed=7"]
    config = recipe(tmp_path, *keys, "train.tokens_per_microbatch=100000").config
    learner = learner_of(torch.float64)
    learner.policy.draw = draw = Draw()
    seen: list[tuple[int, int] | None] = []
    learner.policy.register_forward_pre_hook(lambda *_: seen.append(draw.key))
    for step in (1, 2):
        update_policy(learner, make_batch(groups(4), config, torch.float64), config, step=step)
    assert seen == [None, None, (7, 0), (7, 1), None, None, (7, 2), (7, 3)]


def test_on_policy_the_first_update_clips_nothing(config: Config, tmp_path: Path):  # noqa: ARG001
    one = config.model_copy(update={"train": config.train.model_copy(update={"updates_per_step": 1})})
    metrics = update_policy(learner_of(torch.float64), make_batch(groups(4), one, torch.float64), one, step=1)
    assert (metrics["clip/low"], metrics["clip/high"], metrics["clip/dual"]) == (0, 0, 0)
    assert metrics["policy/kl_old"] == pytest.approx(0, abs=1e-12)


def test_bypass_still_measures_the_gap_to_the_engine(config: Config):
    bypass = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"old_logp": "bypass"})})
    metrics = update_policy(learner_of(torch.float64), make_batch(groups(2), bypass, torch.float64), bypass, step=1)
    assert metrics["engine/gap_mean"] > 0.1  # the made-up engine said log-prob 0 of every token


def test_a_non_finite_loss_is_skipped_counted_and_bounded(config: Config):
    from dapo.errors import TrainingError

    learner = learner_of(torch.float64)
    before = [p.detach().clone() for p in learner.policy.parameters()]
    batch = make_batch(groups(4), config, torch.float64)
    batch.advantage.flat.fill_(float("nan"))
    metrics = update_policy(learner, batch, config, step=1)
    assert (metrics["updates"], metrics["policy/skipped_updates"]) == (0, 2)
    assert not {"policy/loss", "policy/grad_norm", "policy/kl_old", "clip/high"} & metrics.keys()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    with pytest.raises(TrainingError, match="4 updates in a row"):
        update_policy(learner, batch, config, step=2)


def emptied(groups: list[Group], is_empty: Callable[[int, int], bool]) -> list[Group]:
    """The same groups; some responses are gone, as when the engine gave them up before their first token."""
    none = np.zeros(0, np.int32)
    gone = Completion(none, none.astype(np.float32), none, StopReason.ABORTED, "")
    return [
        replace(group, completions=tuple(gone if is_empty(g, i) else c for i, c in enumerate(group.completions)))
        for g, group in enumerate(groups)
    ]


@pytest.mark.parametrize("preset", ["dapo", "ppo"])
@pytest.mark.parametrize("budget", [1, 16_384])
def test_empty_responses_are_nothing_to_learn_from_and_no_error(tmp_path: Path, preset: str, budget: int):
    config = recipe(tmp_path, f"preset={preset}", f"train.tokens_per_microbatch={budget}").config

    def learnt(kept: list[Group]) -> tuple[dict[str, float], Learner]:
        learner = learner_with_critic() if preset == "ppo" else learner_of(torch.float64)
        return update_policy(learner, make_batch(kept, config, torch.float64), config, step=1), learner

    metrics, learner = learnt(emptied(groups(3), lambda _g, _i: True))
    assert metrics["updates"] == metrics["policy/skipped_updates"] == 0
    assert not any(name.startswith("engine/") for name in metrics)
    metrics, learner = learnt(emptied(groups(3), lambda g, i: g == 0 or i == 0))
    assert metrics["updates"] > 0
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(parameter).all() for parameter in learner.policy.parameters())


def test_a_skipped_update_has_no_say_in_the_means_of_those_that_ran(config: Config):
    """Of two updates one is broken: the step then reports what the other alone reports."""
    seen = []
    for n_broken in (0, 1):
        learner, batch = learner_of(torch.float64), make_batch(groups(4), config, torch.float64)
        update_rows = [
            batch.loss_rows(groups) for groups in split_into_minibatches(4, 2, seed=config.train.seed, step=1, epoch=0)
        ]
        for row in update_rows[1] if n_broken else []:
            batch.advantage.row(row).fill_(float("nan"))
        if not n_broken:
            batch.is_in_loss[update_rows[1]] = False
        metrics = update_policy(learner, batch, config, step=1)
        assert (metrics["updates"], metrics["policy/skipped_updates"]) == (1, n_broken)
        seen.append({k: v for k, v in metrics.items() if k.startswith(("policy/", "clip/")) and "skipped" not in k})
    assert seen[0] == seen[1]
    assert seen[0]["policy/grad_norm"] > 0


def learner_with_critic() -> Learner:
    learner = learner_of(torch.float64)
    critic = Critic(tiny_policy("llama", dtype=torch.float64).backbone)
    learner.critic = CriticLearner(
        critic, Optimizer(critic.named_parameters(), betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0)
    )
    return learner


def test_the_critics_means_are_over_its_own_updates(tmp_path: Path):
    """An update that the policy skips is none that the critic skips: its loss and norm stay what they are."""
    ppo = recipe(tmp_path, "preset=ppo", "train.updates_per_step=2", "train.epochs_per_step=1").config
    seen = []
    for is_broken in (False, True):
        learner, broken = learner_with_critic(), iter([float("nan")] * is_broken)
        next(learner.policy.parameters()).register_hook(lambda gradient, left=broken: gradient * next(left, 1.0))
        metrics = update_policy(learner, make_batch(groups(4), ppo, torch.float64), ppo, step=1)
        assert (metrics["updates"], metrics["policy/skipped_updates"]) == (2 - is_broken, is_broken)
        seen.append((metrics["critic/loss"], metrics["critic/grad_norm"]))
    assert seen[0] == seen[1]


def test_skipped_updates_of_the_critic_are_bounded_whatever_the_policy_does(tmp_path: Path):
    from dapo.errors import TrainingError

    ppo = recipe(tmp_path, "preset=ppo", "train.updates_per_step=2", "train.epochs_per_step=1").config
    assert ppo.train.max_bad_updates == 3
    learner = learner_with_critic()
    assert learner.critic is not None

    next(learner.critic.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    metrics = update_policy(learner, make_batch(groups(4), ppo, torch.float64), ppo, step=1)
    assert (metrics["updates"], metrics["policy/skipped_updates"]) == (2, 2)  # each policy update ran
    assert (learner.bad_updates, learner.critic.bad_updates) == (0, 2)
    with pytest.raises(TrainingError, match="4 updates in a row of the critic") as caught:
        update_policy(learner, make_batch(groups(4), ppo, torch.float64), ppo, step=2)
    assert "algorithm.critic.lr" in caught.value.remedy


def test_a_critics_loss_is_the_mean_of_its_own_updates_also_where_the_policys_are_skipped(tmp_path: Path):
    ppo = recipe(tmp_path, "preset=ppo", "train.updates_per_step=2", "train.epochs_per_step=1").config
    losses = []
    for is_broken in (False, True):
        learner = learner_with_critic()
        if is_broken:
            parameter, gradients = next(learner.policy.parameters()), list[torch.Tensor]()
            parameter.register_hook(lambda g, seen=gradients: seen.append(g) or g * (float("nan") if seen[1:] else 1))
        metrics = update_policy(learner, make_batch(groups(4), ppo, torch.float64), ppo, step=1)
        assert metrics["policy/skipped_updates"] == is_broken
        losses.append(metrics["critic/loss"])
    assert losses[0] == losses[1] > 0


def test_means_of_packed_tokens_are_the_papers_means_of_padded_rows(config: Config):
    batch = make_batch(groups(3), config, torch.float64)
    rows, every = [0, 3, 4, 7, 11], list(range(12))
    totals = Totals.of(batch, every)
    loss = torch.randn(sum(batch.lengths[row] for row in rows), dtype=torch.float64)
    padded = torch.nn.utils.rnn.pad_sequence(loss.split([batch.lengths[row] for row in rows]), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(batch.lengths[row]) for row in rows], batch_first=True).bool()
    expected = {
        "token": padded[mask].sum() / sum(batch.lengths),
        "sequence": (padded.sum(1) / mask.sum(1)).sum() / 12,
        "prompt": (padded.sum(1) / totals.group_tokens[batch.group[rows]]).sum() / 3,
        "constant": padded.sum() / (12 * config.limits.max_response_tokens),
    }
    for kind, value in expected.items():
        wanted = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"loss_aggregation": kind})})
        assert float(
            aggregate_loss(Step(learner_of(torch.float64), batch, wanted), loss, rows, totals)
        ) == pytest.approx(float(value), rel=1e-12)


@pytest.mark.parametrize("budget", [1, 64, 16_384])
def test_metrics_are_the_formulas_over_all_tokens_however_they_are_split(config: Config, budget: int):
    algorithm = config.algorithm.model_copy(update={"correction": CorrectionConfig(cap=2.0)})
    config = config.model_copy(update={"algorithm": algorithm})
    learner, batch = learner_of(torch.float64), make_batch(groups(6), config, torch.float64)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(batch.logp_engine.flat.shape, generator=generator, dtype=torch.float64)
    compute_old_logp(Step(learner, batch, config))
    batch.logp_engine.flat = batch.logp_old.flat + noise / 2
    old, engine = batch.logp_old.flat.clone(), batch.logp_engine.flat
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    rows = list(range(len(batch.lengths)))
    step = Step(learner, batch, config)
    for micro in split_into_microbatches(batch, rows, budget):
        microbatch_loss(step, Micro(micro), Totals.of(batch, rows), step.sums)
    metrics = summarise(step, 0)

    compute_old_logp(Step(learner, batch, config))  # π_θ of every token, as the updates saw it
    logp = batch.logp_old.flat
    ratio, w = (logp - old).exp(), (old - engine).exp().clamp(max=2.0)
    high = (batch.advantage.flat > 0) & (ratio > 1 + algorithm.clip.high)
    d = old - engine
    expected = {
        "policy/kl_old": (old - logp).mean(),
        "clip/high": high.double().mean(),
        "clip/high_probability_mean": logp.exp()[high].mean(),
        "clip/high_probability_max": logp.exp()[high].max(),
        "engine/effective_sample_size": w.sum() ** 2 / (len(w) * (w**2).sum()),
        "policy/probability": old.exp().mean(),
        "engine/gap_mean": d.abs().mean(),
        "engine/gap_max": d.abs().max(),
        "engine/kl": (d.exp() - d - 1).mean(),
    }
    assert bool(high.any())
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-9), name


@pytest.mark.parametrize(
    ("correction", "weight"),
    [
        (CorrectionConfig(), lambda rho: rho),
        (CorrectionConfig(cap=1.5, floor=0.5, kind="mask"), lambda rho: rho * ((rho >= 0.5) & (rho <= 1.5))),
    ],
)
def test_weights_are_measured_with_a_correction_and_without(
    config: Config, correction: CorrectionConfig, weight: Callable[[torch.Tensor], torch.Tensor]
):
    algorithm = config.algorithm.model_copy(update={"correction": correction})
    config = config.model_copy(update={"algorithm": algorithm})
    batch = make_batch(groups(6), config, torch.float64)
    step = Step(learner_of(torch.float64), batch, config)
    compute_old_logp(step)
    noise = torch.randn(batch.logp_old.flat.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch.logp_engine.flat = batch.logp_old.flat + noise / 2
    w = weight((-noise / 2).exp())
    metrics = summarise(step, 0)
    assert metrics["engine/effective_sample_size"] == pytest.approx(float(w.sum() ** 2 / (len(w) * (w**2).sum())))
    assert metrics["engine/masked"] == pytest.approx(float((w == 0).double().mean()))
    assert (metrics["engine/masked"] > 0) == (correction.kind == "mask")


@pytest.mark.parametrize("n_updates", [1, 3])
def test_the_first_update_scores_its_own_rows_as_a_pass_of_its_own_would(
    config: Config, monkeypatch: pytest.MonkeyPatch, n_updates: int
):
    config = config.model_copy(update={"train": config.train.model_copy(update={"updates_per_step": n_updates})})
    results = []
    for first_update_computes_old_logp in (True, False):
        monkeypatch.setattr(
            update, "first_update_computes_old_logp", lambda *_, answer=first_update_computes_old_logp: answer
        )
        learner, batch = learner_of(torch.float64), make_batch(groups(6), config, torch.float64)
        metrics = update_policy(learner, batch, config, step=1)
        weights = torch.cat([p.detach().flatten() for p in learner.policy.parameters()])
        results.append((weights, batch.logp_old.flat, batch.entropy.flat, batch.logp_trainer.flat, metrics))
    *tensors, metrics = zip(*results, strict=True)
    assert all(torch.equal(a, b) for a, b in tensors)
    same = [{k: v for k, v in one.items() if not k.startswith("timing.")} for one in metrics]
    assert same[0] == same[1]


def test_micro_batches_are_packed_once_for_scoring_and_updates(config: Config, monkeypatch: pytest.MonkeyPatch):
    from dapo.learner import batch as batch_module

    packed = []
    pack = batch_module.pack
    monkeypatch.setattr(batch_module, "pack", lambda *parts, **how: packed.append(1) or pack(*parts, **how))
    update_policy(learner_of(torch.float64), make_batch(groups(4), config, torch.float64), config, step=1)
    assert len(packed) == 2  # one micro-batch for each of the two updates


def test_values_are_scored_in_the_updates_micro_batches_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from dapo.learner import batch as batch_module

    ppo = recipe(tmp_path, "preset=ppo", "train.epochs_per_step=2", "train.updates_per_step=2").config
    packed = []
    pack = batch_module.pack
    monkeypatch.setattr(batch_module, "pack", lambda *parts, **how: packed.append(1) or pack(*parts, **how))
    update_policy(learner_with_critic(), make_batch(groups(4), ppo, torch.float64), ppo, step=1)
    assert len(packed) == 4  # two updates, shuffled anew in the second epoch


@pytest.mark.parametrize("n_values", [1, 50])
def test_advantages_do_not_depend_on_how_many_rows_go_through_gae_at_a_time(
    n_values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ppo = recipe(tmp_path, "preset=ppo").config
    values = torch.randn(sum(make_batch(groups(4), ppo, torch.float64).lengths), dtype=torch.float64)

    def estimated() -> tuple[torch.Tensor, torch.Tensor]:
        batch = make_batch(groups(4), ppo, torch.float64)
        old = Ragged(batch.lengths, torch.float64)
        old.flat = values.clone()
        targets = apply_gae(batch, ppo, old).target
        return batch.advantage.flat, targets.flat

    together = estimated()
    monkeypatch.setattr("dapo.learner.critic.PADDED_VALUES", n_values)
    apart = estimated()
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


class Scarce(torch.nn.Module):
    """A policy on a device that holds `room` tokens: a larger micro-batch runs out of memory in its backward pass."""

    def __init__(self, policy: Policy, room: int) -> None:
        super().__init__()
        self.policy, self.room = policy, room
        self.device, self.dtype, self.draw = policy.device, policy.dtype, policy.draw

    def forward(self, packed: Packed, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        logp, entropy = self.policy(packed, **options)
        if packed.n_tokens > self.room and logp.requires_grad:
            logp.register_hook(self.run_out)
        elif packed.n_tokens > self.room:
            self.run_out(logp)
        return logp, entropy

    def run_out(self, _grad: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


@pytest.mark.parametrize("n_updates", [1, 2])
def test_out_of_memory_halves_the_budget_and_repeats_the_update_exactly(config: Config, n_updates: int):
    def trained(budget: int, room: int | None) -> tuple[torch.Tensor, dict[str, float], list[str], Learner]:
        train = config.train.model_copy(update={"tokens_per_microbatch": budget, "updates_per_step": n_updates})
        small = config.model_copy(update={"train": train})
        learner, batch = learner_of(torch.float64), make_batch(groups(6), small, torch.float64)
        policy = learner.policy
        if room is not None:
            learner.policy = Scarce(policy, room)
        events: list[str] = []
        metrics = update_policy(learner, batch, small, step=1, event=lambda kind, text: events.append(f"{kind} {text}"))
        weights = torch.cat([p.detach().flatten() for p in policy.parameters()])
        return weights, {k: v for k, v in metrics.items() if not k.startswith("timing.")}, events, learner

    calm, expected, nothing, _ = trained(100, None)
    weights, metrics, events, learner = trained(400, 100)
    assert nothing == []
    assert torch.equal(weights, calm)
    assert metrics == expected
    assert learner.tokens_per_microbatch == 100
    assert events == [
        f"memory CUDA out of memory; tokens_per_microbatch {n} -> {n // 2}, the pass is repeated" for n in (400, 200)
    ]


def test_gradients_of_a_pass_that_ran_out_halfway_are_dropped(config: Config):
    """The third micro-batch of the update runs out once: the pass begins anew, and nothing counts twice."""
    settings = {"tokens_per_microbatch": 200, "updates_per_step": 1}
    small = config.model_copy(update={"train": config.train.model_copy(update=settings)})

    class Once(Scarce):
        n_passes = 0

        def forward(self, packed: Packed, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
            self.n_passes += torch.is_grad_enabled()
            self.room = 0 if self.n_passes == 3 and torch.is_grad_enabled() else 10**6
            return super().forward(packed, **options)

    def trained(is_scarce: bool) -> tuple[torch.Tensor, list[str]]:
        learner, events = learner_of(torch.float64), list[str]()
        policy = learner.policy
        if is_scarce:
            learner.policy = Once(policy, 0)
        batch = make_batch(groups(6), small, torch.float64)
        update_policy(learner, batch, small, step=1, event=lambda _, text: events.append(text))
        return torch.cat([p.detach().flatten() for p in policy.parameters()]), events

    (calm, nothing), (weights, events) = trained(False), trained(True)
    assert (len(nothing), len(events)) == (0, 1)
    torch.testing.assert_close(weights, calm, atol=1e-12, rtol=0)


def test_gradients_of_the_critic_too_are_dropped_where_its_pass_ran_out_halfway(config: Config):
    small = config.model_copy(update={"train": config.train.model_copy(update={"tokens_per_microbatch": 200})})

    def norm(runs_out_at: int) -> float:
        learner, batch = learner_with_critic(), make_batch(groups(6), small, torch.float64)
        critic, n_passes = learner.critic, 0
        assert critic is not None

        def loss_of(micro: Micro, _sums: Sums) -> torch.Tensor:
            nonlocal n_passes
            n_passes += 1
            if n_passes == runs_out_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return token_values(critic.model, batch, micro.rows).sum()

        return update.optimize(Step(learner, batch, small), range(24), critic, loss_of).gradient_norm

    assert norm(3) == pytest.approx(norm(0), rel=1e-12)


def test_activations_are_fitted_to_the_largest_micro_batch_beside_all_that_both_optimizers_need(
    config: Config, monkeypatch: pytest.MonkeyPatch
):
    learner, batch = learner_with_critic(), make_batch(groups(6), config, torch.float64)
    assert learner.critic is not None
    seen: list[tuple[object, int, int]] = []
    monkeypatch.setattr(
        "dapo.learner.memory.fit_layers",
        lambda module, tokens, *, bytes_to_come, is_fused: seen.append((module, tokens, bytes_to_come)),  # noqa: ARG005
    )
    costs = [batch.tokens(row) for row in range(24)]
    to_come = learner.optimizer.bytes_to_come() + learner.critic.optimizer.bytes_to_come()
    for budget, lowered, expected in ((1, None, max(costs)), (10**6, None, sum(costs)), (10**6, 100, 100)):
        auto = config.train.model_copy(update={"tokens_per_microbatch": budget, "gradient_checkpointing": "auto"})
        learner.tokens_per_microbatch = lowered
        fit_activations(Step(learner, batch, config.model_copy(update={"train": auto})))
        assert seen == [(part, expected, to_come) for part in (learner.policy, learner.critic.model)]
        seen.clear()


def test_border_an_update_of_short_rows_may_go_below_the_longest_row_of_its_step(config: Config):
    batch = make_batch(groups(2), config, torch.float64)
    *_, short, long = sorted(range(8), key=batch.tokens)
    longest = batch.tokens(long)
    assert longest // 2 < batch.tokens(short) < longest
    train = config.train.model_copy(update={"tokens_per_microbatch": longest})
    step, tried = Step(learner_of(torch.float64), batch, config.model_copy(update={"train": train})), list[int]()

    def work(budget: int) -> None:
        tried.append(budget)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    within_memory(step, [short], work)
    assert tried == [longest, longest // 2]


def test_under_auto_all_layers_recompute_before_the_budget_halves(config: Config):
    train = config.train.model_copy(update={"tokens_per_microbatch": 400, "gradient_checkpointing": "auto"})
    auto = config.model_copy(update={"train": train})

    class Small(Scarce):
        """Holds 200 tokens more once every layer recomputes."""

        def __init__(self, policy: Policy, room: int) -> None:
            super().__init__(policy, room)
            self.backbone = policy.backbone

        def forward(self, packed: Packed, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
            is_recomputed = all(layer.gradient_checkpointing for layer in self.backbone.layers)
            self.room, room = self.room + 200 * is_recomputed, self.room
            try:
                return super().forward(packed, **options)
            finally:
                self.room = room

    def trained(room: int) -> tuple[list[str], Learner]:
        learner, batch = learner_of(torch.float64), make_batch(groups(6), auto, torch.float64)
        learner.policy = Small(learner.policy, room)
        events: list[str] = []
        update_policy(learner, batch, auto, step=1, event=lambda _, text: events.append(text))
        return events, learner

    events, learner = trained(200)
    assert [event.split("; ")[1] for event in events] == [
        "every layer recomputes its activations from now on, the pass is repeated"
    ]
    assert learner.recomputes_all
    assert learner.tokens_per_microbatch is None
    events, learner = trained(0)
    assert "every layer" in events[0]
    assert [event.split("; ")[1] for event in events[1:]] == ["tokens_per_microbatch 400 -> 200, the pass is repeated"]
    assert learner.tokens_per_microbatch == 200


def test_border_a_row_that_never_fits_ends_the_run_with_a_remedy(config: Config):
    from dapo.errors import EngineError

    batch = make_batch(groups(2), config, torch.float64)
    longest = max(map(batch.tokens, range(len(batch.lengths))))
    for budget, n_events in ((longest - 1, 0), (longest, 0), (longest + 1, 1)):
        train = config.train.model_copy(update={"tokens_per_microbatch": budget, "updates_per_step": 1})
        learner, events = learner_of(torch.float64), list[str]()
        learner.policy = Scarce(learner.policy, 0)
        with pytest.raises(EngineError, match="no memory for the longest row"):
            update_policy(
                learner,
                make_batch(groups(2), config, torch.float64),
                config.model_copy(update={"train": train}),
                step=1,
                event=lambda _, text, events=events: events.append(text),
            )
        assert len(events) == n_events


def test_ranks_try_a_sharded_pass_first_and_agree_on_who_is_short_of_memory(config: Config):
    """Rank 1 holds 60 tokens. The dry run leaves no gradient and no flag, and is not repeated for what has fitted."""
    tried: list[tuple[int, int]] = []

    def work(world: World) -> list[str]:
        learner = learner_of(torch.float64)
        learner.world, learner.gathered = world, learner_of(torch.float64).policy.requires_grad_(False)
        checkpoint_layers(learner.policy)
        before = [dict(vars(layer)) for layer in learner.gathered.backbone.layers]

        def allocate(_policy: Policy, arguments: tuple[Packed]) -> None:
            tried.append((world.rank, arguments[0].n_tokens))
            if world.rank == 1 and arguments[0].n_tokens > 60:
                raise torch.OutOfMemoryError("Tried to allocate 1 GiB. More")

        learner.gathered.register_forward_pre_hook(allocate)
        batch = make_batch(groups(4), config, torch.float64)
        step = Step(learner, batch, config)
        rows = list(range(len(batch.lengths)))
        told = [shortage_of_any(step, rows, budget) for budget in (400, 50, 400, 50, 40)]
        assert [dict(vars(layer)) for layer in learner.gathered.backbone.layers] == before
        assert not any(p.requires_grad or p.grad is not None for p in learner.gathered.parameters())
        return told

    first, second = on_ranks(2, work)
    assert first == second == ["rank 1: Tried to allocate 1 GiB", "", "rank 1: Tried to allocate 1 GiB", "", ""]
    assert len(tried) == 2 * 3  # 400, 50, 400: the second 50, and 40, had fitted before


def test_a_step_reports_entropy_and_probability_of_all_its_tokens(config: Config):
    batch = make_batch(groups(2), config, torch.float64)
    metrics = update_policy(learner_of(torch.float64), batch, config, step=1)
    assert metrics["policy/entropy"] == pytest.approx(float(batch.entropy.flat.mean()))
    assert metrics["policy/probability"] == pytest.approx(float(batch.logp_trainer.flat.exp().mean()))


@pytest.mark.parametrize("keeps_attention", [True, False])
def test_a_dry_run_keeps_what_the_pass_keeps(keeps_attention: bool):
    trained, whole = learner_of(torch.float64).policy, learner_of(torch.float64).policy
    checkpoint_layers(trained, 1, keeps_attention=keeps_attention)
    with trained_like(whole, trained):
        kept = ["attention" if keeps_attention else "input", "all"]
        assert [keeps_of(layer) for layer in whole.backbone.layers[:2]] == kept
        for layer in whole.backbone.layers:
            assert layer._gradient_checkpointing_func.args == (layer,)  # not the sharded one


def test_a_dry_run_stands_in_for_what_else_the_pass_and_its_update_need():
    """Two layers and the rest gathered in float32; gradients of one layer and the rest, and AdamW, in float64."""
    learner = learner_of(torch.float64)
    learner.gathered = learner_of(torch.float32).policy
    layer, *others = [sum(p.numel() for p in one.parameters()) for one in learner.policy.backbone.layers]
    everything = sum(p.numel() for p in learner.policy.parameters())
    rest = everything - layer - sum(others)
    assert set(others) == {layer}
    expected = 4 * (2 * layer + rest) + 8 * (layer + rest) + 3 * 8 * everything  # its gradient and two moments
    assert bytes_beside_activations(learner) == expected


def test_ratio_and_side_of_a_token_are_those_of_its_first_update():
    record = StepRecord(Ragged([2, 1], torch.float32, fill=float("nan")), Ragged([2, 1], torch.float32))
    sides = {"high": [True, False, False], "low": [False, True, False], "dual": [False, False, True]}
    clipped = ClippedTokens(**{name: torch.tensor(side) for name, side in sides.items()})
    record_first(record, [0, 1], torch.tensor([2.0, 0.5, 30.0]), clipped)
    nothing = ClippedTokens(*(torch.zeros(3, dtype=torch.bool) for _ in range(3)))
    record_first(record, [0, 1], torch.ones(3), nothing)
    assert record.ratio.flat.tolist() == [2, 0.5, 30]
    assert record.clip.flat.tolist() == [1, -1, -1]


def test_what_is_recorded_of_a_token_is_its_own_ratio_where_the_loss_clips_that_of_its_response(config: Config):
    gspo = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"loss": "gspo"})})
    batch = make_batch(groups(4), gspo, torch.float64)
    record = new_record(batch)
    update_policy(learner_of(torch.float64), batch, gspo, step=2, record=record)
    ratios = [record.ratio.row(row) for row in range(16) if batch.lengths[row] > 1]
    assert {len(ratio.unique()) == 1 for ratio in ratios} == {True, False}  # of the first update and the second


def test_loss_scales_of_policy_and_critic_are_reported(config: Config):
    learner = learner_with_critic()
    step = Step(learner, make_batch(groups(1), config, torch.float64), config)
    sums = Sums()
    sums.add(scale_skips=3.0)
    assert scale_metrics(step, sums) == {}
    learner.optimizer.loss_scale = LossScale(8.0)
    assert scale_metrics(step, sums) == {"update/loss_scale": 8, "update/scale_skips": 3}
    assert learner.critic is not None
    learner.critic.optimizer.loss_scale = LossScale(4.0)
    assert scale_metrics(step, sums)["update/critic_loss_scale"] == 4
