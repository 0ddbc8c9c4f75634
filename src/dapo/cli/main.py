"""`dapo`: the list of commands. A command's module is imported only when it is called, so `--help` is instant."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Annotated, NoReturn

import typer

from dapo import __version__
from dapo.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, DapoError, DiskError, out_of_memory

COMPLETION = "_DAPO_COMPLETE"  # set by a shell that asks for completions
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# command -> its line in `dapo --help`. Module dapo.cli.NAME defines `command`: a function or a Typer with subcommands.
COMMANDS = {
    "quickstart": "Train the bundled toy model: first result in minutes.",
    "init": "Write a first recipe for your model, data and GPU.",
    "train": "Train a model from a recipe.",
    "resume": "Resume a run that was stopped or killed.",
    "eval": "Score a model or a run: avg@k, pass@k, maj@k.",
    "play": "See one episode turn by turn, or play it yourself.",
    "export": "Export a run's model as a Hugging Face folder.",
    "report": "Write a page about one or more runs; it opens offline.",
    "watch": "Serve the same page live, on 127.0.0.1.",
    "doctor": "Diagnose a run, or show what this machine can run.",
    "ledger": "Show where every prompt of a run went.",
    "ladder": "Ablate DAPO: naive GRPO plus one technique at a time.",
    "data": "Check, clean or probe problems; list reasoning-gym tasks.",
    "explain": "Show what a recipe will do, or how two configs differ.",
    "import-config": "Turn a verl, TRL or OpenRLHF config into a recipe.",
    "verify": "Score responses against answers; audit a run's verdicts.",
    "bench": "Compare speed with other frameworks that are installed.",
    "selfcheck": "Check the equations and their invariances, in seconds.",
}


def main(argv: list[str] | None = None) -> None:
    """Run one command. A DapoError becomes one message and its exit code, mostly 2, never a traceback."""
    arguments = sys.argv[1:] if argv is None else argv
    # Idle torch threads sleep instead of spinning: 3 times faster on a machine that also does other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        try:
            build_app(command_in(being_completed() or arguments))(args=arguments, prog_name="dapo")
        except SystemExit:
            flush_output()  # here, where a failure can be told
            raise
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            sys.stderr.write("Interrupted.\n")
        if not end.code and "RANK" in os.environ:
            leave()
        raise
    except (DapoError, RuntimeError) as error:
        known = error if isinstance(error, DapoError) else out_of_memory(error)
        if known is None:
            raise
        sys.stderr.write(render_error(known))
        try:
            flush_output()
        except OSError:  # the first error is reported and decides the exit code
            drop_output()
        raise SystemExit(known.exit_code) from None
    except BrokenPipeError:  # `dapo ... | head`: the reader has seen enough
        drop_output()
        raise SystemExit(0) from None
    except OSError as error:  # `dapo ... > FILE` on a full disk; files that we open have names, and errors of their own
        if error.errno not in DISK_FULL or error.filename is not None:
            raise
        drop_output()
        sys.stderr.write(render_error(DiskError(f"standard output: cannot be written: {error.strerror}.")))
        raise SystemExit(EXIT_BAD_INPUT) from None


def flush_output() -> None:
    if sys.stdout is not None:  # closed before we began: `dapo ... >&-`
        sys.stdout.flush()


def drop_output() -> None:
    """Discard what is still to be written to standard output, so that Python does not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave() -> NoReturn:
    """End a rank whose work is done, without its libraries' own ends.

    Threads of torch that are still there when a process ends by itself can abort it; a launcher takes that for a fault.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def build_app(wanted: str | None) -> typer.Typer:
    """All commands by name and summary; only the wanted one with its real code and options."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        help="Reinforcement learning for language models with DAPO; GRPO, CISPO, GSPO, PPO, VAPO and others are "
        "presets built from the same components.",
        epilog="First result on this machine: dapo quickstart. What a run will do: dapo explain quickstart.",
    )
    app.callback()(options)
    for name, summary in COMMANDS.items():
        if name != wanted:
            app.command(name, help=summary)(not_loaded)
            continue
        command = importlib.import_module(f"dapo.cli.{name.replace('-', '_')}").command
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, help=summary)
        else:
            app.command(name)(command)
    return app


def command_in(arguments: list[str]) -> str | None:
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def being_completed() -> list[str]:
    """The words that a shell asks to complete, without `dapo`: the command among them is loaded for its options.

    bash passes them in one variable, the other shells in another; typer defines both.
    """
    if COMPLETION not in os.environ:
        return []
    return os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dapo {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command; the version is printed by its callback."""


def not_loaded() -> None:
    raise AssertionError("build_app loads the command that was asked for")


def render_error(error: DapoError) -> str:
    """`ConfigError: key = value: why.` and the remedy indented below it. Control characters are made visible."""
    from dapo.commands import visible

    name = type(error).__name__
    indent = " " * (len(name) + 2)
    lines = [visible(line) for part in (error.message, error.remedy) if part for line in part.split("\n")]
    return f"{name}: " + f"\n{indent}".join(lines) + "\n"


if __name__ == "__main__":
    main()
