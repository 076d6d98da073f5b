"""The demo: a DeepSeek-architecture model whose attention a server computes.

Starts the server, prefills a text that is not in the training data, and generates greedily with
remote attention, in the EXPANDED and in the ABSORBED profile. It checks every token against the
same model run locally in float32, and the check itself against two broken attentions. Then come two
workers at the same time, a fork that continues two ways, a verified draft and a truncation, two
turns that share a prefix, a beam search, and a server that is killed and restores a sequence. The
last line says how it went; the exit status is 1 unless all of it went well.

--model says which: `trained` writes English (trained/README.md); `seeded` has random weights, four
times the heads and a mixture of experts; `v32` is the trained one with sparse attention as in
DeepSeek V3.2, `v4` with a window and entries as in V4. The last two have their own demos
(v32/run.py, v4/run.py). --kv-format selects the cache's format of rows. The comparison is always
with float32, so its bound is wider for 8 bits (docs/fp8.md states it). --transport selects the
transport of steps; auto takes the command ring if there is one. --record writes every request and
its expected outputs to a file (RECORDING.md).
"""

from __future__ import annotations

import os

# One BLAS thread: the server computes on the same cores. Read when numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# pylint: disable=wrong-import-position
import argparse
import contextlib
import logging
import pathlib
import sys
import tempfile
import time
from typing import Any, Iterator, List, Optional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import corpus
import mla_client
import model as models
import numpy as np
import scenes
import trained
from attention import register
from checks import Comparison, LocalModel, bounds
from generate import SEQUENCE_LEASE_MS, Phase
from mla_client.streams.transport import TRANSPORTS
from mla_client.testing import ServerProcess
from recording import Recorder, Writer
from sharing import beams, prefix, restore
from v32 import run as v32
from v4 import run as v4
from workers import WorkerReport, run_workers

MODELS = {"trained": trained.load, "seeded": models.seeded, "v32": trained.load,
          "v4": trained.load}
# Demos of their own, with the trained model.
SPARSE = {"v32": v32, "v4": v4}
PROMPT_BYTES = 896
TOKENS = 128
WORKER_TOKENS = 32
WORKER_ROUNDS = 10
QUESTION_BYTES = 32  # to the server that was started again
MODEL_ID = "demo-deepseek-v3"
PROFILES = (mla_client.Profile.EXPANDED, mla_client.Profile.ABSORBED)


