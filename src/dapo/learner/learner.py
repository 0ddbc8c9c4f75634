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
from dapo.models.device import device_memory
from dapo.models.load import load_policy
from dapo.models.policy import Policy, WithoutAdapter
from dapo.planning.plan import NOT_HELD, memory_of


@dataclass(slots=True)
class Learner:
    """What is trained, and how many updates it has had."""

    policy: Policy
    optimizer: Optimizer
    reference: Policy | None = None  # frozen; only with a KL term
    critic: CriticLearner | None = None  # only with GAE
    tokens_per_microbatch: int | None = None  # smaller than the config's after the device ran out of memory
    recomputes_all: bool = False  # gradient_checkpointing = "auto" left too little memory: every layer from then on
    fitting_tokens: int = 0  # of a sharded model: the largest micro-batch that is known to fit every rank
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

    @property
    def collective(self) -> int | None:
        """Which collective a pass of a sharded model belongs to; None where a rank's pass is its own."""
        return self.world.n_collectives if self.is_sharded else None

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
        is_base = config.model.lora.rank > 0 and config.algorithm.kl.path is None and sharding is None
        learner.reference = WithoutAdapter(policy) if is_base else load_reference(config, policy, dtype, device)
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


def load_reference(config: Config, policy: Policy, dtype: torch.dtype, device: str) -> Policy:
    """The frozen model that the policy is held to: where it started, or a teacher of the same tokenizer."""
    path = config.algorithm.kl.path
    reference = load_policy(
        model_location(path or config.model.path),
        dtype=dtype,
        device=device,
        revision=config.model.revision if path is None else None,  # a teacher has its own commits
        is_fused=config.model.kernels == "fused",
    )
    if path is not None and (why := why_not_a_teacher(reference, policy, config.model.path)):
        raise ConfigError(
            f"algorithm.kl.path = {path}: {why}, and it is asked for the probability of the policy's own tokens.",
            remedy="Name a model of the same family, or one trained from the same base.",
        )
    return reference.requires_grad_(False)


def why_not_a_teacher(reference: Policy, policy: Policy, name: str) -> str | None:
    """What keeps it from reading every token that the policy `name` can draw; None if nothing does.

    Models of one tokenizer may have output heads of several sizes, padded to suit the hardware.
    """
    if reference.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        return f"its tokenizer is not that of model.path = {name}"
    own, wanted = reference.config.vocab_size, policy.config.vocab_size
    return f"its output head has {own:,} tokens, that of model.path = {name} has {wanted:,}" if own < wanted else None


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
        held = sum(size for name, size in parts.items() if name not in NOT_HELD)
        is_large = 2 * held > device_memory(policy.device)[1]
    else:
        is_large = shard == "full"
    if is_large and config.base_quantization:
        raise ConfigError(
            f"model.lora.quantization = {config.base_quantization}: this model is too large for one GPU, and quantized "
            "matrices cannot be divided.",
            remedy='Set cluster.shard = "none" to try it all the same, or model.lora.quantization = "none".',
        )
    if is_large and config.train.moments == "int8":
        raise ConfigError(
            "train.moments = int8: 8-bit moments share a scale per 256 weights of a whole tensor, not of a shard.",
            remedy="Use float32 or host, or set cluster.shard = none.",
        )
    return is_large


def layers_of(module: Any) -> list[torch.nn.Module]:
    """What is gathered together when it is sharded: a decoder layer."""
    return list(getattr(module.backbone, "layers", ()))
