"""The page on sizing, docs/start/sizing.md: its commands run, and its table is what they print."""

import json
import os
import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("BINARIES_UNDER_TEST", ROOT / ".bazel/bin"))
PAGE = ROOT / "docs/start/sizing.md"
ROW = re.compile(r"^\| (\w+) \| ([\d,]+) \| ([\d.]+) million \| (\d+) \|$", re.M)


def mlactl(words):
    """What the command prints; raises if it fails."""
    return subprocess.run([str(BINARIES / "client/mlactl/mlactl"), *words], text=True, check=True,
                          stdin=subprocess.DEVNULL, capture_output=True).stdout


class SizingPageTest(unittest.TestCase):
    def setUp(self):
        self.text = PAGE.read_text(encoding="utf-8")
        self.commands = [line.split()[1:] for line in
                         re.findall(r"^    (mlactl size .*)$", self.text, re.M)]

    def test_the_commands_run(self):
        self.assertEqual(len(self.commands), 2)
        for words in self.commands:
            self.assertIn("servers", mlactl(words))

    def test_the_table_is_what_the_first_command_prints_for_each_format(self):
        rows = ROW.findall(self.text)
        self.assertEqual([row[0] for row in rows], ["bf16", "fp8_row", "fp8_tensor"])
        for kv_format, token_bytes, millions, conversations in rows:
            size = json.loads(mlactl([*self.commands[0], f"--kv-format={kv_format}", "--json"]))
            self.assertEqual(
                (f"{size['token_bytes']:,}", f"{size['server_tokens'] / 1e6:.2f}",
                 str(size["server_sessions"])), (token_bytes, millions, conversations))
            # The text has two more of its figures, which no format of rows changes.
            self.assertIn(f"{size['step_bytes'] / 1e6:.1f} MB for", self.text)
            self.assertIn(f"{size['weight_bytes'] / 2**30:.1f} GiB for", self.text)


if __name__ == "__main__":
    unittest.main()
