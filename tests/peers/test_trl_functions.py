"""TRL's own loss function and ours on the same seeded log-probs in float64: values and gradients."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo.algorithms.aggregate import constant_norm, sequence_mean, token_mean
from dapo.algorithms.losses import importance_weight, policy_loss

pytestmark = pytest.mark.peers
F64 = torch.float64
LENGTHS = torch.tensor([3, 9, 1, 5, 9, 7])
B, T = len(LENGTHS), 9
MASK = torch.arange(T) < LENGTHS[:, None]
AGGREGATE = {
    "grpo": lambda x: sequence_mean(x, ROW, row_tokens=LENGTHS, total_sequences=B),
    "dapo": lambda x: token_mean(x, total_tokens=int(MASK.sum())),
    "cispo": lambda x: token_mean(x, total_tokens=int(MASK.sum())),
    "dr_grpo": lambda x: constant_norm(x, constant=B * T),
}
ROW = torch.arange(B)[:, None].expand(B, T)[MASK]
UNUSED = {
    "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0,
    "vllm_importance_sampling_correction": True, "_entropy_bonus_enabled": False, "max_completion_length": T,
    "current_gradient_accumulation_steps": 1,
}  # fmt: skip


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π_θ, log π_old and log π_engine [B, T], and one Â a response."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    old = normal(B, T) - 3
    return old + 0.4 * normal(B, T), old, old + 0.3 * normal(B, T), normal(B)


def theirs(logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor | None, **settings: Any) -> Tensor:
    """`GRPOTrainer._compute_loss` of a trainer that has what it reads."""
    from trl import GRPOTrainer

    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)  # noqa: ARG005
    own = UNUSED | settings
    trainer = SimpleNamespace(
        **own,
        args=SimpleNamespace(delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=weight is not None,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": MASK.long(),
        "advantages": advantage, "old_per_token_logps": old, "num_items_in_batch": MASK.sum(),
        "importance_sampling_ratio": weight,
    }  # fmt: skip
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[arg-type]
    return loss


def with_gradient(loss: Any, logp: Tensor) -> tuple[Tensor, Tensor]:
    logp = logp.clone().requires_grad_()
    value = loss(logp)
    return value.detach(), torch.autograd.grad(value, logp)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weighted", [None, "truncate", "mask"])
@pytest.mark.parametrize(
    ("loss_type", "level", "name", "low", "high", "delta"),
    [
        ("dapo", "token", "clip", 0.2, 0.28, None),
        ("grpo", "token", "clip", 0.2, 0.2, 1.3),
        ("dr_grpo", "token", "clip", 0.2, 0.28, None),
        ("cispo", "token", "cispo", None, 0.3, None),
        ("cispo", "token", "cispo", None, 4.0, None),
        ("grpo", "sequence", "gspo", 3e-4, 4e-4, None),
        ("grpo", "sequence", "gspo", 0.1, 0.1, 1.2),
        ("dapo", "sequence", "gspo", 0.1, 0.1, None),
        ("dr_grpo", "sequence", "gspo", 0.1, 0.1, None),
    ],
)
def test_trls_loss_and_ours(
    loss_type: str, level: str, name: str, low: float | None, high: float, delta: float | None, weighted: Any, seed: int
):
    logp, old, engine, advantage = drawn(seed)
    bounds = {"cap": 1.2, "floor": 0.8, "kind": weighted}
    flat = None if weighted is None else importance_weight(old[MASK], engine[MASK], LENGTHS.tolist(), **bounds)
    weight = None if flat is None else torch.zeros(B, T, dtype=F64).masked_scatter(MASK, flat)
    per_token = advantage[:, None].expand(B, T)[MASK]

    def ours(x: Tensor) -> Tensor:
        each = policy_loss(
            name, x[MASK], old[MASK], per_token, LENGTHS.tolist(), clip_low=low, clip_high=high, dual_clip=delta
        )
        return AGGREGATE[loss_type](each if flat is None else each * flat)

    settings = {
        "loss_type": loss_type, "importance_sampling_level": level, "epsilon_low": low, "delta": delta,
        "epsilon_high": 1 + high if name == "cispo" else high,
    }  # fmt: skip
    found = with_gradient(ours, logp)
    expected = with_gradient(lambda x: theirs(x, old, advantage, weight, **settings), logp)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert bool(found[1].abs().max() > 0)
