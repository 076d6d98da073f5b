"""Comments are plain: few sentences carry a mark of those that a stranger reads twice."""

import unittest

import markers
from test_tidy import CPP, read, tracked

MOST = 0.02  # of a top folder's sentences
# Folders that have more, with their share at most: these numbers may only fall.
MORE = {"client": 0.027}


class MarkersTest(unittest.TestCase):
    def test_few_sentences_are_marked(self):
        shares = markers.shares({path: read(path) for path in tracked(*CPP)})
        faults = [f"{top}: {marked} of {total} sentences"
                  for top, (marked, total) in sorted(shares.items())
                  if marked > MORE.get(top, MOST) * total]
        faults += [f"{top}: take it out of MORE" for top in MORE
                   if shares[top][0] <= MOST * shares[top][1]]
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_marks_are_found(self):
        for text, count in (("// Of this row, behind all rows.\n", 1),
                            ("// The row lies after all rows of its page.\n", 0),
                            ("// Returns a number. What is left\n// goes to the end.\n", 1),
                            ("int x;  // of a page\n", 0),
                            ("// What now\n", 0)):
            with self.subTest(text):
                marked = sum(bool(markers.MARKER.search(sentence))
                             for sentence in markers.sentences(text))
                self.assertEqual(marked, count)


if __name__ == "__main__":
    unittest.main()