class Demo:
    """The scenes and their results."""

    def __init__(self, model: models.Model, server: ServerProcess, transport: str = "auto",
                 kv_format: str = "bf16", writer: Optional[Writer] = None):
        """`server` is running and keeps checkpoints. `writer`, if not None, records the requests.
        """
        self.started = time.monotonic()
        self.server = server
        self.transport = transport
        self.kv_format = kv_format
        self.writer = writer
        self.model = model
        self.local = LocalModel(self.model, kv_format)
        self.prompt = corpus.prompt(PROMPT_BYTES)
        self.rows: List[str] = []  # rows of the table
        self.ok = True
        self.verdict: List[str] = []

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def judge(self, ok: bool, text: str) -> None:
        """Adds to the last line."""
        self.ok = self.ok and ok
        self.verdict.append(text)

    def run(self, client: mla_client.Client) -> bool:
        """All scenes; True if all went well."""
        info = client.server_info()
        self.say(f"server {info.server_version}, backend {info.backend.name} on "
                 f"{info.backend.device}, {info.backend.units} units")
        self.say(f"transport {client.transport} (asked for: {self.transport})")
        service = client if self.writer is None else Recorder(client, self.writer)
        registered = register(service, self.model, MODEL_ID, self.kv_format)
        self.say(f"registered {MODEL_ID}: {self.model.config.heads} heads, "
                 f"{self.model.config.layers} layers, "
                 f"softmax scale {self.model.config.softmax_scale:.6f}, KV rows {self.kv_format}")
        self.say(f"the prompt ends: {scenes.text_of(self.prompt[-TOKENS:])}")
        runs = [self.run_profile(service, registered, profile) for profile in PROFILES]
        workers_ok = self.two_workers(client, registered.spec)
        self.judge(workers_ok, f"two workers {word(workers_ok)}")
        fork_ok = scenes.fork(runs[0], self.local, self.say)
        self.judge(fork_ok, f"fork {word(fork_ok)}")
        truncate_ok = scenes.speculate(runs[0], self.local, self.say)
        self.judge(truncate_ok, f"truncate {word(truncate_ok)}")
        # Not recorded: replayed requests must not depend on a cache.
        shared = mla_client.Model(client, registered.spec, registered.page_group_bytes)
        prefix_ok = prefix.turns(self.model, shared, PROFILES[0], self.prompt, self.local, self.say)
        self.judge(prefix_ok, f"prefix {word(prefix_ok)}")
        beams_ok = beams.search(runs[0], self.local, lambda: client.stats().copies_on_write,
                                self.say)
        self.judge(beams_ok, f"beams {word(beams_ok)}")
        runs[1].generator.sequence.release()
        restore_ok = restore.crash(runs[0], client, self.restarted,
                                   self.prompt[:QUESTION_BYTES], self.local, self.say)
        self.judge(restore_ok, f"restore {word(restore_ok)}")
        return self.ok

    def connect(self) -> mla_client.Client:
        """To the server that is running."""
        return mla_client.Client.connect(self.server.target, transport=self.transport,
                                         lease_ms=SEQUENCE_LEASE_MS)

    @contextlib.contextmanager
    def restarted(self) -> Iterator[mla_client.Model]:
        """The server is killed and starts again: the model as it then has it."""
        self.server.kill()
        self.server.start()
        with self.connect() as client:
            yield register(client, self.model, MODEL_ID, self.kv_format)

    def run_profile(self, service: mla_client.Service, registered: mla_client.Model,
                    profile: mla_client.Profile) -> scenes.Run:
        """Prefill and generation in one profile, compared and controlled."""
        name = profile.name.lower()
        run = scenes.generate(self.model, service, registered, profile, self.prompt, TOKENS,
                              self.say)
        self.say(f"{name}: {scenes.text_of(run.tokens)}")
        result = scenes.check_run(run, self.local, self.say)
        controls = self.local.controls(run.prompt, run.tokens)
        self.say(f"{name}: attention zeroed changes {controls.zeroed} of {TOKENS} tokens, shifted "
                 f"by one row {controls.shifted} (each must change at least {controls.required})")
        self.judge(result.ok and controls.ok, verdict_of(result, name))
        if not controls.ok:
            self.verdict.append(f"negative controls ({name}) FAILED")
        for phase_name, phase in (("prefill", run.generator.prefill_phase),
                                  ("decode", run.generator.decode_phase)):
            self.rows.append(table_row(f"{name} {phase_name}", phase))
        return run

    def two_workers(self, client: mla_client.Client, spec: mla_client.ModelSpec) -> bool:
        """Two processes at once, until their requests met in one launch at different layers.

        Recording computes every expected answer between two requests, so that workers hardly meet;
        then one round is enough and only the tokens are judged.
        """
        half = len(self.prompt) // 2
        prompts = [self.prompt, self.prompt[half:] + self.prompt[:half]]
        for attempt in range(1, WORKER_ROUNDS + 1):
            before = client.stats()
            reports = run_workers(self.server.target, self.transport, self.model, spec, prompts,
                                  WORKER_TOKENS, self.writer, attempt)
            after = client.stats()
            good = all([self.check_worker(prompt, report)
                        for prompt, report in zip(prompts, reports)])
            if not good:
                return False
            met = self.show_mix(before, after)
            if met or self.writer:
                return True
            self.say(f"two workers: not met in round {attempt} of {WORKER_ROUNDS}")
        return False

    def check_worker(self, prompt: List[int], report: WorkerReport) -> bool:
        """One worker's tokens against the local model."""
        if report.failure:
            self.say(f"worker {report.index}: {report.failure}")
            return False
        result = self.local.check(prompt, report.tokens, report.logits)
        self.say(f"worker {report.index}: {result}, {report.seconds:.1f} s; a launch it shared had "
                 f"up to {report.most_requests} requests of {report.most_clients} clients at "
                 f"{report.most_layers} layers")
        return result.ok

    def show_mix(self, before: Any, after: Any) -> bool:
        """The batches that the server saw; True if clients and layers met in a launch."""

        def grown(name: str) -> int:
            return getattr(after, name) - getattr(before, name)

        self.say(f"two workers: {grown('requests_total')} requests in {grown('launches')} "
                 f"launches, {grown('launches_mixed_clients')} with both clients, "
                 f"{grown('launches_mixed_layers')} with several layers; rows: "
                 f"{grown('rows_decode')} decode, {grown('rows_extend')} extend, "
                 f"{grown('rows_prefill')} prefill; plans {grown('plan_hits')} reused, "
                 f"{grown('plan_misses')} made")
        return grown("launches_mixed_clients") > 0 and grown("launches_mixed_layers") > 0

    def table(self) -> None:
        """Prints how long each phase took."""
        print(f"\n{'phase':<18}{'rows':>6}{'tokens/s':>10}   time per layer request, us"
              f"\n{'':<18}{'':>6}{'':>10}{'total':>9}{'network':>9}{'queue':>9}{'plan':>9}"
              f"{'kernel':>9}{'write':>9}")
        for row in self.rows:
            print(row)
        print(flush=True)


