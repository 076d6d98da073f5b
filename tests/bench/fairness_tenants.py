"""The tenants of the fairness benchmark: one process each, driven by fairness.py over its pipes.

    fairness_tenants.py ROLE '{"target": ..., "tenant": ..., ...}'

A tenant prepares, prints `ready`, and then answers each line of its input with one line of JSON:
`measure SECONDS` (of the light tenant: its figures over that time), `start` (of a flood: begins;
answers {}), `stop` (ends; its figures). Tensors are bf16 patterns or float32 arrays that travel as
they are, so that a client costs a copy and no arithmetic.
"""

import json
import pathlib
import queue
import resource
import secrets
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client/python"))

# pylint: disable=wrong-import-position
import grpc
import mla_client
import numpy as np
from mla_client import DType, Profile
from mla_client.gen import (attention_pb2, attention_pb2_grpc, cache_pb2, model_pb2_grpc,
                            sequence_pb2, tensor_pb2)

HEADS, LORA, ROPE = 16, 512, 64
GEOMETRY = mla_client.Geometry(HEADS, LORA, ROPE, 128, 128)
SCALE = 0.1
LEASE_MS = 3_600_000
CALL_TIMEOUT_S = 5.0
FILL_ROWS = 1024  # rows of one step while a context is filled
PAUSE_S = 0.01    # pause of a flood after a refused request
SLOW_READER_LAYERS = 40


def cpu_seconds():
    """CPU time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def percentile(values, share):
    """The value at `share` of the way through the sorted values, or 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def tensors(rows, dtype):
    """(q, kv, buffers for the outputs) of `rows` rows: small numbers, the same in every call."""
    random = np.random.default_rng(rows)
    q = 0.1 * random.standard_normal((rows, HEADS, LORA + ROPE), np.float32)
    kv = 0.1 * random.standard_normal((rows, LORA + ROPE), np.float32)
    if dtype == DType.BF16:
        q, kv = mla_client.to_bf16(q), mla_client.to_bf16(kv)
    out = mla_client.Buffers(kv, q, np.empty((rows, HEADS, LORA), dtype.numpy), None, dtype)
    return q, kv, out


class Tenant:
    """A connection, a model, and the tensors of its calls."""

    def __init__(self, task, layers):
        self.task = task
        self.layers = layers
        self.dtype = DType[task.get("dtype", "BF16")]
        self.client = mla_client.Client.connect(
            task["target"], tenant=task["tenant"], timeout_s=CALL_TIMEOUT_S, lease_ms=LEASE_MS,
            transport="inline")
        self.model = self.client.register_model(
            mla_client.ModelSpec("m", GEOMETRY, layers, SCALE))

    def filled(self, rows):
        """A new sequence with that many committed rows."""
        sequence = self.model.open_sequence()
        _, kv, _ = tensors(FILL_ROWS, DType.BF16)
        while sequence.length < rows:
            count = min(FILL_ROWS, rows - sequence.length)
            with self.client.step([(sequence, count)]) as step:
                for layer in range(self.layers):
                    step.attend(layer, None, kv[:count], Profile.APPEND_ONLY)
        return sequence


class Light(Tenant):
    """Decode steps of one row at a fixed pace. Measures each attend, and counts begins and lease
    renewals."""

    LAYERS, CONTEXT, PERIOD_S, RENEW_STEPS = 4, 512, 0.025, 10

    def __init__(self, task):
        super().__init__(task, self.LAYERS)
        self.sequence = self.filled(self.CONTEXT)
        self.tensors = tensors(1, self.dtype)
        self.figures(0.5)  # warms both sides

    def step(self, attends, begins):
        q, kv, out = self.tensors
        before = time.perf_counter()
        with self.client.step([(self.sequence, 1)]) as step:
            begins.append((time.perf_counter() - before) * 1e6)
            for layer in range(self.LAYERS):
                before = time.perf_counter()
                step.attend(layer, q, kv, Profile.ABSORBED, dtype=self.dtype,
                            o_dtype=self.dtype, out=out)
                attends.append((time.perf_counter() - before) * 1e6)

    def figures(self, seconds):
        """Runs steps at a fixed pace for that long. A late step does not delay the steps after it.
        """
        attends, begins, failures, steps = [], [], [], 0
        cpu, begin = cpu_seconds(), time.perf_counter()
        while (now := time.perf_counter() - begin) < seconds:
            try:
                self.step(attends, begins)
                if steps % self.RENEW_STEPS == 0:
                    self.client.renew_leases()
            except mla_client.MlaError as error:
                failures.append(f"{type(error).__name__}: {error}"[:200])
                self.recover(failures)
            steps += 1
            time.sleep(self.PERIOD_S - (time.perf_counter() - begin - now) % self.PERIOD_S)
        return {"p50_us": percentile(attends, 0.5), "p99_us": percentile(attends, 0.99),
                "begin_p99_us": percentile(begins, 0.99), "attends": len(attends),
                "steps": steps, "failures": len(failures), "first_failure": (failures + [""])[0],
                "cpu_s": cpu_seconds() - cpu}

    def recover(self, failures):
        """Fills a lost sequence again after a failure."""
        try:
            self.sequence.refresh()
        except mla_client.NotFound:
            failures.append("the sequence was lost")
            self.sequence = self.filled(self.CONTEXT)
        except mla_client.MlaError as error:
            failures.append(f"{type(error).__name__}: {error}"[:200])


