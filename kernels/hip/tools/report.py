"""Resources of the compiled device kernels, and bounds of their time from counting instructions.

Reads a folder that tools/build_device_code.sh wrote (default: Bazel's output of ./dev build hip):
usage.txt, the compilers' resource reports, the assembly of the AMD architectures, and the output of
host_images/shared_accesses.cc. It prints registers, LDS, scratch and spills for each kernel and
architecture. For each kernel of matrix products on AMD it prints the instructions of the inner loop
and the clocks that they take, bank conflicts of LDS included (lds_banks.py): pipe by pipe, and for
a whole turn with the code's own waits (timeline.py).

Exits 1
- on any spill that usage.py does not state, on scratch, on LDS over the architecture's limit;
- on a loop that misses its targets (loop_faults, conflict_faults, stage_faults);
- on uses of m0 that the copies do not expect (m0_faults);
- on code objects that the oldest ROCm does not load (code_object_faults);
- if the folder holds no kernel at all.

--page FILE compares FILE with the page of docs/kernels that follows from these results (page_of),
--turns FILE with the page of docs/benchmarks (turns_page). An outdated page is a fault, too, and
the correct page is printed.
"""

import argparse
import collections
import dataclasses
import math
import pathlib
import re
import sys

import launches
import lds_banks
import timeline
import usage

ROOT = pathlib.Path(__file__).resolve().parents[3]

# Clocks for which an instruction keeps its pipe busy for one wave of 64 lanes. Matrix instructions:
# their operations divided by the data sheet's rate (1024 bf16 operations a clock and SIMD on
# gfx950, 512 on gfx942, twice as many for 8 bits). LDS instructions: their bytes at the assumed
# peak (lds_banks.PEAK) if no banks conflict. Other instructions: the four clocks that a 16-lane
# SIMD takes to issue 64 lanes.
MATRIX_CLOCKS = {
    "gfx950": {"v_mfma_f32_32x32x16_bf16": 32, "v_mfma_f32_16x16x32_bf16": 16,
               "v_mfma_scale_f32_32x32x64_f8f6f4": 64},
    "gfx942": {"v_mfma_f32_32x32x8_bf16": 32, "v_mfma_f32_16x16x16_bf16": 16,
               "v_mfma_f32_32x32x16_fp8_fp8": 32, "v_mfma_f32_16x16x32_fp8_fp8": 16},
}
LDS_CLOCKS = {name: size * lds_banks.LANES // lds_banks.PEAK
              for name, size in lds_banks.BYTES.items()}
LDS_CLOCKS |= {"ds_read2_b64": 8, "ds_read2st64_b64": 8, "ds_read2_b32": 4, "ds_read2st64_b32": 4,
               "ds_bpermute_b32": 2}
ISSUE_CLOCKS = 4
# CUs, clock in GHz, and the memory bandwidth in TB/s that kernels are compared with.
MACHINE = {"gfx950": (256, 2.4, 6.0), "gfx942": (304, 2.1, 4.0)}
WAVES = 4
# Clocks after which a load from busy memory has surely arrived: one microsecond.
MEMORY_LATENCY = 2400
# Reads and writes of accumulation registers that a turn may have, for values of its own that the
# compiler keeps there. Moving one accumulator of 32 rows would take 16.
ACCUMULATOR_MOVES = 15
# Tiles in LDS where copies are waited for by count: kStages of
# device/gfx950/config.h. Rows of fp8_row and fp8_page pass through registers.
STAGES = {"mla_attend_64": 4, "mla_attend_128": 4, "mla_expand": 3, "mla_attend_expanded": 2,
          "mla_attend_64_fp8_tensor": 3, "mla_attend_128_fp8_tensor": 4,
          "mla_attend_128_fp8_tensor_products": 3, "mla_attend_128_fp8_row_products": 3,
          "mla_expand_fp8_tensor": 3, "mla_expand_fp8_row": 3, "mla_attend_expanded_products": 3,
          "mla_expand_fp8_tensor_products": 3, "mla_expand_fp8_row_products": 3,
          "mla_expand_256": 3, "mla_expand_256_fp8_tensor": 3, "mla_expand_256_fp8_row": 3,
          "mla_attend_expanded_256": 2}
