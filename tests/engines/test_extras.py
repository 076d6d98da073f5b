"""The extras of the package, as `pip install` sees them: they ask for releases that the adapters
know, and what `[transformers]` brings into a clean environment works."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import environments
import lock

ENVIRONMENT = "transformers"
GATE = False
PACKAGE = environments.ROOT / "client" / "python"
PROGRAM = """
import mla_client, torch, transformers
from mla_client.transformers.probe import check_version
check_version()
print(mla_client.__file__)
"""


class ExtrasTest(unittest.TestCase):
    """Over a source tree of the package's own, whose modules are generated."""

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)
        cls.source = cls.folder / "package"
        shutil.copytree(PACKAGE, cls.source, ignore=shutil.ignore_patterns("tests", "__pycache__"))

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def resolved(self, extra):
        """What the installer would install: {name: version}."""
        given, out = self.folder / "in.txt", self.folder / "out.txt"
        given.write_text(f"mla-client[{extra}] @ {self.source.as_uri()}\n")
        environments.run_installer(["pip", "compile", "--quiet", "--no-header", "--no-annotate",
                                    "--python", sys.executable, "-o", str(out), str(given)])
        return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", out.read_text(), re.MULTILINE))

    def test_each_asks_for_a_release_that_is_known(self):
        for extra in environments.RELEASES:
            with self.subTest(extra=extra):
                found = self.resolved(extra)[extra]
                newest = environments.RELEASES[extra][-1]
                self.assertEqual(found.split(".")[:newest.count(".") + 1], newest.split("."))

    def test_transformers_works_in_a_clean_environment(self):
        python = environments._bare(self.folder / "clean")
        excluded = self.folder / "excluded.txt"
        excluded.write_text("\n".join(lock.EXCLUDED))
        constraints = self.folder / "constraints.txt"
        constraints.write_text(re.sub(r" --hash=\S+", "", (
            environments.LOCKS / f"{environments.newest('transformers')}.txt").read_text()))
        environments.run_installer(
            ["pip", "install", "--quiet", "--python", str(python), "--excludes", str(excluded),
             "--constraints", str(constraints),
             f"mla-client[transformers] @ {self.source.as_uri()}"])
        said = subprocess.run([str(python), "-c", PROGRAM], cwd=self.folder, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self.assertEqual(said.returncode, 0, said.stdout)
        self.assertIn(str(self.folder / "clean"), said.stdout)


if __name__ == "__main__":
    unittest.main()
