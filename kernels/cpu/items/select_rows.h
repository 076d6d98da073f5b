// The choice of rows by an indexer (kernels/types/select.h), of a query row or of a share of what
// it sees: logits of a tile of index keys are a product of the level's kernel set, of which the
// best are kept.
//
// Threading: one thread a scratch memory. Allocates nothing.
#ifndef MLA_KERNELS_CPU_ITEMS_SELECT_ROWS_H_
#define MLA_KERNELS_CPU_ITEMS_SELECT_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/host_memory/host_backend.h"
#include "kernels/types/select.h"

namespace mla::kernels::cpu {

// How a thread's scratch memory is cut for lists of at most `top_k` positions, whatever the
// indexer: byte offsets into it.
struct SelectLayout {
  int64_t code_rows = 0;    // const uint8_t*[kTileRows]: where the tile's keys lie
  int64_t key_rows = 0;     // const void*[kTileRows]: A rows of the product
  int64_t keys = 0;         // bf16 [kTileRows][kKeyLd]
  int64_t wide_keys = 0;    // fp32 levels: the same as fp32
  int64_t query_terms = 0;  // bf16 [2][kPanel][kKeyLd]: both parts of a panel's fp32 queries
  int64_t queries = 0;      // panels of the queries, and of their low parts
  int64_t products = 0;     // fp32 [kTileRows][kMaxIndexHeads]
  int64_t weights = 0;      // fp32 [kMaxIndexHeads]
  int64_t ranks = 0;        // uint64 [2 * top_k + kTileRows]: the best so far, and new ones
  int64_t bytes = 0;
};

SelectLayout MakeSelectLayout(const KernelSet& kernels, int32_t top_k);

// The list of query row `row`.
void SelectRow(const KernelSet& kernels, const PoolView& pool, const SelectRecord& record,
               int32_t row, const SelectLayout& layout, std::byte* scratch);

// Where rows are fewer than threads, each is chosen in shares, by a thread each.
struct SelectCandidates {
  uint64_t* ranks = nullptr;  // room for top_k, those of a row's shares one behind the other
  int32_t count = 0;
};

// The best of share `share` of the positions that query row `row` sees.
void SelectShare(const KernelSet& kernels, const PoolView& pool, const SelectRecord& record,
                 int32_t row, int32_t share, int32_t shares, const SelectLayout& layout,
                 std::byte* scratch, SelectCandidates* candidates);

// The list of query row `row` from all its shares, in order; what these hold is used up.
void MergeSelected(const SelectRecord& record, int32_t row,
                   std::span<const SelectCandidates> shares);

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_SELECT_ROWS_H_
