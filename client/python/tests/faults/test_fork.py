"""A client that was made before a fork, in the child and in the parent."""

import json
import os
import pathlib
import subprocess
import sys
import time
import unittest

import mla_client
import server_binary

WORKER = pathlib.Path(__file__).with_name("forking_worker.py")
WAIT_S = 300
TRANSPORTS = ("ring", "shm", "inline")
SCENARIOS = ("every_call", "leaving_blocks", "collected", "locked", "writing", "awaiting",
             "of_a_cluster", "connecting")
SERVER = ADDRESS = None
SAID = {}  # by transport: a worker's report of its scenarios


def environment():
    """Environment of a worker: it finds the modules that this process has found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def setUpModule():
    global SERVER, ADDRESS
    SERVER, ADDRESS = server_binary.start_on_tcp()
    for transport in TRANSPORTS:
        ended = subprocess.run(
            [sys.executable, WORKER, SERVER.target, transport, ADDRESS, *SCENARIOS],
            env=environment(), stdin=subprocess.DEVNULL, timeout=WAIT_S, capture_output=True,
            text=True, check=False)
        SAID[transport] = json.loads(ended.stdout) if ended.returncode == 0 else ended.stderr


def tearDownModule():
    SERVER.stop()


class ForkTest(unittest.TestCase):
    def check(self, scenario, child, **more):
        """Checks a scenario's report from the child over each transport; the parent must not be
        affected."""
        for transport in TRANSPORTS:
            with self.subTest(transport=transport):
                said = SAID[transport]
                self.assertIsInstance(said, dict, said)
                self.assertEqual(said[scenario], {"child": child, "parent": True, **more})

    def test_every_call_of_a_copy_says_why_it_fails(self):
        for transport in TRANSPORTS:
            with self.subTest(transport=transport):
                said = SAID[transport]["every_call"]
                self.assertTrue(said["parent"])
                (calls, closings), status = said["child"]
                self.assertEqual(status, 0)
                self.assertGreater(len(calls), 30)
                self.assertEqual([name for name, got in calls.items() if got != "forked"], [])
                self.assertEqual([name for name, got in closings.items() if got != "ok"], [])

    def test_a_child_that_leaves_blocks_ends_nothing(self):
        self.check("leaving_blocks", [3, 0])

    def test_a_child_that_forgets_everything_ends_nothing(self):
        self.check("collected", ["collected", 0])

    def test_locks_of_other_threads_stop_no_child(self):
        for transport in TRANSPORTS:
            with self.subTest(transport=transport):
                said = SAID[transport]["locked"]
                (calls, closings), status = said["child"]
                self.assertEqual((set(calls), set(closings), status, said["parent"]),
                                 ({"forked"}, {"ok"}, 0, True))

    def test_what_a_child_writes_stays_with_it(self):
        self.check("writing", [[2, 3], 0], q=1)

    def test_a_child_that_awaits_says_why_it_fails(self):
        self.check("awaiting", [{"checkpoints": "forked", "begin": "forked", "close": "ok"}, 0])

    def test_a_child_with_a_client_of_a_cluster_waits_for_no_thread_of_its_parent(self):
        self.check("of_a_cluster", [["forked", "forked"], 0])

    def test_a_child_cannot_connect_after_its_parent_has(self):
        self.check("connecting", [["forked", []], 0])

    def test_a_child_may_connect_before_its_parent_does(self):
        for transport in TRANSPORTS:
            self.assertEqual(SAID[transport]["connecting first"], [["ok", [True]], 0], transport)

    def test_the_server_sees_the_end_of_a_parent_whose_child_lives(self):
        with mla_client.Client.connect(SERVER.target, transport="inline") as client:
            for transport in ("ring", "shm"):
                with self.subTest(transport=transport), subprocess.Popen(
                        [sys.executable, WORKER, SERVER.target, transport, ADDRESS, "outlived"],
                        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        text=True) as worker:
                    child = json.loads(worker.stdout.readline())["child"]
                    deadline = time.monotonic() + WAIT_S
                    while client.stats().shared_regions and time.monotonic() < deadline:
                        time.sleep(0.01)
                    self.assertEqual(client.stats().shared_regions, 0)
                    os.kill(child, 0)  # it is there still
                    worker.stdin.close()


if __name__ == "__main__":
    unittest.main()
