"""A decode step in one launch computes what the plain operations do; `emulated/` runs its CUDA source on a CPU."""

import copy
import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_local_engine import drain, request

from dapo.models.policy import Policy
from dapo.rollout.engine import SamplingParams
from dapo.rollout.local.decoder import PagedDecoder
from dapo.rollout.local.engine import TAIL_TICKS, LocalEngine
from dapo.rollout.local.persistent import driver, step
from dapo.rollout.local.persistent.step import Arguments, PersistentStep, Sizes, can_persist, splits
from tiny_models import tiny_policy

HERE = Path(__file__).with_name("emulated")
SOURCES = step.SOURCE.parent
FLAGS = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wno-unused-function", "-Werror")
LENGTHS = [395, 200, 16, 17, 259, 33, 34, 120, 64, 65, 1]
DEAD = 2


class Emulated:
    """In place of `driver.Kernel`. Implements its `launch`."""

    def __init__(self, folder: Path, sizes: Sizes, is_early: bool) -> None:
        path = folder / f"{sizes.ROWS}-{is_early}.so"
        command = ["gcc", *FLAGS, "-I", SOURCES, *sizes.macros, "-o", path, HERE / "run.c", "-lm"]
        subprocess.run(command, check=True, timeout=120)
        self.run, self.is_early = ctypes.CDLL(str(path)).run, is_early

    def launch(self, blocks: int, threads: int, shared_bytes: int, arguments: Arguments) -> None:
        del blocks, threads
        assert self.run(ctypes.byref(arguments), shared_bytes, int(self.is_early)) == 0, "its blocks wait for ever"


def model(family: str, **changes: object) -> Policy:
    """In bfloat16, with weights that leave no number small."""
    shape = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 6, "head_dim": 64}
    return tiny_policy(family, torch.bfloat16, **{**shape, **changes})


def decoder(policy: Policy) -> PagedDecoder:
    return PagedDecoder(policy, n_rows=16, max_tokens=400, n_pages=400, page_tokens=16, tokens_per_tick=1, ops="plain")


