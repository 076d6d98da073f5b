"""Words that the tree does without: riddles, persons in place of parts, and names that a standard
term replaces. The comment of each line says what to write instead."""

import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
from test_tidy import read, tracked

# Regular expressions of whole words, in any case unless they contain a capital letter.
BANNED = (
    r"knock(s|ed|ing)?",                     # connect
    r"door",                                 # socket, listener
    r"greet\w*",                             # handshake
    r"errands?|desk|housekeep\w*",           # maintenance
    r"crumbs?",                              # small fragments
    r"seats?|polling duty",                  # poller thread, poll ownership
    r"patience",                             # timeout
    r"ladders?|rungs?",                      # candidates, selection
    r"signs? of life",                       # heartbeat
    r"loans?|lend(s|ing)?|lent",             # borrowed buffer
    r"sleeping words?",                      # waiter flag
    r"nobody|somebody|whoever|everybody",    # no thread, a client, every caller
    r"anew|in vain|lets? go of",             # again, without effect, releases
    r"shall",                                # must, or the plain present
    r"rare_path_begins",                     # exclude_from_report_begin
    r"TakeBack|Discharge|TakePlace|Departure",
    r"SliceTable|AttendPreparer|CopyTeam|TouchTeam|StreamPoller|BackendRung",
    r"slice_table|attend_preparer|copy_team|touch_team|stream_poller|process_end",
    r"kGrpc|(submit|complete)_bell",
)
# The start of a comment line. Banned words may be broken over two lines.
LEAD = re.compile(r"^\s*(//|#|\*)?\s*")
# Text of other authors, and text that the demo's model reads.
EXCEPT = re.compile(r"(.*/)?LICENSE|client/demo/text\.txt|tests/tidy/words/test_words\.py")


def pattern():
    insensitive = "|".join(word for word in BANNED if word.islower())
    exact = "|".join(word for word in BANNED if not word.islower())
    return re.compile(rf"\b(?:(?i:{insensitive})|{exact})\b")


def banned_in(text):
    """The banned words of a text with their line numbers, including words broken over two lines."""
    banned = pattern()
    lines = text.split("\n")
    for number, (line, after) in enumerate(zip(lines, lines[1:] + [""]), 1):
        for found in banned.finditer(line + " " + LEAD.sub("", after)):
            if found.start() < len(line):
                yield number, found.group(0)


class WordsTest(unittest.TestCase):
    def test_words_are_plain(self):
        faults = [f"{path}:{number}: {word}" for path in tracked() if not EXCEPT.match(path)
                  for number, word in banned_in(read(path))]
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_the_rule_finds_what_it_bans(self):
        for text in ("Nobody waits", "class SliceTable {", "copy_team.h", "a rung", "In vain",
                     "// it lets\n  // go of it"):
            self.assertEqual([1], [number for number, _ in banned_in(text)], text)
        for text in ("HeadSliceTable", "head_slice_table.h", "doorbell", "indoors"):
            self.assertEqual([], list(banned_in(text)), text)


if __name__ == "__main__":
    unittest.main()
