"""Simulates a cluster on the product's own client and placement code, in one thread.

    simulate.py --servers 64 --workers 1000 --ops 1000000 --seed 1

Servers are killed, cut off and slow, the registry goes away for ten minutes, and all servers are
upgraded one after another. A run without such faults ends with the death of the server that has
most conversations, and a turn of each conversation. Exits 1 where an invariant or a measure does
not hold; a seed repeats.
"""

import argparse
import collections
import json
import os
import pathlib
import sys
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
CLIENT = os.environ.get("CLIENT_UNDER_TEST", str(HERE.parents[1] / "client" / "python"))
sys.path[:0] = [str(HERE), CLIENT]

from simulated.servers import World  # noqa: E402
from simulated.workers import PAGE, ROWS, SYSTEM_ROWS, Worker  # noqa: E402

BATCH = 4
AGENTS = 4
SYSTEMS = 8
# Seconds of the simulated clock between two batches, of all workers together.
PACE_S = 40.0
# Bounds of the measured figures.
MOST_FILL, LEAST_HITS, MOST_CONNECTIONS = 1.25, 0.93, 200
# With fewer agents a server than so many, chance alone makes some servers fuller.
MANY_AGENTS, MOST_FILL_OF_FEW = 50, 1.4
LEAST_OF_ONE_CACHE = 0.95  # of the rows that one cache of all would have found
MOST_ASKED = 4             # servers, for one sequence
# A server that dies has at most so many times its share of the conversations. In the turns after
# that, no other server has more than so many times the mean of those that are left.
MOST_TOUCHED, MOST_LOAD = 1.25, 1.5
LEAST_MEASURED = 20        # batches a worker, on the mean, before measures mean anything