STAGES |= {f"{name}_lists": stages for name, stages in STAGES.items()
           if re.match(r"mla_attend_\d", name)}
STAGES |= {"mla_attend_64_window": 4, "mla_attend_128_window": 3}
# The largest multiple of the memory's time that a turn of absorbed attention may take, its waits
# included; other kernels of absorbed attention have no bound. The bounds keep turns from growing.
TURN = {("gfx950", "mla_attend_64"): 1.0, ("gfx950", "mla_attend_128"): 1.0,
        ("gfx950", "mla_attend_64_fp8_tensor"): 1.15, ("gfx950", "mla_attend_64_fp8_row"): 1.0,
        ("gfx950", "mla_attend_128_fp8_tensor_products"): 1.1,
        ("gfx950", "mla_attend_64_lists"): 1.0, ("gfx950", "mla_attend_128_lists"): 1.0,
        ("gfx950", "mla_attend_64_fp8_tensor_lists"): 1.15,
        ("gfx950", "mla_attend_64_fp8_row_lists"): 1.05,
        ("gfx950", "mla_attend_128_fp8_tensor_products_lists"): 1.2,
        ("gfx950", "mla_attend_128_fp8_row_products"): 1.3,
        ("gfx950", "mla_attend_128_fp8_row_products_lists"): 1.4,
        ("gfx950", "mla_attend_64_window"): 1.1, ("gfx950", "mla_attend_128_window"): 1.55,
        ("gfx950", "mla_attend_64_fp8_page_window"): 1.15,
        ("gfx942", "mla_attend_64_fp8_tensor_products"): 1.0,
        ("gfx942", "mla_attend_128_fp8_tensor_products"): 1.3,
        ("gfx942", "mla_attend_64_fp8_tensor_products_lists"): 1.15,
        ("gfx942", "mla_attend_128_fp8_tensor_products_lists"): 1.4}


@dataclasses.dataclass
class Loop:
    """One turn of a kernel's inner loop in a block: its contents, and the work that it must do."""

    what: str
    flop: int
    read: int  # bytes it loads


def loop_of(arch, kernel, variants):
    """The inner loop of a kernel of matrix products; None for the others."""
    if kernel.startswith("mla_expand"):
        # 128 rows and both weights of a head, depth 64, 256 columns; or of half a head of 448.
        wide = kernel.startswith("mla_expand_256")
        rows, columns = 128 * 64 * (1 if "fp8" in kernel else 2), 224 if wide else 256
        return Loop(f"depth 64 of 128 rows and {'half ' if wide else ''}a head",
                    128 * columns * 64 * 2, rows + columns * 64 * 2)
    if kernel in ("mla_attend_expanded", "mla_attend_expanded_256"):
        rows = {"gfx950": 64, "gfx942": 32}[arch]
        keys, values = (256, 256) if kernel.endswith("_256") else (192, 128)
        return Loop(f"KV tile of {rows} rows", 128 * rows * 2 * (keys + values),
                    rows * 2 * (keys + values))
    if kernel == "mla_attend_expanded_products" and arch == "gfx950":
        return Loop("KV tile of 64 rows", 128 * 64 * 2 * (192 + 128), 64 * 320)
    if v := variants.get((arch, kernel)):
        return Loop(f"KV tile of {v.tile} rows", v.rows * v.tile * 2 * (v.keys + v.values),
                    v.tile * v.row_bytes)
    return None


def inner_loop(assembly, kernel):
    """The instructions of one steady turn of the kernel's inner loop, as the loop runs them."""
    return timeline.steady_turn(timeline.blocks_of(assembly, kernel))


def lds_clocks_of(accesses, arch, kernel):
    """LDS_CLOCKS with the bank conflicts of a kernel."""
    return {name: clocks * accesses.slowdown(arch, kernel, name)
            for name, clocks in LDS_CLOCKS.items()}


def bounds(arch, counts, read, lds_clocks):
    """Clocks of one turn of the loop on one CU: memory (each byte from HBM), matrix, LDS, issue."""
    cus, ghz, bandwidth = MACHINE[arch]
    memory = read / (bandwidth * 1e3 / cus / ghz)
    matrix = sum(counts.get(name, 0) * clocks for name, clocks in MATRIX_CLOCKS[arch].items())
    lds = WAVES * sum(counts.get(name, 0) * clocks for name, clocks in lds_clocks.items())
    issue = sum(ISSUE_CLOCKS * n for name, n in counts.items() if not name.startswith("s_"))
    return memory, matrix, lds, issue


