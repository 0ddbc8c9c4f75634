"""One config in TRL's form, trained by both sides on the same model, data, order and seeds, and evaluated alike.

A folder holds it all: `trl.yaml`, one folder a run (`dapo-seed-0`, `trl-seed-0`), `parity.json`. A run that is there
is not run again, one that was stopped resumes, so that sides, seeds and minutes may be spread over several calls.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.bench.setting import device_name
from dapo.bench.timing import free_memory
from dapo.config.sources import eval_sources, is_mixture
from dapo.errors import ConfigError
from dapo.files import append_line, read_lines, replace_file
from dapo.trainer.observer import Observer

if TYPE_CHECKING:
    from dapo.config.schema import Config
    from dapo.data.encoded import EncodedSet

SIDES = ("dapo", "trl")
# What a step's seconds are made of, and under which key they are noted; the rest of TRL's is its update.
PARTS = {
    "dapo": {"rollout": "timing.rollout_s", "old log-probs": "timing.old_logp_s", "update": "timing.update_s"},
    "trl": {"generation": "generation", "rewards": "rewards"},
}


@dataclass(frozen=True, slots=True)
class ParityPlan:
    """What both sides do."""

    folder: Path
    keys: dict[str, Any]  # of TRL, with the seed left out
    ours: tuple[str, ...]  # key=value, for what TRL's config has no key for
    every: int
    use_vllm: bool
    python: str
    minutes: float  # 0: no limit

    def run_folder(self, side: str, seed: int) -> Path:
        return self.folder / f"{side}-seed-{seed}"

    @property
    def steps(self) -> int:
        return int(self.keys["max_steps"])

    @property
    def evaluated_steps(self) -> list[int]:
        return [*range(0, self.steps, self.every), self.steps]

    def config(self, seed: int) -> Config:
        """Ours, as `dapo import-config` makes it of TRL's."""
        from dapo.peers.translate import check, translate
        from dapo.trainer.api import with_overrides

        file = self.folder / f"seed-{seed}.yaml"
        write_yaml(file, self.keys | {"seed": seed})
        resolved = check(translate(file), "parity")
        own = [f"eval.every_steps={self.every}", "records.every_steps=0"]
        return with_overrides(resolved, [*own, *self.ours]).config


def write_yaml(file: Path, keys: dict[str, Any]) -> None:
    import yaml

    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, yaml.safe_dump(keys, sort_keys=False))


def check_plan(plan: ParityPlan, config: Config) -> None:
    """What would make the two runs different ones is refused before anything runs."""
    if config.train.steps != plan.steps:
        raise ConfigError(
            f"max_steps = {plan.steps}: TRL counts updates, and a step of ours has "
            f"{plan.steps // config.train.steps}, so that the same steps would not be compared.",
            remedy="Let steps_per_generation be gradient_accumulation_steps, and num_iterations 1.",
        )
    if is_mixture(config) or isinstance(config.data.eval, dict):
        raise ConfigError(
            "data.train, data.eval: a table of sources; the two sides are compared on one set.",
            remedy="Name one training set (--train) and one evaluation set (--eval).",
        )
    if not config.data.eval:
        raise ConfigError("--eval: is missing.", remedy="Name the problems that both sides are evaluated on.")
    if plan.keys.get("shuffle_dataset", True):
        raise ConfigError(
            "shuffle_dataset = true: TRL would visit the problems in another order.", remedy="Set it to false."
        )
    if plan.keys.get("bf16") and device_of(config) == "cpu":
        raise ConfigError("bf16 = true: both sides would be slow on a CPU.", remedy="Add --peer-set bf16=false.")
    known = plan.folder / "plan.json"
    now = {"keys": plan.keys, "ours": list(plan.ours), "every": plan.every, "use_vllm": plan.use_vllm}
    before = json.loads(known.read_text(encoding="utf-8")) if known.exists() else now
    if before != now:
        changed = ", ".join(name for name in now if now[name] != before.get(name))
        raise ConfigError(
            f"--out {plan.folder}: was begun with other settings ({changed}).",
            remedy="Repeat them, or name a new folder.",
        )
    plan.folder.mkdir(parents=True, exist_ok=True)
    replace_file(known, json.dumps(now, indent=1))


class Clock:
    """The minutes of this call; a run that is under way then stops after its step, and can be resumed."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes if minutes else float("inf")

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()


def run_all(plan: ParityPlan, sides: Sequence[str], seeds: Sequence[int]) -> bool:
    """Whether every run of these is finished."""
    clock = Clock(plan.minutes)
    for seed in seeds:
        for side in sides:
            if not is_finished(plan, side, seed):
                if clock.seconds_left <= 0:
                    return False
                (run_ours if side == "dapo" else run_theirs)(plan, seed, clock)
                free_memory()
    return all(is_finished(plan, side, seed) for seed in seeds for side in sides)


def is_finished(plan: ParityPlan, side: str, seed: int) -> bool:
    return set(plan.evaluated_steps) <= {line["step"] for line in evaluations(plan.run_folder(side, seed))}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(folder / "eval_problems.jsonl"))


# ------------------------------------------------------------------ our side


class StopAt(Observer):
    """Asks the run to stop when the call's time is over."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_start(self, run: Any) -> None:
        self.run = run

    def on_step(self, metrics: Any) -> None:  # noqa: ARG002
        self.run.is_stopping = self.run.is_stopping or self.clock.seconds_left <= 0


