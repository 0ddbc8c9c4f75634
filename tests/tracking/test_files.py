"""Files that grow by lines: what a crash tears costs that line, and no other."""

from pathlib import Path

import pytest

from dapo.files import append_line, cut_back, read_lines


@pytest.mark.parametrize("torn", ['{"key": "b", "judg', '{"key": "b"', "{", "\n{"])
def test_a_line_after_a_torn_one_is_whole(tmp_path: Path, torn: str):
    path = tmp_path / "verdicts.jsonl"
    append_line(path, {"key": "a"})
    with path.open("a") as file:
        file.write(torn)
    for key in ("c", "d"):
        append_line(path, {"key": key})
    assert [record["key"] for record in read_lines(path)] == ["a", "c", "d"]


def test_whole_lines_follow_each_other_without_a_gap(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for text in ("a", "ü", ""):
        append_line(path, {"text": text})
    assert path.read_text(encoding="utf-8") == '{"text": "a"}\n{"text": "ü"}\n{"text": ""}\n'


@pytest.mark.parametrize(
    "garbage", ['{"step": "a"}', '{"step": [1]}', "[" * 100_000, '{"step": ' + "9" * 5_000 + "}", "\0"]
)
def test_a_line_that_is_garbage_is_cut_out_and_the_others_stay(tmp_path: Path, garbage: str):
    path = tmp_path / "events.jsonl"
    path.write_text(f'{{"step": 1}}\n{garbage}\n{{"step": null, "kind": "note"}}\n{{"step": 2}}\n{{"step": 3}}\n')
    cut_back(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": null, "kind": "note"}\n{"step": 2}\n'


@pytest.mark.parametrize("last_step", [0, 1, 4, 5, 6])
def test_border_cutting_back_keeps_every_line_up_to_the_step_and_none_after_it(tmp_path: Path, last_step: int):
    """Two lines of each of five steps, and one that has no step."""
    path = tmp_path / "events.jsonl"
    lines = [{"kind": "note"}, *({"step": step, "at": at} for step in range(1, 6) for at in (0, 1))]
    for line in lines:
        append_line(path, line)
    cut_back(path, last_step)
    assert list(read_lines(path)) == [line for line in lines if line.get("step", 0) <= last_step]
    append_line(path, {"step": last_step + 1})
    assert list(read_lines(path))[-1] == {"step": last_step + 1}
