"""Two worker processes that generate at the same time on one server."""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import time
import traceback
from typing import Any, Dict, List

import mla_client
import numpy as np
from attention import spec_of
from generate import Generator
from model import Array, Model

# Short prefill steps in small messages: both workers are often inside a layer's attention, with
# several requests waiting while a launch runs.
MESSAGE_BYTES = 96 << 10
PREFILL_ROWS = 128
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 120.0


@dataclasses.dataclass
class WorkerReport:
    """What one worker did. `failure` is empty if it went well."""

    index: int
    tokens: List[int]
    logits: Array
    seconds: float
    most_requests: int  # in one launch that this worker took part in
    most_layers: int
    most_clients: int
    failure: str = ""


def _work(index: int, target: str, model_id: str, prompt: List[int], count: int, start: Any,
          reports: Any) -> None:
    """Body of a worker process: its own model, connection and sequence."""
    try:
        model = Model()
        with mla_client.Client.connect(target, message_bytes=MESSAGE_BYTES) as client:
            # Its weights are there already; registering again says which model is meant.
            registered = client.register_model(spec_of(model, model_id))
            with registered.open_sequence() as sequence:
                generator = Generator(model, client, sequence, mla_client.Profile.EXPANDED)
                start.wait(START_TIMEOUT_S)
                begin = time.monotonic()
                tokens, logits = generator.generate(
                    generator.prefill(prompt, rows_a_step=PREFILL_ROWS), count)
                seconds = time.monotonic() - begin
        timings = generator.prefill_phase.timings + generator.decode_phase.timings
        reports.put(WorkerReport(index, tokens, logits, seconds,
                                 max(timing.launch_requests for timing in timings),
                                 max(timing.launch_layers for timing in timings),
                                 max(timing.launch_clients for timing in timings)))
    except BaseException:  # whatever it was, the parent must hear of it
        reports.put(WorkerReport(index, [], np.zeros((0, 0), np.float32), 0.0, 0, 0, 0,
                                 traceback.format_exc()))


def run_workers(target: str, model_id: str, prompts: List[List[int]],
                count: int) -> List[WorkerReport]:
    """Runs one worker a prompt, all starting together; reports in order of the prompts."""
    # spawn, because gRPC does not survive a fork.
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(prompts))
    reports = context.Queue()
    processes = [context.Process(target=_work, daemon=True,
                                 args=(index, target, model_id, prompt, count, start, reports))
                 for index, prompt in enumerate(prompts)]
    for process in processes:
        process.start()
    done: Dict[int, WorkerReport] = {}
    deadline = time.monotonic() + RUN_TIMEOUT_S
    try:
        while len(done) < len(prompts):
            report = reports.get(timeout=max(0.1, deadline - time.monotonic()))
            done[report.index] = report
    except queue.Empty:
        for index in set(range(len(prompts))) - set(done):
            done[index] = WorkerReport(index, [], np.zeros((0, 0), np.float32), 0.0, 0, 0, 0,
                                       "no report in time")
    for process in processes:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
    return [done[index] for index in range(len(prompts))]
