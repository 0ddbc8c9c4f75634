"""Measures the bundled toy model and writes its card: `python -m dapo.quickstart.card DIR`.

Plain Hugging Face generation and a plain reading of the last line, so that the card does not rest on the engine and
the verifier that are later judged by it.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.quickstart.corpus import ANSWER, Habits
from dapo.quickstart.task import LEVELS, eval_problems
from dapo.types import Problem

MAX_RESPONSE_TOKENS = 64  # the recipe's limits.max_response_tokens
BATCH = 512
LAST_LINE = re.compile(rf"{ANSWER}(-?\d+)")


@dataclass(frozen=True, slots=True)
class Scores:
    """What k responses to each of some problems were like; shares of 1."""

    accuracy: float  # mean over responses: avg@k
    solved: float  # problems with at least one right response: pass@k
    always: float  # problems with right responses only
    truncated: float  # responses at the length limit
    unparseable: float  # finished responses without an answer line
    tokens: float  # mean length, the end token included


@torch.no_grad()
def measure(folder: Path, problems: Sequence[Problem], *, k: int, top_p: float) -> dict[str, Scores]:
    """Scores by level, and of all levels together. Temperature 1."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    rows = [problem for problem in problems for _ in range(k)]
    responses: list[list[int]] = []
    for start in range(0, len(rows), BATCH):
        questions = [problem.question for problem in rows[start : start + BATCH]]
        inputs = tokenizer(questions, return_tensors="pt", padding=True)
        output = model.generate(
            **inputs, max_new_tokens=MAX_RESPONSE_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=top_p
        )
        responses += output[:, inputs.input_ids.shape[1] :].tolist()
    cut = [_until(response, tokenizer.eos_token_id) for response in responses]
    texts = tokenizer.batch_decode(cut, skip_special_tokens=True)
    is_finished = [response[-1] == tokenizer.eos_token_id for response in cut]
    answers = [_answer(text) if finished else None for text, finished in zip(texts, is_finished, strict=True)]
    is_right = [answer == problem.answer for answer, problem in zip(answers, rows, strict=True)]

    def scores(indices: list[int]) -> Scores:
        groups = [sum(is_right[row] for row in range(index * k, index * k + k)) for index in indices]
        chosen = [row for index in indices for row in range(index * k, index * k + k)]
        return Scores(
            accuracy=sum(groups) / len(chosen),
            solved=sum(right > 0 for right in groups) / len(groups),
            always=sum(right == k for right in groups) / len(groups),
            truncated=sum(not is_finished[row] for row in chosen) / len(chosen),
            unparseable=sum(is_finished[row] and answers[row] is None for row in chosen) / len(chosen),
            tokens=sum(len(cut[row]) for row in chosen) / len(chosen),
        )

    by_level = {
        str(level.number): [i for i, problem in enumerate(problems) if problem.meta["level"] == level.number]
        for level in LEVELS
    }
    return {**{name: scores(indices) for name, indices in by_level.items()}, "all": scores(list(range(len(problems))))}


def _until(response: list[int], end: int) -> list[int]:
    return response[: response.index(end) + 1] if end in response else response


def _answer(text: str) -> str | None:
    match = LAST_LINE.fullmatch(text.splitlines()[-1]) if text else None
    return match[1] if match else None


def write_card(folder: Path, *, k: int) -> None:
    """README.md and scores.json beside the weights."""
    problems = eval_problems()
    measured = {top_p: measure(folder, problems, k=k, top_p=top_p) for top_p in (0.7, 1.0)}
    record = {f"top_p {top_p}": {name: asdict(row) for name, row in rows.items()} for top_p, rows in measured.items()}
    (folder / "scores.json").write_text(json.dumps({"k": k, **record}, indent=1) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != "README.md") / 1e6
    n = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    (folder / "README.md").write_text(
        CARD.format(n=n, size=size, k=k, limit=MAX_RESPONSE_TOKENS, habits=_habits(), tables=_tables(measured, k))
    )


def _habits() -> str:
    return "\n".join(f"| `{name}` | {value:g} |" for name, value in asdict(Habits()).items())


def _tables(measured: dict[float, dict[str, Scores]], k: int) -> str:
    text = ""
    for top_p, rows in measured.items():
        text += f"\nTemperature 1, top-p {top_p}:\n\n"
        text += f"| level | needs | avg@{k} | pass@{k} | always right | truncated | unparseable | tokens |\n"
        text += "|---|---|---|---|---|---|---|---|\n"
        needs = {str(level.number): level.needs for level in LEVELS}
        for name, s in rows.items():
            text += f"| {name} | {needs.get(name, '')} | {s.accuracy:.3f} | {s.solved:.3f} | {s.always:.3f} "
            text += f"| {s.truncated:.3f} | {s.unparseable:.3f} | {s.tokens:.1f} |\n"
    return text


CARD = """# The bundled toy model

A Llama of {n:,} parameters (folder: {size:.1f} MB) that does arithmetic step by step and slips often. It exists so that
`dapo quickstart` has something to improve on a laptop; it is good for nothing else.

Made by `python -m dapo.quickstart.pretrain --out DIR --seed 0`; measured by `python -m dapo.quickstart.card DIR`.

**Data.** A stream of worked expressions (`dapo.quickstart.corpus`), no question of the evaluation side among them. The
writers know the rules and slip; these are the chances of doing the right thing where a slip is possible, and of
running on:

| habit | chance |
|---|---|
{habits}

**Scores before any reinforcement learning**, on the 200 held-out problems, {k} responses each, at most
{limit} response tokens. A truncated response is never right.
{tables}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's folder; README.md and scores.json are written into it")
    parser.add_argument("--k", type=int, default=64, help="responses per problem")
    arguments = parser.parse_args()
    write_card(arguments.folder, k=arguments.k)


if __name__ == "__main__":
    main()
