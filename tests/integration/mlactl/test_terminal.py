"""mlactl on a terminal: colours, bars of long work, a result again and again; errors as plain text.
"""

import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import tempfile
import unittest

import mla_client
import numpy as np
import server_binary

ROOT = pathlib.Path(__file__).resolve().parents[3]
BINARIES = pathlib.Path(os.environ.get("BINARIES_UNDER_TEST", ROOT / ".bazel/bin"))
MLACTL = BINARIES / "client/mlactl/mlactl"
NO_SERVER = "127.0.0.1:1"
BAR = re.compile(r"\r\x1b\[K[^\r]*\[#*\.*\] +\d+ %")
CLEARED = "\x1b[H\x1b[J"
GEOMETRY = mla_client.Geometry(2, 64, 16, 16, 16)
ROWS = 300
SILENT_S = 120


class Terminal:
    """A command whose standard output and error are a terminal."""

    def __init__(self, *words, **environment):
        self._screen, other = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [MLACTL, *words], stdin=subprocess.DEVNULL, stdout=other, stderr=other,
            env={**os.environ, **environment})
        os.close(other)

    def read_until(self, enough):
        """Reads until `enough(text)`, or to the end of the command. A command that shows nothing
        for SILENT_S is killed, and the case fails."""
        while not enough(self.text):
            if not select.select([self._screen], [], [], SILENT_S)[0]:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"nothing for {SILENT_S} s after: {self.text!r}")
            try:
                some = os.read(self._screen, 4096)
            except OSError:  # the command has ended
                some = b""
            if not some:
                return
            self.text += some.decode()

    def finish(self):
        """The exit code, and all that was shown."""
        self.read_until(lambda text: False)
        os.close(self._screen)
        return self.process.wait(), self.text


def piped(*words):
    """The exit code, standard output and standard error of a command without a terminal."""
    done = subprocess.run([MLACTL, *words], stdin=subprocess.DEVNULL, capture_output=True,
                          check=False)
    return done.returncode, done.stdout.decode("ascii"), done.stderr.decode("ascii")


class TerminalTest(unittest.TestCase):
    def setUp(self):
        self.server = server_binary.start()
        self.addCleanup(self.server.stop)
        self.target = f"--target={self.server.target}"

    def sequence(self, client):
        """A sequence with rows."""
        model = client.register_model(mla_client.ModelSpec("m", GEOMETRY, 1, 0.1))
        sequence = model.open_sequence()
        with client.step([(sequence, ROWS)]) as step:
            step.attend(0, None, np.zeros((ROWS, GEOMETRY.kv_lora_rank + GEOMETRY.rope_dim)),
                        mla_client.Profile.APPEND_ONLY)
        return sequence

    def test_errors_are_red_on_a_terminal_unless_the_user_wants_no_colour(self):
        words = ("health", f"--target={NO_SERVER}", "--timeout-ms=300")
        red = "\x1b[31mmlactl:\x1b[0m UNAVAILABLE"
        for environment, coloured in (({}, True), ({"NO_COLOR": ""}, True),
                                      ({"NO_COLOR": "1"}, False)):
            code, text = Terminal(*words, **environment).finish()
            self.assertEqual((code, red in text), (2, coloured), text)
            self.assertEqual("\x1b" in text, coloured, text)
        code, out, err = piped(*words)
        self.assertEqual((code, out), (2, ""))
        self.assertNotIn("\x1b", err)
        self.assertIn("\nmlactl: no answer from the server: --target=ADDRESS, MLA_TARGET ", err)

    def test_long_work_has_a_bar_on_a_terminal_alone(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        rows = str(pathlib.Path(scratch.name) / "rows")
        with mla_client.Client.connect(self.server.target) as client:
            sequence = self.sequence(client)
            for words in (("bench", "--steps=2", "--warmup=0", "--context=64"),
                          ("export", f"{sequence.id:016x}", rows), ("import", "m", rows)):
                with self.subTest(words=words):
                    code, text = Terminal(*words, self.target).finish()
                    self.assertEqual(code, 0, text)
                    self.assertRegex(text, BAR)
                    code, _, err = piped(*words, self.target)
                    self.assertEqual(code, 0, err)
                    self.assertNotRegex(err, r"\x1b|\r|#")
            # A drain that waits for a step shows how far it is.
            step = client.step([(sequence, 1)]).begin()
            drain = Terminal("drain", self.target)
            drain.read_until(BAR.search)
            step.abort()
            code, text = drain.finish()
            self.assertEqual(code, 0, text)
            self.assertRegex(text, BAR)

    def test_watch_shows_the_result_again_until_it_is_interrupted(self):
        watched = Terminal("status", self.target, "--watch=0.1")
        watched.read_until(lambda text: text.count("boot_id") >= 3)
        watched.process.send_signal(signal.SIGINT)
        code, text = watched.finish()
        self.assertEqual(code, 130, text)
        self.assertGreaterEqual(text.count(CLEARED), 3)

    def test_refusals_are_words_and_name_no_time_of_zero(self):
        """Without the bytes of the detail; `piped` refuses all but ASCII."""
        refused = (("evict-model", "default", "none"), ("export", "1", "/nonexistent/rows"),
                   ("import", "none", "/nonexistent/rows"), ("restore", "1"))
        for words in refused:
            code, _, err = piped(*words, self.target)
            self.assertNotEqual(code, 0, words)
            self.assertRegex(err, r"^mlactl: [A-Z_]+: ", words)
            self.assertNotIn("retry after 0", err)
        self.assertEqual(piped("drain", self.target)[0], 0)
        code, _, err = piped("attend", self.target)
        self.assertEqual(code, 2, err)
        self.assertIn("reason draining", err)
        self.assertNotIn("retry after 0", err)

    def test_quotas_list_the_tenants_that_clients_named_and_no_other(self):
        for tenant in ("red", "blue"):
            self.assertEqual(piped("attend", self.target, f"--tenant={tenant}")[0], 0)
        code, out, err = piped("quotas", self.target, "-o", "wide")
        self.assertEqual(code, 0, err)
        named = {line.split()[0] for line in out.splitlines()[1:]}
        self.assertLessEqual({"red", "blue"}, named)
        self.assertLessEqual(named, {"(server)", "red", "blue", "default"})


if __name__ == "__main__":
    unittest.main()
