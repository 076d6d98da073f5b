"""The Python in the quickstart runs as printed, against a server."""

import contextlib
import io
import re
import unittest

import server_binary


class QuickstartTest(unittest.TestCase):
    def test_snippet(self):
        text = (server_binary.ROOT / "docs/quickstart.md").read_text()
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


if __name__ == "__main__":
    unittest.main()
