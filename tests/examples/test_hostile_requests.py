"""Sends examples/openai_server requests and connections that no client of OpenAI's makes."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import time
import unittest

import example
from example import PROMPT

# pylint: disable=wrong-import-position,wrong-import-order
import mla_client
import serve
import trained


class HostileTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.example = example.Example()
        cls.addClassCleanup(cls.example.close)

    def exchange(self, *parts):
        """The statuses and bodies of all replies on a connection that sends these bytes."""
        with socket.create_connection(("127.0.0.1", self.example.port), timeout=60) as connection:
            for part in parts:
                connection.sendall(part)
            replies = []
            with connection.makefile("rb") as stream:
                while True:
                    first = stream.readline()
                    if not first:
                        return replies
                    headers = http.client.parse_headers(stream)
                    body = stream.read(int(headers["Content-Length"]))
                    replies.append((int(first.split()[1]), body))

    def check_serving(self):
        status, body = self.example.request("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
        self.assertEqual(status, 200, body)

    def processes(self):
        """Processes of the workers: the example's children that have loaded the model."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                command = folder.joinpath("cmdline").read_bytes()
                if parent == self.example.pid and b"spawn_main" in command:
                    found.append(int(folder.name))
        return found

    def test_numbers_at_the_edge_of_their_types(self):
        workers = self.processes()
        self.assertEqual(len(workers), 2)
        for temperature in (1e-46, 1e-46, 5e-324, 1e-320, 2):
            status, body = self.example.request(
                "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": temperature,
                                    "top_p": 5e-324, "seed": -10**30})
            self.assertEqual(status, 200, body)
        self.assertEqual(self.processes(), workers)

    def test_texts_and_bodies_that_are_none(self):
        half = '"\\ud83d"'
        for path, raw in (
                ("completions", '{"prompt": %s}' % half),
                ("completions", '{"prompt": "a", "stop": %s}' % half),
                ("completions", '{"prompt": "a", "model": %s}' % half),
                ("chat/completions", '{"messages": [{"content": %s}]}' % half),
                ("chat/completions", '{"messages": [{"content": [{"type": "text", "text": 1}]}]}'),
                ("completions", "[" * 50_000 + "]" * 50_000),
                ("completions", '{"prompt": ' + "[" * 50_000),
                ("completions", '{"prompt": "a", "model": ' + "[" * 900 + "]" * 900 + "}"),
                ("completions", '{"prompt": "a", "seed": ' + "9" * 5000 + "}"),
                ("completions", '{"prompt": "a", "temperature": NaN}'),
                ("completions", b"\xff\xfe\xfd")):
            status, reply = self.example.request(f"/v1/{path}", raw=raw)
            self.assertEqual(status, 400, reply)
            self.assertEqual(reply["error"]["type"], "invalid_request_error")
        self.check_serving()

    def test_lengths_that_are_none(self):
        for header in (b"Content-Length: \xb2", b"Content-Length: +2", b"Content-Length: 2, 3",
                       b"Content-Length: 2\r\nContent-Length: 3", b"Content-Length: 0x2",
                       b"Transfer-Encoding: gzip"):
            replies = self.exchange(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + header
                                    + b"\r\n\r\n{}GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertEqual(len(replies), 1, replies)
            self.assertIn(replies[0][0], (400, 501), header)
        self.check_serving()

    def test_a_body_is_no_request(self):
        hidden = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        length = b"Host: x\r\nContent-Length: %d\r\n\r\n" % len(hidden)
        last = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        for first, status in ((b"POST /v2 HTTP/1.1\r\n", 404), (b"GET /v2 HTTP/1.1\r\n", 404),
                              (b"GET / HTTP/1.1\r\n", 200), (b"PUT / HTTP/1.1\r\n", 405),
                              (b"POST /v1/completions HTTP/1.1\r\n", 400)):
            replies = self.exchange(first + length + hidden + last)
            self.assertEqual([reply[0] for reply in replies], [status, 200], first)
            self.assertIn(b"trained", replies[1][1])
            self.assertNotIn(b"tasks_by_worker", replies[0][1] + replies[1][1])

    def test_clients_that_have_gone_hold_no_worker(self):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 900}).encode()
        request = (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                   % len(body)) + body
        with mla_client.Client.connect(self.example.attention.target) as client:
            before = client.stats().rows_decode
            for _ in range(32):
                with socket.create_connection(("127.0.0.1", self.example.port)) as connection:
                    connection.sendall(request)
            served = [429]
            while served[-1] == 429:
                served.append(self.example.request(
                    "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0])
            self.assertEqual(served[-1], 200)
            while client.stats().sequences:
                time.sleep(0.02)
            rows = client.stats().rows_decode - before
        self.assertLess(rows, 32 * 900 * trained.CONFIG.layers // 10)

    def test_connections_are_bounded(self):
        descriptors = pathlib.Path(f"/proc/{self.example.pid}/fd")
        before = len(list(descriptors.iterdir()))
        with contextlib.ExitStack() as stack:
            for _ in range(2 * serve.CONNECTIONS_MAX):
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", self.example.port), timeout=60))
            # The first connections are served, and the others wait.
            for _ in range(20):
                time.sleep(0.1)
                self.assertLess(len(list(descriptors.iterdir())) - before,
                                serve.CONNECTIONS_MAX + 10)
        self.check_serving()

    def test_a_worker_that_ends_is_replaced(self):
        workers = self.processes()
        for process in workers:
            os.kill(process, signal.SIGKILL)
        fields = {"prompt": PROMPT, "max_tokens": 2}
        status = 0
        while status != 200:
            status, body = self.example.request("/v1/completions", fields)
            self.assertIn(status, (200, 429, 503), body)
            time.sleep(0.05)
        self.assertFalse(set(self.processes()) & set(workers))


if __name__ == "__main__":
    unittest.main()