class Flood(Tenant):
    """Threads that send as fast as they are answered."""

    def __init__(self, task, layers=1):
        super().__init__(task, layers)
        self.running, self.ended = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self.requests = self.refusals = 0
        self.threads = [threading.Thread(target=self.run, args=(index,), daemon=True)
                        for index in range(task.get("threads", 1))]

    def prepare(self, index):
        """Returns what thread `index` needs; it is passed to `once`."""
        raise NotImplementedError

    def once(self, state):
        """One round of requests."""
        raise NotImplementedError

    def run(self, index):
        state = self.prepared[index]
        self.running.wait()
        while not self.ended.is_set():
            try:
                self.once(state)
            except (mla_client.MlaError, grpc.RpcError):
                with self.lock:
                    self.refusals += 1
                self.ended.wait(PAUSE_S)

    def ready(self):
        """Prepares all threads and starts them in a waiting state."""
        self.prepared = [self.prepare(index) for index in range(len(self.threads))]
        for thread in self.threads:
            thread.start()

    def answered(self):
        with self.lock:
            self.requests += 1

    def start(self):
        self.cpu = cpu_seconds()
        self.running.set()

    def stop(self):
        self.ended.set()
        return {"requests": self.requests, "refusals": self.refusals,
                "cpu_s": cpu_seconds() - self.cpu}


class DecodeFlood(Flood):
    """Steps of several sequences, one row each, at a long context."""

    def prepare(self, index):
        if index == 0:
            self.base = self.filled(self.task["context"])
        sequences = [self.base.fork(lease_ms=LEASE_MS) for _ in range(self.task["sequences"])]
        return sequences, self.client.open_stream(), tensors(len(sequences), self.dtype)

    def once(self, state):
        sequences, stream, (q, kv, out) = state
        with self.client.step([(one, 1) for one in sequences], stream=stream) as step:
            for layer in range(self.layers):
                step.attend(layer, q, kv, Profile.ABSORBED, dtype=self.dtype,
                            o_dtype=self.dtype, out=out)
                self.answered()


class PrefillFlood(Flood):
    """Chunks of a long prompt at a long context, dropped again so that the context stays."""

    def prepare(self, index):
        if index == 0:
            self.base = self.filled(self.task["context"])
        return (self.base.fork(lease_ms=LEASE_MS), self.client.open_stream(),
                tensors(self.task["rows"], self.dtype))

    def once(self, state):
        sequence, stream, (q, kv, out) = state
        step = self.client.step([(sequence, len(q))], stream=stream).begin()
        try:
            for layer in range(self.layers):
                step.attend(layer, q, kv, Profile.ABSORBED, dtype=self.dtype,
                            o_dtype=self.dtype, out=out)
                self.answered()
        finally:
            step.abort()


