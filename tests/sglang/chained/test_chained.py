"""SGLang with chained calls, on a fake GPU."""

import os
import pathlib
import sys
import unittest
from unittest import mock

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
from test_engine import LOST, EngineCase

ENVIRONMENT = "sglang"
GATE = False
LIBRARY = pathlib.Path(__file__).resolve().parents[3] / ".bazel/bin/client/c/libmla_client.so"


class ChainedTest(EngineCase):
    def setUp(self):
        patch = mock.patch.dict(os.environ, {"MLA_CLIENT_LIBRARY": str(LIBRARY)})
        patch.start()
        self.addCleanup(patch.stop)

    def checked(self, **case):
        """Rounds of one engine with calls that are chained have the library's tokens."""
        model = self.model("deepseek_v3")
        rounds, counts = self.run_case(model, [{"logprobs": False}, {"logprobs": False}], gpu=True,
                                       **case)
        self.assertIn("a call is chained", self.log)
        for rows in rounds:
            self.compare(model, rows, prompts=False)
        self.assertEqual(counts["sequences"], [0])

    def test_tokens_are_the_librarys(self):
        self.checked()
        self.assertNotRegex(self.log, LOST)

    def test_a_server_that_is_killed_in_a_first_pass_costs_no_tokens(self):
        """The pass makes the first token of each request, which must not go out."""
        for overlaps in (True, False):
            with self.subTest(overlaps=overlaps):
                self.checked(kill_in=[1, 1], engine={"disable_overlap_schedule": not overlaps})
                self.assertRegex(self.log, "pass .* failed at layer")


del EngineCase  # it has cases of its own elsewhere

if __name__ == "__main__":
    unittest.main()
