"""The cleaned set as a file with a manifest: what was read, what was dropped and why, and what was restated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dapo.chat_client import ChatServer, NoReply
from dapo.config.own_verifier import own_verifier
from dapo.data.contamination import SHARE, EvaluationTexts, Overlap, find_contamination, looked_for
from dapo.data.prepare.integer_answers import Restated, integer_answer, with_answer
from dapo.data.prepare.journal import Journal
from dapo.data.prepare.restate import PROMPT_VERSION, NotVerified, ask_for_restatement, cannot_verify
from dapo.data.problems import Drop, ProblemSet, Why, hold_out, load_problems
from dapo.data.schemas import asked
from dapo.data.whole_file import holds_already, refuse_existing, write_whole
from dapo.errors import DataError
from dapo.files import sha256_of
from dapo.types import Problem

OUT_SUFFIXES = (".jsonl", ".parquet")
GIVE_UP_AFTER = 32  # questions without a reply, each tried several times: the server is gone
HOLD_OUT_SEED = 0  # the same problems are held out whenever the same set is prepared
MANY_NEAR = 0.1  # of the problems; above, an example is shown
EVIDENCE_CHARS = 200  # of a question in the manifest
KEEP_NEAR = ", or keep what differs by numbers and names only (a set made from one template): --keep-near-duplicates"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was written, and where."""

    out: Path
    manifest: Path
    problems: ProblemSet
    n_restated: int
    held_out: Path | None = None
    n_held: int = 0
    n_like_held: int = 0  # dropped from the set because they resemble a problem held out


def prepare(
    source: str | Sequence[str],
    out: Path,
    *,
    fields: Mapping[str, str] | None = None,
    verifier: str = "math",
    against: Sequence[str] = (),
    share: float = SHARE,
    near: bool = True,
    n_held: int = 0,
    integer_answers: bool = False,
    server: ChatServer | None = None,
    n_workers: int = 8,
    again: bool = False,
) -> Prepared:
    """Load, clean, take out evaluation problems, make answers integers and hold some out where asked.

    `near`: what equals an evaluation problem or one held out up to numbers and names is taken out too.
    Sets and manifest are written whole, or nothing is. `again`: files that an equal call wrote are left as they are.
    """
    manifest_path, journal_path = out.with_name(f"{out.name}.manifest.json"), out.with_name(f"{out.name}.journal.jsonl")
    held_path = out.with_name(f"{out.stem}.held-out{out.suffix}")
    if out.suffix.lower() not in OUT_SUFFIXES:
        raise DataError(f"--out {out}: suffix {out.suffix!r}.", remedy=f"Write {' or '.join(OUT_SUFFIXES)}.")
    places = [out, manifest_path, *([held_path] if n_held else [])]
    if not again:
        refuse_existing(*places)
    problems = load_problems(source, fields=fields, verifier=verifier)
    problems = without_contaminated(problems, against, share=share, near=near)
    restated: list[Restated] = []
    if integer_answers:
        problems, restated = with_integer_answers(problems, server, journal_path, n_workers=n_workers)
    sets, n_like_held = {out: problems}, 0
    if n_held:
        rest, held = hold_out(problems, n_held, seed=HOLD_OUT_SEED)
        problems = without_resemblance(rest, held, share=share, near=near)
        n_like_held = len(rest) - len(problems)
        sets = {held_path: held, out: problems}
    written: list[Path] = []

    def put(path: Path, write: Callable[[Path], None]) -> None:
        if again and holds_already(path, write):
            return
        if again and path.exists():
            there = [str(place) for place in places if place.exists() and place not in written]
            raise DataError(
                f"{path}: exists already, and is not what would be written.",
                remedy=f"Remove {', '.join(there)}, or choose another name; nothing is overwritten.",
            )
        write_whole(path, write)
        written.append(path)

    try:
        for path, one in sets.items():
            put(path, partial(write_problems, problems=one.problems, suffix=out.suffix.lower()))
        manifest = describe(problems, restated, out, against=against, server=server)
        if n_held:
            manifest["held_out"] = {
                "out": held_path.name, "out_sha256": sha256_of(held_path), "problems": n_held,
                "resembling_dropped": n_like_held, "looked_for": looked_for(share=share, near=near),
            }  # fmt: skip
        put(manifest_path, lambda path: write_json(path, manifest))
    except BaseException:
        for path in written:  # a set without its manifest is half a result; a file that appeared meanwhile is not ours
            path.unlink(missing_ok=True)
        raise
    return Prepared(out, manifest_path, problems, len(restated), held_path if n_held else None, n_held, n_like_held)


