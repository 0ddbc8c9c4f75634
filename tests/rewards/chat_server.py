"""A small OpenAI-compatible server on the loopback, which answers by a script, and may be killed and started again."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], tuple[int, str]]  # from a request's body to a status and the reply's text


class LoopbackServer:
    """`bodies` are the requests it has got, `n_answered` how many replies it has sent in full."""

    def __init__(self, script: Script, *, usage: tuple[int, int] | None = (100, 10)) -> None:
        self.script, self.usage = script, usage
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.n_answered = 0
        self.port = 0
        self._lock = threading.Lock()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Also again, on the port it had."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                status, text = outer.script(body)
                reply: dict[str, Any] = {"choices": [{"message": {"content": text}}]}
                if outer.usage is not None:
                    reply["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), outer.usage, strict=True))
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                with outer._lock:
                    outer.n_answered += status == 200

            def log_message(self, *_: object) -> None:
                pass

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:  # a client that gave up is part of a test
                pass

        self.http = Http(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_port
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def kill(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