def table_row(name: str, phase: Phase) -> str:
    """One phase of a run."""
    columns = ("round_trip_us", "network_us", "queue_us", "plan_us", "kernel_us", "write_us")
    return (f"{name:<18}{phase.rows:>6}{phase.rows / phase.seconds:>10.1f}"
            + "".join(f"{phase.mean(column):>9.0f}" for column in columns))


def word(ok: bool) -> str:
    return "ok" if ok else "FAILED"


def verdict_of(result: Comparison, name: str) -> str:
    """A profile's part of the last line."""
    text = f"{result.agree}/{result.positions} agree ({name}, {result.near_ties} near ties)"
    if result.error >= result.bound:
        text += f" E {result.error:.3f} TOO LARGE"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="path of the mla-server binary")
    parser.add_argument("--server-arg", action="append", default=[],
                        help="passed on to the server; may be repeated")
    parser.add_argument("--model", choices=MODELS, default="trained",
                        help="which model (default: %(default)s)")
    allowed = ", ".join(f"{bound:g} ({kv_format})"
                        for kv_format, bound in bounds(trained.NOISE).items())
    parser.add_argument("--kv-format", choices=trained.NOISE, default="bf16",
                        help="how the cache keeps rows; the trained model's logits must differ "
                             f"from float32 by less than {allowed} (default: %(default)s)")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto",
                        help="how steps travel (default: %(default)s)")
    parser.add_argument("--record", metavar="FILE", help="write a recording, 0.1 to 0.4 GB")
    args = parser.parse_args()
    if args.model == "seeded" and args.kv_format not in models.NOISE:
        parser.error(f"--kv-format: the seeded model takes {', '.join(models.NOISE)}, got "
                     f"{args.kv_format}")
    if args.model in SPARSE and (args.kv_format != "bf16" or args.record):
        parser.error(f"--model={args.model}: neither --kv-format nor --record")
    if args.record and args.kv_format != "bf16":
        parser.error(f"--record: expected outputs are for bf16 rows, not {args.kv_format}")
    logging.basicConfig(format="%(message)s")  # why a transport was not taken
    np.seterr(over="ignore")  # exp of large negative gates goes to zero, as it should
    server_args = ["--kv-cache-bytes=268435456", *args.server_arg]
    try:
        if args.model in SPARSE:
            run = SPARSE[args.model].run
            return 0 if run(trained.load(), args.server, server_args, args.transport) else 1
        with tempfile.TemporaryDirectory(prefix="mla-demo-") as folder, \
                ServerProcess(args.server, [f"--checkpoint-path={folder}/checkpoints",
                                            *server_args]) as server:
            demo = Demo(MODELS[args.model](), server, args.transport, args.kv_format,
                        args.record and Writer(args.record))
            with demo.connect() as client:
                ok = demo.run(client)
            if demo.writer is not None:
                demo.writer.close()
                demo.say(f"recorded to {args.record}")
        demo.table()
        print("demo: " + ", ".join(demo.verdict))
    except (mla_client.MlaError, RuntimeError, OSError, ValueError) as error:
        print(f"demo: FAILED: {error}")
        return 1
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
