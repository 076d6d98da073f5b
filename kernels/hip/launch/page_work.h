// PageWork adds to a launch the kernels that copy. mla_move does the launch's page work and changes
// its page tables. It runs once for a list, or once for each part of a list whose ranges are
// independent.
// mla_append stores new rows in pages. mla_copy_tensors copies small tensors between host and
// device. mla_digest makes the digests of page transfers, from their bytes in the pool.
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
#include "kernels/hip/slot/launch_recording.h"
#include "kernels/types/page_ranges.h"

namespace mla::kernels::hip {

class PageWork final {
 public:
  // `device` outlives this; its table mirror has limits.page_table_entries entries.
  PageWork(const DeviceState& device, const BackendLimits& limits);

  // Returns the most bytes of launch metadata that these kernels need.
  static int64_t MetadataBytes(const BackendLimits& limits);

  // AddPages and AddTables add kernels to `recording`. They return INVALID_ARGUMENT if a range
  // leaves the pool or the table or overlaps its own source, and RESOURCE_EXHAUSTED beyond the
  // limits.
  absl::Status AddPages(LaunchRecording& recording, std::span<const PageRange> ranges);
  absl::Status AddTables(LaunchRecording& recording, const Launch& launch);
  // Returns INVALID_ARGUMENT if the dims or strides of a record are not multiples of what the
  // kernel needs. `next_starts_early`: see AppendArgs.
  absl::Status AddAppends(LaunchRecording& recording, std::span<const AppendRecord> records,
                          bool next_starts_early) const;
  // Adds the digests of transfers that ask for them. REQUIRES: both lists have passed
  // CheckPageTransfers.
  absl::Status AddDigests(LaunchRecording& recording, const Launch& launch);
  // Adds no kernel if there are no tensors. `begun` and `lasted` are those of CopyTensorsArgs.
  absl::Status AddTensors(LaunchRecording& recording, std::span<const TensorMove> moves,
                          uint64_t* begun, uint64_t* lasted);

 private:
  // Has no parts if no transfer asks for digests.
  absl::StatusOr<LaunchRecording::Digests> DigestsOf(LaunchRecording& recording,
                                                     std::span<const PageTransfer> transfers);
  // Adds kernels for moves_, run after run: ends[i] is the end of run i, and moves of a run are
  // independent.
  absl::Status AddMoves(LaunchRecording& recording, std::span<const size_t> ends);

  const DeviceState& device_;
  const BackendLimits limits_;
  // This is scratch memory, whose capacity follows from the limits.
  std::vector<MoveRange> moves_;
  std::vector<DigestRange> digest_ranges_;
  std::vector<int32_t> first_parts_;
  std::vector<size_t> run_ends_;
  std::vector<TableRange> table_ranges_;
  PageRangeRuns page_runs_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_PAGE_WORK_H_
