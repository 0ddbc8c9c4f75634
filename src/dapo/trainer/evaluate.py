"""Evaluation inside a run: every evaluation set, on the current weights, into eval.jsonl."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from dapo.config.schema import EvalConfig
from dapo.data.encoded import EncodedSet
from dapo.evaluation.runner import Answered, Answers, evaluate, summarise
from dapo.files import read_lines
from dapo.report.rollouts.index import QUESTION_CHARACTERS
from dapo.rollout.engine import NoiseKey, SamplingParams
from dapo.rollout.episodes import EpisodeEngine
from dapo.trainer.episodes import opening_of
from dapo.trainer.faults import report_faults
from dapo.trainer.interrupt import check_stop
from dapo.trainer.observer import Observer
from dapo.trainer.run import Run
from dapo.types import Verdict


def evaluate_run(run: Run) -> list[dict[str, Any]]:
    """One line per set that has none for this step yet: avg@k, pass@k, maj@k with their intervals."""
    lines = []
    done = {(line.get("step"), str(line.get("set"))) for line in read_lines(run.folder / "eval.jsonl")}
    for problem_set in run.eval_sets:
        if (run.step, problem_set.name) in done:
            continue
        start = time.perf_counter()
        settings = run.config.eval
        sampling = sampling_of(settings)
        engine = run.engine.fork_for_eval(sampling)
        if isinstance(engine, EpisodeEngine):
            engine.problems = problem_set.by_id
        opening, seed = opening_of(engine, [problem_set], run.config), run.config.train.seed
        prompts = [
            opening(NoiseKey(seed, "eval", problem.id, 0, 0), prompt)
            for problem, prompt in zip(problem_set.problems, problem_set.prompts, strict=True)
        ]

        def on_answer(_answer: Answered, done: int, total: int) -> None:
            check_stop(run)
            run.tell(lambda observer: observer.on_evaluation_progress(done, total))

        answers = evaluate(
            engine,
            run.judge,
            problem_set.problems,
            prompts,
            k=settings.k,
            max_new_tokens=run.config.limits.max_response_tokens,
            seed=seed,
            on_answer=on_answer,
        )
        report_faults(run, engine, f"the evaluation of {problem_set.name} after step {run.step}")
        line = {"step": run.step, **summarise(problem_set.name, problem_set.problems, answers, k=settings.k)}
        line["timing.evaluation_s"] = time.perf_counter() - start
        run.write_line("eval.jsonl", line)
        run.write_line("eval_problems.jsonl", {"step": run.step, **per_problem(problem_set, answers, settings)})
        run.tell(partial(tell_evaluation, line))
        lines.append(line)
    return lines


def tell_evaluation(line: dict[str, Any], observer: Observer) -> None:
    observer.on_evaluation(line)


def per_problem(problem_set: EncodedSet, answers: Answers, settings: EvalConfig) -> dict[str, Any]:
    """How many of each problem's k responses were right, and of graded rewards their means.

    The report lists flipped problems from this, and decides whether the run improved.
    """
    graded = any(answer.is_graded for answer in answers.values())
    values = [
        sum(answers[problem.id, i].value for i in range(settings.k)) / settings.k for problem in problem_set.problems
    ]
    return {
        "set": problem_set.name,
        "k": settings.k,
        "sampling": [settings.temperature, settings.top_p, settings.top_k],
        "ids": [problem.id for problem in problem_set.problems],
        "questions": [" ".join(problem.question.split())[:QUESTION_CHARACTERS] for problem in problem_set.problems],
        "correct": [
            sum(answers[problem.id, i].verdict is Verdict.CORRECT for i in range(settings.k))
            for problem in problem_set.problems
        ],
    } | ({"values": values} if graded else {})


def sampling_of(settings: EvalConfig) -> SamplingParams:
    return SamplingParams(temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
