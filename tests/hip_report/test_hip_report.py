"""The report on the device kernels refuses every fault that it must, and counts the right loop."""

import collections
import importlib.util
import pathlib
import sys
import unittest

PATH = pathlib.Path(__file__).resolve().parents[2] / "kernels/hip/tools/report.py"
SPEC = importlib.util.spec_from_file_location("hip_report", PATH)
report = importlib.util.module_from_spec(SPEC)
sys.modules["hip_report"] = report
sys.path.insert(0, str(PATH.parent))
SPEC.loader.exec_module(report)


def amd(kernel, vgpr_spill=0, scratch=0, lds=1024):
    prefix = "kernels/hip/device/device_code.hip:1:1: remark: "
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
\ts_branch .LBB0_2
.LBB0_6: ;   in Loop: Header=BB0_2 Depth=2
\tv_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]
\ts_cbranch_scc0 .LBB0_7
.LBB0_2: ;   Parent Loop BB0_1 Depth=1
         ; =>  This Inner Loop Header: Depth=2
\ts_waitcnt vmcnt(1)
\tglobal_load_lds_dwordx4 v[8:9], off
\tds_read_b128 v[0:3], v9
\ts_cbranch_vccz .LBB0_5
; %bb.4: ;   in Loop: Header=BB0_2 Depth=2
\t;;#ASMSTART
\t; rare path begins
\t;;#ASMEND
\tv_mul_f32_e32 v1, v2, v3
\ts_waitcnt vmcnt(0)
.LBB0_5: ; %name
         ;   in Loop: Header=BB0_2 Depth=2
\ts_waitcnt lgkmcnt(0)
\tv_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]
\tv_exp_f32_e32 v1, v2
\ts_branch .LBB0_6
.LBB0_7: ;   in Loop: Header=BB0_1 Depth=1
\tv_exp_f32_e32 v1, v2
\ts_endpgm
"""

WORDS = """mla_gate:
\ts_load_dword s16, s[0:1], 0x10
.LBB1_1: ; =>This Loop Header: Depth=1
\ts_add_i32 s8, s8, 1
\ts_cbranch_vccnz .LBB1_3
.LBB1_2: ;   Parent Loop BB1_1 Depth=1
         ; =>  This Inner Loop Header: Depth=2
