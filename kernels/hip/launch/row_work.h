// Adds the products of whole rows to a launch: low-rank queries into queries (Launch::queries), and
// outputs into hidden states (Launch::hiddens). Rows that need the weights of one layer are
// computed together, up to kRowProductMany at a time.
//
// Ownership: borrows the device's state, owns the workspace between the kernels of a product.
// Threading: as the backend's launches, one thread at a time. Nothing is allocated after Allocate.
#ifndef MLA_KERNELS_HIP_LAUNCH_ROW_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_ROW_WORK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/row_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/device_memory.h"
#include "kernels/hip/slot/launch_recording.h"

namespace mla::kernels::hip {

class RowWork final {
 public:
  explicit RowWork(const DeviceState& device) : device_(device) {}

  // Returns the bytes of device memory that Allocate takes; 0 if no model may have weights.
  static int64_t WorkspaceBytes(const BackendLimits& limits);
  // Returns the most bytes of metadata that a launch takes here.
  static int64_t MetadataBytes(const BackendLimits& limits);

  absl::Status Allocate(const BackendLimits& limits);
  // FAILED_PRECONDITION names a record without weights, RESOURCE_EXHAUSTED the limit.
  absl::Status Add(LaunchRecording& recording, const RowProjection& projection, ProjectedPart part);

 private:
  // The fields that the products of one weights slot share, and the slot's rows in rows_.
  struct Group {
    RowProductArgs args;
    int64_t first_row, rows;
  };
  absl::Status AddRows(const RowProjection& projection, const RowProjectionRecord& record);
  absl::Status AddGroup(LaunchRecording& recording, const Group& group);
  absl::Status AddProduct(LaunchRecording& recording, const RowProductArgs& args);

  const DeviceState& device_;
  DeviceBuffer sums_, packed_;
  std::vector<RowProductRow> rows_;  // scratch, capacity from Allocate
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_ROW_WORK_H_
