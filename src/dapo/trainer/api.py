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
from dapo.errors import ConfigError, DapoError, DataError
from dapo.files import read_lines, replace_file
from dapo.report.frame import frame
from dapo.report.load import load_run
from dapo.report.page import write_page
from dapo.report.summary import html_of, text_of
from dapo.trainer.loop import train as train_loop
from dapo.trainer.notebook.cells import is_in_cell, module_of
from dapo.trainer.notebook.view import NotebookView, is_notebook
from dapo.trainer.observer import Observer
from dapo.trainer.start import begin_run, refuse_existing
from dapo.trainer.trust import refuse_strangers_recipe
from dapo.types import Problem

Problems = Iterable[Problem] | Callable[[], Iterable[Problem]]
Reward = Callable[..., Any]


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The outcome of a run; everything else is in its folder. A notebook shows it as a table with small curves."""

    folder: Path
    step: int  # steps done
    is_finished: bool  # False when a signal or a callback stopped it; `dapo resume FOLDER` continues it
    metrics: dict[str, float]  # of the last step; empty when there was none
    evaluations: list[dict[str, Any]]  # the lines of eval.jsonl, the first from before training
    model: Path | None  # Hugging Face folder of the newest checkpoint

    def report(self) -> ReportPage:
        """Write the report into the run's folder. As a cell's last value it is shown in the notebook."""
        return ReportPage(write_page(self.folder))

    def __repr__(self) -> str:
        try:
            return text_of(load_run(self.folder))
        except (DapoError, OSError):  # the folder was moved or deleted
            return f"RunResult(folder={str(self.folder)!r}, step={self.step}, is_finished={self.is_finished})"

    def _repr_html_(self) -> str | None:
        try:
            return html_of(load_run(self.folder))
        except (DapoError, OSError):
            return None


@dataclass(frozen=True, slots=True)
class ReportPage:
    """The report of a run: a file that opens in any browser, and a frame in a notebook."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        return frame(self.path.parent)


def train(
    config_or_recipe: str | Path | Config | Resolved,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    callbacks: Sequence[Observer] = (),
    problems: Problems | None = None,
    eval_problems: Problems | None = None,
    reward: str | Reward | None = None,
    environment: str | type | None = None,
    show: bool | None = None,
    trust: bool = False,
) -> RunResult:
    """Train to the end of the config, in the new folder `out`.

    `config_or_recipe` is a shipped recipe's name, a TOML file or a config; `overrides` are "key=value" as after --set.
    `problems` and `eval_problems` replace data.train and data.eval; they are written into the run folder, so that
    `dapo resume` finds them. `reward(response, answer, meta)` replaces rewards.verifier and returns a Score, a number
    or True or False; TRL's and verl's functions are known as well (docs/your-reward.md). `environment` replaces
    data.environment (docs/environments.md). Both run in worker processes that are killed when they hang, so these must
    find them: "pkg.mod:function", such a function itself, or one that a notebook's cell defines, whose source is
    written into the run folder with what it uses of other cells. A script that passes its own function needs the usual
    `if __name__ == "__main__":`. `show` draws the run as it goes; in a notebook it is on. `trust` lets the config of
    somebody else's run, given as a recipe, name programs and modules.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides = {overrides!r}: is one string.", remedy=f"Pass a list: [{overrides!r}].")
    folder = Path(out)
    refuse_existing(folder)
    changes = list(overrides)
    files: dict[Path, Callable[[Path], None]] = {}
    for key, name, own in (("rewards.verifier", "reward", reward), ("data.environment", "environment", environment)):
        if own is not None and not isinstance(own, str) and is_in_cell(own):
            path = folder.resolve() / f"{name}.py"
            files[path] = partial(replace_file, text=module_of(name, own))
            changes.append(f"{key}={json.dumps(f'{path}:{own.__name__}', ensure_ascii=False)}")
        elif own is not None:
            changes.append(f"{key}={json.dumps(importable_name(own, name))}")
    for key, name, given in (("data.train", "problems", problems), ("data.eval", "eval_problems", eval_problems)):
        if given is not None:
            path = folder.resolve() / f"{name}.jsonl"
            files[path] = partial(write_whole, write=partial(write_jsonl, problems=as_problems(name, given)))
            typed = json.dumps(str(path), ensure_ascii=False)
            changes.append(f"{key}={typed if key == 'data.train' else f'[{typed}]'}")
    if isinstance(config_or_recipe, str | Path):
        refuse_strangers_recipe(str(config_or_recipe), changes, trust=trust)
    resolved = with_overrides(config_or_recipe, changes)
    is_new = not folder.exists()
    try:
        for path, write in files.items():
            folder.mkdir(parents=True, exist_ok=True)
            write(path)
        views = [NotebookView()] if (is_notebook() if show is None else show) else []
        run = begin_run(resolved, folder, [*views, *callbacks])
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


def importable_name(own: str | Reward, argument: str = "reward") -> str:
    """ "module:name" under which a worker process finds it; refuses what no other process can import."""
    if isinstance(own, str):
        return own
    if why := why_not_importable(own):
        shown = getattr(own, "__qualname__", None) or repr(own)
        raise ConfigError(
            f"{argument} = {shown}: {why}, so that worker processes cannot import it; it runs there to be killable.",
            remedy='Put it at the top level of a module, or of a notebook\'s cell; and pass it or "module:name".',
        )
    module = name_of_main() if own.__module__ == "__main__" else own.__module__
    return f"{module}:{own.__qualname__}"


def why_not_importable(own: object) -> str:
    """Empty where a module has it at its top level."""
    name, module = getattr(own, "__qualname__", None), getattr(own, "__module__", None)
    if not callable(own) or name is None or module is None:
        return "is no function"
    if "<lambda>" in name:
        return "is a lambda"
    if "<locals>" in name:
        return "is defined inside a function"
    if "." in name:
        return "is a method or lies in a class"
    if module == "__main__":
        return "" if name_of_main() else f"lies in {getattr(sys.modules['__main__'], '__file__', 'no file')}"
    is_found = getattr(importlib.import_module(module), name, None) is own
    return "" if is_found else f"is not what {module}:{name} names"


def name_of_main() -> str:
    """The module a running script is, when it is imported by another process; empty where it cannot be."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name.removesuffix(".__main__"))
    stem = "" if file is None else Path(file).stem
    return stem if stem.isidentifier() else ""  # workers search the script's folder: it is in sys.path
