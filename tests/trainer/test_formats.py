"""Files of a run carry the version of their format: a newer one is refused with the remedy, an older one is read."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from toy import recipe

from dapo.checkpoints.load import newest_intact
from dapo.checkpoints.manifest import MANIFEST
from dapo.config.load import load_recipe, read_toml
from dapo.config.toml_text import RUN_FORMAT, with_run_format
from dapo.errors import FormatError
from dapo.parquet_size import FORMAT_KEY
from dapo.report.load import load_run
from dapo.report.rollouts.recorded import read_table
from dapo.trainer.loop import train
from dapo.trainer.resume import read_run_config
from dapo.trainer.start import start_run

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one step, with a checkpoint and recorded rollouts."""
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    keys = ("train.steps=1", "records.every_steps=1", "eval.every_steps=0")
    made = start_run(recipe(tmp_path, *keys), tmp_path / "run", [])
    train(made)
    made.close()
    return tmp_path / "run"


def set_formats(run: Path, number: int | None) -> dict[str, Path]:
    """Put another version, or none, into each file of the run that carries one."""
    config, rollouts = run / "config.toml", run / "rollouts" / "step-000001.parquet"
    manifest = run / "checkpoints" / "step-000001" / MANIFEST
    first, rest = config.read_text().split("\n", 1)
    assert first.startswith(f"# dapo run, format {RUN_FORMAT}:")
    config.write_text(rest if number is None else f"# dapo run, format {number}: config.toml\n{rest}")
    known = json.loads(manifest.read_text())
    assert known.pop("format") == 1
    manifest.write_text(json.dumps(known if number is None else known | {"format": number}))
    table = pq.read_table(rollouts)
    assert table.schema.metadata[FORMAT_KEY] == b"1"
    pq.write_table(table.replace_schema_metadata(None if number is None else {FORMAT_KEY: str(number)}), rollouts)
    return {"config": config, "manifest": manifest, "rollouts": rollouts}


def test_files_of_a_newer_version_are_refused_and_not_skipped(run: Path):
    paths = set_formats(run, 2)
    for path, read in (
        (paths["config"], lambda: read_run_config(run, ())),
        (paths["config"], lambda: load_recipe(str(run / "config.toml"), ())),
        (paths["config"], lambda: load_run(run)),
        (paths["manifest"], lambda: newest_intact(run / "checkpoints")),
        (paths["rollouts"], lambda: read_table(paths["rollouts"])),
    ):
        with pytest.raises(FormatError) as caught:
            read()
        assert f"{path}: format 2, " in caught.value.message
        assert "pip install --upgrade dapo" in caught.value.remedy


def test_files_from_before_formats_had_numbers_are_read(run: Path):
    paths = set_formats(run, None)
    assert read_run_config(run, ()).train.steps == 1
    assert load_run(run).config["train"]["steps"] == 1
    assert newest_intact(run / "checkpoints")[0] == run / "checkpoints" / "step-000001"
    assert read_table(paths["rollouts"]) is not None


def test_only_the_first_line_of_a_config_is_its_format(tmp_path: Path):
    path = tmp_path / "config.toml"
    path.write_text(with_run_format('preset = "dapo"\n# dapo run, format 9\n'))
    assert read_toml(path) == {"preset": "dapo"}
