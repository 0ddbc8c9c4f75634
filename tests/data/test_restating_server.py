"""Restating with a model: a real server on the loopback, which answers well, badly, late, or not at all."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dapo import chat_client as chat_server
from dapo.chat_client import ChatServer, NoReply, Refused
from dapo.cli.main import main
from dapo.data.prepare.journal import Journal
from dapo.data.prepare.restate import NotVerified, verified
from dapo.errors import DataError
from dapo.files import append_line
from dapo.types import Problem

# An answer with two roots has no deterministic form, so these problems are asked.
QUESTION = "A rectangle has sides 2 and 3. Find the number number {i}."
ANSWER = "\\sqrt{2}+3\\sqrt{5}"
PROBLEM = Problem("id", QUESTION.format(i=7), ANSWER)


def reply(i: object = 7, **changed: str) -> str:
    parts = {
        "form": "sqrt(k)+m*sqrt(n)",
        "values": "k=2, m=3, n=5",
        "question": f"{QUESTION.format(i=i)} It is $\\sqrt k+m\\sqrt n$, $k$ and $n$ squarefree. Find $k+m+n$.",
        "sum": "k+m+n",
        "integer": "10",
        **changed,
    }
    return "1. The form is …\n" + "\n".join(f"<{name}>{text}</{name}>" for name, text in parts.items())


class Server:
    """Answers by a script: from the user's last message to (status, body), or anything the test does to the socket."""

    def __init__(self, script: Callable[[str, BaseHTTPRequestHandler], None]) -> None:
        self.asked: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = body["messages"][-1]["content"]
                outer.asked[text] += 1
                outer.headers.append(dict(self.headers))
                script(text, self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # a client that gave up is part of the test
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def say(handler: BaseHTTPRequestHandler, text: str) -> None:
    send(handler, 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode())


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(script: Callable[[str, BaseHTTPRequestHandler], None]) -> Server:
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_right_restatement_is_kept():
    restated = verified(PROBLEM, reply())
    assert restated.problem.answer == str(2 + 3 + 5)
    assert restated.problem.meta["original_answer"] == ANSWER
    assert "Find $k+m+n$" in restated.problem.question


def test_tuples_are_checked_part_by_part():
    problem = Problem("id", PROBLEM.question, "\\left(-3, \\frac{1}{2}\\right)")
    question = f"{problem.question} It is $(-k, m/n)$ in lowest terms. Find $k+m+n$."
    good = {"form": "(-k, m/n)", "values": "k=3, m=1, n=2", "question": question, "integer": "6"}
    assert verified(problem, reply(**good)).problem.answer == "6"
    for bad in ({"values": "k=3, m=2, n=4", "integer": "9"}, {"form": "(k, m/n)"}, {"form": "-k"}):
        with pytest.raises(NotVerified):
            verified(problem, reply(**{**good, **bad}))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"values": "k=2, m=3, n=6"}, "not the original answer"),
        ({"form": "sqrt(k)-m*sqrt(n)"}, "not the original answer"),
        ({"form": "sqrt(k)+sqrt(n)", "values": "k=2, n=45", "sum": "k+n", "integer": "47"}, "determined"),
        ({"integer": "11"}, "is not 11"),
        ({"integer": "ten"}, "not one integer"),
        ({"sum": "k+m"}, "must have each of"),
        ({"sum": "k*m*n"}, "is not 10"),
        ({"values": "k=2, m=-3, n=5"}, "not positive"),
        ({"values": "k=2.5, m=3, n=5"}, "not letters with integers"),
        ({"values": "none"}, "not letters with integers"),
        ({"form": "sqrt(k)+m*sqrt(n)+0*p"}, "letters"),
        ({"form": "9^9^9^9"}, "letters"),
        ({"question": "Find $k+m+n$."}, "lost the numbers"),
        ({"question": QUESTION.format(i=7)}, "does not mention"),
        ({"question": QUESTION.format(i=7) + " With $k=2$, find $k+m+n$."}, "gives k = 2 away"),
        ({"question": ""}, "empty"),
    ],
)
def test_what_cannot_be_recomputed_is_not_kept(changed, why):
    with pytest.raises(NotVerified, match=why):
        verified(PROBLEM, reply(**changed))


@pytest.mark.parametrize(
    "text", ["", "I cannot help.", "<form>k</form>", "\x00" * 100, "<form>" * 10_000, "<values>k=1</values>" * 999]
)
def test_garbage_is_not_kept(text):
    with pytest.raises(NotVerified, match="lacks"):
        verified(PROBLEM, text)


