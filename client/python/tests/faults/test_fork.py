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
WAIT_S = 120
TRANSPORTS = ("ring", "shm", "inline")
SERVER = None


def setUpModule():
    global SERVER
    SERVER = server_binary.start()


def tearDownModule():
    SERVER.stop()


def environment(**more):
    """Of a worker: it finds what this process has found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def run(scenario, transport, **more):
    """What a worker says of itself and of its child."""
    ended = subprocess.run([sys.executable, WORKER, scenario, SERVER.target, transport],
                           env=environment(**more), stdin=subprocess.DEVNULL, timeout=WAIT_S,
                           capture_output=True, text=True, check=False)
    if ended.returncode:
        raise AssertionError(ended.stderr)
    return json.loads(ended.stdout)


class ForkTest(unittest.TestCase):
    def outcomes(self, scenario, **more):
        """(transport, outcome) for each transport; the parent is always as if there was no fork."""
        outcomes = [(transport, run(scenario, transport, **more)) for transport in TRANSPORTS]
        self.assertEqual([(transport, True) for transport in TRANSPORTS],
                         [(transport, said["parent"]) for transport, said in outcomes])
        return outcomes

    def test_every_call_of_a_copy_says_why_it_fails(self):
        for _, said in self.outcomes("every_call"):
            (calls, closings), status = said["child"]
            self.assertEqual(status, 0)
            self.assertGreater(len(calls), 30)
            self.assertEqual({name for name, got in calls.items() if got != "forked"}, set())
            self.assertEqual({name for name, got in closings.items() if got != "ok"}, set())

    def test_every_call_where_grpc_handles_forks(self):
        for _, said in self.outcomes("every_call", GRPC_ENABLE_FORK_SUPPORT="1"):
            self.assertNotIn("UNAVAILABLE", json.dumps(said))
            self.assertEqual(said["child"][0][0]["begin on the stream"], "forked")

    def test_a_child_that_leaves_blocks_ends_nothing(self):
        for _, said in self.outcomes("leaving_blocks"):
            self.assertEqual(said["child"], [3, 0])

    def test_a_child_that_forgets_everything_ends_nothing(self):
        for _, said in self.outcomes("collected"):
            self.assertEqual(said["child"], ["collected", 0])

    def test_locks_of_other_threads_stop_no_child(self):
        for _, said in self.outcomes("locked"):
            (calls, closings), status = said["child"]
            self.assertEqual((set(calls), set(closings), status), ({"forked"}, {"ok"}, 0))

    def test_what_a_child_writes_stays_with_it(self):
        for transport, said in self.outcomes("writing"):
            self.assertEqual((said["child"], said["q"]), ([[2, 3], 0], 1), transport)

    def test_the_server_sees_the_end_of_a_parent_whose_child_lives(self):
        with mla_client.Client.connect(SERVER.target, transport="inline") as client:
            for transport in ("ring", "shm"):
                with self.subTest(transport=transport), subprocess.Popen(
                        [sys.executable, WORKER, "outlived", SERVER.target, transport],
                        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        text=True) as worker:
                    child = json.loads(worker.stdout.readline())["child"]
                    deadline = time.monotonic() + WAIT_S
                    while client.stats().shared_regions and time.monotonic() < deadline:
                        time.sleep(0.01)
                    self.assertEqual(client.stats().shared_regions, 0)
                    os.kill(child, 0)  # it is there still
                    worker.stdin.close()

    def test_a_child_cannot_connect_after_its_parent_has(self):
        for _, said in self.outcomes("connecting"):
            self.assertEqual(said["child"], [["forked", []], 0])

    def test_a_child_may_connect_where_grpc_handles_forks(self):
        for _, said in self.outcomes("connecting", GRPC_ENABLE_FORK_SUPPORT="1"):
            self.assertEqual(said["child"], [["ok", [True]], 0])


if __name__ == "__main__":
    unittest.main()