\ts_memrealtime s[4:5]
\tglobal_load_dword v1, v0, s[10:11] sc0 sc1
\ts_waitcnt vmcnt(0)
\ts_cbranch_vccz .LBB1_2
.LBB1_3:
\ts_endpgm
mla_signal:
\ts_load_dwordx2 s[4:5], s[0:1], 0x0
\ts_waitcnt lgkmcnt(0)
\tglobal_store_dword v[2:3], v4, off sc0 sc1
\tbuffer_wbl2 sc0 sc1
\tglobal_store_dword v[2:3], v4, off sc0 sc1
\tglobal_store_byte v[4:5], v1, off
\ts_endpgm
"""


def turn(lines, waves=1):
    """The repeated part of a loop made of these instructions."""
    code = [tuple(line.split(" ", 1)) if " " in line else (line, "") for line in lines]
    return report.timeline.follow(code, report.MATRIX_CLOCKS["gfx950"], report.LDS_CLOCKS, waves)


class HipReportTest(unittest.TestCase):
    def test_clean_kernel_has_no_fault(self):
        (usage,) = report.usage.parse("arch gfx950\n" + amd("mla_attend_64"))
        self.assertEqual((usage.arch, usage.kernel, usage.vgpr, usage.agpr, usage.sgpr),
                         ("gfx950", "mla_attend_64", 256, 12, 80))
        self.assertEqual(list(usage.faults()), [])

    def test_spill_scratch_and_lds_are_faults(self):
        text = "arch gfx942\n" + "\n".join(
            [amd("a", vgpr_spill=3), amd("b", scratch=16), amd("c", lds=65537)])
        faults = [fault for usage in report.usage.parse(text) for fault in usage.faults()]
        self.assertEqual(faults, ["gfx942 a: 3 spills", "gfx942 b: 16 bytes of scratch",
                                  "gfx942 c: 65537 bytes of LDS, limit 65536"])

    def test_ptxas_spills_and_stack_are_faults(self):
        (usage,) = report.usage.parse(NVIDIA)
        self.assertEqual(usage.vgpr, 255)
        self.assertEqual(list(usage.faults()), ["sm_90 mla_attend_16: 12 spills",
                                                "sm_90 mla_attend_16: 8 bytes of scratch"])

    def test_code_objects_are_of_the_version_that_every_rocm_loads(self):
        def image(abi, system=64):
            return b"\x7fELF\x02\x01\x01" + bytes([system, abi]) + bytes(55)
        self.assertEqual(list(report.code_object_faults("gfx942", image(3))), [])
        for bad, what in [(image(4), "code object of version 6, must be 5"),
                          (image(2), "code object of version 4, must be 5"),
                          (image(3, system=0), "the image is not a code object"),
                          (b"MZ" + bytes(62), "the image is not a code object"),
                          (b"", "no code object was built")]:
            self.assertEqual(list(report.code_object_faults("gfx950", bad)), [f"gfx950: {what}"])

    def test_the_page_has_every_kernel_and_every_conflict(self):
        usages = report.usage.parse("arch gfx950\n" + amd("mla_attend_64") + "\n" + amd("mla_move"))

        class Accesses:
            """Two accesses, of which one conflicts."""

            variants = {("gfx950", "mla_attend_64"): report.lds_banks.Variant(
                64, 32, "bf16", 1152, 576, 512)}

            @staticmethod
            def instructions(_arch, _kernel):
                return ["ds_read_b128", "ds_read_b64_tr_b8"]

            @staticmethod
            def slowdown(_arch, _kernel, name):
                return 2.0 if name.endswith("tr_b8") else 1.0

        loop = report.Loop("KV tile of 32 rows", 1 << 20, 32 * 1152)
        code = report.inner_loop(ASSEMBLY, "mla_attend_64")
        counts = collections.Counter(name for name, _ in code)
        turn = report.turn_of("gfx950", code, report.LDS_CLOCKS)
        page = report.page_of(usages, [(usages[0], loop, counts, turn)], Accesses())
        self.assertIn("| gfx950 | `mla_move` | 256 + 12 | 1024 | 1 |", page)
        self.assertIn("| gfx950 | `mla_attend_64` | `ds_read_b128` | `ds_read_b64_tr_b8` 2.00 |",
                      page)
        other = report.usage.Usage("gfx950", "mla_expand", occupancy=2)
        turns = report.turns_page([(usages[0], loop, counts, turn), (other, loop, counts, turn)],
                                  Accesses(), {"gfx950": WORDS})
        # Memory takes longer than the turn, so its rate is the one of the table.
        self.assertIn("| gfx950 | `mla_attend_64` | 64 | 1152 bytes | bf16 | 32 rows | 3775 | 32 | "
                      f"64 | 20 | {turn.clocks} | 0.06 | 1.0 | 6.0 | 171 |", turns)
        rate = (1 << 20) * 256 * 2.4 * 2 / turn.clocks / 1e3
        self.assertIn("| gfx950 | `mla_expand` | 2 | KV tile of 32 rows | 32 | 64 | 20 | "
                      f"{turn.clocks} | {rate:.0f} |", turns)
        self.assertIn("| gfx950 | a gate, one look at its word | 4 instructions, 16 clocks, ",
                      turns)
        self.assertIn("| gfx950 | a signal, to its word | 5 instructions, 20 clocks, ", turns)
        # 35.7 MB: read and written at 6 TB/s, or over the link; queries alone take 331 us of it.
        self.assertIn("| gfx950 | 128 | 35.7 MB | 100.7 us | 112.5 us | 726 us | 625 us |", turns)

    def test_gates_and_signals_without_their_accesses_are_no_figures(self):
        with self.assertRaisesRegex(ValueError, "no loop that loads a word"):
            report.launches.look_of_gate(WORDS.replace("global_load_dword", "s_load_dword"))
        with self.assertRaisesRegex(ValueError, "no word for the host"):
            report.launches.path_of_signal(WORDS.replace("off sc0 sc1", "off"))

    def test_the_steady_turn_stays_in_the_loop(self):
        # The last block of the turn jumps back; the one after it only leaves the loop.
        leaving = ASSEMBLY.replace("\ts_branch .LBB0_6\n.LBB0_7", """\ts_cbranch_scc1 .LBB0_6
