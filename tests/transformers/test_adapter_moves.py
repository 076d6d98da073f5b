"""generate() of mla_client.transformers while its server drains to another one and ends."""

import threading
import unittest
from unittest import mock

import mla_client
import test_adapter
import torch
from mla_client import transformers as adapter
from mla_client.serving.batch import RemoteBatch
from tests import peers

RUN_SECONDS = 25
INPUTS = (".bazel/bin/server/mla-server", "client/python", "tests/engines",
          "tests/peers.py", "tests/transformers")
ENVIRONMENT = "transformers"
CACHE = test_adapter.CACHE


class MoveTest(peers.PeersCase):
    def generate_across(self, model, inputs, drain_at=3, stop_at=6, **options):
        """generate() while the server begins to drain at one pass, and ends before another pass,
        after it has told the client where its sequences are."""
        begin, passes = RemoteBatch.begin, []

        def hooked(batch, *arguments):
            passes.append(None)
            if len(passes) == drain_at:
                self.moving = threading.Thread(target=self.peers.drain)
                self.moving.start()
            if len(passes) == stop_at - 1:
                self.moving.join()
            if len(passes) == stop_at:
                self.peers.servers[0].stop()
            return begin(batch, *arguments)

        with mock.patch.object(RemoteBatch, "begin", hooked):
            got = test_adapter.run(model, inputs, **options)
        self.assertGreater(len(passes), stop_at)
        return got

    def compare(self, want, got):
        self.assertTrue(torch.equal(want.sequences, got.sequences))
        for a, b in zip(want.logits, got.logits):
            self.assertLess(float((a - b).abs().max()), 1e-3)

    def test_generate_goes_on_where_its_sequences_have_moved(self):
        for inputs, options in ((test_adapter.prompts(3), {}),
                                (test_adapter.prompts(2), {"num_beams": 3, "max_new_tokens": 10}),
                                (test_adapter.repeating(), {"prompt_lookup_num_tokens": 2,
                                                            "max_new_tokens": 24})):
            with self.subTest(**options):
                model = test_adapter.small()
                self.setUp()
                with self.peers.connect("red", timeout_s=10.0, follow_moves=True) as client, \
                        adapter.attach(model, client) as attached:
                    # The result equals the one without a move, which test_adapter compares with
                    # local attention.
                    want = test_adapter.run(model, inputs, **options, **{CACHE: attached.cache()})
                    test_adapter.cache_of(want).release()
                    got = self.generate_across(model, inputs, **options)
                    self.compare(want, got)
                    self.assertEqual(self.peers.sequences(1),
                                     test_adapter.cache_of(got).rows.batch.sequences)
                    # The text starts from the beginning, although the old server has ended.
                    self.compare(want, test_adapter.run(model, inputs, **options,
                                                        **{CACHE: attached.cache()}))
                    del got
                    attached.detach()
                    self.assertEqual(self.peers.sequences(1), 0)

    def test_without_following_the_peer_is_named(self):
        model = test_adapter.small()
        with self.peers.connect("red", timeout_s=10.0) as client, adapter.attach(model, client), \
                self.assertRaisesRegex(mla_client.NotFound, self.peers.peer):
            self.generate_across(model, test_adapter.prompts(3), stop_at=4)


if __name__ == "__main__":
    unittest.main()
