"""Promises of the documents: the quickstart runs as printed, and the package is typed."""

import ast
import contextlib
import inspect
import io
import re
import unittest

import mla_client
import server_binary


class QuickstartTest(unittest.TestCase):
    def test_snippet(self):
        text = (server_binary.ROOT / "client/quickstart.md").read_text()
        snippets = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        self.assertEqual(len(snippets), 1)
        server = server_binary.start()
        self.addCleanup(server.stop)
        self.assertIn("127.0.0.1:50551", snippets[0])
        code = snippets[0].replace("127.0.0.1:50551", server.target)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "quickstart.md", "exec"), {})  # pylint: disable=exec-used
        lines = printed.getvalue().splitlines()
        self.assertEqual([line.split(" Timings")[0] for line in lines],
                         ["(100, 16, 128)", "(1, 16, 128)", "(1, 16, 128)"])


class TypesTest(unittest.TestCase):
    """py.typed promises annotations."""

    def test_every_function_is_annotated(self):
        faults, functions = [], 0
        for path in sorted((server_binary.ROOT / "client/python/mla_client").glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                functions += 1
                spec = node.args
                named = spec.posonlyargs + spec.args + spec.kwonlyargs
                named += [one for one in (spec.vararg, spec.kwarg) if one is not None]
                missing = [one.arg for one in named
                           if one.annotation is None and one.arg not in ("self", "cls")]
                if node.returns is None:
                    missing.append("its result")
                faults += [f"{path.name}:{node.lineno}: {node.name}: {name}" for name in missing]
        self.assertGreater(functions, 100)
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_the_options_are_described(self):
        readme = (server_binary.ROOT / "client/python/README.md").read_text()
        rows = set(re.findall(r"^\| `(\w+)` \|", readme.split("## Options")[1]
                              .split("## Transports")[0], re.M))
        options = set(inspect.signature(mla_client.Client.connect).parameters) - {"target"}
        self.assertEqual(rows, options)


if __name__ == "__main__":
    unittest.main()
