"""The package as users get it: source distribution, wheel, and the packages installed from them.

Everything is built in a folder outside the repository, with what Debian has and without a package
index, and used from there.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import unittest
import zipfile

import server_binary

ROOT = pathlib.Path(__file__).resolve().parents[3]
OFFLINE = ["--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check",
           "--no-cache-dir"]
# Local attention, then the same over gRPC: generated modules included.
PROGRAM = textwrap.dedent("""
    import pathlib, sys
    import numpy as np
    import mla_client
    target, prefix = sys.argv[1:]
    assert pathlib.Path(mla_client.__file__).is_relative_to(prefix), mla_client.__file__
    spec = mla_client.ModelSpec("package", mla_client.Geometry(2, 512, 64, 128, 128), 1, 0.1)
    random = np.random.default_rng(1)
    q, kv = random.normal(size=(1, 2, 576)), random.normal(size=(1, 576))
    outputs = []
    with mla_client.Client.connect(target, transport="inline") as client:
        for service in (mla_client.LocalReference(), client):
            sequence = service.register_model(spec).open_sequence()
            with service.step([(sequence, 1)]) as step:
                outputs.append(step.attend(0, q, kv, mla_client.Profile.ABSORBED).o)
    np.testing.assert_allclose(*outputs, rtol=0.02, atol=0.02)
    print("the package works")
""")


def run(*command, cwd):
    """Runs a command without anything of ours on Python's path."""
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("PYTHON", "PIP_"))}
    result = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, timeout=300, check=False)
    if result.returncode != 0:
        raise AssertionError(f"{command} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="mla-package-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        tree = cls.folder / "tree"  # builds leave files, which must not go into the repository
        build_products = shutil.ignore_patterns("__pycache__", "gen", "*.egg-info", "build")
        shutil.copytree(ROOT / "proto", tree / "proto", ignore=build_products)
        shutil.copytree(ROOT / "client/python", tree / "client/python", ignore=build_products)
        run(sys.executable, "-c", "import sys; sys.path.insert(0, '.'); import build_backend; "
            "build_backend.build_sdist('../../../sdist')", cwd=tree / "client/python")
        (cls.sdist,) = (cls.folder / "sdist").glob("mla-client-*.tar.gz")
        cls.from_sdist = cls.wheel_of(cls.sdist, "wheel_of_sdist")
        cls.from_tree = cls.wheel_of(tree / "client/python", "wheel_of_tree")

    @classmethod
    def wheel_of(cls, source, name):
        target = cls.folder / name
        run(sys.executable, "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", target, source,
            cwd=cls.folder)
        (wheel,) = target.glob("mla_client-*-py3-none-any.whl")
        return wheel

    def check_installed(self, what, name):
        """Installs into an environment of its own and uses it against a server."""
        home = self.folder / name
        # In addition to the package there are only Debian's grpc, protobuf and numpy.
        run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", home,
            cwd=self.folder)
        python = home / "bin/python"
        run(python, "-m", "pip", "install", *OFFLINE, what, cwd=self.folder)
        server = server_binary.start()
        try:
            said = run(python, "-c", PROGRAM, server.target, home, cwd=self.folder)
        finally:
            server.stop()
        self.assertEqual(said, "the package works\n")

    def test_the_source_distribution_installs(self):
        self.check_installed(self.sdist, "env_sdist")

    def test_the_wheel_installs(self):
        self.check_installed(self.from_tree, "env_wheel")

    def test_the_source_distribution_is_complete(self):
        with tarfile.open(self.sdist) as archive:
            names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        package = ROOT / "client/python"
        for path in (package / "mla_client").rglob("*.py"):
            self.assertIn(str(path.relative_to(package)), names)
        for path in (ROOT / "proto/mla/v1").glob("*.proto"):
            self.assertIn(f"mla_client/gen/{path.stem}_pb2.py", names)
            self.assertIn(f"mla_client/gen/{path.stem}_pb2_grpc.py", names)
        for name in ("build_backend.py", "generate_stubs.py", "pyproject.toml", "README.md",
                     "mla_client/py.typed", "PKG-INFO"):
            self.assertIn(name, names)

    def test_both_wheels_hold_the_same(self):
        contents = []
        for wheel in (self.from_sdist, self.from_tree):
            with zipfile.ZipFile(wheel) as archive:
                contents.append({name: archive.read(name) for name in archive.namelist()
                                 if name.startswith("mla_client/")})
        self.assertEqual(*contents)
        self.assertIn("mla_client/py.typed", contents[0])
        package = ROOT / "client/python"
        for path in (package / "mla_client").rglob("*.py"):
            self.assertIn(str(path.relative_to(package)), contents[0])

    def test_types_are_right(self):
        """py.typed promises types; [tool.mypy] of pyproject.toml says how they are checked."""
        said = run("mypy", "--config-file=pyproject.toml", f"--cache-dir={self.folder}/mypy",
                   "--python-executable=/usr/bin/python3", cwd=ROOT / "client/python")
        self.assertIn("Success: no issues found", said)

    def test_a_program_of_a_user_is_checked(self):
        """The types reach those who import the installed package."""
        program = self.folder / "program.py"
        home = self.folder / "env_types"
        run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", home,
            cwd=self.folder)
        run(home / "bin/python", "-m", "pip", "install", *OFFLINE, self.from_tree, cwd=self.folder)
        program.write_text("import mla_client\n"
                           "def rows(sequence: mla_client.Sequence) -> str:\n"
                           "    return sequence.length\n")
        with self.assertRaisesRegex(AssertionError, r'program.py:3: error: .*"int".*"str"'):
            run("mypy", f"--cache-dir={self.folder}/mypy", "--ignore-missing-imports",
                f"--python-executable={home}/bin/python", program, cwd=self.folder)

    def test_engines_find_their_plugins(self):
        with zipfile.ZipFile(self.from_tree) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
            self.assertEqual(archive.read(name).decode().split(), [
                "[sglang.srt.plugins]", "mla_server", "=", "mla_client.sglang.plugin:register",
                "[vllm.general_plugins]", "mla_server", "=", "mla_client.vllm.plugin:register"])


if __name__ == "__main__":
    unittest.main()
