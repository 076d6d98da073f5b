"""Every feature of generate() for every architecture.

Most models are like those of test_features.py: small, except in the dimensions of heads and rows,
which the server uses. check.py has larger ones, for a machine with a GPU.
"""

import os
import unittest

import features
import mla_client
import seeded
import server_binary
import torch

ENVIRONMENT = "transformers"
GATE = False
# The server computes on the other cores. Threads of torch would spin next to its threads.
torch.set_num_threads(1)
_SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
          "q_lora_rank": 64, "intermediate_size": 256, "moe_intermediate_size": 64}
_UNIT, _NEW_TOKENS = 24, 12


class AllModelsTest(unittest.TestCase):
    """A model a test."""

    @classmethod
    def setUpClass(cls):
        cls.server = server_binary.start("--kv-cache-bytes=1GiB")

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def check(self, kind, unit=_UNIT, new=_NEW_TOKENS, **changes):
        model, assistant = seeded.pair(kind, **changes)
        with mla_client.Client.connect(self.server.target, lease_ms=60_000) as client:
            self.assertTrue(features.check(
                model, assistant, "cpu", features.remote_of(client, model),
                features.remote_of(client, model, assistant), print, unit, new))
            self.assertEqual(client.sequences(), [])

    def check_sparse(self, kind):
        """Rows see up to five times as many positions as their indexers choose."""
        small = {**_SMALL, "num_hidden_layers": 4, "index_topk": 16, "index_n_heads": 4}
        if os.environ["MLA_TEST_RELEASE"] != "5.17":
            self.check(kind, **small)
            return
        model = seeded.build(kind, **small)  # this release's models cache expanded keys
        with mla_client.Client.connect(self.server.target) as client:
            with self.assertRaisesRegex(mla_client.Unimplemented, "caches others"):
                with features.remote_of(client, model)():
                    model.generate(**features.prompts("cpu", 1, _UNIT), max_new_tokens=1)

    def test_deepseek_v2(self):
        self.check("deepseek_v2", **{**_SMALL, "q_lora_rank": None})

    def test_deepseek_v3(self):
        self.check("deepseek_v3", **_SMALL)

    def test_deepseek_v32(self):
        self.check_sparse("deepseek_v32")

    def test_glm_moe_dsa(self):
        self.check_sparse("glm_moe_dsa")

    def test_glm4_moe_lite(self):
        self.check("glm4_moe_lite", **_SMALL)

    def test_longcat_flash(self):
        self.check("longcat_flash", **_SMALL, ffn_hidden_size=256, expert_ffn_hidden_size=64)

    def test_youtu(self):
        self.check("youtu", **_SMALL)


if __name__ == "__main__":
    unittest.main()
