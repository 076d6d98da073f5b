"""Workers of one host, a thread each, which run conversations until they are told to end.

    worker.py TARGET NAME WORKERS SEED KEEP_S TLS

TLS has paths of ca, cert and key as JSON.
Prints "turn" after each turn, and at the end what was wrong and its counts as a line of JSON. Ends
once a line arrives at standard input.
"""

import collections
import json
import pathlib
import sys
import threading

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# pylint: disable=wrong-import-position
import real
from mla_client import Client, Tls, errors

CONVERSATIONS = 2
LONGEST_TURNS = 8


class Workers:
    """All of them."""

    def __init__(self, target, name, seed, keep_s, files):
        self._target, self._name, self._seed = target, name, seed
        self._keep_s, self._tls = keep_s, Tls(**files)
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.wrong, self.counts = [], collections.Counter()

    def run(self, number):
        """One worker, until the end; then all rows of its conversations are looked at again."""
        try:
            with Client.connect(self._target, client_id=f"{self._name}-{number}",
                                timeout_s=real.TIMEOUT_S, tls=self._tls,
                                cluster={"subset": 0, "same_host": False,
                                         "keep_s": self._keep_s}) as client:
                worker = real.Worker(client, self._seed * 1000 + number)
                worker.conversations = [real.Conversation(worker.rng)
                                        for _ in range(CONVERSATIONS)]
                while not self.ended.is_set():
                    worker.turn(worker.conversations)
                    if len(worker.conversations[0].tokens) > LONGEST_TURNS * real.TURN_ROWS:
                        worker.release(worker.conversations[0])
                        worker.conversations[0] = real.Conversation(worker.rng)
                    with self._lock:
                        print("turn", flush=True)
                worker.turn(worker.conversations, 1)
                with self._lock:
                    self.wrong += worker.wrong
                    self.counts.update(worker.counts)
                    self.counts["failed"] += len(worker.failed)
        except (errors.MlaError, AssertionError) as error:
            with self._lock:
                self.wrong.append(f"{self._name}-{number}: {error!r}")
                print("turn", flush=True)


def main():
    target, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    workers = Workers(target, name, int(sys.argv[4]), float(sys.argv[5]),
                      json.loads(sys.argv[6]))
    threads = [threading.Thread(target=workers.run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    workers.ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"wrong": workers.wrong, "counts": workers.counts}), flush=True)


if __name__ == "__main__":
    main()
