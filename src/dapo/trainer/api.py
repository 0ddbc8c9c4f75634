"""Training from Python: a recipe or config, optionally with the caller's own problems, reward and callbacks."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dapo.checkpoints.load import newest_intact
from dapo.config.keys import refuse_unknown
from dapo.config.load import Resolved, flatten, load_recipe, parse_override, resolve, with_changes
from dapo.config.schema import Config
from dapo.data.prepare.clean import write_jsonl
from dapo.data.whole_file import write_whole
from dapo.errors import ConfigError, DataError
from dapo.files import read_lines
from dapo.trainer.loop import train as train_loop
from dapo.trainer.observer import Observer
from dapo.trainer.start import begin_run, refuse_existing
from dapo.trainer.trust import refuse_strangers_recipe
from dapo.types import Problem

Problems = Iterable[Problem] | Callable[[], Iterable[Problem]]
Reward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of a run; everything else is in its folder."""

    folder: Path
    step: int  # steps done
    is_finished: bool  # False when a signal or a callback stopped it; `dapo resume FOLDER` continues it
    metrics: dict[str, float]  # of the last step; empty when there was none
    evaluations: list[dict[str, Any]]  # the lines of eval.jsonl, the first from before training
    model: Path | None  # Hugging Face folder of the newest checkpoint


def train(
    config_or_recipe: str | Path | Config | Resolved,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    callbacks: Sequence[Observer] = (),
    problems: Problems | None = None,
    eval_problems: Problems | None = None,
    reward: str | Reward | None = None,
    trust: bool = False,
) -> RunResult:
    """Train to the end of the config, in the new folder `out`.

    `config_or_recipe` is a shipped recipe's name, a TOML file or a config; `overrides` are "key=value" as after --set.
    `problems` and `eval_problems` replace data.train and data.eval; they are written into the run folder, so that
    `dapo resume` finds them. `reward(response, answer, meta)` replaces rewards.verifier and returns a Score, a number
    or True or False; TRL's and verl's functions are known as well (docs/your-reward.md). It runs in worker processes
    that are killed when it hangs, so it must be a function that can be imported: "pkg.mod:function", or such a function
    itself. A script that passes its own function needs the usual `if __name__ == "__main__":`. `trust` lets the config
    of somebody else's run, given as a recipe, name programs and modules.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides = {overrides!r}: is one string.", remedy=f"Pass a list: [{overrides!r}].")
    folder = Path(out)
    refuse_existing(folder)
    changes = list(overrides)
    if reward is not None:
        changes.append(f"rewards.verifier={json.dumps(importable_name(reward))}")
    files: dict[Path, list[Problem]] = {}
    for key, name, given in (("data.train", "problems", problems), ("data.eval", "eval_problems", eval_problems)):
        if given is not None:
            path = folder.resolve() / f"{name}.jsonl"
            files[path] = as_problems(name, given)
            typed = json.dumps(str(path), ensure_ascii=False)
            changes.append(f"{key}={typed if key == 'data.train' else f'[{typed}]'}")
    if isinstance(config_or_recipe, str | Path):
        refuse_strangers_recipe(str(config_or_recipe), changes, trust=trust)
    resolved = with_overrides(config_or_recipe, changes)
    is_new = not folder.exists()
    try:
        for path, own in files.items():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, partial(write_jsonl, problems=own))
        run = begin_run(resolved, folder, callbacks)
    except BaseException:  # leave nothing half-written: the same call must work once the cause is fixed
        for path in files:
            path.unlink(missing_ok=True)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    with closing(run):
        train_loop(run)
    return result_of(folder, run.step, is_finished=run.is_complete)


def result_of(folder: Path, step: int, *, is_finished: bool) -> RunResult:
    """What a run folder says of its run."""
    checkpoint, _ = newest_intact(folder / "checkpoints")
    return RunResult(
        folder=folder,
        step=step,
        is_finished=is_finished,
        metrics=next(reversed(list(read_lines(folder / "metrics.jsonl"))), {}),
        evaluations=list(read_lines(folder / "eval.jsonl")),
        model=None if checkpoint is None else checkpoint / "model",
    )


def with_overrides(config_or_recipe: str | Path | Config | Resolved, overrides: Sequence[str]) -> Resolved:
    """The config to run; keys that would have no effect are refused as on the command line."""
    if isinstance(config_or_recipe, (str, Path)):
        return load_recipe(str(config_or_recipe), overrides)
    if isinstance(config_or_recipe, Resolved):
        name, config, origin = config_or_recipe.name, config_or_recipe.config, dict(config_or_recipe.origin)
    elif isinstance(config_or_recipe, Config):
        name, config, origin = config_or_recipe.preset, config_or_recipe, {}
    else:
        raise ConfigError(
            f"config_or_recipe = {config_or_recipe!r}: is a {type(config_or_recipe).__name__}.",
            remedy="Pass a recipe's name, a TOML file, or what dapo.load_recipe returns.",
        )
    typed = dict(parse_override(text) for text in overrides)
    changes = flatten(typed)
    refuse_unknown(changes, "--set")
    if "preset" in changes:
        raise ConfigError(
            f"preset = {changes['preset']}: cannot change in a resolved config.", remedy="Load the recipe with it."
        )
    keys = with_changes(flatten(config.model_dump(mode="json")), typed)
    return resolve(name, keys, origin | dict.fromkeys(changes, "--set"))


# ------------------------------------------------------------------ the caller's own parts


def as_problems(name: str, given: Problems) -> list[Problem]:
    """The problems of a sequence or a callable."""
    items: list[Any] = list(given() if callable(given) else given)
    if not items:
        raise DataError(f"{name}: is empty.", remedy="Pass at least one dapo.Problem.")
    for place, item in enumerate(items):
        if not isinstance(item, Problem):
            raise DataError(
                f"{name}[{place}]: is a {type(item).__name__}.", remedy="Pass dapo.Problem(id, question, answer)."
            )
    return items


def importable_name(reward: str | Reward) -> str:
    """ "module:name" under which a worker process finds the function; refuses what no other process can import."""
    if isinstance(reward, str):
        return reward
    name, module = getattr(reward, "__qualname__", None), getattr(reward, "__module__", None)
    shown = name or repr(reward)
    if not callable(reward) or name is None or module is None:
        raise not_importable(shown, "is no function")
    if name == "<lambda>" or "<lambda>" in name:
        raise not_importable(shown, "is a lambda")
    if "<locals>" in name:
        raise not_importable(shown, "is defined inside a function")
    if "." in name:
        raise not_importable(shown, "is a method or lies in a class")
    if module == "__main__":
        module = name_of_main(shown)
    elif getattr(importlib.import_module(module), name, None) is not reward:
        raise not_importable(shown, f"is not what {module}:{name} names")
    return f"{module}:{name}"


def name_of_main(shown: str) -> str:
    """The module a running script is, when it is imported by another process."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name.removesuffix(".__main__"))
    if file is None or not Path(file).stem.isidentifier():
        raise not_importable(shown, "is defined in an interactive session" if file is None else f"lies in {file}")
    return Path(file).stem  # workers search the script's folder: it is in sys.path


def not_importable(shown: str, why: str) -> ConfigError:
    return ConfigError(
        f"reward = {shown}: {why}, so that worker processes cannot import it; rewards run there to be killable.",
        remedy='Put it at the top level of a module and pass the function or "module:function".',
    )
