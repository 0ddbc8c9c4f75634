"""host.c: each part against the same in torch in float64, also where numbers are not finite; and how it is built."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from compilers import needs_compiler
from dapo.models.kernels import build, compiled, host

pytestmark = needs_compiler
INF, NAN = float("inf"), float("nan")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ the parts


@settings(max_examples=40)
@given(
    n=st.integers(1, 9), width=st.integers(1, 130), has_residual=st.booleans(), scale=st.sampled_from([1e-6, 1, 1e6])
)
def test_norms_and_their_gradients(n: int, width: int, has_residual: bool, scale: float):
    x, weight = numbers(n, width) * scale, numbers(width, seed=1)
    residual = numbers(n, width, seed=2) * scale if has_residual else None
    grad, from_sum = numbers(n, width, seed=3), numbers(n, width, seed=4) if has_residual else None
    total, normed, inverse = compiled.norm_forward(x, residual, weight, 1e-6)
    wide = [None if part is None else part.double() for part in (x, residual, weight)]
    wanted = host.norm_forward(*wide, 1e-6)
    for got, want in zip((total, normed, inverse), wanted, strict=True):
        assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * scale)
    got = compiled.norm_backward(grad, from_sum, total, weight, inverse)
    from_sum = None if from_sum is None else from_sum.double()
    want = host.norm_backward(grad.double(), from_sum, wanted[0], weight.double(), wanted[2])
    size = float(want[0].abs().max()) + 1
    for a, b in zip(got, want, strict=True):
        assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * size)


def test_the_gradient_of_a_norms_weight_over_many_rows():
    """Row by row, 40,000 summands of one sign would lose a digit more."""
    x, weight, grad = numbers(40_000, 4).abs(), torch.ones(4), torch.ones(40_000, 4)
    total, _, inverse = compiled.norm_forward(x, None, weight, 1e-6)
    wanted = (x.double() * inverse.double()).sum(0)
    assert_close(compiled.norm_backward(grad, None, total, weight, inverse)[1].double(), wanted, rtol=1e-6, atol=0)


def test_the_gated_product_and_its_gradients_by_autograd():
    gate, up, grad = (numbers(7, 33, seed=seed) * 4 for seed in range(3))
    wide = [x.double().requires_grad_() for x in (gate, up)]
    product = torch.nn.functional.silu(wide[0]) * wide[1]
    product.backward(grad.double())
    assert_close(compiled.gated_forward(gate, up).double(), product.detach(), rtol=1e-6, atol=1e-6)
    wanted = (wide[0].grad, wide[1].grad, product.detach())
    for got, want in zip(compiled.gated_backward(grad, gate, up), wanted, strict=True):
        assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_the_exponential_over_its_whole_range():
    x = torch.linspace(-120, 120, 200_001)[None]
    got = compiled.gated_forward(x, torch.ones_like(x))
    want = torch.nn.functional.silu(x.double())
    # What is far below the least normal number is 0 on one side and nearly so on the other.
    assert_close(got.double(), want, rtol=4e-7, atol=1e-36)
    odd = torch.tensor([[NAN, INF, -INF, 1e30, -1e30, 0.0, -0.0]])
    got = compiled.gated_forward(odd, torch.ones_like(odd))[0].tolist()
    assert got[0] != got[0]
    assert got[1] == INF
    assert got[2] != got[2]  # as torch has it
    assert got[3:] == [pytest.approx(1e30), 0, 0, 0]


@pytest.mark.parametrize("is_backward", [False, True])
def test_positions_turn_and_turn_back(is_backward: bool):
    q, k = numbers(5, 4, 8), numbers(5, 2, 8, seed=1)
    angle = numbers(5, 4, seed=2).repeat(1, 2)
    for turns in (compiled.rotate, host.rotate):
        there = turns(q, k, angle.cos(), angle.sin(), is_backward=is_backward)
        back = turns(*there, angle.cos(), angle.sin(), is_backward=not is_backward)
        assert_close(back, (q, k), rtol=1e-5, atol=1e-6)
    assert_close(
        compiled.rotate(q, k, angle.cos(), angle.sin(), is_backward=is_backward),
        host.rotate(q, k, angle.cos(), angle.sin(), is_backward=is_backward),
    )


def test_a_row_is_the_same_to_the_last_bit_whatever_stands_beside_it(monkeypatch: pytest.MonkeyPatch):
    x, weight = numbers(64, 96), numbers(96, seed=1)
    alone = torch.cat([compiled.norm_forward(row[None].contiguous(), None, weight, 1e-6)[1] for row in x])
    assert torch.equal(alone, compiled.norm_forward(x, None, weight, 1e-6)[1])
    n_threads = torch.get_num_threads()
    monkeypatch.setattr(compiled, "PARALLEL_NUMBERS", 1)
    try:
        torch.set_num_threads(3)
        assert torch.equal(alone, compiled.norm_forward(x, None, weight, 1e-6)[1])
        grads = compiled.norm_backward(x, None, x, weight, numbers(64, 1).abs())
        assert_close(grads[1], (x * x * numbers(64, 1).abs()).sum(0), rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(n_threads)


@pytest.mark.parametrize("n", [1, 4, 5, 6, 11])
def test_border_the_gradient_of_a_norms_weight_is_of_every_row(n: int, monkeypatch: pytest.MonkeyPatch):
    """Five rows are summed at a time."""
    monkeypatch.setattr(compiled, "ROWS_PER_SUM", 5)
    x, weight = numbers(n, 8), torch.ones(8)
    total, _, inverse = compiled.norm_forward(x, None, weight, 1e-6)
    _, got = compiled.norm_backward(torch.ones(n, 8), None, total, weight, inverse)
    assert_close(got, (x * inverse).sum(0), rtol=1e-5, atol=1e-5)


def test_border_every_row_is_worked_on_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "PARALLEL_NUMBERS", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for n in (1, 2, 3, 4, 5, 7, 9, 64):
        seen: list[int] = []
        compiled.by_rows(n, 1000, lambda a, b: seen.extend(range(a, b)))  # noqa: B023
        assert sorted(seen) == list(range(n))


def test_numbers_that_do_not_lie_one_behind_the_other_are_refused():
    with pytest.raises(AssertionError, match="number after number"):
        compiled.at(numbers(4, 4).t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_of_another_size_are_refused(dtype: torch.dtype):
    """Under autocast projections of float32 activations are half as wide: C would write behind their end."""
    q, k, angle = numbers(5, 4, 8).to(dtype), numbers(5, 2, 8).to(dtype), numbers(5, 8)
    with pytest.raises(AssertionError, match="four bytes, not torch"):
        compiled.rotate(q, k, angle.cos(), angle.sin(), is_backward=False)


# ------------------------------------------------------------------ building


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, nothing loaded yet, and a source that compiles in no time: its contents do not matter."""
    source = tmp_path / "empty.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in build.SIGNATURES))
    monkeypatch.setattr(build, "SOURCES", (source,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    yield tmp_path / "dapo"
    build.library.cache_clear()


def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    assert build.library() is not None
    (path,) = fresh.iterdir()
    assert path.suffix == ".so"
    assert fresh.stat().st_mode & 0o077 == 0
    build.library.cache_clear()
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("compiled again"))
    assert build.library() is not None


def test_another_cpu_gets_a_file_of_its_own(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    build.library()
    monkeypatch.setattr(build, "cpu", lambda: "another one")
    build.library.cache_clear()
    build.library()
    assert len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("what", ["garbage", "a folder that others may write to", "a file in its place", "read-only"])
def test_a_cache_that_cannot_be_used_or_trusted_is_passed_by(fresh: Path, what: str):
    build.library()
    (path,) = fresh.iterdir()
    build.library.cache_clear()
    if what == "garbage":
        path.unlink()
        path.write_bytes(b"not a library")
    elif what == "a file in its place":
        shutil.rmtree(fresh)
        fresh.write_text("")
    else:
        path.unlink()
        fresh.chmod(0o777 if what.startswith("a folder") else 0o500)
    assert build.library() is not None
    if what.startswith("a folder"):
        assert not list(fresh.iterdir())


def test_a_user_without_a_home_compiles_for_the_process_alone(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a container that runs under a number nobody has a name for."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(RuntimeError):
        Path.home()
    assert build.library() is not None
    assert not fresh.exists()


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch):
    calls: list[list[str]] = []

    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        calls.append(command)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert build.library() is None
    assert len(calls) == 1


def test_without_a_compiler_or_when_told_so_there_is_none(fresh: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(fresh))
        assert build.library() is None
    build.library.cache_clear()
    monkeypatch.setenv("DAPO_COMPILE", "0")
    assert build.library() is None


def test_a_compiler_that_fails_is_no_compiler(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho no headers >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert build.library() is None
    assert not list(fresh.iterdir())


def test_processes_that_compile_at_once_do_not_disturb_each_other(fresh: Path):
    code = (
        "from pathlib import Path; from dapo.models.kernels import build\n"
        f"build.SOURCES = (Path({str(build.SOURCES[0])!r}),)\nassert build.library() is not None"
    )
    source = str(Path(build.__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(list(fresh.iterdir())) == 1
