"""Fuzzers of verdicts, run folders and configs: random examples until the CPU time is up, or until one is found.

`make fuzz MINUTES=20 SEED=7`. What holds of any example stands in `fuzz_answers.py` and `fuzz_folders.py`; the suite
draws a few, the same ones every time. Time is counted in CPU time, so that a slow machine only takes longer.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a program, as pytest does it otherwise

from dapo.rewards import VerifierPool
from dapo.rewards.process_tree import own_seconds
from hostile import fuzz_answers, fuzz_folders

Round = Callable[[int], None]  # draws its examples, by a seed


def rounds(pool: VerifierPool) -> dict[str, Round]:
    """By name: each takes some seconds, and verdicts and folders about the same."""

    def answers(check: Callable[..., None]) -> Round:
        return lambda seed: fuzz_answers.drawn(check, n_examples=100, seed=seed)()

    def folders(check: Callable[..., None], n_examples: int) -> Round:
        return lambda seed: fuzz_folders.drawn(check, n_examples=n_examples, seed=seed)()

    return {
        **{check.__name__: answers(check) for check in fuzz_answers.PROPERTIES},
        "never_crashes": lambda seed: fuzz_answers.drawn(fuzz_answers.never_crashes, n_examples=5, seed=seed)(pool),
        "a_run_is_read_or_refused": folders(fuzz_folders.a_run_is_read_or_refused, 50),
        "a_config_is_read_or_refused": folders(fuzz_folders.a_config_is_read_or_refused, 250),
    }


def fuzz(each: dict[str, Round], *, minutes: float, seed: int) -> int:
    """Rounds of all of them until the time is up, at least one; how many. Whatever one raises is a finding."""
    start = own_seconds()
    for number in itertools.count():
        for name, draw in each.items():
            if number and own_seconds() - start > 60 * minutes:
                return number
            try:
                draw(seed + number)
            except BaseException:
                again = f"python tests/hostile/fuzz.py --minutes 0 --seed {seed + number} --only {name}"
                print(f"Found with seed {seed + number}; the input stands below. To repeat: {again}", file=sys.stderr)
                raise
    raise AssertionError("it counts without end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of CPU time; 0 is one round")
    parser.add_argument("--seed", type=int, help="of the first round; every round has the next one")
    parser.add_argument("--only", help="one of the properties")
    arguments = parser.parse_args()
    seed = random.randrange(10**9) if arguments.seed is None else arguments.seed
    logging.disable(logging.CRITICAL)  # math-verify announces on every call that its time-outs are off
    print(f"Fuzzing for {arguments.minutes:g} CPU minutes from seed {seed} on.", flush=True)
    with VerifierPool("math", workers=1) as pool:
        each = rounds(pool)
        n_rounds = fuzz(
            {arguments.only: each[arguments.only]} if arguments.only else each, minutes=arguments.minutes, seed=seed
        )
    print(f"{n_rounds} rounds, and nothing found.")


if __name__ == "__main__":
    main()
