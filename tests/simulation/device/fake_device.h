// The simulator's adapter to the backend seam, and its only file that knows the seam. It computes
// attention in double with the scheduler's plan, on one of two kinds of device. One has memory of
// its own and two launch slots. The other is like a CPU: it has one slot, and reads and writes the
// host's memory and page tables in place.
//
// - Work runs when it is submitted or when it completes. Completion is as late as the seed says,
//   and waiting for it moves the clock.
// - A launch may fail at Submit (nothing runs) or at Wait (all, some or none of its work has run;
//   targets of page transfers that have not run may be lost as well). The device may be lost for
//   good.
// - Memory that was never written reads as NaN, and page-table entries as wild; the slot's memory
//   is poisoned for every launch. Every page that is appended to or read must hold words of the
//   launch's tenant, or zeroes.
// - The PlanChecker checks each plan against its batch before it runs.
// - A launch that moves rows names none of their bytes in another part.
//
// Violations are reported to the watcher. One thread; nothing of the device is shared.
#ifndef MLA_TESTS_SIMULATION_DEVICE_FAKE_DEVICE_H_
#define MLA_TESTS_SIMULATION_DEVICE_FAKE_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention_backend.h"
#include "scheduler/clock.h"
#include "scheduler/testing/plan_checker.h"

namespace mla::simulation {

class DeviceWatcher {
 public:
  virtual ~DeviceWatcher() = default;
  virtual void OnViolation(const std::string& what) = 0;
  // Host memory of a request goes into (or out of) launch `serial`. Returns its tenant, or 0 if it
  // has none.
  virtual int OnStaged(const void* host, int64_t bytes, uint64_t serial) = 0;
  // The launch has been submitted.
  virtual void OnSubmitted(uint64_t serial) = 0;
  // The launch has completed successfully, at the clock's time.
  virtual void OnLaunchDone(uint64_t serial) = 0;
  // The contents of the launch's targets are undefined.
  virtual void OnLaunchFailed(uint64_t serial) = 0;
};

enum class DeviceFault { kNone, kSubmit, kWaitAllRan, kWaitSomeRan, kWaitNoneRan, kLost };

struct FakeDeviceOptions {
  uint64_t seed = 0;
  bool unified = false;             // uses the host's memory; one launch slot
  bool runs_at_submit = false;      // a unified device has completed then, too
  bool runs_after_failure = false;  // launches still run after one that has run and then failed
  int64_t latency_us = 0;           // the longest of a launch
  int32_t expanded_min_rows = 0;    // rows from which the expanded form is used
  kernels::PlanTraits traits;
};

class FakeDevice final : public kernels::AttentionBackend {
 public:
  FakeDevice(const FakeDeviceOptions& options, scheduler::SimulatedClock* clock,
             DeviceWatcher* watcher);
  ~FakeDevice() override;

  // The next launch has the fault. After kLost everything fails.
  void Arm(DeviceFault fault) { armed_ = fault; }
  bool lost() const { return lost_; }
  // Faults that launches have met.
  int64_t faults() const { return faults_; }
  int64_t launches() const { return launches_; }
  int64_t parts() const { return parts_; }  // parts of all launches
  // Returns true if a launch that has not ended reads or writes the memory.
  bool Uses(const void* host, int64_t bytes) const;
  // Memory that the scheduler got from AllocateHost in a block of `bytes` bytes, or empty.
  std::span<std::byte> OwnMemory(size_t bytes) const;
  // When the next running launch ends, or -1 if none runs.
  int64_t NextDone() const;

  const kernels::BackendInfo& Info() const override { return info_; }
  absl::Status CanRun(const kernels::AttentionDesc& desc) const override;
  kernels::PlanTraits Traits(const kernels::AttentionDesc& desc) const override;
  int32_t ExpandedFormMinRows(const kernels::Geometry&) const override {
    return options_.expanded_min_rows;
  }
  int64_t WorkspaceSize(const kernels::BackendLimits& limits) const override {
    return limits.kv_pool_bytes;
  }
  absl::Status Configure(const kernels::BackendLimits& limits) override;
  absl::Status Healthy() const override;
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> AllocateHost(size_t bytes) override;
  absl::Status LoadWeights(int32_t slot, const kernels::Geometry& geometry, int32_t head_begin,
                           int32_t head_end, const kernels::Bf16* w_uk,
                           const kernels::Bf16* w_uv) override;
  absl::Status FreeWeights(int32_t slot) override;

  kernels::SlotMemory Memory(int32_t slot) override;
  absl::Status Submit(int32_t slot, const kernels::Launch& launch) override;
  bool Done(int32_t slot) override;
  absl::StatusOr<int64_t> Wait(int32_t slot) override;