def turn_of(arch, code, lds_clocks):
    """One turn of an inner loop, followed with its waits."""
    return timeline.follow(code, MATRIX_CLOCKS[arch], lds_clocks, WAVES)


def of_memory(clocks, turn):
    """The time of a turn, divided by the time in which the memory delivers its rows. `clocks` is
    the result of bounds()."""
    return max(*clocks[1:], turn.clocks) / clocks[0]


def loop_faults(arch, kernel, clocks, turn):
    """Faults in an inner loop of absorbed attention, as text. `clocks` is the result of bounds().
    """
    if not re.fullmatch(r"mla_attend_\d+\w*", kernel):
        return
    where = f"{arch} {kernel}"
    if turn.lead < MEMORY_LATENCY:
        yield f"{where}: waits for loads {turn.lead} clocks after they started"
    if arch == "gfx950" and turn.waits_for_all and kernel in STAGES:
        yield f"{where}: waits for all copies from memory in every turn"
    if of_memory(clocks, turn) > (limit := TURN.get((arch, kernel), math.inf)):
        yield f"{where}: takes more than {limit} of the memory's time"


def conflict_faults(accesses, arch, kernel, counts):
    """Faults that cost absorbed attention on gfx950 time and that no count of instructions shows:
    accesses whose banks conflict, and accumulators moved between registers. Also reports a kernel
    whose accesses are not known."""
    if not accesses.instructions(arch, kernel):
        yield f"{arch} {kernel}: no accesses of LDS known"
    if arch != "gfx950" or not re.fullmatch(r"mla_attend_\d+", kernel):
        return
    for name in accesses.instructions(arch, kernel):
        if (slowdown := accesses.slowdown(arch, kernel, name)) > 1:
            yield f"{arch} {kernel}: banks conflict, {name} takes {slowdown:.2f} times its passes"
    moves = count(counts, "v_accvgpr")
    if counts.get("v_accvgpr_mov_b32") or moves > ACCUMULATOR_MOVES:
        yield f"{arch} {kernel}: {moves} moves of accumulators in every turn"


def stage_faults(arch, kernel, turn):
    """Checks that exactly the tile that a turn reads has landed when the waves meet. The copies of
    the next stages - 2 tiles are then in flight, and all others have been waited for. If the wait
    leaves more copies in flight, products may read data that has not arrived, which shows on
    hardware only now and then."""
    if arch != "gfx950" or kernel not in STAGES:
        return
    want = (STAGES[kernel] - 2) * turn.loads
    if turn.left != want:
        yield (f"{arch} {kernel}: {turn.left} loads on their way at the barrier, must be {want} "
               f"({STAGES[kernel] - 2} turns of {turn.loads})")


def m0_faults(arch, assembly):
    """Finds instructions that use m0, except the ones with which copies to LDS set it
    (device/amd/instructions.h). Those cannot declare their use, because m0 is reserved, so the
    compiler must not keep a value there."""
    for line in assembly.splitlines():
        code = line.split(";")[0].strip()
        if re.search(r"\bm0\b", code) and not re.fullmatch(r"s_add_u32 m0, s\d+, \w+", code):
            yield f"{arch}: m0 used by '{code}'"


# Fields of an ELF header: its kind, and the version of AMD's ABI. ROCm 6.2, the
# oldest that is supported, loads none above version 5.
ELF_OS, ELF_ABI = 7, 8
ELF_OS_HSA = 64
CODE_OBJECT_VERSION, CODE_OBJECT_ABI = 5, 3


def code_object_faults(arch, image):
    """Checks that the bytes of an image are a code object of the version that every ROCm loads."""
    if not image:
        yield f"{arch}: no code object was built"
    elif image[:4] != b"\x7fELF" or image[ELF_OS] != ELF_OS_HSA:
        yield f"{arch}: the image is not a code object"
    elif image[ELF_ABI] != CODE_OBJECT_ABI:
        yield (f"{arch}: code object of version {image[ELF_ABI] + 2}, must be "
               f"{CODE_OBJECT_VERSION}")


