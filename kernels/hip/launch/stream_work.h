// Launches whose queries arrive from host memory, and whose outputs leave for it, while the
// attention kernel runs (StreamArgs), instead of in copies before and after it.
//
// Ownership: borrows the device's state. Threading: as the backend's launches, one thread at a
// time. Nothing is allocated after Create.
#ifndef MLA_KERNELS_HIP_LAUNCH_STREAM_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_STREAM_WORK_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/runtime/plan_store.h"
#include "kernels/hip/slot/launch_recording.h"
#include "kernels/types/attention_params.h"
#include "kernels/types/launch.h"

namespace mla::kernels::hip {

class StreamWork final {
 public:
  // Bound of each kind of tensors; a launch with more is not streamed.
  static constexpr size_t kMostTensors = 1024;

  static absl::StatusOr<StreamWork> Create(const DeviceState& device, const BackendLimits& limits,
                                           Stream stream);
  // Returns the bytes of device memory that Create takes.
  static int64_t WorkspaceBytes(const BackendLimits& limits);
  static int64_t HostBytes(const BackendLimits& limits);

  // Returns the tensors of a launch of slot `index` if it is streamed: those that kernels move are
  // in place in host memory, so that the slot does not copy them. Returns nothing for other
  // launches. The tensors stay valid until the next call for this slot.
  std::optional<LaunchTensors> Take(LaunchRecording& recording, int32_t index,
                                    const Launch& launch);
  // REQUIRES, for the calls below: Take has returned tensors for the slot's launch. Returns true if
  // the launch's attention appends its KV rows, too.
  bool Appends(int32_t index) const { return taken_[static_cast<size_t>(index)].appends; }
  // Adds the copies of its queries (LaunchRecording::SetArrivals); Add adds its attention.
  void AddArrivals(LaunchRecording& recording, int32_t index);
  absl::Status Add(LaunchRecording& recording, int32_t index, const AttentionParams& params,
                   const DevicePlan& plan);

 private:
  // Says how a streamed plan is cut.
  struct Cut {
    int32_t piece_rows, packed_rows, units;
  };
  struct Taken {
    bool appends = false;
    uint64_t plan = 0;  // generation of the plan that `cut` and `writers` describe; 0: none
    Cut cut = {};
    std::vector<uint32_t> writers;  // by segment (StreamedTensors)
    uint32_t ticket = 0;
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
  bool PlaceQueries(LaunchRecording& recording, const AttentionParams& params, Taken& taken) const;
  bool PlaceOutputs(LaunchRecording& recording, const AttentionParams& params, Taken& taken) const;
  void PlaceRows(LaunchRecording& recording, std::span<const AppendRecord> appends,
                 Taken& taken) const;

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