 private:
  enum class Part {
    kWritePages,
    kPages,
    kTables,
    kAppends,
    kAbsorb,
    kProject,
    kAttend,
    kCombine,
    kReadPages
  };
  struct Work {  // one part of a launch that has work
    Part part;
    const kernels::AttentionParams* params;  // kAttend, kCombine
  };
  // Memory of the launch that stands for host memory, row by row. If the host's memory is used in
  // place, it is that memory.
  struct Staged {
    const std::byte* device = nullptr;
    int64_t bytes = 0;  // from the first row's begin to the last one's end
    int tenant = 0;
  };
  struct Slot {
    const kernels::Launch* launch = nullptr;  // the running one
    uint64_t serial = 0;
    std::vector<std::byte> memory;  // inputs, outputs, workspace
    std::vector<Staged> staged;
    std::vector<uint32_t> entries;  // values of the launch's table changes at Submit
    std::vector<Work> parts;
    size_t run = 0;     // parts that have run
    size_t to_run = 0;  // parts that will run
    bool fails = false, spoils = false;
    int64_t started_at = 0, done_at = 0;
    // Partials between attention and combine.
    std::vector<double> partial_sums, partial_most, partial_total;
  };
  struct Weights {
    kernels::Geometry geometry;
    std::vector<uint16_t> uk, uv;
    std::vector<bool> loaded;
  };
  struct Piece {  // a work item's result for one packed row
    double most = 0, total = 0;
    std::vector<double> sums;
  };

  void Violation(const std::string& what);
  // Records the launch's host memory: its tenant, and whether it has a place.
  absl::Status Stage(int32_t slot, const kernels::Launch& launch);
  void CheckSizes(const kernels::Launch& launch);
  static std::vector<Work> PartsOf(const kernels::Launch& launch);
  // Decides which parts of the launch will run, and when it ends.
  void Schedule(Slot& slot);
  static void CopyIn(const kernels::Launch& launch);
  static void CopyOut(const kernels::Launch& launch);
  int TenantAt(const Slot& slot, const void* device) const;
  // The page tables that the launch reads.
  std::span<const uint32_t> TablesOf(const Slot& slot) const {
    return options_.unified ? slot.launch->page_tables : tables_;
  }
  // Runs the parts that are to run.
  void Execute(Slot& slot);
  // Fills targets of page transfers that do not run, for a launch that fails.
  void Spoil(const Slot& slot);
  void Execute(Slot& slot, const Work& work);
  void TakeTables(const Slot& slot);
  bool InPool(const kernels::PageTransfer& transfer);
  std::byte* PoolBytes();
  void WriteRange(const kernels::PageRange& range);
  void Append(Slot& slot, const kernels::AppendRecord& record);
  void ProjectRows(Slot& slot, const kernels::Projection& projection, bool absorbs,
                   const kernels::ProjectionRecord& record);
  void CheckPlan(const kernels::AttentionParams& params);
  void RunPlan(Slot& slot, const kernels::AttentionParams& params);
  void RunItem(Slot& slot, const kernels::AttentionParams& params, const kernels::WorkInfo& item);
  void AttendPiece(const Slot& slot, const kernels::AttentionParams& params,
                   const kernels::SegmentRecord& request, const kernels::WorkInfo& item, int row,
                   int head, int tenant);
  void Store(const kernels::AttentionParams& params, const kernels::SegmentRecord& request, int row,
             int head, const Piece& piece);
  void CombinePlan(Slot& slot, const kernels::AttentionParams& params);
  // Address of an element of the pool. Null, with a violation, if the entry or the place is wild.
  uint16_t* Element(int64_t page_table, int64_t layer_offset, int64_t row_stride, int page_size,
                    int position, std::span<const uint32_t> tables);
  void CheckWords(const uint16_t* first, int64_t count, int tenant, bool fresh, const char* where);
  // Returns true if a running launch uses the weights.
  bool UsesWeights(int32_t slot) const;
  // Returns true if the memory is from AllocateHost: it is the scheduler's own and belongs to no
  // tenant.
  bool IsOwn(const void* host) const;
  const Weights* WeightsOf(int32_t slot, int head_begin, int heads);

  const FakeDeviceOptions options_;
  scheduler::SimulatedClock* const clock_;
  DeviceWatcher* const watcher_;
  kernels::BackendInfo info_;
  kernels::BackendLimits limits_;
  uint64_t random_;
  std::vector<uint16_t> pool_;
  std::vector<uint32_t> tables_;  // a device's copy
  std::vector<Slot> slots_;
  std::vector<Weights> weights_;
  std::vector<std::span<std::byte>> own_;  // memory of AllocateHost, which the engine keeps
  std::vector<int32_t> running_;           // slots by submission
  scheduler::testing::PlanChecker checker_;
  std::vector<scheduler::PlanSegment> plan_segments_;  // scratch
  Piece piece_, merged_;                               // scratch
  DeviceFault armed_ = DeviceFault::kNone;
  bool lost_ = false;
  uint64_t next_serial_ = 1;
  int64_t faults_ = 0, launches_ = 0, parts_ = 0, last_done_ = 0;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_DEVICE_FAKE_DEVICE_H_
