"""AdamW on float32 masters: warm-up, 16-bit weights, clipping, refusal of non-finite gradients."""

import pytest
import torch
from torch.nn import Linear
from torch.testing import assert_close

from dapo.config.schema import TrainConfig
from dapo.learner.moments import (
    BLOCK,
    EightBitMoments,
    Kind,
    pack_first,
    pack_second,
    random_code,
    unpack_first,
    unpack_second,
)
from dapo.learner.optimizer import Optimizer, lr_factor, warmup_factor


def optimizer_of(module: torch.nn.Module, max_grad_norm: float = 1e9, moments: Kind = "float32") -> Optimizer:
    return Optimizer(
        module.named_parameters(), betas=(0.9, 0.999), weight_decay=0.01, max_grad_norm=max_grad_norm, moments=moments
    )


def backward(module: Linear, x: torch.Tensor) -> None:
    (module(x) ** 2).sum().backward()


def test_warmup_counts_from_one_and_never_runs_at_zero():
    warm = TrainConfig(steps=20, lr=1e-6, warmup_steps=10)
    assert [lr_factor(warm, k) for k in (1, 5, 10, 11, 20)] == [0.1, 0.5, 1, 1, 1]
    assert lr_factor(TrainConfig(steps=20, lr=1e-6), 1) == 1


def test_a_short_stage_has_a_short_warmup():
    warm = TrainConfig(steps=20, lr=1e-6, warmup_steps=10)
    assert [warmup_factor(warm, step, most=4) for step in (1, 2, 4, 5)] == [0.25, 0.5, 1.0, 1.0]
    assert [warmup_factor(warm, step, most=40) for step in (1, 5, 10, 11)] == [0.1, 0.5, 1.0, 1.0]
    assert warmup_factor(warm, 1, most=0) == 1.0
    assert warmup_factor(warm, 1) == 0.1


def test_decay_starts_at_the_end_of_warmup_and_stays_above_zero():
    linear = TrainConfig(steps=12, lr=1.0, warmup_steps=3, lr_decay="linear")
    assert [lr_factor(linear, k) for k in (1, 3, 4, 8, 12)] == pytest.approx([1 / 3, 1, 0.9, 0.5, 0.1])
    cosine = TrainConfig(steps=9, lr=1.0, warmup_steps=1, lr_decay="cosine")
    thirds_of_pi = [lr_factor(cosine, k) for k in (4, 7)]  # cosine 1/2 and -1/2
    assert thirds_of_pi == pytest.approx([0.75, 0.25])
    for decay in ("linear", "cosine"):
        for steps, warmup in ((1, 0), (5, 5), (5, 9), (50, 20)):
            train = TrainConfig(steps=steps, lr=1.0, warmup_steps=warmup, lr_decay=decay)
            rates = [lr_factor(train, k) for k in range(1, steps + 1)]
            peak = min(warmup, steps)
            assert all(0 < rate <= 1 for rate in rates)
            assert rates[peak:] == sorted(rates[peak:], reverse=True)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_without_warmup_the_first_step_runs_at_the_full_rate(decay: str):
    for N in (1, 2, 8):
        cold = TrainConfig(steps=N, lr=1.0, warmup_steps=0, lr_decay=decay)
        one = TrainConfig(steps=N, lr=1.0, warmup_steps=1, lr_decay=decay)
        assert lr_factor(cold, 1) == 1.0
        assert [lr_factor(cold, k) for k in range(1, N + 1)] == [lr_factor(one, k) for k in range(1, N + 1)]


def test_float32_is_plain_adamw():
    ours, theirs = Linear(4, 3), Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = optimizer_of(ours)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01)
    for _ in range(3):
        x = torch.randn(5, 4)
        backward(ours, x)
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
    assert optimizer.masters["weight"].grad is not None
    assert optimizer.masters["weight"].grad.item() == 257.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_nothing(bad: float):
    module = Linear(2, 2)
    before = module.weight.detach().clone()
    optimizer = optimizer_of(module)
    (module.weight * bad).sum().backward()
    outcome = optimizer.step(1.0)
    assert outcome.is_skipped
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None
    backward(module, torch.ones(1, 2))
    assert not optimizer.step(1e-3).is_skipped


def test_the_norm_is_reported_before_clipping():
    module = Linear(1, 1, bias=False)
    optimizer = optimizer_of(module, max_grad_norm=1.0)
    (module.weight * 5).sum().backward()
    assert optimizer.step(0.0).gradient_norm == pytest.approx(5.0)


