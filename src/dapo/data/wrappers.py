"""Text around a question that asks for an output format: DAPO's wrapper, and instructions some rows already carry."""

from __future__ import annotations

import re

# The published wrapper, character for character: results depend on it. One prefix and one suffix over all rows of the
# DAPO evaluation file, the same for training.
DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'

ANSWER_COLON = re.compile(r"Answer\s?[:：]")
VERL_SENTENCE = "Let's think step by step and output the final answer "

WRAPPER = "wrapper"
OUTPUT_INSTRUCTION = "output instruction"


def bare_question(text: str) -> tuple[str, tuple[str, ...]]:
    """The question without wrapper and trailing output instruction, and which of the two were removed."""
    removed: list[str] = []
    text = text.strip()
    if text.startswith(DAPO_PREFIX) and text.endswith(DAPO_SUFFIX):
        text = text.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX).strip()
        removed.append(WRAPPER)
    without = without_instruction(text).strip()
    if without and without != text:
        text = without
        removed.append(OUTPUT_INSTRUCTION)
    return text, tuple(removed)


def without_instruction(text: str) -> str:
    """The text without a last line, or verl's last sentence, that dictates the form of the answer.

    Such an instruction would contradict the template's own. Plain searches: a question of a megabyte costs no more.
    """
    start = text.rfind("\n") + 1
    last = text[start:]
    if start and (ANSWER_COLON.search(last) or ("\\boxed" in last and ("answer" in last or "答案" in last))):
        return text[:start]
    at = last.rfind(VERL_SENTENCE)
    return text[: start + at] if at >= 0 else text
