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
  RunLayout at;
  at.expanded = desc.form == AttentionForm::kExpanded;
  at.group_rows = at.expanded ? kExpandedTileRows : kTileRows;
  at.chunk_rows = at.expanded ? kExpandedChunk : kTileRows;
  at.key_dim = at.expanded ? g.expanded_q_dim() : g.absorbed_q_dim();
  at.value_dim = desc.value_dim();
  at.value_panels = (at.value_dim + kPanel - 1) / kPanel;
  at.q_terms = kernels.bf16_operands && desc.q_dtype == DType::kF32 ? 2 : 1;
  at.query_row_bytes = RoundUp(at.key_dim * static_cast<int64_t>(ElementSize(desc.q_dtype)), kLine);
  at.split_ld = RoundUp(at.key_dim, 2 * kPanel);
  at.q_panel_bytes = PanelBytes(kernels.bf16_operands, kernels.k_align, at.key_dim);
  at.q_block_bytes = at.q_panel_bytes * (kTileRows / kPanel);
  // A cache line is added to each stride, because strides of whole kilobytes map lines that are
  // used together to the same few cache sets.
  at.v_panel_bytes = kTileRows / 2 * 64 + kLine;
  at.v_tile_bytes = at.v_panel_bytes * RoundUp(at.value_panels, 2);
  at.kv = MakeKvRowLayout(desc.kv_format, g.kv_lora_rank, g.rope_dim);
  at.entry = MakeKvRowLayout(desc.entry_format, g.kv_lora_rank, g.rope_dim);
  at.widens = desc.kv_format != KvFormat::kBf16 ||
              (desc.attention == AttentionKind::kWindow && desc.entry_format != KvFormat::kBf16);
  at.widened_ld = RoundUp(g.kv_row_dim(), kLine / 2) + kLine / 2;
  // An up-projection writes whole panels, so rows are at least as wide as the padded nope part.
  at.key_row_bytes =
      RoundUp(std::max<int64_t>(at.key_dim, RoundUp(g.nope_dim, kPanel)), 2 * kPanel) * element;
  at.value_row_bytes = RoundUp(at.value_dim, 2 * kPanel) * element;
  at.o_ld = RoundUp(at.value_dim, kPanel) + kLine / kFloat;
  at.up_ld = RoundUp(std::max(g.nope_dim, g.v_dim), kPanel);
  at.uk_panel_bytes = PanelBytes(kernels.bf16_operands, kernels.k_align, g.kv_lora_rank);

  Cutter cut;
  const int64_t blocks = at.group_rows / kTileRows;
  at.kv_rows = cut.Take(at.chunk_rows * kPointer);
  at.scales = cut.Take(at.chunk_rows * kPointer);
  at.key_ptrs = cut.Take(at.chunk_rows * kPointer);
  at.value_ptrs = cut.Take(at.chunk_rows * kPointer);
  at.next_rows = cut.Take(kTileRows * kPointer);
  if (at.widens) at.widened = cut.Take(at.chunk_rows * at.widened_ld * 2);
  at.query_rows = cut.Take(kPanel * at.query_row_bytes);
  if (at.q_terms == 2) at.split_rows = cut.Take(2 * kPanel * at.split_ld * 2);
  at.queries = cut.Take(blocks * at.q_terms * at.q_block_bytes);
  at.logits = cut.Take(kTileRows * kLogitsLd * kFloat);
  at.probabilities = cut.Take(kTileRows * kLogitsLd * kFloat);
  if (kernels.bf16_operands && at.expanded) at.rests = cut.Take(kTileRows * kTileRows * kFloat);
  if (kernels.bf16_operands) {
    at.value_panels_at = cut.Take(at.chunk_rows / kTileRows * at.v_tile_bytes);
  }
  if (at.expanded || !kernels.bf16_operands) at.keys = cut.Take(at.chunk_rows * at.key_row_bytes);
  if (at.expanded) {
    at.values = cut.Take(at.chunk_rows * at.value_row_bytes);
    at.uk = cut.Take(at.uk_panel_bytes * (RoundUp(g.nope_dim, kPanel) / kPanel));
    if (kernels.bf16_operands) {
      at.value_rests = cut.Take(at.chunk_rows * at.value_row_bytes);
      at.rest_panels_at = cut.Take(at.chunk_rows / kTileRows * at.v_tile_bytes);
      at.up = cut.Take(at.chunk_rows * at.up_ld * kFloat);
    } else {
      at.latents = cut.Take(at.chunk_rows * RoundUp(g.kv_lora_rank, kPanel) * kFloat);
    }
  }
  at.o = cut.Take(at.group_rows * at.o_ld * kFloat);
  at.m = cut.Take(at.group_rows * kFloat);
  at.l = cut.Take(at.group_rows * kFloat);
  at.norm = cut.Take(at.group_rows * kFloat);
  at.alpha = cut.Take(kTileRows * kFloat);
  at.visible = cut.Take(at.group_rows * static_cast<int64_t>(sizeof(int32_t)));
  at.tile_visible = cut.Take(kTileRows * static_cast<int64_t>(sizeof(int32_t)));
  at.bytes = cut.bytes();
  return at;
}

ProjectionLayout MakeProjectionLayout(const KernelSet& kernels, int32_t in_dim, int32_t out_dim) {
  ProjectionLayout at;
  at.row_bytes = RoundUp(in_dim, 2 * kPanel) * (kernels.bf16_operands ? 2 : 4);
  at.c_ld = RoundUp(out_dim, kPanel);
  Cutter cut;
  at.row_ptrs = cut.Take(2 * kTileRows * kPointer);
  at.rows = cut.Take(2 * kTileRows * at.row_bytes);
  at.c = cut.Take(kTileRows * at.c_ld * kFloat);
  at.query = cut.Take(in_dim * kFloat);
  at.bytes = cut.bytes();
  return at;
}

}  // namespace mla::kernels::cpu
