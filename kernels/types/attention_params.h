// Declares the plain launch arguments of the attention kernels. Addresses are in the backend's
// address space (host memory for CPU backends, device memory for GPUs). Every stride is explicit
// and 64-bit; offsets are never derived from sizes.
#ifndef MLA_KERNELS_TYPES_ATTENTION_PARAMS_H_
#define MLA_KERNELS_TYPES_ATTENTION_PARAMS_H_

#include <cstdint>
#include <span>
#include <type_traits>

#include "kernels/formats/kv_format.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/input_fragments.h"
#include "kernels/types/round_info.h"
#include "kernels/types/window.h"
#include "kernels/types/work_info.h"

namespace mla::kernels {

// A page-table entry addresses the first byte of a page group in granules of this many bytes from
// the pool's base, so 32-bit entries reach 1 TiB. A page group holds one page per layer of its
// model.
inline constexpr int64_t kPageGranuleBytes = 256;

// One segment of an attention launch: some query rows of one sequence at one layer. Segments of one
// launch share an AttentionDesc (geometry, form, dtypes) and may differ in layer, model, page size
// and head slice.
//
// With index lists, KV rows of a plan are places in the index list of a query row; each tile then
// holds one query row (PlanTraits::max_q_rows_per_tile). Plans of windows count places too: see
// WindowRecord.
struct SegmentRecord {
  const void* q;  // [q_rows, num_heads, q dim], q dtype
  void* o;        // [q_rows, num_heads, o dim], o dtype
  float* lse;     // [q_rows, num_heads] natural-log log-sum-exp of the scaled logits, or null
  int64_t q_row_stride, q_head_stride;      // elements
  int64_t o_row_stride, o_head_stride;      // elements
  int64_t lse_row_stride, lse_head_stride;  // elements
  int64_t page_table;                       // first entry of the sequence in Launch::page_tables
  int64_t layer_offset;  // bytes from the first byte of a page group to this layer's page
  int64_t row_stride;    // bytes between rows of a page
  int32_t page_size;     // rows a page
  int32_t q_rows;        // new rows, >= 0; 0 is a padded segment
  int32_t kv_rows;       // seen by the last query row: cached rows + q_rows, or more if not causal
  int32_t num_heads;     // heads of this segment's slice
  int32_t head_offset;   // first model head of the slice (selects rows of W_UK / W_UV)
  int32_t weights_slot;  // slot of W_UK / W_UV, or -1 (absorbed form needs none)
  float softmax_scale;   // multiplies q·k before the softmax
  int32_t causal;        // 1: query row i sees kv rows <= kv_rows - q_rows + i; 0: all kv rows
  float kv_scale;        // scale of the layer's rows, in formats with a scale a layer; else unused
  // Index lists, of positions if the desc's attention is kSparse and of entries if it is kWindow.
  // Null list_begin: no lists. Query row i attends to list[list_begin[i] - list_begin[0]] up to,
  // but without, list[list_begin[i + 1] - list_begin[0]]. The positions of a list differ. Entries
  // that the query row does not see by `causal` are skipped, wherever they stand.
  const int32_t* list;
  const int32_t* list_begin;  // [q_rows + 1], ascending
};
static_assert(std::is_trivially_copyable_v<SegmentRecord>);

// A filled plan; all spans live in buffers that stay valid and unchanged until the launch has
// completed.
struct PlanView {
  std::span<const int32_t> work_indptr;
  std::span<const WorkInfo> work_info;
  std::span<const int32_t> reduce_indptr;
  std::span<const ReduceTile> reduce_final_map;
  std::span<const int32_t> reduce_partial_map;
  int32_t partial_rows = 0;  // packed rows used in the partial buffers
  // Plans of equal generations have equal contents, so a backend may keep its device copy. 0 equals
  // no other plan. See NextPlanGeneration (kernels/attention_backend.h).
  uint64_t generation = 0;
  // Rounds of the expanded form, or null if PlanTraits::rounds asks for none. Lives like the spans.
  const RoundView* rounds = nullptr;
};

// Scatter of new KV rows into pages: source row i goes to position first_position + i of the
// sequence. A record with first_position < 0 is padding and is skipped whole.
//
// If `differs` is set, nothing is written: source rows, rounded to the pool's format, are compared
// with the rows stored there. Rows that the same launch appends must not be compared.
struct AppendRecord {
  const void* kv;         // [rows, kv_lora_rank + rope_dim], source dtype, row-major
  DType dtype;            // rounded to the row format when it is wider
  int64_t kv_row_stride;  // elements
  int64_t page_table;     // as in SegmentRecord
  int64_t layer_offset;   // bytes
  int64_t row_stride;     // bytes
  int32_t page_size;
  int32_t first_position;  // position in the sequence of source row 0
  int32_t rows;
  int32_t row_dim;                    // elements a row
  int32_t rope_dim = 0;               // rotated elements of these
  KvFormat format = KvFormat::kBf16;  // format of the pages
  float kv_scale = 1.0f;              // as in SegmentRecord
  // An output [rows]: 1 where a row differs, else 0. Null: the rows are stored.
  int32_t* differs = nullptr;
};

// Batched small GEMMs of the EXPANDED profile around the absorbed form, with h' = head_offset + h:
//   absorb:  out[r, h, :lora] = q[r, h, :nope] x W_UK[h'], W_UK[h'] is [nope, lora]
//            out[r, h, lora:] = q[r, h, nope:], the rotated part is copied
//   project: out[r, h, :]     = o[r, h, :lora] x W_UV[h'], W_UV[h'] is [lora, v_dim]
struct ProjectionRecord {
  const void* in;
  void* out;
  int64_t in_row_stride, in_head_stride;    // elements
  int64_t out_row_stride, out_head_stride;  // elements
  int32_t rows;
  int32_t num_heads;
  int32_t head_offset;
  int32_t weights_slot;
};

struct AttentionParams {
  AttentionDesc desc;
  std::span<const SegmentRecord> segments;
  // Empty, or one by segment. One with bytes > 0 holds the queries of its segment, in place of
  // SegmentRecord::q.
  std::span<const FragmentedInput> q_fragments;
  PlanView plan;
  std::span<const WindowRecord> windows;  // by segment, if the desc's attention is kWindow
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_ATTENTION_PARAMS_H_