def count(counts, *prefixes):
    """Instructions whose names start with one of the prefixes."""
    return sum(n for name, n in counts.items() if name.startswith(prefixes))


def print_loop(record, loop, counts, turn, accesses):
    """One kernel's loop: counts, then clocks a turn and what they imply."""
    arch, kernel = record.arch, record.kernel
    print(f"\n{arch} {kernel}, {loop.what}, per wave: "
          f"{count(counts, 'v_mfma')} matrix, {count(counts, 'ds_')} LDS, "
          f"{count(counts, 'global_', 'flat_', 'buffer_')} global, "
          f"{count(counts, 's_barrier')} barrier, "
          f"{count(counts, 'v_exp', 'v_log', 'v_rcp')} transcendental, "
          f"{count(counts, 'v_') - count(counts, 'v_mfma')} vector in all")
    lds_clocks = lds_clocks_of(accesses, arch, kernel)
    memory, matrix, lds, issue = bounds(arch, counts, loop.read, lds_clocks)
    # Neighbours in time share the expanded form's reads, which come from the caches.
    cached = "expand" in kernel
    slowest = max(0 if cached else memory, matrix, lds, issue)
    # Blocks that share a CU work while the others wait.
    busy = record.occupancy * matrix / max(record.occupancy * slowest, turn.clocks)
    print(f"  clocks: memory {memory:.0f} (at {MACHINE[arch][2]} TB/s"
          f"{', were nothing cached' if cached else ''}), matrix {matrix}, "
          f"LDS {lds:.0f}, issue {issue}; matrix pipe busy {100 * matrix / slowest:.0f} % were "
          f"there no waits, "
          f"{loop.read / loop.flop:.4f} B of memory and "
          f"{lds * 128 / loop.flop:.4f} B of LDS a FLOP")
    conflicts = ", ".join(f"{name} {accesses.slowdown(arch, kernel, name):.2f}"
                          for name in accesses.instructions(arch, kernel))
    print(f"  LDS: {lds_banks.BANKS[arch]} banks, at most {lds_banks.PEAK} B a clock; passes for "
          f"each that an access needs: {conflicts}; moves of accumulators: "
          f"{counts.get('v_accvgpr_mov_b32', 0)} mov, {counts.get('v_accvgpr_read_b32', 0)} read, "
          f"{counts.get('v_accvgpr_write_b32', 0)} write")
    print(f"  with its waits: {turn.clocks:.0f} clocks, matrix pipe busy {100 * busy:.0f} %; "
          f"loads are waited for {turn.lead:.0f} clocks or more after they started, "
          f"{turn.waits_for_all} waits for all of them; {turn.left} on their way at the barrier, "
          f"{turn.loads} started a turn")


def read_loops(records, accesses, folder, faults):
    """Returns for each kernel of matrix products on AMD its record, loop, instruction counts and
    turn. Adds their faults to `faults`."""
    loops = []
    for arch in MACHINE:
        assembly = (folder / f"{arch}.s").read_text(encoding="utf-8")
        faults += m0_faults(arch, assembly)
        faults += code_object_faults(arch, (folder / f"{arch}.co").read_bytes())
        for r in records:
            loop = loop_of(arch, r.kernel, accesses.variants)
            if r.arch != arch or loop is None:
                continue
            code = inner_loop(assembly, r.kernel)
            lds_clocks = lds_clocks_of(accesses, arch, r.kernel)
            counts = collections.Counter(name for name, _ in code)
            turn = turn_of(arch, code, lds_clocks)
            if not count(counts, "v_mfma"):
                faults.append(f"{arch} {r.kernel}: no loop found")
                continue
            loops.append((r, loop, counts, turn))
            faults += loop_faults(arch, r.kernel, bounds(arch, counts, loop.read, lds_clocks), turn)
            faults += conflict_faults(accesses, arch, r.kernel, counts)
            faults += stage_faults(arch, r.kernel, turn)
    return loops


PAGE = """# Resources of the AMD kernels

The compiler's registers and LDS of each device kernel, and its accesses of LDS.
`./dev hip-report --page PAGE --write` makes this page; without `--write` it compares the page with
the build. [Counted turns](../benchmarks/amd.md) stand on a page of their own.

| architecture | kernel | registers a lane: vector + accumulation | LDS, bytes | waves a SIMD |
|---|---|---|---|---|
{kernels}

## Accesses of LDS

Passes of each access, divided by those that it needs at least (`kernels/hip/tools/lds_banks.py`):
1 means that no banks conflict.

| architecture | kernel | accesses without conflicts | accesses with conflicts, and their passes |
|---|---|---|---|
{accesses}
"""

