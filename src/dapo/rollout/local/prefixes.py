"""Prefill: keys and values of prompts, and of partial responses whose KV was dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dapo.rollout.families import PREFILL_TOKENS, SAME_SUMS, rounded_up
from dapo.rollout.local.decoder import PagedDecoder
from dapo.rollout.local.pages import Pages, Prompt
from dapo.rollout.local.rows import HostRows


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens to prefill, and the cache slot of each."""

    tokens: NDArray[np.int32]
    slots: NDArray[np.int64]


def prefixes_of(rows: HostRows, row: int) -> list[Prefix]:
    """What to prefill for a row without KV: its prompt, unless another response had it prefilled, and its response."""
    prompt = rows.prompt(row)
    wanted = prefix_of_prompt(prompt)
    length = int(rows.length[row]) - 1
    if length > len(prompt.tokens):
        slots = slots_of(rows.table[row], length, prompt.page_tokens)
        slots[: prompt.n_shared * prompt.page_tokens] = (
            0  # in the shared pages already: what is computed again goes to page 0
        )
        wanted.append(Prefix(rows.tokens[row, :length].copy(), slots))
    return wanted


def prefix_of_prompt(prompt: Prompt) -> list[Prefix]:
    """The prompt, and marks it as prefilled; nothing if it is already."""
    if prompt.is_filled or not prompt.tokens:
        return []
    prompt.is_filled = True
    return [Prefix(np.array(prompt.tokens, np.int32), slots_of(prompt.pages, len(prompt.tokens), prompt.page_tokens))]


def tail_of(rows: HostRows, row: int) -> list[tuple[Pages, Pages]]:
    """(from, to): the prompt's tail page and a row's first own page, while the response is still empty."""
    prompt = rows.prompt(row)
    if rows.length[row] > rows.start[row] or not len(prompt.tail):
        return []
    return [(prompt.tail, rows.own_pages(row)[:1])]


def slots_of(pages: Pages, n_tokens: int, page_tokens: int) -> NDArray[np.int64]:
    place = np.arange(n_tokens)
    return pages[place // page_tokens].astype(np.int64) * page_tokens + place % page_tokens


def prefill(decoder: PagedDecoder, prefixes: list[Prefix]) -> None:
    """Prefill in passes of bounded size, the longest first, so that little is padding."""
    prefixes = sorted(prefixes, key=lambda prefix: len(prefix.tokens), reverse=True)
    device = decoder.cache.data.device
    while prefixes:
        width = rounded_up(len(prefixes[0].tokens))
        chunk = prefixes[: max(1, PREFILL_TOKENS // width)]
        if width > SAME_SUMS and device.type == "cpu":  # here the padded width changes the last bits: equal ones only
            chunk = [prefix for prefix in chunk if rounded_up(len(prefix.tokens)) == width]
        prefixes = prefixes[len(chunk) :]
        ids, slots = np.empty((len(chunk), width), np.int64), np.zeros((len(chunk), width), np.int64)
        for i, prefix in enumerate(chunk):
            n = len(prefix.tokens)
            # Padded with its own last token: another could bring a non-finite embedding into a healthy row.
            ids[i, :n], ids[i, n:] = prefix.tokens, prefix.tokens[-1]
            slots[i, :n] = prefix.slots
        decoder.prefill(torch.from_numpy(ids).to(device), torch.from_numpy(slots).to(device))
