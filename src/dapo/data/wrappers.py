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

# A last line, or verl's last sentence, that dictates the form of the answer. It would contradict the template's own.
INSTRUCTION = re.compile(
    r"\n[^\n]*(?:Answer\s*[:：]|\\boxed[^\n]*(?:answer|答案)|(?:answer|答案)[^\n]*\\boxed)[^\n]*\Z"
    r"|(?<=[.?!\s])\s*Let's think step by step and output the final answer [^\n]*\Z"
)

WRAPPER = "wrapper"
OUTPUT_INSTRUCTION = "output instruction"


def bare_question(text: str) -> tuple[str, tuple[str, ...]]:
    """The question without wrapper and trailing output instruction, and which of the two were removed."""
    removed: list[str] = []
    text = text.strip()
    if text.startswith(DAPO_PREFIX) and text.endswith(DAPO_SUFFIX):
        text = text.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX).strip()
        removed.append(WRAPPER)
    without = INSTRUCTION.sub("", text).strip()
    if without and without != text:
        text = without
        removed.append(OUTPUT_INSTRUCTION)
    return text, tuple(removed)