; %bb.8: ;   in Loop: Header=BB0_2 Depth=2
\ts_branch .LBB0_7
.LBB0_7""")
        names = [name for name, _ in report.inner_loop(leaving, "mla_attend_64")]
        self.assertEqual(len(names), 10)
        self.assertEqual(names[7], "s_cbranch_scc1")

    def test_the_steady_turn_is_followed_without_rare_paths(self):
        names = [name for name, _ in report.inner_loop(ASSEMBLY, "mla_attend_64")]
        self.assertEqual(names, ["s_waitcnt", "global_load_lds_dwordx4", "ds_read_b128",
                                 "s_cbranch_vccz", "s_waitcnt", "v_mfma_f32_16x16x32_bf16",
                                 "v_exp_f32", "s_branch", "v_mfma_f32_16x16x32_bf16",
                                 "s_cbranch_scc0"])
        self.assertEqual(report.inner_loop(ASSEMBLY, "mla_attend_128"), [])

    def test_pipes_are_counted_over_one_turn(self):
        counts = collections.Counter(
            name for name, _ in report.inner_loop(ASSEMBLY, "mla_attend_64"))
        memory, matrix, lds, issue = report.bounds("gfx950", counts, 32 * 1152,
                                                  report.LDS_CLOCKS)
        self.assertAlmostEqual(memory, 32 * 1152 / (6000 / 256 / 2.4))
        self.assertEqual((matrix, lds, issue), (32, 64, 20))

    def test_a_wait_for_lds_takes_its_latency_and_the_turns_of_all_waves(self):
        waiting = ["ds_read_b128 v[0:3], v9", "s_waitcnt lgkmcnt(0)", "v_add_f32 v1, v2, v3"]
        latency = report.timeline.LDS_LATENCY
        self.assertEqual(turn(waiting).clocks, 8 + latency + 8)
        self.assertEqual(turn(waiting, waves=4).clocks, 32 + latency + 8)
        self.assertEqual(turn([waiting[0], "s_waitcnt lgkmcnt(1)", waiting[2]]).clocks, 4 + latency)

    def test_matrix_products_queue_up(self):
        product = "v_mfma_f32_32x32x16_bf16 a[0:15], v[0:3], v[4:7], a[0:15]"
        self.assertEqual(turn([product]).clocks, 32)
        self.assertEqual(turn([product, "s_nop 4"]).clocks, 32)
        self.assertEqual(turn([product, "s_nop 15"]).clocks, 68)

    def test_loads_are_timed_to_the_first_wait_for_them(self):
        load, work = "global_load_lds_dwordx4 v[8:9], off", ["v_add_f32 v1, v2, v3"] * 100
        early = turn([load, "s_waitcnt vmcnt(0)"] + work)
        self.assertEqual((early.lead, early.waits_for_all), (4, 1))
        late = turn(["s_waitcnt vmcnt(1)", load] + work)
        self.assertEqual((late.lead, late.waits_for_all), (2 * late.clocks - 4, 0))
        self.assertEqual(turn(work).lead, 0)

    def test_loops_that_do_not_overlap_are_faults(self):
        def faults(kernel="mla_attend_128", arch="gfx950", clocks=(3775, 2176, 2464, 2032),
                   turn_clocks=3770, lead=9000, waits_for_all=0):
            turned = report.timeline.Turn(turn_clocks, lead, waits_for_all, loads=10, left=20)
            return list(report.loop_faults(arch, kernel, clocks, turned))

        self.assertEqual(faults(), [])
        self.assertEqual(faults(turn_clocks=3780),
                         ["gfx950 mla_attend_128: takes more than 1.0 of the memory's time"])
        self.assertEqual(faults(turn_clocks=9000, arch="gfx942"), [])
        self.assertEqual(faults(waits_for_all=1),
                         ["gfx950 mla_attend_128: waits for all copies from memory in every turn"])
        self.assertEqual(faults(arch="gfx942", lead=100, waits_for_all=1),
                         ["gfx942 mla_attend_128: waits for loads 100 clocks after they started"])
        small = {"kernel": "mla_attend_64", "turn_clocks": 3500}
        self.assertEqual(faults(**small), [])
        self.assertEqual(faults(**small, clocks=(3775, 1088, 3800, 1360)),
                         ["gfx950 mla_attend_64: takes more than 1.0 of the memory's time"])
        self.assertEqual(faults(kernel="mla_attend_64", turn_clocks=3900),
                         ["gfx950 mla_attend_64: takes more than 1.0 of the memory's time"])
        self.assertEqual(faults(kernel="mla_attend_expanded", lead=0, waits_for_all=4), [])

    def test_rows_of_8_bits_have_a_bound_of_their_own(self):
        def faults(kernel, turn_clocks):
            turned = report.timeline.Turn(turn_clocks, 9000, 0, loads=12, left=12)
            return list(report.loop_faults("gfx950", kernel, (3775, 2176, 1648, 2648), turned))

        small = "mla_attend_64_fp8_tensor"
        self.assertEqual(faults(small, 4300), [])
        self.assertEqual(faults(small, 4400),
                         [f"gfx950 {small}: takes more than 1.15 of the memory's time"])
        self.assertEqual(faults("mla_attend_128_fp8_tensor", 9000), [])

    def test_waits_that_leave_too_many_copies_or_too_few_are_faults(self):
        def faults(loads, left, kernel="mla_attend_64", barrier=("s_barrier ",), arch="gfx950"):
            code = [f"s_waitcnt vmcnt({left})", *barrier,
                    *["global_load_lds_dwordx4 v[8:9], off"] * loads]
            return list(report.stage_faults(arch, kernel, turn(code)))

        self.assertEqual(faults(10, 20), [])
        # One load of the repeated part is removed. With the old count, the wait then misses one of
        # the tile's loads.
        self.assertEqual(faults(9, 20), ["gfx950 mla_attend_64: 20 loads on their way at the "
                                         "barrier, must be 18 (2 turns of 9)"])
        self.assertEqual(faults(10, 21), ["gfx950 mla_attend_64: 21 loads on their way at the "
                                          "barrier, must be 20 (2 turns of 10)"])
        self.assertEqual(len(faults(10, 19)), 1)
        self.assertEqual(len(faults(10, 63)), 1)
        self.assertEqual(len(faults(10, 20, barrier=())), 1)
        self.assertEqual(faults(12, 12, kernel="mla_expand"), [])
        self.assertEqual(faults(10, 0, kernel="mla_attend_expanded"), [])
        self.assertEqual(len(faults(10, 1, kernel="mla_attend_expanded")), 1)
        self.assertEqual(faults(9, 20, arch="gfx942"), [])

    def test_uses_of_m0_beside_those_of_copies_are_faults(self):
        copy = "\ts_add_u32 m0, s57, 0x1000\n\tglobal_load_lds_dword v[4:5], off ; m0\n"
        self.assertEqual(list(report.m0_faults("gfx950", copy + "\ts_mov_b32 s0, s10\n")), [])
        self.assertEqual(list(report.m0_faults("gfx950", copy + "\ts_mov_b32 m0, s10 ; set\n")),
                         ["gfx950: m0 used by 's_mov_b32 m0, s10'"])
        self.assertEqual(list(report.m0_faults("gfx950", "\tv_readlane_b32 s1, v2, m0\n")),
                         ["gfx950: m0 used by 'v_readlane_b32 s1, v2, m0'"])

    def test_copies_take_their_turn_at_lds(self):
        read = ["ds_read_b128 v[0:3], v9", "s_waitcnt lgkmcnt(0)"]
        copy = "global_load_lds_dwordx4 v[8:9], off"
        self.assertEqual(turn([copy, *read]).clocks, turn(read).clocks + 8)

    def test_loops_are_known_by_kernel(self):
        variants = report.lds_banks.Accesses(
            "variant gfx950 mla_attend_128 128 32 bf16 1152 576 512\n"
            "variant gfx950 mla_attend_64_fp8_tensor 64 64 bf16 576 576 512\n").variants
        self.assertEqual(report.loop_of("gfx950", "mla_attend_64_fp8_tensor", variants).read,
                         64 * 576)
        self.assertEqual(report.loop_of("gfx950", "mla_attend_128", variants).flop,
                         128 * 32 * 2 * 1088)
        self.assertEqual(report.loop_of("gfx942", "mla_attend_expanded", {}).read, 32 * 640)
        self.assertEqual(report.loop_of("gfx950", "mla_attend_expanded_256", {}).read, 64 * 1024)
        self.assertEqual(report.loop_of("gfx942", "mla_expand_256", {}).read, 352 * 128)
        self.assertEqual(report.loop_of("gfx942", "mla_expand_256_fp8_row", {}).flop,
                         128 * 224 * 64 * 2)
        self.assertEqual(report.loop_of("gfx950", "mla_expand", {}).flop, 128 * 64 * 512)
        self.assertIsNone(report.loop_of("gfx950", "mla_combine", variants))


def rows(swizzle):
    """Addresses of one 16-byte chunk of 32 rows of 128 bytes, as both halves of a wave read them.
    """
    return [lane % 32 * 128 + ((lane // 32 ^ swizzle(lane % 32)) << 4) for lane in range(64)]


def block(swizzle):
    """Addresses of a transposed read: four rows by four chunks, the upper half four rows further
    down. 16 lanes have two chunks."""
    return [row * 128 + ((chunk ^ swizzle(row)) << 4) + lane % 2 * 8
            for lane in range(64)
            for row in [lane // 32 * 4 + lane % 16 // 4]
            for chunk in [lane // 16 % 2 * 2 + lane % 4 // 2]]


def three_bits(row):
    return row & 7


def spread(row):
    """The swizzle of gfx950."""
    return (row & 2) << 1 | (row & 4) >> 1 | row >> 4 & 1


class LdsBanksTest(unittest.TestCase):
    banks = report.lds_banks

    def test_every_lane_has_one_phase(self):
        for arch in self.banks.BANKS:
            for instruction, size in self.banks.BYTES.items():
                phases = self.banks.phases(arch, instruction)
                lanes = sorted(lane for phase in phases for lane in phase)
                self.assertEqual(lanes, list(range(64)), (arch, instruction))
                for phase in phases:
                    self.assertLessEqual(len(phase) * size, self.banks.BANKS[arch] * 4)

    def test_contiguous_lanes_need_one_pass_a_phase(self):
        for arch in self.banks.BANKS:
            for instruction, size in self.banks.BYTES.items():
                addresses = [lane * size for lane in range(64)]
                self.assertEqual(self.banks.passes(arch, instruction, addresses),
                                 len(self.banks.phases(arch, instruction)))

    def test_words_of_one_bank_take_turns_and_one_word_is_shared(self):
        for arch, banks in self.banks.BANKS.items():
            apart = [lane * banks * 4 for lane in range(64)]
            self.assertEqual(self.banks.passes(arch, "ds_read_b32", apart), 64)
            self.assertEqual(self.banks.passes(arch, "ds_read_b32", [0] * 64),
                             len(self.banks.phases(arch, "ds_read_b32")))

    def test_rows_conflict_on_64_banks_with_a_swizzle_by_three_bits(self):
        passes = self.banks.passes
        self.assertEqual(passes("gfx942", "ds_read_b128", rows(three_bits)), 8)
        self.assertEqual(passes("gfx950", "ds_read_b128", rows(three_bits)), 8)
        self.assertEqual(passes("gfx950", "ds_read_b128", rows(spread)), 4)
        self.assertEqual(passes("gfx950", "ds_read_b64_tr_b16", block(three_bits)), 4)
        self.assertEqual(passes("gfx950", "ds_read_b64_tr_b16", block(spread)), 2)

    def test_conflicts_and_moves_of_accumulators_are_faults(self):
        def line(kernel, addresses, count=3):
            return " ".join(map(str, ["gfx950", kernel, "ds_read_b128", count, *addresses]))

        def faults(lines, kernel="mla_attend_128", arch="gfx950", **counts):
            accesses = self.banks.Accesses("\n".join(lines))
            return list(report.conflict_faults(accesses, arch, kernel, counts))

        clean, slow = line("mla_attend_128", rows(spread)), line("mla_attend_128", rows(three_bits))
        self.assertEqual(faults([clean]), [])
        self.assertEqual(faults([clean, slow]), ["gfx950 mla_attend_128: banks conflict, "
                                                 "ds_read_b128 takes 1.50 times its passes"])
        self.assertEqual(faults([line("mla_expand", rows(three_bits))], kernel="mla_expand"), [])
        self.assertEqual(faults([]), ["gfx950 mla_attend_128: no accesses of LDS known"])
        self.assertEqual(faults([clean], v_accvgpr_read_b32=8, v_accvgpr_write_b32=7), [])
        self.assertEqual(len(faults([clean], v_accvgpr_read_b32=8, v_accvgpr_write_b32=8)), 1)
        self.assertEqual(faults([clean], v_accvgpr_mov_b32=1),
                         ["gfx950 mla_attend_128: 1 moves of accumulators in every turn"])
        slower = report.lds_clocks_of(self.banks.Accesses(slow), "gfx950", "mla_attend_128")
        self.assertEqual((slower["ds_read_b128"], slower["ds_read_b64_tr_b16"]), (16, 4))


if __name__ == "__main__":
    unittest.main()
