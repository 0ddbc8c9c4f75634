"""A decode step in one launch computes what the plain operations do; `emulated/` runs its CUDA source on a CPU."""

import copy
import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_local_engine import drain, request

from dapo.models.policy import Policy
from dapo.rollout.engine import SamplingParams
from dapo.rollout.local.decoder import PagedDecoder
from dapo.rollout.local.engine import TAIL_TICKS, LocalEngine
from dapo.rollout.local.persistent import driver, step
from dapo.rollout.local.persistent.step import MOST_ROWS, Arguments, PersistentStep, Sizes, can_persist, splits
from tiny_models import tiny_policy

HERE = Path(__file__).with_name("emulated")
SOURCES = step.SOURCE.parent
FLAGS = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wno-unused-function", "-Werror")
LENGTHS = [395, 200, 16, 17, 259, 33, 34, 120, 64, 65, 1]
DEAD = 2


class Emulated:
    """In place of `driver.Kernel`. Implements its `launch`."""

    def __init__(self, folder: Path, sizes: Sizes, is_early: bool, turns: int = 1) -> None:
        path = folder / f"{sizes.ROWS}.so"
        command = ["gcc", *FLAGS, "-I", SOURCES, *sizes.macros, "-o", path, HERE / "run.c", "-lm"]
        subprocess.run(command, check=True, timeout=120)
        self.run, self.is_early, self.turns = ctypes.CDLL(str(path)).run, is_early, turns

    def launch(self, blocks: int, threads: int, shared_bytes: int, arguments: Arguments) -> None:
        del blocks, threads
        assert self.run(ctypes.byref(arguments), shared_bytes, int(self.is_early), self.turns) == 0, (
            "its blocks wait for ever"
        )


def model(family: str, **changes: object) -> Policy:
    """In bfloat16, with weights that leave no number small."""
    shape = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 6, "head_dim": 64}
    return tiny_policy(family, torch.bfloat16, **{**shape, **changes})


def decoder(policy: Policy) -> PagedDecoder:
    return PagedDecoder(policy, n_rows=16, max_tokens=400, n_pages=400, page_tokens=16, tokens_per_tick=1, ops="plain")


def emulate(
    one: PagedDecoder, folder: Path, n: int, blocks: int, is_early: bool, turns: int = 1, **changes: int
) -> PersistentStep:
    few = PersistentStep(one, one.cache, one.rows, n_blocks=blocks)
    sizes = replace(few.sizes, ROWS=-(-n // 8) * 8, TILES=3, STAGES=4, **changes)
    while sizes.TILES * sizes.WARPS * sizes.ROWS * 16 < sizes.WARPS * sizes.NQ // sizes.NK * sizes.D:
        sizes = replace(sizes, TILES=sizes.TILES + 1)
    few.kernels[sizes.ROWS] = Emulated(folder, sizes, is_early, turns), sizes
    return few


@pytest.mark.parametrize(
    ("family", "n", "blocks", "is_early", "shape", "cut"),
    [
        ("qwen2", 5, 3, True, {"intermediate_size": 768}, {"DEPTH": 1, "WARPS": 4}),  # several tiles, rows in pieces
        ("qwen3-tied", 8, 2, False, {"head_dim": 128}, {"SPAN": 2, "WARPS": 4}),  # norms of q and k
        ("llama", 11, 5, False, {"num_key_value_heads": 3}, {"WARPS": 4}),  # two times eight rows
        ("qwen2-tied", 2, 9, True, {"num_key_value_heads": 1}, {}),  # keys in several parts, more parts than are needed
        ("llama3-rope", 1, 18, False, {"num_key_value_heads": 1, "num_attention_heads": 8}, {"WARPS": 1}),  # 16 parts
    ],
)
def test_logits_and_cache(
    tmp_path: Path, family: str, n: int, blocks: int, is_early: bool, shape: dict[str, int], cut: dict[str, int]
):
    check(tmp_path, family, LENGTHS[:n], blocks, is_early, shape, cut)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "n", "blocks", "shape", "cut"),
    [
        ("qwen2", 5, 3, {}, {"WARPS": 2}),  # several units of attention a block, several groups of tiles
        ("qwen2-tied", 2, 9, {"num_key_value_heads": 1}, {"WARPS": 2}),
    ],
)
def test_a_warp_may_run_as_far_ahead_of_others_as_it_can(
    tmp_path: Path, family: str, n: int, blocks: int, shape: dict[str, int], cut: dict[str, int]
):
    check(tmp_path, family, LENGTHS[:n], blocks, True, shape, {"turns": 200, **cut})


