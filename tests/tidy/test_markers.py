"""Comments are plain: few sentences have a mark that makes a stranger read them twice.

A marked sentence of a comment begins with a word that hides its subject, uses `behind` or `beside`
for an order, or has one of a few phrases that plain English does without.
"""

import collections
import re
import unittest

from test_tidy import CPP, read, tracked

MARKER = re.compile(
    r"^(Of|What|Whether|Those|That|As of|How|Where|Why|Who|Whom|Whose|Which)\b|"
    r"\bthose (that|of)\b|\b(beside|behind)\b|\bis no\b|"
    r"\bbut for\b|\blikewise\b|\bmeanwhile\b|\bonce more\b|\bso many\b")
COMMENT = re.compile(r"\s*///?\s?(.*)")
LEAST_WORDS = 3  # a sentence has at least this many; fewer words are a label
MAX_SHARE = 0.02  # of a folder's sentences; one marked sentence is always allowed
# Folders with a larger share, and their number of marked sentences. The numbers may only fall.
TOO_MANY = {}


def sentences(text):
    """The sentences of the line comments of a C++ source. Neighbouring lines are one text."""
    lines = []
    for line in [*text.split("\n"), ""]:
        found = COMMENT.match(line)
        if found:
            lines.append(found[1].strip())
            continue
        for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(lines)):
            if len(sentence.split()) >= LEAST_WORDS:
                yield sentence
        lines = []


def top_folder(path):
    """The folder of the root that a file lies in, or the file if it lies in the root."""
    return path.split("/")[0]


def subfolder(path):
    """The first two folders of a path; "top/*" for a file that lies in a top folder."""
    folders = path.split("/")[:-1]
    return "/".join(folders[:2]) if len(folders) > 1 else f"{folders[0]}/*"


def shares(texts, folder=top_folder):
    """{folder: (marked sentences, sentences)} of {path: text}."""
    totals, marked = collections.Counter(), collections.Counter()
    for path, text in texts.items():
        for sentence in sentences(text):
            totals[folder(path)] += 1
            marked[folder(path)] += bool(MARKER.search(sentence))
    return {name: (marked[name], totals[name]) for name in totals}


def limit(folder, total):
    """The number of marked sentences that a folder with `total` sentences may have."""
    return TOO_MANY.get(folder, max(1, int(MAX_SHARE * total)))


class MarkersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.texts = {path: read(path) for path in tracked(*CPP)}
        cls.shares = {**shares(cls.texts), **shares(cls.texts, subfolder)}

    def marked(self, folder):
        """Yields "path: sentence" for each marked sentence of a folder."""
        for path, text in self.texts.items():
            if folder in (top_folder(path), subfolder(path)):
                for sentence in sentences(text):
                    if MARKER.search(sentence):
                        yield f"  {path}: {sentence}"

    def test_few_sentences_are_marked(self):
        faults = []
        for folder, (marked, total) in sorted(self.shares.items()):
            if marked > limit(folder, total):
                faults.append(f"{folder}: {marked} of {total} sentences, "
                              f"limit {limit(folder, total)}:")
                faults += self.marked(folder)
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_the_table_has_no_folder_within_the_bound(self):
        for folder in TOO_MANY:
            marked, total = self.shares[folder]
            with self.subTest(folder):
                self.assertGreater(marked, max(1, int(MAX_SHARE * total)), "delete its row")

    def test_comments_were_read(self):
        for folder in ("client", "kernels", "scheduler", "server", "tests"):
            with self.subTest(folder):
                self.assertGreater(self.shares[folder][1], 500)

    def test_marks_are_found(self):
        for text, count in (("// Of this row, behind all rows.\n", 1),
                            ("// The row lies after all rows of its page.\n", 0),
                            ("// Returns a number. What is left\n// goes to the end.\n", 1),
                            ("// The copy runs beside\n// the kernel.\n", 1),
                            ("// One: Those before wait. Waits once more.\n", 2),
                            ("/// All rows but for the last.\n", 1),
                            ("int x;  // of a page\n", 0),
                            ("int behind = 0;\n", 0),
                            ("// What now\n", 0)):
            with self.subTest(text):
                marked = sum(bool(MARKER.search(sentence))
                             for sentence in sentences(text))
                self.assertEqual(marked, count)

    def test_folders_of_a_path(self):
        for path, top, sub in (("a/b/c/d.h", "a", "a/b"), ("a/b/d.h", "a", "a/b"),
                               ("a/d.h", "a", "a/*")):
            with self.subTest(path):
                self.assertEqual((top_folder(path), subfolder(path)), (top, sub))


if __name__ == "__main__":
    unittest.main()
