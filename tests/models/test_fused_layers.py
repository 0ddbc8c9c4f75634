"""Fused decoder layers against the library's own: log-probs and every gradient, for every known family."""

import copy

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from dapo.models import fused_layers, packing
from dapo.models.fused_layers import fuse_layers
from dapo.models.packing import Gather, pack, sum_in_torch
from dapo.models.policy import Policy, add_lora
from dapo.models.triton_support import has_triton, is_interpreted
from tiny_models import VOCABULARY, families, tiny_policy

pytestmark = pytest.mark.skipif(not (has_triton() and is_interpreted()), reason="needs Triton's interpreter")


# Each costs the interpreter three seconds; this one has norms of q and k as well.
EVERYDAY = ("qwen3",)


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fused_layers, packing):
        monkeypatch.setattr(module, "runs_triton", lambda _device: True)


def batch():
    rng = np.random.default_rng(3)
    lengths = [(1, 1), (2, 5), (3, 0), (1, 8)]
    prompts = [rng.integers(3, VOCABULARY, p).tolist() for p, _ in lengths]
    prompts, lengths = [*prompts, prompts[-1]], [*lengths, (1, 3)]  # the last two share theirs
    packed = pack(prompts, [rng.integers(3, VOCABULARY, r) for _, r in lengths], "cpu", sharing_saves=0.0)
    assert packed.shared is not None
    return packed


def logp_and_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    logp, entropy = policy(batch(), temperature=0.8)
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    trained = {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}
    return {"logp": logp.detach(), "entropy": entropy} | trained


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("family", families(EVERYDAY))
def test_a_fused_model_says_and_learns_the_same(family: str):
    plain = tiny_policy(family, torch.float32)
    fused = copy.deepcopy(plain)
    assert fuse_layers(fused.backbone) == 2
    expected, got = logp_and_gradients(plain), logp_and_gradients(fused)
    assert expected.keys() == got.keys()
    for name in expected:
        assert_close(got[name], expected[name], atol=2e-5, rtol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (2, 24), (1500,)])
def test_the_kernel_sums_gradients_of_rows_that_were_taken_several_times(dtype: torch.dtype, shape: tuple[int, ...]):
    from dapo.models.kernels.gather import sum_taken

    rng = np.random.default_rng(4)
    source = np.concatenate([rng.integers(0, 9, 20), [10]])  # row 9 is never taken, 11 neither
    places, grad = Gather.of(source, 12, "cpu"), torch.randn(21, *shape).to(dtype)
    got = sum_taken(grad, places.order, places.starts)
    assert_close(got, sum_in_torch(grad, places), atol=1e-6 if dtype == torch.float32 else 0, rtol=1e-2)
    assert not got[[9, 11]].any()
    assert torch.equal(got[10], grad[20])  # taken once: as it is
    assert sum_taken(grad[:0], places.order[:0], places.starts[:1]).shape == (0, *shape)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_on_cpu")
def test_16_bits_are_as_exact_as_the_librarys():
    plain = tiny_policy("qwen3", torch.bfloat16)
    fused = copy.deepcopy(plain)
    fuse_layers(fused.backbone)
    exact = logp_and_gradients(copy.deepcopy(plain).double())
    expected, got = logp_and_gradients(plain), logp_and_gradients(fused)

    def error(result: dict[str, torch.Tensor]) -> float:
        """Root mean square, over log-probs and all gradients, of each one's relative distance from float64."""
        each = [float((result[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact]
        return float(np.sqrt(np.mean(np.square(each))))

    # The interpreter cuts a float32 down to 16 bits where a GPU rounds: twice the error of each step.
    assert error(got) <= (2.5 if is_interpreted() else 1.25) * error(expected)


@pytest.mark.usefixtures("kernels_on_cpu")
def test_an_adapter_on_every_matrix_is_trained_the_same():
    plain = add_lora(tiny_policy("llama", torch.float32), 4, 8.0)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    fused = copy.deepcopy(plain)
    fuse_layers(fused.backbone)
    expected, got = logp_and_gradients(plain), logp_and_gradients(fused)
    for name in expected:
        assert_close(got[name], expected[name], atol=2e-5, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_on_cpu")
def test_a_copy_runs_on_its_own_weights():
    fused = tiny_policy("llama", torch.float32)
    fuse_layers(fused.backbone)
    before = logp_and_gradients(fused)["logp"]
    other = copy.deepcopy(fused)
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    assert torch.equal(logp_and_gradients(other)["logp"], before)


def test_a_plain_call_and_a_cpu_run_the_librarys_code():
    plain = tiny_policy("llama", torch.float64)
    fused = copy.deepcopy(plain)
    fuse_layers(fused.backbone)
    ids = torch.arange(3, 9)[None]
    assert torch.equal(fused.base(input_ids=ids).logits, plain.base(input_ids=ids).logits)
    expected, got = logp_and_gradients(plain), logp_and_gradients(fused)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_an_unknown_activation_stays_with_the_library():
    policy = tiny_policy("llama", torch.float32, hidden_act="gelu")
    assert fuse_layers(policy.backbone) == 0
