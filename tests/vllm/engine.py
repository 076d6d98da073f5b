"""Runs one vLLM engine and its events as a program, so that each case has its own process.

    engine.py CASE.json OUT.json

CASE: "model" (a folder of tests/engines/models.py), "llm" (arguments of LLM), "extra" (of the
connector), "async", "own" (the engine's own attention), "lora" (a folder with an adapter that
requests ask for), "server" (arguments of mla-server; a list of lists: several), "gpu" (true: calls
are chained, on a fake GPU), "kill_in" ([pass, layer] before which server 0 is killed, and started
again, with "gpu"), and "rounds", each with "prompts" (lists of ids; absent: the model's),
"tokens", "logprobs" and "events": [step, what, argument], which happen before that step of the
engine's loop. OUT: for each round its rows, as compare.py reads them, and counts."""

import json
import os
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "client" / "python"), str(ROOT / "client" / "python" / "tests"),
                str(HERE), str(HERE / "standin"), str(HERE / "chained")]
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
           "skip_tokenizer_init": True, "gpu_memory_utilization": 0.05,
           # In 0.32, the platform's compiled rotary operation is wrong for MLA.
           "compilation_config": {"mode": 0, "custom_ops": ["none"]}}
# An engine without progress in this many steps is stuck.
MOST_STEPS = 20000


def entry_points(folder):
    """Makes the harness's plugin known to this process and to processes that it starts."""
    info = pathlib.Path(folder) / "mla_zz_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mla-zz-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmla_zz_cpu = mla_vllm_cpu:register\n")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *sys.path[1:5], os.environ.get("PYTHONPATH", "")])


