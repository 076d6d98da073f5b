"""A cluster of real processes on one machine: etcd, servers on the CPU backend, and workers of the
product's own client, which are killed, cut off, and come back.

    real.py [--servers 16] [--workers 50] [--kills 200] [--seed 1]

Every output is compared with attention over the rows that the worker knows, so a row that is lost,
doubled or another sequence's is seen. Nothing is judged by the clock; times are reported. Exits 1
where an output is wrong, or a sequence that no killed server had has failed.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import sys
import threading
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "client" / "python")]

from mla_client import Client, Geometry, ModelSpec, Prefix, Profile, errors  # noqa: E402
from mla_client.bf16 import round_to_bf16  # noqa: E402
from mla_client.cluster.operations.announce import Announcer  # noqa: E402
from mla_client.cluster.step import OwnersFailed  # noqa: E402
from mla_client.testing import ServerProcess  # noqa: E402

import etcd  # noqa: E402

BINARY = os.environ.get("SERVER_UNDER_TEST", str(ROOT / ".bazel/bin/server/mla-server"))
LAYERS, PAGE, SCALE = 2, 8, 0.25
GEOMETRY = Geometry(2, 32, 16)
SPEC = ModelSpec("real", GEOMETRY, LAYERS, SCALE, PAGE)
TURN_ROWS = 12
MOST_ERROR = 0.03
# Where a server is killed: what has been called last when it is.
POINTS = ("opened", "begins", "begun", "sent_0", "done_0", "sent_1", "done_1", "ends", "ending",
          "ended", "releases", "released")
# A worker gives a turn up after so many tries; each may wait for the client's deadline.
MOST_TRIES = 40
PAUSE_S = 0.1
TIMEOUT_S = 5.0
START_S = 120.0


class Fleet:
    """etcd, servers, and an announcer for each."""

    def __init__(self, servers):
        self.etcd = etcd.Etcd()
        self.servers = {}
        self.stops = {}
        self.threads = []
        self.lock = threading.Lock()
        for _ in range(servers):
            address = f"127.0.0.1:{etcd.free_port()}"
            self.servers[address] = ServerProcess(BINARY, [
                "--kv-cache-bytes=16MiB", "--log-level=warning"], listen=address)

    def __enter__(self):
        self.etcd.start()
        for server in self.servers.values():
            server.start()
        for address in self.servers:
            self.announce(address)
        self.wait_for(len(self.servers))
        return self

    def __exit__(self, *exc_info):
        for stop in self.stops.values():
            stop.set()
        for thread in self.threads:
            thread.join()
        for server in self.servers.values():
            try:
                server.stop()
            except AssertionError:
                pass  # it was killed
        self.etcd.__exit__()

    def announce(self, address):
        """Keeps it in the registry, as the process next to it does."""
        server, stop = self.servers[address], threading.Event()
        one = Announcer(self.etcd.registry(), lambda: Client.connect(
            server.target, timeout_s=2.0, transport="inline"), address, server.target)
        self.stops[address] = stop
        thread = threading.Thread(target=one.run, args=(stop,), daemon=True)
        thread.start()
        self.threads.append(thread)

    def wait_for(self, count):
        """Until so many are members."""
        registry, deadline = self.etcd.registry(), time.monotonic() + START_S
        while len(registry.read()) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(registry.read())} of {count} servers are announced")
            time.sleep(0.05)
        registry.close()

    def kill(self, address):
        """As kill -9."""
        self.servers[address].kill()

    def restart(self, address):
        """Another process with the same address."""
        self.servers[address].start()

    def connect(self, name, **options):
        """A worker's client."""
        return Client.connect(self.etcd.target, client_id=name, timeout_s=TIMEOUT_S,
                              cluster={"subset": 0, **options})


class Conversation:
    """Tokens, the rows that they stand for, and the sequence that has them."""

    def __init__(self, rng):
        self.rng = np.random.default_rng(rng.getrandbits(32))
        self.tokens = []
        self.rows = np.empty((LAYERS, 0, GEOMETRY.row_dim), np.float32)
        self.sequence = None

    def grow(self, count):
        """More tokens. A token's rows depend on the token alone."""
        more = [int(token) for token in self.rng.integers(0, 1 << 30, count)]
        self.tokens += more
        made = np.stack([np.stack([
            np.random.default_rng(token * LAYERS + layer).standard_normal(GEOMETRY.row_dim)
            for token in more]) for layer in range(LAYERS)])
        self.rows = np.concatenate([self.rows, round_to_bf16(made.astype(np.float32))], axis=1)

    @property
    def prefix(self):
        return Prefix(self.tokens, max_rows=len(self.tokens) - 1)

    @property
    def missing(self):
        return len(self.tokens) - self.sequence.length

    def expected(self, layer, q, place):
        """The output of the query [heads, dim] of a row."""
        rows = self.rows[layer, :place + 1]
        weights = np.exp((q @ rows.T) * SCALE)
        weights /= weights.sum(axis=1, keepdims=True)
        return weights @ rows[:, :GEOMETRY.kv_lora_rank]


