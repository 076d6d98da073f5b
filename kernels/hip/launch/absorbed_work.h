// The absorbed form in a launch: attention over latent rows, lists or windows, and the merge. 8-bit
// rows that many lists name are widened once beforehand (WidensLists).
//
// Ownership: borrows the device's state and scratch memory. Threading: as the backend's launches,
// one thread at a time.
#ifndef MLA_KERNELS_HIP_LAUNCH_ABSORBED_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_ABSORBED_WORK_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/plan_store.h"
#include "kernels/hip/slot/launch_recording.h"
#include "kernels/types/attention_params.h"

namespace mla::kernels::hip {

class AbsorbedWork final {
 public:
  // `widened` is device memory for widened rows, unused when attention begins; may be empty.
  AbsorbedWork(const DeviceState& device, const DeviceBuffer& widened)
      : device_(device), widened_(widened) {}

  absl::Status Add(LaunchRecording& recording, const AttentionParams& params,
                   const DevicePlan& plan) const;

  // Pages of KV rows, of which one may begin at each of `granules` places from the address `first`
  // on.
  struct Pages {
    uint64_t first;
    int64_t granules;
    int32_t rows;        // of a page
    int64_t row_stride;  // bytes
  };
  // Encodes the maps of `args` for boxes of args->box_rows rows of `format`. The driver's error if
  // it refuses one.
  static absl::Status EncodeMaps(const GpuRuntime& runtime, const Pages& pages, KvFormat format,
                                 BoxArgs* args);

  // A plan of one tile in equal pieces, all of whose blocks run at the same time. One kernel
  // attends and merges (SplitArgs), and the device needs neither the plan nor the segments.
  struct Split {
    size_t kernel;  // index in ArchTraits::split
    int32_t piece_rows, packed_rows, blocks_per_unit;
  };
  // Returns nothing if the plan is not of this kind, or no such kernel exists.
  std::optional<Split> SplitOf(const AttentionParams& params) const;
  absl::Status AddSplit(LaunchRecording& recording, const AttentionParams& params,
                        const Split& split) const;

 private:
  // Format and place of the rows that attention reads.
  struct Rows {
    const SegmentRecord* segments = nullptr;
    KvFormat format = KvFormat::kBf16;
    DType products = DType::kBf16;
    const uint32_t* page_tables = nullptr;
    const uint8_t* pool = nullptr;
  };
  // Returns true if the rows are to be widened first, for work items of at most `packed_rows`.
  bool Widens(const AttentionParams& params, const Rows& rows, int32_t packed_rows) const;
  // Completes the arguments of the kernel whose copy engine brings rows of `rows.pool`. Returns
  // false if it cannot: pages or layers differ between segments, boxes would have too few rows, or
  // the driver refuses a map. REQUIRES: the rows lie as the segments say, so they were not widened.
  bool PutBoxes(const AttentionParams& params, const Rows& rows, BoxArgs* args) const;
  // Widens the rows and updates `rows` to the result.
  absl::Status AddWiden(LaunchRecording& recording, const AttentionParams& params,
                        Rows* rows) const;

  const DeviceState& device_;
  const DeviceBuffer& widened_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_ABSORBED_WORK_H_
