// Chooses rows as an indexer does (kernels/types/select.h), for a query row or for a share of the
// positions that it sees. A product of the level's kernel set makes the logits of a tile of index
// keys, and the best are kept.
//
// Threading: one thread per scratch memory. Allocates nothing.
#ifndef MLA_KERNELS_CPU_ITEMS_SELECT_ROWS_H_
#define MLA_KERNELS_CPU_ITEMS_SELECT_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/host_memory/host_backend.h"
#include "kernels/types/select.h"

namespace mla::kernels::cpu {

// Divides a thread's scratch memory for lists of at most `top_k` positions and any indexer: byte
// offsets into it.
struct SelectLayout {
  int64_t code_rows = 0;    // const uint8_t*[kTileRows]: addresses of the tile's keys
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

// Writes the list of query row `row`.
void SelectRow(const KernelSet& kernels, const PoolView& pool, const SelectRecord& record,
               int32_t row, const SelectLayout& layout, std::byte* scratch);

// The candidates of one share of a row. Rows are cut into shares, one a thread, if there are fewer
// rows than threads.
struct SelectCandidates {
  uint64_t* ranks = nullptr;  // room for top_k; shares of a row are contiguous
  int32_t count = 0;
};

// Finds the best of share `share` of the positions that query row `row` sees.
void SelectShare(const KernelSet& kernels, const PoolView& pool, const SelectRecord& record,
                 int32_t row, int32_t share, int32_t shares, const SelectLayout& layout,
                 std::byte* scratch, SelectCandidates* candidates);

// Writes the list of query row `row` from the candidates of all its shares, in order. Overwrites
// the candidates.
void MergeSelected(const SelectRecord& record, int32_t row,
                   std::span<const SelectCandidates> shares);

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_SELECT_ROWS_H_
