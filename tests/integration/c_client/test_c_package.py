"""Tests the C library as users get it: a Debian package, unpacked, found by pkg-config and CMake.
"""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import server_binary

ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = ROOT / "client/c/package/build_deb.py"
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def run(*command, **environment):
    result = subprocess.run([str(part) for part in command], text=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
                            env={**os.environ, **environment}, check=False)
    if result.returncode != 0:
        raise AssertionError(f"{command} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


class CPackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="mla-c-package-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        library = os.environ.get("C_LIBRARY_UNDER_TEST",
                                 ROOT / ".bazel/bin/client/c/libmla_client.so")
        cls.deb = pathlib.Path(run("/usr/bin/python3", PACKAGE, "--library", library,
                                   "--output", cls.folder).strip())
        cls.root = cls.folder / "root"
        run("dpkg", "-x", cls.deb, cls.root)
        (cls.shared,) = (cls.root / "usr/lib").rglob("libmla_client.so")
        cls.server = server_binary.start()
        cls.addClassCleanup(cls.server.stop)

    def check_program(self, program, transports=("inline", "shm", "ring")):
        for transport in transports:
            with self.subTest(transport):
                said = run(program, self.server.target, transport,
                           LD_LIBRARY_PATH=str(self.shared.parent))
                self.assertIn(f"done over {transport}\n", said)
                self.assertIn("refused: field attend.layer, limit ", said)

    def test_pkg_config(self):
        flags = run("pkg-config", "--cflags", "--libs", "mla_client",
                    PKG_CONFIG_PATH=str(self.shared.parent / "pkgconfig")).split()
        program = self.folder / "by_pkg_config"
        run("gcc", *WARNINGS, HERE / "step.c", "-o", program, *flags, "-lm")
        self.check_program(program)

    def test_cmake(self):
        build = self.folder / "cmake"
        run("cmake", "-S", HERE, "-B", build, f"-DCMAKE_PREFIX_PATH={self.root}/usr")
        run("cmake", "--build", build)
        self.check_program(build / "step", ("ring",))

    def test_cmake_refuses_another_major_version(self):
        with tempfile.TemporaryDirectory() as folder:
            text = (HERE / "CMakeLists.txt").read_text().replace("mla_client 0.1", "mla_client 1.0")
            (pathlib.Path(folder) / "CMakeLists.txt").write_text(text)
            with self.assertRaisesRegex(AssertionError, "mla_client"):
                run("cmake", "-S", folder, "-B", folder + "/build",
                    f"-DCMAKE_PREFIX_PATH={self.root}/usr")

    def test_the_header_is_cpp_too(self):
        run("g++", "-Wall", "-Werror", "-fsyntax-only", "-x", "c++",
            self.root / "usr/include/mla_client.h")

    def test_exactly_the_functions_of_the_headers_are_exported(self):
        header = "".join((ROOT / "client/c" / name).read_text()
                         for name in ("mla_client.h", "mla_ring.h"))
        declared = set(re.findall(r"^MLA_API [^;]*?\b(mla_\w+)\(", header, re.M))
        symbols = run("nm", "-D", "--defined-only", self.shared).splitlines()
        # The linker keeps some functions of std::string that the C++ library also exports.
        exported = {line.split()[-1].split("@")[0] for line in symbols
                    if not line.split()[-1].startswith("_ZNSt")} - {"MLA_CLIENT_0"}
        self.assertGreater(len(declared), 40)
        self.assertEqual(exported, declared)

    def test_control_file(self):
        fields = run("dpkg-deb", "--field", self.deb)
        self.assertIn("Package: libmla-client\n", fields)
        for library in ("libgrpc++1", "libprotobuf", "libc6"):
            self.assertIn(library, re.search(r"Depends: (.*)", fields).group(1))
        listed = run("dpkg-deb", "--contents", self.deb)
        self.assertNotRegex(listed, r"^\S+ (?!root/root)")
        self.assertIn("./usr/include/mla_client.h", listed)


if __name__ == "__main__":
    unittest.main()
