"""An OpenAI-compatible server of the demo's trained model, whose attention an mla-server computes.

    python3 examples/openai_server/serve.py --server .bazel/bin/server/mla-server

starts an attention server and two workers, and answers on http://127.0.0.1:8000 (README.md). With
--target it uses an attention server that runs already.
"""

from __future__ import annotations

import argparse
import contextlib
import http
import json
import logging
import pathlib
import signal
import sys
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple

import waitress

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1] / "client" / "python")]

# pylint: disable=wrong-import-position
import api
import pool
from mla_client.testing import ServerProcess
from worker import Event

BODY_BYTES_MAX = 1 << 20
HEADER_BYTES_MAX = 1 << 14
CONNECTIONS_MAX = 200  # others wait until one of them ends
# Limit of a connection without a request; period of checks for such connections.
IDLE_S, LOOK_S = 15, 5
SPARE_THREADS = 8      # next to one for each task: for refusals, pages and probes
PAGES = {"/": ("index.html", "text/html; charset=utf-8"),
         "/page.js": ("page.js", "text/javascript; charset=utf-8"),
         "/page.css": ("page.css", "text/css; charset=utf-8")}
ASKS = {"/v1/completions": False, "/v1/chat/completions": True}  # True for chat
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"

Reply = Tuple[int, str, bytes]
StartResponse = Callable[[str, List[Tuple[str, str]]], Any]


class App:
    """The routes, as a WSGI application: each request on a thread of its own."""

    def __init__(self, workers: pool.Pool) -> None:
        self._pool = workers

    def __call__(self, environ: Dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method == "POST" and path in ASKS:
            return self._ask(environ, start_response)
        if method == "POST":
            reply = _json(404, api.error(f"{path}: there is nothing"))
        elif method in ("GET", "HEAD"):
            reply = self._get(path)
        else:
            reply = _json(405, api.error(f"{method}: GET and POST are served"))
        return _send(start_response, reply, method == "HEAD")

    def _get(self, path: str) -> Reply:
        if path in PAGES:
            name, kind = PAGES[path]
            return 200, kind, (FOLDER / "page" / name).read_bytes()
        if path == "/v1/models":
            model = {"id": api.MODEL, "object": "model", "created": 0, "owned_by": "mla-server"}
            return _json(200, {"object": "list", "data": [model]})
        if path == "/healthz":
            return _json(200, {"tasks_by_worker": self._pool.served()})
        return _json(404, api.error(f"{path}: there is nothing"))

    def _ask(self, environ: Dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        try:
            request = api.parse(_body(environ), self._pool.new_number(), ASKS[environ["PATH_INFO"]])
            events = self._pool.run(request.task, environ["waitress.client_disconnected"])
        except api.Refused as refused:
            return _send(start_response,
                         _json(400, api.error(str(refused), parameter=refused.parameter)))
        except pool.Busy:
            return _send(start_response, _json(
                429, api.error("all workers are busy: try again", "rate_limit_error")))
        if not request.stream:
            with contextlib.closing(events):
                return _send(start_response, _whole(request, events))
        start_response(_status(200), [("Content-Type", "text/event-stream; charset=utf-8"),
                                      ("Cache-Control", "no-store")])
        return Stream(request, events)


def _body(environ: Dict[str, Any]) -> Any:
    try:
        return json.loads(environ["wsgi.input"].read())
    except (ValueError, RecursionError):  # the second: lists in lists in lists
        raise api.Refused("the body must be JSON") from None


def _whole(request: api.Request, events: Iterable[Event]) -> Reply:
    answer = api.Answer(request)
    for event in events:
        if event.reason == "error":
            return _json(503, api.error(event.message, "server_error"))
        answer.chunk(event)
    return _json(200, answer.whole())


class Stream:
    """Server-sent events. It is closed at its end, or when the client has gone."""

    def __init__(self, request: api.Request, events: pool.Events) -> None:
        self._request, self._events = request, events

    def __iter__(self) -> Iterator[bytes]:
        answer = api.Answer(self._request)
        for event in self._events:
            if event.reason == "error":
                yield _event(api.error(event.message, "server_error"))
                return
            chunk = answer.chunk(event)
            if chunk is not None:
                yield _event(chunk)
        usage = answer.usage_chunk()
        if usage is not None:
            yield _event(usage)
        yield b"data: [DONE]\n\n"

    def close(self) -> None:
        """Ends the task."""
        self._events.close()


def _event(body: Dict) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _json(status: int, body: Dict) -> Reply:
    return status, "application/json", json.dumps(body).encode()


def _status(status: int) -> str:
    return f"{status} {http.HTTPStatus(status).phrase}"


def _send(start_response: StartResponse, reply: Reply, head: bool = False) -> List[bytes]:
    status, kind, body = reply
    start_response(_status(status), [("Content-Type", kind), ("Content-Length", str(len(body))),
                                     ("Content-Security-Policy", POLICY),
                                     ("X-Content-Type-Options", "nosniff")])
    return [] if head else [body]


def make_server(app: App, host: str, port: int, tasks: int) -> Any:
    """A waitress server that listens. `tasks`: the most that may run at the same time. It reads
    whole requests before the application sees them. It refuses requests that are too large or not
    HTTP."""
    logging.getLogger("waitress").setLevel(logging.ERROR)
    return waitress.create_server(
        app, host=host, port=port, threads=tasks + SPARE_THREADS, ident=None,
        connection_limit=CONNECTIONS_MAX, channel_timeout=IDLE_S, cleanup_interval=LOOK_S,
        max_request_header_size=HEADER_BYTES_MAX, max_request_body_size=BODY_BYTES_MAX + 1,
        # Without it the end of a connection is not seen while its request is served.
        channel_request_lookahead=1, asyncore_use_poll=True, log_socket_errors=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", help="path of an mla-server binary, which is started")
    where.add_argument("--target", help="of an attention server: host:port or unix:/path")
    parser.add_argument("--host", default="127.0.0.1", help="an address; default: %(default)s")
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
        server = make_server(App(workers), args.host, args.port, workers.tasks_max)
        stack.callback(server.close)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # which ends run() below
        print(f"serve: http://{args.host}:{server.effective_port}", flush=True)
        server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