def test_a_warp_does_not_overwrite_what_others_still_join(tmp_path: Path):
    shape = {"num_key_value_heads": 1, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 64}
    check(tmp_path, "llama", [130, 20, 90, 5, 40], 2, True, shape, {"turns": 200, "WARPS": 2})


SMALL = {"num_key_value_heads": 1, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 64}


@pytest.mark.parametrize(("lengths", "blocks", "seed"), [([395, 200], 9, 5), ([120], 4, 8)])
def test_parts_are_joined_when_all_of_them_is_there(tmp_path: Path, lengths: list[int], blocks: int, seed: int):
    """By chance warps come in an order in which a part that is counted too early is not yet written."""
    check(tmp_path, "qwen2-tied", lengths, blocks, bool(seed % 2), SMALL, {"turns": -seed, "WARPS": 2})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_warps_may_come_in_any_order(tmp_path: Path, seed: int):
    shape = {**SMALL, "num_attention_heads": 2 + 2 * (seed % 2), "intermediate_size": 192}
    lengths, blocks = ([395, 200], 9) if seed % 3 else ([130, 20, 90, 5, 40], 3)
    check(tmp_path, "llama", lengths, blocks, bool(seed % 2), shape, {"turns": -seed, "WARPS": 2})


@pytest.mark.parametrize("length", [258, 289])
def test_parts_that_have_no_keys_are_not_waited_for(tmp_path: Path, length: int):
    """17 or 18 times 16 keys in 8 parts of 3: the last two would be empty."""
    shape = {"num_key_value_heads": 1, "num_attention_heads": 4}
    check(tmp_path, "llama", [length], 8, False, shape, {"WARPS": 2})