class Case:
    """A case as it runs."""

    def __init__(self, case):
        # pylint: disable=import-outside-toplevel
        import server_binary
        self.case = case
        self.model = pathlib.Path(case["model"])
        self.servers = [server_binary.start(*arguments) for arguments in case.get("server", [[]])]
        self.counts = {"found": 0, "preempted": 0, "drafted": 0}
        self.llm = None

    def close(self):
        """Ends the engine, then the servers."""
        self.counts["layers"] = self._ask(
            lambda client: [model.layers for model in client.models()])
        self.counts["rope_layouts"] = self._ask(
            lambda client: [model.rope_layout for model in client.models()])
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.counts["models_left"] = self._ask(
            lambda client: [len(client.models()), client.stats().sequences])
        for server in self.servers:
            server.stop()

    def _ask(self, question):
        """Each server's answer; None: it is not there."""
        # pylint: disable=import-outside-toplevel
        import mla_client
        found = []
        for server in self.servers:
            try:
                with mla_client.Client.connect(server.target, timeout_s=2) as client:
                    found.append(question(client))
            except mla_client.MlaError:
                found.append(None)
        return found

    def start(self):
        """The engine."""
        # pylint: disable=import-outside-toplevel
        from vllm import LLM
        from vllm.v1.core.sched.scheduler import Scheduler
        if self.case.get("gpu"):
            self._use_gpu()
        preempt, draft = Scheduler._preempt_request, Scheduler.update_draft_token_ids

        def counted(*args, **kwargs):
            self.counts["preempted"] += 1
            return preempt(*args, **kwargs)
        Scheduler._preempt_request = counted

        def drafted(scheduler, given):
            self.counts["drafted"] += sum(map(len, given.draft_token_ids))
            return draft(scheduler, given)
        Scheduler.update_draft_token_ids = drafted
        self._count_replays()
        options = {**OPTIONS, **self.case.get("llm", {})}
        if not self.case.get("own"):
            targets = [server.target for server in self.servers]
            options["attention_backend"] = "CUSTOM"
            options["kv_transfer_config"] = {
                "kv_connector": "MlaServerConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"target": targets, "model_id": self.model.name,
                                              "timeout_s": 5.0, **self.case.get("extra", {})}}
        begin = time.monotonic()
        self.llm = LLM(model=str(self.model), **options)
        config = self.llm.llm_engine.vllm_config
        self.counts.update({"started_s": time.monotonic() - begin,
                            "blocks": config.cache_config.num_gpu_blocks,
                            "async": bool(config.scheduler_config.async_scheduling)})

    def _count_replays(self):
        """Counts the graphs of the engine's own work that are launched."""
        # pylint: disable=import-outside-toplevel
        import torch
        replay, self.counts["replays"] = torch.cuda.CUDAGraph.replay, 0

        def replayed(graph):
            self.counts["replays"] += 1
            replay(graph)
        torch.cuda.CUDAGraph.replay = replayed

    def _use_gpu(self):
        """Chains calls; counts those of the fast path."""
        # pylint: disable=import-outside-toplevel
        import fake_gpu
        from mla_client.vllm.runtime import runtime
        killed = self.case.get("kill_in")

        def around(forward, *args, **others):
            made = runtime.worker.made if runtime.plan is not None else None
            if made is not None and [runtime.worker.passes.counts["passes"],
                                     made.layers] == killed:
                self.servers[0].kill()
                self.servers[0].start()
            forward(*args, **others)
        fake_gpu.FakeGpu().install(around)
        attend, self.counts["short"] = fake_gpu.pytorch.FastPath.attend, 0

        def counted(*args):
            sent = attend(*args)
            self.counts["short"] += sent
            return sent
        fake_gpu.pytorch.FastPath.attend = counted

    def round(self, given):
        """The rows of one round."""
        # pylint: disable=import-outside-toplevel
        from vllm import SamplingParams
        prompts = given.get("prompts") or json.loads((self.model / "prompts.json").read_text())
        params = SamplingParams(temperature=0, max_tokens=given.get("tokens", 24), ignore_eos=True,
                                detokenize=False, logprobs=8,
                                prompt_logprobs=0 if given.get("logprobs", True) else None)
        lora = None
        if self.case.get("lora"):
            from vllm.lora.request import LoRARequest  # pylint: disable=import-outside-toplevel
            lora = LoRARequest("adapter", 1, self.case["lora"])
        engine, done, steps = self.llm.llm_engine, {}, 0
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params,
                               lora_request=lora)
        events = sorted(given.get("events", []))
        while engine.has_unfinished_requests():
            while events and events[0][0] <= steps:
                self.event(*events.pop(0)[1:])
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id.split("-")[0])] = output
                    self.counts["found"] += output.num_cached_tokens or 0
            steps += 1
            if steps > MOST_STEPS:
                raise RuntimeError(f"stuck: {sorted(done)} of {len(prompts)} are done")
        for event in events:
            self.event(*event[1:])
        self.counts.setdefault("steps", []).append(steps)
        return [self.row(done.get(index)) for index in range(len(prompts))]

    def event(self, what, argument=None):
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
            ids = [name for name in self._ids() if name.split("-")[0] in map(str, argument)]
            self.llm.llm_engine.abort_request(ids, internal=True)
        elif what == "wait":
            time.sleep(argument)

    def count(self):
        """Counters of the connector, as far as its parts are in this process."""
        # pylint: disable=import-outside-toplevel
        from mla_client.vllm.runtime import runtime
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        if connector is not None:
            self.counts["waits"] = connector._planner.admission.counts["waits"]
        self.counts.update(runtime.counts())

    def _ids(self):
        return list(self.llm.llm_engine.output_processor.request_states)

    @staticmethod
    def row(output):
        """A request in the form that compare.py reads, or None if it was aborted."""
        if output is None:
            return None
        said = [] if output.prompt_logprobs is None else [
            entry[token].logprob for entry, token in
            list(zip(output.prompt_logprobs, output.prompt_token_ids))[1:]]
        one = output.outputs[0]
        return {"prompt": said, "tokens": list(one.token_ids), "finish": one.finish_reason,
                "tops": [{str(token): value.logprob for token, value in step.items()}
                         for step in one.logprobs or []]}


def main(case_path, out_path):
    """Runs a case."""
    case = json.loads(pathlib.Path(case_path).read_text())
    os.environ.update(SETTINGS)
    os.environ.update({"MLA_TEST_OWN": "1" if case.get("own") else "0",
                       "MLA_TEST_ASYNC": "1" if case.get("async") else "0",
                       **case.get("env", {})})
    with tempfile.TemporaryDirectory() as folder:
        entry_points(folder)
        run = Case(case)
        rounds = []
        try:
            run.start()
            for given in case["rounds"]:
                rounds.append(run.round(given))
            run.count()
        finally:
            run.close()
    pathlib.Path(out_path).write_text(json.dumps({"rounds": rounds, "counts": run.counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
