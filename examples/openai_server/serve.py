"""An OpenAI-compatible server of the demo's trained model, whose attention an mla-server computes.

    python3 examples/openai_server/serve.py --server .bazel/bin/server/mla-server

starts an attention server and two workers, and answers on http://127.0.0.1:8000 (README.md). With
--target it uses an attention server that runs already.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import pathlib
import signal
import sys
import threading
from typing import Any, Dict, Iterator

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1] / "client" / "python")]

# pylint: disable=wrong-import-position
import api
import pool
from mla_client.testing import ServerProcess
from worker import Event

BODY_BYTES_MAX = 1 << 20
READ_TIMEOUT_S = 30.0
PAGES = {"/": ("index.html", "text/html; charset=utf-8"),
         "/page.js": ("page.js", "text/javascript; charset=utf-8"),
         "/page.css": ("page.css", "text/css; charset=utf-8")}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = READ_TIMEOUT_S
    server: "Server"

    def do_GET(self) -> None:  # noqa: N802 (the name is the base class's)
        path = self.path.partition("?")[0]
        if path in PAGES:
            name, kind = PAGES[path]
            self._send(200, (FOLDER / "page" / name).read_bytes(), kind)
        elif path == "/v1/models":
            model = {"id": api.MODEL, "object": "model", "created": 0, "owned_by": "mla-server"}
            self._json(200, {"object": "list", "data": [model]})
        elif path == "/healthz":
            self._json(200, {"tasks_by_worker": self.server.pool.served()})
        else:
            self._json(404, api.error(f"{path}: there is nothing"))

    def do_POST(self) -> None:  # noqa: N802
        chat = self.path == "/v1/chat/completions"
        if not chat and self.path != "/v1/completions":
            self._json(404, api.error(f"{self.path}: there is nothing"))
            return
        try:
            request = api.parse(self._body(), self.server.pool.new_number(), chat)
            events = self.server.pool.run(request.task)
        except api.Refused as refused:
            self._json(400, api.error(str(refused), parameter=refused.parameter))
            return
        except pool.Busy:
            self._json(429, api.error("all workers are busy: try again", "rate_limit_error"))
            return
        with contextlib.closing(events):
            if request.stream:
                self._stream(request, events)
            else:
                self._whole(request, events)

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True  # what was not read is no request
            raise api.Refused(f"the body must have a length of at most {BODY_BYTES_MAX} bytes")
        try:
            return json.loads(self.rfile.read(int(length)))
        except ValueError:
            raise api.Refused("the body must be JSON") from None

    def _whole(self, request: api.Request, events: Iterator[Event]) -> None:
        answer = api.Answer(request)
        for event in events:
            if event.reason == "error":
                self._json(503, api.error(event.message, "server_error"))
                return
            answer.chunk(event)
        self._json(200, answer.whole())

    def _stream(self, request: api.Request, events: Iterator[Event]) -> None:
        """Server-sent events. A client that has gone ends the task."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        answer = api.Answer(request)
        try:
            for event in events:
                if event.reason == "error":
                    self._event(api.error(event.message, "server_error"))
                    return
                self._event(answer.chunk(event))
            self._event(answer.usage_chunk())
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass

    def _event(self, body: Any) -> None:
        if body is not None:
            self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
            self.wfile.flush()

    def _json(self, status: int, body: Dict) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # pylint: disable=redefined-builtin
        """One line a request would drown what matters."""


class Server(http.server.ThreadingHTTPServer):
    """Answers on a port, with a thread a connection."""

    daemon_threads = True

    def __init__(self, address: Any, workers: pool.Pool) -> None:
        super().__init__(address, Handler)
        self.pool = workers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", help="path of an mla-server binary, which is started")
    where.add_argument("--target", help="of an attention server: host:port or unix:/path")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000,
                        help="0: a free one; default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="processes; default: %(default)s")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        target = args.target
        if args.server:
            target = stack.enter_context(
                ServerProcess(args.server, ["--kv-cache-bytes=256MiB"])).target
        try:
            workers = pool.Pool(target, args.workers)
        except RuntimeError as error:
            print(f"serve: {error}", file=sys.stderr)
            return 1
        stack.callback(workers.close)
        server = stack.enter_context(Server((args.host, args.port), workers))
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        print(f"serve: http://{args.host}:{server.server_address[1]}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
