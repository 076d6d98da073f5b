// The selections of a launch as items for threads: a query row an item, or, where rows are fewer
// than threads, a share of one, whose candidates a second phase merges.
//
// Threading: after Configure, Items and Shares from any thread; Run from several at once, each with
// scratch memory and an item of its own.
#ifndef MLA_KERNELS_CPU_ITEMS_LAUNCH_SELECTS_H_
#define MLA_KERNELS_CPU_ITEMS_LAUNCH_SELECTS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cpu/items/select_rows.h"
#include "kernels/host_memory/mapped_memory.h"

namespace mla::kernels::cpu {

class LaunchSelects final {
 public:
  // Bytes that Configure takes.
  static int64_t Bytes(int32_t threads, int32_t top_k);
  absl::Status Configure(const KernelSet& kernels, int32_t threads, int32_t top_k);

  static int64_t Rows(std::span<const SelectRecord> selects);
  // Of each of `rows` > 0 query rows; above 1, what Run leaves of them is to be merged.
  int32_t Shares(int64_t rows) const;
  // Item `item` of [0, rows * shares).
  void Run(const PoolView& pool, std::span<const SelectRecord> selects, int32_t shares,
           int64_t item, std::byte* scratch);
  // Item `item` of [0, rows), once all of Run's have ended.
  void Merge(std::span<const SelectRecord> selects, int32_t shares, int64_t item);

 private:
  const KernelSet* kernels_ = nullptr;
  SelectLayout layout_;
  int32_t threads_ = 0;
  MappedMemory ranks_;  // of candidates_
  std::vector<SelectCandidates> candidates_;
};

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_LAUNCH_SELECTS_H_
