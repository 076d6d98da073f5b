"""Runs one SGLang engine and its events as a program, so that each case has its own process.

    engine.py CASE.json OUT.json

CASE: "model" (a folder of tests/engines/models.py), "engine" (arguments of sglang.Engine),
"options" (of MLA_SGLANG), "server" (arguments of mla-server; a list of lists: several), "gpu"
(true: calls are chained, on a fake GPU), "kill_in" ([pass, layer] before which server 0 is killed,
and then started again, with "gpu"), and "rounds", each with "prompts" (lists of ids; absent: the
model's), "tokens", "logprobs" (of prompts: then no prefix is used) and "events": [tokens, what,
argument], each of which happens when the round has this many tokens. OUT: for each round its rows,
as compare.py reads them, and counts."""

import asyncio
import json
import os
import pathlib
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Several ranks would use NCCL, which is installed because PyPI's torch for Linux is one for CUDA.
SETTINGS = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "SGLANG_NCCL_SO_PATH": "/nowhere/libnccl.so"}
OPTIONS = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32",
           "attention_backend": "mla_server", "context_length": 1024, "max_running_requests": 8,
           "mem_fraction_static": 0.2, "skip_server_warmup": True, "disable_cuda_graph": True,
           "log_level": "info", "random_seed": 1}
WAIT_S = 60.0


class Case:
    """A case as it runs."""

    def __init__(self, case):
        # pylint: disable=import-outside-toplevel
        import server_binary
        self.case = case
        self.model = pathlib.Path(case["model"])
        self.servers = [server_binary.start(*arguments) for arguments in case.get("server", [[]])]
        self.counts = {}
        self.engine = None
        self._seen = 0
        self._events = []
        self._round = 0

    def close(self):
        """Ends the engine, then the servers."""
        try:
            if self.engine is not None:
                self.counts["sequences"] = self._sequences()
                self.engine.shutdown()
        finally:
            for server in self.servers:
                server.stop()

    def start(self):
        """The engine."""
        # pylint: disable=import-outside-toplevel
        import sglang
        os.environ["MLA_SGLANG"] = json.dumps({
            "target": [server.target for server in self.servers], "model_id": self.model.name,
            "timeout_s": 5.0, **self.case.get("options", {})})
        if self.case.get("gpu"):
            self._use_gpu()
        ranks = self.case.get("engine", {}).get("tp_size", 1)
        if ranks > 1:  # by default each rank takes a node of memory of its own
            cores = sorted(os.sched_getaffinity(0))
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in range(ranks))
        begun = time.monotonic()
        self.engine = sglang.Engine(model_path=str(self.model),
                                    **{**OPTIONS, **self.case.get("engine", {})})
        self.counts["started_s"] = time.monotonic() - begun

    def _use_gpu(self):
        """For the processes of the engine."""
        info = pathlib.Path(tempfile.mkdtemp()) / "on_fake_gpu-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: on-fake-gpu\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\non_fake_gpu = on_fake_gpu:register\n")
        sys.path.append(str(info.parent))  # which spawned processes get
        if "kill_in" in self.case:
            server = self.servers[0]
            os.environ["MLA_TEST_KILL"] = " ".join(
                map(str, [*self.case["kill_in"], server.pid]))

            def restarted():
                server.wait(None)
                server.start()
            threading.Thread(target=restarted, daemon=True).start()

    def round(self, given):
        """The rows of one round."""
        prompts = given.get("prompts") or json.loads((self.model / "prompts.json").read_text())
        self._seen, self._events = 0, sorted(given.get("events", []))
        self._round += 1
        rows = self.engine.loop.run_until_complete(self._all(prompts, given))
        for _, what, argument in self._events:
            self._event(what, argument)
        return rows

    async def _all(self, prompts, given):
        return await asyncio.gather(*(self._one(index, prompt, given)
                                      for index, prompt in enumerate(prompts)))

    async def _one(self, index, prompt, given):
        last, got = {}, 0
        try:
            stream = await self.engine.async_generate(
                input_ids=prompt, rid=self._name(index), stream=True, return_logprob=True,
                logprob_start_len=0 if given.get("logprobs", True) else -1, top_logprobs_num=8,
                sampling_params={"temperature": 0, "max_new_tokens": given.get("tokens", 24),
                                 "ignore_eos": True})
            async for last in stream:
                count = last["meta_info"]["completion_tokens"]
                self._seen, got = self._seen + count - got, count
                while self._events and self._events[0][0] <= self._seen:
                    self._event(*self._events.pop(0)[1:])
        except Exception as error:  # pylint: disable=broad-except
            return {"error": f"{type(error).__name__}: {error}"}
        return self._row(last["meta_info"])

    def _name(self, index):
        return f"request-{self._round}-{index}"

    @staticmethod
    def _row(info):
        finish = info["finish_reason"] or {}
        if finish.get("type") == "abort":
            return {"error": finish.get("message", ""), "tokens": []}
        return {
            "prompt": [entry[0] for entry in info["input_token_logprobs"] or []
                       if entry[0] is not None],
            "tokens": [entry[1] for entry in info["output_token_logprobs"]],
            "tops": [{str(token): value for value, token, *_ in step}
                     for step in info["output_top_logprobs"]],
            "found": info["cached_tokens"]}

    def _event(self, what, argument=None):
        """Applies an event to the engine, or to a server."""
        number = argument if isinstance(argument, int) else 0
        if what == "kill":
            self.servers[number].kill()
        elif what == "start":
            self.servers[number].start()
        elif what == "drain":
            import mla_client  # pylint: disable=import-outside-toplevel
            with mla_client.Client.connect(self.servers[number].target) as client:
                client.drain()
        elif what == "abort":
            self.engine.tokenizer_manager.abort_request(rid=self._name(number))
        else:
            raise ValueError(f"no event {what!r}")

    def _sequences(self):
        """Number of sequences on each server once the engine is idle; None if the server is gone.
        """
        # pylint: disable=import-outside-toplevel
        import mla_client
        found, deadline = [], time.monotonic() + WAIT_S
        for server in self.servers:
            try:
                with mla_client.Client.connect(server.target, timeout_s=5) as client:
                    while client.stats().sequences and time.monotonic() < deadline:
                        time.sleep(0.1)
                    found.append(client.stats().sequences)
            except mla_client.MlaError:
                found.append(None)
        return found


def main(case_path, out_path):
    """Runs a case."""
    case = json.loads(pathlib.Path(case_path).read_text())
    os.environ.update(SETTINGS)
    run = Case(case)
    rounds = []
    try:
        run.start()
        for given in case["rounds"]:
            rounds.append(run.round(given))
    finally:
        run.close()
    pathlib.Path(out_path).write_text(json.dumps({"rounds": rounds, "counts": run.counts}))


if __name__ == "__main__":  # schedulers are spawned processes that import this file
    sys.path[:0] = [str(ROOT / "client" / "python"), str(ROOT / "client" / "python" / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE / "standin"), str(ROOT / "client" / "python"),
         os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(HERE / "standin"))
    main(*sys.argv[1:])
