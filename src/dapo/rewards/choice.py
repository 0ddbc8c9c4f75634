"""Verifier `choice`: which one option, A to E, a text names. Two options are two answers; one taken back is none."""

from __future__ import annotations

import re

from dapo.rewards.decision import Decision
from dapo.rewards.math.extract import final_statement
from dapo.rewards.math.rule import NOTHING_FINAL
from dapo.rewards.math.typography import plain, trimmed
from dapo.types import Task, Verdict

_MACRO = re.compile(r"\\(?:boxed|textbf|text|mathrm|mathbf)\s*")
_OPTION = re.compile(
    r"(?:option|choice|answer)?\s*(?P<open>[(\[]?)\s*(?P<letter>[A-Ea-e])\s*(?P<close>[)\].:]?)(?P<text>(?:\s+\S.*)?)",
    re.IGNORECASE | re.DOTALL,
)
_BARE_LETTER = re.compile(r"(?<![\w'])[(\[]?([A-E])[)\]]?(?![\w'])")
# What follows `B` or `B)`: another option, or a second thought.
_GOES_ON = re.compile(r"(?:or|and|nor|but|vs|versus|wait|actually|oops|sorry|hmm|no wait)\b|[/|,;&?]", re.IGNORECASE)
# `B) is wrong`, `B isn't it`: about the choice, and not the option's own text.
_VERB = r"(?:is|was|are|be|seems?|looks?|must be|should be|can(?:no|')t be|(?:is|was|are|ai)n'?t)"
_VERDICT = re.compile(
    rf"(?P<verb>{_VERB})\s+(?P<no>not\s+)?(?:(?:clearly|obviously|definitely|really|indeed|also|the|only|best|final)\s+)*"
    r"(?P<said>correct|right|true|valid|answer|option|choice|one|it|wrong|incorrect|false|invalid|impossible|out)\b"
    r"(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_AGREES = frozenset({"correct", "right", "true", "valid", "answer", "option", "choice", "one", "it"})
_STARTS_WITH_VERB = re.compile(rf"{_VERB}\b", re.IGNORECASE)
# After a letter without a bracket or a point these cannot be the option's text.
_DOUBTS = re.compile(
    r"\b(?:no|not|never|none|neither|nor|or|wait|wrong|incorrect|false|fails?|maybe|perhaps|possibly|actually|instead"
    r"|except|unless|either|both|(?:is|was|are|do|does|did|can|could|would|ai)n'?t|cannot)\b",
    re.IGNORECASE,
)
_REASON = re.compile(r"(?:because|since|as|for|due)\b|[\d$\\(=\-+.]", re.IGNORECASE)  # `A 42`; not `A number`
_CHANGED_MIND = re.compile(
    r"\b(?:or|and|nor|no|not|wait|but|maybe|perhaps|actually|option|choice|also)[\s,:(\[]+([a-e])[)\]\s.!?]*\Z",
    re.IGNORECASE,
)
_NAMES_BOTH = re.compile(r"(?:both|neither|either)\b", re.IGNORECASE)
_JOINING = (
    r"(?:or|and|also|maybe|perhaps|possibly|alternatively|otherwise|either|even|wait|no|not|actually|but)\b[\s,:*]{0,8}"
)
_BELOW = re.compile(
    rf"}}?(?:[ \t*_.$]|\\[)\]])*(?:\n[\s*_$>-]{{0,20}}(?:{_JOINING}){{0,4}}"
    rf"|[\s*_$]*(?:[,/&|]|{_JOINING})\s*(?:{_JOINING}){{0,3}})"
    r"(?:option\s+|\\boxed\s*)?[{(\[]*([A-Ea-e])[)}\].:]*[*_$ \t]*(?=\n|\Z)",
    re.IGNORECASE,
)
_MAX_BELOW = 20


def decide(task: Task) -> Decision:
    """One letter A to E, perhaps with the option's text after it; two letters are two answers."""
    statement = final_statement(task.response)
    if statement is None:
        return Decision(Verdict.UNPARSEABLE, None, NOTHING_FINAL)
    letters = {letter_in(text) for text in (statement.text, *statement.rivals)} | set(letters_below(statement.below))
    reference = letter_in(task.answer)
    extracted = statement.text.strip()[:200]
    if len(letters) == 1 and reference in letters and reference is not None:
        return Decision(Verdict.CORRECT, extracted)
    if not trimmed(plain(statement.text[:4_000])):
        return Decision(Verdict.UNPARSEABLE, None, "the final answer is empty")
    return Decision(Verdict.WRONG, extracted)


def letter_in(text: str) -> str | None:
    """The one option a text names: `B`, `(B)`, `\\text{B}`, `B) 42`, `option B`; None for none or several."""
    bare = trimmed(_MACRO.sub("", plain(text[:2_000])).replace("\x1f", " ").replace("\\ ", " ")).strip("{} .")
    match = _OPTION.fullmatch(bare.replace("{", "").replace("}", ""))
    if match is None or len(set(_BARE_LETTER.findall(bare))) > 1:
        return None
    letter, follows = match["letter"], match["text"].strip()
    if letter.islower() and len(bare) > 3:
        return None
    if follows and _is_taken_back(letter.upper(), follows, is_marked=bool(match["open"] or match["close"])):
        return None
    return letter.upper()


def letters_below(text: str) -> list[str]:
    """Options offered right after an answer: ` or c`, or a letter alone on one of the next lines."""
    letters: list[str] = []
    position = 0
    while len(letters) < _MAX_BELOW and (found := _BELOW.match(text, position)):
        letters.append(found[1].upper())
        position = found.end()
    return letters


def _is_taken_back(letter: str, text: str, *, is_marked: bool) -> bool:
    """Whether the words after a letter offer another or disown it. After `B)` or `B.` they may be the option's text."""
    if _GOES_ON.match(text):
        return True
    verdict = _VERDICT.match(text)
    if verdict is not None:
        is_denied = bool(verdict["no"]) or verdict["verb"].lower().endswith("t") or "t be" in verdict["verb"].lower()
        return is_denied or verdict["said"].lower() not in _AGREES or bool(_DOUBTS.search(verdict["rest"]))
    other = _CHANGED_MIND.search(text)
    if other is not None and other[1].upper() != letter and not _NAMES_BOTH.match(text):
        return True
    if is_marked:
        return False
    if _STARTS_WITH_VERB.match(text) or _DOUBTS.search(text):
        return True
    return letter == "A" and _REASON.match(text) is None
