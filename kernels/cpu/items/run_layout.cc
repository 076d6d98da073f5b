#include "kernels/cpu/items/run_layout.h"

#include <algorithm>

namespace mla::kernels::cpu {
namespace {

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Hands out 64-byte aligned pieces.
class Cutter {
 public:
  int64_t Take(int64_t bytes) {
    const int64_t at = next_;
    next_ += RoundUp(bytes, 64);
    return at;
  }
  int64_t bytes() const { return next_; }

 private:
  int64_t next_ = 0;
};

constexpr int64_t kPointer = sizeof(void*);
constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kLine = 64;

}  // namespace

RunLayout MakeRunLayout(const KernelSet& kernels, const AttentionDesc& desc) {
  const Geometry& g = desc.geometry;
  const int64_t element = kernels.bf16_operands ? 2 : 4;
  RunLayout layout;
  layout.expanded = desc.form == AttentionForm::kExpanded;
  layout.group_rows = layout.expanded ? kExpandedTileRows : kTileRows;
  layout.tile_rows = layout.expanded ? kTileRows : kernels.kv_rows;
  layout.chunk_rows = layout.expanded ? kExpandedChunk : layout.tile_rows;
  layout.key_dim = layout.expanded ? g.expanded_q_dim() : g.absorbed_q_dim();
  layout.value_dim = desc.value_dim();
  layout.value_panels = (layout.value_dim + kPanel - 1) / kPanel;
  layout.q_terms = kernels.bf16_operands && desc.q_dtype == DType::kF32 ? 2 : 1;
  layout.query_row_bytes =
      RoundUp(layout.key_dim * static_cast<int64_t>(ElementSize(desc.q_dtype)), kLine);
  layout.split_ld = RoundUp(layout.key_dim, 2 * kPanel);
  layout.q_panel_bytes = PanelBytes(kernels.bf16_operands, kernels.k_align, layout.key_dim);
  layout.q_block_bytes = layout.q_panel_bytes * (kTileRows / kPanel);
  // A cache line is added to each stride, because strides of whole kilobytes map lines that are
  // used together to the same few cache sets.
  layout.v_panel_bytes = layout.tile_rows / 2 * 64 + kLine;
  layout.v_tile_bytes = layout.v_panel_bytes * RoundUp(layout.value_panels, 2);
  layout.kv = MakeKvRowLayout(desc.kv_format, g.kv_lora_rank, g.rope_dim);
  layout.entry = MakeKvRowLayout(desc.entry_format, g.kv_lora_rank, g.rope_dim);
  layout.widens = desc.kv_format != KvFormat::kBf16 || (desc.attention == AttentionKind::kWindow &&
                                                        desc.entry_format != KvFormat::kBf16);
  layout.widened_ld = RoundUp(g.kv_row_dim(), kLine / 2) + kLine / 2;
  // An up-projection writes whole panels, so rows are at least as wide as the padded nope part.
  layout.key_row_bytes =
      RoundUp(std::max<int64_t>(layout.key_dim, RoundUp(g.nope_dim, kPanel)), 2 * kPanel) * element;
  layout.value_row_bytes = RoundUp(layout.value_dim, 2 * kPanel) * element;
  layout.o_ld = RoundUp(layout.value_dim, kPanel) + kLine / kFloat;
  layout.up_ld = RoundUp(std::max(g.nope_dim, g.v_dim), kPanel);
  layout.uk_panel_bytes = PanelBytes(kernels.bf16_operands, kernels.k_align, g.kv_lora_rank);

  Cutter cut;
  const int64_t blocks = layout.group_rows / kTileRows;
  layout.kv_rows = cut.Take(layout.chunk_rows * kPointer);
  layout.scales = cut.Take(layout.chunk_rows * kPointer);
  layout.key_ptrs = cut.Take(layout.chunk_rows * kPointer);
  layout.value_ptrs = cut.Take(layout.chunk_rows * kPointer);
  layout.next_rows = cut.Take(layout.tile_rows * kPointer);
  if (layout.widens) layout.widened = cut.Take(layout.chunk_rows * layout.widened_ld * 2);
  layout.query_rows = cut.Take(kPanel * layout.query_row_bytes);
  if (layout.q_terms == 2) layout.split_rows = cut.Take(2 * kPanel * layout.split_ld * 2);
  layout.queries = cut.Take(blocks * layout.q_terms * layout.q_block_bytes);
  layout.logits = cut.Take(layout.tile_rows * kLogitsLd * kFloat);
  layout.probabilities = cut.Take(layout.tile_rows * kLogitsLd * kFloat);
  if (kernels.bf16_operands && layout.expanded)
    layout.rests = cut.Take(kTileRows * kTileRows * kFloat);
  if (kernels.bf16_operands) {
    layout.value_panels_at = cut.Take(layout.chunk_rows / layout.tile_rows * layout.v_tile_bytes);
  }
  if (layout.expanded || !kernels.bf16_operands)
    layout.keys = cut.Take(layout.chunk_rows * layout.key_row_bytes);
  if (layout.expanded) {
    layout.values = cut.Take(layout.chunk_rows * layout.value_row_bytes);
    layout.uk = cut.Take(layout.uk_panel_bytes * (RoundUp(g.nope_dim, kPanel) / kPanel));
    if (kernels.bf16_operands) {
      layout.value_rests = cut.Take(layout.chunk_rows * layout.value_row_bytes);
      layout.rest_panels_at = cut.Take(layout.chunk_rows / layout.tile_rows * layout.v_tile_bytes);
      layout.up = cut.Take(layout.chunk_rows * layout.up_ld * kFloat);
    } else {
      layout.latents = cut.Take(layout.chunk_rows * RoundUp(g.kv_lora_rank, kPanel) * kFloat);
    }
  }
  layout.o = cut.Take(layout.group_rows * layout.o_ld * kFloat);
  layout.m = cut.Take(layout.group_rows * kFloat);
  layout.l = cut.Take(layout.group_rows * kFloat);
  layout.norm = cut.Take(layout.group_rows * kFloat);
  layout.alpha = cut.Take(kTileRows * kFloat);
  layout.visible = cut.Take(layout.group_rows * static_cast<int64_t>(sizeof(int32_t)));
  layout.tile_visible = cut.Take(kTileRows * static_cast<int64_t>(sizeof(int32_t)));
  layout.bytes = cut.bytes();
  return layout;
}

ProjectionLayout MakeProjectionLayout(const KernelSet& kernels, int32_t in_dim, int32_t out_dim) {
  ProjectionLayout layout;
  layout.row_bytes = RoundUp(in_dim, 2 * kPanel) * (kernels.bf16_operands ? 2 : 4);
  layout.c_ld = RoundUp(out_dim, kPanel);
  Cutter cut;
  layout.row_ptrs = cut.Take(2 * kTileRows * kPointer);
  layout.rows = cut.Take(2 * kTileRows * layout.row_bytes);
  layout.c = cut.Take(kTileRows * layout.c_ld * kFloat);
  layout.query = cut.Take(in_dim * kFloat);
  layout.bytes = cut.bytes();
  return layout;
}

}  // namespace mla::kernels::cpu
