"""SGLang with its attention on a server, compared with what the library says of the same model."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import compare
import models

ENVIRONMENT = "sglang"
GATE = False
HERE = pathlib.Path(__file__).resolve().parent
CASE_TIMEOUT_S = 1800
# While the server is away there may be no token that an event could wait for.
KILLED = [[38, "kill", 0], [38, "start", 0]]
# The words of the log then, whichever call is the first to fail.
LOST = "mla: the server is away"


class EngineCase(unittest.TestCase):
    """Cases with a model and a process each."""

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def model(self, kind, **options):
        """The folder of a model; its positions are scaled, as SGLang's CPU platform wants them."""
        folder = self.folder / "-".join([kind, *options])
        if not folder.exists():
            models.write(kind, folder, yarn=True, **options)
        return folder

    def run_case(self, model, rounds, **case):
        """The program's results for a case: rows by round, and counts."""
        given, out = self.folder / "case.json", self.folder / "out.json"
        given.write_text(json.dumps({"model": str(model), "rounds": rounds, **case}))
        out.unlink(missing_ok=True)
        ended = subprocess.run([sys.executable, str(HERE / "engine.py"), given, out],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace", timeout=CASE_TIMEOUT_S, check=False,
                               env={**os.environ, "TMPDIR": str(self.folder)})
        self.assertTrue(out.exists(), ended.stdout[-6000:])
        said = json.loads(out.read_text())
        self.log = ended.stdout
        return said["rounds"], said["counts"]

    def compare(self, model, rows, prompts=True, length=0):
        """If `prompts` is true, log-probabilities of prompts are included."""
        want = json.loads((model / "reference.json").read_text())
        for row in rows:
            self.assertNotIn("error", row, self.log[-9000:])
        if not prompts:
            control = compare.compare(want, want).control
            want = [{**row, "prompt": []} for row in want]
            rows = [{**row, "prompt": []} for row in rows]
        found = compare.compare(want, rows, length=length)
        if not prompts:
            found.control = control
        print(found)
        self.assertTrue(found.ok, str(found))


class OneProcessTest(EngineCase):
    """An engine of one scheduler."""

    def test_prompts_in_chunks_and_prefixes(self):
        """Dense layers. Prompts are sent in chunks of 32, then sent again so that their rows are
        found on the server, then again after an abort."""
        model = self.model("deepseek_v3")
        rounds, counts = self.run_case(
            model, [{}, {"logprobs": False}, {"logprobs": False, "events": [[30, "abort", 3]]},
                    {}], engine={"chunked_prefill_size": 32})
        self.compare(model, rounds[0])
        self.assertEqual([row["found"] for row in rounds[0]], [0] * 5)
        self.compare(model, rounds[1], prompts=False)
        found = [row["found"] for row in rounds[1]]
        self.assertEqual(found, [length - 1 for length in models.LENGTHS])
        self.assertIn("error", rounds[2][3])
        self.compare(model, rounds[3])
        self.assertEqual(counts["sequences"], [0])

    def test_experts_and_low_rank_less_queries(self):
        model = self.model("deepseek_v2", experts=True)
        rounds, counts = self.run_case(model, [{}])
        self.compare(model, rounds[0])
        self.assertEqual(counts["sequences"], [0])

    def test_no_room_waits_and_a_restart_begins_again(self):
        """The pool has room for two of the five requests at a time. Then the server is killed while
        they run, and restarts while they wait."""
        model = self.model("deepseek_v3")
        rounds, counts = self.run_case(
            model, [{}, {"logprobs": False, "events": KILLED}, {}],
            server=[["--kv-cache-bytes=2MiB"]], engine={"disable_overlap_schedule": True})
        self.assertRegex(self.log, LOST)
        self.compare(model, rounds[0])
        self.compare(model, rounds[1], prompts=False)
        self.compare(model, rounds[2])
        self.assertEqual(counts["sequences"], [0])

    def test_a_restart_while_passes_overlap(self):
        """As SGLang starts by default: one more pass of lost requests is under way."""
        model = self.model("deepseek_v3")
        rounds, counts = self.run_case(
            model, [{"logprobs": False, "events": KILLED}, {}])
        self.assertRegex(self.log, LOST)
        self.compare(model, rounds[0], prompts=False)
        self.compare(model, rounds[1])
        self.assertEqual(counts["sequences"], [0])

    def test_a_restart_in_the_middle_of_prompts(self):
        """The first tokens come when the longer prompts have most of their passes before them."""
        model = self.model("deepseek_v3")
        for overlaps in (True, False):
            rounds, counts = self.run_case(
                model, [{"logprobs": False, "events": [[1, "kill", 0], [1, "start", 0]]}],
                engine={"chunked_prefill_size": 32, "disable_overlap_schedule": not overlaps})
            self.assertRegex(self.log, LOST)
            self.compare(model, rounds[0], prompts=False)
            self.assertEqual(counts["sequences"], [0])

    def test_a_drain_goes_on_at_the_second_server(self):
        model = self.model("deepseek_v3")
        rounds, counts = self.run_case(
            model, [{"logprobs": False, "events": [[30, "drain", 0]]}, {}], server=[[], []],
            engine={"disable_overlap_schedule": True})
        self.compare(model, rounds[0], prompts=False)
        self.compare(model, rounds[1])
        self.assertEqual(counts["sequences"], [0, 0])


class RanksTest(EngineCase):
    """Two processes, over gloo."""

    def test_two_ranks_share_the_heads(self):
        model = self.model("deepseek_v3")
        rounds, counts = self.run_case(model, [{}, {"logprobs": False}], engine={"tp_size": 2})
        self.compare(model, rounds[0])
        self.compare(model, rounds[1], prompts=False)
        self.assertGreater(rounds[1][-1]["found"], 0)
        self.assertEqual(counts["sequences"], [0])

    def test_two_ranks_have_requests_of_their_own(self):
        model = self.model("deepseek_v3")
        rounds, counts = self.run_case(
            model, [{}], engine={"tp_size": 2, "dp_size": 2, "enable_dp_attention": True})
        self.compare(model, rounds[0])
        self.assertEqual(counts["sequences"], [0])


if __name__ == "__main__":
    unittest.main()
