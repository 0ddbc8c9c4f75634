"""What one slow environment in ten costs the others: tokens per second of the other episodes, with and without it.

    python tools/slow_environment.py                 # prints JSON; a minute or two on two cores
    python tools/slow_environment.py --rounds 9

The bundled model on the local engine; of 20 episodes at a time, 18 have an environment that answers at once, and 2
one that sleeps for 2 seconds before it answers. Rounds of four kinds take turns in one process, because other work on
the machine comes and goes: `quick` (nobody sleeps), `covered` (answer_after_ticks covers the sleep), `default` (4
ticks), and `quick` once more, which shows how far two medians of the same kind differ.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dapo.environments.protocol import Turn
from dapo.types import Problem, Score

OTHERS, SLEEPERS, SLEEP_S, TURNS = 18, 2, 2.0, 4
TICKS = "SLOW_ENVIRONMENT_TICKS"  # tells the workers how many ticks cover the sleep


class Quick:
    """Says one more sum, three times, then ends the episode."""

    def start(self, problem: Problem, seed: int) -> None:  # noqa: ARG002
        self.said = seed % 7

    def respond(self, said: str) -> Turn:  # noqa: ARG002
        self.said += 1
        self.turns = getattr(self, "turns", 0) + 1
        return Turn(score=Score(1.0, True)) if self.turns == TURNS else Turn(f"{self.said}+2=?")


class Default(Quick):
    """Sleeps before it answers, and does not say so."""

    def respond(self, said: str) -> Turn:
        time.sleep(SLEEP_S)
        return super().respond(said)


class Covered(Default):
    answer_after_ticks = int(os.environ.get(TICKS, "4"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of each kind")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round of the first kind, about")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *sys.path]
    )  # where workers find the classes
    print(json.dumps(measured(options.rounds, options.seconds), indent=2))


def measured(rounds: int, seconds: float) -> dict[str, object]:
    import torch

    from dapo.config.model_shapes import model_location
    from dapo.models.load import load_policy

    torch.set_num_threads(1)
    policy = load_policy(model_location("bundled"), dtype=torch.float32, device="cpu")
    tried = one_round(policy, "Quick", n_ticks=300, ticks=4)
    per_tick = tried["seconds"] / 300
    n_ticks, ticks = int(seconds / per_tick), int(2 * SLEEP_S / per_tick)
    kinds = {"quick": "Quick", "covered": "Covered", "default": "Default", "quick again": "Quick"}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, name in kinds.items():
            n = n_ticks // 4 if kind == "default" else n_ticks  # it waits for every answer
            found[kind].append(one_round(policy, name, n_ticks=n, ticks=ticks))
    result: dict[str, object] = {"rounds": rounds, "ticks_per_round": n_ticks, "answer_after_ticks": ticks}
    for kind, each in found.items():
        result[kind] = {
            name: {
                "median": round(statistics.median(values), 3),
                "least": round(min(values), 3),
                "most": round(max(values), 3),
            }
            for name in ("tokens_per_s", "tokens_per_cpu_s", "waited_s")
            for values in [[one[name] for one in each]]
        }
    for name in ("tokens_per_s", "tokens_per_cpu_s"):
        of = {kind: statistics.median(one[name] for one in each) for kind, each in found.items()}
        result[f"{name} of quick"] = {kind: round(value / of["quick"], 3) for kind, value in of.items()}
    return result


def one_round(policy: object, sleeper: str, *, n_ticks: int, ticks: int) -> dict[str, float]:
    """So many ticks with the same number of episodes in flight all the time; tokens are those of the others."""
    from dapo.data.prompts import PromptFormat
    from dapo.environments.pool import EnvironmentPool
    from dapo.rollout.engine import NoiseKey, Request, SamplingParams
    from dapo.rollout.episodes import EpisodeEngine
    from dapo.rollout.local.engine import LocalEngine
    from dapo.rollout.turn_marks import TurnMarks

    os.environ[TICKS] = str(ticks)
    names = {True: f"slow_environment:{sleeper}", False: "slow_environment:Quick"}
    pool = EnvironmentPool(names.values(), workers=SLEEPERS)
    asked = Problem("0", "4-3-7=?", "-6")
    problems = {str(i): replace(asked, id=str(i), environment=names[i % 10 == 0]) for i in range(100_000)}
    inner = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=OTHERS + SLEEPERS, max_tokens=256)
    marks = TurnMarks(policy.tokenizer, chat=False, eos_ids=policy.eos_ids)
    engine = EpisodeEngine(inner, pool, marks, problems, max_turns=TURNS)
    prompt = PromptFormat("raw", chat=False).encode(asked, policy.tokenizer)

    def requests(sleepers: bool) -> Iterator[Request]:
        for i in range(100_000):
            if (i % 10 == 0) == sleepers:
                yield Request(i, prompt, NoiseKey(0, "eval", str(i), 0, 0), 128, group=i)

    streams = {sleepers: requests(sleepers) for sleepers in (True, False)}
    for sleepers, n in ((True, SLEEPERS), (False, OTHERS)):
        engine.submit([next(streams[sleepers]) for _ in range(n)])
    began, cpu = time.perf_counter(), time.process_time()
    n_tokens, waited = 0, 0.0
    for _ in range(n_ticks):
        for request, completion in engine.advance():
            sleepers = request.id % 10 == 0
            n_tokens += 0 if sleepers else completion.n_own
            engine.submit([next(streams[sleepers])])
    seconds, cpu_seconds, waited = time.perf_counter() - began, time.process_time() - cpu, engine.waited_s()
    n_tokens += sum(int(one.own.sum()) for one in engine.under_way() if one.request.id % 10)
    engine.close()
    return {
        "seconds": seconds, "tokens_per_s": n_tokens / seconds, "tokens_per_cpu_s": n_tokens / cpu_seconds,
        "waited_s": waited,
    }  # fmt: skip


if __name__ == "__main__":
    main()
