"""From a problem to prompt tokens: a template around the question, the chat template around that, no cutting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2

from dapo.data.problems import Drop, Why
from dapo.data.wrappers import DAPO_PREFIX, DAPO_SUFFIX
from dapo.errors import ConfigError, DataError
from dapo.types import Problem


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer; passed in, so this module never loads one."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Example:
    """A worked problem shown before the question in the few-shot template."""

    question: str
    solution: str
    answer: str


EXAMPLES = (
    Example(
        "A shelf holds 4 rows of 6 jars. Nine jars are sold. How many are left?",
        "There are 4 · 6 = 24 jars. After 9 are sold, 24 − 9 = 15 are left.",
        "15",
    ),
    Example(
        "Find the sum of the two roots of $x^2 - 7x + 10 = 0$.",
        "The polynomial factors as $(x - 2)(x - 5)$, so the roots are 2 and 5 and their sum is 7.",
        "7",
    ),
    Example(
        "How many positive divisors does $12$ have?",
        "Since $12 = 2^2 \\cdot 3$, there are $(2 + 1)(1 + 1) = 6$ of them.",
        "6",
    ),
)

# What stands before and after the question. `dapo` is the published wrapper and must not change by a character.
AROUND = {
    "dapo": (DAPO_PREFIX, DAPO_SUFFIX),
    "boxed": ("", "\n\nReason step by step, and put your final answer within \\boxed{}."),
    "answer-tags": ("", "\n\nReason step by step, and put your final answer between <answer> and </answer>."),
    "gsm8k": ("", '\n\nReason step by step, and give the final number on the last line after "Answer:".'),
    "few-shot": ("", ""),
    "raw": ("", ""),
}
TEMPLATES = tuple(AROUND)


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a question becomes a prompt. `chat` sends it through the model's chat template as one user message."""

    template: str = "dapo"
    chat: bool = True
    system: str = ""  # the published runs have none
    examples: Sequence[Example] = EXAMPLES  # few-shot only

    def __post_init__(self) -> None:
        if self.template not in AROUND:
            raise ConfigError(
                f"data.template = {self.template!r}: no such prompt template.",
                remedy=f"Use one of {', '.join(TEMPLATES)}.",
            )
        if self.system and not self.chat:
            raise ConfigError(
                "data.chat_template = false: a system text has no effect without a chat template.",
                remedy="Leave the text out, or set data.chat_template = true.",
            )

    def text(self, problem: Problem) -> str:
        """The question in its template, before the chat template."""
        before, after = AROUND[self.template]
        if self.template != "few-shot":
            return f"{before}{problem.question}{after}"
        shown = [f"Problem: {e.question}\nSolution: {e.solution}\nAnswer: {e.answer}\n\n" for e in self.examples]
        return f"{''.join(shown)}Problem: {problem.question}\nSolution:"

    def encode(self, problem: Problem, tokenizer: Tokenizer, added: str = "") -> tuple[int, ...]:
        """Prompt tokens, up to where the response begins; `added` is what an environment adds to the question."""
        if not self.chat and problem.turns:
            raise DataError(
                "data.chat_template = false: the rows are chats (messages), which need a chat template.",
                remedy="Set data.chat_template = true (dapo eval: --chat), or write them as question and answer.",
            )
        if not self.chat:
            return tuple(tokenizer.encode(self.text(problem) + added))
        if not tokenizer.chat_template:
            raise DataError(
                "data.chat_template = true: the model's tokenizer has none.",
                remedy="Set data.chat_template = false (dapo eval: --no-chat), or use a model that has one.",
            )
        rendered = rendered_chat(self.chat_of(problem, added), tokenizer)
        return tuple(tokenizer.encode(rendered, add_special_tokens=False))  # the chat template wrote them

    def chat_of(self, problem: Problem, added: str = "") -> list[dict[str, str]]:
        """The messages put to the model. A row that is a chat stays as it is, and its own system message wins."""
        turns = problem.turns or (("user", self.text(problem)),)
        if self.system and turns[0][0] != "system":
            turns = (("system", self.system), *turns)
        chat = [{"role": role, "content": text} for role, text in turns]
        if added:
            chat[-1]["content"] = f"{chat[-1]['content']}\n\n{added}".lstrip()
        return chat


def rendered_chat(chat: list[dict[str, str]], tokenizer: Tokenizer) -> str:
    """The chat template's text, or DataError where the template does not take these messages.

    Some templates refuse a system message, others leave it out without a word.
    """
    system = chat[0]["content"].strip() if chat[0]["role"] == "system" else ""
    try:
        rendered = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        if system in rendered:
            return rendered
        why = f"leaves the system message out: {system[:60]!r}"
    except jinja2.TemplateError as error:
        why = f"refuses messages of {', '.join(turn['role'] for turn in chat)}: {error}"
    raise DataError(
        f"data.chat_template = true: the model's chat template {why}.",
        remedy="Leave the system message out (system_prompt, or the rows' own), or use a model whose template has one.",
    )


@dataclass(frozen=True, slots=True)
class EncodedProblem:
    problem: Problem
    tokens: tuple[int, ...]


def encode_problems(
    problems: Iterable[Problem], prompt: PromptFormat, tokenizer: Tokenizer, *, max_prompt_tokens: int
) -> tuple[tuple[EncodedProblem, ...], tuple[Drop, ...]]:
    """Every problem with its prompt, and those over the limit: dropped and named, never truncated.

    Cutting from the left would remove the instruction, from the right the question.
    """
    kept: list[EncodedProblem] = []
    drops: list[Drop] = []
    shortest = 0
    for number, problem in enumerate(problems, start=1):
        tokens = prompt.encode(problem, tokenizer)
        if len(tokens) <= max_prompt_tokens:
            kept.append(EncodedProblem(problem, tokens))
        else:
            shortest = min(shortest or len(tokens), len(tokens))
            drops.append(
                Drop(Why.TOO_LONG, number, problem.question, f"{len(tokens):,} > {max_prompt_tokens:,} tokens")
            )
    if not kept:
        raise DataError(
            f"limits.max_prompt_tokens = {max_prompt_tokens}: all {len(drops):,} prompts are longer.",
            remedy=f"Raise it to at least {shortest}, the shortest prompt." if drops else "The set is empty.",
        )
    return tuple(kept), tuple(drops)
