"""AdamW on float32 masters: warm-up, 16-bit weights, clipping, refusal of non-finite gradients."""

import pytest
import torch
from torch.nn import Linear
from torch.testing import assert_close

from dapo.trainer.optimizer import Optimizer, warmup_lr


def optimizer_of(module: torch.nn.Module, grad_clip: float = 1e9) -> Optimizer:
    return Optimizer(module.named_parameters(), betas=(0.9, 0.999), weight_decay=0.01, grad_clip=grad_clip)


def backward(module: Linear, x: torch.Tensor) -> None:
    (module(x) ** 2).sum().backward()


def test_warmup_counts_from_one_and_never_runs_at_zero():
    assert [warmup_lr(1e-6, k, 10) for k in (1, 5, 10, 11)] == pytest.approx([1e-7, 5e-7, 1e-6, 1e-6])
    assert warmup_lr(1e-6, 1, 0) == 1e-6


def test_float32_is_plain_adamw():
    ours, theirs = Linear(4, 3), Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = optimizer_of(ours)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
    for _ in range(3):
        x = torch.randn(5, 4)
        backward(ours, x)
        optimizer.accumulate()
        optimizer.step(1e-2)
        reference.zero_grad()
        backward(theirs, x)
        reference.step()
    assert_close(ours.weight, theirs.weight)


def test_16_bit_weights_move_by_less_than_their_own_precision():
    module = Linear(4, 3).bfloat16()
    torch.nn.init.ones_(module.weight)
    optimizer = optimizer_of(module)
    for _ in range(40):
        backward(module, torch.ones(1, 4, dtype=torch.bfloat16))
        optimizer.accumulate()
        optimizer.step(1e-4)  # a bf16 near 1 has steps of 0.0039: one update alone would be rounded away
    assert float(optimizer.masters["weight"].max()) == pytest.approx(1 - 40e-4, abs=1e-3)
    assert torch.equal(module.weight, optimizer.masters["weight"].bfloat16())
    assert float(module.weight.max()) < 1


def test_gradients_of_micro_batches_add_up_in_float32():
    module = Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.zeros_(module.weight)
    optimizer = optimizer_of(module)
    for size in (256.0, 1.0):  # 256 + 1 is 256 in bfloat16
        (module.weight * size).sum().backward()
        optimizer.accumulate()
    assert optimizer.masters["weight"].grad is not None
    assert optimizer.masters["weight"].grad.item() == 257.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_nothing(bad: float):
    module = Linear(2, 2)
    before = module.weight.detach().clone()
    optimizer = optimizer_of(module)
    (module.weight * bad).sum().backward()
    optimizer.accumulate()
    outcome = optimizer.step(1.0)
    assert outcome.is_skipped
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None
    backward(module, torch.ones(1, 2))
    assert not optimizer.step(1e-3).is_skipped


def test_the_norm_is_reported_before_clipping():
    module = Linear(1, 1, bias=False)
    optimizer = optimizer_of(module, grad_clip=1.0)
    (module.weight * 5).sum().backward()
    assert optimizer.step(0.0).gradient_norm == pytest.approx(5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_saved_and_loaded_goes_on_bit_for_bit(dtype: torch.dtype):
    def three_steps(module: Linear, optimizer: Optimizer, seed: int) -> None:
        for i in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed + i)).to(dtype)
            backward(module, x)
            optimizer.accumulate()
            optimizer.step(1e-2)

    straight = Linear(4, 3).to(dtype)
    optimizer = optimizer_of(straight)
    three_steps(straight, optimizer, 0)
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    resumed = Linear(4, 3).to(dtype)
    resumed.load_state_dict(straight.state_dict())
    other = optimizer_of(resumed)
    other.load_tensors(saved)
    three_steps(straight, optimizer, 10)
    three_steps(resumed, other, 10)
    assert torch.equal(straight.weight, resumed.weight)
