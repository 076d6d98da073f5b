"""A cluster on hosts of its own, network namespaces of this machine, with faults of processes and
of the network.

    faults.py [--servers 16] [--workers 50] [--hosts 5] [--kills 200] [--partitions 4] [--hold 7]
              [--away 60] [--seed 1]

Three nodes of etcd, servers on the CPU backend with an announcer each, and hosts with workers; a
relay in front of the first server. Parts, one after the other:

    points      a worker at the switch, whose servers are killed at each of twelve points of a step,
                three quarters of the kills
    kills       the other kills, while the workers run
    partitions  iptables drops all packets between a host of workers and a server; a server's link
                is down; a node of etcd is off; the first server answers later than probes wait for.
                Each lasts for some turns of the workers and at least `--hold` seconds: longer than
                a worker waits for an answer
    registry    all nodes of etcd are off for so many seconds, while clients keep their list for
                twice as long, and a server is killed
    upgrade     one server after the other hands its sequences to the others and is replaced, while
                other workers run. No sequence may be lost, and no row computed again

Every output is compared with attention over the rows that the worker knows. Exits 1 if one is
wrong, if a worker gives up, or if a part did not happen. Nothing is judged by the clock; times are
reported. Needs root; exits 77 on a machine without network namespaces.
"""

import argparse
import json
import pathlib
import random
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parents[2] / "client" / "python"),
                str(HERE.parents[2] / "client" / "python" / "tests"), str(HERE.parents[1])]

# pylint: disable=wrong-import-position
import fleet as hosted
import namespaces
import real

SKIPPED = 77
KEEP_S = 120.0
SLOW_S = 0.4         # more than a probe waits
MOST_WAIT_S = 300.0  # for turns that do not come


class Run:
    """Faults of a fleet whose workers run."""

    def __init__(self, args, fleet, workers):
        self.fleet, self.workers = fleet, workers
        self.rng = random.Random(args.seed)
        self.turns = args.workers // 2  # between two faults
        self.hold_s, self.count = args.hold, args.partitions

    def go_on(self):
        """Until the workers have done some more turns."""
        wanted, deadline = self.workers.turns + self.turns, time.monotonic() + MOST_WAIT_S
        while self.workers.turns < wanted:
            if not self.workers.alive or time.monotonic() > deadline:
                raise RuntimeError(f"workers stand still after {self.workers.turns} turns")
            time.sleep(0.02)

    def address(self):
        """Any server's."""
        return self.rng.choice(sorted(self.fleet.servers))

    def kill(self, count):
        """Kills one server after the other, and starts each again."""
        for _ in range(count):
            address = self.address()
            self.fleet.kill(address)
            self.go_on()
            self.fleet.restart(address)
        return {"kills": count}

    def during(self, begin, end):
        """Some turns of the workers in between, and some after that."""
        until = time.monotonic() + self.hold_s
        begin()
        self.go_on()
        time.sleep(max(0.0, until - time.monotonic()))
        end()
        self.go_on()

    def partitions(self):
        """Faults of the network."""
        for _ in range(self.count):
            worker = self.rng.choice(self.workers.hosts)
            server = self.fleet.hosts[self.address()]
            self.during(lambda: worker.cut(server), lambda: worker.cut(server, False))
        for _ in range(self.count):
            server = self.fleet.hosts[self.address()]
            self.during(server.unplug, lambda: server.unplug(False))
        for node in self.fleet.etcd.hosts:
            self.during(node.unplug, lambda: node.unplug(False))
        self.during(lambda: self.fleet.delay(SLOW_S), lambda: self.fleet.delay(0))
        return {"cut": self.count, "unplugged": self.count,
                "nodes_off": len(self.fleet.etcd.hosts), "slow": 1}

    def registry_away(self, seconds):
        """All of etcd, and a server is killed meanwhile."""
        before, until = self.workers.turns, time.monotonic() + seconds
        self.fleet.etcd.unplug()
        self.go_on()
        address = self.address()
        self.fleet.kill(address)
        self.go_on()
        self.fleet.restart(address)
        while time.monotonic() < until:
            self.go_on()
        turns = self.workers.turns - before
        self.fleet.etcd.unplug(False)
        self.fleet.wait_for(len(self.fleet.servers))
        self.go_on()
        return {"turns_meanwhile": turns, "kills": 1}


def report(name, began, wrong, figures):
    """A line of JSON; returns how much was wrong."""
    print(json.dumps({"part": name, **figures, "wrong": wrong[:10],
                      "seconds": round(time.monotonic() - began, 1)}), flush=True)
    return len(wrong)


def run(args, switch):
    """All parts; returns the number of faults of the product."""
    began = time.monotonic()
    with hosted.Fleet(switch, args.servers) as fleet:
        faults = report("start", began, [], {"servers": args.servers, "etcd": hosted.NODES})
        began, points = time.monotonic(), args.kills * 3 // 4
        faults += report("points", began, *real.kill_at_each_point(fleet, points, args.seed))
        workers = hosted.Workers(fleet, switch, args.hosts, args.workers, KEEP_S)
        try:
            run_ = Run(args, fleet, workers)
            run_.go_on()
            for name, part in (("kills", lambda: run_.kill(args.kills - points)),
                               ("partitions", run_.partitions),
                               ("registry", lambda: run_.registry_away(args.away))):
                began = time.monotonic()
                faults += report(name, began, [], part())
            began = time.monotonic()
            faults += report("workers", began, *workers.finish())
        finally:
            workers.close()
        faults += upgrade(args, fleet, switch)
    return faults


def upgrade(args, fleet, switch):
    """A rolling upgrade; returns the number of faults."""
    began, left = time.monotonic(), 0
    workers = hosted.Workers(fleet, switch, args.hosts, args.workers, KEEP_S)
    try:
        run_ = Run(args, fleet, workers)
        run_.go_on()
        for address in sorted(fleet.servers):
            left += fleet.upgrade(address)
            run_.go_on()
        wrong, counts = workers.finish()
    finally:
        workers.close()
    lost = counts.get("none", 0) + counts.get("peer", 0)
    if lost or left:
        wrong.append(f"{lost} sequences were lost, {left} have stayed on their servers")
    return report("upgrade", began, wrong, {**counts, "servers": len(fleet.servers), "lost": lost})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--hosts", type=int, default=5, help="of workers")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--partitions", type=int, default=4, help="of each kind")
    parser.add_argument("--hold", type=float, default=7.0, help="seconds of a partition")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without the registry")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.workers < 1 or args.hosts < 1 or args.workers % args.hosts:
        parser.error(f"--workers: got {args.workers}, must be a multiple of --hosts")
    reason = namespaces.why_not()
    if reason:
        print(reason)
        return SKIPPED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no namespace stays
    with namespaces.Switch() as switch:
        switch.enter()
        return 1 if run(args, switch) else 0


if __name__ == "__main__":
    sys.exit(main())
