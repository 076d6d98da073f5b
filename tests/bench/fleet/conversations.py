"""How evenly a fleet is loaded by conversations of agents, and how much of them it finds again.

    conversations_benchmark [--json FILE] [--servers N] [--workers N] [--agents N] [--turns N]
                            [--seed N] [--server PROGRAM]

Servers on the CPU backend, etcd, and an announcer next to each server. Agents have conversations
of 43 turns with 142k rows at the end, scaled 1:64, which begin with one of eight system prompts.
A turn opens a sequence with all tokens so far, computes the rows that were not found, and releases
the sequence. Three ways are compared, each on new servers and with the same turns in the same
order:

    probes   the cluster's client decides by probes
    random   the client takes a server at random for each turn
    one      there is one server, whose pool is as large as all pools of the fleet

Prints for each the rows found by the rows asked for, and the load of the busiest server by the
mean: in turns, in rows attended to, in rows computed, and in rows that the pools hold. Goals for
probes: at most 1.25 in turns and in rows attended to, and at least 0.95 of the rows that one server
finds. Exits 1 if a goal is missed. Nothing depends on the clock, except that a server that does
not answer a probe in time is passed over; the number of such answers is printed.
"""

import argparse
import json
import pathlib
import random
import sys

from processes import SERVER, Fleet

# pylint: disable=wrong-import-position
import mla_client
import numpy as np
from mla_client.cluster.placement import Costs

TURNS, ROWS = 43, 142_000 // 64
ROWS_A_TURN = ROWS // TURNS
PAGE, LORA, ROPE = 8, 32, 16
DIM = LORA + ROPE
SPEC = mla_client.ModelSpec("agents", mla_client.Geometry(1, LORA, ROPE), 1, 0.25, PAGE)
SYSTEMS, SYSTEM_ROWS = 8, 12 * PAGE
# The pools have room for the rows of all conversations, at their ends, so many times.
ROOM = 1.5
# A row stands for 64.
COSTS = Costs(prefill_row_s=64 * Costs().prefill_row_s)
SAMPLES = 40  # of the pools, in the second half of the turns
MOST_LOAD, LEAST_FOUND = 1.25, 0.95
LOADS = ("turns", "attended", "computed")


class Agent:
    """A conversation."""

    def __init__(self, numbers, systems):
        self.tokens = [*systems[numbers.randrange(len(systems))],
                       *(numbers.getrandbits(30) for _ in range(ROWS))]
        self.turn = 0

    def next(self):
        """All tokens of the next turn."""
        self.turn += 1
        return self.tokens[:SYSTEM_ROWS + self.turn * ROWS_A_TURN]


class Way:
    """One way of placement, on servers of its own."""

    def __init__(self, args, fleet, by_chance):
        self.args, self.fleet, self.by_chance = args, fleet, by_chance
        self.numbers = random.Random(args.seed)   # decides what the agents do
        self.chance = random.Random(args.seed + 1)  # and this one where they do it
        self.addresses = [one.address for one in fleet.members]
        self.loads = {name: dict.fromkeys(self.addresses, 0) for name in LOADS}
        self.asked = self.found = 0
        self.fills = []
        self.silent = 0

    def run(self):
        """All turns."""
        systems = [[self.numbers.getrandbits(30) for _ in range(SYSTEM_ROWS)]
                   for _ in range(SYSTEMS)]
        workers = [self.fleet.connect(f"worker-{number}", cluster={
            "subset": 0, "same_host": False, "costs": COSTS})
            for number in range(self.args.workers)]
        try:
            models = [client.register_model(SPEC) for client in workers]
            mine = [[Agent(self.numbers, systems) for _ in range(self.args.agents)]
                    for _ in workers]
            every = max(1, self.args.turns // (2 * SAMPLES))
            for number in range(self.args.turns):
                who = self.numbers.randrange(len(workers))
                place = self.numbers.randrange(self.args.agents)
                self.turn(workers[who], models[who], mine[who][place].next())
                if mine[who][place].turn == TURNS:
                    mine[who][place] = Agent(self.numbers, systems)
                if 2 * number > self.args.turns and number % every == 0:
                    self.sample(workers[0])
        finally:
            for client in workers:
                client.close()

    def turn(self, client, model, tokens):
        """Finds, computes and releases."""
        prefix = mla_client.Prefix(tokens, max_rows=len(tokens) - 1)
        if self.by_chance:
            model = client.model_at(self.chance.choice(self.addresses), model)
        sequence = model.open_sequence(prefix=prefix)
        address, missing = client.address_of(sequence), len(tokens) - sequence.length
        self.asked += len(tokens)
        self.found += sequence.length
        for name, load in zip(LOADS, (1, len(tokens), missing)):
            self.loads[name][address] += load
        with client.step([(sequence, missing)]) as step:
            step.attend(0, None, np.zeros((missing, DIM), np.float32),
                        mla_client.Profile.APPEND_ONLY)
        sequence.release()

    def sample(self, client):
        """How full the pools are."""
        answers = client.owners.probe(self.addresses, "", mla_client.Prefix())
        fills = [answer.fill for answer in answers.values() if answer is not None]
        self.silent += len(self.addresses) - len(fills)
        if fills and sum(fills) > 0:
            self.fills.append(max(fills) * len(fills) / sum(fills))

    def figures(self):
        """Rows found by rows asked for, and the load of the busiest server by the mean."""
        by_mean = {name: max(load.values()) * len(load) / sum(load.values())
                   for name, load in self.loads.items()}
        return {"found": self.found / self.asked, **by_mean,
                "held": sum(self.fills) / max(1, len(self.fills))}


def flags_of(args, servers):
    """The flags of each of so many servers; their pools are as large together as those of others.
    """
    rows = ROOM * args.workers * args.agents * (ROWS + SYSTEM_ROWS)
    pool = f"{int(rows / servers) * DIM * 2}"
    return lambda number: ["--backend-threads=1", f"--kv-cache-bytes={pool}",
                           f"--tenants-kv-bytes={pool}", f"--tenants-kv-slab-bytes={pool}"]


def measure(args, name):
    """The figures of one way."""
    servers = 1 if name == "one" else args.servers
    with Fleet(args.server, servers, flags_of(args, servers)) as fleet:
        way = Way(args, fleet, name == "random")
        way.run()
    figures = way.figures()
    print(f"{name}: {way.found} of {way.asked} rows found ({figures['found']:.4f}); busiest server "
          f"by the mean: {figures['turns']:.2f} in turns, {figures['attended']:.2f} in rows "
          f"attended to, {figures['computed']:.2f} in rows computed, {figures['held']:.2f} in rows "
          f"held; {way.silent} samples without an answer", flush=True)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--agents", type=int, default=20, help="conversations of a worker")
    parser.add_argument("--turns", type=int, default=12_000, help="of all agents together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", default=str(SERVER))
    args = parser.parse_args()
    found = {name: measure(args, name) for name in ("probes", "random", "one")}
    part = found["probes"]["found"] / found["one"]["found"]
    by_chance = found["random"]["found"] / found["one"]["found"]
    load = max(found["probes"]["turns"], found["probes"]["attended"])
    well = load <= MOST_LOAD and part >= LEAST_FOUND
    print(f"of the rows that one server finds: probes {part:.3f}, random {by_chance:.3f}; goals: "
          f"load {load:.2f} <= {MOST_LOAD}, found {part:.3f} >= {LEAST_FOUND}: "
          f"{'met' if well else 'missed'}")
    if args.json:
        rows = [{"bench": "conversations", "shape": name, **figures}
                for name, figures in found.items()]
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
