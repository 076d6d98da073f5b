"""Plants faults in the device kernels and lets their conformance run on the host find them.

A mutation replaces one piece of text, which must occur exactly once in its file. The harness edits
a copy of kernels/, compiles the kernels of the mutation's architectures for the host (one
translation unit each) and gives the library to host_conformance as a device image. A text that is
not there, a mutation that does not compile and one that no case notices are failures. Of the last
kind, those are told apart whose text no kernel of the architecture uses: no case can find them.

    python3 tests/conformance/device_mutations.py [--sample] [NAME...]
"""

import argparse
import dataclasses
import pathlib
import platform
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = pathlib.Path("kernels/hip/device")
WORK = ROOT / "build/device_mutations"
TARGET = "//tests/conformance:host_conformance"
RUNFILES = ROOT / ".bazel/bin/tests/conformance/host_conformance.runfiles"
PROGRAM = "tests/conformance/host_conformance"
# As kernels/hip/tools/host_copts.bzl, whose flags decide how fast a lane is. GCC's own collection
# of garbage costs more than the memory it saves.
FAST = (["-march=x86-64-v3", "-mtls-dialect=gnu2"] if platform.machine() == "x86_64" else [])
COMPILE = ["g++", "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-I.",
           "-ffp-contract=off", "--param=ggc-min-heapsize=1048576", *FAST]
SOURCES = {"gfx950": "gfx950.cc", "gfx942": "gfx942.cc", "sm_90": "sm90.cc"}
# A run of this length hangs, and a hang counts as found: all cases take a minute or two.
MOST_SECONDS = 900


