// Launches whose queries arrive from host memory, and whose outputs leave for it, while the
// attention kernel runs (StreamArgs), instead of in copies before and after it.
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
  // Bound of each kind of tensors; a launch with more is not streamed.
  static constexpr size_t kMostTensors = 1024;

  static absl::StatusOr<StreamWork> Create(const DeviceState& device, const BackendLimits& limits,
                                           Stream stream);
  // Device memory that Create takes.
  static int64_t WorkspaceBytes(const BackendLimits& limits);
  static int64_t HostBytes(const BackendLimits& limits);

  // Returns the launch to give to slot `index`: `launch` itself or, if it is streamed, a copy whose
  // tensors are in place in host memory, so that the slot does not copy them. The copy stays valid
  // until the next call for this slot.
  const Launch& Take(LaunchSlot& slot, int32_t index, const Launch& launch);
  // Returns true if the slot's launch is streamed, as Take has decided.
  bool Has(int32_t index) const { return taken_[static_cast<size_t>(index)].streamed; }
  // REQUIRES Has(index), also for the calls below. Returns true if the launch's attention appends
  // its KV rows, too.
  bool Appends(int32_t index) const { return taken_[static_cast<size_t>(index)].appends; }
  // Adds the copies of its queries (LaunchSlot::SetArrivals); Add adds its attention.
  void AddArrivals(LaunchSlot& slot, int32_t index);
  absl::Status Add(LaunchSlot& slot, int32_t index, const DevicePlan& plan);

 private:
  // How a streamed plan is cut.
  struct Cut {
    int32_t piece_rows, packed_rows, units;
  };
  struct Taken {
    bool streamed = false;
    bool appends = false;
    uint64_t plan = 0;  // generation of the plan behind `cut` and `writers`; 0: none
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
  // Fills the fields that depend on the plan alone. Returns false if the plan cannot be streamed.
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
