"""The project's rule: the final answer is correct when it has the reference's mathematical value.

`decide` is exact and cheap and may run anywhere; where it cannot tell it returns None, and `decide_fully` (numerics,
then math-verify) is asked inside a worker that can be killed.
"""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache

from dapo.rewards.decision import Decision
from dapo.rewards.limits import MAX_REFERENCE_CHARS, MAX_STATEMENT_CHARS
from dapo.rewards.math import equivalence, units
from dapo.rewards.math.extract import Statement, final_statement
from dapo.rewards.math.prose import are_other_things
from dapo.rewards.math.rationals import TooLargeError, exact_or_none
from dapo.rewards.math.scalars import CompareScalars, UndecidedError, marks
from dapo.rewards.math.statement import Reading, read
from dapo.rewards.math.tokens import NotationError, UnknownNotationError
from dapo.rewards.math.tree import Node, free_symbols
from dapo.rewards.math.typography import plain, trimmed
from dapo.rewards.math.units import Mention
from dapo.types import Verdict

# math-verify would take one side of an equation; only where the other is a name, `x = ...`, is that the value.
_NAMED = re.compile(r"[\s$\\(\[]*[A-Za-z](?:_(?:\w|\{\w+\}))?\s*=[^=]*")
_INTEGER = re.compile(r"\s*-?\d{1,300}\s*", re.ASCII)
# `\\textbf{(C)}\\ 42`: an option's letter before its value.
_OPTION = re.compile(
    r"[\s$*]*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\(([A-E])\)[\s~]*\}?(?:\\[ ,;:]|[\s~:])*(?=\S)"
)
_RATIO_IN_WORDS = re.compile(r"(?<=[\d$])\s+to\s+(?=[\d$])")
_BESIDE = re.compile(r"(?:[$}\s]|\\[)\], ])*([^\n.;,:()]{0,60})")
NOTHING_FINAL = 'no "Answer:" line and no \\boxed{} in the response'
_SMALLEST_EXCLAIMED = 20  # `5!` is a factorial; `42!` at the end of a line of prose is enthusiasm


@lru_cache(maxsize=65_536)
def read_reference(answer: str) -> Reading:
    """The reference as a tree. NotationError when it is empty, too long or in no notation we read."""
    if not answer.strip():
        raise NotationError("it is empty")
    if len(answer) > MAX_REFERENCE_CHARS:
        raise NotationError(f"it has more than {MAX_REFERENCE_CHARS} characters")
    reading = read(answer.strip(), letters="symbols")
    if equivalence.settled(reading.node, compare=equivalence.trusting).op == "contradiction":
        raise NotationError("its sides differ")
    if reading.is_titled:  # `October 30`: the words are part of the answer
        return Reading(Node("text", name=" ".join(reading.spelled).casefold()), spelled=reading.spelled)
    return reading


def decide(response: str, answer: str) -> Decision | None:
    """The verdict by exact rules alone, or None where only numerics or algebra can tell."""
    statement = final_statement(response)
    if statement is None:
        return Decision(Verdict.UNPARSEABLE, None, NOTHING_FINAL)
    return _judge(statement, answer, None)


def decide_fully(response: str, answer: str) -> Decision:
    """`decide`, with numerics and math-verify for what is left. Only in a worker: it may take for ever."""
    from dapo.rewards.math import numerics, symbolic

    decision = decide(response, answer)
    if decision is not None:
        return decision
    statement = final_statement(response)
    assert statement is not None, "decide found none"
    decision = _judge(statement, answer, numerics.compare)
    if decision is None:
        try:
            is_same = all(
                ("=" not in text or "=" in answer or _NAMED.fullmatch(text)) and symbolic.same(answer, text)
                for text in (statement.text, *statement.rivals)
            )
        except MemoryError:
            raise
        except Exception as error:  # of another project's code, at what a model wrote: no reason to stop judging
            return _decision(False, statement, f"math-verify cannot compare them ({type(error).__name__})")
        decision = _decision(is_same, statement, "" if is_same else _reason(answer, statement.text, numerics.compare))
    return decision


def _judge(statement: Statement, answer: str, compare: CompareScalars | None) -> Decision | None:
    if not trimmed(plain(statement.text[:4_000])):
        return Decision(Verdict.UNPARSEABLE, "", "the final answer is empty")
    answers = (statement.text, *statement.rivals)
    undecided = False
    for text in answers:
        is_boxed = text in statement.boxed
        after = statement.below if is_boxed and text is statement.text else ""
        is_same = _same(answer, text, compare, is_boxed=is_boxed, after=after)
        if is_same is False:
            offered = "" if text is statement.text else f"also offered: {text[:80]}"
            message = offered or _reason(answer, text, compare)
            return _decision(False, statement, message)
        undecided |= is_same is None
    return None if undecided else _decision(True, statement)


def _decision(is_same: bool, statement: Statement, message: str = "") -> Decision:
    return Decision(Verdict.CORRECT if is_same else Verdict.WRONG, statement.text.strip()[:200], message)


def _reason(answer: str, text: str, compare: CompareScalars | None) -> str:
    """Why a final answer was refused, where it is more than another value."""
    if (unreadable := reference_error(answer)) is not None:
        return f"the reference cannot be judged against: {unreadable}"
    try:
        reading = read(text, letters="words" if _INTEGER.fullmatch(answer) else "symbols")
        if reading.is_hedged:
            return "an estimate"
        if equivalence.settled(reading.node, compare=compare or equivalence.trusting).op == "contradiction":
            return "the sides of the equation differ"
    except NotationError as error:
        return str(error)
    except (UndecidedError, TooLargeError):
        return ""
    if reading.node.op == "list" and _INTEGER.fullmatch(answer):
        return "several values"
    return ""


