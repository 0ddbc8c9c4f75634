"""Prefill: keys and values of prompts, of partial responses whose KV was dropped, and of what an episode heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from dapo.models.device import sent
from dapo.rollout.families import PREFILL_TOKENS, SAME_SUMS, rounded_up
from dapo.rollout.local.decoder import PagedDecoder
from dapo.rollout.local.pages import Pages, Prompt, pages_for
from dapo.rollout.local.rows import HostRows

# New tokens of one response that attend to all before them at once: bounds the memory of their scores.
EXTEND_TOKENS = 512
# On a GPU new tokens go through the kernels that generate, a tenth of the launches, where they read at most so many
# keys together, or each in the mean: there every token reads its own. Measured on an H200 (docs/benchmarks.md).
READ_KEYS, READ_KEYS_EACH = 2**20, 512


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens to prefill, and the cache slot of each."""

    first: ClassVar = 0  # tokens before them
    tokens: NDArray[np.int32]
    slots: NDArray[np.int64]
    pages: Pages


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens to prefill behind others that have keys and values, and the pages of all of them."""

    tokens: NDArray[np.int32]
    first: int  # tokens before them
    pages: Pages
    slots: NDArray[np.int64]

    def part(self, start: int, end: int | None = None) -> Extension:
        return Extension(self.tokens[start:end], self.first + start, self.pages, self.slots[start:end])

    @property
    def shape(self) -> tuple[int, int]:
        """New tokens, and all tokens, each padded."""
        return rounded_up(len(self.tokens)), rounded_up(self.first + len(self.tokens))


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
        wanted.append(Prefix(rows.tokens[row, :length].copy(), slots, rows.table[row].copy()))
    return wanted


def prefix_of_prompt(prompt: Prompt) -> list[Prefix]:
    """The prompt, and marks it as prefilled; nothing if it is already."""
    if prompt.is_filled or not prompt.tokens:
        return []
    prompt.is_filled = True
    slots = slots_of(prompt.pages, len(prompt.tokens), prompt.page_tokens)
    return [Prefix(np.array(prompt.tokens, np.int32), slots, prompt.pages)]


def tail_of(rows: HostRows, row: int) -> list[tuple[Pages, Pages]]:
    """(from, to): the prompt's tail page and a row's first own page, while nothing follows the prompt."""
    prompt = rows.prompt(row)
    if rows.length[row] - 1 > len(prompt.tokens) or not len(prompt.tail):
        return []
    return [(prompt.tail, rows.own_pages(row)[:1])]


def extension_of(rows: HostRows, row: int, n_known: int) -> list[Extension]:
    """What to prefill for a row whose first tokens have keys and values; nothing if only its newest token has none."""
    length, page_tokens = int(rows.length[row]) - 1, rows.prompt(row).page_tokens
    if length == n_known:
        return []
    pages = rows.table[row].copy()
    slots = slots_of(pages, length, page_tokens)[n_known:]
    return [Extension(rows.tokens[row, n_known:length].copy(), n_known, pages, slots)]


def slots_of(pages: Pages, n_tokens: int, page_tokens: int) -> NDArray[np.int64]:
    place = np.arange(n_tokens)
    return pages[place // page_tokens].astype(np.int64) * page_tokens + place % page_tokens


def prefill(decoder: PagedDecoder, prefixes: list[Prefix]) -> None:
    """Prefill in passes of bounded size, the longest first, so that little is padding."""
    if reads(decoder, prefixes):
        return read(decoder, prefixes)
    prefixes = sorted(prefixes, key=lambda prefix: len(prefix.tokens), reverse=True)
    device = decoder.cache.data.device
    while prefixes:
        width = rounded_up(len(prefixes[0].tokens))
        chunk = prefixes[: max(1, PREFILL_TOKENS // width)]
        if width > SAME_SUMS and device.type == "cpu":  # here the padded width changes the last bits: equal ones only
            chunk = [prefix for prefix in chunk if rounded_up(len(prefix.tokens)) == width]
        prefixes = prefixes[len(chunk) :]
        ids, slots = padded(chunk, width)
        decoder.prefill(torch.from_numpy(ids).to(device), torch.from_numpy(slots).to(device))


def extend(decoder: PagedDecoder, extensions: list[Extension]) -> None:
    """Prefill behind what is known, so many tokens of each at a time."""
    if reads(decoder, extensions):
        return read(decoder, extensions)
    while extensions:
        extend_at_once(decoder, [extension.part(0, EXTEND_TOKENS) for extension in extensions])
        extensions = [each.part(EXTEND_TOKENS) for each in extensions if len(each.tokens) > EXTEND_TOKENS]


def reads(decoder: PagedDecoder, parts: Sequence[Prefix | Extension]) -> bool:
    """Whether these are prefilled by `read`."""
    if decoder.is_exact or not decoder.has_graphs:
        return decoder.is_exact
    n_tokens = sum(len(part.tokens) for part in parts)
    n_keys = sum(len(part.tokens) * (2 * part.first + len(part.tokens)) // 2 for part in parts)
    return n_keys <= max(READ_KEYS, READ_KEYS_EACH * n_tokens)


def read(decoder: PagedDecoder, parts: Sequence[Prefix | Extension]) -> None:
    """Prefill by passes like those that generate, in the order given: a prompt before what shares its pages."""
    page_tokens, device = decoder.cache.page_tokens, decoder.cache.data.device
    widest = max((pages_for(part.first + len(part.tokens), page_tokens) for part in parts), default=0)
    tables = np.zeros((len(parts), widest), np.int32)
    tokens, lengths = [], []
    for i, part in enumerate(parts):
        tables[i, : len(part.pages)] = part.pages[:widest]
        is_new = part.slots >= page_tokens  # the others have been read for another response, into pages that are shared
        tokens.append(part.tokens[is_new])
        lengths.append(part.first + 1 + np.flatnonzero(is_new))
    of = np.repeat(np.arange(len(parts)), [len(each) for each in tokens])
    token, length = (np.concatenate([*each, np.zeros(0, np.int32)]).astype(np.int32) for each in (tokens, lengths))
    for start in range(0, len(token), PREFILL_TOKENS):
        at = slice(start, start + PREFILL_TOKENS)
        decoder.read(*(sent(torch.from_numpy(x), device) for x in (token[at], length[at], tables[of[at]])))


def extend_at_once(decoder: PagedDecoder, extensions: list[Extension]) -> None:
    """In passes of bounded size and of equal widths, which decide the last bits."""
    device = decoder.cache.data.device
    extensions = sorted(extensions, key=lambda extension: extension.shape, reverse=True)
    while extensions:
        width, whole = extensions[0].shape
        chunk = [one for one in extensions if one.shape == (width, whole)][: max(1, PREFILL_TOKENS // whole)]
        extensions = extensions[len(chunk) :]
        first = np.array([extension.first for extension in chunk])
        pages = np.stack([extension.pages[: pages_for(whole, decoder.cache.page_tokens)] for extension in chunk])
        decoder.extend(*(torch.from_numpy(part).to(device) for part in (*padded(chunk, width), first, pages)))


def padded(chunk: Sequence[Prefix | Extension], width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and slots [m, width]; padding has its slot on page 0."""
    ids, slots = np.empty((len(chunk), width), np.int64), np.zeros((len(chunk), width), np.int64)
    for i, prefix in enumerate(chunk):
        n = len(prefix.tokens)
        # Padded with its own last token: another could bring a non-finite embedding into a healthy row.
        ids[i, :n], ids[i, n:] = prefix.tokens, prefix.tokens[-1]
        slots[i, :n] = prefix.slots
    return ids, slots
