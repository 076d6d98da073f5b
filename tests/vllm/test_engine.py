"""vLLM with attention on a server, in the quick tests: plain, prefixes, a server that is killed."""

import unittest

import cases

RUN_SECONDS = 30
INPUTS = (".bazel/bin/client/c/libmla_client.so", ".bazel/bin/server/mla-server",
          "client/python", "tests/engines", "tests/vllm")
ENVIRONMENT = "vllm"


class Engine(unittest.TestCase):
    """All cases use one engine, because its start takes longer than the cases."""

    @classmethod
    def setUpClass(cls):
        cls.folder = cases.model()
        cls.got = cases.run({"model": cls.folder, "rounds": [
            {"logprobs": True}, {"logprobs": False}, {"logprobs": False},
            {"logprobs": False, "events": [[6, "kill", 0], [7, "start", 0]]},
            {"events": [[1, "kill", 0], [4, "start", 0]]}]})

    def test_plain(self):
        cases.check(self, self.got["rounds"][0], self.folder)

    def test_prefixes(self):
        for number in (1, 2):
            cases.check(self, self.got["rounds"][number], self.folder)
        counts = self.got["counts"]
        # By the last of these rounds, all whole pages of the prompts are on the server.
        self.assertGreater(counts["found"], 0)

    def test_server_is_killed(self):
        for number in (3, 4):
            cases.check(self, self.got["rounds"][number], self.folder)
        self.assertGreater(self.got["counts"]["failed"], 0)

    def test_flags_are_not_needed(self):
        counts = self.got["counts"]
        self.assertGreater(counts["blocks"], 100)
        self.assertLess(counts["blocks"], 65536)

    def test_the_model_is_released(self):
        self.assertEqual(self.got["counts"]["models_left"], [[0, 0]])


if __name__ == "__main__":
    unittest.main()
