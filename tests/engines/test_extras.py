"""The extras of the package, as `pip install` sees them: they ask for releases that the adapters
know, and what each brings into a clean environment works: the engine finds the adapter there."""

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
# By extra what is run where it was installed: the engine finds the package by its entry points.
POINTS = """
import importlib.metadata
points = {group: [point.load for point in importlib.metadata.entry_points(group=group)
                  if point.dist.name == "mla-client"]
          for group in ("vllm.general_plugins", "sglang.srt.plugins")}
"""
PROGRAMS = {
    "transformers": """
import mla_client, torch, transformers
from mla_client.transformers.probe import check_version
check_version()
print(mla_client.__file__)
""",
    "vllm": POINTS + """
import mla_client, vllm
(load,) = points["vllm.general_plugins"]
load()()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert AttentionBackendEnum.CUSTOM.get_path() == "mla_client.vllm.backend.MlaServerBackend"
connector = KVConnectorFactory._registry["MlaServerConnector"]()
assert connector.__module__ == "mla_client.vllm.connector", connector
print(mla_client.__file__)
""",
    "sglang": POINTS + """
import mla_client, sglang
(load,) = points["sglang.srt.plugins"]
load()()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
assert ATTENTION_BACKENDS["mla_server"].__module__ == "mla_client.sglang.plugin"
print(mla_client.__file__)
"""}
# The compiled kernels of SGLang load on GPUs alone.
STANDIN = environments.ROOT / "tests" / "sglang" / "standin"


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

    def installed(self, extra):
        """Runs the extra's program in a clean environment that has the extra alone."""
        folder = self.folder / extra
        python = environments._bare(folder)
        given = lock.REQUIREMENTS[environments.newest(extra)]
        # One torch is on disk for all, with the parts of it that the CPU loads.
        others = [each for each in (*lock._ALL, *given) if each.startswith("torch")]
        for name, lines in (("excluded", lock.excluded(given)), ("overrides", others),
                            ("more", lock._CUDA)):
            (self.folder / f"{name}.txt").write_text("\n".join(lines))
        environments.run_installer(
            ["pip", "install", "--quiet", "--python", str(python),
             "--excludes", str(self.folder / "excluded.txt"),
             "--overrides", str(self.folder / "overrides.txt"),
             "--requirements", str(self.folder / "more.txt"),
             f"mla-client[{extra}] @ {self.source.as_uri()}"])
        said = subprocess.run(
            [str(python), "-c", PROGRAMS[extra]], cwd=self.folder, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={
                "HOME": str(folder), "PATH": "/usr/bin:/bin",
                "PYTHONPATH": str(STANDIN) if extra == "sglang" else ""})
        self.assertEqual(said.returncode, 0, said.stdout)
        self.assertIn(str(folder), said.stdout.splitlines()[-1])
        shutil.rmtree(folder)

    def test_transformers_works_in_a_clean_environment(self):
        self.installed("transformers")

    def test_vllm_works_in_a_clean_environment(self):
        self.installed("vllm")

    def test_sglang_works_in_a_clean_environment(self):
        self.installed("sglang")


if __name__ == "__main__":
    unittest.main()