def _same(answer: str, text: str, compare: CompareScalars | None, *, is_boxed: bool, after: str) -> bool | None:
    """Whether a statement has the reference's value; None when undecided. `after`: what stands after its box."""
    try:
        reference = read_reference(answer)
    except NotationError:
        reference = None
    if reference is None:
        return True if _spelled(answer) == _spelled(text) else None
    readings, undecided = _readings(text, reference, is_boxed=is_boxed)
    for reading in readings:
        if _differ_in_unit(reference, reading, after):
            continue
        if reading.spelled and reading.spelled == reference.spelled:
            return True
        if reading.is_hedged and not reference.is_hedged:
            continue
        if reference.node.op == "text" and " ".join(reading.spelled).casefold() == reference.node.name:
            return True
        try:
            for alternative in _alternatives(answer, reference, reading):
                if equivalence.same(alternative, reading.node, compare):
                    return True
        except TooLargeError:
            continue
        except UndecidedError:
            undecided = True
    if undecided:
        return None
    return False


def _differ_in_unit(reference: Reading, reading: Reading, after: str) -> bool:
    """Cents for dollars, cubic metres for square metres, girls for boys. What only one of the two names is none."""
    if reference.things and are_other_things(reference.things, reading.things or _things_beside(after)):
        return True
    wanted = _units(reference)
    if not wanted:
        return False
    beside = _unit_beside(after) if after else []
    return any(not units.agree(one, said) for one in wanted for said in (*_units(reading), *beside))


def _unit_beside(after: str) -> list[Mention]:
    """`\\boxed{42}$ cm^2`: the unit of the words on the box's line."""
    beside = _BESIDE.match(after)
    assert beside is not None, "the pattern matches nothing as well"
    return units.unit_after(beside[1])


def _things_beside(after: str) -> frozenset[str]:
    """`\\boxed{42} boys`, where no more than two words follow: longer ones are prose."""
    beside = _BESIDE.match(after)
    if beside is None or not 1 <= len(beside[1].split()) <= 2:
        return frozenset()
    try:
        return read(f"1 {beside[1]}").things
    except NotationError:
        return frozenset()


def _units(reading: Reading) -> list[Mention]:
    node, signs, letters = reading.node, list[str](), list[Mention]()
    if node.op != "num":
        node = equivalence.settled(node, compare=equivalence.trusting)
        signs, letters = marks(node.args[-1] if node.op == "eq" else node)  # x = 42 m
    return units.with_signs([*reading.units, *letters], [*reading.money, *signs])


def _readings(text: str, reference: Reading, *, is_boxed: bool) -> tuple[list[Reading], bool]:
    """The ways a statement may be read: commas as list signs where a list is wanted, a final `!` as punctuation.

    In a box, as in any formula, `!` is a factorial.

    And whether math-verify should be asked: an unknown macro, beside a reference that is not a plain number.
    """
    node = equivalence.settled(reference.node, compare=equivalence.trusting)
    letters = "words" if not free_symbols(node) else "symbols"
    readings: list[Reading] = []
    is_unknown = False
    for commas in ("thousands", "list") if node.op in ("list", "set", "bracket") else ("thousands",):
        try:
            readings.append(read(text, commas=commas, letters=letters))
        except UnknownNotationError:
            is_unknown = node.op not in ("num", "neg", "div", "text", "list")
        except NotationError:
            continue
    if node.op == "ratio" and not readings and _RATIO_IN_WORDS.search(text):
        with contextlib.suppress(NotationError):
            readings.append(read(_RATIO_IN_WORDS.sub(":", text), letters=letters))
    if len(text) <= MAX_STATEMENT_CHARS and (label := _OPTION.match(text)) and not readings:
        with contextlib.suppress(NotationError):
            readings.append(read(label[1] if node.op == "sym" else text[label.end() :], letters=letters))
    bare_text = text.strip(" *_\n")
    if not is_boxed and bare_text.endswith("!") and bare_text[:-1].rstrip()[-1:] not in ("!", "$", ")", "}"):
        try:
            calm = read(bare_text[:-1], letters=letters)
            value = exact_or_none(equivalence.settled(calm.node, compare=equivalence.trusting))
            if value is None or abs(value) > _SMALLEST_EXCLAIMED:
                readings.append(calm)
        except NotationError:
            pass
    return readings, is_unknown and not readings


def _alternatives(answer: str, reference: Reading, reading: Reading) -> list[Node]:
    """The reference; as a list, where `100,200` could be one and the answer is one; `42 m` as 42 beside metres."""
    nodes = [reference.node]
    if reading.units and not reference.units and not reference.money:
        number, letters = units.split_letters(reference.node)
        if letters and all(units.agree(frozenset({letters}), said) for said in reading.units):
            nodes.append(number)
    if reading.node.op in ("list", "set") and re.search(r"\d,\d{3}", answer):
        with contextlib.suppress(NotationError):
            nodes.append(read(answer.strip(), commas="list").node)
    return nodes


def _spelled(text: str) -> str:
    """A spelling for references no notation covers; white space counts only between two letters or digits."""
    text = trimmed(plain(text)).replace("\x1f", " ")
    return re.sub(r"(?<![^\W_])\s+|\s+(?![^\W_])", "", re.sub(r"\\[dt]frac", r"\\frac", text))


def reference_error(answer: str) -> str | None:
    """Why a reference cannot be judged against, or None. Integers cost a regular expression."""
    if _INTEGER.fullmatch(answer):
        return None
    try:
        reading = read_reference(answer)
    except NotationError as error:
        return str(error)
    if reading.node.op == "approx":
        return "it is an estimate"
    return None
