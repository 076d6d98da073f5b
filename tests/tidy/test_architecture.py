"""Places that docs/architecture.md and house.py name exist, and the page names every folder."""

import pathlib
import re
import unittest

from house import WAY
from test_tidy import ROOT, read, tracked

PAGE = "docs/architecture.md"
DRAWN = ("server", "scheduler", "kernels")
# Sub-folders that the line of their parent folder describes.
PARTS = re.compile(r"kernels/(cpu|hip)/|kernels/testing|scheduler/(testing|engine_tests)")


class ArchitectureTest(unittest.TestCase):
    def test_every_place_exists(self):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                for line in read(PAGE).split("\n") if line.startswith("| Wh") or
                line.startswith("| How")]
        self.assertGreater(len(rows), 10)
        for question, files, functions in rows:
            with self.subTest(question):
                files = re.findall(r"`([^`]+)`", files)
                functions = re.findall(r"`([^`]+)`", functions)
                self.assertEqual(len(files), len(functions))
                for file, function in zip(files, functions):
                    self.assertTrue((ROOT / file).is_file(), file)
                    self.assertTrue(re.search(rf"\b{function}\b", read(file)), function)

    def test_the_way_of_an_attend_exists(self):
        for file, function in WAY.items():
            with self.subTest(file):
                self.assertRegex(read(file), rf"\b{function}\(")

    def test_every_folder_is_drawn(self):
        folders = {pathlib.PurePosixPath(path).parent.as_posix() + "/"
                   for path in tracked(".cc", ".h") if path.startswith(DRAWN)}
        drawing = read(PAGE).split("## Where to look")[0]
        for folder in sorted(folders):
            if not PARTS.match(folder) and "/" in folder[:-1]:
                name = folder.split("/", 1)[1]
                self.assertIn(name, drawing, folder)


if __name__ == "__main__":
    unittest.main()