class HarnessError(Exception):
    """The harness itself failed, so the mutation was not tested."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    about: str
    file: str  # below kernels/hip/device
    old: str
    new: str
    archs: tuple = ("gfx950",)

    @property
    def flags(self):
        """Flags of the conformance run."""
        return ("--attention", "indexer") if "/index/" in self.file else ()


@dataclasses.dataclass
class Result:
    found: bool
    how: str
    build_seconds: float
    run_seconds: float


MUTATIONS = (
    Mutation("mask_one_key_too_many", "A row sees one key more than it may.",
             "kv/visibility.h", "const int count = limit[slot] - first -",
             "const int count = limit[slot] + 1 - first -", ("gfx950", "gfx942", "sm_90")),
    Mutation("digest_of_the_last_stripe", "The end of a part is hashed with keys of its middle.",
             "kv/digest.h", "stripe == last ? last_key : keys[s]", "keys[s]", ("gfx942", "sm_90")),
    Mutation("mask_in_the_expanded_form", "A query row of the expanded form sees the next key.",
             "amd/prefill/expanded_rows.h", "if (position >= limit", "if (position > limit"),
    Mutation("mask_of_the_last_query_row", "Causal rows do not see their own key.",
             "primitives/item.h",
             "segment->q_rows + query(p) + 1;", "segment->q_rows + query(p);"),
    Mutation("mask_tiles_judged_too_late", "A tile that the first row sees in part is not masked.",
             "kv/visibility.h", "return first + C::kTileKv > unmasked_end; }",
             "return first >= unmasked_end; }"),
    Mutation("mask_of_lists_off", "Entries that are no position of the row are attended to.",
             "kv/visibility.h", "((entries & places) >>", "(places >>", ("gfx950", "gfx942")),
    Mutation("mask_of_lists_judged_by_their_length", "Only the last tile of a list is masked.",
             "kv/visibility.h", "return left < C::kTileKv || entries != kAll; }",
             "return left < C::kTileKv; }"),
    Mutation("mask_behind_a_list", "Places after the end of a list count as its last one again.",
             "kv/visibility.h", "((entries & places) >>", "(entries >>", ("gfx950", "gfx942")),
    Mutation("mask_of_unlisted_values", "Values of rows that no list names meet probabilities.",
             "kv/visibility.h", "return kHidesValues && entries != kAll; }", "return false; }"),
    Mutation("mask_of_the_tile_before", "A tile of a list is masked as the one before.",
             "kv/visibility.h", "word_of_next = kv.seen_word(n);",
             "word_of_next = kv.seen_word(n - 1);"),
    Mutation("mask_ignored_by_warpgroups", "Warpgroups mask one key too few.",
             "sm90/wgmma.h", "s.c[i] = position < limit", "s.c[i] = position <= limit",
             ("sm_90",)),
    Mutation("wait_one_copy_short", "Every wait is content with one copy that has not landed.",
             "gfx950/tile.h", "wait_for_copies<kYounger * kPerStage>();",
             "wait_for_copies<kYounger * kPerStage + 1>();"),
    Mutation("wait_one_stage_short", "Every wait is content with one stage that has not landed.",
             "sm90/tile.h", "wait_for_copies<kYounger>();", "wait_for_copies<kYounger + 1>();",
             ("sm_90",)),
    Mutation("wait_near_the_end", "The last tiles but one are waited for as if others followed.",
             "kv/kv_stream.h", "if (later >= kStages - 2) {",
             "if (later >= kStages - 3) {"),
    Mutation("wait_of_expand", "Stages of the up-projection are waited for one copy short.",
             "amd/prefill/expand.h", "copies.template wait<kStages - 2, kCopies>();",
             "copies.template wait<kStages - 2, kCopies + 1>();"),
    Mutation("wait_for_products", "Outputs are scaled before their product is finished.",
             "sm90/prefill/expanded_wgmma.h",
             "      softmax(s, state, first, unmasked_end, scale, factor);\n"
             "      tile::wgmma_wait<0>();",
             "      softmax(s, state, first, unmasked_end, scale, factor);\n"
             "      tile::wgmma_wait<1>();", ("sm_90",)),
    Mutation("barrier_before_a_refill", "A stage is refilled while other waves may read it.",
             "kernels/attend.h", "      block_barrier();\n      if constexpr (!kCopiesBetween)",
             "      if constexpr (!kCopiesBetween)"),
    Mutation("barrier_after_a_tile", "The only stage is refilled while other waves may read it.",
             "kernels/attend.h",
             "if constexpr (Copies::kThroughRegisters && !kLandsAhead) block_barrier();", "",
             ("gfx942",)),
    Mutation("barrier_before_a_tile_lands", "A stage is written while other waves may read it.",
             "kernels/attend.h", "if constexpr (kLandsAhead) {\n      block_barrier();",
             "if constexpr (kLandsAhead) {", ("gfx942",)),
    Mutation("barrier_between_items", "An item's copies begin while the one before is read.",
             "amd/prefill/attend_expanded.h",
             "block_barrier();  // the previous item's readers are done with shared memory", ""),
    Mutation("ring_of_stages", "The stage that is read is the next one.", "kernels/attend.h",
             "stages + t % C::kStages * kStageBytes;",
             "stages + (t + 1) % C::kStages * kStageBytes;", ("gfx950", "gfx942")),
    Mutation("ring_of_page_table_entries", "Entries of the page table are overwritten too early.",
             "kv/kv_stream.h", "entries + n % kStages * kEntryBytes",
             "entries + n % (kStages - 2) * kEntryBytes"),
    Mutation("ring_ends_at_the_last_row", "Rows past the context are not taken from its last one.",
             "kv/row_source.h", "return at < end ? at : end - 1; }", "return at; }",
             ("gfx950", "gfx942")),
    Mutation("ring_of_entries", "Entries of lists are overwritten too early.", "kv/kv_stream.h",
             "kStages + kLookAhead + kFetchAhead;", "kStages + kLookAhead + kFetchAhead - 3;"),
    Mutation("entries_one_further", "A row is the one that the next entry names.",
             "kv/row_source.h", "return list + place(at); }",
             "return list + place(at) + 1; }", ("gfx950", "gfx942")),
    Mutation("entries_of_another_query_row", "Every query row takes the first one's list.",
             "kv/row_source.h", "const int q = item.work.q_begin, first",
             "const int q = 0, first"),
    Mutation("entries_of_another_piece", "Every piece of a list begins with its first entry.",
             "kv/row_source.h", "(first - of_row[0] + item.work.kv_begin)",
             "(first - of_row[0])"),
    Mutation("entries_unchecked", "An entry after the row's own position is used.",
             "kv/row_source.h", "return sees_entry(of_place) ? of_place : 0; }",
             "return of_place < 0 ? 0 : of_place; }"),
    Mutation("column_swapped", "Neighbouring rows of an accumulator change places.",
             "amd/mfma_wave.h", "4 * group(lane) + (i & 3);", "4 * group(lane) + ((i ^ 1) & 3);",
             ("gfx950", "gfx942")),
    Mutation("column_of_another_lane", "Columns of outputs change places in pairs.", "sm90/tile.h",
             "((i >> 2) & 1) * 8 + 2 * (lane & 3) + (i & 1);",
             "((i >> 2) & 1) * 8 + 2 * (lane & 3) + (~i & 1);", ("sm_90",)),
    Mutation("column_of_values", "Halves of a chunk of values change places.", "gfx950/tile.h",
             "row, col >> 3) + (col & 4) * 2;", "row, col >> 3) + (~col & 4) * 2;"),
    Mutation("swizzle_of_copies", "Copies exchange chunks by two bits of the row, not three.",
             "kv/kv_stream.h", "return (lane & 7) ^ tile::swizzle(row);",
             "return (lane & 7) ^ (tile::swizzle(row) & 3);", ("gfx950", "gfx942", "sm_90")),
    Mutation("rescale_skipped", "Outputs keep the scale of an earlier maximum.", "kernels/attend.h",
             "    if (moved) {", "    if (false) {", ("gfx950", "gfx942", "sm_90")),
    Mutation("rescale_of_the_expanded_form", "The same in the expanded form.",
             "amd/prefill/expanded_rows.h",
             "for (int f = 0; f < kOutFragments; ++f) W::scale(o[f], factor);", "",
             ("gfx950", "gfx942")),
    Mutation("rescale_of_sums", "Sums keep the scale of an earlier maximum.",
             "primitives/softmax.h",
             "      sum[slot] *= factor[slot];\n", "", ("gfx950", "sm_90")),
    Mutation("rescale_when_merging", "Parts are merged without regard to their maxima.",
             "kernels/combine.h", "sums.top != top) move(sums, weight(sums.top, top));",
             "sums.top != top) move(sums, 1.0f);"),
    Mutation("rescale_between_waves", "Sums of a row's first wave keep their own scale.",
             "kernels/combine.h",
             "    if (sums.top != negative_infinity()) move(sums, weight(sums.top, top));\n", "",
             ("gfx950", "sm_90")),
    Mutation("merge_without_the_origin", "A merged log-sum-exp lacks its origin.",
             "kernels/combine.h", "sums.origin() + log2_fast(sums.sum) * kLn2",
             "log2_fast(sums.sum) * kLn2"),
    Mutation("merge_of_shared_tiles", "Blocks that share a tile write the same partial rows.",
             "primitives/item.h", "static_cast<int64_t>(item.work.partial_row) + item.first + p;",
             "static_cast<int64_t>(item.work.partial_row) + p;", ("gfx942",)),
    Mutation("merge_of_earlier_rounds", "The sums of an earlier round have no weight.",
             "amd/prefill/expanded_rows.h", "W::score_col(lane, 0) == 0 ? 1.0f : 0.0f;", "0.0f;"),
    Mutation("append_to_the_next_row", "KV rows land one row too far.", "kv/append_kv.h",
             "pages.place(r.first_position + source_row)",
             "pages.place(r.first_position + source_row + 1)"),
    Mutation("append_rounds_with_the_scale_of_a_layer", "Groups of a row ignore their own scale.",
             "kv/append_kv.h", "put_codes(i, v, KvScaleInverse(scale));",
             "put_codes(i, v, 1.0f);"),
    Mutation("scale_of_another_group", "Rows are widened with scales of the group before.",
             "amd/formats/widened_format.h", "scale(kBlock * 64 / Layout::kRow.traits.group);",
             "scale(kBlock * 64 / Layout::kRow.traits.group / 2);", ("gfx950", "gfx942")),
    Mutation("scale_of_any_size", "Scales that are no powers of two are taken as powers.",
             "kv/kv_stream.h", "if (!tile::any(copies.template odd<kRow>())) return;",
             "if (kRow >= 0) return;", ("gfx950", "gfx942")),
    Mutation("scale_of_a_layer_left_out", "Results lack the scale of the layer.",
             "kernels/attend_results.h",
             "if constexpr (Format::Layout::kLayerScale) scale.inverse *= item.segment->kv_scale;",
             ""),
    Mutation("scale_of_copies", "Scales of rows are copied from the group before.",
             "kv/kv_stream.h", "% Layout::kScaleWords / kTileKv;",
             "% Layout::kScaleWords / kTileKv / 2;"),
    Mutation("scale_of_other_keys", "Keys are multiplied by the scale of the first group.",
             "amd/formats/code_key_format.h",
             "float_to_bits(scale[step(n, 0) / 2 * kFragments + fragment(n)])",
             "float_to_bits(scale[fragment(n)])"),
    Mutation("scale_of_values_in_groups", "All columns take the probabilities of the first group.",
             "amd/formats/code_key_format.h", "return tile::any(differences != 0);",
             "return differences == 1;"),
    Mutation("scale_of_keys_of_any_size", "Scales of keys are taken as powers of two.",
             "amd/formats/code_key_format.h",
             "bool odd() const { return tile::any(Rows::odd(scale)); }",
             "bool odd() const { return false; }"),
    Mutation("scale_of_the_next_row", "Probabilities take the scales of rows one further.",
             "amd/formats/code_key_format.h",
             "step * W::kPvDepth + 8 * W::group(tile::lane_again());",
             "step * W::kPvDepth + 8 * (W::group(tile::lane_again()) ^ 1);"),
    Mutation("mask_of_rows_past_the_end", "Values that came with the last box count, NaN included.",
             "sm90/decode/rows64_bf16/wgmma_consumer.h", "(Args::kBoxes || masks.ragged) &&",
             "masks.ragged &&", ("sm_90",)),
    Mutation("wait_before_a_box", "Boxes are copied into columns that are still being multiplied.",
             "sm90/decode/rows64_bf16/box_producer.h", "if (part % 2 == 0 && n > 0) {",
             "if (false) {", ("sm_90",)),
    Mutation("wait_for_half_a_box", "A part counts as filled before its last column block.",
             "sm90/decode/rows64_bf16/box_producer.h",
             "static_cast<uint32_t>(blocks_of(part) * L::kBlockBytes)",
             "static_cast<uint32_t>((blocks_of(part) - 1) * L::kBlockBytes)", ("sm_90",)),
    Mutation("entries_of_the_first_box", "All boxes of a tile are those of its first rows.",
             "sm90/decode/rows64_bf16/box_producer.h", "first + lane * args.box_rows;", "first;",
             ("sm_90",)),
    Mutation("column_of_the_first_box", "All boxes of a part have the columns of its first block.",
             "sm90/decode/rows64_bf16/box_producer.h", "args.rows, block * 64,",
             "args.rows, L::block(kSlot, kPartBlocks * part) * 64,", ("sm_90",)),
    # Each kernel of sm_90 for rows of 8 bits copies their scales itself.
    Mutation("scale_of_the_copied_neighbour", "Neighbouring rows exchange their scales.",
             "sm90/decode/rows64_codes/copier.h", "shared.raw_scales(slot) + to * 16, from",
             "shared.raw_scales(slot) + (to ^ 1) * 16, from", ("sm_90",)),
    Mutation("scale_of_few_copied_rows", "Neighbouring rows exchange their scales.",
             "sm90/decode/rows16_fp8/copier.h", "shared.raw_scales(ring.at) + row(i) * 16, rows",
             "shared.raw_scales(ring.at) + (row(i) ^ 1) * 16, rows", ("sm_90",)),
    Mutation("scale_of_the_group_before", "Rows are widened with scales of the wrong groups.",
             "sm90/decode/rows64_widened/widening_producer.h",
             "const int group = block / 2;", "const int group = block / 4;", ("sm_90",)),
    Mutation("entries_of_the_first_tile", "Every tile of a list has the rows of the first.",
             "kv/row_finder.h", "    at += kStep;\n", "", ("sm_90",)),
    Mutation("scales_of_the_next_step", "Rows are widened with the scales of the next step's rows.",
             "sm90/decode/rows64_widened/row_rounds.h",
             "tile::from_lane(scales.w[i], of_step(step))",
             "tile::from_lane(scales.w[i], of_step((step + 1) % kSteps))", ("sm_90",)),
    Mutation("rows_of_the_first_round", "Every round of a widened list has the rows of the first.",
             "sm90/decode/rows64_widened/row_rounds.h", "    at += kSteps * kPlaces;\n", "",
             ("sm_90",)),
    Mutation("seen_of_the_next_step", "Rows are hidden by what is seen of the next step's rows.",
             "sm90/decode/rows64_widened/row_rounds.h", "(seen_now >> step & 0x11111111u)",
             "(seen_now >> (step + 1) % kSteps & 0x11111111u)", ("sm_90",)),
    Mutation("scale_of_probabilities", "Products keep the factor of the probabilities.",
             "amd/formats/code_rounding.h", "exponent = 127 - static_cast<int>(power);",
             "exponent = 127;"),
    Mutation("scale_of_the_next_block", "Sums of scores keep the scale of their first blocks.",
             "sm90/decode/rows64_codes/rows_scorer.h", "    rescale(slot, 1, s);\n", "",
             ("sm_90",)),
    Mutation("scale_of_other_columns", "Values take the scale of the first columns of their group.",
             "sm90/decode/rows64_codes/rows_values.h", "group * (L::kBlocks / 2) + block / 2",
             "group * (L::kBlocks / 2)", ("sm_90",)),
    Mutation("scale_of_rows_with_several", "Rows count as rows of one scale by their first two.",
             "sm90/decode/rows64_codes/rows_layout.h", "for (int b = 0; b < kBlocks; ++b) one =",
             "for (int b = 0; b < 2; ++b) one =", ("sm_90",)),
    Mutation("part_of_codes_merged_early", "Parts of codes are merged before they are written.",
             "sm90/decode/rows16_fp8/attend_fp8.h",
             "    tile::named_sync<kWritten, 4 * L::kGroupThreads>();\n", "", ("sm_90",)),
    Mutation("part_of_codes_of_another_share", "Blocks of a tile merge the first block's rows.",
             "sm90/decode/rows64_codes/attend_rows.h", "part_of_block(args), shared.slot(0)",
             "{part_of_block(args).unit, 0}, shared.slot(0)", ("sm_90",)),
    Mutation("rescale_of_rounded_sums", "Sums of codes keep the scale of an earlier maximum.",
             "kernels/attend.h", "if constexpr (kCodes) state.rounded.scale(factor);", "",
             ("gfx950", "gfx942")),
    Mutation("scale_of_rounded_queries", "Logits lack the power of two of their query.",
             "kernels/attend.h", "scale *= load_queries(item, kv, queries);",
             "load_queries(item, kv, queries);", ("gfx942",)),
    Mutation("column_of_transposed_codes", "Two columns of values change places.",
             "gfx942/code_wave.h", "pair == 0 ? 0x05010400u", "pair == 0 ? 0x04000501u",
             ("gfx942",)),
    Mutation("origin_never_goes_down", "Many small probabilities are lost next to a large one.",
             "amd/formats/code_rounding.h", "sum < least ? origin - kDown : origin", "origin",
             ("gfx942",)),
    Mutation("code_above_the_largest", "Probabilities may exceed the largest code.",
             "gfx942/config.h", "kOriginSlack = 7.0f;", "kOriginSlack = 9.0f;", ("gfx942",)),
    Mutation("column_of_codes", "Halves of sixteen columns of codes change places.",
             "gfx950/tile.h", "kRows == 32 ? lane >> 4 & 1 : 0) + (i & 1) * 8;",
             "kRows == 32 ? lane >> 4 & 1 : 0) + (~i & 1) * 8;"),
    Mutation("rescale_unknown_to_other_waves", "An origin that one wave moves stays for others.",
             "kernels/attend.h", "follow(state, scale, s, moves);",
             "if (moves) follow(state, scale, s, moves);"),
    Mutation("expand_without_scales", "Rows are up-projected without the scales of their groups.",
             "amd/prefill/expand.h", "const float scale = of[0];", "const float scale = 1.0f;",
             ("gfx950", "gfx942")),
    Mutation("expand_keeps_what_is_not_finite", "Values that are not finite reach the workspace.",
             "amd/prefill/expand.h",
             "return only_finite(pack_bf16(sums.values[f].at(i + j), ",
             "return (pack_bf16(sums.values[f].at(i + j), "),
    Mutation("expanded_codes_without_their_exponent", "Values lack the power of their tile.",
             "amd/prefill/expanded_codes.h", "W::outputs(state.rows.o[n], p, v, of_values);",
             "W::outputs(state.rows.o[n], p, v);"),
    Mutation("expanded_codes_of_another_tile", "Rotated keys are taken from the other 32 rows.",
             "amd/prefill/expanded_codes.h", "load(k, f, kRotatedAt);",
             "load(k, f ^ 1, kRotatedAt);"),
    Mutation("expanded_codes_swapped", "Values of a group's two halves change places.",
             "amd/prefill/code_results.h", "CodeTile::chunk(f / 2, group, wave & 1)",
             "CodeTile::chunk(f / 2, group, ~wave & 1)"),
    Mutation("wait_of_expanded_codes", "Stages of codes are waited for one copy short.",
             "amd/prefill/expanded_codes.h", "copies.template wait<kStages - 2, kCopies>();",
             "copies.template wait<kStages - 2, kCopies + 1>();"),
    Mutation("rescale_of_expanded_codes", "Sums of codes keep the scale of an earlier maximum.",
             "amd/prefill/expanded_codes.h", "      state.rounded.scale(factor);\n", ""),
    Mutation("largest_of_one_wave", "Keys are over the power of two of the first wave's rows.",
             "amd/prefill/code_results.h", "for (int w = 1; w < kWaves; ++w) {",
             "for (int w = kWaves; w < kWaves; ++w) {"),
    Mutation("column_of_the_first_turn", "Values of a wide head's turns are all its first columns.",
             "amd/prefill/expand.h", "pairs.w_uv() + turn * kValueColumns;", "pairs.w_uv();",
             ("gfx950", "gfx942")),
    Mutation("column_of_the_turn_before", "Keys of a wide head's last turn overwrite others.",
             "amd/prefill/expand.h", "const int first_key = turn * kKeyColumns,",
             "const int first_key = 0,"),
    Mutation("project_reads_the_next_head", "Weights of the next head are used.",
             "kernels/project.h",
             "args.weights[t.weights_slot] + static_cast<int64_t>(t.head_offset + h)",
             "args.weights[t.weights_slot] + "
             "static_cast<int64_t>(t.head_offset + (h + 1) % t.num_heads)"),
    Mutation("row_product_without_the_last_step", "The last step of a split is left out.",
             "kernels/row_product.h", "end = first_step(split + 1);",
             "end = first_step(split + 1) - 1;",
             ("gfx950", "gfx942", "sm_90")),
    Mutation("row_product_of_rests_reads_on", "Weights do not repeat for the remainders.",
             "kernels/row_product.h", "step == weight_steps() - 1", "step == weight_steps()",
             ("gfx942", "sm_90")),
    Mutation("wait_of_row_products", "A stage of row products is waited for one copy short.",
             "kernels/row_product.h", "copies.template wait<kStages - 2, kCopies>();",
             "copies.template wait<kStages - 1, kCopies>();", ("gfx950", "sm_90")),
    Mutation("rows_finished_early", "A block finishes rows while sums are being stored.",
             "kernels/row_product.h", "block_barrier();\n    constexpr int kRuns",
             "constexpr int kRuns", ("sm_90",)),
    Mutation("rotation_by_the_other_sine", "The second element of a pair turns backwards.",
             "kernels/row_product.h", "return second ? y * sine + x * cosine",
             "return second ? x * cosine - y * sine", ("gfx942", "sm_90")),
    Mutation("row_groups_share_rows", "The second warpgroup multiplies the first one's rows.",
             "sm90/row_products.h", "const uint32_t own = rows + row0 * 128,",
             "const uint32_t own = rows,", ("sm_90",)),
    Mutation("wait_for_a_place_of_keys", "Keys are copied over keys that may still be read.",
             "sm90/index/index_keys.h",
             "(tile / BulkPlaces::kCount - 1) & 1u", "(tile / BulkPlaces::kCount) & 1u",
             ("sm_90",)),
    Mutation("wait_for_keys_without_scales", "Keys count as there before their scales are.",
             "sm90/index/index_keys.h",
             "expecting(full, BulkPlaces::kCodeBytes + BulkPlaces::kScaleBytes);",
             "expecting(full, BulkPlaces::kCodeBytes);", ("sm_90",)),
    Mutation("wait_for_logits", "Lists are made while ranks are still being stored.",
             "sm90/index/index_select.h", "    wait_for_previous_kernel();\n", "", ("sm_90",)),
    Mutation("index_keys_of_the_other_group", "Both groups of warps read each other's keys.",
             "sm90/index/index_keys.h", "s + t.group()", "s + 1 - t.group()", ("sm_90",)),
    Mutation("index_scales_of_other_keys", "Scales are taken from half as far into the page.",
             "sm90/index/index_keys.h", "page + pages.page_size * kIndexDim + inside * 4,",
             "page + pages.page_size * kIndexDim + inside * 2,", ("sm_90",)),
    Mutation("index_rows_of_one_warp", "Query rows from the 33rd on are taken for the 32nd.",
             "sm90/index/index_logits.h", "(count + tile::kWave - 1) / tile::kWave;", "1;",
             ("sm_90",)),
    Mutation("index_record_of_the_first_request", "All requests have the first one's pages.",
             "sm90/index/index_logits.h", "records[row.record]", "records[0]", ("sm_90",)),
    Mutation("index_ties", "The first one of equal logits is passed over.",
             "sm90/index/index_select.h", "words[k] == rank && equal++ < equals",
             "words[k] == rank && equal++ > 0 && equal <= equals + 1", ("sm_90",)),
    Mutation("index_ties_on_amd", "The same on AMD.", "amd/index/index_select.h",
             "words[k] == rank && equal++ < equals",
             "words[k] == rank && equal++ > 0 && equal <= equals + 1"),
    Mutation("index_counts_of_earlier_launches", "Counts of ranks are never cleared.",
             "amd/index/index_select.h", "      as_global<uint32_t>(from)[i] = 0;\n", ""),
    Mutation("mask_of_index_keys", "Keys past the last one are counted too.",
             "sm90/index/index_logits.h", " || at >= t.end)", ")", ("sm_90",)),
    Mutation("mask_of_repeated_index_keys", "The last key is counted as often as it is repeated.",
             "amd/index/index_logits.h", "half() != 0 || at >= end)", "half() != 0)"),
    # Only sm_90 has kernels for tiles of one row (arch_traits.h).
    Mutation("project_of_a_row_reads_the_next_head", "Weights of the next head are used.",
             "kernels/project.h", "w + static_cast<int64_t>(t.head_offset + h)",
             "w + static_cast<int64_t>(t.head_offset + (h + 1) % t.num_heads)", ("sm_90",)),
)

# One of each kind, for the quick run.
SAMPLE = ("mask_one_key_too_many", "wait_one_copy_short", "column_swapped", "rescale_skipped",
          "barrier_before_a_refill", "wait_for_products")
KINDS = ("mask", "wait", "barrier", "ring", "entries", "column", "rescale", "merge")


def run(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          check=False, **options)


def named(name):
    return next(m for m in MUTATIONS if m.name == name)


class Harness:
    """The unmutated build, and what is made of it."""

    def __init__(self):
        built = run(["bazel", "build", "--config=opt", TARGET], cwd=ROOT)
        if built.returncode != 0:
            raise HarnessError("bazel build: " + built.stderr[-2000:])
        # Copies the program, so that other builds do not change it.
        self.program = WORK / "run"
        self.tree = WORK / "tree"
        shutil.rmtree(WORK, ignore_errors=True)
        folder = next(path.parent.parent.parent for path in RUNFILES.glob(f"*/{PROGRAM}"))
        shutil.copytree(folder, self.program, ignore=shutil.ignore_patterns("*.runfiles*"))
        listing = run(["git", "ls-files", "-co", "--exclude-standard", "--", "kernels"], cwd=ROOT)
        for path in listing.stdout.splitlines():
            if path.endswith((".h", ".cc", ".hip")) and (ROOT / path).is_file():
                (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, self.tree / path)
        self.block = []
        for source in sorted((self.tree / "kernels/hip/emulator/block").glob("*.cc")):
            if source.name.endswith("_test.cc"):
                continue
            self.block.append(WORK / f"{source.stem}.o")
            self.compile(source, self.block[-1], "-O2")

    def compile(self, source, target, *flags):
        built = run([*COMPILE, *flags, "-c", source, "-o", target], cwd=self.tree)
        if built.returncode != 0:
            raise HarnessError(f"{source.name} does not compile:\n{built.stderr[-2000:]}")

    def kernels(self, arch):
        """Compiles the kernels of the tree as it is now."""
        made = WORK / f"{arch}.o"
        self.compile(self.tree / "kernels/hip/host_images" / SOURCES[arch], made)
        return made

    def library(self, arch):
        """Builds the kernels of the tree as it is now as a library."""
        made, target = self.kernels(arch), WORK / f"{arch}.so"
        linked = run(["g++", "-shared", "-Wl,-Bsymbolic", made, *self.block, "-o", target])
        if linked.returncode != 0:
            raise HarnessError(f"{arch}: does not link:\n{linked.stderr[-2000:]}")
        return target

    def conformance(self, arch, library, *flags):
        """Returns (True if all cases passed, output of the run)."""
        try:
            ended = run([self.program / PROGRAM, "--arch", arch, "--image", library,
                         "--first-failure", "1", *flags], cwd=self.program, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            return False, "hangs"
        text = ended.stderr + ended.stdout
        if ended.returncode < 0:
            text += f"FAIL ends by signal {-ended.returncode}\n"
        if ended.returncode == 2:
            raise HarnessError(f"{arch}: the conformance run says {text[-2000:]}")
        return ended.returncode == 0, text

    def find(self, mutation, arch):
        file = self.tree / DEVICE / mutation.file
        original = file.read_text()
        if original.count(mutation.old) != 1:
            raise HarnessError(f"{mutation.name}: {mutation.file} has its text "
                               f"{original.count(mutation.old)} times")
        begin = time.monotonic()
        file.write_text(original.replace(mutation.old, mutation.new))
        try:
            library = self.library(arch)
            mutated = (WORK / f"{arch}.o").read_bytes()
        finally:
            file.write_text(original)
        built = time.monotonic()
        passed, text = self.conformance(arch, library, *mutation.flags)
        lines = sorted(line for line in text.splitlines()
                       if line.startswith(("fake device", "FAIL")))
        how = lines[-1] if lines else text[-200:]
        if passed and mutated == self.kernels(arch).read_bytes():
            how = f"no kernel of {arch} uses the text"
        return Result(not passed, how, built - begin, time.monotonic() - built)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutations to run; default: all")
    parser.add_argument("--sample", action="store_true", help="the mutations of the quick run")
    options = parser.parse_args()
    harness = Harness()
    faults = 0
    chosen = [named(name) for name in options.names or (SAMPLE if options.sample else ())]
    for mutation in chosen or MUTATIONS:
        for arch in mutation.archs:
            result = harness.find(mutation, arch)
            faults += not result.found
            found = "found" if result.found else "NOT FOUND"
            print(f"{mutation.name} on {arch}: {found}, built in {result.build_seconds:.1f} s, "
                  f"run {result.run_seconds:.1f} s: {result.how[:160]}", flush=True)
    print(f"device mutations: {faults} not found")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
