// What kernels copy for a launch: its page work and its changes of the page tables, one (mla_move)
// a list or a part of a list whose ranges do not wait for each other; new rows into pages
// (mla_append); and small tensors between the host and the device (mla_copy_tensors). Also the
// digests of page transfers (mla_digest), of their bytes in the pool.
//
// Ownership: borrows the device's state; owns scratch memory only.
// Threading: as the backend's launches, one thread at a time. Nothing is allocated after the
// constructor.
#ifndef MLA_KERNELS_HIP_LAUNCH_PAGE_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_PAGE_WORK_H_

#include <cstddef>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/slot/launch_slot.h"
#include "kernels/types/page_ranges.h"

namespace mla::kernels::hip {

class PageWork final {
 public:
  // `device` outlives this; its table mirror has limits.page_table_entries entries.
  PageWork(const DeviceState& device, const BackendLimits& limits);

  // Bytes of metadata that a launch may take here, at most.
  static int64_t MetadataBytes(const BackendLimits& limits);

  // Add the kernels of a launch's part to `slot`. INVALID_ARGUMENT for what leaves the pool or the
  // table, RESOURCE_EXHAUSTED beyond the limits.
  absl::Status AddPages(LaunchSlot& slot, std::span<const PageRange> ranges);
  absl::Status AddTables(LaunchSlot& slot, const Launch& launch);
  // `next_starts_early`: see AppendArgs.
  absl::Status AddAppends(LaunchSlot& slot, std::span<const AppendRecord> records,
                          bool next_starts_early) const;
  // Digests of the transfers that want some. REQUIRES: CheckPageTransfers of both lists.
  absl::Status AddDigests(LaunchSlot& slot, const Launch& launch);
  // None for no tensors. `begun` and `lasted` as of CopyTensorsArgs.
  absl::Status AddTensors(LaunchSlot& slot, std::span<const TensorMove> moves, uint64_t* begun,
                          uint64_t* lasted);

 private:
  // No parts: no transfer wants digests.
  absl::StatusOr<LaunchSlot::Digests> DigestsOf(LaunchSlot& slot,
                                                std::span<const PageTransfer> transfers);
  // moves_, run after run: ends[i] is where run i ends, and moves of a run are independent.
  absl::Status AddMoves(LaunchSlot& slot, std::span<const size_t> ends);

  const DeviceState& device_;
  const BackendLimits limits_;
  // Scratch, capacity from the limits.
  std::vector<MoveRange> moves_;
  std::vector<DigestRange> digest_ranges_;
  std::vector<int32_t> first_parts_;
  std::vector<size_t> run_ends_;
  std::vector<TableRange> table_ranges_;
  PageRangeRuns page_runs_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_PAGE_WORK_H_
