"""Counts what gates, signals and copies of tensors take on AMD devices.

A launch whose tensors lie in GPU memory that the client shares uses them there: nothing is copied.
Other tensors cross the host link. Gates and signals replace calls of a host thread, which no count
of device code shows, by the instructions that are counted here.
"""

import dataclasses

import timeline

# GB/s of the host link in one direction, PCIe 5.0 x16 by its data sheet (64 GB/s less framing).
LINK = {"gfx950": 57.0, "gfx942": 57.0}
# bf16 queries and outputs of one token under 128 heads of DeepSeek-V3, in bytes.
QUERY_BYTES = 128 * (512 + 64) * 2
OUTPUT_BYTES = 128 * 512 * 2
# A cached row, and rows of the context that the attention reads for each token.
ROW_BYTES, CONTEXT = (512 + 64) * 2, 4096
BATCHES = (1, 32, 128)
COLUMNS = ("architecture", "what", "takes")
TENSOR_COLUMNS = ("architecture", "batch", "queries and outputs", "where they lie",
                  "copied by `mla_copy_tensors`", "over the link", "over the link, streamed")


def is_store_for_host(name, operands):
    """True for a store that another process sees: it writes past the caches."""
    return name == "global_store_dword" and operands.endswith("sc0 sc1")


def look_of_gate(assembly):
    """Instructions of one look of mla_gate at the word that it waits for: of its inner loop."""
    deepest = max(block.depth for block in timeline.blocks_of(assembly, "mla_gate"))
    loop = [code for block in timeline.blocks_of(assembly, "mla_gate") if block.depth == deepest
            for code in block.code]
    if deepest < 2 or not any(name.startswith("global_load") for name, _ in loop):
        raise ValueError("mla_gate has no loop that loads a word")
    return len(loop)


def path_of_signal(assembly):
    """Instructions of mla_signal up to its last store of a word, paths that it skips included."""
    code = [code for block in timeline.blocks_of(assembly, "mla_signal") for code in block.code]
    stores = [i for i, (name, operands) in enumerate(code) if is_store_for_host(name, operands)]
    if not stores:
        raise ValueError("mla_signal stores no word for the host")
    return stores[-1] + 1


@dataclasses.dataclass
class Step:
    """Microseconds of one layer of a batch."""

    attention: float         # alone: tensors are used where they lie
    copied: float            # with copies on the device in addition
    before_and_after: float  # with tensors over the link
    streamed: float          # the same, queries while the attention runs


def step_of(arch, batch, machine):
    """`machine` gives CUs, GHz and the memory's TB/s of an architecture."""
    memory = machine[arch][2] * 1e6  # bytes a microsecond
    link = LINK[arch] * 1e3
    queries, outputs = batch * QUERY_BYTES, batch * OUTPUT_BYTES
    attention = batch * CONTEXT * ROW_BYTES / memory
    # Each byte is read and written once.
    copied = attention + 2 * (queries + outputs) / memory
    return Step(attention, copied, attention + (queries + outputs) / link,
                max(attention, queries / link) + outputs / link)


def word_rows(arch, assembly, issue_clocks):
    """The rows of the table of gates and signals."""
    look, path = look_of_gate(assembly), path_of_signal(assembly)
    yield (arch, "a gate, one look at its word",
           f"{look} instructions, {look * issue_clocks} clocks, and one read of the word")
    yield (arch, "a signal, to its word",
           f"{path} instructions, {path * issue_clocks} clocks, two reads and the store")


def tensor_rows(arch, machine):
    """The rows of the table of tensors."""
    for batch in BATCHES:
        step = step_of(arch, batch, machine)
        yield (arch, batch, f"{batch * (QUERY_BYTES + OUTPUT_BYTES) / 1e6:.1f} MB",
               f"{step.attention:.1f} us", f"{step.copied:.1f} us",
               f"{step.before_and_after:.0f} us", f"{step.streamed:.0f} us")
