"""`dapo export`: a folder that transformers loads, a card that states the origin, and one message for bad input."""

import hashlib
import json
import re
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from toy import recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from command_line import dapo
from dapo.config import load_recipe
from dapo.errors import CheckpointError, ConfigError
from dapo.release import bundle
from dapo.release.export import export_run
from dapo.trainer.loop import train
from dapo.trainer.resume import read_run_config
from dapo.trainer.start import start_run


@pytest.fixture(scope="module")
def toy_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of `dapo` that was evaluated, and one of `dapo-fast` that was not."""
    folder = tmp_path_factory.mktemp("runs")
    evaluated = ["eval.every_steps=1", "eval.k=2", "data.eval=['toy:problems']", "checkpoint.keep=3"]
    for name, extra in {"paper": evaluated, "fast": ["preset=dapo-fast"], "ppo": ["preset=ppo"]}.items():
        run = start_run(recipe(folder, "train.steps=2", *extra, dtype="float32"), folder / name)
        train(run)
        run.close()
    return folder


@pytest.mark.slow
def test_the_folder_is_plain_hugging_face_and_has_the_newest_weights(toy_runs: Path, tmp_path: Path):
    exported = export_run(toy_runs / "paper", tmp_path / "out")
    assert exported.step == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"
    trained = load_file(toy_runs / "paper" / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    parameters = model.state_dict()
    assert all(torch.equal(parameters[name], weight) for name, weight in trained.items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing left aside


def test_the_checkpoint_of_a_step_is_exported(toy_runs: Path, tmp_path: Path):
    done = dapo("export", str(toy_runs / "paper"), "--out", str(tmp_path / "out"), "--step", "1")
    assert (done.returncode, "the model after step 1" in done.stdout) == (0, True)
    of_step = toy_runs / "paper" / "checkpoints" / "step-000001" / "model" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == of_step.read_bytes()


def test_a_step_without_a_checkpoint_is_told_which_there_are(toy_runs: Path, tmp_path: Path):
    (toy_runs / "paper" / "checkpoints" / "value-000003").mkdir()  # within value pretraining: of no step
    done = dapo("export", str(toy_runs / "paper"), "--out", str(tmp_path / "out"), "--step", "7")
    (toy_runs / "paper" / "checkpoints" / "value-000003").rmdir()
    assert done.returncode == 2
    assert "--step 7: " in done.stderr
    assert "Name one that is there: 0, 1, 2." in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_was_changed_is_not_exported(toy_runs: Path, tmp_path: Path):
    run = shutil.copytree(toy_runs / "paper", tmp_path / "run")
    with (run / "checkpoints" / "step-000001" / "model" / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match=r"config\.json: differs") as caught:
        export_run(run, tmp_path / "out", step=1)
    assert caught.value.remedy == "Name another step, or leave --step out."


def test_a_run_without_an_adapter_has_none_to_export(toy_runs: Path, tmp_path: Path):
    done = dapo("export", str(toy_runs / "paper"), "--out", str(tmp_path / "out"), "--adapter")
    assert done.returncode == 2
    assert "(model.lora.rank = 0), so it has no adapter" in done.stderr
    assert "Leave --adapter out" in done.stderr


def test_a_disk_that_is_full_is_said_in_one_line_and_nothing_is_left(toy_runs: Path, tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # no file of the model is that small
    try:
        with pytest.raises(CheckpointError) as caught:
            export_run(toy_runs / "paper", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.fullmatch(
        rf"--out {tmp_path}/out: cannot be written: [\w.]+: \[Errno 27\] [\w ]+\.", caught.value.message
    )
    assert list(tmp_path.iterdir()) == []


def test_the_card_states_recipe_data_and_scores(toy_runs: Path, tmp_path: Path):
    run = toy_runs / "paper"
    export_run(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    first, *_, last = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    state = json.loads((run / "checkpoints" / "step-000002" / "state.json").read_text())
    assert "preset `dapo`" in card
    assert "2 steps, 4 updates" in card
    assert f"`toy:problems`: 40 problems, SHA-256 of their ids, questions and answers `{state['data']}`" in card
    for line in (first, last):
        low, high = line["avg@k_interval"]
        assert f"{line['avg@k']:.3f} [{low:.3f}, {high:.3f}]" in card
    assert "| `algorithm.clip.high` | 0.28 |" in card
    assert "| `sampling.dynamic` | true |" in card
    assert "Not the paper's algorithm" not in card


def test_the_card_of_dapo_fast_says_what_it_is_not(toy_runs: Path, tmp_path: Path):
    export_run(toy_runs / "fast", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "**Not the paper's algorithm**: `sampling.carry_over`, `sampling.partial_rollouts`" in card
    assert "The run was not evaluated." in card


def test_a_critic_stays_behind(toy_runs: Path, tmp_path: Path):
    assert (toy_runs / "ppo" / "checkpoints" / "step-000002" / "model" / "critic").is_dir()
    export_run(toy_runs / "ppo", tmp_path / "out")
    assert not (tmp_path / "out" / "critic").exists()


def test_a_torn_checkpoint_is_passed_over_by_name(toy_runs: Path, tmp_path: Path):
    newest = toy_runs / "paper" / "checkpoints" / "step-000002" / "state.json"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-5])
    try:
        exported = export_run(toy_runs / "paper", tmp_path / "out")
    finally:
        newest.write_bytes(whole)
    assert exported.step == 1
    assert "step-000002/state.json" in exported.skipped[0]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1 steps of the 2 planned" in card
    assert re.search(r"avg@2 \|.*\| 1 \|\n", card)  # the scores are of this model's step
    assert "not its own" not in card


def test_what_cannot_be_exported_is_refused(toy_runs: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a run"):
        export_run(toy_runs / "model", tmp_path / "out")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.toml").write_text((toy_runs / "paper" / "config.toml").read_text())
    with pytest.raises(CheckpointError, match="no intact checkpoint: none was written yet"):
        export_run(bare, tmp_path / "out")
    with pytest.raises(ConfigError, match="not empty"):
        export_run(toy_runs / "paper", bare)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{runs}/model", "--out", "{tmp}/out"), "is not a run"),
        (("{runs}/paper", "--out", "{runs}/model"), "not empty"),
        (("{runs}/paper", "--out", "{tmp}/out", "--push", "a/b/c"), "--push a/b/c: Repo id must"),
        (("{runs}/paper", "--out", "{tmp}/out", "--public"), "--public: has no effect without --push"),
    ],
)
def test_the_command_line_says_so_and_exits_2(toy_runs: Path, tmp_path: Path, arguments: tuple[str, ...], message: str):
    typed = [argument.format(runs=toy_runs, tmp=tmp_path) for argument in arguments]
    answer = dapo("export", *typed)
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(("words", "is_private"), [((), True), (("--public",), False)])
def test_a_new_repository_is_private_unless_public_is_typed(
    toy_runs: Path, tmp_path: Path, words: tuple[str, ...], is_private: bool, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[object, ...]] = []

    class Api:
        def __init__(self, **_: object) -> None: ...

        def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> SimpleNamespace:
            asked.append((repo, private, exist_ok))
            return SimpleNamespace(repo_id=repo)

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:  # noqa: ARG002
            asked.append((repo_id, Path(folder_path)))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    out = tmp_path / "out"
    answer = dapo("export", str(toy_runs / "paper"), "--out", str(out), "--push", "me/first", *words)
    assert answer.returncode == 0, answer.stderr
    assert asked == [("me/first", is_private, True), ("me/first", out)]


def test_the_command_line_exports(toy_runs: Path, tmp_path: Path):
    answer = dapo("export", str(toy_runs / "paper"), "--out", str(tmp_path / "out"))
    assert answer.returncode == 0, answer.stderr
    assert "after step 2" in answer.stdout
    assert (tmp_path / "out" / "config.json").is_file()


# ------------------------------------------------------------------ the bundle


def test_a_bundle_has_the_model_and_the_runs_record(toy_runs: Path, tmp_path: Path):
    run = toy_runs / "paper"
    exported = export_run(run, tmp_path / "release", is_bundle=True)
    record = tmp_path / "release" / "run"
    AutoModelForCausalLM.from_pretrained(tmp_path / "release")
    for name in ("config.toml", "metrics.jsonl", "eval.jsonl"):
        assert (record / name).read_bytes() == (run / name).read_bytes()
    manifest = json.loads((record / "MANIFEST.json").read_text())
    listed = {path.relative_to(record).as_posix() for path in record.rglob("*") if path.is_file()} - {"MANIFEST.json"}
    assert manifest["files"].keys() == listed
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == hashlib.sha256((record / name).read_bytes()).hexdigest()
    assert manifest["step"] == exported.step == 2
    data = json.loads((record / "data.json").read_text())
    state = json.loads((run / "checkpoints" / "step-000002" / "state.json").read_text())
    assert data["train"] == {
        "name": "toy:problems",
        "problems": 40,
        "sha256_of_ids_questions_answers": state["data"],
    }
    assert "`run/` holds its record" in (tmp_path / "release" / "README.md").read_text()


def test_the_bundles_page_is_its_own_and_names_it_as_it_is_called(toy_runs: Path, tmp_path: Path):
    export_run(toy_runs / "paper", tmp_path / "release", is_bundle=True)
    record = tmp_path / "release" / "run"
    page = (record / "report" / "data.js").read_text()
    assert (record / "report.html").is_file()
    assert f"{tmp_path}/release/run" in page
    assert ".tmp" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_the_bundles_config_is_a_recipe_that_trains_the_same(toy_runs: Path, tmp_path: Path):
    export_run(toy_runs / "paper", tmp_path / "release", is_bundle=True)
    again = load_recipe(str(tmp_path / "release" / "run" / "config.toml"))
    assert again.config == read_run_config(toy_runs / "paper", ())


def test_lines_of_steps_after_the_checkpoint_are_not_of_this_model(toy_runs: Path, tmp_path: Path):
    run = shutil.copytree(toy_runs / "paper", tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "accuracy": 1.0}) + "\n")
    export_run(run, tmp_path / "release", is_bundle=True)
    steps = [json.loads(line)["step"] for line in (tmp_path / "release/run/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_large_rollouts_are_sampled(toy_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = shutil.copytree(toy_runs / "paper", tmp_path / "run")
    (run / "rollouts").mkdir(exist_ok=True)
    source = next((toy_runs / "paper" / "rollouts").glob("*.parquet"), None)
    for step in range(7):  # all at or before the checkpoint's step 4 count; later ones do not
        target = run / "rollouts" / f"step-{step:06d}.parquet"
        if source is not None:
            shutil.copyfile(source, target)
        else:
            target.write_bytes(b"x" * 100)
    monkeypatch.setattr(bundle, "ALL_ROLLOUTS_BYTES", 1)
    bundle.copy_rollouts(run / "rollouts", tmp_path / "kept", step=4)
    assert sorted(path.stem for path in (tmp_path / "kept").glob("*.parquet")) == [
        "step-000000",
        "step-000002",
        "step-000004",
    ]


def test_a_bundle_that_cannot_be_finished_leaves_nothing(
    toy_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "write_page", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        export_run(toy_runs / "paper", tmp_path / "release", is_bundle=True)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_makes_a_bundle(toy_runs: Path, tmp_path: Path):
    done = dapo("export", str(toy_runs / "paper"), "--out", str(tmp_path / "r"), "--bundle")
    assert done.returncode == 0, done.stderr
    assert "the run's record in run/" in done.stdout
