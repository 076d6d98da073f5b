"""The report over the device kernels finds what it must refuse, and counts the right loop."""

import importlib.util
import pathlib
import sys
import unittest

PATH = pathlib.Path(__file__).resolve().parents[2] / "kernels/hip/report.py"
SPEC = importlib.util.spec_from_file_location("hip_report", PATH)
report = importlib.util.module_from_spec(SPEC)
sys.modules["hip_report"] = report
SPEC.loader.exec_module(report)


def amd(kernel, vgpr_spill=0, scratch=0, lds=1024):
    prefix = "kernels/hip/device_code.hip:1:1: remark: "
    lines = [f"Function Name: {kernel}", "    VGPRs: 256", "    AGPRs: 12", "    TotalSGPRs: 80",
             f"    ScratchSize [bytes/lane]: {scratch}", "    Occupancy [waves/SIMD]: 1",
             "    SGPRs Spill: 0", f"    VGPRs Spill: {vgpr_spill}",
             f"    LDS Size [bytes/block]: {lds}"]
    return "\n".join(prefix + line + " [-Rpass-analysis=kernel-resource-usage]" for line in lines)


NVIDIA = """arch sm_90
ptxas info    : Compiling entry function 'mla_attend_16' for 'sm_90a'
ptxas info    : Function properties for mla_attend_16
    8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""

ASSEMBLY = """mla_attend_64:
\ts_load_dwordx2 s[0:1], s[2:3], 0x0
.LBB0_1: ; =>This Loop Header: Depth=1
         ;     Child Loop BB0_2 Depth 2
\tv_mfma_f32_32x32x16_bf16 a[0:15], v[0:3], v[4:7], a[0:15]
.LBB0_2: ;   Parent Loop BB0_1 Depth=1
         ; =>  This Inner Loop Header: Depth=2
\tds_read_b128 v[0:3], v9
\tv_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]
\tv_exp_f32_e32 v1, v2
; %bb.3: ;   in Loop: Header=BB0_2 Depth=2
\tv_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]
.LBB0_4: ;   in Loop: Header=BB0_1 Depth=1
\tv_exp_f32_e32 v1, v2
\ts_endpgm
"""


class HipReportTest(unittest.TestCase):
    def test_clean_kernel_has_no_fault(self):
        (usage,) = report.parse_usage("arch gfx950\n" + amd("mla_attend_64"))
        self.assertEqual((usage.arch, usage.kernel, usage.vgpr, usage.agpr, usage.sgpr),
                         ("gfx950", "mla_attend_64", 256, 12, 80))
        self.assertEqual(list(usage.faults()), [])

    def test_spill_scratch_and_lds_are_faults(self):
        text = "arch gfx942\n" + "\n".join(
            [amd("a", vgpr_spill=3), amd("b", scratch=16), amd("c", lds=65537)])
        faults = [fault for usage in report.parse_usage(text) for fault in usage.faults()]
        self.assertEqual(faults, ["gfx942 a: 3 spills", "gfx942 b: 16 bytes of scratch",
                                  "gfx942 c: 65537 bytes of LDS, limit 65536"])

    def test_ptxas_spills_and_stack_are_faults(self):
        (usage,) = report.parse_usage(NVIDIA)
        self.assertEqual(usage.vgpr, 255)
        self.assertEqual(list(usage.faults()), ["sm_90 mla_attend_16: 12 spills",
                                                "sm_90 mla_attend_16: 8 bytes of scratch"])

    def test_only_the_tile_loop_is_counted(self):
        counts = report.tile_loop(ASSEMBLY, "mla_attend_64")
        self.assertEqual(counts, {"ds_read_b128": 1, "v_mfma_f32_16x16x32_bf16": 2, "v_exp_f32": 1})
        memory, matrix, lds, issue = report.bounds("gfx950", counts, 32 * 1152)
        self.assertAlmostEqual(memory, 32 * 1152 / (6000 / 256 / 2.4))
        self.assertEqual((matrix, lds, issue), (32, 32, 16))

    def test_rare_paths_are_left_out(self):
        begin = "\tds_read_b128 v[0:3], v9\n"
        rare = begin + "\t; rare path begins\n" + begin + "\t; rare path ends\n" + begin
        counts = report.tile_loop(ASSEMBLY.replace(begin, rare), "mla_attend_64")
        self.assertEqual(counts["ds_read_b128"], 2)

    def test_loops_are_known_by_kernel(self):
        self.assertEqual(report.loop_of("gfx950", "mla_attend_128").flop, 128 * 32 * 2 * 1088)
        self.assertEqual(report.loop_of("gfx942", "mla_attend_expanded").read, 32 * 640)
        self.assertEqual(report.loop_of("gfx950", "mla_expand").flop, 128 * 64 * 512)
        self.assertIsNone(report.loop_of("gfx950", "mla_combine"))


if __name__ == "__main__":
    unittest.main()