class Worker:
    """Runs turns of conversations. `hook` is called at each of POINTS with what the turn has."""

    def __init__(self, client, seed, hook=lambda point, worker: None):
        self.client = client
        self.rng = random.Random(seed)
        self.queries = np.random.default_rng(seed)
        self.hook = hook
        self.model = client.register_model(SPEC)
        self.conversations = []
        self.wrong = []
        self.failed = []  # sequences whose owners have failed, by address
        self.counts = collections.Counter()

    def turn(self, conversations, count=TURN_ROWS):
        """Adds rows to all of them in steps over all owners, whatever fails."""
        for one in conversations:
            one.grow(count)
            if one.sequence is None:
                one.sequence = self.again(lambda one=one: self.model.open_sequence(
                    prefix=one.prefix))
        self.hook("opened", self)
        for _ in range(MOST_TRIES):
            open_ones = [one for one in conversations if one.missing > 0]
            if not open_ones:
                return
            before = {one: self.client.address_of(one.sequence) for one in open_ones}
            failed = self.step(open_ones)
            for one in open_ones:
                if one.sequence in failed:
                    self.failed.append(before[one])
                    found = self.again(lambda one=one: self.client.recover(one.sequence,
                                                                           one.prefix))
                    self.counts[found.how] += 1
        raise AssertionError("a turn does not end")

    def again(self, act):
        """Until it works."""
        for _ in range(MOST_TRIES):
            try:
                return act()
            except errors.MlaError as error:
                last = error
                time.sleep(PAUSE_S)
        raise AssertionError(f"it does not work: {last}")

    def step(self, open_ones):
        """One step; returns the sequences whose owners have failed."""
        rows = [(one.sequence, one.missing) for one in open_ones]
        starts = [one.sequence.length for one in open_ones]
        everything = dict.fromkeys((one.sequence for one in open_ones))
        self.hook("begins", self)
        step = self.client.step(rows, partial=True)
        try:
            step.begin()
            self.hook("begun", self)
            for layer in range(LAYERS):
                total = sum(count for _, count in rows)
                q = round_to_bf16(self.queries.standard_normal(
                    (total, GEOMETRY.num_heads, GEOMETRY.row_dim)).astype(np.float32))
                kv = np.concatenate([one.rows[layer, start:] for one, start
                                     in zip(open_ones, starts)])
                future = step.attend_async(layer, q, kv, Profile.ABSORBED)
                self.hook(f"sent_{layer}", self)
                out = future.result().o
                self.hook(f"done_{layer}", self)
                self.compare(step, open_ones, rows, starts, layer, q, out)
            self.hook("ends", self)
            ending = threading.Thread(target=self.hook, args=("ending", self))
            ending.start()
            try:
                step.end()
            finally:
                ending.join()
            self.hook("ended", self)
            return dict(getattr(step, "failed", {}))
        except OwnersFailed as error:
            return error.failed
        except errors.MlaError:
            if step.open:
                try:
                    step.abort()
                except errors.MlaError:
                    pass  # its server has gone
            return everything

    def compare(self, step, open_ones, rows, starts, layer, q, out):
        """The last row of each."""
        at = 0
        failed = getattr(step, "failed", {})
        for one, (sequence, count), start in zip(open_ones, rows, starts):
            at += count
            if sequence in failed:
                if not np.isnan(out[at - count:at]).all():
                    self.wrong.append("rows of a failed owner look like outputs")
                continue
            error = np.abs(out[at - 1] - one.expected(layer, q[at - 1], start + count - 1)).max()
            self.counts["outputs"] += 1
            if not error < MOST_ERROR:
                self.wrong.append(f"layer {layer}, row {start + count - 1}: off by {error}")

    def release(self, one):
        """Its sequence ends; its rows stay in the cache of the server that has them."""
        self.hook("releases", self)
        try:
            one.sequence.release()
        except errors.MlaError:
            pass  # with its server
        one.sequence = None
        self.hook("released", self)


class Killer:
    """Kills the server of one of the worker's sequences at a point, once, and starts it again when
    the turn has ended."""

    def __init__(self, fleet, rng):
        self.fleet = fleet
        self.rng = rng
        self.point = None
        self.killed = []
        self.down = []

    def __call__(self, point, worker):
        if point != self.point:
            return
        self.point = None
        owners = sorted({worker.client.address_of(one.sequence) for one in worker.conversations
                         if one.sequence is not None} - {""})
        if not owners:
            owners = sorted(self.fleet.servers)
        self.kill(self.rng.choice(owners))

    def kill(self, address):
        with self.fleet.lock:
            if address in self.down:
                return
            self.fleet.kill(address)
            self.killed.append(address)
            self.down.append(address)

    def heal(self):
        """All are there again."""
        while self.down:
            with self.fleet.lock:
                self.fleet.restart(self.down.pop())


