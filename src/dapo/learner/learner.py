"""What is trained: policy, critic and their optimizers, made from a config, sharded where the config asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dapo.config.model_shapes import model_location, shape_from_config
from dapo.config.schema import Config, TrainConfig
from dapo.distributed.shards import Sharding, refresh
from dapo.distributed.world import ALONE, World
from dapo.errors import ConfigError
from dapo.learner.activations import checkpoint_layers
from dapo.learner.batch import Batch
from dapo.learner.critic import CriticLearner
from dapo.learner.loss_scale import scale_for
from dapo.learner.microbatches import Micro, own_microbatches
from dapo.learner.optimizer import Optimizer
from dapo.models.critic import load_critic
from dapo.models.load import load_policy
from dapo.models.policy import Policy
from dapo.planning.plan import memory_of


@dataclass(slots=True)
class Learner:
    """What is trained, and how many updates it has had."""

    policy: Policy
    optimizer: Optimizer
    reference: Policy | None = None  # frozen; only with a KL term
    critic: CriticLearner | None = None  # only with GAE
    tokens_per_microbatch: int | None = None  # smaller than the config's after the device ran out of memory
    recomputes_all: bool = False  # gradient_checkpointing = "auto" left too little memory: every layer from then on
    updates: int = 0  # optimizer updates since the start; the version of the weights
    bad_updates: int = 0  # of the policy, skipped in a row
    world: World = ALONE
    gathered: Policy | None = None  # an unsharded copy of a sharded policy, for the engine and for saving

    @property
    def whole(self) -> Policy:
        """The policy with all its weights on this rank, as of the last `publish`."""
        return self.policy if self.gathered is None else self.gathered

    @property
    def is_sharded(self) -> bool:
        return self.gathered is not None

    def publish(self) -> Policy:
        """The whole policy with the newest weights. All ranks take part."""
        if self.gathered is not None:
            refresh(self.gathered, self.policy)
        return self.whole

    def set_gradient_sync(self, *, is_last: bool) -> None:
        """Before each micro-batch: whether its backward pass reduces the gradients of a sharded policy.

        Several ranks reduce after every micro-batch, because none has room for the whole gradient. A single rank has
        it anyway, and reduces once, after the last micro-batch of the update.
        """
        if self.is_sharded and self.world.size == 1:
            sharded: Any = self.policy
            sharded.set_requires_gradient_sync(is_last)

    def microbatches(self, batch: Batch, rows: Sequence[int], budget: int) -> list[Micro]:
        """This rank's part of the work on `rows`."""
        return own_microbatches(batch, rows, budget, self.world, lockstep=self.is_sharded)


def make_optimizer(module: torch.nn.Module, train: TrainConfig, **more: Any) -> Optimizer:
    """AdamW as the config has it."""
    return Optimizer(
        module.named_parameters(),
        betas=train.betas,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        moments=train.moments,
        **more,
    )


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
        is_16bit = dtype.itemsize < 4
        return make_optimizer(module, train, world=world, has_16bit_weights=is_16bit, loss_scale=scale_for(dtype))

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
        critic = load_critic(
            start,
            dtype=dtype,
            device=device,
            revision=config.model.revision if start == model_path else None,  # a critic of its own has its own commits
            is_fused=config.model.kernels == "fused",
        )
        if sharding is not None:
            sharding.in_place(critic, layers_of(critic))
        if train.gradient_checkpointing is True:
            checkpoint_layers(critic)
        learner.critic = CriticLearner(critic, optimizer(critic))
    return learner


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


def layers_of(module: Any) -> list[torch.nn.Module]:
    """What is gathered together when it is sharded: a decoder layer."""
    return list(getattr(module.backbone, "layers", ()))
