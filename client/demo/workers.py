"""Two worker processes that generate at the same time on one server."""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import tempfile
import time
import traceback
from typing import Any, Dict, List, Optional, Tuple

import mla_client
import numpy as np
from attention import register
from generate import SEQUENCE_LEASE_MS, Generator
from model import Array, Model
from recording import Recorder, Writer

# Short prefill steps in small messages: both workers are often inside a layer's attention, with
# several requests waiting while a launch runs.
MESSAGE_BYTES = 32 << 10
PREFILL_ROWS = 128
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 120.0
# Sequences and steps of a worker's recording: fewer than that.
NUMBERS_A_WORKER = 1_000_000


@dataclasses.dataclass
class WorkerReport:
    """Result of one worker. `failure` is empty if it went well."""

    index: int
    tokens: List[int]
    logits: Array
    seconds: float
    most_requests: int  # in one launch that this worker took part in
    most_layers: int
    most_clients: int
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class _Task:
    """Task of one worker."""

    index: int
    target: str
    transport: str
    model: Model
    spec: mla_client.ModelSpec
    prompt: List[int]
    count: int
    part: str          # file to record to; empty: none
    first_number: int  # first number in the recording


def _service(client: mla_client.Client,
             task: _Task) -> Tuple[mla_client.Service, mla_client.Model]:
    """The client, recorded if that is wanted, and the model, whose weights the server has."""
    if not task.part:
        return client, client.register_model(task.spec)
    recorder = Recorder(client, Writer(task.part, part=True), first_number=task.first_number)
    return recorder, register(recorder, task.model, task.spec.model_id)


def _work(task: _Task, start: Any, reports: Any) -> None:
    """Body of a worker process: its own connection and sequence."""
    index, prompt, count = task.index, task.prompt, task.count
    try:
        with mla_client.Client.connect(task.target, transport=task.transport,
                                       message_bytes=MESSAGE_BYTES,
                                       lease_ms=SEQUENCE_LEASE_MS) as client:
            service, registered = _service(client, task)
            with registered.open_sequence() as sequence:
                generator = Generator(task.model, service, sequence,
                                      mla_client.Profile.EXPANDED)
                start.wait(START_TIMEOUT_S)
                begin = time.monotonic()
                tokens, logits = generator.generate(
                    generator.prefill(prompt, rows_a_step=PREFILL_ROWS), count)
                seconds = time.monotonic() - begin
        if isinstance(service, Recorder):
            service.close()
        timings = generator.prefill_phase.timings + generator.decode_phase.timings
        reports.put(WorkerReport(index, tokens, logits, seconds,
                                 max(timing.launch_requests for timing in timings),
                                 max(timing.launch_layers for timing in timings),
                                 max(timing.launch_clients for timing in timings)))
    except BaseException:  # whatever it was, the parent must hear of it
        reports.put(WorkerReport(index, [], np.zeros((0, 0), np.float32), 0.0, 0, 0, 0,
                                 traceback.format_exc()))


def run_workers(target: str, transport: str, model: Model, spec: mla_client.ModelSpec,
                prompts: List[List[int]], count: int, writer: Optional[Writer] = None,
                attempt: int = 1) -> List[WorkerReport]:
    """Runs one worker a prompt, all starting together; reports in order of the prompts. With a
    writer they record, each on its own, and the parts are added to it; `attempt` numbers the calls
    of that kind."""
    with tempfile.TemporaryDirectory(prefix="mla-parts-") as folder:
        tasks = [_Task(index, target, transport, model, spec, prompt, count,
                       f"{folder}/{index}" if writer is not None else "",
                       (attempt * len(prompts) + index) * NUMBERS_A_WORKER)
                 for index, prompt in enumerate(prompts)]
        reports = _run(tasks)
        for task, report in zip(tasks, reports):
            if writer is not None and not report.failure:
                writer.append_part(task.part)
    return reports


def _run(tasks: List[_Task]) -> List[WorkerReport]:
    # spawn, because gRPC does not survive a fork.
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(tasks))
    reports = context.Queue()
    processes = [context.Process(target=_work, daemon=True, args=(task, start, reports))
                 for task in tasks]
    for process in processes:
        process.start()
    done: Dict[int, WorkerReport] = {}
    # A worker that records computes all results a second time.
    deadline = time.monotonic() + RUN_TIMEOUT_S * (3 if tasks[0].part else 1)
    try:
        while len(done) < len(tasks):
            report = reports.get(timeout=max(0.1, deadline - time.monotonic()))
            done[report.index] = report
    except queue.Empty:
        for index in set(range(len(tasks))) - set(done):
            done[index] = WorkerReport(index, [], np.zeros((0, 0), np.float32), 0.0, 0, 0, 0,
                                       "no report in time")
    for process in processes:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
    return [done[index] for index in range(len(tasks))]
