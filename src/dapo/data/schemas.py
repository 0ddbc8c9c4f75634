"""Row layouts, recognised by their columns: verl (DAPO-Math-17K), GSM8K, MATH, AIME, chats, question and answer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo.data.rows import Row
from dapo.data.wrappers import WRAPPER, bare_question
from dapo.errors import DataError
from dapo.types import Problem

QUESTION_COLUMNS = ("question", "problem")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth")
ID_COLUMNS = ("id", "unique_id", "problem_id")
NOT_META = {"prompt", "reward_model", "extra_info", "data_source", "solution", "raw_problem", "index", "split"}
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+")
MAX_QUESTION_CHARS = 2**20
MISSING = ("nan", "NaN")
SYSTEM_TEXT = "system text"
META_COLUMN = "meta_json"


@dataclass(frozen=True, slots=True)
class Record:
    """One row as a question and its reference, None where the row has none; `removed` names text taken off."""

    question: str
    answer: str | None
    id: str | None = None
    source: str = ""
    meta: Mapping[str, object] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    turns: tuple[tuple[str, str], ...] = ()  # of a row that is a chat


@dataclass(frozen=True, slots=True)
class Schema:
    """A layout's name and how to read one of its rows; KeyError or TypeError for a row of another layout."""

    name: str
    read: Callable[[Row], Record]


def recognise(row: Row, fields: Mapping[str, str] | None, *, where: str, needs_answer: bool = True) -> Schema:
    """The schema of a file from one of its rows. `fields` (config: data.fields) wins over recognition.

    Without `needs_answer` (a verifier that runs tests, or a user's own) tests will do instead.
    """
    if fields:
        return mapped(row, fields, where=where, needs_answer=needs_answer)
    columns = {name.lower(): name for name in row}
    if isinstance(row.get("prompt"), list) and isinstance(row.get("reward_model"), dict):
        return Schema("verl", read_verl)
    question = next((columns[name] for name in QUESTION_COLUMNS if name in columns), None)
    answer = answer_column(row)
    if question and answer:
        if "####" in str(row[answer]):
            return Schema("gsm8k", lambda row: read_gsm8k(row, question, answer))
        name = "aime" if columns.keys() & {"year", "aime_number"} else f"{question.lower()}/{answer.lower()}"
        return Schema(name, lambda row: read_plain(row, question, answer, columns.get("solution")))
    if answer and not question and isinstance(row.get("messages"), list):
        return Schema(f"messages/{answer.lower()}", lambda row: read_messages(row, answer))
    if question and "solution" in columns:
        return Schema("math", lambda row: read_boxed(row, question, columns["solution"]))
    if question and "tests" in columns:
        if not needs_answer:
            return Schema(f"{question.lower()}/tests", lambda row: read_tests(row, question))
        raise DataError(
            f"{where}: has tests, but no answer, and this verifier compares answers.",
            remedy="Problems with tests are for the verifier code: rewards.verifier = code, or --verifier code.",
        )
    raise DataError(
        f"{where}: no known schema has the columns {', '.join(row) or '(none)'}.",
        remedy='Map them: data.fields = {question = "COLUMN", answer = "COLUMN.SUB"}, or on the command line '
        "--field question=COLUMN --field answer=COLUMN. A CSV file needs a header line.",
    )


def answer_column(row: Row) -> str | None:
    columns = {name.lower(): name for name in row}
    return next((columns[name] for name in ANSWER_COLUMNS if name in columns), None)


def mapped(row: Row, fields: Mapping[str, str], *, where: str, needs_answer: bool = True) -> Schema:
    """A schema from the user's own names; columns may be nested: reward_model.ground_truth."""
    for need in ("question", "answer") if needs_answer else ("question",):
        if need not in fields:
            raise DataError(
                f"data.fields = {dict(fields)}: no {need}.", remedy=f'Name its column: data.fields.{need} = "COLUMN".'
            )
    for name, path in fields.items():
        if not has(row, path):
            raise DataError(
                f"data.fields.{name} = {path!r}: {where} has no such column. Its columns: {', '.join(row)}.",
                remedy="Name one of these, or a part of one with a dot: COLUMN.SUB.",
            )

    def read(row: Row) -> Record:
        question, removed = bare_question(question_text(lookup(row, fields["question"])))
        meta = {
            name: lookup(row, path)
            for name, path in fields.items()
            if name not in {"question", "answer", "id", "source"}
        }
        answer = fields.get("answer")
        return Record(
            question,
            "" if answer is None else reference_text(lookup(row, answer) if has(row, answer) else None),
            id=reference_text(lookup(row, fields["id"])) if "id" in fields else None,
            source=str(lookup(row, fields["source"])) if "source" in fields else "",
            meta=meta,
            removed=removed,
        )

    return Schema("data.fields", read)


def has(row: Row, path: str) -> bool:
    try:
        lookup(row, path)
    except (KeyError, TypeError):
        return False
    return True


def lookup(row: Row, path: str) -> Any:
    """`row["a"]["b"]` for "a.b"; a column whose own name holds the dot comes first."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        value = value[part]
    return value


def question_text(value: object) -> str:
    """The text of a question column: a string, or a chat's last user message."""
    if isinstance(value, list):
        value = next((turn["content"] for turn in reversed(value) if turn["role"] == "user"), None)
    if not isinstance(value, str):
        raise TypeError(f"the question is a {type(value).__name__}, not text")
    return value


