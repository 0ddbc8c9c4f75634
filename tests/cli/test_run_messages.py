"""What a run that ends says: the command that goes on with it, with the run's own name, as a shell takes it."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy import recipe

from dapo.cli import resume
from dapo.cli.main import main
from dapo.cli.running.messages import errors_name, say_end
from dapo.commands import dapo_command, name_run, set_options
from dapo.errors import DapoError, DiskError, OutOfMemoryError, cannot_write
from dapo.trainer import loop
from dapo.trainer.start import start_run

FOLDER = Path("my runs/it's first")


def test_a_command_is_read_by_a_shell_as_the_words_it_was_made_of():
    words = ["eval", "--model", FOLDER, *set_options({"data.eval": '["a b"]', "train.lr": 1e-6})]
    assert shlex.split(dapo_command(*words)) == ["dapo", *map(str, words)]
    assert dapo_command("resume", "runs/first") == "dapo resume runs/first"
    assert shlex.split(name_run("dapo resume RUN", FOLDER)) == ["dapo", "resume", str(FOLDER)]
    assert name_run("RUNNING", FOLDER) == "RUNNING"


@pytest.mark.parametrize(("step", "expected"), [(3, "resume"), (9, "eval"), (9, "export"), (9, "report")])
def test_the_end_of_a_run_names_it_in_every_command(step: int, expected: str, capsys: pytest.CaptureFixture[str]):
    config = SimpleNamespace(train=SimpleNamespace(steps=9))
    say_end(SimpleNamespace(step=step, config=config, is_complete=step == 9), FOLDER)
    commands = [line.partition(": dapo ")[2] for line in capsys.readouterr().out.splitlines() if ": dapo " in line]
    assert all(str(FOLDER) in shlex.split(command) for command in commands)
    assert expected in [command.partition(" ")[0] for command in commands]


def test_an_error_deep_in_a_run_names_it():
    with pytest.raises(DiskError) as caught, errors_name(FOLDER):
        raise cannot_write("a file", OSError(28, "No space left on device"))
    assert dapo_command("resume", FOLDER) in caught.value.remedy
    with pytest.raises(OutOfMemoryError) as lack, errors_name(FOLDER):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    assert dapo_command("resume", FOLDER) in lack.value.remedy
    with pytest.raises(RuntimeError, match=r"^another$") as other, errors_name(FOLDER):
        raise RuntimeError("another")
    assert not isinstance(other.value, DapoError)


def test_an_interrupt_that_does_not_wait_says_how_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for is_run in (False, True):
        if is_run:
            (tmp_path / "config.toml").touch()
        with pytest.raises(KeyboardInterrupt), errors_name(tmp_path):
            raise KeyboardInterrupt
        assert (dapo_command("resume", tmp_path) in capsys.readouterr().err) is is_run


def test_ctrl_c_in_resume_says_how_to_resume_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "my run"
    start_run(recipe(tmp_path, dtype="float32"), folder).close()
    train = loop.train

    def stopped_at_once(run: object) -> None:
        run.is_stopping = True  # type: ignore[attr-defined]  # what a signal sets
        train(run)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train", stopped_at_once)
    resume.command(folder)
    assert f"Stopped after step 0 of 3. Resume: {dapo_command('resume', folder)}" in capsys.readouterr().out


def test_a_run_folder_with_a_blank_is_quoted_where_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "my run"
    start_run(recipe(tmp_path, dtype="float32"), folder).close()
    for arguments in (["train", str(folder)], ["train", "quickstart", "--out", str(folder)]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert dapo_command("resume", folder) in capsys.readouterr().err
