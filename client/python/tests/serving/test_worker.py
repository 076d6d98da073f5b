"""One process of an engine, and the requests of a process that is the scheduler, too."""

import gc
import threading
import types
import unittest
from unittest import mock

import numpy as np

from mla_client import errors
from mla_client.serving import (Admission, How, Link, Passes, PassPlan, Pause, Ranks, Request,
                                Requests, Worker)
from serving.fake_server import SPEC, FakeServer, options

WEIGHTS = np.zeros((2, 2, 4)), np.zeros((2, 4, 2))  # W_UK and W_UV of a layer


class Exchange:
    """It moves nothing."""

    def __init__(self, passes):
        self.passes, self.largest, self.released = passes, 0, False

    def release(self):
        self.released = True


class Req:
    """A request of the engine's."""


class Group:
    """Two ranks as threads, which decide alike."""

    def __init__(self, rank, shared):
        self.rank_in_group = rank
        self._shared = shared

    def broadcast_object(self, value, src):
        return self.all_gather_object(value)[src]

    def all_gather_object(self, value):
        slots, barrier = self._shared
        slots[self.rank_in_group] = value
        barrier.wait(30)
        found = list(slots)
        barrier.wait(30)
        return found


def started(server, ranks=Ranks()):
    """A worker whose model is registered."""
    made = options(server)
    made.arguments.update(client_id="c")
    worker = Worker(made, ranks)
    worker.link._pause = Pause(0.0, 0.0)
    worker.start(SPEC, lambda layer: WEIGHTS, Exchange)
    return worker


