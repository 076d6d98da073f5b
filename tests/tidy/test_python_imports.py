"""Imports of the Python client go one way: its modules and packages form no circle.

A package counts as one, with all that it holds. Imports for types alone count, and so do those
inside functions.
"""

import ast
import pathlib
import unittest

from test_tidy import ROOT, tracked

NAME = "mla_client"


def part_of(module):
    """Returns the client's module or package that the name belongs to, or None for other libraries.
    """
    parts = module.split(".")
    return parts[1] if parts[0] == NAME and len(parts) > 1 else None


def imported(tree):
    """Names of all modules that a file imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == NAME:
                yield from (f"{NAME}.{name.name}" for name in node.names)
            else:
                yield node.module


def uses(files):
    """For each part of the client, the parts that it imports. `files`: path below the package ->
    text."""
    found = {path.parts[0].removesuffix(".py"): set() for path in files}
    for path, text in files.items():
        part = path.parts[0].removesuffix(".py")
        others = {part_of(module) for module in imported(ast.parse(text))}
        found[part] |= (others & set(found)) - {part}
    return found


def circle_in(graph):
    """Returns a circle of names, or an empty list."""
    done = set()

    def follow(name, path):
        if name in path:
            return [*path[path.index(name):], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            circle = follow(other, [*path, name])
            if circle:
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := follow(name, []))), [])


class ImportsTest(unittest.TestCase):
    def test_the_client_has_no_circle(self):
        package = f"client/python/{NAME}/"
        files = {pathlib.PurePosixPath(path[len(package):]): (ROOT / path).read_text()
                 for path in tracked(".py")
                 if path.startswith(package) and path != f"{package}__init__.py"}
        graph = uses(files)
        self.assertGreater(len(graph), 10)
        self.assertIn("errors", graph["client"])
        self.assertEqual(circle_in(graph), [])

    def test_circles_are_found(self):
        files = {pathlib.PurePosixPath("a.py"): "from mla_client import b",
                 pathlib.PurePosixPath("b/__init__.py"): "import mla_client.b.inner",
                 pathlib.PurePosixPath("b/inner.py"):
                     "def f():\n    from mla_client.c.deep import x",
                 pathlib.PurePosixPath("c/deep.py"):
                     "if TYPE_CHECKING:\n    from mla_client.a import y"}
        self.assertEqual(circle_in(uses(files)), ["a", "b", "c", "a"])
        del files[pathlib.PurePosixPath("c/deep.py")]
        files[pathlib.PurePosixPath("c.py")] = "import sys"
        self.assertEqual(circle_in(uses(files)), [])


if __name__ == "__main__":
    unittest.main()