def spread(worker, fleet, count):
    """Conversations with sequences on as many servers as there are."""
    addresses = sorted(fleet.servers)
    for number in range(count):
        one = Conversation(worker.rng)
        there = worker.again(lambda number=number: worker.client.model_at(
            addresses[number % len(addresses)], worker.model))
        one.sequence = there.open_sequence()
        worker.conversations.append(one)


def kill_at_each_point(fleet, kills, seed, points=POINTS):
    """One worker with sequences on all servers, of which one is killed at a point of each turn.
    Returns what was wrong, and figures."""
    rng = random.Random(seed)
    killer = Killer(fleet, rng)
    with fleet.connect(f"worker-{seed}", same_host=bool(seed % 2)) as client:
        worker = Worker(client, seed, killer)
        spread(worker, fleet, min(4, len(fleet.servers)))
        worker.turn(worker.conversations)
        wrong = list(worker.wrong)
        for number in range(kills):
            killer.point = points[number % len(points)]
            worker.failed.clear()
            before = len(killer.killed)
            if killer.point in ("releases", "released"):
                one = worker.rng.choice(worker.conversations)
                worker.release(one)
            worker.turn(worker.conversations)
            killer.point = None
            # A server that was killed after the last step of a turn fails in the next turn.
            mine = set(killer.killed[max(0, before - 1):])
            others = set(worker.failed) - mine - {""}
            if others:
                wrong.append(f"{others} failed where {mine} was killed")
            killer.heal()
        worker.turn(worker.conversations, 1)  # over all rows, as they are now
        figures = {"kills": len(killer.killed), **worker.counts}
        for one in worker.conversations:
            worker.release(one)
    return wrong + [fault for fault in worker.wrong if fault not in wrong], figures


def without_registry(fleet, seed):
    """The registry goes away, and a server is killed meanwhile."""
    rng = random.Random(seed)
    killer = Killer(fleet, rng)
    with fleet.connect(f"worker-{seed}", keep_s=120.0) as client:
        worker = Worker(client, seed, killer)
        spread(worker, fleet, 3)
        worker.turn(worker.conversations)
        fleet.etcd.kill()
        fresh = Conversation(worker.rng)
        worker.conversations.append(fresh)
        worker.turn(worker.conversations)
        if worker.failed:
            worker.wrong.append(f"steps failed without the registry: {worker.failed}")
        killer.point = "begun"
        worker.turn(worker.conversations)
        worker.turn(worker.conversations)
        killer.heal()
        fleet.etcd.start()
        fleet.wait_for(len(fleet.servers))
        worker.turn(worker.conversations)
        return worker.wrong, dict(worker.counts)


def many_workers(fleet, workers, kills, seed):
    """Workers in threads of their own; servers are killed while they run."""
    rng = random.Random(seed)
    killer = Killer(fleet, rng)
    stop, wrong, counts = threading.Event(), [], collections.Counter()
    lock = threading.Lock()

    def run(number):
        try:
            with fleet.connect(f"worker-{number}") as client:
                worker = Worker(client, seed * 1000 + number)
                worker.conversations = [Conversation(worker.rng) for _ in range(2)]
                while not stop.is_set():
                    worker.turn(worker.conversations)
                    if len(worker.conversations[0].tokens) > 8 * TURN_ROWS:
                        worker.release(worker.conversations[0])
                        worker.conversations[0] = Conversation(worker.rng)
                    counts["turns"] += 1
                with lock:
                    wrong.extend(worker.wrong)
                    counts.update(worker.counts)
        except (errors.MlaError, AssertionError) as error:
            with lock:
                wrong.append(f"worker {number}: {error}")
    threads = [threading.Thread(target=run, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for _ in range(kills):
        turns = counts["turns"]
        while counts["turns"] < turns + workers // 2 and not wrong:
            time.sleep(0.02)
        killer.kill(rng.choice(sorted(fleet.servers)))
        turns = counts["turns"]
        while counts["turns"] < turns + workers // 2 and not wrong:
            time.sleep(0.02)
        killer.heal()
    stop.set()
    for thread in threads:
        thread.join()
    return wrong, {"kills": len(killer.killed), **counts}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    faults = 0
    began = time.monotonic()
    with Fleet(args.servers) as fleet:
        print(json.dumps({"part": "start", "seconds": round(time.monotonic() - began, 1)}))
        for name, run in (
                ("points", lambda: kill_at_each_point(fleet, args.kills * 3 // 4, args.seed)),
                ("registry", lambda: without_registry(fleet, args.seed)),
                ("workers", lambda: many_workers(fleet, args.workers, args.kills // 4,
                                                 args.seed))):
            began = time.monotonic()
            wrong, figures = run()
            faults += len(wrong)
            print(json.dumps({"part": name, **figures, "wrong": wrong[:10],
                              "seconds": round(time.monotonic() - began, 1)}), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