def reference_text(value: object) -> str | None:
    """A reference as text, None where there is none. Whole floats lose their ".0"; lists of one are opened.

    NaN is how tables write a missing value, also in words where one was written out as text.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict | list):
        value = json.dumps(value, ensure_ascii=False, default=str)
    text = str(value).strip()
    return None if text in MISSING else text


def read_verl(row: Row) -> Record:
    """`prompt` is a chat, `reward_model.ground_truth` the reference, `extra_info.raw_problem` at best the bare text."""
    extra = row.get("extra_info") or {}
    removed: tuple[str, ...] = ()
    if any(turn["role"] == "system" for turn in row["prompt"]):
        removed = (SYSTEM_TEXT,)
    prompt = question_text(row["prompt"])
    raw = extra.get("raw_problem")
    question, also = bare_question(raw or prompt)
    if raw and raw.strip() != prompt.strip():
        also = (WRAPPER, *also)
    meta = {
        k: v for k, v in {**extra, "ability": row.get("ability")}.items() if v not in (None, "") and k not in NOT_META
    }
    meta.pop("answer", None)
    answer = reference_text(row["reward_model"]["ground_truth"])
    return Record(question, answer, source=str(row.get("data_source") or ""), meta=meta, removed=removed + also)


def read_gsm8k(row: Row, question: str, answer: str) -> Record:
    """The reference stands after the last ####; before it a worked solution."""
    text, removed = bare_question(question_text(row[question]))
    _, mark, reference = str(row[answer] or "").rpartition("####")
    reference = reference.strip() if mark else ""
    if THOUSANDS.fullmatch(reference):
        reference = reference.replace(",", "")
    return Record(
        text, reference or None, id=own_id(row), source="gsm8k", meta=rest(row, question, answer), removed=removed
    )


def read_plain(row: Row, question: str, answer: str, solution: str | None) -> Record:
    """A column each; an empty answer is looked for in the solution's last box."""
    text, removed = bare_question(question_text(row[question]))
    reference = reference_text(row.get(answer))
    if not reference and solution is not None:
        reference = last_boxed(str(row.get(solution) or "")) or reference
    source = str(row.get("data_source") or row.get("source") or "")
    return Record(text, reference, id=own_id(row), source=source, meta=rest(row, question, answer), removed=removed)


def read_boxed(row: Row, question: str, solution: str) -> Record:
    """MATH's own files: the reference is what the solution boxes last."""
    text, removed = bare_question(question_text(row[question]))
    reference = last_boxed(str(row.get(solution) or ""))
    return Record(text, reference, id=own_id(row), source="math", meta=rest(row, question), removed=removed)


def read_tests(row: Row, question: str) -> Record:
    """A question whose responses are judged by its tests, which are part of `meta`."""
    text, removed = bare_question(question_text(row[question]))
    source = str(row.get("data_source") or row.get("source") or "")
    return Record(text, "", id=own_id(row), source=source, meta=rest(row, question), removed=removed)


def read_messages(row: Row, answer: str) -> Record:
    """A chat that is put to the model as it is: perhaps a system message, then turns of which the last is a user's."""
    turns = tuple((turn["role"], turn["content"]) for turn in row["messages"])
    roles = [role for role, _ in turns]
    if not all(isinstance(text, str) and text.strip() for _, text in turns):
        raise TypeError("a message has no text")
    if not roles or roles[-1] != "user":
        raise TypeError(f"the last message is of {roles[-1]!r}, not of 'user'" if roles else "there are no messages")
    if not set(roles[:1]) <= {"system", "user"} or not set(roles[1:]) <= {"user", "assistant"}:
        raise TypeError(f"roles {', '.join(map(str, roles))}: a system message comes first, then user and assistant")
    text = turns[0][1] if len(turns) == 1 else "\n\n".join(f"{role}: {content}" for role, content in turns)
    source = str(row.get("data_source") or row.get("source") or "")
    reference = reference_text(row.get(answer))
    return Record(text, reference, id=own_id(row), source=source, meta=rest(row, "messages", answer), turns=turns)


def asked(problem: Problem) -> dict[str, object]:
    """The column of a problem's question, or of the chat that it is."""
    if not problem.turns:
        return {"question": problem.question}
    return {"messages": [{"role": role, "content": text} for role, text in problem.turns]}


def own_id(row: Row) -> str | None:
    """The data's own id where it is text; a bare number is only a row number and would clash between files."""
    value = next((row[name] for name in ID_COLUMNS if row.get(name)), None)
    return value if isinstance(value, str) and not (value.isdigit() and len(value) < 16) else None


def rest(row: Row, *used: str) -> dict[str, object]:
    """What a table or a verifier may want in addition: a level, a subject, a code problem's tests."""
    skip = {*used, *ID_COLUMNS, *NOT_META, META_COLUMN, "source"}
    meta = {name: value for name, value in row.items() if name not in skip and value not in (None, "")}
    return {**meta, **unpacked(row.get(META_COLUMN))}


def unpacked(value: object) -> dict[str, object]:
    """The JSON column that `dapo data prepare` writes into parquet files."""
    if not isinstance(value, str):
        return {}
    try:
        meta = json.loads(value)
    except (ValueError, RecursionError):
        return {META_COLUMN: value}
    return meta if isinstance(meta, dict) else {META_COLUMN: value}


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} or \fbox{…} with balanced braces."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    opening = text.find("{", start)
    if start < 0 or opening < 0 or text[start:opening].strip() not in ("\\boxed", "\\fbox"):
        return None
    depth = 0
    for at in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[opening + 1 : at].strip() or None
    return None