def test_16_bit_gradients_never_exist_together():
    module = torch.nn.Sequential(Linear(3, 3), Linear(3, 3)).bfloat16()
    optimizer = optimizer_of(module)
    module(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(master.grad is not None for master in optimizer.masters.values())


def test_only_16_bit_weights_have_another_master_and_carry_it():
    module = torch.nn.Sequential(Linear(3, 3), Linear(3, 3).bfloat16())
    masters = optimizer_of(module).masters
    assert [hasattr(p, "master") for p in module.parameters()] == [False, False, True, True]
    assert module[1].weight.master is masters["1.weight"]  # the backward pass of a whole layer adds to its gradient


def test_a_norm_above_the_limit_is_clipped_to_it_and_one_below_is_left():
    for size, expected in ((5.0, 1.0), (0.5, 0.5)):
        module = Linear(2, 2, bias=False)
        optimizer = optimizer_of(module, max_grad_norm=1.0)
        (module.weight * size / 2).sum().backward()  # four entries of size/2: the norm is size
        seen = []
        optimizer.moments.update = lambda masters, _lr, seen=seen: seen.append(masters["weight"].grad.norm().item())
        optimizer.step(1.0)
        assert seen == pytest.approx([expected], rel=1e-5)


def train_together(moments: Kind, steps: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after `steps` of a noisy regression, with moments in float32 and in the kind to compare."""
    weights = []
    for kind in ("float32", moments):
        torch.manual_seed(1)
        module = Linear(40, 30).to(dtype)
        optimizer = optimizer_of(module, moments=kind)
        truth = torch.randn(30, 40)
        for _ in range(steps):
            x = torch.randn(16, 40)
            (module(x.to(dtype)).float() - x @ truth.t()).square().mean().backward()
            optimizer.step(1e-2)
        weights.append(optimizer.masters["weight"].detach().clone())
    return weights[0], weights[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_in_host_memory_give_the_same_bits(dtype: torch.dtype):
    resident, host = train_together("host", 20, dtype)
    assert torch.equal(resident, host)


@pytest.mark.parametrize("steps", [20, 300])
def test_8_bit_moments_track_float32(steps: int):
    exact, packed = train_together("int8", steps)
    torch.manual_seed(1)
    start = Linear(40, 30).weight.detach()
    # The path differs by rounding noise: within 5 % of the distance walked.
    assert (packed - exact).norm() < 0.05 * (exact - start).norm()


def test_8_bit_codes_hold_their_value_on_average_and_nearly_each_time():
    values = torch.randn(3 * BLOCK + 17) * torch.logspace(-3, 0, 3 * BLOCK + 17)
    noise = torch.Generator().manual_seed(0)
    code, scale = torch.zeros(len(values), dtype=torch.int8), torch.zeros(4)
    total = torch.zeros_like(values)
    for _ in range(400):
        pack_first(values, code, scale, noise)
        total += unpack_first(code, scale)
    peak = torch.stack([part.abs().max() for part in values.split(BLOCK)])
    assert_close(scale, peak)
    step = 2 / 127  # the widest gap between neighbouring codes, of the block's scale
    reach = step * torch.repeat_interleave(peak, BLOCK)[: len(values)]
    assert ((unpack_first(code, scale) - values).abs() <= reach).all()
    assert ((total / 400 - values).abs() <= 5 * reach / 2 / 400**0.5).all()


def test_8_bit_moments_are_adamw_between_unpacking_and_packing():
    """m ← m + (1 − β₁)(g − m), v ← β₂v + (1 − β₂)g², θ ← (1 − lr·wd)θ − lr·m̂/(√v̂ + 1e-8), from what the codes held."""
    beta1, beta2, decay, lr = 0.8, 0.9, 0.1, 0.3
    moments = EightBitMoments((beta1, beta2), decay)
    weight = torch.nn.Parameter(torch.randn(BLOCK + 5))
    m, v = torch.zeros(BLOCK + 5), torch.zeros(BLOCK + 5)
    for t in (1, 2, 3):
        g = weight.grad = torch.randn(BLOCK + 5) * 1e-8  # so small that the 1e-8 has a say
        m, v = m + (1 - beta1) * (g - m), beta2 * v + (1 - beta2) * g**2
        expected = (1 - lr * decay) * weight - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        moments.update({"w": weight}, lr=lr)
        assert_close(weight.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
        m = unpack_first(moments.codes["m.w"], moments.codes["m_scale.w"])
        v = unpack_second(moments.codes["v.w"], moments.codes["v_scale.w"])


def test_8_bit_rounding_is_fixed_by_update_and_parameter():
    def codes() -> list[torch.Tensor]:
        moments, seen = EightBitMoments((0.9, 0.999), 0.0), []
        weights = {name: torch.nn.Parameter(torch.zeros(BLOCK)) for name in ("a", "b")}
        for _ in range(2):
            moments.codes.clear()  # the same moments again: only the draw differs
            for weight in weights.values():
                weight.grad = torch.linspace(0.01, 1, BLOCK)
            moments.update(weights, lr=0.1)
            seen += [moments.codes[f"m.{name}"].clone() for name in weights]
        return seen

    first, again = codes(), codes()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not any(torch.equal(first[i], first[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize(("levels", "power"), [(127, 2), (255, 4)])
def test_a_code_is_one_of_its_neighbours_with_the_value_as_its_mean(levels: int, power: int):
    noise, n = torch.Generator().manual_seed(0), 20_000
    for size in (0.001, 0.2, 0.77):
        drawn = random_code(torch.full((n,), size), levels=levels, power=power, noise=noise)
        below = int(size ** (1 / power) * levels)
        assert set(drawn.tolist()) == {below, below + 1}
        low, high = (below / levels) ** power, ((below + 1) / levels) ** power
        mean = float((drawn.double() / levels).pow(power).mean())
        assert mean == pytest.approx(size, abs=4 * (high - low) / 2 / n**0.5)


def test_a_second_moment_above_zero_never_becomes_zero():
    values = torch.full((BLOCK,), 1e-14)
    values[0], values[1] = 1.0, 0.0
    code, scale = torch.zeros(BLOCK, dtype=torch.uint8), torch.zeros(1)
    pack_second(values, code, scale, torch.Generator().manual_seed(0))
    unpacked = unpack_second(code, scale)
    assert unpacked[0] == 1
    assert unpacked[1] == 0
    assert (unpacked[2:] > 0).all()


def test_the_ends_of_the_range_are_exact():
    ends = torch.tensor([0.0, 1.0])
    for levels, power in ((127, 2), (255, 4)):
        drawn = random_code(ends, levels=levels, power=power, noise=torch.Generator().manual_seed(0))
        assert drawn.tolist() == [0, levels]


@pytest.mark.parametrize("moments", ["float32", "int8", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_saved_and_loaded_goes_on_bit_for_bit(dtype: torch.dtype, moments: Kind):
    def three_steps(module: Linear, optimizer: Optimizer, seed: int) -> None:
        for i in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed + i)).to(dtype)
            backward(module, x)
            optimizer.step(1e-2)

    straight = Linear(4, 3).to(dtype)
    optimizer = optimizer_of(straight, moments=moments)
    three_steps(straight, optimizer, 0)
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    resumed = Linear(4, 3).to(dtype)
    resumed.load_state_dict(straight.state_dict())
    other = optimizer_of(resumed, moments=moments)
    other.load_parts({key: other.part_of_key(key, tensor) for key, tensor in saved.items()})
    three_steps(straight, optimizer, 10)
    three_steps(resumed, other, 10)
    assert torch.equal(straight.weight, resumed.weight)


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_border_every_weight_has_its_own_moments_where_blocks_and_slices_end(n: int, monkeypatch: pytest.MonkeyPatch):
    """One update by gradients that grow: θ − lr·g/(|g| + ε) as AdamW's first is, and m = (1 − β₁)·g in its place."""
    monkeypatch.setattr("dapo.learner.moments.SLICE", BLOCK)
    weight = torch.nn.Parameter(torch.arange(n, dtype=torch.float32))
    weight.grad = torch.linspace(0.5, 1, n)
    moments = EightBitMoments((0.9, 0.999), 0.0)
    moments.update({"w": weight}, lr=0.25)
    assert_close(weight.detach(), torch.arange(n, dtype=torch.float32) - 0.25)
    first = unpack_first(moments.codes["m.w"], moments.codes["m_scale.w"])
    second = unpack_second(moments.codes["v.w"], moments.codes["v_scale.w"])
    assert_close(first, 0.1 * weight.grad, rtol=2 * 2 / 127, atol=0)
    assert_close(second, 0.001 * weight.grad**2, rtol=4 * 4 / 255, atol=0)


def test_a_short_stage_warms_up_no_longer_than_it_may():
    train = TrainConfig(steps=10, lr=1.0, warmup_steps=4)
    assert [warmup_factor(train, step, most=2) for step in (1, 2, 3)] == [0.5, 1, 1]
    assert [warmup_factor(train, step, most=8) for step in (1, 2, 4)] == [0.25, 0.5, 1]
