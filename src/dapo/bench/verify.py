"""`dapo bench verify`: a DAPO step's worth of responses through the verifier, against math-verify one by one."""

from __future__ import annotations

import json
import logging
import random
import time
from typing import Annotated, Any

import typer

from dapo.bench.setting import machine_name, versions_of
from dapo.rewards import Task, VerifierPool
from dapo.types import Judgement, StopReason, Verdict

N_PROBLEMS, N_RESPONSES = 512, 16
MAX_TOKENS, CHARS_PER_TOKEN = 20_480, 3.2
HOSTILE_FRACTION = 0.01
_SENTENCES = (
    "Let $x$ be the number of marbles in the first box, so that $x + y = {a}$ and $xy = {b}$. ",
    "We compute $\\frac{{{a}}}{{{b}}} + \\sqrt{{{c}}}$ and simplify, which gives ${a} \\cdot {b} = {p}$. ",
    "Wait, let me check this again: the sum of the first {a} terms is not {b}, it is {c}. ",
    "By the law of cosines, $c^2 = {a}^2 + {b}^2 - 2 \\cdot {a} \\cdot {b} \\cos \\theta$.\n\n",
    "So the answer could be {a}, but we must also count the case where the two are equal. ",
    "Hence $\\angle ABC = {a}^\\circ$ and the triangle is isosceles.\n",
    "Substituting, we get\n\\[\n{a}x^2 - {b}x + {c} = 0,\n\\]\nwhose roots are real. ",
)
_ENDINGS = (
    ("Answer: {n}", 50),
    ("Answer: ${n}$", 12),
    ("**Answer:** {n}", 6),
    ("Answer: \\boxed{{{n}}}", 8),
    ("Answer: {n}.", 4),
    ("The final answer is $\\boxed{{{n}}}$.", 10),
    ("Answer: x = {n}", 2),
    ("Answer: \\frac{{{twice}}}{{2}}", 2),
    ("Therefore we are done.", 6),
)
_HOSTILE = (
    "Answer: 9**9**9**9",
    "Answer: 9^{9^{9^{9}}}",
    "Answer: ((9!)!)!",
    "Answer: 99999999!",
    "Answer: " + "(" * 5_000 + "1" + ")" * 5_000,
    "Answer: " + "9" * 500_000,
    "Answer: \\int_0^1 e^{-x^2} \\sin(x^x) dx",
    "Answer: " + "\\sqrt{" * 400 + "2" + "}" * 400,
    "\\boxed{" * 20_000,
    "Answer: \\cos(10^{10^{10}}) + \\sin(3)",
)


