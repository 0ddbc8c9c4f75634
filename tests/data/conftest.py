"""Files written for a test, and the real ones where they are."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Rows = list[dict[str, object]]


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Rows, name: str = "set.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def shared_data() -> Path:
    """The folder with the published files: $DAPO_DATA, or shared/data beside the repository."""
    root = Path(os.environ.get("DAPO_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (root / "dapo_math_17k" / "dapo_math_17k.parquet").is_file():
        pytest.skip(f"{root} does not hold the published data files; set DAPO_DATA to a folder that does")
    return root
