"""A training pass of this project: with its kernels, without them, and sharded by FSDP2 on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dapo.bench.setting import TrainSetting
from dapo.bench.timing import Result, free_memory, measured, timed
from dapo.bench.train_workloads import TrainLoad, sequences

if TYPE_CHECKING:
    from dapo.distributed.world import World
    from dapo.models.policy import Policy


def dapo_side(setting: TrainSetting, load: TrainLoad, *, is_fused: bool = True) -> Result | None:
    """This project: packed, log-probs without the whole logits, float32 masters; budget and kernels as in a run."""
    from dapo.distributed.world import ALONE

    kernels = "fused kernels" if is_fused and setting.device == "cuda" else "plain"
    return dapo_run(setting, load, make_policy(setting, is_fused=is_fused), ALONE, kernels)


def make_policy(setting: TrainSetting, *, is_fused: bool) -> Policy:
    from dapo.models.fused_layers import fuse_layers
    from dapo.models.packed_attention import PACKED_ATTENTION
    from dapo.models.policy import Policy

    free_memory()
    policy = Policy(setting.model(PACKED_ATTENTION), None).eval()
    policy.is_fused = is_fused
    if is_fused:
        fuse_layers(policy.backbone)
    return policy


def dapo_run(setting: TrainSetting, load: TrainLoad, policy: Policy, world: World, how: str) -> Result | None:
    """Updates of this policy, which is whole, or sharded over the ranks of this world."""
    from dapo.learner.activations import checkpoint_layers
    from dapo.learner.optimizer import Optimizer
    from dapo.models.packing import pack

    if load.is_checkpointed:
        checkpoint_layers(policy, keeps_attention=True)  # as auto does where it fits
    optimizer = Optimizer(
        policy.named_parameters(),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        max_grad_norm=1.0,
        moments=setting.moments,  # type: ignore[arg-type]
        world=world,
    )
    budget = max(16384 if setting.device == "cuda" else 1024, max(load.lengths))
    batches = within_budget(sequences(load, setting.shape.vocabulary), budget)
    packs = [pack([row[:1] for row in rows], [row[1:] for row in rows], setting.device) for rows in batches]
    total = sum(packed.n_targets for packed in packs)

    def update() -> None:
        for packed in packs:
            logp, _ = policy(packed, temperature=1.0)
            ((logp.exp() * 0.1).sum() / total).backward()
        optimizer.step(1e-6)

    settings = (
        f"packed, {len(packs)} micro-batches of {budget:,} tokens, float32 masters, moments {setting.moments}, {how}"
    )
    return measured(setting, update, settings)


def within_budget(rows: list[list[int]], budget: int) -> list[list[list[int]]]:
    """The rows in their order, as many to a micro-batch as have at most `budget` tokens together."""
    batches: list[list[list[int]]] = [[]]
    for row in rows:
        if batches[-1] and sum(map(len, batches[-1])) + len(row) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def plain_side(setting: TrainSetting, load: TrainLoad) -> Result | None:
    """This project without its kernels."""
    return dapo_side(setting, load, is_fused=False)


def exact_side(setting: TrainSetting, load: TrainLoad) -> Result | None:
    """This project with rollout.exact: the engine's forward pass, each layer made again for its gradients."""
    from dapo.distributed.world import ALONE
    from dapo.errors import ConfigError
    from dapo.rollout.local.exact import ExactPass

    if setting.device != "cuda":
        raise ConfigError("--sides dapo-exact: is for CUDA.", remedy="Leave it out.")
    policy = make_policy(setting, is_fused=True)
    policy.exact = ExactPass(policy, max_tokens=max(load.lengths))
    return dapo_run(setting, load, policy, ALONE, "exact kernels")


def fsdp2_side(setting: TrainSetting, load: TrainLoad) -> Result | None:
    """This project as a run with cluster.shard = full on one rank: FSDP2, and a whole copy for the engine.

    The copy is refreshed once per step, not once per update: its time is reported separately.
    """
    from dapo.distributed.shards import Sharding, refresh
    from dapo.distributed.world import one_rank
    from dapo.learner.learner import layers_of

    policy = make_policy(setting, is_fused=True)
    with one_rank(setting.device) as world:
        sharded = Sharding(world, setting.device, setting.dtype).copy_of(policy, layers_of)
        result = dapo_run(setting, load, sharded, world, "FSDP2 on one rank")
        if result is None:
            return None
        refresh_s, _ = timed(setting, lambda: refresh(policy, sharded))
    return replace(
        result, settings=f"{result.settings}; refresh of the engine's copy {1e3 * refresh_s:.1f} ms per step"
    )
