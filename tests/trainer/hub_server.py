"""A stand-in for the Hugging Face hub on the loopback interface: one user, repositories in memory, Git LFS and all."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}  # by repository and path
        self.private: dict[str, bool] = {}
        self.uploaded: dict[str, bytes] = {}  # large files by SHA-256, before a commit takes them
        self.commits: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply(401, {"error": "Invalid user token."})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            is_new = repo not in self.server.files
            self.server.files.setdefault(repo, {})
            if is_new:
                self.server.private[repo] = asked.get("visibility", "") == "private" or bool(asked.get("private"))
            self.reply(200 if is_new else 409, {"url": f"{self.server.address}/{repo}", "id": repo})
        elif match := re.fullmatch(r"/api/models/(\w+/[\w.-]+)/preupload/main", self.path):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(body)["files"]
            ]
            self.reply(200, {"files": modes})
        elif self.path == "/api/validate-yaml":
            self.reply(200, {"errors": [], "warnings": []})
        elif re.fullmatch(r"/[\w/.-]+\.git/info/lfs/objects/batch", self.path):
            objects = [
                one | {"actions": {"upload": {"href": f"{self.server.address}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.reply(200, {"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/models/(\w+/[\w.-]+)/commit/main", self.path):
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[match[1]][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[match[1]][value["path"]] = self.server.uploaded[value["oid"]]
                elif line["key"] == "header":
                    self.server.commits.append(value["summary"])
            url = f"{self.server.address}/{match[1]}/commit/{COMMIT}"
            self.reply(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self.reply(404, {"error": f"no {self.path}"})

    def do_PUT(self) -> None:
        body, wanted = self.body(), self.path.removeprefix("/lfs/")
        assert hashlib.sha256(body).hexdigest() == wanted, "the file is what its digest says"
        self.server.uploaded[wanted] = body
        self.reply(200, {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/(\w+/[\w.-]+)(/revision/\w+)?", path):
            names = self.server.files.get(match[1])
            siblings = [{"rfilename": name} for name in names or ()]
            found = {"id": match[1], "sha": COMMIT, "private": True, "siblings": siblings, "tags": [], "downloads": 0}
            self.reply(200 if names is not None else 404, found)
        elif match := re.fullmatch(r"/(\w+/[\w.-]+)/resolve/\w+/(.+)", path):
            content = self.server.files.get(match[1], {}).get(match[2])
            self.reply(200 if content is not None else 404, content or b"")
        else:
            self.reply(200 if path == "/" else 404, {})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status: int, content: dict[str, Any] | bytes) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(raw).hexdigest()}"')
        if status == 404:
            self.send_header(
                "X-Error-Code",
                "RepoNotFound"
                if self.path.startswith("/api/models/") and "/tree/" not in self.path
                else "EntryNotFound",
            )
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """No log."""


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
