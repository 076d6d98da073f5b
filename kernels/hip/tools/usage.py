"""Resources of the compiled device kernels, as the compilers report them."""

import dataclasses
import re

LDS_LIMIT = {"gfx950": 160 * 1024, "gfx942": 64 * 1024, "sm_90": 227 * 1024}


@dataclasses.dataclass
class Usage:
    """Resources of one kernel on one architecture."""

    arch: str
    kernel: str
    vgpr: int = 0
    agpr: int = 0
    sgpr: int = 0
    lds: int = 0
    scratch: int = 0
    spills: int = 0
    occupancy: int = 0

    def faults(self):
        """Conditions that keep the kernel from being shipped, as text."""
        where = f"{self.arch} {self.kernel}"
        if self.spills:
            yield f"{where}: {self.spills} spills"
        if self.scratch:
            yield f"{where}: {self.scratch} bytes of scratch"
        if self.lds > LDS_LIMIT[self.arch]:
            yield f"{where}: {self.lds} bytes of LDS, limit {LDS_LIMIT[self.arch]}"


AMD_FIELDS = [("VGPRs", "vgpr"), ("AGPRs", "agpr"), ("TotalSGPRs", "sgpr"),
              ("ScratchSize [bytes/lane]", "scratch"), ("LDS Size [bytes/block]", "lds"),
              ("Occupancy [waves/SIMD]", "occupancy")]


def parse(text):
    """Usage records of usage.txt, in its order."""
    records, arch = [], None
    for line in text.splitlines():
        if line.startswith("arch "):
            arch = line.split()[1]
            continue
        if name := re.search(r"remark: +Function Name: (\S+)", line):
            records.append(Usage(arch, name.group(1)))
        elif name := re.search(r"Compiling entry function '(\S+)'", line):
            records.append(Usage(arch, name.group(1)))
        elif value := re.search(r"remark: +([^:]+): (\d+) \[-Rpass", line):
            what, number = value.group(1), int(value.group(2))
            if what in ("SGPRs Spill", "VGPRs Spill"):
                records[-1].spills += number
            for label, field in AMD_FIELDS:
                if what == label:
                    setattr(records[-1], field, number)
        elif value := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line):
            records[-1].scratch = int(value.group(1))
            records[-1].spills = int(value.group(2)) + int(value.group(3))
        elif value := re.search(r"Used (\d+) registers", line):
            records[-1].vgpr = int(value.group(1))
    return records
