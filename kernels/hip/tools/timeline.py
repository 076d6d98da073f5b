"""Follows one wave through a steady turn of a compiled loop, with the waits in its code.

Counting how long pipes are busy assumes that they overlap. The s_waitcnt instructions of the
compiled loop decide whether they do. So this module follows the instructions of one turn in order.
It gives the clocks that the turn takes, and how long each load from memory was in flight before the
loop first waited for it. It is a model, not a measurement: latencies are constants below, waves of
a block run in step, and data from memory is assumed to have arrived when it is waited for.
"""

import dataclasses
import re

ISSUE_CLOCKS = 4    # for any instruction: a 16-lane SIMD takes 64 lanes in four clocks
LDS_LATENCY = 128   # from the read to its data, with no other reads
TURNS = 6           # turns to follow; the last one is reported


@dataclasses.dataclass
class Block:
    """A basic block: its instructions as (name, operands), and its successors."""

    label: str
    depth: int = 0
    header: bool = False
    rare: bool = False
    code: list = dataclasses.field(default_factory=list)


def blocks_of(assembly, kernel):
    """The basic blocks of a kernel in the order of the text."""
    blocks, inside = [], False
    for line in assembly.splitlines():
        if line.startswith(kernel + ":"):
            inside = True
            blocks.append(Block(kernel))
        if not inside:
            continue
        if label := re.match(r"(?:(\.LBB\w+):|; %bb\.\d+)", line):
            if blocks[-1].label or blocks[-1].code:
                blocks.append(Block(""))
            blocks[-1] = Block(label.group(1) or "")
        if found := re.search(r"(?:Loop Header:|in Loop: Header=\S+) Depth=(\d+)", line):
            blocks[-1].depth = int(found.group(1))
            blocks[-1].header = "Loop Header" in line
        elif "; rare path begins" in line:
            blocks[-1].rare = True
        elif code := re.match(r"\s+([a-z]\w+)\s*([^;]*)", line):
            blocks[-1].code.append((re.sub(r"_e(32|64)$", "", code.group(1)),
                                    code.group(2).strip()))
            if code.group(1) == "s_endpgm":
                break
            if code.group(1).startswith(("s_cbranch", "s_branch")):
                blocks.append(Block("", blocks[-1].depth))
    return blocks


def steady_turn(blocks, depth=2):
    """Instructions of one turn of the loop at `depth`, in the order in which they run. At each
    branch it takes the way that is not marked as rare and stays in the loop; of two such ways, the
    one without a jump. If there are several loops, it takes the one with most matrix instructions.
    """
    at = {block.label: i for i, block in enumerate(blocks) if block.label}

    def usual(i):
        """Returns true if block i belongs to the steady turn."""
        return i < len(blocks) and blocks[i].depth == depth and not blocks[i].rare

    def stays(i):
        """Returns true if block i does, and does not only jump out of the loop."""
        if not usual(i):
            return False
        name, target = blocks[i].code[-1] if blocks[i].code else ("", "")
        return name != "s_branch" or usual(at[target])

    best = []
    for start, block in enumerate(blocks):
        if block.header and block.depth == depth:
            turn, i, seen = [], start, set()
            while i not in seen and usual(i):
                seen.add(i)
                turn += blocks[i].code
                ahead = i + 1
                if blocks[i].code and (name := blocks[i].code[-1][0]).startswith(
                        ("s_branch", "s_cbranch")):
                    jump = at[blocks[i].code[-1][1]]
                    # A block may be rare as a whole, or lead only to rare blocks.
                    if name == "s_branch" or not stays(ahead):
                        ahead = jump
                i = ahead
            if i == start and _matrix(turn) > _matrix(best):
                best = turn
    return best


def _matrix(code):
    return sum(name.startswith("v_mfma") for name, _ in code)


@dataclasses.dataclass
class Turn:
    """Measures of one steady turn, in clocks."""

    clocks: int
    lead: int  # shortest time from a load or copy to the first wait for it; 0: loop without loads
    waits_for_all: int  # waits that leave no load or copy in flight
    loads: int  # loads and copies that it starts
    left: int   # these and earlier ones in flight at its first barrier; -1: no barrier


def follow(code, matrix_clocks, lds_clocks, waves):
    """The last of TURNS turns of `code`."""
    now, matrix_free, lds_free, reads, loads, turns = 0, 0, 0, [], [], []
    for _ in range(TURNS):
        start, lead, waits_for_all, started, left = now, None, 0, 0, -1
        for name, operands in code:
            if name in matrix_clocks:
                now = max(now, matrix_free)
                matrix_free = now + matrix_clocks[name]
            if name.startswith("ds_"):
                # Waves run in step, so a wave's turn at the LDS takes as long as all waves'
                # accesses.
                lds_free = max(now, lds_free) + waves * lds_clocks.get(name, 2)
                reads.append(lds_free + LDS_LATENCY)
            elif name.startswith(("global_load", "buffer_load")):
                if name.startswith("global_load_lds"):  # loads whose data is written later
                    lds_free = max(now, lds_free) + waves * lds_clocks.get(name, 2)
                loads.append(now)
                started += 1
            elif name == "s_barrier" and left < 0:
                left = len(loads)
            elif name == "s_waitcnt":
                if limit := re.search(r"lgkmcnt\((\d+)\)", operands):
                    while len(reads) > int(limit.group(1)):
                        now = max(now, reads.pop(0))
                if limit := re.search(r"vmcnt\((\d+)\)", operands):
                    waits_for_all += limit.group(1) == "0"
                    while len(loads) > int(limit.group(1)):
                        issued = loads.pop(0)
                        lead = now - issued if lead is None else min(lead, now - issued)
            elif name == "s_nop":
                now += ISSUE_CLOCKS * int(operands)
            now += ISSUE_CLOCKS
        turns.append(Turn(now - start, lead or 0, waits_for_all, started, left))
    return turns[-1]
