"""Rules about folders: how many files one holds, and which may use which."""

import collections
import pathlib
import re
import unittest

from test_tidy import CPP, read, tracked

MAX_FILES = 15
# Data and generated files, and the root, which holds what tools look for there.
NOT_COUNTED = {".", "tests/simulation/mutations", "tests/simulation/seeds"}
# Folders that are still too full, with what they hold at most: these numbers may only fall.
TOO_FULL = {
}

# Folders of a package from the lowest floor up. A source includes headers of its own floor and of
# those below; tests and testing/ may include all.
FLOORS = {
    "server": ["logging", "process", "config", "grpc", "memory", "metrics", "reload",
               "lifecycle", "admission", "index_lists", "attend", "shared_memory", "connections",
               "pages", "hand_over", "control", "operations", ""],
    "scheduler": ["kvcache/pool", "kvcache/prefix", "kvcache", "kvcache/tiers", "", "planning",
                  "planning/cache", "tables", "batching", "moves", "launching", "engine"],
}
PUBLIC = re.compile(r"//visibility:public")
# Names that a user types, and libraries of the distribution.
FOR_ALL = ("BUILD.bazel", "third_party/precompiled/BUILD.bazel",
           "third_party/system/BUILD.bazel")


class RoomsTest(unittest.TestCase):
    """One rule a test."""

    def test_folders_hold_few_files(self):
        counts = collections.Counter(pathlib.PurePosixPath(path).parent.as_posix()
                                     for path in tracked())
        faults = []
        for folder, count in sorted(counts.items()):
            most = TOO_FULL.get(folder, MAX_FILES)
            if folder not in NOT_COUNTED and count > most:
                faults.append(f"{folder}: {count} files, at most {most}")
        for folder, most in TOO_FULL.items():
            if counts[folder] <= MAX_FILES:
                faults.append(f"{folder}: {counts[folder]} files: take it out of TOO_FULL")
            elif counts[folder] < most:
                faults.append(f"{folder}: {counts[folder]} files: lower its row of TOO_FULL")
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_includes_go_down(self):
        faults = []
        for package, floors in FLOORS.items():
            seen = set()
            for path in tracked(*CPP):
                folder = pathlib.PurePosixPath(path).parent.as_posix()
                room = "" if folder == package else folder[len(package) + 1:]
                if not folder.startswith(package) or room not in floors or "_test." in path:
                    continue
                seen.add(room)
                for found in re.finditer(rf'^#include "{package}/(?:([^"]+)/)?[^"/]+"', read(path),
                                         re.M):
                    other = found.group(1) or ""
                    if other not in floors or floors.index(other) > floors.index(room):
                        faults.append(f"{path}: {found.group(0)} lies above")
            self.assertEqual(seen, set(floors), f"{package}: floors without sources")
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_packages_name_their_users(self):
        faults = [f"{path}: {PUBLIC.pattern}" for path in tracked("BUILD.bazel")
                  if path not in FOR_ALL and PUBLIC.search(read(path))]
        self.assertFalse(faults, "\n" + "\n".join(faults))


if __name__ == "__main__":
    unittest.main()
