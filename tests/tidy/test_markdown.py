"""Links in Markdown resolve: files exist and anchors name a heading."""

import pathlib
import re
import unittest

import test_tidy

ROOT = test_tidy.ROOT
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def prose(text):
    """The text without fenced code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(text):
    """The anchors that a renderer makes of the headings."""
    found = set()
    for heading in re.findall(r"^#+\s+(.*?)\s*$", prose(text), flags=re.M):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def broken_links(path):
    """Links of one file that lead nowhere."""
    folder = (ROOT / path).parent
    for target in LINK.findall(prose(test_tidy.read(path))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (folder / name).resolve() if name else ROOT / path
        if not file.exists():
            yield f"{path}: {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield f"{path}: {target}: no such heading"


class MarkdownTest(unittest.TestCase):
    def test_links_resolve(self):
        files = test_tidy.tracked(".md")
        self.assertIn("README.md", files)
        broken = [fault for path in files for fault in broken_links(path)]
        self.assertFalse(broken, "\n" + "\n".join(broken))

    def test_every_adr_is_listed(self):
        listing = test_tidy.read("docs/adr/README.md")
        decisions = [path for path in test_tidy.tracked(".md")
                     if re.match(r"docs/adr/(?:\w+/)?\d{4}-", path)]
        missing = [path for path in decisions if pathlib.Path(path).name not in listing]
        self.assertFalse(missing, "not in docs/adr/README.md: " + ", ".join(missing))


if __name__ == "__main__":
    unittest.main()