def run_ours(plan: ParityPlan, seed: int, clock: Clock) -> None:
    """As `dapo train` and `dapo resume` do it."""
    from dapo.config.load import flatten, resolve
    from dapo.trainer.loop import train
    from dapo.trainer.resume import resume_run
    from dapo.trainer.start import start_run

    folder, observers = plan.run_folder("dapo", seed), [StopAt(clock)]
    if (folder / "config.toml").exists():
        run = resume_run(folder, observers=observers)
    else:
        keys = flatten(plan.config(seed).model_dump(mode="json"))
        run = start_run(resolve("parity", keys, {}), folder, observers)
    with closing(run):
        train(run)


# ------------------------------------------------------------------ TRL's side


def run_theirs(plan: ParityPlan, seed: int, clock: Clock) -> None:
    """TRL trains in a process of its own and leaves its model at the steps that are evaluated; then we evaluate it."""
    from dapo.bench.parity import trl_side as trl_parity
    from dapo.bench.peer_process import run_peer
    from dapo.trainer.assemble import make_pool

    folder, config = plan.run_folder("trl", seed), plan.config(seed)
    folder.mkdir(exist_ok=True)
    evaluate_snapshot(folder, config, 0, config.model.path)
    free_memory()
    if not (folder / "finished").exists():
        shutil.copy(plan.folder / f"seed-{seed}.yaml", folder / "trl.yaml")
        problems = write_rows(folder, config)
        use_cpu = device_of(config) == "cpu"
        told = {
            "threads": threads(), "model": model_folder(config), "snapshots": plan.evaluated_steps[1:],
            "use_cpu": use_cpu, "use_vllm": plan.use_vllm, "seconds": min(clock.seconds_left, 1e9),
        }  # fmt: skip
        replace_file(folder / "plan.json", json.dumps(told))
        with make_pool(config.rewards, config.rewards.verifier) as pool:
            reason, _ = run_peer(
                plan.python, Path(trl_parity.__file__), folder, threads=threads(), minutes=1e4,
                answer=lambda rows: rewards_of(rows, problems, pool),
            )  # fmt: skip
        if not reason.startswith("exit 0"):
            raise ConfigError(f"TRL did not train: {reason}.", remedy=f"Its output is in {folder / 'peer.txt'}.")
    for step in plan.evaluated_steps[1:]:
        snapshot = folder / f"step-{step}"
        if snapshot.exists():
            evaluate_snapshot(folder, config, step, str(snapshot))
            shutil.rmtree(snapshot)


def threads() -> int:
    import torch

    return torch.get_num_threads()


def device_of(config: Config) -> str:
    from dapo.models.device import choose_device

    return choose_device(config.model.device)


def model_folder(config: Config) -> str:
    from dapo.config.model_shapes import model_location

    return str(Path(model_location(config.model.path)).absolute())


def write_rows(folder: Path, config: Config) -> EncodedSet:
    """The problems with their prompts, in the order in which our run visits them."""
    from dapo.data.encoded import load_train
    from dapo.data.order import ProblemOrder
    from dapo.data.prompts import PromptFormat
    from dapo.models.load import load_pretrained_tokenizer

    tokenizer = load_pretrained_tokenizer(model_folder(config), revision=None)
    problems = load_train(config, tokenizer)
    prompt = PromptFormat(config.data.template, config.data.chat_template)
    order = ProblemOrder(len(problems.problems), seed=config.train.seed)
    lines = []
    for _ in range(config.train.steps):
        order.start_step()
        for index, _ in islice(iter(order.next, None), config.sampling.prompts_per_step):
            text = prompt.text(problems.problems[index])
            turns = [{"role": "user", "content": text}] if config.data.chat_template else text
            lines.append(json.dumps({"prompt": turns, "row": index, "tokens": problems.prompts[index]}))
    replace_file(folder / "rows.jsonl", "\n".join(lines) + "\n")
    return problems


def rewards_of(rows: list[dict[str, Any]], problems: EncodedSet, judge: Any) -> list[float]:
    """What our verifier says of TRL's completions."""
    from dapo.types import StopReason

    tickets = []
    for row in rows:
        problem, stop = problems.problems[row["row"]], StopReason.LENGTH if row["is_truncated"] else StopReason.EOS
        tickets.append(judge.submit(problem.task(row["text"], stop)))
    judged = judge.wait(tickets)
    return [judged[ticket].value for ticket in tickets]


