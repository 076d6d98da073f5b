"""Workers over UCX that stop themselves at named points of their work, for test_points.py.

    point_workers.py TARGET

Reads commands: "start POINT TRANSPORT TIMEOUT_S" forks a worker, which says "at POINT PID" and
stops (SIGSTOP) when it comes to the point; at the point "none" it never stops. "wait" waits for all
workers and says "exit POINT STATUS" for each: 0 all outputs were right, 2 the service failed,
as "error POINT WHAT" has said before; 3 wrong outputs; below 0 a signal.
"""

import os
import signal
import sys
import traceback

import mla_client
import numpy as np
from mla_client import DType, Profile
from service_contract import GEOMETRY, LAYERS, SCALE

SPEC = mla_client.ModelSpec("points", GEOMETRY, LAYERS, SCALE, page_size=4)
POINTS = ("connected", "opened", "begun", "sent", "answered", "before_end", "committed",
          "large_begun", "large_sent", "all_sent", "large_committed", "begun_again")
# Points at which the worker has a step open over its ring.
IN_A_STEP = ("begun", "sent", "answered", "before_end", "large_begun", "large_sent", "all_sent",
             "begun_again")
SMALL, LARGE = 5, 600  # rows; tensors of LARGE rows have up to 230 KB
TOLERANCE = 2e-2
LEASE_MS = 60_000  # of steps, which workers that are stopped do not renew
OK, FAILED, WRONG = 0, 2, 3


def values(*numbers, shape):
    """Rows or queries that these numbers stand for."""
    return mla_client.round_to_bf16(
        np.random.default_rng(numbers).standard_normal(shape, np.float32) / 4)


def dense(q, keys):
    """Attention of the last len(q) of these rows, ABSORBED."""
    scores = np.einsum("nhd,kd->nhk", q.astype(np.float64), keys.astype(np.float64)) * SCALE
    first = len(keys) - len(q)
    hidden = np.arange(len(keys))[None, :] > first + np.arange(len(q))[:, None]
    scores[np.broadcast_to(hidden[:, None, :], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ keys[:, :GEOMETRY.kv_lora_rank] / weights.sum(-1, keepdims=True)


class Conversation:
    """A sequence, and what it should hold."""

    def __init__(self, client, seed):
        self.client, self.seed = client, seed
        self.sequence = client.register_model(SPEC).open_sequence()
        self.rows = [np.zeros((0, GEOMETRY.row_dim), np.float32) for _ in range(LAYERS)]

    def step(self, count, at=lambda name: None, names=("", "", "", "")):
        """Adds rows and checks the outputs. Comes to the points `names`: begun, the first layer
        sent, answered, all layers sent."""
        length = self.sequence.length
        with self.client.step([(self.sequence, count)], lease_ms=LEASE_MS) as step:
            at(names[0])
            futures = []
            for layer in range(LAYERS):
                kv = values(self.seed, length, layer, shape=(count, GEOMETRY.row_dim))
                q = values(self.seed, length, layer, 9,
                           shape=(count, GEOMETRY.num_heads, GEOMETRY.q_dim(Profile.ABSORBED)))
                self.rows[layer] = np.concatenate([self.rows[layer], kv])
                futures.append((layer, q, step.attend_async(layer, q, kv, Profile.ABSORBED,
                                                            o_dtype=DType.F32)))
                if layer == 0:
                    at(names[1])
                    if names[2]:
                        self.check(*futures.pop())
                        at(names[2])
            at(names[3])
            for future in futures:
                self.check(*future)

    def check(self, layer, q, future):
        """Compares the outputs with those of a dense model."""
        np.testing.assert_allclose(future.result().o, dense(q, self.rows[layer]),
                                   atol=TOLERANCE, rtol=TOLERANCE)


def work(target, transport, timeout_s, at):
    """All of a worker's work."""
    with mla_client.Client.connect(target, transport=transport, timeout_s=timeout_s,
                                   shared_bytes=4 << 20) as client:
        at("connected")
        conversation = Conversation(client, 1)
        at("opened")
        conversation.step(SMALL, at, ("begun", "sent", "answered", "before_end"))
        at("committed")
        conversation.step(LARGE, at, ("large_begun", "large_sent", "", "all_sent"))
        at("large_committed")
        conversation.step(1, at, ("begun_again", "", "", ""))
        conversation.step(1)


def say(text):
    """One line, which the lines of other workers do not break."""
    os.write(1, (text.replace("\n", " ")[:2000] + "\n").encode())


def run(target, point, transport, timeout_s):
    """A worker's exit status."""
    def at(name):
        if name == point:
            say(f"at {point} {os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)
    try:
        work(target, transport, float(timeout_s), at)
        return OK
    except mla_client.MlaError as error:
        say(f"error {point} {type(error).__name__}: {error}")
        return FAILED
    except BaseException:  # pylint: disable=broad-except
        say(f"wrong {point} {traceback.format_exc()}")
        return WRONG


def main():
    """Serves the commands of standard input."""
    workers = {}
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "start":
            pid = os.fork()
            if pid == 0:
                os._exit(run(sys.argv[1], *arguments))
            workers[pid] = arguments[0]
        else:
            for pid, point in workers.items():
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                say(f"exit {point} {status}")
            workers.clear()


if __name__ == "__main__":
    main()