def without_contaminated(problems: ProblemSet, against: Sequence[str], *, share: float, near: bool) -> ProblemSet:
    """The set without problems that resemble one of the evaluation sets named."""
    for name in against:
        evaluation = load_problems(name, verifier=own_verifier(name) or "math", use="eval")
        problems = without_those_like(problems, evaluation, name, share=share, near=near)
    if not problems.problems:
        raise DataError(
            f"{problems.name}: every problem resembles one of {', '.join(against)}: "
            f"{looked_for(share=share, near=near)}.",
            remedy=f"Check --against{KEEP_NEAR if near else '.'}",
        )
    return problems


def without_resemblance(problems: ProblemSet, held: ProblemSet, *, share: float, near: bool) -> ProblemSet:
    """What was held out is no test where a near-duplicate of it, with another number or name, is trained on."""
    rest = without_those_like(problems, held, "a problem held out", share=share, near=near)
    if not rest.problems:
        raise DataError(
            f"{problems.name}: every problem resembles one of the {len(held):,} held out: "
            f"{looked_for(share=share, near=near)}.",
            remedy=f"Hold out fewer or evaluate on another set{KEEP_NEAR if near else ', or raise --ngram-overlap.'}",
        )
    return rest


def without_those_like(
    problems: ProblemSet, evaluation: ProblemSet, name: str, *, share: float, near: bool
) -> ProblemSet:
    texts = EvaluationTexts(name, [problem.question for problem in evaluation])
    overlaps = find_contamination([p.question for p in problems], texts, share=share, near=near).found
    found = {overlap.index: overlap for overlap in overlaps}
    drops = [
        Drop(
            Why.CONTAMINATED, problems.rows[problems[index].id], problems[index].question,
            f"{overlap.how} match with {name}, share {overlap.share:.2f}: {overlap.evaluation[:EVIDENCE_CHARS]}",
        )
        for index, overlap in found.items()
    ]  # fmt: skip
    kept = tuple(problem for index, problem in enumerate(problems) if index not in found)
    notes = (*problems.notes, *many_near([one for one in overlaps if one.how == "near-duplicate"], len(problems), name))
    return replace(problems, problems=kept, drops=(*problems.drops, *drops), notes=notes)


def many_near(found: Sequence[Overlap], n_problems: int, name: str) -> list[str]:
    """A note where so many are dropped as near-duplicates that they may be problems of their own."""
    if len(found) <= MANY_NEAR * n_problems:
        return []
    one, other = (" ".join(text.split())[:EVIDENCE_CHARS] for text in (found[0].question, found[0].evaluation))
    return [
        f"{len(found):,} of {n_problems:,} problems match {name} up to numbers and names, such as "
        f"{one!r} and {other!r}; if they are different problems, keep them: --keep-near-duplicates"
    ]


def with_integer_answers(
    problems: ProblemSet, server: ChatServer | None, journal: Path, *, n_workers: int
) -> tuple[ProblemSet, list[Restated]]:
    """Integer answers as they are, closed forms restated; the rest asked of the server, or dropped without one."""
    outcomes: list[Restated | str] = [integer_answer(problem) for problem in problems]
    if server is not None:
        open_ones = [at for at, outcome in enumerate(outcomes) if isinstance(outcome, str)]
        replies = ask_all([problems[at] for at in open_ones], server, journal, problems.sha256, n_workers=n_workers)
        for at, reply in zip(open_ones, replies, strict=True):
            outcomes[at] = reply
    kept: dict[str, Problem] = {}
    restated: list[Restated] = []
    drops = list(problems.drops)
    for problem, outcome in zip(problems, outcomes, strict=True):
        if isinstance(outcome, str):
            why = Why.NO_INTEGER if server is None else Why.NOT_VERIFIED
            drops.append(Drop(why, problems.rows[problem.id], problem.question, outcome))
            continue
        kept[outcome.problem.id] = outcome.problem
        if outcome.form:
            restated.append(outcome)
    if not kept:
        raise DataError(f"{problems.name}: no answer is or becomes an integer.", remedy="Leave out --integer-answers.")
    return replace(problems, problems=tuple(kept.values()), drops=tuple(drops)), restated