class Run:
    """One simulation."""

    def __init__(self, args):
        # Room for the rows of all agents once and a half.
        agents = args.workers * AGENTS
        pages = int(1.5 * agents * (ROWS + SYSTEM_ROWS) / PAGE / args.servers)
        self.args = args
        self.world = World(args.seed, args.servers, pages)
        self.world.between = self.between
        self.world.advance = self.advance
        self.world.turns = collections.Counter()  # that have ended at each address
        self.moments = 0
        self.rng = self.world.rng
        systems = [np.array([self.rng.getrandbits(20) for _ in range(SYSTEM_ROWS)], np.int32)
                   for _ in range(SYSTEMS)]
        self.world.registry.announce()
        self.workers = [Worker(self.world, number, AGENTS, systems)
                        for number in range(args.workers)]
        for worker in self.workers:
            worker.refresh()  # as Client.connect does
        self.back = []      # (when, what ends then)
        self.killed = 0
        self.hits = []      # found and could, of batches without faults shortly before
        self.fills = []
        self.batches = 0
        self.upgrading = []
        self.touched = []  # parts of all conversations that servers had when they died
        self.load_after = 0.0
        self.most_connections = 0

    def between(self, worker):
        """Something may happen between any two calls of a worker."""
        if self.args.faults and self.rng.random() < self.args.faults:
            self.fault(worker)

    def up(self):
        return [one for one in self.world.servers if one.up and not one.draining]

    def fault(self, worker):
        """One fault that ends after a while, half of the time of a server that the worker uses."""
        world, rng = self.world, self.rng
        kind = rng.choice(("kill", "cut", "worker", "slow", "registry", "upgrade"))
        down = sum(not one.up or one.draining for one in world.servers) + len(world.cut_servers)
        server = rng.choice(world.servers)
        used = [one for one in worker.client.owners.all() if one.connected is not None]
        if used and rng.random() < 0.5:
            server = world.by_address[rng.choice(used).address]
        if kind in ("kill", "cut", "upgrade") and down * 8 >= len(world.servers):
            return
        if kind == "kill" and server.up:
            self.kill(server)
        elif kind == "cut":
            world.cut_servers.add(server.address)
            self.later(rng.uniform(5, 60), lambda: world.cut_servers.discard(server.address))
        elif kind == "worker":
            pair = (rng.choice(self.workers).name, server.address)
            world.cut_workers.add(pair)
            self.later(rng.uniform(5, 60), lambda: world.cut_workers.discard(pair))
        elif kind == "slow":
            server.slow = True
            self.later(rng.uniform(5, 60), lambda: setattr(server, "slow", False))
        elif kind == "registry" and not world.registry.away and rng.random() < 0.2:
            for one in self.workers:  # whose threads have read it within the last second
                one.refresh()
            world.registry.away = True
            self.later(600, lambda: setattr(world.registry, "away", False))
        elif kind == "upgrade" and server.up and not server.draining:
            self.upgrade(server)

    def kill(self, server):
        """As kill -9."""
        self.die(server)

        def back():
            server.start()
            server.up = True
        self.later(self.rng.uniform(5, 30), back)

    def die(self, server):
        """Its rows are gone, and its address does not answer."""
        owners = self.conversations()
        self.touched.append(owners[server.address] / max(1, owners.total()))
        server.up = False
        self.killed += 1

    def conversations(self):
        """How many had their latest turn at each address."""
        return collections.Counter(agent.owner for worker in self.workers
                                   for agent in worker.agents if agent.owner)

    def last_death(self):
        """The server with most conversations dies, and each conversation has a turn: the turns of
        the server that gets most by the mean of those that are left."""
        owners = self.conversations()
        self.die(max(self.up(), key=lambda one: owners[one.address]))
        before = self.world.turns.copy()
        for worker in self.workers:
            self.advance(PACE_S / len(self.workers))
            worker.batch(AGENTS)
        turns = [self.world.turns[one.address] - before[one.address] for one in self.up()]
        self.load_after = max(turns) * len(turns) / sum(turns)

    def upgrade(self, server):
        """A drain to many by free pages, then another process."""
        server.draining = True
        self.world.registry.announce()
        for sequence_id, held in list(server.held.items()):
            if held.step is not None:
                continue
            targets = [one for one in self.up() if one is not server
                       and not self.world.cut_off(one)]
            target = max(targets, key=lambda one: one.free, default=None)
            if target is not None and target.free > server.count(held):
                self.world.move(sequence_id, server, target)

        def back():
            if server.up:
                server.start()
        self.later(self.rng.uniform(5, 20), back)

    def later(self, seconds, act):
        self.back.append((self.world.now + seconds, act))

    def advance(self, seconds):
        """Time goes on, and what is due happens."""
        world = self.world
        world.now += seconds
        due = [one for one in self.back if one[0] <= world.now]
        self.back = [one for one in self.back if one[0] > world.now]
        for _, act in due:
            act()
        world.registry.announce()
        self.moments += 1
        if self.moments % 64 == 0:
            for server in world.servers:
                server.expire()

    def run(self):
        """Until so many calls have been made."""
        while self.world.calls < self.args.ops and not self.world.faults:
            worker = self.rng.choice(self.workers)
            self.advance(PACE_S / len(self.workers))
            worker.batch(BATCH)
            self.batches += 1
            if self.batches % max(1, len(self.workers) // 4) == 0:
                self.measure()

    def measure(self):
        fills = [(len(one.cache) + one.used) / one.pages for one in self.up()]
        mean = sum(fills) / len(fills)
        self.fills.append(max(fills) / mean if mean > 0 else 1.0)
        self.most_connections = max(self.most_connections, *(
            len(one.connections) for one in self.world.servers))

    def figures(self):
        """What was counted so far."""
        total = {name: sum(worker.figures[name] for worker in self.workers)
                 for name in ("turns", "asked", "found", "could", "again", "lost", "tries")}
        how = {}
        for worker in self.workers:
            for name, count in worker.figures["how"].items():
                how[name] = how.get(name, 0) + count
        counts = {name: sum(worker.client.counts[name] for worker in self.workers)
                  for name in ("asked", "opened", "spilled")}
        late = self.fills[len(self.fills) // 2:] or [1.0]
        return {
            "calls": self.world.calls, "seconds_simulated": round(self.world.now),
            "killed": self.killed, **total, "recovered": how,
            "hits": round(total["found"] / max(1, total["asked"]), 4),
            "hits_of_one_cache": round(total["could"] / max(1, total["asked"]), 4),
            "fill_max_by_mean": round(sum(late) / len(late), 3),
            "most_connections": self.most_connections,
            "asked_a_sequence": round(counts["asked"] / max(1, counts["opened"]), 2),
            "spilled": counts["spilled"]}

    def report(self):
        """Figures, and what does not hold."""
        figures = self.figures()
        if not self.args.faults and not self.world.faults:
            self.last_death()
        figures["touched_by_a_death"] = round(max(self.touched, default=0.0), 4)
        figures["load_after_death"] = round(self.load_after, 3)
        wrong = list(self.world.faults)
        if self.batches >= LEAST_MEASURED * len(self.workers) and not self.args.faults:
            if figures["hits"] < LEAST_OF_ONE_CACHE * figures["hits_of_one_cache"]:
                wrong.append("too few rows are found")
            if figures["hits_of_one_cache"] >= 0.96 and figures["hits"] < LEAST_HITS:
                wrong.append("too few rows are found at the end")
            if figures["asked_a_sequence"] > MOST_ASKED:
                wrong.append("too many servers are asked")
            few = AGENTS * len(self.workers) < MANY_AGENTS * len(self.world.servers)
            if figures["fill_max_by_mean"] > (MOST_FILL_OF_FEW if few else MOST_FILL):
                wrong.append("one server is much fuller than the others")
            if not few and figures["touched_by_a_death"] > MOST_TOUCHED / self.args.servers:
                wrong.append("a server that died had too many conversations")
            if not few and figures["load_after_death"] > MOST_LOAD:
                wrong.append("one server got too much of what a dead one had")
        if figures["most_connections"] > MOST_CONNECTIONS:
            wrong.append("a server has too many connections")
        return figures, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=float, default=0.002, help="a chance at each call")
    args = parser.parse_args()
    run = Run(args)
    began = time.monotonic()
    try:
        run.run()
        figures, wrong = run.report()
    except AssertionError as error:
        figures, wrong = run.figures(), [*run.world.faults, str(error) or repr(error)]
    figures["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(figures))
    for fault in wrong[:20]:
        print("WRONG:", fault)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
