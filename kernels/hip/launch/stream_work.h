// Launches whose queries arrive from the host's memory, and whose outputs leave for it, while the
// attention kernel runs (StreamArgs), in place of copies before and behind it.
//
// Ownership: borrows the device's state. Threading: as the backend's launches, one thread at a
// time. Nothing is allocated after Create.
#ifndef MLA_KERNELS_HIP_LAUNCH_STREAM_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_STREAM_WORK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/plan_store.h"
#include "kernels/hip/slot/launch_slot.h"
#include "kernels/types/attention_params.h"
#include "kernels/types/launch.h"

namespace mla::kernels::hip {

class StreamWork final {
 public:
  // Of a launch, each; one of more is not streamed.
  static constexpr size_t kMostTensors = 1024;

  static absl::StatusOr<StreamWork> Create(const DeviceState& device, const BackendLimits& limits,
                                           Stream stream);
  // What Create takes of device memory.
  static int64_t WorkspaceBytes(const BackendLimits& limits);
  static int64_t HostBytes(const BackendLimits& limits);

  // The launch as slot `index` is to be given it: `launch` itself, or, where it is streamed, one
  // whose tensors are in place in the host's memory, for the slot not to copy them.
  // That one stays valid until the next call for this slot.
  const Launch& Take(LaunchSlot& slot, int32_t index, const Launch& launch);
  // Whether the slot's launch is streamed, as Take has found.
  bool Has(int32_t index) const { return taken_[static_cast<size_t>(index)].streamed; }
  // All REQUIRE Has(index). Whether its attention appends the launch's KV rows, too.
  bool Appends(int32_t index) const { return taken_[static_cast<size_t>(index)].appends; }
  // The copies of its queries (LaunchSlot::SetArrivals); then its
  // attention.
  void AddArrivals(LaunchSlot& slot, int32_t index);
  absl::Status Add(LaunchSlot& slot, int32_t index, const DevicePlan& plan);

 private:
  // How a plan is cut, where it is one for streaming.
  struct Cut {
    int32_t piece_rows, packed_rows, units;
  };
  struct Taken {
    bool streamed = false;
    bool appends = false;
    uint64_t plan = 0;  // the generation that `cut` and `writers` are of; 0: of none
    Cut cut = {};
    std::vector<uint32_t> writers;  // by segment (StreamedTensors)
    uint32_t ticket = 0;
    Launch launch;
    std::vector<HostInput> inputs;
    std::vector<HostOutput> outputs;
    std::vector<TensorMove> queries;
    std::vector<const std::byte*> host_queries;  // by segment
    std::vector<StreamedTensors> tensors;        // by segment
  };

  explicit StreamWork(const DeviceState& device) : device_(&device) {}
  StreamReport* ReportOf(int32_t index) const {
    return reinterpret_cast<StreamReport*>(reports_.data()) + index;
  }
  bool Serves(const Launch& launch) const;
  bool FindCut(const PlanView& plan, Cut* cut) const;
  // Fills what follows from the plan alone. False: it is none for streaming.
  bool ReadPlan(const PlanView& plan, size_t segments, Taken& taken) const;
  int32_t BlocksPerUnit(const Cut& cut) const;
  bool AppendsOwnRows(const Launch& launch);
  bool PlaceQueries(LaunchSlot& slot, Taken& taken) const;
  bool PlaceOutputs(LaunchSlot& slot, Taken& taken) const;
  void PlaceRows(LaunchSlot& slot, Taken& taken) const;

  const DeviceState* device_;
  DeviceBuffer arrived_, finished_, meetings_;
  PinnedBuffer reports_;  // by slot
  int64_t meetings_count_ = 0;
  uint32_t ticket_ = 0;
  std::vector<Taken> taken_;  // by slot
  std::vector<int64_t> page_tables_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_STREAM_WORK_H_