def evaluate_snapshot(folder: Path, config: Config, step: int, model: str) -> None:
    """As our run evaluates itself: the same draws, the same verifier, the same line in eval_problems.jsonl."""
    from dapo.evaluation.offline import OfflineEval, run_offline_eval
    from dapo.types import Verdict

    if step in {line["step"] for line in evaluations(folder)}:
        return
    settings = config.eval
    offline = OfflineEval(
        model=model, data=eval_sources(config)[0].path, use="eval", k=settings.k, temperature=settings.temperature,
        top_p=settings.top_p, max_response_tokens=config.limits.max_response_tokens,
        max_prompt_tokens=config.limits.max_prompt_tokens, template=config.data.template,
        chat=config.data.chat_template, verifier=config.rewards.verifier, seed=config.train.seed,
        concurrent=config.rollout.max_concurrent_sequences, device=config.model.device,
    )  # fmt: skip
    result = run_offline_eval(offline, journal=folder / f"answers-{step}.jsonl")
    correct = [
        sum(result.answers[problem.id, i].verdict is Verdict.CORRECT for i in range(settings.k))
        for problem in result.problems
    ]
    ids = [problem.id for problem in result.problems]
    append_line(folder / "eval_problems.jsonl", {"step": step, "k": settings.k, "ids": ids, "correct": correct})


# ------------------------------------------------------------------ side by side


def compared(plan: ParityPlan, seeds: Sequence[int]) -> dict[str, Any]:
    """Both curves, the paired difference at every evaluated step and over all of them, the seconds of a step."""
    import numpy as np

    from dapo.ablation.compare import difference_json, estimate
    from dapo.report.paired import paired_difference

    scores = {side: np.stack([curve(plan, side, seed) for seed in seeds]) for side in SIDES}  # [S, E, P]
    ours, theirs = scores["dapo"], scores["trl"]
    points: list[dict[str, Any]] = []
    for at, step in enumerate(plan.evaluated_steps):
        means = {side: estimate(scores[side][:, at]).value for side in SIDES}
        points.append(
            {"step": step, **means, "difference": difference_json(paired_difference(ours[:, at], theirs[:, at]))}
        )
    whole = paired_difference(ours[:, 1:].mean(1), theirs[:, 1:].mean(1))
    apart = [point["step"] for point in points if not point["difference"]["low"] <= 0 <= point["difference"]["high"]]
    return {
        "device": device_name(device_of(plan.config(seeds[0]))), "peer": peer_versions(plan, seeds[0]),
        "vllm": plan.use_vllm, "config": plan.keys, "ours": list(plan.ours), "seeds": list(seeds),
        "problems": ours.shape[2], "points": points, "difference": difference_json(whole), "coincide": not apart,
        "apart_at": apart, "correct": {side: {seed: counts(plan, side, seed) for seed in seeds} for side in SIDES},
        "seconds": {side: {seed: seconds(plan, side, seed) for seed in seeds} for side in SIDES},
        "s_a_step": {side: pace(plan, side, seeds) for side in SIDES},
        "parts": {side: {part: pace(plan, side, seeds, key) for part, key in PARTS[side].items()} for side in SIDES},
    }  # fmt: skip


def peer_versions(plan: ParityPlan, seed: int) -> str:
    file = plan.run_folder("trl", seed) / "versions.json"
    return str(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else "not recorded"


def curve(plan: ParityPlan, side: str, seed: int) -> Any:
    """[E, P]: the share of right responses of each problem at each evaluated step."""
    import numpy as np

    by_step = {line["step"]: line for line in evaluations(plan.run_folder(side, seed))}
    lines = [by_step[step] for step in plan.evaluated_steps]
    return np.array([np.array(line["correct"]) / line["k"] for line in lines])


def counts(plan: ParityPlan, side: str, seed: int) -> dict[int, list[int]]:
    return {line["step"]: line["correct"] for line in evaluations(plan.run_folder(side, seed))}


def seconds(plan: ParityPlan, side: str, seed: int, key: str = "") -> list[float]:
    """Of every step: rollout, rewards and update, without evaluations; or of one part of them."""
    name, whole = ("metrics.jsonl", "timing.step_s") if side == "dapo" else ("times.jsonl", "seconds")
    lines = read_lines(plan.run_folder(side, seed) / name)
    by_step = {line["step"]: float(line.get(key or whole, 0.0)) for line in lines}
    return [round(by_step[step], 3) for step in sorted(by_step)]


def pace(plan: ParityPlan, side: str, seeds: Sequence[int], key: str = "") -> float:
    """The median step; the first of a run warms up."""
    return statistics.median(s for seed in seeds for s in seconds(plan, side, seed, key)[1:])
