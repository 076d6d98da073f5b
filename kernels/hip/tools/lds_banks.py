"""Bank conflicts of LDS accesses, counted from the addresses that lanes access together.

LDS has 64 banks of four bytes on gfx950 and 32 on gfx942. An instruction is served in phases, each
for a fixed set of lanes that together need as many bytes as there are banks. In a phase each bank
serves one word, so lanes that need different words of a bank wait for further passes. Several
projects measured on MI300X and MI355X which lanes share a phase: reads of 16 bytes take lanes out
of order, all other accesses in order. The peak is assumed to be 128 bytes a clock and CU on both.

What lanes access comes from the kernels themselves, run on the host
(host_images/shared_accesses.cc).
"""

import collections
import dataclasses

BANKS = {"gfx950": 64, "gfx942": 32}
PEAK = 128  # bytes a clock and CU
# Lanes of the phases of ds_read_b128 in the lower half of a wave; the upper half does the same.
READ_B128 = {
    "gfx950": [(0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27),
               (4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31)],
    "gfx942": [(0, 1, 2, 3, 20, 21, 22, 23), (4, 5, 6, 7, 16, 17, 18, 19),
               (8, 9, 10, 11, 28, 29, 30, 31), (12, 13, 14, 15, 24, 25, 26, 27)],
}
BYTES = {"ds_read_b128": 16, "ds_read_b64": 8, "ds_read_b64_tr_b16": 8, "ds_read_b64_tr_b8": 8,
         "ds_read_b32": 4, "ds_write_b128": 16, "ds_write_b64": 8, "ds_write_b32": 4,
         "global_load_lds_dwordx4": 16, "global_load_lds_dword": 4}
# Instructions that the compiler may make of two accesses.
JOINED = {"ds_read2_b64": "ds_read_b64", "ds_read2st64_b64": "ds_read_b64",
          "ds_read2_b32": "ds_read_b32", "ds_read2st64_b32": "ds_read_b32"}
LANES = 64


def phases(arch, instruction):
    """The lanes that are served at a time."""
    if instruction == "ds_read_b128":
        return [tuple(lane + half for lane in lanes)
                for half in (0, 32) for lanes in READ_B128[arch]]
    lanes = min(LANES, BANKS[arch] * 4 // BYTES[instruction])
    return [tuple(range(first, first + lanes)) for first in range(0, LANES, lanes)]


def passes(arch, instruction, addresses):
    """How often the banks are used for one access of a wave: once a phase without conflicts."""
    total = 0
    for lanes in phases(arch, instruction):
        words = collections.defaultdict(set)
        for lane in lanes:
            for byte in range(0, BYTES[instruction], 4):
                word = (addresses[lane] + byte) // 4
                words[word % BANKS[arch]].add(word)
        total += max(len(wanted) for wanted in words.values())
    return total


@dataclasses.dataclass
class Variant:
    """A kernel of absorbed attention: packed rows, KV rows a tile, the format of products, bytes of
    a KV row, and how many of its values are keys and how many are values."""

    rows: int
    tile: int
    products: str
    row_bytes: int
    keys: int
    values: int


class Accesses:
    """The kernels and their accesses, as host_images/shared_accesses.cc prints them."""

    def __init__(self, text):
        self.variants = {}
        self._counts = collections.defaultdict(lambda: [0, 0, 0])
        for line in text.splitlines():
            if line.startswith("variant "):
                _, arch, kernel, rows, tile, products, *rest = line.split()
                self.variants[arch, kernel] = Variant(int(rows), int(tile), products,
                                                      *map(int, rest))
                continue
            arch, kernel, instruction, count, *addresses = line.split()
            found = self._counts[arch, kernel, instruction]
            count = int(count)
            found[0] += count
            found[1] += count * len(phases(arch, instruction))
            found[2] += count * passes(arch, instruction, [int(at) for at in addresses])

    def instructions(self, arch, kernel):
        """Names of the instructions that the kernel accesses LDS with."""
        return [name for a, k, name in self._counts if (a, k) == (arch, kernel)]

    def slowdown(self, arch, kernel, instruction):
        """Passes of an access, relative to an access without conflicts; 1 if the kernel has no such
        access."""
        found = self._counts.get((arch, kernel, JOINED.get(instruction, instruction)))
        return found[2] / found[1] if found else 1.0
