"""The check that a model fits packing: it passes in every type of number, and fails where packing is broken."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dapo.config.model_shapes import model_location
from dapo.errors import EngineError
from dapo.models import load
from dapo.models.load import check_packing, load_policy
from dapo.models.packing import Gather, Packed, pack
from tiny_models import FAMILIES, tiny_policy

N_PROMPT = load.CHECKED_ROWS[0][0]  # of the prompt that the first two rows share
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def with_cells(packed: Packed, cells: np.ndarray) -> Packed:
    assert packed.shared is not None
    return dataclasses.replace(
        packed, shared=dataclasses.replace(packed.shared, cells=Gather.of(cells, packed.n_tokens, "cpu"))
    )


def no_positions(packed: Packed) -> Packed:
    return dataclasses.replace(packed, position_ids=torch.zeros_like(packed.position_ids))


def positions_with_a_gap(packed: Packed) -> Packed:
    """Responses begin one place too late."""
    return dataclasses.replace(packed, position_ids=packed.position_ids + (packed.position_ids >= N_PROMPT))


def other_prefix(packed: Packed) -> Packed:
    """The second row borrows most of its prompt from another group. (In another order it would be none the worse.)"""
    cells = packed.shared.cells.source.numpy().copy()
    start, other, n = int(packed.cu_seqlens[1]), int(cells[packed.cu_seqlens[2]]), N_PROMPT - 4
    cells[start + 3 : start + 3 + n] = np.arange(other, other + n)
    return with_cells(packed, cells)


def one_token_of_the_prefix(packed: Packed) -> Packed:
    cells = packed.shared.cells.source.numpy().copy()
    cells[cells == N_PROMPT - 2] -= 1
    return with_cells(packed, cells)


def no_edges(packed: Packed) -> Packed:
    """Every row sees all rows before it."""
    n = sum(packed.sequence_lengths)
    edges = torch.tensor([0, n], dtype=torch.int32)
    return dataclasses.replace(packed, cu_seqlens=edges, sequence_lengths=(n,), max_length=n)


def an_edge_one_off(packed: Packed) -> Packed:
    first, second, *rest = packed.sequence_lengths
    lengths = (first - 1, second + 1, *rest)
    return dataclasses.replace(packed, sequence_lengths=lengths, max_length=max(lengths))


BREAKS = [no_positions, positions_with_a_gap, other_prefix, one_token_of_the_prefix, no_edges, an_edge_one_off]


def break_packing(monkeypatch: pytest.MonkeyPatch, broken: Callable[[Packed], Packed]) -> None:
    monkeypatch.setattr(load, "pack", lambda *rows, **options: broken(pack(*rows, **options)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_in_every_type(family: str, dtype: torch.dtype):
    check_packing(tiny_policy(family, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
def test_what_is_packed_wrongly_is_refused(
    family: str, broken: Callable[[Packed], Packed], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    policy = tiny_policy(family, dtype)
    break_packing(monkeypatch, broken)
    with pytest.raises(EngineError, match=r"packed log-probs differ from the library's own by .* cannot be trained"):
        check_packing(policy)


@pytest.mark.slow
def test_the_bundled_model_in_bfloat16(monkeypatch: pytest.MonkeyPatch):
    policy = load_policy(model_location("bundled"), dtype=torch.bfloat16, device="cpu")  # checks it
    for broken in (no_positions, other_prefix, no_edges):
        break_packing(monkeypatch, broken)
        with pytest.raises(EngineError, match="rounding in bfloat16"):
            check_packing(policy)


def test_prompts_are_shared_in_what_is_checked(monkeypatch: pytest.MonkeyPatch):
    seen: list[Packed] = []
    break_packing(monkeypatch, lambda packed: seen.append(packed) or packed)
    check_packing(tiny_policy("llama", torch.float32))
    assert seen[0].shared is not None
    assert sum(n > 0 for n in seen[0].shared.borrowed) == sum(len(rest) - 1 for _, rest in load.CHECKED_ROWS)


@pytest.mark.parametrize("positions", [4, 20])
def test_a_model_with_few_positions_is_asked_for_no_more(positions: int):
    policy = tiny_policy("llama", torch.float32, max_position_embeddings=positions)
    prompts, responses = load.checked_rows(policy)
    assert all(
        len(p) > 0 and len(r) > 0 and len(p) + len(r) <= positions for p, r in zip(prompts, responses, strict=True)
    )
    check_packing(policy)
