"""Requests of SGLang whose server drains to another one and ends (see test_sglang.py)."""

import unittest

import mla_client
import test_sglang
from tests import peers


class MoveTest(peers.PeersCase):
    def setUp(self):
        super().setUp()
        test_sglang.plugin.register()
        self.addCleanup(test_sglang.doubles.ATTENTION_BACKENDS.clear)

    def start(self, **options):
        client = self.peers.connect("red", timeout_s=10.0, **options)
        self.addCleanup(client.close)
        self.engine = test_sglang.Engine(client)
        self.addCleanup(self.engine.backend._requests.close)

    def run_all(self, rows):
        """A batch, whose hidden states are right."""
        test_sglang.EngineTest.check(self, self.engine, self.engine.run(rows), tolerance=0.1)

    def test_requests_go_on_where_they_have_moved(self):
        self.start(follow_moves=True)
        self.run_all({"a": 5, "b": 3})
        self.assertEqual(sorted(one.rows for one in self.peers.drain().handed_over), [3, 5])
        self.run_all({"a": 1})
        self.peers.servers[0].stop()
        self.run_all({"b": 1})          # not asked for since
        self.run_all({"a": 1, "b": 1})
        self.run_all({"c": 4})          # new
        self.engine.finish("b")
        self.run_all({"a": 1, "c": 1})
        self.assertEqual(self.peers.sequences(1), 2)
        self.engine.backend.close()
        self.assertEqual(self.peers.sequences(1), 0)

    def test_without_following_the_peer_is_named(self):
        self.start()
        self.run_all({"a": 5})
        self.peers.drain()
        with self.assertRaisesRegex(mla_client.NotFound, self.peers.peer):
            self.run_all({"a": 1})


if __name__ == "__main__":
    unittest.main()
