"""A worker of upgrade.py, which starts it.

    PYTHONPATH=... upgrade_worker.py TARGET TLS_CA TLS_CERT TLS_KEY NUMBER SEQUENCES

Opens so many sequences on each server, prints "begun", and takes steps of one row on eight
sequences at a time, whose rows it drops at the end, until a line arrives. Then it prints its
figures as JSON.
"""

import json
import random
import sys
import threading
import time

import mla_client
import numpy as np
from mla_client import errors
from mla_client.cluster.step import OwnersFailed

LAYERS, HEADS, LORA, ROPE, PAGE = 4, 1, 128, 32, 64
DIM, SCALE = LORA + ROPE, 0.1
GEOMETRY = mla_client.Geometry(HEADS, LORA, ROPE)
SPEC = mla_client.ModelSpec("upgraded", GEOMETRY, LAYERS, SCALE, PAGE)
ROWS = 500  # a step's row is in the last page, so a sequence never needs another page
AT_ONCE = 8
MOST_ERROR = 0.03
MOST_TRIES = 200
PAUSE_S = 0.02
TIMEOUT_S = 60.0


def bytes_of_sequence():
    """Of its pages on a server."""
    return -(-ROWS // PAGE) * PAGE * DIM * 2 * LAYERS


class Kept:
    """A sequence and its rows."""

    def __init__(self, sequence, numbers):
        self.sequence = sequence
        self.rows = mla_client.round_to_bf16(
            numbers.standard_normal((LAYERS, ROWS, DIM), dtype=np.float32))

    def expected(self, layer, q, row):
        """The output of a query [DIM] of a row that comes after all others."""
        rows = np.concatenate([self.rows[layer], row[None]])
        weights = np.exp((rows @ q) * SCALE)
        return (weights / weights.sum()) @ rows[:, :LORA]


class Worker:
    def __init__(self, client, number, each):
        self.client, self.random = client, random.Random(number)
        self.numbers = np.random.default_rng(number)
        self.model = client.register_model(SPEC)
        self.figures = {"lost": 0, "rows_again": 0, "wrong": 0, "steps": 0, "moves": 0,
                        "outputs": 0, "stalls": []}
        self.kept = []
        for member in client.members.all():
            there = client.model_at(member.address, self.model)
            for _ in range(each):
                self.kept.append(Kept(there.open_sequence(), self.numbers))
                self.fill(self.kept[-1])

    def fill(self, one):
        """Sends the rows that its server does not have; returns how many."""
        missing = ROWS - one.sequence.length
        if missing > 0:
            with self.client.step([(one.sequence, missing)]) as step:
                for layer in range(LAYERS):
                    step.attend(layer, None, one.rows[layer, ROWS - missing:],
                                mla_client.Profile.APPEND_ONLY)
        return missing

    def turn(self):
        """A step on some sequences, again until it is done."""
        some = self.random.sample(self.kept, min(AT_ONCE, len(self.kept)))
        before = [self.client.address_of(one.sequence) for one in some]
        began = time.monotonic()
        for _ in range(MOST_TRIES):
            failed = self.step(some)
            if failed is None:
                break
            for one in some:
                if one.sequence in failed:
                    self.recover(one, failed[one.sequence])
        else:
            raise RuntimeError("a step does not end")
        seconds = time.monotonic() - began
        self.figures["steps"] += 1
        for one, address in zip(some, before):
            if self.client.address_of(one.sequence) != address:
                self.figures["moves"] += 1
                self.figures["stalls"].append(seconds)

    def step(self, some):
        """Returns None, or the sequences that failed."""
        q = mla_client.round_to_bf16(self.numbers.standard_normal(
            (len(some), HEADS, DIM), dtype=np.float32))
        kv = mla_client.round_to_bf16(self.numbers.standard_normal(
            (len(some), DIM), dtype=np.float32))
        place, layer = self.random.randrange(len(some)), self.random.randrange(LAYERS)
        try:
            with self.client.step([(one.sequence, 1) for one in some]) as step:
                outputs = [step.attend(number, q, kv, mla_client.Profile.ABSORBED).o
                           for number in range(LAYERS)]
                step.end([0] * len(some))
        except OwnersFailed as error:
            return error.failed
        except errors.MlaError as error:
            time.sleep(PAUSE_S)
            return {one.sequence: error for one in some}
        wanted = some[place].expected(layer, q[place, 0], kv[place])
        self.figures["outputs"] += 1
        self.figures["wrong"] += not np.abs(outputs[layer][place, 0] - wanted).max() < MOST_ERROR
        return None

    def recover(self, one, why):
        """Goes on with it, wherever it is."""
        address = self.client.address_of(one.sequence)
        for _ in range(MOST_TRIES):
            try:
                found = self.client.recover(one.sequence)
                if found.how not in ("alive", "moved"):
                    self.figures["lost"] += 1
                    print(f"lost: a sequence of {address}, {found}, after {why}", file=sys.stderr)
                self.figures["rows_again"] += self.fill(one)
                return
            except errors.MlaError as error:
                last = error
                time.sleep(PAUSE_S)
        raise RuntimeError(f"a sequence is not recovered: {last}")


def main():
    target, files, number, each = sys.argv[1], sys.argv[2:5], int(sys.argv[5]), int(sys.argv[6])
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    with mla_client.Client.connect(target, tls=mla_client.Tls(*files), timeout_s=TIMEOUT_S,
                                   lease_ms=120_000, client_id=f"upgrade-{number}",
                                   cluster={"subset": 0}) as client:
        worker = Worker(client, number, each)
        worker.turn()
        print("begun", flush=True)
        while not ended.is_set():
            worker.turn()
        for one in worker.kept:
            worker.recover(one, "the end")
            worker.figures["wrong"] += one.sequence.length != ROWS
        print(json.dumps(worker.figures), flush=True)


if __name__ == "__main__":
    main()
