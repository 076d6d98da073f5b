"""How soon a worker notices that a server has gone, and what it computes again.

    detection_benchmark [--json FILE] [--times N] [--server PROGRAM]

Three servers on the CPU backend, etcd, and a process that announces each server. A worker of the
cluster's Python client adds rows to a sequence, step after step. In the middle of that:

    death        the server is killed as by kill -9
    partition    the server and its announcer are stopped, so that no byte comes from their host
    checkpoint   the server is killed some rows after a checkpoint, and started again

Prints seconds from there until the worker's call fails, and until the worker's list of members is
without the server, medians and largest of N (default 5). Of `checkpoint` it prints the rows that
the worker computes again and those since the checkpoint. Goals: 2 s, 6 s, and not more rows than
since the checkpoint. Exits 1 if the worker computes more rows again.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import threading
import time

from processes import SERVER, Fleet

# pylint: disable=wrong-import-position
import real
from mla_client import errors

SERVERS = 3
GOALS_S = {"death": 2.0, "partition": 6.0}
SINCE = (1, 5, 12)     # rows after a checkpoint
LONGEST_S = 60.0
WARM_STEPS = 20        # before the fault


class Watched:
    """A worker in a thread that takes steps on one sequence until a call fails."""

    def __init__(self, client, address):
        self.client, self.address = client, address
        self.worker = real.Worker(client, 1)
        self.conversation = real.Conversation(self.worker.rng)
        there = client.model_at(address, self.worker.model)
        self.conversation.sequence = there.open_sequence()
        self.failed_at = None
        self.steps = 0
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        while self.failed_at is None:
            self.conversation.grow(1)
            if self.worker.step([self.conversation]):
                self.failed_at = time.monotonic()
            self.steps += 1

    def wait_for_steps(self):
        """Returns once it has done some."""
        end = time.monotonic() + LONGEST_S
        while self.steps < WARM_STEPS:
            if self.failed_at is not None or time.monotonic() > end:
                raise RuntimeError("the worker does not work")
            time.sleep(0.005)


def await_members(client, condition):
    """Returns when the addresses of the client's list of members fulfil the condition."""
    end = time.monotonic() + LONGEST_S
    while not condition([one.address for one in client.members.all()]):
        if time.monotonic() > end:
            raise RuntimeError("the list of members stays")
        time.sleep(0.005)
    return time.monotonic()


def detect(fleet, kind, number):
    """Seconds until the call fails, and until the server is no member."""
    member = fleet.members[number % SERVERS]
    # Shared memory does not cross hosts.
    with fleet.connect(f"worker-{kind}-{number}", cluster={"subset": 0, "same_host": False}
                       ) as client:
        watched = Watched(client, member.address)
        watched.thread.start()
        watched.wait_for_steps()
        began = time.monotonic()
        if kind == "death":
            member.kill()
        else:
            member.freeze()
        gone = await_members(
            client, lambda addresses: member.address not in addresses) - began
        watched.thread.join(LONGEST_S)
        if watched.thread.is_alive():
            raise RuntimeError("a step still waits for the server")
        failed = watched.failed_at - began
        # The sequence goes on elsewhere, with all of its rows.
        worker = watched.worker
        found = worker.again(lambda: client.recover(watched.conversation.sequence,
                                                    watched.conversation.prefix))
        worker.turn([watched.conversation], 1)
        if worker.wrong or found.address == member.address:
            raise RuntimeError(f"wrong: {worker.wrong}, {found}")
        watched.conversation.sequence.release()
    if kind == "death":
        member.end_announcing()
        member.start()
    else:
        member.freeze(False)
    fleet.wait()
    return failed, gone


def recompute(fleet, rows):
    """Rows that are lost by a crash so many rows after a checkpoint."""
    member = fleet.members[0]
    with fleet.connect(f"worker-checkpoint-{rows}") as client:
        worker = real.Worker(client, 1)
        one = real.Conversation(worker.rng)
        one.sequence = client.model_at(member.address, worker.model).open_sequence()
        worker.conversations.append(one)
        worker.turn([one])
        client.checkpoint([one.sequence])
        worker.turn([one], rows)
        member.kill()
        member.end_announcing()
        await_members(client, lambda addresses: member.address not in addresses)
        member.start()
        await_members(client, lambda addresses: member.address in addresses)
        found = worker.again(lambda: client.recover(one.sequence, one.prefix))
        worker.turn([one], 1)
        if worker.wrong or found.how != "checkpoint":
            raise RuntimeError(f"wrong: {worker.wrong}, {found}")
        one.sequence.release()
        return found.lost


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--server", default=str(SERVER))
    args = parser.parse_args()
    rows, bad = [], 0
    with tempfile.TemporaryDirectory() as folder:
        def flags(number):
            path = pathlib.Path(folder, str(number))
            path.mkdir(mode=0o700)
            return ["--kv-cache-bytes=16MiB", f"--checkpoint-path={path}"]
        with Fleet(args.server, SERVERS, flags) as fleet:
            for kind, goal in GOALS_S.items():
                times = [detect(fleet, kind, number) for number in range(args.times)]
                failed, gone = ([one[part] for one in times] for part in (0, 1))
                both = max(max(one) for one in times)
                print(f"{kind}: the call failed after {statistics.median(failed):.2f} s (at most "
                      f"{max(failed):.2f}), no member after {statistics.median(gone):.2f} s "
                      f"(at most {max(gone):.2f}); goal {goal} s: "
                      f"{'met' if both <= goal else 'missed'}", flush=True)
                rows.append({"bench": "detection", "shape": kind,
                             "detection_s": statistics.median(failed), "detection_most_s": both})
            for since in SINCE:
                try:
                    lost = recompute(fleet, since)
                except errors.MlaError as error:
                    raise RuntimeError(f"checkpoint: {error}") from error
                bad += lost > since
                print(f"checkpoint: {lost} rows computed again, {since} since the checkpoint",
                      flush=True)
                rows.append({"bench": "detection", "shape": f"checkpoint, {since} rows before",
                             "rows_again": lost})
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
