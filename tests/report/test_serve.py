"""`dapo watch`: loopback only, read-only, path-safe, and up to date while a run goes on."""

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runs import byte_level, evaluation, metrics, row, save_tokenizer, write_rollouts, write_run

from dapo.files import append_line, cut_back
from dapo.report.rollouts.chunks import parse_script, write_chunks
from dapo.report.rollouts.recorded import chunk_folder, read_table
from dapo.report.serve import Server, make_server

SECRET = "a secret outside the run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "secret.js").write_text(SECRET)
    folder = write_run(tmp_path / "run", metrics(5), evaluations=[evaluation(0, 0.3)], wanted=20, every=5)
    pieces = save_tokenizer(folder, byte_level())
    for step in (5, 6):
        path = write_rollouts(folder, step, [row(pieces, f"the answer {i}", index=i) for i in range(3)])
        if step == 5:
            write_chunks(read_table(path), chunk_folder(path), pieces)
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    server = make_server(run)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=1800)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_it_listens_on_the_loopback_interface_only(server: Server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_the_page_and_everything_it_names_are_there(server: Server):
    status, text, headers = ask(server, "/")
    assert status == 200
    assert "data-live" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    for name in (
        "base.js",
        "overview.js",
        "curves.js",
        "rollouts.js",
        "main.js",
        "style.css",
        "plotly.min.js",
        "history-0.js",
    ):
        assert ask(server, f"/report/{name}")[0] == 200, name
    data = json.loads(ask(server, "/data")[1])
    assert data["runs"][0]["step"] == 5
    assert parse_script(ask(server, "/rollouts/step-000005/index.js")[1])["step"] == 5
    assert parse_script(ask(server, "/rollouts/step-000005/000.js")[1])[0]["id"] == "p1"


def test_a_step_with_parquet_alone_is_served_from_memory_and_nothing_is_written(server: Server, run: Path):
    before = sorted(str(p) for p in run.rglob("*"))
    assert parse_script(ask(server, "/rollouts/step-000006/index.js")[1])["step"] == 6
    assert parse_script(ask(server, "/rollouts/step-000006/000.js")[1])[0]["id"] == "p1"
    ask(server, "/data")
    assert sorted(str(p) for p in run.rglob("*")) == before


TRICKS = [
    "/../secret.js",
    "/rollouts/../../secret.js",
    "/rollouts/%2e%2e/%2e%2e/secret.js",
    "/rollouts/..%2f..%2fsecret.js",
    "/rollouts/%252e%252e/secret.js",
    "//etc/passwd",
    "/etc/passwd",
    "/%2fetc%2fpasswd",
    "/rollouts/step-000005/../../config.toml",
    "/rollouts/step-000005/..\\..\\config.toml",
    "/rollouts/step-000005/%5c..%5cindex.js",
    "/config.toml",
    "/metrics.jsonl",
    "/checkpoints/step-000010/model/tokenizer.json",
    "/rollouts/step-000005.parquet",
    "/report/",
    "/report/../config.toml",
    "/report/page.html",
    "/rollouts/step-000005/index.js%00",
    "/rollouts/step-000005/000.js/..",
    "/rollouts/./step-000005/index.js",
    "/rollouts/step-000099/index.js",
    "/rollouts/step-000005/009.js",
    "/rollouts/step-00000٥/index.js".encode().decode("latin-1"),
    "http://example.org/",
    "/rollouts/step-link/index.js",
    "/rollouts/step-000007/index.js",
    "/rollouts/step-000008/index.js",
    "*",
]


@pytest.mark.parametrize("path", TRICKS)
def test_path_tricks_get_400_or_404_and_nothing_of_the_disk(server: Server, run: Path, path: str):
    link = run / "rollouts" / "step-000007"
    link.mkdir()
    (link / "index.js").symlink_to(run.parent / "secret.js")  # a link to a file outside
    (run / "rollouts" / "step-000008").symlink_to(run.parent)  # a link to a folder outside
    (run.parent / "index.js").write_text(SECRET)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=1800) as raw:
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nConnection: close\r\n\r\n"
        raw.sendall(request.encode("latin-1"))
        answer = b"".join(iter(lambda: raw.recv(65536), b"")).decode(errors="replace")
    assert answer.split()[1] in ("400", "404"), answer[:200]
    assert SECRET not in answer
    assert "[model]" not in answer


def test_another_hosts_name_is_refused(server: Server):
    for host in (
        "evil.example",
        f"evil.example:{server.server_port}",
        "127.0.0.1:1",
        "",
        f"127.0.0.1.nip.io:{server.server_port}",
    ):
        assert ask(server, "/data", host=host or " ")[0] == 400
    assert ask(server, "/data", host=f"localhost:{server.server_port}")[0] == 200


def test_nothing_but_reading_is_answered(server: Server):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(server, "/data", method=method)[0] in (405, 501)
    status, text, headers = ask(server, "/", method="HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 0


def test_new_steps_a_resume_and_the_end_are_seen(server: Server, run: Path):
    version = ask(server, "/version")[1]
    assert ask(server, "/version")[1] == version
    append_line(run / "metrics.jsonl", metrics(6)[-1])
    assert ask(server, "/version")[1] != version
    assert json.loads(ask(server, "/data")[1])["runs"][0]["step"] == 6
    cut_back(run / "metrics.jsonl", 3)  # what a resume does
    assert json.loads(ask(server, "/data")[1])["runs"][0]["step"] == 3
    for line in metrics(20)[3:]:
        append_line(run / "metrics.jsonl", line)
    assert json.loads(ask(server, "/data")[1])["runs"][0]["state"] == "finished"


def test_a_folder_that_goes_away_does_not_end_the_server(server: Server, run: Path):
    os.rename(run / "config.toml", run / "gone")
    assert ask(server, "/data")[0] == 503
    os.rename(run / "gone", run / "config.toml")
    assert ask(server, "/data")[0] == 200


def test_a_silent_client_does_not_hold_up_others(server: Server):
    with socket.create_connection(("127.0.0.1", server.server_port)) as idle:
        idle.sendall(b"GET / HTTP/1.1\r\n")
        assert ask(server, "/version")[0] == 200
