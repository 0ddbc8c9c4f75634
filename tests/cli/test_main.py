"""The command line as a user meets it: a real process, its exit code, what it prints and what it loads."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from command_line import dapo
from dapo import __version__
from dapo.algorithms.aggregate import token_mean
from dapo.config.load import find_recipe, load_recipe, to_toml


def modules_after(*arguments: str, **environment: str) -> tuple[str, set[str]]:
    """What a command prints, and every module that it has loaded when it is done."""
    code = (
        "import sys\nfrom dapo.__main__ import main\n"
        "sys.argv = ['dapo', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('\\n'.join(['', 'MODULES', *sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    printed, _, modules = done.stdout.partition("\nMODULES\n")
    return printed, set(modules.split())


HEAVY = {"torch", "transformers", "numpy", "pydantic", "pyarrow", "datasets", "huggingface_hub", "rich", "yaml"}


def test_help_lists_the_verbs_at_once():
    """Quick because nothing is loaded for it: no library but the command line's, no verb, a few hundred modules."""
    printed, modules = modules_after("--help")
    assert "explain" in printed
    assert "selfcheck" in printed
    assert not HEAVY & modules
    assert {name for name in modules if name.startswith("dapo.")} == {
        "dapo.__main__", "dapo.cli", "dapo.cli.main", "dapo.errors", "dapo.processes",
    }  # fmt: skip
    assert len(modules) < 400  # 150 of them; torch alone brings 1,500


