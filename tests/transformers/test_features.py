"""Every feature of generate() with attention on a server, whose cache rounds rows to bf16."""

import os
import unittest
from unittest import mock

import features
import mla_client
import seeded
import server_binary
import torch

RUN_SECONDS = 24
INPUTS = (".bazel/bin/client/c/libmla_client.so", ".bazel/bin/server/mla-server",
          "client/demo", "client/python", "tests/engines", "tests/transformers")
ENVIRONMENT = "transformers"
LONG = bool(os.environ.get("MLA_TEST_LONG"))
WHY_NO_UCX = server_binary.why_no_ucx()  # before another case loads the client's library
torch.set_num_threads(1)
# The model is small, except in the dimensions of heads and rows, which the server uses.
_SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
          "q_lora_rank": 64, "intermediate_size": 256, "moe_intermediate_size": 64,
          "num_hidden_layers": 3}
_UNIT, _NEW_TOKENS = 24, 12


class FeaturesTest(unittest.TestCase):
    """Two architectures, each with one transport."""

    @classmethod
    def setUpClass(cls):
        cls.server = server_binary.start()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def check(self, transport, kind, server=None, **changes):
        model, assistant = seeded.pair(kind, **{**_SMALL, **changes})
        with mla_client.Client.connect((server or self.server).target,
                                       transport=transport) as client:
            self.assertTrue(features.check(
                model, assistant, "cpu", features.remote_of(client, model),
                features.remote_of(client, model, assistant), print, _UNIT, _NEW_TOKENS))
            self.assertEqual(client.sequences(), [])

    def test_deepseek_v3(self):
        self.check("ring", "deepseek_v3")

    def test_deepseek_v2(self):
        self.check("inline", "deepseek_v2", q_lora_rank=None)

    def test_over_ucx(self):
        if WHY_NO_UCX:
            self.skipTest(WHY_NO_UCX)
        with mock.patch.dict(os.environ, UCX_TLS="tcp"), \
                server_binary.start("--ucx-enabled=true", "--ucx-puts=true") as server:
            for transport in ("ucx", "ucx_puts") if LONG else ("ucx_puts",):
                with self.subTest(transport):
                    self.check(transport, "deepseek_v3", server)


if __name__ == "__main__":
    unittest.main()
