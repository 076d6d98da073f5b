"""Kills clients, or stops them for longer than their leases, at every point of their work with
cached rows. Other clients must be served during that time, everything that the dead client held
must return, and the rows that it left in the prefix cache must be right."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import mla_client
import numpy as np
import server_binary
from mla_client import Prefix, Profile
from mla_client.pages import HintKind
from service_contract import GEOMETRY, LAYERS, SCALE

RUN_SECONDS = 44
INPUTS = (".bazel/bin/server/mla-server", "client/python", "tests/integration/rpc")

# Points of a client's work, and the error that the client gets after it was stopped there for
# longer than its leases.
POINTS = {"connected": "", "opened": "NotFound", "begun": "Aborted", "second_layer": "Aborted",
          "before_end": "Aborted", "committed": "NotFound", "forked": "NotFound",
          "copied": "Aborted", "pinned": "NotFound", "exporting": "NotFound",
          "importing": "Cancelled", "checkpointed": "NotFound"}
SPEC = mla_client.ModelSpec("m", GEOMETRY, LAYERS, SCALE, page_size=4)
TOKENS = list(range(100, 116))
ROWS = 11
LEASE_MS = 3000  # leases of sequences and steps of the ending clients
WAIT_S = 60.0


def row(token, what, *shape):
    """The row, or the queries, of a token."""
    return np.random.default_rng((token, what)).standard_normal(shape, np.float32) / 4


def add(service, sequence, tokens, between=lambda layer: None, lease_ms=60_000):
    """Adds the rows of these tokens; outputs by layer."""
    outputs = []
    with service.step([(sequence, len(tokens))], lease_ms=lease_ms) as step:
        for layer in range(LAYERS):
            between(layer)
            kv = np.stack([row(token, layer, GEOMETRY.row_dim) for token in tokens])
            q = np.stack([row(token, 10 + layer, GEOMETRY.num_heads,
                              GEOMETRY.q_dim(Profile.ABSORBED)) for token in tokens])
            outputs.append(np.asarray(step.attend(layer, q, kv, Profile.ABSORBED,
                                                  o_dtype=mla_client.DType.F32).o))
        between(LAYERS)
    return outputs


def work(target, point):
    """Does all of a client's work. At the point it waits for a line, then continues."""
    def at(name):
        if name == point:
            print("at", flush=True)
            sys.stdin.readline()

    client = mla_client.Client.connect(target, tenant=point, lease_ms=LEASE_MS,
                                       shared_bytes=4 << 20)
    at("connected")
    model = client.register_model(SPEC)
    sequence = model.open_sequence(prefix=Prefix(TOKENS[:ROWS], salt="s"))
    at("opened")
    add(client, sequence, TOKENS[:ROWS],
        lambda layer: at(("begun", "second_layer", "before_end")[layer]), LEASE_MS)
    at("committed")
    fork = sequence.fork()
    at("forked")
    add(client, fork, TOKENS[12:14], lambda layer: layer == 1 and at("copied"), LEASE_MS)
    fork.truncate(5)
    client.hint(HintKind.PIN, sequence, ttl_ms=LEASE_MS)
    at("pinned")
    parts = []
    for part in client.export_rows(sequence):
        parts.append(part)
        if len(parts) == 2:
            at("exporting")

    def handing():
        for index, part in enumerate(parts):
            if index == 3:
                at("importing")
            yield part

    client.import_rows(model, handing())
    client.checkpoint([sequence])
    at("checkpointed")
    add(client, fork, TOKENS[5:6])


class Other:
    """Sequences of another tenant, whose rows must stay right."""

    def __init__(self, client):
        self.client, self.local = client, mla_client.LocalReference()
        self.pairs = [(service, service.register_model(SPEC).open_sequence())
                      for service in (client, self.local)]
        self.added = 0

    def go_on(self):
        """Runs a step, which must end in time."""
        begin = time.monotonic()
        got, want = (add(service, sequence, [self.added % 1000, 1000 + self.added])
                     for service, sequence in self.pairs)
        np.testing.assert_allclose(got, want, atol=2e-2)
        assert time.monotonic() - begin < WAIT_S
        self.added += 1


class DyingClientsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mla-dying-")
        cls.server = server_binary.start(f"--checkpoint-path={cls.folder.name}/saved",
                                          f"--wire-upload-idle-ms={LEASE_MS}")

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()
        cls.folder.cleanup()

    def setUp(self):
        self.blue = mla_client.Client.connect(self.server.target, tenant="blue")
        self.addCleanup(self.blue.close)
        self.other = Other(self.blue)

    def start(self):
        """Starts a client at each point. The client's tenant has the point's name."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        clients = {}
        for point in POINTS:
            client = clients[point] = subprocess.Popen(
                [sys.executable, __file__, self.server.target, point], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
            self.addCleanup(client.communicate)
            self.addCleanup(client.kill)
        for point, client in clients.items():
            self.assertEqual(client.stdout.readline(), "at\n", point)
        return clients

    @staticmethod
    def is_behind(point, other):
        return list(POINTS).index(point) >= list(POINTS).index(other)

    def wait(self, holds, what):
        deadline = time.monotonic() + WAIT_S
        while not holds():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.02)

    def check(self, point, committed):
        """Checks that everything the client held has returned. Rows that it committed are found and
        are right for their tokens."""
        with mla_client.Client.connect(self.server.target, tenant=point) as client:
            def used(resource):
                return client.quota().resources[resource].used

            for resource in ("sequences", "uploads"):
                self.wait(lambda name=resource: used(name) == 0, (point, resource))
            model = client.register_model(SPEC)
            local = mla_client.LocalReference()
            with model.open_sequence(prefix=Prefix(TOKENS[:ROWS], salt="s")) as sequence, \
                    local.register_model(SPEC).open_sequence() as want:
                self.assertEqual(sequence.length, ROWS if committed else 0)
                if committed:
                    add(local, want, TOKENS[:ROWS])
                np.testing.assert_allclose(add(client, sequence, TOKENS[12:14]),
                                           add(local, want, TOKENS[12:14]), atol=2e-2)
            model.unregister()  # nothing holds a sequence of it
            self.assertEqual(used("kv_bytes"), 0)

    def test_killed(self):
        clients = self.start()
        self.other.go_on()
        for client in clients.values():
            client.kill()
        self.other.go_on()
        for point in POINTS:
            with self.subTest(point):
                self.check(point, self.is_behind(point, "committed"))

    def test_stopped_for_longer_than_its_leases(self):
        clients = self.start()
        for client in clients.values():
            client.send_signal(signal.SIGSTOP)
        self.other.go_on()
        self.wait(lambda: self.blue.stats().sequences == 1, "sequences of the stopped clients")
        self.other.go_on()
        for client in clients.values():
            client.send_signal(signal.SIGCONT)
        for point, client in clients.items():
            with self.subTest(point):
                _, errors = client.communicate("\n", timeout=WAIT_S)
                if POINTS[point]:
                    self.assertIn(f"mla_client.errors.{POINTS[point]}:", errors)
                    self.check(point, self.is_behind(point, "committed"))
                else:  # it had nothing to lose and did all of its work
                    self.assertEqual(client.returncode, 0, errors)
                    self.check(point, True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2] in POINTS:
        work(*sys.argv[1:])
    else:
        unittest.main()
