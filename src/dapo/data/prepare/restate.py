r"""The paper's data transformation with a model's help: four stages asked for, and only what can be recomputed is kept.

The model states the answer's form with letters, their values, the rewritten question, and one integer. Nothing of it is
believed: the form with the values put in must equal the original answer exactly, the asked sum the integer, the
letters must be new and determined, and the rewritten question must keep every number of the original.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

from dapo.chat_client import ChatServer, Refused
from dapo.data.closed_forms import ExactValue, NoClosedForm, parse
from dapo.data.prepare.integer_answers import Restated, letters_used, with_answer
from dapo.data.references import plain_answer
from dapo.types import Problem

PROMPT_VERSION = 1  # part of the journal: answers to another prompt are not resumed

SYSTEM = r"""You rewrite mathematics problems so that their answer is one integer. Work in four stages.

1. Format. Given the problem and its answer, state the form of the answer with letters for its integers. Use letters
   that do not occur in the problem. Make the letters determined: one fraction in lowest terms, no square factor under
   a root, positive integers (signs stand in the form). An answer of several parts has the form (part, part).
2. Rewrite. Restate the whole problem, changing nothing but the end: say that the answer has this form, state the
   conditions that determine the letters, and ask for the sum of the letters.
3. Solve the rewritten problem step by step.
4. Give the one integer.

End with these five lines and nothing after them. Write form and sum in plain text with + - * / ^ sqrt( ) and pi:
<form>k-m*sqrt(n)</form>
<values>k=11, m=2, n=6</values>
<question>the whole rewritten problem</question>
<sum>k+m+n</sum>
<integer>19</integer>"""

EXAMPLE_PROBLEM = r"""Problem: Simplify $\sqrt{25-4\cdot 6 \sqrt{1}}\cdot(3-\sqrt{8})$.
Answer: 3-2\sqrt{2}"""

EXAMPLE_REPLY = r"""1. The answer has the form k-m*sqrt(n); the letters k, m, n do not occur in the problem.
2. I ask for k+m+n and require that n has no square factor.
3. $\sqrt{25-24}=1$, so the value is $3-\sqrt 8=3-2\sqrt 2$; k=3, m=2, n=2.
4. 3+2+2=7.
<form>k-m*sqrt(n)</form>
<values>k=3, m=2, n=2</values>
<question>Simplify $\sqrt{25-4\cdot 6 \sqrt{1}}\cdot(3-\sqrt{8})$. The answer can be written in the form $k-m\sqrt{n}$, where $k$, $m$ and $n$ are positive integers and $n$ is not divisible by the square of any prime. Find $k+m+n$.</question>
<sum>k+m+n</sum>
<integer>7</integer>"""  # noqa: E501

PARTS = ("form", "values", "question", "sum", "integer")
ASSIGNMENT = re.compile(r"([A-Za-z])\s*=\s*([+-]?\d{1,30})")
INTEGER = re.compile(r"[+-]?\d{1,60}")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
LETTER = re.compile(r"(?<![A-Za-z\\])(?:[a-zA-Z])(?![a-zA-Z])")
OUTER = re.compile(r"\\?[({](.*?)\\?[)}]", re.DOTALL)


class NotVerified(ValueError):
    """Why a model's restatement is not kept."""


def messages(problem: Problem) -> list[dict[str, str]]:
    asked = f"Problem: {problem.question}\nAnswer: {problem.answer}"
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": EXAMPLE_PROBLEM},
        {"role": "assistant", "content": EXAMPLE_REPLY},
        {"role": "user", "content": asked},
    ]


def ask_for_restatement(problem: Problem, server: ChatServer) -> Restated:
    """Ask, and verify. NotVerified says why nothing is kept; NoReply, that the server did not answer."""
    try:
        return verified(problem, server.ask(messages(problem)))
    except Refused as error:
        raise NotVerified(f"the server refused: {error}") from None


def cannot_verify(problem: Problem) -> str | None:
    """Why a restatement of this problem could not be checked, so that it is not worth asking; None if it could."""
    try:
        original_value(problem)
    except NotVerified as error:
        return str(error)
    return None


def original_value(problem: Problem) -> tuple[ExactValue, ...]:
    """The exact value of the original answer; of a tuple or list, of each component."""
    try:
        return tuple(parse(part) for part in components(plain_answer(problem.answer)))
    except NoClosedForm as error:
        raise NotVerified(f"the original answer has no value to check against: {error}") from None


