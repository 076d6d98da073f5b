"""Answers of a server that has restarted, or of another server that a balancer chose."""

import pathlib
import sys
import unittest

import mla_client
from mla_client.gen import sequence_pb2

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "faults"))

import hostile_server  # noqa: E402


class AnotherServerTest(unittest.TestCase):
    def setUp(self):
        self.server = hostile_server.HostileServer()
        self.addCleanup(self.server.close)
        self.client = mla_client.Client.connect(self.server.target, timeout_s=5.0)
        self.addCleanup(self.client.close)
        self.server.answers["Get"] = lambda request, context: sequence_pb2.GetReply(boot_id=1)

    def info(self, **fields):
        def answer(request, context):
            reply = hostile_server.info()
            for name, value in fields.items():
                setattr(reply, name, value)
            return reply
        self.server.answers["GetServerInfo"] = answer

    def reason(self, kind):
        for _ in range(2):  # it stays so
            with self.assertRaises(kind) as caught:
                self.client.sequences()
        return caught.exception.detail.reason

    def test_a_process_that_has_just_started_is_a_restart(self):
        self.info(boot_id=1, uptime_ms=10)
        self.assertEqual(self.reason(mla_client.ServerRestarted), "server_restarted")

    def test_a_process_that_ran_before_the_last_answer_is_another_server(self):
        self.info(boot_id=1, uptime_ms=3_600_000)
        self.assertEqual(self.reason(mla_client.AnotherServer), "another_server")

    def test_a_first_server_that_answers_again_was_not_restarted(self):
        self.info(uptime_ms=10)  # with the first boot id
        self.assertEqual(self.reason(mla_client.AnotherServer), "another_server")

    def test_neither_is_the_other(self):
        self.assertFalse(issubclass(mla_client.AnotherServer, mla_client.ServerRestarted))


if __name__ == "__main__":
    unittest.main()
