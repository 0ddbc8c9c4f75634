"""When two questions are the same text: the normalized key merges rows, the loose key and n-grams find suspects."""

from __future__ import annotations

import hashlib
import re

WORD = re.compile(r"[0-9a-z]+|[一-鿿]")
NOT_LOOSE = re.compile(r"[\W_]+")


def normalized(question: str) -> str:
    """White space and case normalized. Safe to merge by: signs, operators and digits stay."""
    return " ".join(question.split()).casefold()


def loose(question: str) -> str:
    """Letters and digits of any script, lower case. Erases signs and operators: finds suspects, never merges."""
    return NOT_LOOSE.sub("", question.lower())


def words(question: str) -> list[str]:
    """Lower-case words and numbers; a Chinese character is a word, since that text has no blanks."""
    return WORD.findall(question.lower())


def ngrams(question: str, n: int) -> set[int]:
    """Hashes of the runs of n words. Empty when the question is shorter: such a one can only match as a whole."""
    run = words(question)
    return {stable_hash(" ".join(run[i : i + n])) for i in range(len(run) - n + 1)}


def stable_hash(text: str) -> int:
    """64 bits that are the same in every process; `hash` is salted."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def problem_id(question: str) -> str:
    """16 hex digits of the normalized question: the same problem has the same id in every file and run."""
    return hashlib.sha256(normalized(question).encode()).hexdigest()[:16]