class WorkerTest(unittest.TestCase):
    def setUp(self):
        self.server = FakeServer(pages=8)
        self.worker = started(self.server)
        self.requests = Requests(self.worker, Admission(self.worker.link, "s", False))
        self.req = {}

    def admit(self, rid, tokens=3):
        self.req[rid] = Req()
        return self.requests.admit(rid, self.req[rid], range(tokens), "", False)

    def run_pass(self, rows):
        made = self.requests.begin(list(rows), list(rows.values()))
        for _ in range(SPEC.layers):
            self.worker.check_turn(made.layers, sum(new for _, new in rows.values()))
            self.worker.passes.layer_done(made)
        self.worker.end()
        return made

    def test_a_server_that_is_not_there_shows_at_once(self):
        self.server.alive = False
        with self.assertRaisesRegex(errors.Unavailable, "target s: connection refused"):
            Worker(options(self.server))

    def test_rows_of_the_pool(self):
        # 1 MiB, two bytes an element
        self.assertEqual(self.worker.rows_of_pool(6, 2), (1 << 20) // 24)

    def test_layers_come_in_their_turn_with_all_rows(self):
        self.admit("a")
        made = self.requests.begin(["a"], [(0, 3)])
        self.assertEqual(self.worker.check_turn(0, 5), 3)  # two rows are padding
        for layer, rows in ((1, 3), (0, 2)):
            with self.assertRaisesRegex(errors.Internal, "must be layer 0 with 3"):
                self.worker.check_turn(layer, rows)
        self.assertIs(self.worker.made, made)

    def test_a_pass_of_ranks_ends_with_the_next_one(self):
        for size in (1, 2):
            server = FakeServer(pages=8)
            worker = started(server, Ranks(0, size))
            requests = Requests(worker, Admission(worker.link, "s", False))
            req = Req()
            requests.admit("a", req, range(3), "", False)
            for rows in ((0, 3), (3, 1)):
                made = requests.begin(["a"], [rows])
                for layer in range(SPEC.layers):
                    self.assertTrue(server.steps, f"{size} ranks, before layer {layer}")
                    worker.passes.layer_done(made)
                worker.end()
                # Another rank may not have sent its heads of the last layer yet.
                self.assertEqual(bool(server.steps), size > 1, f"{size} ranks")
            requests.freed("a", [1, 2, 3, 4])
            self.assertFalse(server.steps)
            self.assertFalse(server.sequences)

    def test_requests_run_and_are_released_at_once(self):
        self.admit("a")
        self.admit("b")
        self.run_pass({"a": (0, 3), "b": (0, 3)})
        self.run_pass({"b": (3, 1), "a": (3, 1)})
        self.assertEqual([one["length"] for one in self.server.sequences.values()], [4, 4])
        self.requests.freed("a", [1, 2, 3, 4])
        self.assertEqual(len(self.server.sequences), 1)
        self.assertIsNone(self.worker.made)
        with self.assertRaisesRegex(errors.Internal, r"requests \['a'\] were not placed"):
            self.run_pass({"a": (4, 1)})

    def test_an_id_that_is_used_again_is_another_request(self):
        self.admit("a")
        self.run_pass({"a": (0, 3)})
        self.requests.freed("a", [1, 2, 3])
        self.admit("a")
        self.assertEqual([part.how for part in self.run_pass({"a": (0, 3)}).parts], [How.SENT])

    def test_a_request_that_is_dropped_gives_its_reservation_back(self):
        self.admit("a")
        self.admit("b")
        self.assertEqual(len(self.server.sequences), 2)
        del self.req["a"]
        gc.collect()
        self.run_pass({"b": (0, 3)})
        self.assertEqual(len(self.server.sequences), 1)

    def test_a_request_waits_for_room(self):
        self.assertEqual(self.admit("a", 20), 0)
        self.assertEqual(self.admit("b", 20), 0)
        self.assertEqual((self.requests.waits("a"), self.requests.waits("b")), (False, True))

    def test_lost_requests_are_told_until_the_engine_leaves_them_out(self):
        for rid in "ab":
            self.admit(rid)
        self.run_pass({"a": (0, 3), "b": (0, 3)})
        self.server.boots()
        self.assertEqual([part.how for part in self.run_pass({"a": (3, 1)}).parts], [How.VOID])
        self.assertEqual(self.requests.lost(["c"]), [])
        self.assertEqual(self.requests.lost(["a", "c"]), ["a"])
        self.assertEqual(self.requests.lost(["b", "a"]), ["b", "a"])
        self.requests.leave("a")
        self.assertEqual(self.requests.lost(["b", "a"]), ["b"])
        # A pass of its tokens counts for nothing, and it is not told again.
        for rows in (3, 1), (0, 3):
            self.assertEqual([part.how for part in self.run_pass({"a": rows}).parts], [How.VOID])
        self.assertEqual((self.requests.lost(["a"]), self.server.sequences), ([], {}))
        with self.assertRaisesRegex(errors.Internal, "leave while it is out"):
            self.requests.leave("a")
        self.assertTrue(self.requests.patient)
        self.assertIn("restarted", self.requests.reason)
        # Once the engine has put it back it begins from nothing.
        self.requests.freed("a", [1, 2, 3])
        self.requests.admit("a", self.req["a"], range(3), "", False)
        self.assertEqual([part.how for part in self.run_pass({"a": (0, 3)}).parts], [How.SENT])

    def test_ranks_decide_as_the_first_one_does(self):
        shared = [None, None], threading.Barrier(2)
        said = [None, None]

        def rank(number):
            passes = Passes(types.SimpleNamespace(client=None), 1)
            link = types.SimpleNamespace(passes=passes)
            first = None
            if number == 0:
                first = mock.Mock(patient=True)
                first.admit.return_value = None
                first.plan.return_value = PassPlan(7)
            begun = []
            link.begin = begun.append
            requests = Requests(link, first, Group(number, shared))
            req = Req()
            rows = requests.admit("a", req, range(3), "", False)
            requests.begin(["a"], [(0, 3)])
            passes._requests["a#0"] = Request("a#0")
            if number == 1:
                passes._lose("a#0")
            lost = requests.lost(["a"])
            requests.leave("a")
            said[number] = (rows, requests.waits("a"), begun, lost, requests.lost(["a"]),
                            requests.patient)
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(said, [(0, True, [PassPlan(7)], ["a"], [], True)] * 2)

    def test_the_end_gives_all_back(self):
        self.admit("a")
        self.run_pass({"a": (0, 3)})
        self.admit("b")
        self.assertEqual(self.worker.counts()["passes"], 1)
        self.requests.close()
        self.assertEqual((self.server.sequences, self.server.models), ({}, {}))
        self.assertTrue(self.worker.exchange.released)


if __name__ == "__main__":
    unittest.main()
