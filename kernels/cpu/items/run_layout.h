// Sizes of the attention of a launch and how a thread's scratch memory is divided for it.
//
// Derived once a launch from the desc; the same function, applied to the largest desc the limits
// allow, sizes the scratch at Configure, so that size and use cannot differ.
#ifndef MLA_KERNELS_CPU_ITEMS_RUN_LAYOUT_H_
#define MLA_KERNELS_CPU_ITEMS_RUN_LAYOUT_H_

#include <cstdint>

#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/types/attention_desc.h"

namespace mla::kernels::cpu {

// An item of the expanded form has at most this number of packed rows (query rows of one head). It
// is large, so that one up-projection of the KV rows serves many query rows.
inline constexpr int32_t kExpandedTileRows = 2048;
// This number of KV rows is up-projected at a time; a multiple of kTileRows.
inline constexpr int32_t kExpandedChunk = 512;

// Rows of logits lie at most this number of floats apart.
inline constexpr int32_t kLogitsLd = kTileRows + kPanel;

struct RunLayout {
  bool expanded = false;
  int32_t group_rows = 0;  // packed rows whose state is held at a time
  int32_t tile_rows = 0;   // KV rows a tile, at most
  int32_t chunk_rows = 0;  // KV rows prepared at a time, whole tiles
  int32_t key_dim = 0;     // k of the logits product
  int32_t value_dim = 0;   // columns of O
  int32_t value_panels = 0;
  int32_t q_terms = 1;          // bf16 parts that a query is the sum of (2 for fp32 queries)
  int64_t split_ld = 0;         // elements between rows of split_rows
  int64_t query_row_bytes = 0;  // between query_rows
  int64_t q_panel_bytes = 0;    // one B panel of packed queries
  int64_t q_block_bytes = 0;    // one term of a block of kTileRows packed rows
  int64_t v_panel_bytes = 0;    // value panels of a tile (bf16)
  int64_t v_tile_bytes = 0;     // all value panels of a tile (bf16)
  KvRowLayout kv;               // layout of rows in their pages
  KvRowLayout entry;            // layout of the entries of a window
  bool widens = false;          // rows or entries have an 8-bit format
  int64_t widened_ld = 0;       // elements between rows of an 8-bit format, widened
  int64_t key_row_bytes = 0;    // prepared key rows
  int64_t value_row_bytes = 0;  // prepared value rows
  int64_t o_ld = 0;             // floats between rows of O
  int64_t up_ld = 0;            // floats between rows of the up-projection's result
  int64_t uk_panel_bytes = 0;   // B panels of W_UK for the up-projection of keys

  // These are byte offsets into the scratch memory.
  int64_t kv_rows = 0;     // const void*[chunk_rows]: addresses of the chunk's rows
  int64_t scales = 0;      // const uint8_t*[chunk_rows]: addresses of their scales, if the page
                           // keeps these apart
  int64_t key_ptrs = 0;    // const void*[chunk_rows]: A rows of the logits product
  int64_t value_ptrs = 0;  // const void*[chunk_rows]: value rows before packing
  int64_t next_rows = 0;   // const void*[tile_rows]: addresses of the next tile's rows
  int64_t widened = 0;     // rows of an 8-bit format as bf16 rows
  int64_t query_rows = 0;  // query rows of a panel, copied if in pieces
  int64_t split_rows = 0;  // both parts of a panel's queries before packing, row by row
  int64_t queries = 0;     // packed queries, block by block, term by term
  int64_t logits = 0, probabilities = 0, rests = 0, value_panels_at = 0;
  int64_t value_rests = 0, rest_panels_at = 0;  // rounding remainders of up-projected values
  int64_t keys = 0, values = 0, latents = 0, up = 0, uk = 0;
  int64_t o = 0, m = 0, l = 0, norm = 0, alpha = 0, visible = 0, tile_visible = 0;
  int64_t bytes = 0;
};

RunLayout MakeRunLayout(const KernelSet& kernels, const AttentionDesc& desc);

// As RunLayout, for Absorb and Project: A rows (and the low parts of fp32 rows) and C of one block
// of kTileRows rows.
struct ProjectionLayout {
  int64_t row_ptrs = 0, rows = 0, c = 0;
  int64_t query = 0;  // copy of one row of `in_dim` elements, if it lies in pieces
  int64_t row_bytes = 0;
  int64_t c_ld = 0;
  int64_t bytes = 0;
};

ProjectionLayout MakeProjectionLayout(const KernelSet& kernels, int32_t in_dim, int32_t out_dim);

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_RUN_LAYOUT_H_
