"""Every feature of generate() for every architecture, in the dimensions of check.py."""

import os
import unittest

import features
import mla_client
import seeded
import server_binary

ENVIRONMENT = "transformers"
GATE = False


class AllModelsTest(unittest.TestCase):
    """A model a test."""

    def check(self, kind):
        model, assistant = seeded.pair(kind)
        with server_binary.start("--kv-cache-bytes=1GiB") as server, \
                mla_client.Client.connect(server.target, lease_ms=60_000) as client:
            self.assertTrue(features.check(
                model, assistant, "cpu", features.remote_of(client, model),
                features.remote_of(client, model, assistant), print))

    def check_sparse(self, kind):
        if os.environ["MLA_TEST_RELEASE"] == "5.17":  # whose models cache expanded keys
            with self.assertRaisesRegex(mla_client.Unimplemented, "caches others"):
                self.check(kind)
            return
        self.check(kind)

    def test_deepseek_v2(self):
        self.check("deepseek_v2")

    def test_deepseek_v3(self):
        self.check("deepseek_v3")

    def test_deepseek_v32(self):
        self.check_sparse("deepseek_v32")

    def test_glm_moe_dsa(self):
        self.check_sparse("glm_moe_dsa")

    def test_glm4_moe_lite(self):
        self.check("glm4_moe_lite")

    def test_longcat_flash(self):
        self.check("longcat_flash")

    def test_youtu(self):
        self.check("youtu")


if __name__ == "__main__":
    unittest.main()
