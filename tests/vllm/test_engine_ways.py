"""vLLM with attention on a server, in all configurations that a CPU supports."""

import json
import os
import unittest
from unittest import mock

import cases
import server_binary
import vllm_signatures

ENVIRONMENT = "vllm"
GATE = False
KILLED = [[6, "kill", 0], [7, "start", 0]]


class Ways(unittest.TestCase):
    def run_case(self, rounds, without=None, folder=None, **case):
        """Runs a case whose rounds must equal the library's. `without`: aborted rows by round."""
        folder = folder or cases.model()
        got = cases.run({"model": folder, "extra": cases.COLD, "rounds": rounds, **case})
        for number, rows in enumerate(got["rounds"]):
            if not rounds[number].get("prompts"):
                cases.check(self, rows, folder, (without or {}).get(number, ()))
        self.assertEqual({tuple(left) for left in got["counts"]["models_left"] if left}, {(0, 0)})
        return got["counts"]

    def test_chunked(self):
        # vLLM loses the log-probabilities of a prompt that restarts in its middle.
        again = {"logprobs": False, "events": KILLED}
        counts = self.run_case([{}, {"events": [[2, "abort", [4]]]}, again], without={1: [4]},
                               llm={"max_num_batched_tokens": 32})
        self.assertEqual(counts["largest"], 32)

    def test_preempted(self):
        counts = self.run_case([{}, {"events": KILLED}], llm={
            "num_gpu_blocks_override": 18, "block_size": 16, "max_model_len": 192})
        self.assertGreater(counts["preempted"], 0)

    def test_drafts(self):
        counts = self.run_case([{}, {"events": KILLED}], llm={"speculative_config": cases.NGRAM})
        self.assertGreater(counts["drafts_kept"], 0)

    def test_asynchronous(self):
        counts = self.run_case([{}, {"events": KILLED}, {"events": [[2, "abort", [3]]]}],
                               without={2: [3]}, **{"async": True})
        self.assertTrue(counts["async"])

    def test_asynchronous_chunked(self):
        counts = self.run_case([{}, {"logprobs": False, "events": KILLED}],
                               llm={"max_num_batched_tokens": 32}, **{"async": True})
        self.assertEqual((counts["async"], counts["largest"]), (True, 32))

    def test_a_pool_without_room(self):
        counts = self.run_case([{}, {}], server=[["--kv-cache-bytes=1MiB"]],
                               llm={"num_gpu_blocks_override": 512, "max_model_len": 192})
        self.assertGreater(counts["waits"], 0)

    def test_over_ucx(self):
        reason = server_binary.why_no_ucx()
        if reason:
            self.skipTest(reason)
        # By the memory of the machine: over TCP, UCX 1.13 may end the engine with its relay.
        with mock.patch.dict(os.environ, UCX_TLS="posix,cma"):
            for transport in ("ucx", "ucx_puts"):
                with self.subTest(transport):
                    self.run_case([{}, {"events": KILLED}], extra={
                        **cases.COLD, "transport": transport},
                        server=[["--ucx-enabled=true", "--ucx-puts=true"]])

    def test_two_ranks(self):
        self.run_case([{}, {}], llm={"tensor_parallel_size": 2})

    def test_two_ranks_and_a_server_that_is_killed(self):
        self.run_case([{"events": KILLED}, {}], llm={"tensor_parallel_size": 2},
                      **{"async": True})

    def test_two_stages(self):
        self.run_case([{}, {"events": KILLED}], llm={"pipeline_parallel_size": 2})

    def test_models(self):
        for kind, *options in (("deepseek_v2",), ("deepseek_v2", "--experts"),
                               ("deepseek_v3", "--experts", "--yarn")):
            with self.subTest(kind, options=options):
                self.run_case([{}], folder=cases.model(kind, *options))

    def test_the_next_server(self):
        counts = self.run_case([{"events": [[5, "drain", 0]]}, {}], server=[[], []])
        self.assertGreater(counts["failed"], 0)

    def test_a_server_that_stays_away(self):
        """Requests fail while the server is down, and the engine serves again when the server is
        back."""
        folder = cases.model()
        prompts = json.loads((folder / "prompts.json").read_text())
        got = cases.run({"model": folder, "extra": {**cases.COLD, "away_s": 0.5}, "rounds": [
            {"prompts": prompts, "events": [[5, "kill", 0]]}, {"events": [[0, "start", 0]]}]})
        self.assertEqual({row["finish"] for row in got["rounds"][0]}, {"error"})
        self.assertIn("fails: UNAVAILABLE", got["log"])
        cases.check(self, got["rounds"][1], folder)

    def test_prefixes_are_found_as_the_engine_finds_them(self):
        folder = cases.model()
        rounds = [{"logprobs": False}] * 2
        ours = cases.run({"model": folder, "rounds": rounds, "extra": {"page_size": 16}}
                         )["counts"]["found"]
        own = cases.run({"model": folder, "rounds": rounds, "own": True})["counts"]["found"]
        print(f"rows found: the server's cache {ours}, the engine's own {own}", flush=True)
        self.assertGreater(own, 0)
        self.assertGreaterEqual(ours, own)

    def test_the_engines_own_attention_agrees(self):
        self.run_case([{}], own=True)

    def test_nobody_there_is_seen_before_the_model_is_loaded(self):
        with self.assertRaisesRegex(AssertionError, "target unix:/nowhere/mla.sock"):
            cases.run({"extra": {"target": "unix:/nowhere/mla.sock"}, "rounds": []})

    def test_signatures(self):
        self.assertEqual(vllm_signatures.differences(), [])

    def test_signatures_of_a_release_that_does_not_run_on_cpus(self):
        """Both have gained arguments that may be left out."""
        self.assertEqual(vllm_signatures.between("0.32", "0.33"), [
            "vllm.v1.attention.backend.MLAAttentionImpl.do_kv_cache_update",
            "vllm.v1.core.sched.output.SchedulerOutput.__init__"])


if __name__ == "__main__":
    unittest.main()
