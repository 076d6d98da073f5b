"""Figures of the tree's structure and English, at any commit.

    tests/tidy/house.py [COMMIT]     without it, the files of the work tree

Prints, for kernels, scheduler, server and client: rooms (folders with code), arrows (folders that a
folder includes), arrows up (against the floors of test_rooms.py), floors (the longest way down) and
cycles. For the whole tree: folders, files, folders over the bound of units, long files, classes
whose functions lie in two or more sources, types a thousand lines, marked sentences of comments by
folder (test_markers.py), and commits without a body.
"""

import argparse
import collections
import pathlib
import re
import subprocess

from test_markers import shares
from test_rooms import FLOORS, MAX_UNITS, UNIT

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE = (".cc", ".h", ".hip", ".inc")
PACKAGES = ("kernels", "scheduler", "server", "client")
LONG, LONG_CLASS = 500, 1000
INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.M)
TYPE = re.compile(r"^\s*(?:struct|class|enum class|enum)\s+\w+[^;]*\{", re.M)
OWN_CLASS = re.compile(r"^(?:class|struct) (\w+)[^;]*\{", re.M)  # one that only a source sees
MEMBER = re.compile(r"^(?! )(?:[\w:<>,&* ]*[ *&])?([A-Z]\w+)::~?\w+\(", re.M)


def git(*arguments):
    """Returns the output of git."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout


class Tree:
    """The code files of a commit, or of the work tree."""

    def __init__(self, commit=""):
        names = (git("ls-tree", "-r", "--name-only", commit) if commit else
                 git("ls-files")).split("\n")
        self.files = [name for name in names if name and not name.startswith("third_party/")]
        self.text = {}
        for name in self.files:
            if name.endswith(CODE) or name.endswith(".py"):
                self.text[name] = (git("show", f"{commit}:{name}") if commit else
                                   (ROOT / name).read_text(encoding="utf-8"))

    def code(self):
        """Names of C++ and device sources."""
        return [name for name in self.text if name.endswith(CODE)]


def folder(name):
    """The folder of a file."""
    return pathlib.PurePosixPath(name).parent.as_posix()


def arrows(tree, package):
    """{folder: folders that its sources include}, within a package and without tests."""
    edges = collections.defaultdict(set)
    for name in tree.code():
        if not name.startswith(package + "/") or "_test." in name:
            continue
        edges[folder(name)]  # pylint: disable=pointless-statement
        for found in INCLUDE.findall(tree.text[name]):
            if found in tree.text and found.startswith(package + "/"):
                if folder(found) != folder(name):
                    edges[folder(name)].add(folder(found))
    return edges


def cycles(edges):
    """Groups of folders that include each other."""
    reach = {start: set(after) for start, after in edges.items()}
    for middle in list(reach):
        for start in reach:
            if middle in reach[start]:
                reach[start] |= reach[middle]
    groups = {frozenset(other for other in reach if other in reach[one] and one in reach[other])
              for one in reach if one in reach[one]}
    return sorted(map(sorted, groups))


def depth(edges):
    """Folders on the longest way down."""
    known = {}

    def measure(one, above):
        if one in above:
            return 0
        if one not in known:
            known[one] = 1 + max((measure(other, above | {one}) for other in edges.get(one, ())),
                                 default=0)
        return known[one]
    return max((measure(one, frozenset()) for one in edges), default=0)


def arrows_up(edges, package):
    """Arrows that lead to a higher floor, or to a folder without one."""
    floors = FLOORS.get(package)
    if floors is None:
        return 0
    place = {(f"{package}/{room}" if room else package): index
             for index, room in enumerate(floors)}
    return sum(place.get(other, len(floors)) > place[one]
               for one, others in edges.items() if one in place for other in others)


def classes_cut(tree):
    """{class: sources} of those with functions in two or more sources."""
    found = collections.defaultdict(set)
    for name in tree.code():
        if name.endswith(".cc") and not name.endswith("_test.cc"):
            own = set(OWN_CLASS.findall(tree.text[name]))
            for match in set(MEMBER.findall(tree.text[name])) - own:
                found[(name.split("/")[0], match)].add(name)
    return {key[1]: sorted(names) for key, names in found.items() if len(names) > 1}


def full_folders(tree):
    """{folder: units} of folders over the bound."""
    units = collections.defaultdict(set)
    for name in tree.files:
        base = name.rsplit("/", 1)[-1]
        if UNIT.search(base):
            units[folder(name)].add(UNIT.sub("", base))
    return {one: len(names) for one, names in units.items() if len(names) > MAX_UNITS}


def report(tree, commit):
    """The lines that are printed."""
    for package in PACKAGES:
        edges = arrows(tree, package)
        yield (f"{package}: {len(edges)} rooms, {sum(map(len, edges.values()))} arrows, "
               f"{arrows_up(edges, package)} up, {depth(edges)} floors, "
               f"{len(cycles(edges))} cycles")
    folders = {folder(name) for name in tree.files}
    yield f"folders {len(folders)}, files {len(tree.files)}"
    full = full_folders(tree)
    yield f"folders over {MAX_UNITS} units: {len(full)} {dict(sorted(full.items()))}"
    long = {name: count for name in tree.code()
            if (count := tree.text[name].count("\n")) > LONG}
    yield (f"files over {LONG} lines: {len(long)}, over {LONG_CLASS}: "
           f"{sum(count > LONG_CLASS for count in long.values())}")
    cut = classes_cut(tree)
    yield f"classes in two or more sources: {len(cut)} {sorted(cut)}"
    product = [name for name in tree.code()
               if not name.startswith("tests/") and not name.endswith("_test.cc")]
    lines = sum(tree.text[name].count("\n") for name in product)
    types = sum(len(TYPE.findall(tree.text[name])) for name in product)
    yield f"types {types} in {lines} lines of the product: {1000 * types / lines:.1f} a thousand"
    marks = shares({name: tree.text[name] for name in tree.code()})
    yield "marked sentences: " + ", ".join(f"{top} {100 * marked / total:.1f} % of {total}"
                                           for top, (marked, total) in sorted(marks.items()))
    bodies = git("log", "--no-merges", "--format=%x01%b", commit or "HEAD").split("\x01")[1:]
    yield f"commits {len(bodies)}, without a body {sum(not body.strip() for body in bodies)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="")
    commit = parser.parse_args().commit
    for line in report(Tree(commit), commit):
        print(line)


if __name__ == "__main__":
    main()