def test_letters_of_the_problem_are_refused():
    clashing = Problem("id", PROBLEM.question + " Let $k > 0$.", ANSWER)
    with pytest.raises(NotVerified, match="already uses: k"):
        verified(clashing, reply())


def client(server: Server, **options: object) -> ChatServer:
    return ChatServer(server.url, "tiny", **{"timeout_s": 5.0, "tries": 2, "wait_s": 0.01, **options})


def test_a_server_in_trouble_is_asked_again(serve):
    first = threading.Event()

    def script(_: str, handler: BaseHTTPRequestHandler) -> None:
        if first.is_set():
            say(handler, "fine")
        else:
            first.set()
            send(handler, 500, b"oops")

    assert client(serve(script)).ask([{"role": "user", "content": "hello"}]) == "fine"


SCRIPTS = {
    "500 for ever": (lambda _, h: send(h, 500, b""), NoReply),
    "429 for ever": (lambda _, h: send(h, 429, b""), NoReply),
    "hangs up": (lambda _, h: h.connection.close(), NoReply),
    "cuts the body": (lambda _, h: cut(h), NoReply),
    "never answers": (lambda _, h: h.rfile.read(), NoReply),  # returns when the client is gone
    "drips": (lambda _, h: drip(h), NoReply),
    "400": (lambda _, h: send(h, 400, b"too long"), Refused),
    "not JSON": (lambda _, h: send(h, 200, b"<html>"), Refused),
    "other JSON": (lambda _, h: send(h, 200, b'{"choices": []}'), Refused),
    "no text": (lambda _, h: send(h, 200, b'{"choices": [{"message": {"content": null}}]}'), Refused),
    "endless reply": (lambda _, h: send(h, 200, b"x" * 10_000_000), Refused),
}  # fmt: skip


def cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{")


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    with contextlib.suppress(OSError):  # until the client is gone: one that waits for the end waits for ever
        while True:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_bad_server_is_given_up(name, serve):
    script, error = SCRIPTS[name]
    patience = 0.5 if name in ("never answers", "drips") else 60.0  # the others answer, if late on a busy machine
    with pytest.raises(error):
        client(serve(script), timeout_s=patience, tries=1).ask([{"role": "user", "content": "hello"}])


def test_nobody_listens():
    with pytest.raises(NoReply, match="refused"):
        ChatServer("http://127.0.0.1:9", "tiny", tries=1).ask([])


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(["data", "prepare", *argv])
    return exit.value.code or 0


@pytest.fixture
def asked_set(write_jsonl) -> str:
    rows = [{"question": QUESTION.format(i=i), "answer": ANSWER} for i in range(10, 16)]
    rows += [{"question": "What is 2 + 3?", "answer": "5"}, {"question": "Solve $x^2=a$.", "answer": "x+1"}]
    return str(write_jsonl(rows))


def number_in(text: str) -> str:
    return text.split("number number ")[1].split(".")[0]


def test_prepare_keeps_what_verifies(asked_set, serve, tmp_path, capsys, monkeypatch):
    """Of six problems asked, two come back wrong; the integer stays as it was; what has no value is not asked."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def script(text: str, handler: BaseHTTPRequestHandler) -> None:
        i = number_in(text)
        say(handler, {"10": "no idea", "11": reply(i, integer="11")}.get(i, reply(i)))

    server, out = serve(script), tmp_path / "out.jsonl"
    assert run(asked_set, "--out", str(out), "--integer-answers", "--llm", server.url, "--model", "tiny") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["10"] * 4 + ["5"]
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["dropped"] == {"restatement not verified": 3}
    assert len(manifest["restated"]) == 4
    assert len(server.asked) == 6
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)
    assert not any("secret" in path.read_text() for path in tmp_path.iterdir())
    capsys.readouterr()


def test_prepare_goes_on_where_it_stopped(asked_set, serve, tmp_path, capsys):
    """The server dies half-way: exit 2, no output; the second run asks for what is missing, as if unbroken."""
    down = threading.Event()

    def script(text: str, handler: BaseHTTPRequestHandler) -> None:
        i = number_in(text)
        if not down.is_set() and int(i) >= 13:
            send(handler, 503, b"")
        else:
            say(handler, reply(i))

    server, out = serve(script), tmp_path / "out.jsonl"
    options = ["--integer-answers", "--llm", server.url, "--model", "tiny", "--llm-tries", "1"]
    assert run(asked_set, "--out", str(out), *options) == 2
    message = capsys.readouterr().err
    assert "no reply for 3 of 6: HTTP 503" in message
    assert "the 3 answers in out.jsonl.journal.jsonl are not asked twice" in message
    assert not out.exists()

    journal = tmp_path / "out.jsonl.journal.jsonl"
    journal.write_text(journal.read_text() + '{"id": "torn')  # killed in the middle of a line
    down.set()
    assert run(asked_set, "--out", str(out), *options) == 0
    assert [n for text, n in sorted(server.asked.items())] == [1, 1, 1, 2, 2, 2]

    again = tmp_path / "unbroken.jsonl"
    assert run(asked_set, "--out", str(again), *options) == 0
    assert again.read_bytes() == out.read_bytes()
    assert run(asked_set, "--out", str(out), *options) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_journal_of_another_model_is_not_used(asked_set, serve, tmp_path, capsys):
    server, out = serve(lambda _, h: send(h, 503, b"")), tmp_path / "out.jsonl"
    options = ["--integer-answers", "--llm", server.url, "--llm-tries", "1", "--model"]
    assert run(asked_set, "--out", str(out), *options, "one") == 2
    assert run(asked_set, "--out", str(out), *options, "two") == 2
    assert "belongs to another source, model or prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--llm", "http://127.0.0.1:1", "--model", "m"], "no effect without --integer-answers"),
        (["--integer-answers", "--llm", "http://127.0.0.1:1"], "no model is named"),
        (["--integer-answers", "--llm", "file:///etc/passwd", "--model", "m"], "not an http address"),
        (["--integer-answers", "--llm", "http://[::1", "--model", "m"], "not an http address"),
        (["--integer-answers", "--llm", "http://127.0.0.1:99999", "--model", "m"], "not an http address"),
    ],
)
def test_wrong_options_are_refused_at_once(options, named, asked_set, tmp_path, capsys):
    assert run(asked_set, "--out", str(tmp_path / "out.jsonl"), *options) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_refused_key_stops_everything(asked_set, serve, tmp_path, capsys):
    server = serve(lambda _, h: send(h, 401, b""))
    options = ["--integer-answers", "--llm", server.url, "--model", "tiny", "--llm-workers", "1"]
    assert run(asked_set, "--out", str(tmp_path / "out.jsonl"), *options) == 2
    assert "HTTP 401: the key is refused" in capsys.readouterr().err


# ------------------------------------------------------------------ borders


@pytest.mark.parametrize("n_lines", [0, 1, 2, 5])
def test_border_a_journal_torn_at_any_byte_keeps_every_whole_line(n_lines: int, tmp_path):
    header, path = {"model": "tiny"}, tmp_path / "journal.jsonl"
    lines = [{"id": str(i), "why": "no\u2028line ends here"} for i in range(n_lines)]
    for line in [header, *lines]:
        append_line(path, line)
    whole = path.read_bytes()
    for n_bytes in range(max(0, whole[:-1].rfind(b"\n")), len(whole) + 1):
        path.write_bytes(whole[:n_bytes])
        kept = whole[:n_bytes].count(b"\n") - 1
        journal = Journal(path, header)
        assert list(journal.done.values())[: max(kept, 0)] == lines[: max(kept, 0)]
        assert len(journal.done) <= max(kept, 0) + 1  # a last line that lacks its end alone may count
        journal.add({"id": "new"})
        assert Journal(path, header).done == journal.done


def test_border_a_line_torn_in_the_middle_costs_that_line(tmp_path):
    """A full disk tears one, and the next worker's line follows it."""
    header, path = {"model": "tiny"}, tmp_path / "journal.jsonl"
    Journal(path, header).add({"id": "a"})
    with path.open("a") as file:
        file.write('{"id": "b", "wh')
    append_line(path, {"id": "c"})
    assert list(Journal(path, header).done) == ["a", "c"]


def test_what_is_no_journal_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "journal.jsonl"
    for text in ("my notes\n", '{"model": "other"}\n', "[1]\n"):
        path.write_text(text)
        with pytest.raises(DataError, match="belongs to another"):
            Journal(path, {"model": "tiny"})
        assert path.read_text() == text


@pytest.mark.parametrize("n_bytes", [65535, 65536, 65537, 131073])
def test_border_a_reply_read_in_several_parts_is_whole(n_bytes: int, serve, monkeypatch):
    """It is read 65,536 bytes at a time; the largest allowed here is 131,072."""
    monkeypatch.setattr(chat_server, "MAX_REPLY_BYTES", 131072)
    empty = len(json.dumps({"choices": [{"message": {"content": ""}}]}))
    text = "".join(chr(97 + i % 26) for i in range(n_bytes - empty))
    server = client(serve(lambda _, handler: say(handler, text)), timeout_s=60.0, tries=1)
    if n_bytes <= 131072:
        assert server.ask([{"role": "user", "content": "hello"}]) == text
    else:
        with pytest.raises(Refused, match="over"):
            server.ask([{"role": "user", "content": "hello"}])
