// Adds the kernels by which the indexer chooses rows in a launch (kernels/types/select.h), in
// rounds of as many query rows as the workspace holds.
//
// Ownership: borrows the device's state, owns the workspace between the indexer's two kernels.
// Threading: as the backend's launches, one thread at a time. Nothing is allocated after Allocate.
#ifndef MLA_KERNELS_HIP_LAUNCH_INDEX_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_INDEX_WORK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/slot/launch_recording.h"

namespace mla::kernels::hip {

class IndexWork final {
 public:
  explicit IndexWork(const DeviceState& device) : device_(device) {}

  // Returns the bytes of device memory that Allocate takes; 0 if no model may have an indexer or
  // lists.
  static int64_t WorkspaceBytes(const BackendLimits& limits, const BackendInfo& info);
  // Returns the most bytes of metadata that a launch takes here.
  static int64_t MetadataBytes(const BackendLimits& limits, const BackendInfo& info);

  // Call once; clears the workspace on `stream`.
  absl::Status Allocate(const BackendLimits& limits, Stream stream);
  absl::Status Add(LaunchRecording& recording, std::span<const SelectRecord> records);

  // Returns the workspace that nothing uses between the kernels of Add and the next launch; may be
  // empty.
  const DeviceBuffer& scratch() const { return ranks_; }

 private:
  // The fields that the rounds of a launch share. Offsets of the records count from `layer_offset`.
  struct Indexing {
    const SelectRecord* records;
    int64_t layer_offset;
    int32_t keys_per_block;
    int32_t logits_shared_bytes;
  };
  // Adds the kernels of one round, from rows_ and first_blocks_.
  absl::Status AddRound(LaunchRecording& recording, const Indexing& all);

  const DeviceState& device_;
  DeviceBuffer ranks_, bins_;
  // Scratch, capacity from Allocate.
  std::vector<IndexRow> rows_;
  std::vector<int32_t> first_blocks_;  // as IndexArgs::first_block
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_INDEX_WORK_H_
