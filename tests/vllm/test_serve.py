"""`vllm serve` with attention on a server, asked through its OpenAI API by token ids; with
processes of its own for the engine, as users start it."""

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
import server_binary

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


class OverSocket(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    path = ""

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Serve(unittest.TestCase):
    """`vllm serve` with some more arguments."""

    def serve(self, *arguments, kind=()):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        folder = pathlib.Path(scratch.name)
        self.model = folder / "model"
        shutil.copytree(cases.model("deepseek_v3", *kind), self.model)
        tokenizer(self.model)
        self.server = server_binary.start()
        self.addCleanup(self.server.stop)
        environment = {**os.environ, **engine.SETTINGS, "MLA_TEST_ASYNC": "1"}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with unittest.mock.patch.dict(os.environ, environment), \
                unittest.mock.patch.object(sys, "path", list(sys.path)):
            engine.entry_points(folder)
            environment = dict(os.environ)
        target = {"kv_connector": "MlaServerConnector", "kv_role": "kv_both",
                  "kv_connector_extra_config": {"target": self.server.target, "model_id": "served",
                                                "timeout_s": 5.0}}
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

    def rows(self):
        """What the API says of each prompt, as compare.py reads it."""
        found = []
        for prompt in json.loads((self.model / "prompts.json").read_text()):
            said = self.completed({
                "model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0,
                "logprobs": TOP, "ignore_eos": True, "return_token_ids": True,
                "return_tokens_as_token_ids": True})
            found.append({"prompt": [], "tokens": said["token_ids"], "tops": [
                {name.removeprefix("token_id:"): value for name, value in step.items()}
                for step in said["logprobs"]["top_logprobs"]]})
        return found

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


if __name__ == "__main__":
    unittest.main()