TURNS_PAGE = """# Counted turns of the AMD kernels

No AMD device has timed these kernels. This page counts the clocks of their compiled inner loops
instead. `./dev hip-report --turns PAGE --write` makes it; without `--write` it compares the page
with the build. All figures are results of a model:

- memory at {memory};
- matrix instructions at the data sheet's rate, LDS at 128 bytes a clock and CU with its bank
  conflicts, four clocks to issue any instruction (`kernels/hip/tools/report.py`);
- a turn follows the code of one wave in order, with its own waits
  (`kernels/hip/tools/timeline.py`).

## Absorbed attention

Clocks of one turn on one CU, by the pipe that they keep busy, and with the waits. "Of memory" is
the turn's time, or that of its busiest pipe, divided by the time in which the memory delivers its
rows; `//kernels/hip:resource_usage_test` fails above the limit. The rates are those of all CUs in
such turns: rows that come from the memory, and products.

{absorbed}

## Up-projection and attention of the expanded form

Their rows come from the caches, so they have no share of the memory's time. Where two blocks share
a CU, one works while the other waits, so the rate is at most that of the busiest pipe.

{expanded}

## Launches: where tensors lie, gates and signals

One layer of a batch of tokens that are decoded, with 128 heads of DeepSeek-V3 and 4,096 cached rows
of bf16 for each token: the attention alone at the memory's rate, and with its tensors. Queries and
outputs in GPU memory that the client shares are used where they lie; without that, a copy on the
device would read and write them once. Tensors in host memory cross the link (57 GB/s: PCIe 5.0 x16)
before and after the kernels. The last column is the time with kernels that take queries while they
arrive; such kernels exist for sm_90 only.

{tensors}

A gate and a signal replace calls of a host thread: its wait for an event, and a launch. Only their
own instructions are counted. Reads and stores of words in host memory take the link's latency,
which this model does not have.

{words}
"""
ABSORBED_COLUMNS = ("architecture", "kernel", "packed rows", "a cached row", "products", "a turn",
                    "memory", "matrix", "LDS", "issue", "with waits", "of memory", "limit", "TB/s",
                    "TFLOPS")
EXPANDED_COLUMNS = ("architecture", "kernel", "blocks a CU", "a turn", "matrix", "LDS", "issue",
                    "with waits", "TFLOPS")


