"""Keys and values that have to be computed before a response can go on: of its prompt, and of what it has written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dapo.rollout.families import SAME_SUMS, rounded_up
from dapo.rollout.local.decoder import PagedDecoder
from dapo.rollout.local.pages import Pages, Prompt
from dapo.rollout.local.running import RunningBatch

# Padded tokens of one prefill pass: bounds its memory.
PREFILL_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens whose keys and values are wanted, and the cell for each."""

    tokens: NDArray[np.int32]
    slots: NDArray[np.int64]


def prefixes_of(running: RunningBatch, row: int) -> list[Prefix]:
    """What has to be computed for a row without KV: its prompt, unless somebody had it computed; its response."""
    prompt = running.prompt(row)
    wanted = prefix_of_prompt(prompt)
    length = int(running.length[row]) - 1
    if length > len(prompt.tokens):
        slots = slots_of(running.table[row], length, prompt.page_tokens)
        slots[: prompt.n_shared * prompt.page_tokens] = 0  # there already; page 0 takes it
        wanted.append(Prefix(running.tokens[row, :length].copy(), slots))
    return wanted


def prefix_of_prompt(prompt: Prompt) -> list[Prefix]:
    """Unless somebody had it computed already; from now on somebody has."""
    if prompt.is_filled or not prompt.tokens:
        return []
    prompt.is_filled = True
    return [Prefix(np.array(prompt.tokens, np.int32), slots_of(prompt.pages, len(prompt.tokens), prompt.page_tokens))]


def tail_of(running: RunningBatch, row: int) -> list[tuple[Pages, Pages]]:
    """The prompt's last page, to be copied to a row's own first one, where nothing is written yet."""
    prompt = running.prompt(row)
    if running.length[row] > running.start[row] or not len(prompt.tail):
        return []
    return [(prompt.tail, running.own_pages(row)[:1])]


def slots_of(pages: Pages, n_tokens: int, page_tokens: int) -> NDArray[np.int64]:
    place = np.arange(n_tokens)
    return pages[place // page_tokens].astype(np.int64) * page_tokens + place % page_tokens


def prefill(decoder: PagedDecoder, prefixes: list[Prefix]) -> None:
    """Compute prefixes in passes of bounded size, the longest first, so that little is padded."""
    prefixes = sorted(prefixes, key=lambda prefix: len(prefix.tokens), reverse=True)
    device = decoder.cache.data.device
    while prefixes:
        width = rounded_up(len(prefixes[0].tokens))
        chunk = prefixes[: max(1, PREFILL_TOKENS // width)]
        if width > SAME_SUMS and device.type == "cpu":  # a prefix's width must not be its neighbour's
            chunk = [prefix for prefix in chunk if rounded_up(len(prefix.tokens)) == width]
        prefixes = prefixes[len(chunk) :]
        ids, slots = np.empty((len(chunk), width), np.int64), np.zeros((len(chunk), width), np.int64)
        for i, prefix in enumerate(chunk):
            n = len(prefix.tokens)
            # Padded with its own last token: another could bring a non-finite embedding into a healthy row.
            ids[i, :n], ids[i, n:] = prefix.tokens, prefix.tokens[-1]
            slots[i, :n] = prefix.slots
        decoder.prefill(torch.from_numpy(ids).to(device), torch.from_numpy(slots).to(device))