def components(text: str) -> list[str]:
    """The parts of (a, b) or a, b, c; a single number is its own part. Intervals are not lists of numbers."""
    text = text.replace("\\left", "").replace("\\right", "").strip()
    outer = OUTER.fullmatch(text)
    parts, depth = [""], 0
    for character in outer[1] if outer and "," in outer[1] else text:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def verified(problem: Problem, reply: str) -> Restated:
    """The restatement in a reply, if everything in it that can be recomputed agrees with the original."""
    parts = sections(reply)
    values = {letter: int(number) for letter, number in ASSIGNMENT.findall(parts["values"])}
    form, asks, question = parts["form"].strip(), parts["sum"].strip(), parts["question"].strip()
    if not values or ASSIGNMENT.sub("", parts["values"]).strip(" ,;\n"):
        raise NotVerified(f"values that are not letters with integers: {parts['values'].strip()[:80]}")
    if clash := {letter.lower() for letter in values} & letters_used(problem.question):
        raise NotVerified(f"letters the problem already uses: {', '.join(sorted(clash))}")
    if not INTEGER.fullmatch(parts["integer"].strip()):
        raise NotVerified(f"not one integer: {parts['integer'].strip()[:80]}")
    integer = int(parts["integer"])
    check_form(form, values, problem)
    check_sum(asks, values, integer)
    check_question(problem, question, values)
    return Restated(with_answer(problem, question, integer), form, asks, values)


def check_form(form: str, values: dict[str, int], problem: Problem) -> None:
    """The form with the values put in is the original answer, and the values are determined by it."""
    originals, written = original_value(problem), components(form)
    if len(written) != len(originals):
        raise NotVerified(f"{form} has {len(written)} parts, the original answer {problem.answer} has {len(originals)}")
    if any(value < 1 for value in values.values()):
        raise NotVerified(f"{values}: a letter is not positive; its sign belongs into the form")
    if set(LETTER.findall(form)) != values.keys():
        raise NotVerified(f"{form} must have the letters {', '.join(values)} and no others")
    for part, original in zip(written, originals, strict=True):
        if value_of(part, values) != original:
            raise NotVerified(f"{form} with {values} is not the original answer {problem.answer}")
        check_determined(part, {letter: values[letter] for letter in LETTER.findall(part)}, original)


def check_determined(form: str, values: dict[str, int], original: ExactValue) -> None:
    """The letters are the number's own integers: lowest terms, nothing to pull out of a root.

    3·4 is 12 and so is 2·6: letters that are not canonical are not determined by the problem.
    """
    if values and without_ones(values.values()) != without_ones(canonical_integers(original)):
        raise NotVerified(f"{form} with {values} is not in lowest terms, or its letters are not determined")


def canonical_integers(value: ExactValue) -> list[int]:
    """The integers of (Σ n_i √r_i)/d in lowest terms: d, every |n_i| and every r_i."""
    d = math.lcm(*(c.denominator for _, c in value.terms))
    return [d, *(abs(int(c * d)) for _, c in value.terms), *(radicand for (radicand, _), _ in value.terms)]


def without_ones(values: Iterable[int]) -> list[int]:
    return sorted(value for value in values if value != 1)


def check_sum(asks: str, values: dict[str, int], integer: int) -> None:
    if sorted(LETTER.findall(asks)) != sorted(values):
        raise NotVerified(f"the sum {asks} must have each of {', '.join(values)} once")
    if value_of(asks, values).as_rational() != integer:
        raise NotVerified(f"{asks} with {values} is not {integer}")


def sections(reply: str) -> dict[str, str]:
    """The last of each tagged part, searched from the end: a long garbled reply costs no more than its length."""
    parts: dict[str, str] = {}
    for name in PARTS:
        end = reply.rfind(f"</{name}>")
        start = reply.rfind(f"<{name}>", 0, max(end, 0))
        if end < 0 or start < 0:
            raise NotVerified(f"the reply lacks {name}")
        parts[name] = reply[start + len(name) + 2 : end]
    return parts


def value_of(text: str, values: dict[str, int]) -> ExactValue:
    try:
        return parse(text, values)
    except NoClosedForm as error:
        raise NotVerified(f"cannot evaluate {text[:80]}: {error}") from None


def check_question(problem: Problem, question: str, values: dict[str, int]) -> None:
    """The rewritten question asks for the letters, does not give them away, and loses no number of the original."""
    if not 0 < len(question) <= 2 * len(problem.question) + 2000:
        raise NotVerified("the rewritten question is empty or far too long")
    for letter, value in values.items():
        if not re.search(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", question):
            raise NotVerified(f"the rewritten question does not mention {letter}")
        if re.search(rf"(?<![A-Za-z\\]){letter}\s*=\s*{value}(?!\d)", question):
            raise NotVerified(f"the rewritten question gives {letter} = {value} away")
    lost = Counter(NUMBER.findall(problem.question)) - Counter(NUMBER.findall(question))
    if lost:
        raise NotVerified(f"the rewritten question lost the numbers {', '.join(sorted(lost))}")
