"""Every test that the pages on reliability and security name exists."""

import pathlib
import re
import unittest

import test_tidy

PAGE = "docs/reliability.md"
REFERENCE = re.compile(r"`([a-z0-9_]+_test|test_[a-z0-9_]+)(?:\.(\w+))?`")


def broken_references(text):
    """Tests that a page names and that do not exist."""
    files = {}  # by name, which two folders may share
    for path in test_tidy.tracked(".cc", ".py"):
        files.setdefault(pathlib.Path(path).stem, []).append(path)
    for file, case in REFERENCE.findall(text):
        if file not in files:
            yield f"{file}: no such file"
        elif case and not any(re.search(rf"\b{case}\b", test_tidy.read(path))
                              for path in files[file]):
            yield f"{file}: no test {case}"


class ReliabilityTest(unittest.TestCase):
    def test_every_test_that_is_named_exists(self):
        for page in (PAGE, "docs/security.md"):
            text = test_tidy.read(page)
            self.assertGreater(len(REFERENCE.findall(text)), 15)
            self.assertEqual(list(broken_references(text)), [], page)

    def test_every_fault_names_a_test_and_how_it_failed(self):
        rows = test_tidy.read(PAGE).split("## Faults that were found")[1].split("\n")
        rows = [row for row in rows if row.startswith("| ")][1:]
        self.assertGreater(len(rows), 10)
        for row in rows:
            cells = [cell.strip() for cell in row.split("|")[1:-1]]
            self.assertEqual(len(cells), 3, row)
            _, without_the_mend, shown_by = cells
            if shown_by == "`documented`":
                continue
            self.assertTrue(without_the_mend, row)
            self.assertRegex(shown_by, REFERENCE, row)
            self.assertTrue(all(case for _, case in REFERENCE.findall(shown_by)), row)

    def test_a_wrong_name_is_found(self):
        self.assertEqual(list(broken_references("`nosuch_test` `test_tidy.test_nosuch`")),
                         ["nosuch_test: no such file", "test_tidy: no test test_nosuch"])


class DriverCallsTest(unittest.TestCase):
    """docs/kernels/driver_calls.md gives a reason for each call of a GPU's driver."""

    TABLES = ("kernels/hip/runtime/runtime_table.cc", "kernels/hip/runtime/device_sharing.cc",
              "kernels/hip/runtime/kernel_graphs.cc")
    ALIAS = re.compile(r'(?:\(|\? )(nullptr|"hip\w+")(?:,\s+| : )(nullptr|"cu\w+")')

    LOADS_CODE = "kernels/hip/device_state/kernel_set.cc"

    def entry_points(self):
        """CUDA's name of each call, or HIP's if CUDA has none, without the number of a version."""
        aliases = [alias for table in self.TABLES
                   for alias in self.ALIAS.findall(test_tidy.read(table))]
        self.assertGreater(len(aliases), 50)
        self.assertIn("cuFuncLoad", test_tidy.read(self.LOADS_CODE))
        names = {nvidia if nvidia != "nullptr" else amd for amd, nvidia in aliases}
        # HIP's own name for what CUDA calls otherwise.
        others = {'"hipGetErrorString"', '"hipMemcpy2DAsync"'}
        return sorted({re.sub(r"(_v2|R0600)$", "", name.strip('"')) for name in names - others}
                      | {"cuFuncLoad"})

    def test_each_call_has_its_reason(self):
        page = test_tidy.read("docs/kernels/driver_calls.md").split("## Driver calls")[1]
        table = page.split("## When a call")[0]
        self.assertEqual([name for name in self.entry_points() if f"`{name}`" not in table], [])

    def test_no_other_file_looks_calls_up(self):
        found = [path for path in test_tidy.tracked(".cc", ".h")
                 if path.startswith(("kernels/hip/", "server/", "scheduler/"))
                 and not path.endswith("_test.cc")
                 and re.search(r'"(cu|hip)[A-Z]\w+"', test_tidy.read(path))]
        self.assertEqual(sorted(set(found) - set(self.TABLES)), [self.LOADS_CODE])


if __name__ == "__main__":
    unittest.main()