class SlowReaderFlood(Flood):
    """Streams that send whole steps and never read an answer. Large messages and small ones in
    turn, so that neither large nor small blocks of staging memory stay free."""

    PIECES = (100, 4)

    def __init__(self, task):
        super().__init__(task, SLOW_READER_LAYERS)

    def prepare(self, index):
        rows = self.PIECES[index % len(self.PIECES)]
        q, kv, _ = tensors(rows, self.dtype)
        return self.model.open_sequence(), rows, kv.tobytes() + q.tobytes()

    def messages(self, sequence, rows, payload):
        """A step of rows and layers, message by message."""
        step_id, total = secrets.randbits(62), self.task["rows"]
        yield attention_pb2.AttendStreamRequest(begin_step=attention_pb2.BeginStep(
            step_id=step_id, model_id="m", lease_ms=LEASE_MS,
            sequences=[attention_pb2.StepSequence(sequence_id=sequence.id, epoch=sequence.epoch,
                                                  rows=total)]))
        for layer in range(self.layers):
            for begin in range(0, total, rows):
                yield attention_pb2.AttendStreamRequest(payload=payload, attend=(
                    attention_pb2.Attend(step_id=step_id, layer=layer, row_begin=begin,
                                         row_count=rows, has_kv=True, num_heads=HEADS,
                                         profile=attention_pb2.PROFILE_ABSORBED,
                                         o_dtype=tensor_pb2.DTYPE_F32)))
        self.ended.wait()

    def once(self, state):
        call = attention_pb2_grpc.AttentionStub(self.client._channel).Attend(
            self.messages(*state), metadata=self.client._metadata)
        while not self.ended.wait(0.05) and call.is_active():
            pass
        call.cancel()
        with self.lock:
            self.requests += 1


class UploadFlood(Flood):
    """Uploads that were begun and send nothing, and one that sends all the time."""

    def prepare(self, index):
        if index > 0:
            return None
        random = np.random.default_rng(1)
        weights = [mla_client.to_bf16(random.standard_normal(shape, np.float32))
                   for shape in ((HEADS, 128, LORA), (HEADS, LORA, 128))]
        return weights

    def once(self, state):
        if state is not None:
            self.model.upload_weights(0, *state)
            with self.lock:
                self.requests += 1
            self.ended.wait(PAUSE_S)
            return
        outbox = queue.Queue()
        call = model_pb2_grpc.ModelsStub(self.client._channel).UploadWeights.future(
            iter(outbox.get, None), metadata=self.client._metadata)
        while not self.ended.wait(0.05) and call.running():
            pass
        outbox.put(None)
        call.cancel()
        if not self.ended.is_set():
            self.ended.wait(0.2)  # the server refused or ended it; pause before the next attempt
            with self.lock:
                self.refusals += 1


class BeginFlood(Flood):
    """Steps that stay open for an hour, and short ones of forks that are begun and dropped."""

    PACE_S = 0.004

    def prepare(self, index):
        if index == 0:
            self.base = self.filled(100)  # the last page is shared: each begin copies it
        return self.client.open_stream(), []

    def once(self, state):
        stream, held = state
        child = self.base.fork(lease_ms=LEASE_MS)
        keep = len(held) < self.task["held"]
        try:
            step = self.client.step([(child, 1)], lease_ms=LEASE_MS if keep else 0,
                                    stream=stream).begin()
            with self.lock:
                self.requests += 1
            if keep:
                held.append((step, child))
            else:
                step.abort()
        finally:
            if not keep:
                child.release()
        self.ended.wait(self.PACE_S)


class PrefixFlood(Flood):
    """Hints and opens with as many tokens as a sequence may have, none of which the server knows.
    They are sent as bytes that were made before, so that they cost their sender little."""

    LEASE_MS = 1000  # of the sequences, which no request uses

    def prepare(self, index):
        tokens = np.random.default_rng(index).integers(0, 1 << 17, self.task["tokens"])
        prefix = sequence_pb2.Prefix(token_ids=tokens.tolist())
        return [("/mla.v1.Cache/Hint", cache_pb2.HintRequest(
                    kind=cache_pb2.HINT_KIND_RETAIN, model_id="m",
                    prefix=prefix).SerializeToString()),
                ("/mla.v1.Sequences/Open", sequence_pb2.OpenRequest(
                    model_id="m", lease_ms=self.LEASE_MS, prefix=prefix).SerializeToString())]

    def once(self, state):
        for method, request in state:
            call = self.client._channel.unary_unary(method)
            call(request, timeout=CALL_TIMEOUT_S, metadata=self.client._metadata)
            self.answered()


ROLES = {"light": Light, "decode": DecodeFlood, "prefill": PrefillFlood,
         "slow_reader": SlowReaderFlood, "upload": UploadFlood, "begin": BeginFlood,
         "prefix": PrefixFlood}


def main():
    role, task = sys.argv[1], json.loads(sys.argv[2])
    tenant = ROLES[role](task)
    if role != "light":
        tenant.ready()
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, argument = line.strip().partition(" ")
        if word == "measure":
            answer = tenant.figures(float(argument))
        elif word == "start":
            tenant.start()
            answer = {}
        else:
            answer = tenant.stop()
        print(json.dumps(answer), flush=True)
        if word == "stop":
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