@torch.no_grad()
def check(folder: Path, family: str, lengths: list[int], blocks: int, is_early: bool, shape: dict, cut: dict) -> None:
    """As near to float32 as the plain operations are, in logits and in what is stored."""
    n, policy = len(lengths), model(family, **shape)
    fast, plain, true = (decoder(p) for p in (policy, policy, copy.deepcopy(policy).float()))
    fast.cache.data.normal_()
    plain.cache.data.copy_(fast.cache.data)
    true.cache.data.copy_(fast.cache.data)
    pages = torch.randperm(399)[: n * 25].view(n, 25).int() + 1
    for one in (fast, plain, true):
        one.rows.table[:n, :25] = pages
        one.rows.length[:n] = torch.tensor(lengths).int()
        one.rows.stop[DEAD] = 1
    place = torch.arange(400)
    for row, length in enumerate(lengths):  # what earlier responses left behind the last token
        for cells in (*fast.cache.keys, *fast.cache.values):
            cells[pages[row, place[length - 1 :] // 16].long(), :, place[length - 1 :] % 16] = torch.nan
    n_left = int(fast.cache.data.isnan().sum())
    alive, far, near, size = torch.arange(n) != DEAD, 0.0, 0.0, 0.0
    few = emulate(fast, folder, n, blocks, is_early, **cut)
    for first in (3, 10):  # the second launch finds the counters of the first
        for one in (fast, plain, true):
            one.rows.token[:n] = torch.arange(first, first + n).int()
        want, got = true._logits(n, 400)[alive], few.logits(n)[alive]
        far += float((got - want).norm() ** 2)
        near += float((plain._logits(n, 400)[alive] - want).norm() ** 2)
        size += float(want.norm() ** 2)
        assert not few.counts[2:].any(), "parts that came are counted anew"
    assert far**0.5 <= max(1.3 * near**0.5, 0.03 * size**0.5 if n == 1 else 0)  # one row's error is chance
    is_left = fast.cache.data.isnan()
    n_written = int(alive.sum()) * sum(cells[0, :, 0].numel() for cells in (*fast.cache.keys, *fast.cache.values))
    assert n_left - int(is_left.sum()) == n_written
    written = [x.cache.data.float().masked_fill(is_left, 0)[:, :, 1:] for x in (fast, plain, true)]
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
    assert local.tick == 8, "13 tokens: two in each of the first four ticks, then eight in what counts as four"
    for one in wanted:
        tokens = torch.tensor([*one.prompt, *done[one.id].tokens.tolist()])
        assert len(done[one.id].tokens) == one.max_new_tokens
        logp = true.model(tokens[None]).logits[0].log_softmax(-1)[len(one.prompt) - 1 : -1]
        own = logp.gather(1, tokens[len(one.prompt) :, None])[:, 0]
        assert (logp.max(1).values - own).max() < 0.1, "not what is most likely"
        assert (own - torch.from_numpy(done[one.id].logp)).abs().mean() < 0.2  # 0.1 without, too: bfloat16


@torch.inference_mode()
def test_a_tick_is_long_only_in_the_tail():
    local = engine(None, max_concurrent=16)
    local._decoder.few = SimpleNamespace()  # type: ignore[assignment]
    local.submit([request(i, i, 6, 40) for i in range(17)])
    local._quiet_ticks = TAIL_TICKS
    assert local._tick_steps() == 2, "nothing runs"
    local._admit()
    assert (local.n_in_flight, local.n_waiting) == (16, 1)
    assert local._tick_steps() == 2, "one waits"
    local.abort([16])
    long = 2 * TAIL_TICKS
    assert local._tick_steps() == long
    for name, value in {"_quiet_ticks": TAIL_TICKS - 1, "_has_memory_pressure": True, "is_shared": True}.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, name, value)
            assert local._tick_steps() == 2, name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.drafter, "is_due", lambda n: n == 16)
        assert local._tick_steps() == 2, "drafts are tried once a tick"
    local._n_steps = local._tick_steps()
    local._grow()
    rows = local._rows
    assert (rows.n_pages[:16] * local.page_tokens >= rows.length[:16] + long - 1).all(), "it writes beyond its pages"
    local._pool.n_free, tick = 0, local.tick
    rows.length[:16], rows.n_pages[:16] = 30, 2  # two pages of 16 tokens: enough for a short tick
    local._grow()
    assert (local._n_steps, local.tick) == (2, tick - TAIL_TICKS + 1), "no page for a long one: a short one"
    local.submit([request(99, 1, 6, 9)])
    assert local._quiet_ticks == 0
    local._decoder.few = None
    assert local._tick_steps() == 2


def test_quiet_ticks_begin_anew_where_a_run_may_be_resumed():
    local = engine(None)
    for forget in (local.snapshot, local._clear):
        local._quiet_ticks = 9
        forget()
        assert local._quiet_ticks == 0