def emulate(one: PagedDecoder, folder: Path, n: int, blocks: int, is_early: bool, **changes: int) -> PersistentStep:
    few = PersistentStep(one, one.cache, one.rows, n_blocks=blocks)
    sizes = replace(few.sizes, ROWS=-(-n // 8) * 8, TILES=3, STAGES=4, **changes)
    while sizes.TILES * sizes.WARPS * sizes.ROWS * 16 < sizes.WARPS * sizes.NQ // sizes.NK * sizes.D:
        sizes = replace(sizes, TILES=sizes.TILES + 1)
    few.kernels[sizes.ROWS] = Emulated(folder, sizes, is_early), sizes
    return few


@pytest.mark.parametrize(
    ("family", "n", "blocks", "is_early", "shape", "cut"),
    [
        (
            "qwen2",
            5,
            3,
            True,
            {"intermediate_size": 768},
            {"DEPTH": 1, "WARPS": 4},
        ),  # several tiles, rows read in several pieces
        ("qwen3-tied", 8, 2, False, {"head_dim": 128}, {"SPAN": 2, "WARPS": 4}),  # norms of q and k
        ("llama", 11, 5, False, {"num_key_value_heads": 3}, {"WARPS": 4}),  # two times eight rows
        ("qwen2-tied", 2, 9, True, {"num_key_value_heads": 1}, {}),  # keys in several parts, more parts than are needed
        ("llama3-rope", 1, 9, False, {"num_attention_heads": 8, "num_key_value_heads": 1}, {"WARPS": 3}),
    ],
)
@torch.no_grad()
def test_logits_and_cache(
    tmp_path: Path, family: str, n: int, blocks: int, is_early: bool, shape: dict[str, int], cut: dict[str, int]
):
    policy = model(family, **shape)
    fast, plain, true = (decoder(p) for p in (policy, policy, copy.deepcopy(policy).float()))
    fast.cache.data.normal_()
    plain.cache.data.copy_(fast.cache.data)
    true.cache.data.copy_(fast.cache.data)
    pages = torch.randperm(399)[: n * 25].view(n, 25).int() + 1
    for one in (fast, plain, true):
        one.rows.table[:n, :25] = pages
        one.rows.length[:n] = torch.tensor(LENGTHS[:n]).int()
        one.rows.stop[DEAD] = 1
        one.rows.token[:n] = torch.arange(n).int() + 3
    alive = torch.arange(n) != DEAD
    want, near = true._logits(n, 400)[alive], plain._logits(n, 400)[alive]
    few = emulate(fast, tmp_path, n, blocks, is_early, **cut)
    for _ in range(2):  # the second launch finds the counters of the first
        got = few.logits(n)[alive]
        assert (got - want).norm() <= 1.3 * (near - want).norm()
    written = [x.cache.data[:, :, 1:].float() for x in (fast, plain, true)]
    assert (written[0] - written[2]).norm() <= 1.3 * (written[1] - written[2]).norm()


def test_where_all_rows_have_ended_nothing_is_done(tmp_path: Path):
    fast = decoder(model("llama"))
    fast.rows.stop.fill_(1)
    before = fast.cache.data.clone()
    few = emulate(fast, tmp_path, 3, 2, False)
    few.logits(3)
    assert torch.equal(fast.cache.data, before)
    assert not few.counts.any(), "it counted a launch that no block took part in"


def engine(folder: Path | None, **changes: object) -> LocalEngine:
    """Greedy, with emulated steps where a folder is given."""
    sizes = {"sampling": SamplingParams(temperature=0.0), "max_concurrent": 8, "max_tokens": 96}
    local = LocalEngine(model("qwen2"), ops="plain", tokens_per_tick=2, **{**sizes, **changes})
    if folder is not None:
        local._decoder.few = emulate(local._decoder, folder, 16, 2, False, WARPS=2)  # a CPU has 16 rows or more
    return local


@pytest.mark.slow
@torch.no_grad()
def test_an_engine_generates_what_float32_would_in_longer_ticks(tmp_path: Path):
    local, true = engine(tmp_path), model("qwen2").float()
    wanted = [request(i, i, 2 + 9 * i, 5 + 4 * i) for i in range(3)]
    local.submit(wanted)
    done = drain(local)
    assert local.tick == 3, "13 tokens: two in the first tick, when nothing ran yet, then eight at a time"
    for one in wanted:
        tokens = torch.tensor([*one.prompt, *done[one.id].tokens.tolist()])
        assert len(done[one.id].tokens) == one.max_new_tokens
        logp = true.model(tokens[None]).logits[0].log_softmax(-1)[len(one.prompt) - 1 : -1]
        own = logp.gather(1, tokens[len(one.prompt) :, None])[:, 0]
        assert (logp.max(1).values - own).max() < 0.1, "not what is most likely"
        assert (own - torch.from_numpy(done[one.id].logp)).abs().mean() < 0.2  # 0.1 without, too: bfloat16


@torch.inference_mode()
def test_a_tick_is_long_only_where_nobody_waits(tmp_path: Path):
    local = engine(tmp_path, max_concurrent=16)
    local.submit([request(i, i, 6, 9) for i in range(17)])
    assert local._tick_steps() == 2, "nothing runs"
    local._admit()
    assert (local.n_in_flight, local.n_waiting) == (16, 1)
    assert local._tick_steps() == 2, "one waits"
    local.abort([16])
    assert local._tick_steps() == 2 * TAIL_TICKS
    local._decoder.few = None
    assert local._tick_steps() == 2


@torch.no_grad()
def test_without_a_compiler_many_kernels_do_the_same():
    class Missing:
        def logits(self, _: int) -> None:
            raise driver.DriverError("libnvrtc.so.13 cannot be loaded")

    one = decoder(model("llama"))
    one.rows.length.fill_(1)
    want = one._logits(2, 16)
    one.few = Missing()  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="many launches instead of one: libnvrtc"):
        assert torch.equal(one._logits(2, 16), want)
    assert one.few is None


def test_a_missing_library_is_named():
    with pytest.raises(driver.DriverError, match="libnothing cannot be loaded"):
        driver.loaded("libnothing")


def test_parts_of_keys_fill_the_blocks():
    assert [splits(pairs, 132) for pairs in (1, 2, 4, 16, 17, 33, 66, 67, 200)] == [32, 32, 32, 8, 4, 4, 2, 1, 1]


def test_shared_memory_is_used_and_not_exceeded():
    sizes = Sizes(H=1536, I=8960, NQ=12, NK=2, D=128, V=151936, LAYERS=28, PAGE=64, ROWS=8, BLOCKS=132, HAS_BIAS=1,
                  HAS_NORM=0, EPS=1e-6, SCALE=0.1)  # fmt: skip
    for rows in (8, 16):
        fitted = replace(sizes, ROWS=rows).fitted(232_448)
        assert 0 <= 232_448 - fitted.shared_bytes < fitted.WARPS * fitted.SPAN * 2048
        assert fitted.STAGES >= 4
        assert fitted.TILES * fitted.WARPS * rows * 16 >= fitted.WARPS * 6 * 128, "attention joins its warps there"


def test_a_cpu_has_no_such_step():
    one = decoder(model("llama"))
    assert not can_persist(one, one.cache)