def table(columns, rows):
    """A table of markdown."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines)


def device_rates(arch, loop, clocks, blocks=1):
    """TB/s and TFLOPS of all CUs if each of their blocks takes a turn in `clocks`."""
    cus, ghz, _ = MACHINE[arch]
    each = cus * ghz * blocks / clocks
    return loop.read * each / 1e3, loop.flop * each / 1e3


def absorbed_turns(loops, accesses):
    """The rows of the table of absorbed attention."""
    for r, loop, counts, turn in loops:
        if not (v := accesses.variants.get((r.arch, r.kernel))):
            continue
        clocks = bounds(r.arch, counts, loop.read, lds_clocks_of(accesses, r.arch, r.kernel))
        memory, matrix, lds, issue = clocks
        share = of_memory(clocks, turn)
        rate, flops = device_rates(r.arch, loop, memory * max(1, share))
        yield (r.arch, f"`{r.kernel}`", v.rows, f"{v.row_bytes} bytes", v.products,
               f"{v.tile} rows", f"{memory:.0f}", matrix, f"{lds:.0f}", issue,
               f"{turn.clocks:.0f}", f"{share:.2f}", TURN.get((r.arch, r.kernel), ""),
               f"{rate:.1f}", f"{flops:.0f}")


def expanded_turns(loops, accesses):
    """The rows of the table of the expanded form."""
    for r, loop, counts, turn in loops:
        if (r.arch, r.kernel) in accesses.variants:
            continue
        _, matrix, lds, issue = bounds(r.arch, counts, loop.read,
                                       lds_clocks_of(accesses, r.arch, r.kernel))
        blocks = r.occupancy
        busiest = blocks * max(matrix, lds, issue)
        _, flops = device_rates(r.arch, loop, max(turn.clocks, busiest), blocks)
        yield (r.arch, f"`{r.kernel}`", blocks, loop.what, matrix, f"{lds:.0f}", issue,
               f"{turn.clocks:.0f}", f"{flops:.0f}")


def turns_page(loops, accesses, assembly):
    """The page of docs/benchmarks about these results; `assembly` by architecture."""
    memory = ", ".join(f"{bandwidth} TB/s over {cus} CUs at {ghz} GHz on {arch}"
                       for arch, (cus, ghz, bandwidth) in MACHINE.items())
    return TURNS_PAGE.format(
        memory=memory, absorbed=table(ABSORBED_COLUMNS, absorbed_turns(loops, accesses)),
        expanded=table(EXPANDED_COLUMNS, expanded_turns(loops, accesses)),
        words=table(launches.COLUMNS, [row for arch, text in assembly.items()
                                       for row in launches.word_rows(arch, text, ISSUE_CLOCKS)]),
        tensors=table(launches.TENSOR_COLUMNS,
                      [row for arch in assembly for row in launches.tensor_rows(arch, MACHINE)]))


def page_of(records, loops, accesses):
    """The page of docs/kernels about these results."""
    kernels = [f"| {r.arch} | `{r.kernel}` | {r.vgpr} + {r.agpr} | {r.lds} | {r.occupancy} |"
               for r in records if r.arch in MACHINE]
    conflicts = []
    for r, *_ in loops:
        passes = {name: accesses.slowdown(r.arch, r.kernel, name)
                  for name in accesses.instructions(r.arch, r.kernel)}
        free = ", ".join(f"`{name}`" for name, factor in passes.items() if factor <= 1)
        slow = ", ".join(f"`{name}` {factor:.2f}" for name, factor in passes.items() if factor > 1)
        conflicts.append(f"| {r.arch} | `{r.kernel}` | {free or 'none'} | {slow or 'none'} |")
    return PAGE.format(kernels="\n".join(kernels), accesses="\n".join(conflicts))


def check_page(path, page, write):
    """Writes the page, or yields a fault if the file differs from it."""
    if write:
        path.write_text(page, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != page:
        print(page)
        yield f"{path} is out of date, the page above is as it must be"


def main():
    """Prints the report; the exit status is 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / ".bazel/bin/kernels/hip")
    parser.add_argument("--page", type=pathlib.Path, help="the page that must match the build")
    parser.add_argument("--turns", type=pathlib.Path, help="the page of turns that must match it")
    parser.add_argument("--write", action="store_true", help="bring the pages up to date")
    options = parser.parse_args()
    folder = options.build
    records = usage.parse((folder / "usage.txt").read_text(encoding="utf-8"))
    if not records:
        print("hip-report: no kernel was compiled", file=sys.stderr)
        return 1
    print(f"{'arch':8}{'kernel':32}{'VGPR':>6}{'AGPR':>6}{'SGPR':>6}{'LDS':>8}{'scratch':>9}"
          f"{'spills':>8}{'waves/SIMD':>12}")
    for r in records:
        print(f"{r.arch:8}{r.kernel:32}{r.vgpr:6}{r.agpr:6}{r.sgpr:6}{r.lds:8}{r.scratch:9}"
              f"{r.spills:8}{r.occupancy:12}")
    accesses = lds_banks.Accesses(
        (folder / "host_images/shared_accesses.txt").read_text(encoding="utf-8"))
    faults = [fault for r in records for fault in r.faults()]
    loops = read_loops(records, accesses, folder, faults)
    for r, loop, counts, turn in loops:
        print_loop(r, loop, counts, turn, accesses)
    assembly = {arch: (folder / f"{arch}.s").read_text(encoding="utf-8") for arch in MACHINE}
    for arch, text in assembly.items():
        for row in launches.word_rows(arch, text, ISSUE_CLOCKS):
            print("  ".join(map(str, row)))
    if options.page is not None:
        faults += check_page(options.page, page_of(records, loops, accesses), options.write)
    if options.turns is not None:
        faults += check_page(options.turns, turns_page(loops, accesses, assembly), options.write)
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"\n{len(records)} kernels, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
