"""A worker that goes on through upgrades of its servers; test_upgrade.py starts it.

    PYTHONPATH=... upgrade_worker.py TARGET TLS_CA TLS_CERT TLS_KEY SEED

Steps random sequences until a line arrives, and compares each output with the one that the local
reference computes. Prints "begun" after its first steps, and "moved" each time all sequences have
gone on to another server; at the end one line of JSON: the steps, the rows that all sequences have,
and how often the server of one has changed. A wrong value, a lost
sequence or an error ends it with status 1. Any release's Python client can run it.
"""

import json
import random
import sys
import threading
import time

import mla_client
import numpy as np

LAYERS, HEADS = 2, 4
GEOMETRY = mla_client.Geometry(HEADS, 64, 16, 16, 16)
SPEC = mla_client.ModelSpec("upgraded", GEOMETRY, layers=LAYERS, softmax_scale=0.2)
MOST_SEQUENCES, MOST_LENGTH = 8, 400
BEGUN = 4         # steps before "begun"
PAUSE_S = 0.02    # between steps, so that the load leaves processor time to the servers
TIMEOUT_S = 60.0  # of a call, which waits for a sequence that is on its way


class Pair:
    """A sequence of the server, and the same one of the local reference."""

    def __init__(self, model, local_model):
        self.there, self.local = model.open_sequence(), local_model.open_sequence()
        self.server = None

    def changed(self):
        """Returns true if another server has it since the last call."""
        before, self.server = self.server, self.there.model.service
        return before is not None and before is not self.server


class Worker:
    def __init__(self, client, seed):
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.client, self.local = client, mla_client.LocalReference()
        self.model, self.local_model = client.register_model(SPEC), self.local.register_model(SPEC)
        self.pairs = []
        self.steps = self.moves = 0
        self.server = client  # that had all sequences last

    def turn(self):
        """Opens, releases or truncates a sequence now and then; takes one step of some."""
        while len(self.pairs) < 3 or (len(self.pairs) < MOST_SEQUENCES
                                      and self.random.random() < 0.1):
            # A handle of a server that has ended leads nowhere; that of a sequence does.
            model = self.pairs[-1].there.model if self.pairs else self.model
            self.pairs.append(Pair(model, self.local_model))
            self.take_step(self.pairs[-1:])
        pair = self.random.choice(self.pairs)
        if pair.local.length > MOST_LENGTH and len(self.pairs) > 3:
            self.pairs.remove(pair)
            pair.there.release()
            pair.local.release()
        self.take_step(self.random.sample(self.pairs, self.random.randint(1, 3)))

    def take_step(self, chosen):
        """Adds rows to these, and compares the outputs."""
        counts = [self.random.choice((1, 1, 3, 70)) for _ in chosen]
        data = [self.tensors(sum(counts)) for _ in range(LAYERS)]
        got = self.step(self.client, [one.there for one in chosen], counts, data)
        wanted = self.step(self.local, [one.local for one in chosen], counts, data)
        np.testing.assert_allclose(got, wanted, rtol=0.03, atol=0.03)
        self.steps += 1
        self.moves += sum(one.changed() for one in self.pairs)
        servers = {id(one.server): one.server for one in self.pairs}
        if len(servers) == 1 and id(self.server) not in servers:
            self.server = self.pairs[0].server
            print("moved", flush=True)

    def tensors(self, rows):
        queries = self.numbers.standard_normal((rows, HEADS, 64 + 16), dtype=np.float32)
        kv = self.numbers.standard_normal((rows, 64 + 16), dtype=np.float32)
        return mla_client.round_to_bf16(queries), mla_client.round_to_bf16(kv)

    @staticmethod
    def step(service, sequences, counts, data):
        with service.step(list(zip(sequences, counts))) as step:
            return np.concatenate([step.attend(layer, queries, kv, mla_client.Profile.ABSORBED).o
                                   for layer, (queries, kv) in enumerate(data)])

    def report(self):
        """Checks the lengths that the servers say; returns the figures."""
        for pair in self.pairs:
            assert pair.there.refresh().length == pair.local.length
        return {"steps": self.steps, "sequences": len(self.pairs), "moves": self.moves,
                "rows": sum(pair.local.length for pair in self.pairs)}


def main():
    target, files, seed = sys.argv[1], sys.argv[2:5], int(sys.argv[5])
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    with mla_client.Client.connect(target, tls=mla_client.Tls(*files), timeout_s=TIMEOUT_S,
                                   lease_ms=60000, follow_moves=True) as client:
        worker = Worker(client, seed)
        while not ended.is_set() or worker.steps < BEGUN:
            worker.turn()
            if worker.steps == BEGUN:
                print("begun", flush=True)
            time.sleep(PAUSE_S)
        print(json.dumps(worker.report()), flush=True)


if __name__ == "__main__":
    main()
