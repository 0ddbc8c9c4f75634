"""Evaluate a problem set: k responses per problem, verified and summarised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.evaluation.avg_at_k import Estimate, avg_at_k, bootstrap, maj_at_k, pass_at_k
from dapo.rollout.engine import Engine, Finished, NoiseKey, Request
from dapo.types import Completion, Judge, Judgement, Problem, StopReason, Verdict, engine_fault
from dapo.waiting.registry import waiting


@dataclass(frozen=True, slots=True)
class Answered:
    """One evaluated response, as much of it as the table needs."""

    problem_id: str
    response_index: int
    verdict: Verdict
    extracted: str | None
    n_tokens: int
    is_truncated: bool
    text: str = ""
    is_aborted: bool = False  # by the engine
    value: float = 0.0  # raw reward
    is_graded: bool = False  # the value alone decides: the verifier does not say what is correct


Answers = dict[tuple[str, int], Answered]


def evaluate(
    engine: Engine,
    judge: Judge,
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    *,
    k: int,
    max_new_tokens: int,
    seed: int,
    known: Mapping[tuple[str, int], Answered] | None = None,
    on_answer: Callable[[Answered, int, int], None] = lambda _answer, _done, _all: None,
) -> Answers:
    """Answer every problem k times; what is in `known` is not asked again.

    The noise depends on (seed, problem, response index) alone: two evaluations of the same weights agree, and two
    checkpoints are compared on the same draws. An aborted response is not verified, and counts as wrong.
    """
    answers: Answers = dict(known or {})
    by_request: dict[int, Problem] = {}
    requests = []
    for p, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
        for i in range(k):
            if (problem.id, i) not in answers:
                key = NoiseKey(seed, "eval", problem.id, 0, i)
                requests.append(Request(p * k + i, prompt, key, max_new_tokens, group=p))
                by_request[p * k + i] = problem
    engine.submit(requests)
    ended: list[Finished] = []
    tickets: dict[int, int] = {}

    def hand_in() -> None:
        for request, completion in ended:
            is_open = completion.stop_reason is not StopReason.ABORTED and completion.judgement is None
            if is_open and request.id not in tickets:
                task = by_request[request.id].task(completion.answer, completion.stop_reason)
                tickets[request.id] = judge.submit(task)

    def take_answers() -> None:
        hand_in()  # what no tick has followed
        judgements = judge.wait(tickets.values())
        for request, completion in ended:
            problem = by_request[request.id]
            told = completion.judgement or engine_fault(problem)
            judgement = judgements[tickets[request.id]] if request.id in tickets else told
            answer = answered(problem, request, completion, judgement)
            answers[answer.problem_id, answer.response_index] = answer
            on_answer(answer, len(answers), len(problems) * k)
        tickets.clear()

    while engine.n_in_flight or engine.n_waiting:
        with waiting("the engine's next tick"):
            just_ended = engine.advance(hand_in)
        take_answers()  # of what ended a tick before: its verdicts were made while the engine worked
        ended = just_ended
    take_answers()
    return answers


def answered(problem: Problem, request: Request, completion: Completion, judgement: Judgement) -> Answered:
    return Answered(
        problem.id,
        request.key.response_index,
        judgement.verdict,
        judgement.extracted,
        completion.n_own,
        completion.is_truncated,
        completion.text,
        is_aborted=completion.stop_reason is StopReason.ABORTED,
        value=judgement.value,
        is_graded=judgement.graded,
    )


def summarise(name: str, problems: Sequence[Problem], answers: Answers, *, k: int) -> dict[str, Any]:
    """One line of the table: avg@k, pass@k, maj@k with 95 % intervals over problems, and how the responses look.

    maj@k is None where no response has an extracted answer: a verifier that names none (your own function, `code`, most
    commands) leaves nothing to vote with.
    """
    rows = [[answers[problem.id, i] for i in range(k)] for problem in problems]
    correct = np.array([[a.verdict is Verdict.CORRECT for a in row] for row in rows], dtype=np.bool_).reshape(-1, k)
    extracted = [[a.extracted for a in row] for row in rows]
    everything = [a for row in rows for a in row]
    has_votes = any(answer.extracted is not None for answer in everything)
    average = avg_at_k(correct)
    scores = {
        "avg@k": average,
        "pass@k": pass_at_k(correct),
        "maj@k": maj_at_k(correct, extracted) if has_votes else None,
    }
    line: dict[str, Any] = {"set": name, "problems": len(problems), "k": k}
    for score, per_problem in scores.items():
        estimate: Estimate | None = bootstrap(per_problem) if per_problem is not None else None
        line[score] = estimate.value if estimate is not None else None
        line[f"{score}_interval"] = [estimate.low, estimate.high] if estimate is not None else None
    line["unparseable"] = fraction(everything, lambda a: a.verdict is Verdict.UNPARSEABLE)
    line["truncated"] = fraction(everything, lambda a: a.is_truncated)
    line["faults"] = sum(a.is_aborted for a in everything)
    line["mean_tokens"] = float(np.mean([a.n_tokens for a in everything])) if everything else 0.0
    if any(a.is_graded for a in everything):
        line["mean_value"] = float(np.mean([a.value for a in everything]))
    sources = sorted({problem.source for problem in problems})
    if len(sources) > 1:
        line["by_source"] = {
            source: float(np.mean([c for c, p in zip(average, problems, strict=True) if p.source == source]))
            for source in sources
        }
    return line


def fraction(answers: Sequence[Answered], holds: Callable[[Answered], bool]) -> float:
    return sum(holds(answer) for answer in answers) / len(answers) if answers else 0.0
