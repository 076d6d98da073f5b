"""Conformance of the device kernels on the host finds planted faults: a sample, or all with
MLA_TEST_LONG."""

import collections
import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import device_mutations  # noqa: E402

RUN_SECONDS = 120
INPUTS = ("kernels", "tests/conformance/mutations",
          ".bazel/bin/tests/conformance/host_conformance",
          ".bazel/bin/tests/conformance/host_conformance.runfiles")
ALL = os.environ.get("MLA_TEST_LONG", "") != ""


def runs():
    """The mutations of this run, each with an architecture."""
    for mutation in device_mutations.MUTATIONS:
        if ALL or mutation.name in device_mutations.SAMPLE:
            for arch in mutation.archs if ALL else mutation.archs[:1]:
                yield mutation, arch


class DeviceMutationTextTest(unittest.TestCase):
    def test_every_mutation_applies(self):
        """The text that a mutation replaces is once in its file, and its name names no
        other mutation."""
        names = [mutation.name for mutation in device_mutations.MUTATIONS]
        self.assertEqual(len(names), len(set(names)))
        for mutation in device_mutations.MUTATIONS:
            text = (device_mutations.ROOT / device_mutations.DEVICE / mutation.file).read_text()
            self.assertEqual(text.count(mutation.old), 1, mutation.name)


class DeviceMutationTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.harness = device_mutations.Harness()

    def test_every_kind_has_its_mutations(self):
        kinds = collections.Counter(m.name.split("_")[0] for m in device_mutations.MUTATIONS)
        for kind in device_mutations.KINDS:
            self.assertGreaterEqual(kinds[kind], 3, kind)
        archs = collections.Counter(arch for m in device_mutations.MUTATIONS for arch in m.archs)
        for arch in device_mutations.SOURCES:
            self.assertGreaterEqual(archs[arch], 5, arch)

    def test_unmutated_kernels_pass(self):
        """Unmutated kernels, compiled like the mutated ones, pass. Otherwise every mutation would
        seem found. Kernels of which this run mutates none are conformance tests' alone."""
        mutated = {arch for _, arch in runs()}
        self.assertGreaterEqual(len(mutated), len(device_mutations.SOURCES) if ALL else 2)
        for arch in sorted(mutated):
            library = self.harness.library(arch)
            for flags in sorted({mutation.flags for mutation, of in runs() if of == arch}):
                with self.subTest(arch, flags=flags):
                    passed, text = self.harness.conformance(arch, library, "--cases", "0,11",
                                                            *flags)
                    self.assertTrue(passed, text)

    def test_mutations_are_found(self):
        for mutation, arch in runs():
            with self.subTest(f"{mutation.name} on {arch}"):
                self.assertTrue(self.harness.find(mutation, arch).found, mutation.about)


if __name__ == "__main__":
    unittest.main()