def bench_verify(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    sample: Annotated[
        int, typer.Option(help="Responses timed with math-verify one by one; its total is extrapolated.")
    ] = 96,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """8,192 responses with integer references: ours, math-verify one by one, and with 1 % hostile lines.

    Works as pasted:  dapo bench verify
    """
    tasks = make_tasks(random.Random(0))
    seconds, judgements = timed(tasks, workers)
    peer_seconds, agreeing = math_verify_one_by_one(tasks, judgements, sample)
    spoiled, hostile_rows = with_hostile_lines(tasks, random.Random(1))
    spoiled_seconds, spoiled_judgements = timed(spoiled, workers)
    rows = [row for row in range(len(tasks)) if row not in hostile_rows]
    figures: dict[str, Any] = {
        "responses": len(tasks),
        "characters": sum(len(task.response) for task in tasks),
        "workers": workers,
        "seconds": round(seconds, 3),
        "math_verify_seconds": round(peer_seconds, 1),
        "math_verify_sample": sample,
        "ratio": round(peer_seconds / seconds, 1),
        "same_verdict_as_math_verify_in_sample": agreeing,
        "hostile_lines": len(hostile_rows),
        "seconds_with_hostile": round(spoiled_seconds, 3),
        "others_changed": sum(judgements[row].verdict is not spoiled_judgements[row].verdict for row in rows),
        "hostile_correct": sum(spoiled_judgements[row].verdict is Verdict.CORRECT for row in hostile_rows),
        "slowest_hostile_seconds": round(max(spoiled_judgements[row].seconds for row in hostile_rows), 3),
        "versions": versions_of("dapo", "math-verify", "sympy"),
        "machine": machine_name(),
    }
    typer.echo(json.dumps(figures) if as_json else as_table(figures))


def make_tasks(draw: random.Random) -> list[Task]:
    """Responses as a model writes them: long, with numbers and LaTeX throughout, the answer at the end if at all."""
    sentences = []
    for _ in range(3_000):
        a, b, c = (draw.randrange(2, 400) for _ in range(3))
        sentences.append(draw.choice(_SENTENCES).format(a=a, b=b, c=c, p=a * b))
    endings = [ending for ending, weight in _ENDINGS for _ in range(weight)]
    tasks = []
    for _ in range(N_PROBLEMS):
        answer = draw.randrange(-50, 1_000)
        pass_rate = draw.random()
        for _ in range(N_RESPONSES):
            n_tokens = min(MAX_TOKENS, int(draw.lognormvariate(8.3, 0.8)))
            n_chars = int(n_tokens * CHARS_PER_TOKEN)
            start = draw.randrange(len(sentences))
            text, length, index = [], 0, start
            while length < n_chars:
                text.append(sentences[index % len(sentences)])
                length += len(text[-1])
                index += 1
            if n_tokens == MAX_TOKENS:
                tasks.append(Task("".join(text), str(answer), StopReason.LENGTH))
                continue
            said = answer if draw.random() < pass_rate else answer + draw.randrange(1, 9)
            text.append("\n\n" + draw.choice(endings).format(n=said, twice=2 * said))
            tasks.append(Task("".join(text), str(answer), StopReason.EOS))
    return tasks


def timed(tasks: list[Task], workers: int) -> tuple[float, list[Judgement]]:
    start = time.perf_counter()
    with VerifierPool("math", workers=workers) as pool:
        judgements = pool.judge_all(tasks)
    return time.perf_counter() - start, judgements


def math_verify_one_by_one(tasks: list[Task], judgements: list[Judgement], sample: int) -> tuple[float, str]:
    """Seconds for all tasks, extrapolated from a sample, with math-verify's defaults in the main thread."""
    from math_verify import parse, verify

    logging.disable(logging.WARNING)
    rows = random.Random(2).sample(range(len(tasks)), min(sample, len(tasks)))
    parse("$1$")  # imports and caches are not its fault
    n_same = 0
    start = time.perf_counter()
    for row in rows:
        is_right = verify(parse(f"${tasks[row].answer}$"), parse(tasks[row].response))
        is_right = is_right and tasks[row].stop_reason is not StopReason.LENGTH
        n_same += is_right == (judgements[row].verdict is Verdict.CORRECT)
    seconds = (time.perf_counter() - start) / len(rows) * len(tasks)
    return seconds, f"{n_same} of {len(rows)}"


def with_hostile_lines(tasks: list[Task], draw: random.Random) -> tuple[list[Task], set[int]]:
    rows = set(draw.sample(range(len(tasks)), int(HOSTILE_FRACTION * len(tasks))))
    return [
        Task(draw.choice(_HOSTILE), task.answer, StopReason.EOS) if row in rows else task
        for row, task in enumerate(tasks)
    ], rows


def as_table(figures: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"{figures['responses']} responses, {figures['characters'] / 1e6:.0f} M characters, "
            f"{figures['workers']} workers",
            f"  dapo                      {figures['seconds']:>9.2f} s",
            f"  math-verify one by one    {figures['math_verify_seconds']:>9.1f} s   "
            f"(from {figures['math_verify_sample']} responses)   {figures['ratio']:.0f} x",
            f"  dapo, {figures['hostile_lines']} hostile lines    {figures['seconds_with_hostile']:>9.2f} s   "
            f"{figures['others_changed']} other verdicts changed, {figures['hostile_correct']} hostile lines correct, "
            f"slowest {figures['slowest_hostile_seconds']:.2f} s",
            f"  same verdict as math-verify: {figures['same_verdict_as_math_verify_in_sample']}",
            f"  {figures['machine']}; "
            + ", ".join(f"{name} {version}" for name, version in figures["versions"].items()),
        ]
    )
