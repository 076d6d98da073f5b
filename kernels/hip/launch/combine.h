// Code shared by both forms of attention: segments for the device, and the merge of partial
// results.
#ifndef MLA_KERNELS_HIP_LAUNCH_COMBINE_H_
#define MLA_KERNELS_HIP_LAUNCH_COMBINE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/plan_store.h"
#include "kernels/hip/slot/launch_recording.h"
#include "kernels/types/attention_params.h"

namespace mla::kernels::hip {

// Says how attention ran, as far as the merge depends on it. Addresses are device addresses.
struct Attended {
  const SegmentRecord* segments = nullptr;
  const WindowRecord* windows = nullptr;  // for kWindow
  PartOrder order = PartOrder::kColumns;  // as AttendVariant::order
  int32_t idle_units = 0;                 // units that attention leaves to the merge
};

// Returns the number of packed rows (query rows x heads) of a work item or reduce tile; `heads` is
// packed as in WorkInfo.
int32_t PackedRows(int32_t q_begin, int32_t q_end, uint32_t heads);

// Returns a segment of `params` as kernels take it. Its layer and weights are relative to the first
// segment's, so that the layers of a step have the same bytes; the kernels' arguments hold the base
// addresses. Its kv_scale is the scale of the device's rows.
SegmentRecord ForDevice(const DeviceState& device, const AttentionParams& params,
                        SegmentRecord record);

// Puts the segments into the launch's metadata, each as ForDevice gives it. `host_queries` is for
// streamed launches: where the queries of each segment are in host memory (StreamArgs); else empty.
// RESOURCE_EXHAUSTED if they do not fit.
absl::StatusOr<const SegmentRecord*> PutSegments(
    LaunchRecording& recording, const DeviceState& device, const AttentionParams& params,
    std::span<const std::byte* const> host_queries = {});

// Adds the kernel that merges the partials of the preceding attention by their log-sum-exp; adds
// none if the plan splits no rows. A part that saw no key has LSE -inf and weight 0. A row with no
// key at all has output 0 and LSE -inf.
absl::Status AddCombine(LaunchRecording& recording, const DeviceState& device,
                        const AttentionParams& params, const DevicePlan& plan, const Attended& run);

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_COMBINE_H_
