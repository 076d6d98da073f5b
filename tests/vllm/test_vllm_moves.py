"""Requests of vLLM whose server drains to another one and ends (see test_vllm.py)."""

import json
import unittest
from unittest import mock

import mla_client
import test_prefixes
import test_vllm
from mla_client.vllm.runtime import runtime
from tests import peers

AUTHORITY = None


def setUpModule():
    global AUTHORITY  # pylint: disable=global-statement
    AUTHORITY = peers.Authority()
    for name in ("red", "blue"):
        AUTHORITY.make(name)


def tearDownModule():
    AUTHORITY.close()


class MoveTest(test_prefixes.PrefixCase):
    def setUp(self):
        self.peers = peers.Peers(AUTHORITY)
        self.addCleanup(self.peers.close)
        self.addCleanup(test_vllm.doubles.op_registry_oot.clear)
        with mock.patch.dict(test_vllm.os.environ, {test_vllm.plugin.SWITCH: "1"}):
            test_vllm.plugin.register()

    def start(self, **options):
        """An engine with such a configuration of its connector, which vLLM takes as JSON."""
        target = f"127.0.0.1:{self.peers.ports[0]}"
        extra = json.loads(json.dumps({"tls": AUTHORITY.files("red"), "client_id": "vllm-e",
                                       "timeout_s": 10.0, **options}))
        self.worker = mla_client.Client.connect(target, **extra)
        self.addCleanup(self.worker.close)
        self.addCleanup(runtime.close)
        self.engine = test_vllm.Engine(self.worker, target=target, extra=extra)
        self.addCleanup(self.engine.scheduler.shutdown)
        self.engine.texts = {name: list(range(1 + place, 13 + place))
                             for place, name in enumerate("abcdefg")}

    def begin(self, name, tokens):
        self.assertEqual(self.ask(name, tokens), 0)
        self.run_all(name, tokens)

    def test_requests_go_on_where_they_have_moved(self):
        self.start(follow_moves=True)
        self.begin("a", 5)
        self.begin("b", 3)
        self.begin("c", 4)
        self.ask("d", 6)  # wait with sequences that have no rows, and which the worker has not seen
        self.ask("g", 6)
        moved = [one.rows for one in self.peers.drain().handed_over if one.outcome == 1]
        self.assertEqual(sorted(moved), [3, 4, 5])
        self.run_all("a", 6)
        self.run_all("d", 6)
        self.begin("e", 5)  # new: the old server takes none
        self.assertEqual(self.peers.sequences(1), 5)
        self.peers.servers[0].stop()
        self.run_all("b", 4)  # not asked for since
        self.run_all("a", 7)
        self.begin("f", 5)
        self.run_all("g", 6)
        self.finish("c", 5)  # likewise, and ends
        for name in "abdefg":
            self.finish(name, len(self.engine.texts[name]))
        self.assertEqual(self.peers.sequences(1), 0)

    def test_without_following_the_peer_is_named(self):
        self.start()
        self.begin("a", 5)
        self.peers.drain()
        with self.assertRaisesRegex(mla_client.NotFound, self.peers.peer):
            self.run_all("a", 6)


if __name__ == "__main__":
    unittest.main()
