"""The soak: a short run in the quick tests, half an hour in the long ones, and a run with a fault.
"""

import os
import pathlib
import shutil
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(ROOT / "client" / "python")]

# pylint: disable=wrong-import-position
import oracle
import soak

RUN_SECONDS = 18
WEIGHT = 2
INPUTS = (".bazel/bin/server/mla-server", "client/python", "tests/soak")
SERVER = os.environ.get("SERVER_UNDER_TEST", str(ROOT / ".bazel/bin/server/mla-server"))
LONG = bool(os.environ.get("MLA_TEST_LONG"))
SECONDS = 1800 if LONG else 4
SECONDS_OF_ENDS = 5 if LONG else 2
# Workers of the two runs with a fault of their own: one a tenant.
FEWER = soak.WORKERS if LONG else len(soak.TENANTS)
PLANTED_SECONDS = 1800  # at most; the run ends with the first wrong row


class SoakTest(unittest.TestCase):
    """Real processes of the server and of workers."""

    def test_no_row_and_no_output_is_wrong(self):
        failed, counts, _, folder = soak.soak(SECONDS, 20, SERVER)
        self.assertEqual(failed, "", folder)
        self.assertGreater(counts.get("step", 0), 0)
        if LONG:
            self.assertEqual([verb for verb in soak.VERBS if not counts.get(verb)], [])
        shutil.rmtree(folder)

    def test_a_run_ends_well_whatever_was_done_last(self):
        """Bounds below what tenants use, and a worker that has just begun."""
        with tempfile.TemporaryDirectory(prefix="mla-soak-") as folder:
            run = soak.Soak(pathlib.Path(folder), 22, SERVER, FEWER)
            try:
                run.start()
                self.assertEqual(run.run(SECONDS_OF_ENDS), "")
                with run._operator() as operator:
                    for tenant in soak.TENANTS:
                        operator.set_quota(tenant, {"sequences": 1})
                run._kill()
                failed, _ = run.finish()
            finally:
                run.kill_all()
            self.assertEqual(failed, "")

    def test_a_wrong_row_is_found(self):
        failed, _, _, folder = soak.soak(PLANTED_SECONDS, 21, SERVER, plant=True,
                                          workers=FEWER)
        self.assertIn("worker 0 ended with status 1", failed, folder)
        shutil.rmtree(folder)


class OracleTest(unittest.TestCase):
    """The rows that the oracle makes."""

    def test_rows_depend_on_all_tokens_before_them(self):
        kind = oracle.KINDS[0]
        text, other = oracle.Text(kind, [5, 6, 7]), oracle.Text(kind, [4, 6, 7])
        self.assertFalse((text.bits(1, 0, 3) == other.bits(1, 0, 3)).all(axis=1).any())

    def test_rows_do_not_depend_on_how_a_text_was_made(self):
        kind = oracle.KINDS[1]
        grown = oracle.Text(kind, [5, 6]).extended([9]).first(2).extended([7, 8])
        self.assertEqual(grown.tokens, [5, 6, 7, 8])
        whole = oracle.Text(kind, [5, 6, 7, 8])
        for layer in range(oracle.LAYERS):
            self.assertTrue((grown.bits(layer, 0, 4) == whole.bits(layer, 0, 4)).all())


if __name__ == "__main__":
    unittest.main()
