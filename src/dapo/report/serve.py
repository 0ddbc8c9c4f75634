"""The live page on the loopback interface: read-only, a fixed set of URLs, nothing outside the run folder."""

from __future__ import annotations

import json
import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from dapo.errors import ConfigError
from dapo.report.examined import examine_run, phrases_of
from dapo.report.load import load_run
from dapo.report.page import ASSETS, asset, dumps, html, plotly_path
from dapo.report.page_data import history_of, page_data
from dapo.report.rollouts.chunks import make_chunks, read_index, read_script, script
from dapo.report.rollouts.pieces import find_tokenizer
from dapo.report.rollouts.recorded import dropped_path, read_step

HOST = "127.0.0.1"
WATCHED = ("config.toml", "metrics.jsonl", "eval.jsonl", "eval_problems.jsonl", "events.jsonl")
CHUNK = re.compile(r"rollouts/(step-\d{1,12})/(index|\d{3,9})\.js")
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class Watched:
    """A run folder as the server reads it; results are cached until the files change."""

    def __init__(self, folder: Path) -> None:
        load_run(folder)  # refuses what is not a run, before anything is served
        self.folder = folder.resolve()
        self.lock = threading.Lock()
        self.kept: dict[str, tuple[str, Any]] = {}

    def version(self) -> str:
        """Changes whenever a new page would differ: lines added or removed, a step recorded, the run gone silent."""
        sizes = [self.stamp(self.folder / name) for name in WATCHED]
        try:
            recorded = sorted(
                path.name for path in (self.folder / "rollouts").iterdir() if path.name.startswith("step-")
            )
        except OSError:
            recorded = []
        return f"{'-'.join(sizes)}-{len(recorded)}-{recorded[-1] if recorded else ''}-{load_run(self.folder).state}"

    @staticmethod
    def stamp(path: Path) -> str:
        try:
            status = path.stat()
        except OSError:
            return "0"
        return f"{status.st_size}.{status.st_mtime_ns}"

    def data(self) -> str:
        return str(self.once("data", lambda: dumps(page_data([examine_run(self.folder)], ["rollouts"], []))))

    def history(self) -> str:
        return str(self.once("history", lambda: script("history-0", json.dumps(history_of(examine_run(self.folder))))))

    def once(self, name: str, make: Any) -> Any:
        version = self.version()
        with self.lock:
            if self.kept.get(name, ("", None))[0] != version:
                self.kept[name] = (version, make())
            return self.kept[name][1]

    def chunk(self, step: str, part: str) -> str | None:
        """A script of the run, parsed and written again so that it can only be data. Without one, made from parquet."""
        root = self.folder / "rollouts"
        path = (root / step / f"{part}.js").resolve()
        if not path.is_relative_to(root.resolve()) or not root.resolve().is_relative_to(self.folder):
            return None  # a link that leads out of the run
        parquet = root / f"{step}.parquet"
        has_script = path.is_file()
        value = None if not has_script else read_index(parquet) if part == "index" else read_script(path)
        if value is not None:
            return script(f"{step}/{part}", json.dumps(value))
        own = [path.resolve() for path in (parquet, dropped_path(parquet))]
        if not all(path.is_relative_to(self.folder) for path in own) or ((root / step).exists() and not has_script):
            return None
        made = self.once(f"chunk {step}", lambda: self.make(parquet, step))
        text = made.get(part)
        return None if text is None else str(text)

    def make(self, parquet: Path, step: str) -> dict[str, str]:
        self.kept = {
            name: kept for name, kept in self.kept.items() if not name.startswith("chunk")
        }  # one step is enough
        table = read_step(parquet)
        if table is None:
            return {}
        pieces = find_tokenizer(self.folder, load_run(self.folder).config)
        return dict(make_chunks(table, step, pieces, phrases_of(self.folder, None)))


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the URLs of the page, and nothing else."""

    watched: ClassVar[Watched]
    server_version = "dapo"
    sys_version = ""
    timeout = 30  # seconds a silent client may hold a thread

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        if not self.is_for_us():
            self.reply(HTTPStatus.BAD_REQUEST, "This server answers to its loopback address only.")
            return
        try:
            name = plain_path(self.path)
        except ValueError:
            self.reply(HTTPStatus.BAD_REQUEST, "No such address.")
            return
        try:
            found = self.find(name)
        except Exception as error:  # the run is being written meanwhile; the page asks again
            self.reply(HTTPStatus.SERVICE_UNAVAILABLE, f"{type(error).__name__} while reading the run.")
            return
        if found is None:
            self.reply(HTTPStatus.NOT_FOUND, "No such address.")
        else:
            self.reply(HTTPStatus.OK, *found)

    def is_for_us(self) -> bool:
        """Refuse a host name that merely resolves to this address (DNS rebinding)."""
        assert isinstance(self.server, Server), "made by make_server"
        port = self.server.server_port
        return self.headers.get("Host", "") in {f"{HOST}:{port}", f"localhost:{port}"}

    def find(self, name: str) -> tuple[bytes | str, str] | None:
        watched = self.watched
        if name in ("", "report.html"):
            return html(is_live=True), "text/html; charset=utf-8"
        if name == "version":
            return watched.version(), "text/plain; charset=utf-8"
        if name == "data":
            return watched.data(), "application/json"
        if name == "report/history-0.js":
            return watched.history(), KINDS[".js"]
        if name == "report/plotly.min.js":
            return plotly_path().read_bytes(), KINDS[".js"]
        if name.startswith("report/") and name.removeprefix("report/") in ASSETS:
            return asset(name.removeprefix("report/")), KINDS[Path(name).suffix]
        if match := CHUNK.fullmatch(name):
            text = watched.chunk(match.group(1), match.group(2))
            return None if text is None else (text, KINDS[".js"])
        return None

    def reply(self, status: HTTPStatus, body: bytes | str, kind: str = "text/plain; charset=utf-8") -> None:
        raw = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """No log: a page polls every two seconds."""


def plain_path(target: str) -> str:
    """The path asked for, relative; ValueError where it tries to be anything but a plain one."""
    path = unquote(urlsplit(target).path, errors="strict")
    parts = path.split("/")
    is_odd = not target.startswith("/") or target.startswith("//") or not path.startswith("/")
    is_odd = is_odd or any(part in ("..", ".") for part in parts) or "//" in path
    if is_odd or "\\" in path or "%" in path or any(ord(c) < 32 for c in path):
        raise ValueError(target)
    return path[1:]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closed its tab in the middle of an answer."""


def make_server(folder: Path, port: int = 0) -> Server:
    """A server for this run on the loopback interface; port 0 picks a free one."""
    handler = type("RunHandler", (Handler,), {"watched": Watched(folder)})
    try:
        return Server((HOST, port), handler)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {error.strerror}.", remedy="Name another port, or 0 for a free one."
        ) from None
