"""vLLM with attention and its projections on a server: low-rank queries for hidden states."""

import pathlib
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
import cases

ENVIRONMENT = "vllm"
GATE = False
KILLED = [[6, "kill", 0], [7, "start", 0]]
PROJECTED = {"projected": True}


class Projected(unittest.TestCase):
    def run_case(self, rounds, folder, extra=None, **case):
        """Runs a case of PROJECTED whose rounds must equal the library's."""
        got = cases.run({"model": folder, "extra": {**PROJECTED, **cases.COLD, **(extra or {})},
                         "rounds": rounds, **case})
        for rows in got["rounds"]:
            cases.check(self, rows, folder)
        counts = got["counts"]
        self.assertEqual({tuple(left) for left in counts["models_left"]}, {(0, 0)})
        self.assertEqual(set(counts["rope_layouts"][0]), {"interleaved"})
        return counts

    def test_a_model_with_low_rank_queries(self):
        """A server that is killed in the middle gets all weights again, and what it was to compute
        meanwhile is computed by the worker with its own projections."""
        counts = self.run_case([{}, {"events": KILLED}, {"events": [[1, "kill", 0],
                                                                    [4, "start", 0]]}],
                               cases.model("deepseek_v3", "--yarn"))
        self.assertGreater(counts["failed"], 0)

    def test_a_model_whose_queries_are_made_of_hidden_states(self):
        self.run_case([{}, {"events": KILLED}], cases.model("deepseek_v2"))

    def test_prefixes(self):
        counts = self.run_case([{"logprobs": False}] * 2, cases.model(),
                               {"page_size": 16, "prefix_cache": True})
        self.assertGreater(counts["found"], 0)

    def test_drafts_and_chunks(self):
        """Positions of a pass follow from what of earlier drafts was right."""
        # vLLM loses the log-probabilities of a prompt that restarts in its middle.
        rounds = [{}, {"logprobs": False, "events": KILLED}]
        counts = self.run_case(rounds, cases.model(), llm={
            "speculative_config": cases.NGRAM, "max_num_batched_tokens": 32})
        self.assertGreater(counts["drafts_kept"], 0)

    def test_ranks_are_refused(self):
        with self.assertRaisesRegex(AssertionError, "projected with tensor parallelism"):
            cases.run({"rounds": [], "extra": PROJECTED, "llm": {"tensor_parallel_size": 2}})


if __name__ == "__main__":
    unittest.main()
