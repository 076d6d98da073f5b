"""Runs examples/openai_server with its own attention server."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import server_binary

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "openai_server"
PROMPT = "Elinor had not expected to see him so soon, and"
sys.path.insert(0, str(FOLDER))


class Example:
    """The example with its own attention server."""

    def __init__(self):
        self.attention = server_binary.start()
        self._process = subprocess.Popen(
            [sys.executable, FOLDER / "serve.py", "--port", "0",
             "--target", self.attention.target], stdout=subprocess.PIPE, text=True)
        found = re.search(r"http://127.0.0.1:(\d+)", self._process.stdout.readline())
        if found is None:
            self.close()
            raise AssertionError("the example did not start")
        self.port = int(found.group(1))

    @property
    def pid(self):
        return self._process.pid

    def close(self):
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(30)
        self._process.stdout.close()
        self.attention.stop()
        return status

    def restart_attention(self):
        """Kills the server with kill -9 and starts a new one on the same socket."""
        os.kill(self.attention.pid, signal.SIGKILL)
        self.attention._process.wait()
        self.attention.start()

    def request(self, path, body=None, raw=None):
        """Status and the JSON of the reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            data = raw if raw is not None else None if body is None else json.dumps(body)
            connection.request("GET" if data is None else "POST", path, data)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())

    @contextlib.contextmanager
    def stream(self, path, body):
        """An iterator over the events of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            assert reply.headers["Content-Type"].startswith("text/event-stream")
            with contextlib.closing(reply):
                yield self._events(reply)

    @staticmethod
    def _events(reply):
        while True:
            line, blank = reply.readline(), reply.readline()
            assert line.startswith(b"data: ") and blank == b"\n", (line, blank)
            if line == b"data: [DONE]\n":
                assert reply.read() == b""
                return
            yield json.loads(line[6:])
