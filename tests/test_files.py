"""A folder written aside: whole or as before, whatever happens while it is written."""

from pathlib import Path

import pytest

from dapo.checkpoints.save import remove_unfinished
from dapo.files import folder_written_aside, remove_folder


def write(path: Path, text: str, *, overwrite: bool = True, error: BaseException | None = None) -> None:
    with folder_written_aside(path, overwrite=overwrite) as aside:
        (aside / "part").mkdir()
        (aside / "part" / "file").write_text(text)
        if error is not None:
            raise error


def held(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_takes_the_place_of_the_one_before(tmp_path: Path):
    write(tmp_path / "new" / "folder", "one")
    (tmp_path / "new" / "folder" / "more").write_text("")
    write(tmp_path / "new" / "folder", "two")
    assert held(tmp_path) == {"new/folder/part/file": "two"}


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_what_fails_leaves_the_folder_before_and_nothing_else(tmp_path: Path, error: BaseException):
    write(tmp_path / "folder", "one")
    with pytest.raises(type(error)):
        write(tmp_path / "folder", "two", error=error)
    assert held(tmp_path) == {"folder/part/file": "one"}


def test_without_overwrite_a_folder_with_files_is_kept(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", "one", overwrite=False)
    with pytest.raises(OSError, match="not empty"):
        write(tmp_path / "folder", "two", overwrite=False)
    assert held(tmp_path) == {"folder/part/file": "one"}


def test_of_a_link_only_the_link_goes(tmp_path: Path):
    write(tmp_path / "mine", "mine")
    for name in ("folder", ".left.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    write(tmp_path / "folder", "one")
    remove_unfinished(tmp_path)
    remove_folder(tmp_path / "never there")
    assert held(tmp_path) == {"mine/part/file": "mine", "folder/part/file": "one"}
    assert not (tmp_path / "folder").is_symlink()
    assert not (tmp_path / ".left.tmp").is_symlink()
