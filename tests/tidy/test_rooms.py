"""Rules about folders: how many files one holds, and which may use which."""

import collections
import pathlib
import re
import unittest

from test_tidy import CPP, read, tracked

# A unit is one thing to know: x.h, x.cc and x_test.cc are one.
MAX_UNITS = 12
UNIT = re.compile(r"(?:_test)?\.(?:cc|h|hip|py|proto|c|inc)$")
# Folders that are still too full, with their largest allowed number of units.
# The numbers may only fall.
TOO_FULL: dict = {}

# Folders of a package from the lowest floor up. A source includes headers of its own floor and of
# those below; tests and testing/ may include all.
FLOORS = {
    "server": ["logging", "tracing", "process", "config", "grpc", "memory", "metrics", "reload",
               "lifecycle", "admission", "index_lists", "attend", "shared_memory", "connections",
               "pages", "hand_over", "control", "ucx", "operations", ""],
    "kernels": ["formats", "types", "", "testing", "host_memory", "reference", "cpu/simd",
                "cpu/levels", "cpu/emulation", "cpu/workers", "cpu/items", "cpu", "hip/args",
                "hip/emulator/block", "hip/device/target", "hip/device/primitives",
                "hip/device/kv", "hip/emulator/instructions", "hip/device/amd",
                "hip/device/gfx942", "hip/device/gfx950", "hip/device/sm90",
                "hip/device/amd/formats", "hip/device/sm90/merge", "hip/device/kernels",
                "hip/device/amd/index", "hip/device/amd/prefill", "hip/device/sm90/index",
                "hip/device/sm90/decode/rows16_fp8", "hip/device/sm90/decode/rows64_bf16",
                "hip/device/sm90/decode/rows64_codes",
                "hip/device/sm90/decode/rows64_widened", "hip/device/sm90/decode/boxes",
                "hip/device/sm90/decode/split", "hip/device/sm90/decode/streamed",
                "hip/device/sm90/prefill", "hip/device", "hip/host_images", "hip/runtime",
                "hip/slot", "hip/device_state", "hip/launch", "hip/self_test", "hip"],
    "scheduler": ["kvcache/pool", "kvcache/prefix", "kvcache", "kvcache/tiers", "", "planning",
                  "planning/cache", "tables", "batching", "moves", "launching", "steps",
                  "engine"],
}
PUBLIC = re.compile(r"//visibility:public")
# Packages with public targets: names that users type, and libraries of the distribution.
FOR_ALL = ("BUILD.bazel", "third_party/precompiled/BUILD.bazel",
           "third_party/system/BUILD.bazel")


class RoomsTest(unittest.TestCase):
    """One rule a test."""

    def test_folders_hold_few_units(self):
        units = collections.defaultdict(set)
        for path in map(pathlib.PurePosixPath, tracked()):
            if UNIT.search(path.name):
                units[path.parent.as_posix()].add(UNIT.sub("", path.name))
        counts = collections.Counter({folder: len(names) for folder, names in units.items()})
        faults = []
        for folder, count in sorted(counts.items()):
            most = TOO_FULL.get(folder, MAX_UNITS)
            if count > most:
                faults.append(f"{folder}: {count} units, at most {most}")
        for folder, most in TOO_FULL.items():
            if counts[folder] <= MAX_UNITS:
                faults.append(f"{folder}: {counts[folder]} units: take it out of TOO_FULL")
            elif counts[folder] < most:
                faults.append(f"{folder}: {counts[folder]} units: lower its row of TOO_FULL")
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_device_code_has_folders_of_its_own(self):
        device = "kernels/hip/device/"
        faults = [path for path in tracked(".cc", ".hip") if path.startswith("kernels/")
                  and path.endswith(".cc") == path.startswith(device)]
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
