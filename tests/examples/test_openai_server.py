"""Tests examples/openai_server over HTTP and in a browser. EXAMPLES_SCREENSHOTS=FOLDER keeps the
pictures.
"""

import contextlib
import http.client
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse

import browser
import checks
import example
import mla_client
import numpy as np
import server_binary
import serve
import text
import trained
import worker
from example import PROMPT
from pool import Busy
from tests.png import read_png

RUN_SECONDS = 16
INPUTS = (".bazel/bin/server/mla-server", "client/demo", "client/python", "examples",
          "tests/examples", "tests/png.py")


class OpenAiServerTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.example = example.Example()
        cls.addClassCleanup(cls.example.close)
        cls.folder = pathlib.Path(os.environ.get("EXAMPLES_SCREENSHOTS") or tempfile.mkdtemp())
        cls.folder.mkdir(parents=True, exist_ok=True)
        if "EXAMPLES_SCREENSHOTS" not in os.environ:
            cls.addClassCleanup(shutil.rmtree, cls.folder)

    def completion(self, **fields):
        status, body = self.example.request("/v1/completions", {"prompt": PROMPT, **fields})
        self.assertEqual(status, 200, body)
        return body

    def check_greedy(self, said):
        """Each byte is the local model's best choice after the bytes before it, or a near tie."""
        model = trained.load()
        whole = np.frombuffer(PROMPT.encode() + said, np.uint8).astype(np.int64)
        logits = checks.LocalModel(model).logits(whole[:-1], len(PROMPT) - 1)
        best = np.sort(logits, axis=-1)
        tie = best[:, -1] - best[:, -2] < 2 * checks.NOISE_FACTOR * model.noise["bf16"]
        right = logits.argmax(-1) == whole[len(PROMPT):]
        self.assertTrue((right | tie).all())
        self.assertGreater(right.mean(), 0.9)

    def wait_released(self):
        """Waits until no worker has rows on the server."""
        deadline = time.monotonic() + 20
        with mla_client.Client.connect(self.example.attention.target) as client:
            while client.stats().sequences and time.monotonic() < deadline:
                time.sleep(0.02)
            self.assertEqual(client.stats().sequences, 0)

    def test_the_model_is_listed(self):
        status, body = self.example.request("/v1/models")
        self.assertEqual((status, [model["id"] for model in body["data"]]), (200, ["trained"]))

    def test_a_greedy_answer_is_that_of_the_local_model(self):
        body = self.completion(max_tokens=48, temperature=0)
        said = body["choices"][0]["text"].encode()
        self.assertEqual(body["usage"], {"prompt_tokens": len(PROMPT), "completion_tokens": 48,
                                         "total_tokens": len(PROMPT) + 48})
        self.check_greedy(said)

    def test_a_stream_has_the_same_bytes_one_by_one(self):
        fields = {"prompt": PROMPT, "max_tokens": 200, "seed": 5, "stream_options":
                  {"include_usage": True}}
        with self.example.stream("/v1/completions", fields) as events:
            parts = list(events)
        usage = parts.pop()["usage"]
        self.assertEqual(usage["completion_tokens"], 200)
        self.assertEqual(len(parts), 200)
        self.assertEqual(parts[-1]["choices"][0]["finish_reason"], "length")
        whole = self.completion(max_tokens=200, seed=5)["choices"][0]["text"]
        self.assertEqual("".join(part["choices"][0]["text"] for part in parts), whole)
        self.assertEqual(len({part["id"] for part in parts}), 1)

    def test_a_stream_begins_before_its_answer_is_complete(self):
        """Bytes arrive as they are chosen, not together at the end: when the first one is here, the
        server has not computed all others."""
        with mla_client.Client.connect(self.example.attention.target) as client:
            before = client.stats().rows_decode
            with self.example.stream("/v1/completions",
                                     {"prompt": PROMPT, "max_tokens": 900}) as events:
                next(events)
                computed = client.stats().rows_decode - before
        self.assertLess(computed, 899 * trained.CONFIG.layers)

    def test_chat(self):
        messages = [{"role": "system", "content": "It was a fine day."},
                    {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
        fields = {"messages": messages, "max_completion_tokens": 20, "seed": 1}
        status, body = self.example.request("/v1/chat/completions", fields)
        self.assertEqual(status, 200)
        self.assertEqual(body["object"], "chat.completion")
        self.assertEqual(body["choices"][0]["message"]["role"], "assistant")
        with self.example.stream("/v1/chat/completions", fields) as events:
            deltas = [event["choices"][0]["delta"] for event in events]
        self.assertEqual(deltas[0]["role"], "assistant")
        self.assertEqual("".join(delta["content"] for delta in deltas),
                         body["choices"][0]["message"]["content"])

    def test_choices_share_a_prompt(self):
        with mla_client.Client.connect(self.example.attention.target) as client:
            before = client.stats().rows_prefill + client.stats().rows_extend
            choices = self.completion(max_tokens=12, n=4, seed=2)["choices"]
            after = client.stats().rows_prefill + client.stats().rows_extend
        self.assertEqual([choice["index"] for choice in choices], [0, 1, 2, 3])
        self.assertGreater(len({choice["text"] for choice in choices}), 1)
        self.assertLessEqual(after - before, len(PROMPT) * trained.CONFIG.layers)

    def test_stop_strings(self):
        whole = self.completion(max_tokens=120, temperature=0)["choices"][0]["text"]
        stop = whole[40:46]
        choice = self.completion(max_tokens=120, temperature=0, stop=[stop, "@@"])["choices"][0]
        self.assertEqual(choice["text"], whole[:whole.index(stop)])
        self.assertEqual(choice["finish_reason"], "stop")

    def test_both_workers_serve(self):
        before = self.example.request("/healthz")[1]["tasks_by_worker"]
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(self.example.stream(
                "/v1/completions", {"prompt": PROMPT, "max_tokens": 60})) for _ in range(2)]
            for stream in streams:
                self.assertEqual(len(list(stream)), 60)
        after = self.example.request("/healthz")[1]["tasks_by_worker"]
        self.assertEqual([b - a for a, b in zip(before, after)], [1, 1])

    def test_a_client_that_goes_frees_its_rows(self):
        with self.example.stream("/v1/completions",
                                 {"prompt": PROMPT, "max_tokens": 900, "n": 2}) as events:
            next(events)
        self.wait_released()

    def test_a_restart_of_the_attention_server_is_a_pause(self):
        fields = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
        with mla_client.Client.connect(self.example.attention.target) as client:
            boot_id = client.boot_id
        with self.example.stream("/v1/completions", fields) as events:
            parts = [next(events)["choices"][0]["text"] for _ in range(20)]
            self.example.restart_attention()
            parts += [event["choices"][0]["text"] for event in events]
        said = "".join(parts).encode()
        self.assertEqual(len(said), 300)
        self.check_greedy(said)
        with mla_client.Client.connect(self.example.attention.target) as client:
            self.assertNotEqual(client.boot_id, boot_id)
            self.assertGreater(client.stats().rows_prefill, 0)  # the text before the kill

    def test_refusals(self):
        ask = "/v1/completions"
        for body, field in (({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [1]}, "prompt"),
                            ({"prompt": "a", "model": "other"}, "model"),
                            ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
                            ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
                            ({"prompt": "a" * 1000, "max_tokens": 25}, "max_tokens"),
                            ({"prompt": "a", "temperature": -1}, "temperature"),
                            ({"prompt": "a", "temperature": True}, "temperature"),
                            ({"prompt": "a", "top_p": 2}, "top_p"),
                            ({"prompt": "a", "n": 9}, "n"),
                            ({"prompt": "a", "seed": "x"}, "seed"),
                            ({"prompt": "a", "stop": [""]}, "stop"),
                            ({"prompt": "a", "stop": ["a"] * 5}, "stop"), ([], None)):
            status, reply = self.example.request(ask, body)
            self.assertEqual((status, reply["error"]["param"]), (400, field), body)
        for messages in (None, [], ["x"], [{"role": "user", "content": ""}]):
            status, _ = self.example.request("/v1/chat/completions", {"messages": messages})
            self.assertEqual(status, 400)
        self.assertEqual(self.example.request(ask, raw="{")[0], 400)
        connection = http.client.HTTPConnection("127.0.0.1", self.example.port, timeout=60)
        with contextlib.closing(connection):  # refused by its length, before it is sent
            connection.putrequest("POST", ask)
            connection.putheader("Content-Length", (1 << 20) + 1)
            connection.endheaders()
            self.assertEqual(connection.getresponse().status, 413)
        self.assertEqual(self.example.request("/v2")[0], 404)
        self.assertEqual(self.example.request("/v2", {})[0], 404)

    def test_the_page_shows_bytes_as_they_come(self):
        query = urllib.parse.urlencode({"prompt": PROMPT, "tokens": 640, "seed": 3})
        with browser.Browser() as page:
            page.open(f"http://127.0.0.1:{self.example.port}/?{query}")
            shown = "document.querySelector('#answer{}').textContent.length"
            page.wait(shown.format(0) + f" > {len(PROMPT) + 10}")
            first = [page.value(shown.format(index)) for index in range(2)]
            self.assertEqual(page.value("answer0.dataset.state"), "running")
            page.shoot(self.folder / "running.png")
            for index in range(2):
                page.wait(f"answer{index}.dataset.state === 'done'")
            page.shoot(self.folder / "done.png")
            for index in range(2):
                self.assertLess(first[index], len(PROMPT) + 640)
                self.assertEqual(page.value(f"answer{index}.dataset.chunks"), "640")
                said = page.value(f"document.querySelector('#answer{index}').textContent")
                self.assertTrue(said.startswith(PROMPT))
                self.assertEqual(len(said), len(PROMPT) + 640)
        running, done = (read_png(self.folder / f"{name}.png") for name in ("running", "done"))
        dark = [int((picture.max(axis=2) < 100).sum()) for picture in (running, done)]
        self.assertGreater(dark[1], dark[0] + 1000)  # text, in pixels

    def test_the_page_shows_text_as_text(self):
        markup = "<img src=x onerror=\"document.title='owned'\">"
        query = urllib.parse.urlencode({"prompt": markup, "tokens": 3})
        with browser.Browser() as page:
            page.open(f"http://127.0.0.1:{self.example.port}/?{query}")
            page.wait("answer0.dataset.state === 'done'")
            self.assertEqual(page.value("document.title"), "Remote attention")
            self.assertIn(markup, page.value("document.querySelector('#answer0').textContent"))

    def test_the_page_shows_a_refusal(self):
        query = urllib.parse.urlencode({"prompt": "a" * 700, "tokens": 325})
        with browser.Browser() as page:
            page.open(f"http://127.0.0.1:{self.example.port}/?{query}")
            page.wait("answer0.dataset.state === 'failed'")
            self.assertIn("at most 1024",
                          page.value("document.querySelector('#answer0').textContent"))


class StartTest(unittest.TestCase):
    def test_no_attention_server(self):
        done = subprocess.run([sys.executable, example.FOLDER / "serve.py", "--target",
                               "unix:/nonexistent/mla.sock", "--port", "0"], text=True,
                              capture_output=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("serve: worker: UNAVAILABLE", done.stderr)

    def test_it_starts_a_server_itself_and_ends_well(self):
        process = subprocess.Popen(
            [sys.executable, example.FOLDER / "serve.py", "--server", server_binary.path(),
             "--port", "0"],
            stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.assertIn("http://", process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(30), 0)


class BusyTest(unittest.TestCase):
    def test_busy_workers_are_429(self):
        class Full:
            """This worker accepts no task."""

            def new_number(self):
                return 1

            def run(self, task, gone):
                raise Busy

        started = []
        reply = serve.App(Full())(
            {"REQUEST_METHOD": "POST", "PATH_INFO": "/v1/completions",
             "wsgi.input": io.BytesIO(b'{"prompt": "a"}'),
             "waitress.client_disconnected": lambda: False},
            lambda status, headers: started.append(status))
        self.assertEqual(started, ["429 Too Many Requests"])
        self.assertEqual(json.loads(b"".join(reply))["error"]["type"], "rate_limit_error")


class TextTest(unittest.TestCase):
    def test_stops_may_come_in_pieces(self):
        stops = text.StopFilter([b"END", b"\n\n"])
        shown = [stops.add(bytes([byte])) for byte in b"aE\nENx\n"]
        self.assertEqual(shown, [(b"a", False), (b"", False), (b"E", False), (b"\n", False),
                                 (b"", False), (b"ENx", False), (b"", False)])
        self.assertEqual(stops.add(b"\nzz"), (b"", True))

    def test_the_first_stop_wins(self):
        stops = text.StopFilter([b"cd", b"bc"])
        self.assertEqual(stops.add(b"abcd"), (b"a", True))
        self.assertEqual(text.StopFilter([]).add(b"abc"), (b"abc", False))

    def test_what_was_kept_back_comes_at_the_end(self):
        stops = text.StopFilter([b"END"])
        self.assertEqual(stops.add(b"xEN"), (b"x", False))
        self.assertEqual(stops.rest(), b"EN")

    def test_characters_are_whole(self):
        utf8 = text.Utf8()
        self.assertEqual([utf8.add(bytes([byte])) for byte in "é!".encode()], ["", "é", "!"])
        self.assertEqual(utf8.add(b"\xc3", last=True), "\ufffd")


class PickTest(unittest.TestCase):
    def test_temperature_and_top_p(self):
        random = np.random.default_rng(1)
        logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
        self.assertEqual(worker.pick(logits, 0, 1.0, random), 1)
        drawn = [worker.pick(logits, 1.0, 1.0, random) for _ in range(2000)]
        shares = np.bincount(drawn, minlength=3) / 2000
        np.testing.assert_allclose(shares, [0.1, 0.6, 0.3], atol=0.04)
        self.assertEqual({worker.pick(logits, 1.0, 0.85, random) for _ in range(200)}, {1, 2})
        self.assertEqual({worker.pick(logits, 1.0, 0.0, random) for _ in range(50)}, {1})
        for least in (1e-46, 5e-324):  # becomes 0 in 32 bits
            self.assertEqual({worker.pick(logits, least, 1.0, random) for _ in range(50)}, {1})
        cold = [worker.pick(logits, 0.2, 1.0, random) for _ in range(500)]
        self.assertGreater(np.mean(np.array(cold) == 1), 0.93)


if __name__ == "__main__":
    unittest.main()
