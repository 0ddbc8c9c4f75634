"""The text of each token id, so that the joined pieces are the response; no torch."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.config.model_shapes import model_location

WINDOW = 8  # tokens of context for a decoder of unknown kind, so that it can place spaces


def find_tokenizer(folder: Path, config: dict[str, Any]) -> TokenPieces | None:
    """The tokenizer of a run: of its newest checkpoint, or of the model folder it started from."""
    import tokenizers

    start = str(config.get("model", {}).get("path", ""))
    places = sorted((folder / "checkpoints").glob("step-*/model/tokenizer.json"), reverse=True)
    if start:
        places.append(Path(model_location(start)) / "tokenizer.json")
    for path in places:
        if path.is_file():
            try:
                return TokenPieces(tokenizers.Tokenizer.from_file(str(path)))
            except Exception:  # tokenizers raises nothing narrower; the page then shows tokens without their text
                continue
    return None


class TokenPieces:
    """What every token of a vocabulary writes: byte-level and SentencePiece kinds exactly, others by decoding."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.kind = kind_of(tokenizer)
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special = {i for i, token in added.items() if token.special}
        self.bytes: list[bytes] = [
            added[i].content.encode() if i in added else self.token_bytes(tokenizer.id_to_token(i)) for i in range(size)
        ]

    def token_bytes(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if self.kind == "byte-level":
            return bytes(BYTE_OF[c] for c in token) if all(c in BYTE_OF for c in token) else token.encode()
        if self.kind == "sentencepiece":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        return token.encode()

    @cached_property
    def whole(self) -> list[str | None]:
        """The text of each token; None where its bytes are only part of a character."""
        shown: list[str | None] = []
        for piece in self.bytes:
            try:
                shown.append(piece.decode())
            except UnicodeDecodeError:
                shown.append(None)
        return shown

    @cached_property
    def units(self) -> NDArray[np.uint32]:
        """Length of each whole token as a browser counts it, in UTF-16 units."""
        return np.array([utf16_units(piece or "") for piece in self.whole], dtype=np.uint32)

    def split(self, tokens: Sequence[int], text: str) -> tuple[str, NDArray[np.uint32]]:
        """The response with its end token shown, and how many UTF-16 units of it each token wrote."""
        ids = [int(token) for token in tokens]
        if not all(0 <= token < len(self.bytes) for token in ids):
            return text, np.zeros(0, np.uint32)
        pieces = [self.whole[token] for token in ids]
        if all(piece is not None for piece in pieces):
            spoken = "".join(
                piece for piece, token in zip(pieces, ids, strict=True) if token not in self.special and piece
            )
            if self.kind != "other" or spoken == text:
                return "".join(piece for piece in pieces if piece), self.units[ids] if ids else np.zeros(0, np.uint32)
        parts = self.decode_bytes(ids) if self.kind != "other" else self.decode_windows(ids)
        return "".join(parts), np.array([utf16_units(part) for part in parts], dtype=np.uint32)

    def decode_bytes(self, ids: Sequence[int]) -> list[str]:
        """A character spread over several tokens belongs to the token that completes it."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        parts = [decoder.decode(self.bytes[token]) for token in ids]
        if parts:
            parts[-1] += decoder.decode(b"", final=True)
        return parts

    def decode_windows(self, ids: Sequence[int]) -> list[str]:
        """For decoders that place spaces themselves: what each token adds to the text of those before it."""
        parts = []
        for at in range(len(ids)):
            first = max(0, at - WINDOW)
            before = self.tokenizer.decode(ids[first:at], skip_special_tokens=False)
            parts.append(self.tokenizer.decode(ids[first : at + 1], skip_special_tokens=False)[len(before) :])
        return parts


def kind_of(tokenizer: Any) -> str:
    described = json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
    if "ByteLevel" in described:
        return "byte-level"
    if "ByteFallback" in described or "▁" in described or "\\u2581" in described:
        return "sentencepiece"
    return "other"


def utf16_units(text: str) -> int:
    return len(text) + sum(character > "\uffff" for character in text)


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers use: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF = byte_alphabet()
