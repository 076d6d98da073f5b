"""Ctrl-C, or any handler of a signal that raises, at every instruction of a step; without
MLA_TEST_LONG at every third one, and at other ones with each transport. The seed, which is
printed, says at which. A failure is repeated with MLA_TEST_SEED; a commit that changes none of
INPUTS runs no other third."""

import os
import sys
import time
import unittest

import mla_client
import numpy as np
import server_binary
from interrupts import Interrupt, InterruptAt, seed_of_run
from mla_client import Profile
from service_contract import GEOMETRY, LAYERS, SCALE, Worker

INPUTS = (".bazel/bin/server/mla-server", "client/python")
LEASE_MS = 60_000  # no lease ends a step that was forgotten while the tests wait
WAIT_S = 30
EVERY = 1 if os.environ.get("MLA_TEST_LONG") else 3
TRANSPORTS = ("ring", "shm", "inline")
SEED = seed_of_run()
SERVER = None


def setUpModule():
    global SERVER
    print(f"MLA_TEST_SEED={SEED}", file=sys.stderr)
    SERVER = server_binary.start()


def tearDownModule():
    SERVER.stop()


def counts(path):
    """The package, and what of the library waits or locks in Python."""
    return ("/mla_client/" in path and "/gen/" not in path) or path.endswith(
        ("/threading.py", "/contextlib.py", "/concurrent/futures/_base.py"))


def first_place(transport, seed=SEED):
    """Returns the number of the first place of a step that is interrupted, from 1 on."""
    return 1 + (seed + TRANSPORTS.index(transport)) % EVERY


class SeedTest(unittest.TestCase):
    def test_seeds_begin_at_every_place(self):
        for transport in TRANSPORTS:
            self.assertEqual({first_place(transport, seed) for seed in range(100, 100 + EVERY)},
                             set(range(1, 1 + EVERY)))

    def test_a_commit_has_its_own_seed_and_a_variable_comes_first(self):
        self.assertEqual(seed_of_run({}, lambda: "00000010ff"), 16)
        self.assertEqual(seed_of_run({"MLA_TEST_SEED": ""}, lambda: "0000001f00"), 31)
        self.assertEqual(seed_of_run({"MLA_TEST_SEED": "7"}, lambda: "00000010ff"), 7)
        self.assertGreaterEqual(seed_of_run({}, lambda: ""), 0)  # no commit: any


class InterruptTest(unittest.TestCase):
    def setUp(self):
        self.worker = Worker()
        self.q, self.kv = self.worker.queries(3, Profile.ABSORBED), self.worker.kv(3)
        self.want, _ = self.worker.expected(0, self.q, self.kv, Profile.ABSORBED)

    def connect(self, transport):
        client = mla_client.Client.connect(SERVER.target, transport=transport, timeout_s=WAIT_S,
                                           shared_bytes=1 << 20)
        self.addCleanup(client.close)
        return client, client.register_model(
            mla_client.ModelSpec("interrupts", GEOMETRY, LAYERS, SCALE, 4))

    def step(self, client, sequence):
        """A step, checked."""
        with client.step([(sequence, 3)], lease_ms=LEASE_MS) as step:
            for layer in range(LAYERS):
                o = step.attend(layer, self.q, self.kv, Profile.ABSORBED).o
        np.testing.assert_allclose(o, self.want, atol=2e-2, rtol=2e-2)

    def becomes_free(self, client, sequence, place):
        """Another step gets the sequence: no step holds it, or soon none does, since one was given
        up with its stream. A look at the sequence is not enough, because an interrupted begin may
        still be on its way."""
        deadline = time.monotonic() + WAIT_S
        while True:
            sequence.refresh()  # an interrupted end may have committed
            step = client.step([(sequence, 3)], lease_ms=LEASE_MS)
            try:
                step.begin()
                break
            except mla_client.FailedPrecondition as error:
                self.assertLess(time.monotonic(), deadline, f"{place}: {error}")
                time.sleep(0.001)
        step.abort()

    def check(self, transport):
        """Interrupts a step at the places of this run; another step must be correct each time."""
        client, model = self.connect(transport)
        with model.open_sequence() as sequence:
            self.step(client, sequence)  # makes all objects that are made only once
        n, place = first_place(transport), None
        while True:
            sequence, other = model.open_sequence(), model.open_sequence()
            try:
                with InterruptAt(n, counts) as interrupt:
                    self.step(client, sequence)
                break  # it has fewer places
            except Interrupt:
                place = interrupt.place
            except mla_client.MlaError as error:
                self.fail(f"{interrupt.place}: {error}")
            with self.subTest(place=place):
                self.step(client, other)
                self.becomes_free(client, sequence, place)
                sequence.release()
                other.release()
            n += EVERY
        self.assertGreater(n, 30)

    def test_ring(self):
        self.check("ring")

    def test_shared_memory(self):
        self.check("shm")

    def test_inline(self):
        self.check("inline")

    def test_a_begin_that_was_interrupted_holds_no_sequence(self):
        for transport in TRANSPORTS:
            client, model = self.connect(transport)
            sequence = model.open_sequence()
            n = first_place(transport)
            while True:
                step = client.step([(sequence, 3)], lease_ms=LEASE_MS)
                self.assertEqual(client.transport, transport)  # there is a stream
                try:
                    with InterruptAt(n, counts) as interrupt:
                        step.begin()
                    break
                except Interrupt:
                    self.becomes_free(client, sequence, interrupt.place)
                n += EVERY
            self.assertGreater(n, 30)
            step.abort()


if __name__ == "__main__":
    unittest.main()