def ask_all(
    problems: list[Problem], server: ChatServer, path: Path, digest: str, *, n_workers: int
) -> list[Restated | str]:
    """Each problem's restatement, or why there is none; answered ones come from the journal of an earlier attempt."""
    unverifiable = {problem.id: why for problem in problems if (why := cannot_verify(problem))}
    asked = [problem for problem in problems if problem.id not in unverifiable]
    done: dict[str, dict[str, Any]] = {}
    if asked:
        header = {"problems": digest, "model": server.model, "prompt": PROMPT_VERSION}
        done = fill_journal(asked, server, Journal(path, header), n_workers=n_workers)
    return [unverifiable.get(problem.id) or outcome_of(problem, done[problem.id]) for problem in problems]


def fill_journal(
    problems: list[Problem], server: ChatServer, journal: Journal, *, n_workers: int
) -> dict[str, dict[str, Any]]:
    """Ask for what the journal lacks, several at a time. A dead server is given up early, and what came is kept."""
    no_reply: list[str] = []

    def one(problem: Problem) -> None:
        if problem.id in journal.done or len(no_reply) >= GIVE_UP_AFTER:
            return
        try:
            journal.add(line_of(problem, ask_for_restatement(problem, server)))
        except NotVerified as error:
            journal.add({"id": problem.id, "why": str(error)})
        except NoReply as error:
            no_reply.append(str(error))

    with ThreadPoolExecutor(n_workers) as pool:
        try:
            for task in [pool.submit(one, problem) for problem in problems]:
                task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if no_reply:
        n_done = sum(problem.id in journal.done for problem in problems)
        raise DataError(
            f"--llm {server.url}: no reply for {len(problems) - n_done:,} of {len(problems):,}: {no_reply[-1]}.",
            remedy=f"Run the same command again; the {n_done:,} answers in {journal.path.name} are not asked twice.",
        )
    return journal.done


def line_of(problem: Problem, restated: Restated) -> dict[str, Any]:
    new = restated.problem
    return {
        "id": problem.id, "question": new.question, "answer": new.answer,
        "form": restated.form, "asks": restated.asks, "values": restated.values,
    }  # fmt: skip


def outcome_of(problem: Problem, line: dict[str, Any]) -> Restated | str:
    if "why" in line:
        return str(line["why"])
    new = with_answer(problem, line["question"], int(line["answer"]))
    return Restated(new, line["form"], line["asks"], line["values"])


def row_of(problem: Problem) -> dict[str, object]:
    return {
        "id": problem.id,
        **asked(problem),
        "answer": problem.answer,
        "source": problem.source,
        **problem.meta,
    }


def write_problems(path: Path, problems: Sequence[Problem], suffix: str) -> None:
    writers: dict[str, Callable[[Path, Sequence[Problem]], None]] = {".jsonl": write_jsonl, ".parquet": write_parquet}
    writers[suffix](path, problems)


def write_jsonl(path: Path, problems: Sequence[Problem]) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:  # a lone surrogate in meta
        for problem in problems:
            file.write(json.dumps(row_of(problem), ensure_ascii=False, default=str) + "\n")


def write_parquet(path: Path, problems: Sequence[Problem]) -> None:
    """The four columns of a problem; the rest, which differs from row to row, goes into one JSON column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row_of(replace(problem, meta={})) | {"meta_json": json.dumps(dict(problem.meta), default=str)}
            for problem in problems]  # fmt: skip
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in rows[0]}), path)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def describe(
    problems: ProblemSet, restated: list[Restated], out: Path, *, against: Sequence[str], server: ChatServer | None
) -> dict[str, Any]:
    """The manifest: enough to know what is in the file and why the rest is not."""
    drops = [
        {"why": d.why.value, "row": d.row, "detail": d.detail, "question": d.question[:EVIDENCE_CHARS]}
        for d in problems.drops
    ]
    return {
        "out": out.name,
        "out_sha256": sha256_of(out),
        "problems": len(problems),
        "problems_sha256": problems.sha256,
        "sources": dict(problems.files),
        "notes": list(problems.notes),
        "against": list(against),
        "llm": {"model": server.model, "prompt": PROMPT_VERSION} if server else None,
        "dropped": dict(Counter(d.why.value for d in problems.drops)),
        "drops": drops,
        "restated": [
            {"id": r.problem.id, "original_answer": r.problem.meta["original_answer"], "form": r.form, "asks": r.asks,
             "values": r.values, "answer": r.problem.answer}
            for r in restated
        ],
    }  # fmt: skip
