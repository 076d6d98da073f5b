"""`vllm serve` with attention on a server, asked through its OpenAI API by token ids; with
processes of its own for the engine, as users start it."""

import concurrent.futures
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import cases
import engine
import mla_client
import msgspec
import server_binary
import zmq
from vllm.distributed import kv_events

ENVIRONMENT = "vllm"
GATE = False
START_S, ASK_S, END_S = 3000, 600, 120
TOP = 5  # log-probabilities of a token, at most what the API gives


def tokenizer(folder):
    """A tokenizer of 256 words for a model that has none: the API names tokens by text, too."""
    words = {f"w{number}": number for number in range(256)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}))


def free_port():
    """A port that nothing listened to a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class OverSocket(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    path = ""

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Serve(unittest.TestCase):
    """`vllm serve` with some more arguments."""

    def serve(self, *arguments, kind=(), servers=1):
        """Starts servers and vLLM; with several servers its target is their cluster."""
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        folder = pathlib.Path(scratch.name)
        self.model = folder / "model"
        shutil.copytree(cases.model("deepseek_v3", *kind), self.model)
        tokenizer(self.model)
        self.servers = {}  # by the target of each
        for _ in range(servers):
            if servers > 1:
                server, target = server_binary.start_on_tcp()
            else:
                server = server_binary.start()
                target = server.target
            self.addCleanup(server.stop)
            self.servers[target] = server
        self.server = next(iter(self.servers.values()))
        environment = {**os.environ, **engine.SETTINGS, "MLA_TEST_ASYNC": "1"}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with unittest.mock.patch.dict(os.environ, environment), \
                unittest.mock.patch.object(sys, "path", list(sys.path)):
            engine.entry_points(folder)
            environment = dict(os.environ)
        target = {"kv_connector": "MlaServerConnector", "kv_role": "kv_both",
                  "kv_connector_extra_config": {"target": ",".join(self.servers),
                                                "model_id": "served", "timeout_s": 5.0}}
        self.socket = folder / "api.sock"
        self.log = open(folder / "log", "wb+")  # pylint: disable=consider-using-with
        self.addCleanup(self.log.close)
        program = pathlib.Path(sys.executable).with_name("vllm")
        self.process = subprocess.Popen(  # pylint: disable=consider-using-with
            [sys.executable, str(program), "serve", str(self.model), "--served-model-name", "m",
             "--uds", str(self.socket), "--attention-backend", "CUSTOM", "--kv-transfer-config",
             json.dumps(target), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
             "--max-num-seqs", "8", "--gpu-memory-utilization", "0.05", "--compilation-config",
             json.dumps(engine.OPTIONS["compilation_config"]),
             # Without time for it vLLM kills its engines as soon as it has asked them to end.
             "--shutdown-timeout", str(END_S // 2), *arguments],
            env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)
        self.addCleanup(self.end)
        self.await_health()

    def end(self):
        """Ends vLLM, which releases what it has."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def said(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-12000:]

    def await_health(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.ask("/health", None)
                return
            except (OSError, http.client.HTTPException):
                time.sleep(1)
        self.fail(self.said())

    def ask(self, path, body):
        """The answer to a request over the API's socket."""
        connection = OverSocket("m", timeout=ASK_S)
        connection.path = str(self.socket)
        try:
            connection.request("GET" if body is None else "POST", path,
                               None if body is None else json.dumps(body),
                               {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise OSError(f"status {answer.status}: {text}")
        return json.loads(text) if text else {}

    def rows(self, at_once=1):
        """What the API says of each prompt, as compare.py reads it."""
        prompts = json.loads((self.model / "prompts.json").read_text())
        with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(self.row, prompts))

    def row(self, prompt):
        said = self.completed({
            "model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0,
            "logprobs": TOP, "ignore_eos": True, "return_token_ids": True,
            "return_tokens_as_token_ids": True})
        return {"prompt": [], "tokens": said["token_ids"], "tops": [
            {name.removeprefix("token_id:"): value for name, value in step.items()}
            for step in said["logprobs"]["top_logprobs"]]}

    def completed(self, body):
        """The one completion of a request. Fails with the end of vLLM's log."""
        try:
            return self.ask("/v1/completions", body)["choices"][0]
        except OSError as error:
            self.fail(f"{error}\n{self.said()}")

    def check(self):
        cases.check(self, self.rows(), self.model)

    def left(self):
        """Models and sequences on the server."""
        with mla_client.Client.connect(self.server.target) as client:
            return len(client.models()), client.stats().sequences

    def test_answers_are_the_librarys_before_and_after_a_restart(self):
        self.serve()
        self.check()
        self.assertEqual(self.left()[0], 1)
        self.server.kill()
        self.server.start()
        self.check()
        self.end()
        self.assertEqual(self.left(), (0, 0))

    def test_two_engines_with_experts_of_which_one_is_idle(self):
        """Requests come one at a time, so that the other engine takes part with empty passes."""
        self.serve("--data-parallel-size", "2", "--enable-expert-parallel", kind=("--experts",))
        self.check()
        self.end()
        self.assertEqual(self.left(), (0, 0), self.said())

    def kill_one_in_use(self, until):
        """Kills a server that has sequences; returns its target, or None once `until` is true."""
        clients = {target: mla_client.Client.connect(server.target, timeout_s=60)
                   for target, server in self.servers.items()}
        try:
            while not until():
                for target, client in clients.items():
                    if client.stats().sequences > 0:
                        self.servers[target].kill()
                        return target
            return None
        finally:
            for client in clients.values():
                client.close()

    def test_two_engines_over_four_servers_of_which_one_is_killed(self):
        self.serve("--data-parallel-size", "2", "--shutdown-timeout", str(END_S // 2), servers=4)
        self.check()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            answers = thread.submit(self.rows, at_once=8)
            killed = self.kill_one_in_use(answers.done)
            rows = answers.result()
        self.assertIsNotNone(killed, "no server had a sequence")
        cases.check(self, rows, self.model)
        self.check()  # with three
        self.end()
        del self.servers[killed]
        for target in self.servers:
            with mla_client.Client.connect(target) as client:
                self.assertEqual((len(client.models()), client.stats().sequences), (0, 0), target)

    def test_a_router_hears_which_blocks_are_cached(self):
        """Events on vLLM's own socket, read by vLLM's own structures."""
        context = zmq.Context()
        self.addCleanup(context.destroy, 0)
        self.router, self.blocks, self.cleared = context.socket(zmq.SUB), {}, 0
        port = free_port()
        self.router.connect(f"tcp://127.0.0.1:{port}")
        self.router.subscribe(b"kv@")
        self.serve("--block-size", "64", "--kv-events-config", json.dumps({
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@engine@m",
            "endpoint": f"tcp://*:{port}"}))
        prompt = [2 + place % 200 for place in range(150)]
        self.hear_until(lambda: tuple(prompt[:128]) in self.blocks.values(), prompt)
        self.assertIn(tuple(prompt[:64]), self.blocks.values())
        self.assertEqual(self.cleared, 1)  # as the engine began
        self.server.kill()
        self.server.start()
        self.hear_until(lambda: self.cleared == 2, prompt)
        self.hear_until(lambda: tuple(prompt[:128]) in self.blocks.values(), prompt)

    def hear_until(self, condition, prompt):
        """Asks for completions, with whose passes vLLM publishes, until the condition is true."""
        deadline = time.monotonic() + ASK_S
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"{self.blocks}\n{self.said()}")
            self.completed({"model": "m", "prompt": prompt, "max_tokens": 4, "ignore_eos": True})
            while self.router.poll(200):
                topic, _, payload = self.router.recv_multipart()
                self.assertEqual(topic, b"kv@engine@m")
                for event in msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch).events:
                    self.hear(event)

    def hear(self, event):
        """Keeps the tokens up to the end of each block, by its hash."""
        if isinstance(event, kv_events.AllBlocksCleared):
            self.blocks.clear()
            self.cleared += 1
        elif isinstance(event, kv_events.BlockRemoved):
            for name in event.block_hashes:
                del self.blocks[name]
        else:
            parent = event.parent_block_hash
            before = self.blocks[parent] if parent is not None else ()
            for place, name in enumerate(event.block_hashes):
                begin = place * event.block_size
                before += tuple(event.token_ids[begin:begin + event.block_size])
                self.blocks[name] = before


if __name__ == "__main__":
    unittest.main()