def test_more_rows_and_drafts_take_many_kernels(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    one = decoder(model("llama"))
    one.few = SimpleNamespace(logits=asked.append)  # type: ignore[assignment]
    monkeypatch.setattr("dapo.rollout.local.decoder.through_layers", lambda *_: pytest.skip)
    one._logits(MOST_ROWS, 16)
    with pytest.raises(TypeError, match="unpack"):
        one._logits(MOST_ROWS + 1, 16)
    monkeypatch.setattr(PagedDecoder, "has_drafts", True)
    with pytest.raises(TypeError, match="unpack"):
        one._logits(3, 16)
    assert asked == [MOST_ROWS]


def test_without_a_compiler_there_is_no_such_step(monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object) -> None:
        raise driver.DriverError("libnvrtc.so.13 cannot be loaded")

    for name, value in {"can_persist": lambda *_: True, "n_processors": lambda _: 4, "compiled": missing}.items():
        monkeypatch.setattr(step, name, value)
    monkeypatch.setattr(step, "shared_memory", lambda _: 232_448)
    one = decoder(model("llama"))
    with pytest.warns(UserWarning, match="many launches instead of one: libnvrtc"):
        assert step.persistent_step(one, one.cache, one.rows) is None


def test_what_was_kept_is_loaded_and_what_is_broken_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compilations: list[str] = []

    def load(binary: bytes, name: str) -> bytes:
        if binary == b"broken":
            raise driver.DriverError("not an image")
        return binary + name.encode()

    monkeypatch.setattr(driver, "function_of", load)
    monkeypatch.setattr(driver, "compile_text", lambda _text, name, _options: compilations.append(name) or b"image ")
    monkeypatch.setattr(driver, "kept_at", lambda *_: tmp_path / "kept.cubin")
    for content in (None, b"image ", b"broken"):
        if content is not None:
            assert (tmp_path / "kept.cubin").read_bytes() == b"image "
            (tmp_path / "kept.cubin").write_bytes(content)
        assert driver.loaded_function("text", "decode_step", []) == b"image decode_step"
    assert compilations == ["decode_step.cu"] * 2
    monkeypatch.setattr(driver, "kept_at", lambda *_: None)
    assert driver.loaded_function("text", "decode_step", []) == b"image decode_step"


def test_sizes_that_the_kernel_cannot_do_are_refused_where_it_is_compiled(tmp_path: Path):
    one = decoder(model("llama"))
    sizes = replace(PersistentStep(one, one.cache, one.rows, n_blocks=2).sizes, TILES=3, STAGES=4)
    for change in ({"STAGES": 1}, {"DEPTH": 0}, {"NQ": 18}, {"D": 96}, {"PAGE": 24}):
        with pytest.raises(subprocess.CalledProcessError):
            Emulated(tmp_path, replace(sizes, **change), False)


def test_a_missing_library_is_named():
    with pytest.raises(driver.DriverError, match="libnothing cannot be loaded"):
        driver.loaded("libnothing")


def test_parts_of_keys_fill_the_blocks():
    assert [splits(pairs, 132) for pairs in (1, 2, 4, 16, 17, 33, 66, 67, 200)] == [32, 32, 32, 8, 7, 4, 2, 1, 1]


def test_shared_memory_is_used_and_not_exceeded():
    sizes = Sizes(H=1536, I=8960, NQ=12, NK=2, D=128, V=151936, LAYERS=28, PAGE=64, ROWS=8, BLOCKS=132, HAS_BIAS=1,
                  HAS_NORM=0, EPS=1e-6, SCALE=0.1)  # fmt: skip
    for rows in (8, 16):
        fitted = replace(sizes, ROWS=rows).fitted(232_448)
        assert 0 <= 232_448 - fitted.shared_bytes < fitted.WARPS * fitted.SPAN * 2048
        assert fitted.STAGES >= 4
        assert fitted.TILES * fitted.WARPS * rows * 16 >= fitted.WARPS * 6 * 128, "attention joins its warps there"


def test_wider_models_and_smaller_blocks_are_not_for_it():
    sizes = Sizes(H=1536, I=8960, NQ=12, NK=2, D=128, V=151936, LAYERS=28, PAGE=64, ROWS=8, BLOCKS=132, HAS_BIAS=1,
                  HAS_NORM=0, EPS=1e-6, SCALE=0.1)  # fmt: skip
    assert step.is_worth_it(sizes, 232_448)
    assert not step.is_worth_it(replace(sizes, H=3584), 232_448)
    assert not step.is_worth_it(sizes, 101_376)


def test_a_model_that_the_kernel_does_not_know(monkeypatch: pytest.MonkeyPatch):
    def known(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: object) -> bool:
        shape = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 6, "head_dim": 64}
        one = decoder(tiny_policy(family, dtype, **{**shape, **changes}))
        return step.is_known(one, one.cache)

    assert all(known(family) for family in ("llama", "qwen2", "qwen3-tied", "mistral"))
    assert not any(known(family) for family in ("llama-bias", "qwen2-window", "mistral-window"))
    assert not known(dtype=torch.float32)
    assert not known(hidden_size=96)
    assert not known(intermediate_size=352)
    assert not known(head_dim=32)
    assert not known(num_attention_heads=12, num_key_value_heads=1)
    assert not known(hidden_act="gelu")
    one = decoder(model("llama"))
    monkeypatch.setattr(one, "cos", one.cos.float())
    assert not step.is_known(one, one.cache)
    other = decoder(model("llama"))
    weight = other.layers[1].mlp.down_proj.weight
    weight.data = torch.cat([weight.data.flatten(), weight.data.flatten()[:1]])[1:].view_as(weight)
    assert not step.is_known(other, other.cache), "two bytes off"


def test_a_cpu_has_no_such_step():
    one = decoder(model("llama"))
    assert not can_persist(one, one.cache)
