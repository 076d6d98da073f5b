"""Marks of sentences that a stranger reads twice: their number may only fall (test_markers.py).

A marked sentence of a comment begins with a word that hides its subject, uses `behind` or `beside`
for an order, or has one of a few phrases that plain English does without.
"""

import collections
import re

MARKER = re.compile(
    r"^(Of|What|Whether|Those|That|As of)\b|\bthose (that|of)\b|\b(beside|behind)\b|\bis no\b|"
    r"\bbut for\b|\blikewise\b|\bmeanwhile\b|\bonce more\b|\bso many\b")
COMMENT = re.compile(r"\s*///?\s?(.*)")
LEAST_WORDS = 3  # of a sentence; fewer are a label


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


def shares(texts):
    """{top folder: (marked sentences, sentences)} of {path: text}."""
    totals, marked = collections.Counter(), collections.Counter()
    for path, text in texts.items():
        top = path.split("/")[0]
        for sentence in sentences(text):
            totals[top] += 1
            marked[top] += bool(MARKER.search(sentence))
    return {top: (marked[top], totals[top]) for top in totals}