@pytest.mark.parametrize(
    ("words", "at", "expected"),
    [
        pytest.param("dapo tr", 1, ["train"], marks=pytest.mark.slow),
        pytest.param("dapo import", 1, ["import-config"], marks=pytest.mark.slow),
        ("dapo train --s", 2, ["--set"]),  # the command's own options, for which it is loaded
        pytest.param("dapo data pre", 2, ["prepare"], marks=pytest.mark.slow),
    ],
)
def test_bash_completes_verbs_and_options_without_loading_torch(words: str, at: int, expected: list[str]):
    request = {"_DAPO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
    printed, modules = modules_after(**request)
    assert printed.split() == expected
    assert not {"torch", "transformers"} & modules


@pytest.mark.slow
def test_other_shells_complete_a_verbs_options():
    request = {"_DAPO_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "dapo resume --s"}
    assert '"--set"' in modules_after(**request)[0]


@pytest.mark.slow
def test_completion_is_installed_for_bash(tmp_path: Path):
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script, _ = modules_after("--show-completion", "bash", **home)
    assert "complete -o default -F _dapo_completion dapo" in script
    printed, _ = modules_after("--install-completion", "bash", **home)
    assert "bash completion installed" in printed
    installed = tmp_path / ".bash_completions" / "dapo.sh"
    assert installed.read_text().strip() == script.strip()
    assert str(installed) in (tmp_path / ".bashrc").read_text()


def test_help_fits_eighty_columns_without_cutting_a_summary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = dapo("--help").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "..." in line and "COMMAND" not in line]


def test_no_arguments_and_version():
    assert "Usage" in dapo().stdout + dapo().stderr
    assert dapo("--version").stdout.startswith("dapo 0.")


def test_a_misspelt_verb_is_bad_input():
    answer = dapo("explian", "quickstart")
    assert answer.returncode == 2
    assert "explain" in answer.stderr


def heed_interrupts() -> None:
    """A shell has its background commands ignore interrupts, and these tests may be run by one of them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_while_libraries_load_is_one_quiet_line(tmp_path: Path):
    # A library that says when its import has begun, and that is not done with it before the signal comes.
    (tmp_path / "pydantic").mkdir()
    (tmp_path / "pydantic" / "__init__.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "dapo", "explain", "quickstart"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        preexec_fn=heed_interrupts,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert (process.returncode, error) == (130, "Interrupted.\n")


def test_the_console_script_answers_ctrl_c_as_early_as_the_module_does():
    # An entry point imports its module first: that one must load nothing heavy before it listens.
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["dapo"].partition(":")
    code = f"import sys\nfrom {module} import {function}\nassert not {{'typer', 'pydantic', 'rich'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("verb", [("explain", "quickstart"), ("explain", "quickstart", "--json"), ("--version",)])
def test_output_to_a_full_disk_is_one_message(verb: tuple[str, ...]):
    with open("/dev/full", "w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "dapo", *verb],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert answer.returncode == 2
    assert answer.stderr == "DiskError: standard output: cannot be written: No space left on device.\n"


@pytest.mark.parametrize(("verb", "code"), [(("--version",), 0), (("explain", "no-such-recipe"), 2)])
def test_a_closed_standard_output_changes_nothing_else(verb: tuple[str, ...], code: int):
    answer = subprocess.run(
        [sys.executable, "-m", "dapo", *verb],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: os.close(1),  # `dapo ... >&-`
    )
    assert answer.returncode == code
    assert answer.stderr.startswith("ConfigError: no-such-recipe" if code else "")
    assert "Traceback" not in answer.stderr


def test_an_error_is_told_also_where_nobody_reads_the_output():
    # What was printed before the error is still in the buffer when the error comes.
    code = (
        "import sys\nimport dapo.cli.main as cli\nfrom dapo.errors import ConfigError\n"
        "def verb(**_):\n    sys.stdout.write('some')\n    raise ConfigError('a.b = 1: no.')\n"
        "cli.build_app = lambda _verb: verb\ncli.main(['x'])\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    answer = subprocess.run(
        [sys.executable, "-c", code],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (2, "ConfigError: a.b = 1: no.\n")


def test_selfcheck_passes_here():
    answer = dapo("selfcheck", "--json")
    assert answer.returncode == 0
    report = json.loads(answer.stdout)
    assert report["holds"]
    assert len(report["checks"]) >= 15
    assert all(check["error"] <= check["tolerance"] for check in report["checks"])


def test_selfcheck_fails_when_an_equation_is_broken(monkeypatch: pytest.MonkeyPatch):
    # A selfcheck that cannot fail proves nothing: break the token mean and expect exit code 1.
    monkeypatch.setattr(
        "dapo.algorithms.selfcheck.token_mean",
        lambda loss, *, total_tokens: token_mean(loss, total_tokens=loss.numel()),  # noqa: ARG005
    )
    answer = dapo("selfcheck")
    assert answer.returncode == 1
    assert "FAILED" in answer.stdout


def test_explain_takes_a_run_folder_for_the_recipe_it_runs_by(tmp_path: Path):
    run = tmp_path / "first"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(load_recipe("quickstart", ["train.steps=7"]).config))
    plan = json.loads(dapo("explain", str(run), "--json").stdout)
    assert (plan["name"], plan["config"]["train.steps"]) == ("first", 7)
    changed = json.loads(dapo("explain", str(run), "quickstart", "--json").stdout)["differences"]
    assert [(row["key"], row["first"]) for row in changed] == [("train.steps", "7")]
    refused = dapo("train", str(run))
    assert refused.returncode == 2
    assert f"{run}: is a run folder, not a recipe." in refused.stderr
    assert f"dapo resume {run}" in refused.stderr


def test_explain_says_what_a_run_will_do():
    answer = dapo("explain", "quickstart")
    assert answer.returncode == 0
    for expected in ("32 prompts x 8 responses = 256 responses", "clip-higher", "train.seed", "recipe"):
        assert expected in answer.stdout


def test_explain_json_has_the_same_numbers():
    plan = json.loads(dapo("explain", "dapo-qwen2.5-32b", "--gpu", "h100", "--json").stdout)
    assert plan["work"]["responses_per_step"] == 8192
    assert plan["memory"]["gpus"] == 128
    assert plan["memory"]["parameters"] == pytest.approx(32.8e9, rel=0.01)
    assert plan["config"]["algorithm.clip.dual"] == 10.0


def test_explain_two_prints_where_script_and_paper_part():
    answer = json.loads(dapo("explain", "dapo-qwen2.5-32b", "dapo", "--json").stdout)
    found = {row["key"]: (row["first"], row["second"]) for row in answer["differences"]}
    assert found["algorithm.clip.dual"] == ("10.0", "none")
    assert found["train.warmup_steps"] == ("10", "20")
    assert found["shaping.overlong_filter"] == ("false", "true")
    assert found["train.weight_decay"] == ("0.1", "0.0")
    assert found["rewards.truncated_may_be_correct"] == ("true", "false")
    assert "algorithm.clip.high" not in found  # they agree on it
    assert "model.path" not in found  # a preset has no model


def test_explain_two_recipes_and_two_equal_ones():
    text = dapo("explain", "gsm8k-0.5b-lora-8gb", "gsm8k-1.5b-24gb").stdout
    assert "model.path" in text
    assert "are the same" in dapo("explain", "quickstart", "quickstart").stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["explain", "quickstart", "--set", "algorithm.clip.hihg=1"], ["algorithm.clip.hihg", "algorithm.clip.high"]),
        (["explain", "quickstart", "--set", "train.steps=many"], ["train.steps", "many", "whole number"]),
        (["explain", "quickstart", "--set", "sampling.responses_per_prompt=1"], ["a group of one", "2 or more"]),
        (["explain", "quickstart", "--set", "algorithm.clip.low=1.5"], ["algorithm.clip.low = 1.5"]),
        (["explain", "quickstart", "--set", "shaping.overlong_buffer_tokens=200"], ["200", "max_response_tokens"]),
        (["explain", "missing.toml"], ["missing.toml: no such file"]),
        (["explain", "dapo"], ["is a preset", "dapo explain quickstart --set preset=dapo"]),
        (["explain", "quickstart", "--gpu", "h1000"], ["--gpu h1000", "h100"]),
        (["explain", "quickstart", "--gpus", "0"], ["--gpus"]),
        (["explain"], ["recipe"]),
        (["selfcheck", "--device", "cuda:9"], ["--device cuda:9", "cpu"]),
    ],
)
def test_bad_input_exits_2_with_one_message_and_no_traceback(arguments: list[str], parts: list[str]):
    answer = dapo(*arguments)
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""
    for part in parts:
        assert part.lower() in answer.stderr.lower()


def test_broken_toml_exits_2(tmp_path: Path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    answer = dapo("explain", str(broken))
    assert answer.returncode == 2
    assert "not valid TOML" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_closed_pipe_is_no_error():
    shown = subprocess.run(
        f"{sys.executable} -m dapo explain quickstart | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "quickstart" in shown.stdout
    assert "Traceback" not in shown.stderr


def test_the_recipes_folder_at_the_root_is_the_shipped_one():
    root = Path(__file__).parents[2]
    assert (root / "recipes" / "quickstart.toml").samefile(find_recipe("quickstart"))


@pytest.mark.parametrize(("environment", "status"), [({"RANK": "0"}, 0), ({}, -signal.SIGABRT)])
def test_a_rank_whose_work_is_done_is_not_failed_by_its_libraries_ends(environment: dict[str, str], status: int):
    code = "import atexit, os; from dapo.cli.main import main; atexit.register(os.abort); main(['--version'])"
    clean = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (status, f"dapo {__version__}\n")


def test_a_rank_that_fails_still_says_so():
    command = [sys.executable, "-m", "dapo", "train", "no-such-recipe"]
    done = subprocess.run(command, env=os.environ | {"RANK": "0"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-recipe" in done.stderr


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 54.00 MiB. GPU 0 has a total capacity of 139 GiB.",
        "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 999 bytes.",
    ],
)
def test_memory_that_no_pass_can_do_with_less_of_is_a_message_and_not_a_traceback(
    said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import torch

    from dapo.cli.main import main

    def load_weights(**_: object) -> None:
        raise torch.OutOfMemoryError(said) if said.startswith("CUDA out") else RuntimeError(said)

    monkeypatch.setattr("dapo.cli.main.build_app", lambda _verb: load_weights)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 52 << 30)
    with pytest.raises(SystemExit) as end:
        main(["train", "quickstart"])
    assert end.value.code == 1  # not the input's fault: a ladder goes on with its other arms
    told = capsys.readouterr().err
    assert "(other processes hold about 87 of its 140 GiB)." in told
    assert "rollout.kv_cache_gib" in told
    assert "Traceback" not in told


def test_a_device_that_does_not_answer_any_more_does_not_hide_that_it_was_full(monkeypatch: pytest.MonkeyPatch):
    import torch

    from dapo.errors import out_of_memory

    def lost() -> tuple[int, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    known = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."))
    assert known is not None
    assert known.message == "CUDA out of memory."


def test_another_runtime_error_is_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch):
    from dapo.cli.main import main

    def fail(**_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("dapo.cli.main.build_app", lambda _verb: fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", "quickstart"])
