"""Tests a server that is stopped for longer than its clients' leases. Messages that clients sent
during that time wait in its sockets and must still count."""

import os
import signal
import time
import unittest

import mla_client
import numpy as np
import server_binary
from mla_client import Profile
from service_contract import GEOMETRY, LAYERS, SCALE

RUN_SECONDS = 19
LEASE_MS = 4000  # leases of sequences and steps
PAUSE_S = 7.0
SEQUENCES = 5
SPEC = mla_client.ModelSpec("m", GEOMETRY, LAYERS, SCALE)


class PausedServerTest(unittest.TestCase):
    def setUp(self):
        self.server = server_binary.start(
            f"--limits-sequence-lease-ms={LEASE_MS}", f"--limits-step-lease-ms={LEASE_MS}")
        self.addCleanup(self.server.stop)

    def pause(self):
        os.kill(self.server.pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(self.server.pid, signal.SIGCONT)

    def attend(self, step, layer):
        step.attend(layer, np.zeros((1, GEOMETRY.num_heads, GEOMETRY.q_dim(Profile.ABSORBED))),
                    np.ones((1, GEOMETRY.row_dim)), Profile.ABSORBED)

    def test_renewals_that_arrived_during_a_pause_count(self):
        with mla_client.Client.connect(self.server.target, timeout_s=60.0) as client:
            model = client.register_model(SPEC)
            sequences = [model.open_sequence() for _ in range(SEQUENCES)]
            with client.step([(sequences[0], 1)]) as step:
                self.attend(step, 0)
                self.pause()
                # The step, its sequence and the others still exist, although all leases have
                # passed.
                for layer in range(1, LAYERS):
                    self.attend(step, layer)
            self.assertEqual(sequences[0].length, 1)
            self.assertEqual(len(client.sequences()), SEQUENCES)

    def test_clients_that_have_gone_keep_nothing(self):
        with mla_client.Client.connect(self.server.target, timeout_s=60.0) as client:
            client.register_model(SPEC).open_sequence()
        self.pause()
        with mla_client.Client.connect(self.server.target, timeout_s=60.0) as client:
            while client.stats().sequences > 0:
                time.sleep(0.05)


if __name__ == "__main__":
    unittest.main()
