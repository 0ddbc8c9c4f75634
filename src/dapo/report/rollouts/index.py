"""The index of a recorded step: what the page knows of it without loading its responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo.report.behaviour import KINDS, Phrases
from dapo.report.parts import histogram, is_histogram, is_row_of_parts, mean_of
from dapo.report.rollouts.pieces import TokenPieces
from dapo.report.rollouts.recorded import DROPPED, Row, clean, clip_of, number, whole
from dapo.rewards.math.answer_values import Value, value_of
from dapo.types import CORRECT

FORMAT = 1
QUESTION_CHARACTERS = 120
TOP = 12

# The columns of the groups, by what they hold.
TEXTS = ("id", "question", "answer", DROPPED)
NUMBERS = ("tokens", "reward")
COUNTS = ("visit", "piece", "at", "size", "correct", "unparseable", "truncated", "answers", "low", "high", *KINDS)


class Index:
    """What the page knows of a step without loading its responses: one line per group, and sums over all of them."""

    def __init__(self, step_name: str, phrases: Phrases, parts: Sequence[str] = ()) -> None:
        self.parts = list(parts)
        self.values: dict[str, list[float | None]] = {name: [] for name in (CORRECT, *parts)} if parts else {}
        self.step = int(step_name.removeprefix("step-"))
        self.phrases = phrases.name
        columns = (*TEXTS, *NUMBERS, *COUNTS, *(("parts",) if parts else ()))
        self.groups: dict[str, list[Any]] = {name: [] for name in columns}
        self.answers: Counter[Value] = Counter()
        self.spellings: dict[Value, Counter[str]] = {}
        self.references: Counter[Value] = Counter()
        self.clipped: dict[int, Counter[str]] = {-1: Counter(), 1: Counter()}
        self.verdicts: Counter[str] = Counter()
        self.answer_only = 0

    def add(
        self,
        rows: Sequence[Row],
        responses: Sequence[Mapping[str, Any]],
        *,
        piece: int,
        at: int,
        pieces: TokenPieces | None,
    ) -> None:
        first = rows[0]
        clips = [
            np.zeros(0, np.int8) if "unreadable" in response else clip_of(row)
            for row, response in zip(rows, responses, strict=True)
        ]
        line = {
            "id": str(first["problem_id"]),
            "visit": whole(first.get("visit")),
            "question": " ".join(clean(first.get("question"))[: 2 * QUESTION_CHARACTERS].split())[:QUESTION_CHARACTERS],
            "answer": clean(first.get("answer"))[:QUESTION_CHARACTERS],
            "piece": piece,
            "at": at,
            "size": len(rows),
            "correct": sum(r["verdict"] == "CORRECT" for r in responses),
            "unparseable": sum(r["verdict"] == "UNPARSEABLE" for r in responses),
            "truncated": sum(r["stop"] == "LENGTH" for r in responses),
            "answers": len({None if r["extracted"] is None else value_of(r["extracted"]) for r in responses}),
            "tokens": round(float(np.mean([r["n"] for r in responses])), 1),
            "reward": number(float(np.mean([r["reward"] or 0.0 for r in responses]))),
            "low": int(sum((clip < 0).sum() for clip in clips)),
            "high": int(sum((clip > 0).sum() for clip in clips)),
            DROPPED: clean(first.get(DROPPED)),
        }
        if self.parts:
            by_part = list(zip(*([value for _, value in r["parts"]] for r in responses), strict=True))
            line["parts"] = [mean_of(values) for values in by_part]
        for kind in KINDS:
            line[kind] = sum(kind in r["behaviour"] for r in responses)
        for name, value in line.items():
            self.groups[name].append(value)
        if line[DROPPED]:  # shown, but in no sum: the sums describe what the step was trained on
            return
        if self.parts:
            for name, values in zip(self.values, ([r["raw"] for r in responses], *by_part), strict=True):
                self.values[name] += values
        self.references[value_of(clean(first.get("answer")))] += 1
        for said in (r["extracted"] for r in responses if r["extracted"] is not None):
            self.answers[value_of(said)] += 1
            self.spellings.setdefault(value_of(said), Counter())[said[:QUESTION_CHARACTERS]] += 1
        self.verdicts.update(r["verdict"] for r in responses)
        self.answer_only += sum(r["is_answer_only"] for r in responses)
        if pieces is not None:
            for row, clip in zip(rows, clips, strict=True):
                for place in np.flatnonzero(clip):
                    token = int(row["tokens"][place])
                    self.clipped[int(np.sign(clip[place]))][token_name(pieces, token)] += 1

    def trained(self, name: str) -> int:
        """The sum of a column over the groups that were trained on."""
        return sum(n for n, why in zip(self.groups[name], self.groups[DROPPED], strict=True) if not why)

    def to_json(self) -> dict[str, Any]:
        n = self.trained("size")
        top = [(value, self.spellings[value].most_common(1)[0][0], n) for value, n in self.answers.most_common(1)]
        return {
            "format": FORMAT,
            "step": self.step,
            "phrases": self.phrases,
            "groups": self.groups,
            "summary": {
                "responses": n,
                "pieces": max(self.groups["piece"], default=-1) + 1,
                "groups": sum(not why for why in self.groups[DROPPED]),
                DROPPED: sum(bool(why) for why in self.groups[DROPPED]),
                "behaviour": {kind: self.trained(kind) for kind in KINDS},
                "answer_only": self.answer_only,
                "verdicts": sorted(self.verdicts.items()),
                "top_answer": [*top[0][1:], self.references[top[0][0]]] if top else None,
                "clipped_low": self.clipped[-1].most_common(TOP),
                "clipped_high": self.clipped[1].most_common(TOP),
                **(
                    {"parts": [[name, *histogram(values)] for name, values in self.values.items()]}
                    if self.parts
                    else {}
                ),
            },
        }


def token_name(pieces: TokenPieces, token: int) -> str:
    return pieces.bytes[token].decode(errors="replace") if 0 <= token < len(pieces.bytes) else f"#{token}"


def is_index(index: Any, step_name: str) -> bool:
    """Whether it has the shape of `Index.to_json`, and is of the step whose name it lies under."""
    if not (isinstance(index, dict) and index.get("format") == FORMAT and is_whole(index.get("step"))):
        return False
    groups, summary = index.get("groups"), index.get("summary")
    if index["step"] < 0 or step_name != f"step-{index['step']:06d}" or not isinstance(index.get("phrases"), str):
        return False
    return isinstance(groups, dict) and is_columns(groups) and isinstance(summary, dict) and is_summary(summary)


def is_columns(groups: dict[str, Any]) -> bool:
    columns = [groups.get(name) for name in (*TEXTS, *NUMBERS, *COUNTS, *(("parts",) if "parts" in groups else ()))]
    if not all(isinstance(column, list) and len(column) == len(columns[0] or ()) for column in columns):
        return False
    return (
        all(is_row_of_parts(row) for row in groups.get("parts", ()))
        and all(isinstance(value, str) for name in TEXTS for value in groups[name])
        and all(value is None or isinstance(value, int | float) for name in NUMBERS for value in groups[name])
        and all(is_whole(value) for name in COUNTS for value in groups[name])
        and all(value >= 0 for value in (*groups["piece"], *groups["at"], *groups["size"]))
    )


def is_summary(summary: dict[str, Any]) -> bool:
    counts = ("responses", "pieces", "groups", DROPPED, "answer_only")
    behaviour, top = summary.get("behaviour"), summary.get("top_answer")
    pairs = [summary.get(name) for name in ("verdicts", "clipped_low", "clipped_high")]
    parts = summary.get("parts", [])  # of a reward that has several
    return (
        isinstance(parts, list)
        and all(map(is_histogram, parts))
        and summary.keys() - {"parts"}
        == {*counts, "behaviour", "top_answer", "verdicts", "clipped_low", "clipped_high"}
        and all(is_whole(summary[name]) for name in counts)
        and isinstance(behaviour, dict)
        and behaviour.keys() == set(KINDS)
        and all(map(is_whole, behaviour.values()))
        and all(isinstance(pair, list) and all(map(is_counted, pair)) for pair in pairs)
        and (top is None or (isinstance(top, list) and len(top) == 3 and is_counted(top[:2]) and is_whole(top[2])))
    )


def is_counted(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and is_whole(pair[1])


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
