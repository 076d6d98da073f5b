// Divides the selections of a launch into items for threads: one item a query row. If there are
// fewer rows than threads, an item is a share of a row, and a second phase merges the shares'
// candidates.
//
// Threading: after Configure, Items and Shares from any thread. Run from several threads at once,
// each with scratch memory and an item of its own.
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
  // Returns the bytes that Configure takes.
  static int64_t Bytes(int32_t threads, int32_t top_k);
  absl::Status Configure(const KernelSet& kernels, int32_t threads, int32_t top_k);

  static int64_t Rows(std::span<const SelectRecord> selects);
  // Shares of each query row in a launch of `rows` > 0 rows. Above 1, Run yields candidates that
  // Merge must merge.
  int32_t Shares(int64_t rows) const;
  // Runs item `item` of [0, rows * shares).
  void Run(const PoolView& pool, std::span<const SelectRecord> selects, int32_t shares,
           int64_t item, std::byte* scratch);
  // Merges item `item` of [0, rows). REQUIRES: all items of Run have ended.
  void Merge(std::span<const SelectRecord> selects, int32_t shares, int64_t item);

 private:
  const KernelSet* kernels_ = nullptr;
  SelectLayout layout_;
  int32_t threads_ = 0;
  MappedMemory ranks_;  // storage of candidates_
  std::vector<SelectCandidates> candidates_;
};

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_LAUNCH_SELECTS_H_
