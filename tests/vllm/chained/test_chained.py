"""vLLM with chained calls, on a fake GPU: plain, and a server that is killed."""

import pathlib
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
import cases

ENVIRONMENT = "vllm"
GATE = False  # more time than the quick run has
LIBRARY = cases.ROOT / ".bazel/bin/client/c/libmla_client.so"


class Engine(unittest.TestCase):
    """All cases use one engine, because its start takes longer than the cases."""

    @classmethod
    def setUpClass(cls):
        cls.folder = cases.model()
        cls.got = cases.run({"model": cls.folder, "gpu": True, "env": {
            "MLA_CLIENT_LIBRARY": str(LIBRARY)}, "rounds": [
                {"logprobs": True}, {"logprobs": False},
                {"logprobs": False, "events": [[6, "kill", 0], [7, "start", 0]]}]})

    def test_tokens_are_the_librarys(self):
        for number in (0, 1):
            cases.check(self, self.got["rounds"][number], self.folder)

    def test_a_server_that_is_killed_costs_no_tokens(self):
        cases.check(self, self.got["rounds"][2], self.folder)
        self.assertGreater(self.got["counts"]["failed"], 0)

    def test_most_layers_go_the_short_way(self):
        counts = self.got["counts"]
        # The first layer of a pass does not, nor do passes that wait for anything.
        self.assertGreater(counts["short"], counts["passes"])


class FirstPassTest(unittest.TestCase):
    """vLLM keeps the first token of a request whose rows are lost in the pass that made it."""

    def test_a_server_that_is_killed_in_a_first_pass_costs_no_tokens(self):
        folder = cases.model()
        got = cases.run({"model": folder, "gpu": True, "kill_in": [1, 1], "env": {
            "MLA_CLIENT_LIBRARY": str(LIBRARY)}, "rounds": [{"logprobs": False}]})
        self.assertEqual(got["counts"]["failed"], 1)
        cases.check(self, got["rounds"][0], folder)


if __name__ == "__main__":
    unittest.main()
