// The simulator's adapter to the backend seam, and its only file that knows it. Attention is
// computed in double with the plan that the scheduler made, on a device of one of two kinds: one
// with memory of its own and two launch slots, or one like a CPU, with one slot, which reads and
// writes the host's memory and page tables where they are.
//
//   - Work runs when it is submitted or when it completes; completion is as late as the seed says,
//     and waiting for it moves the clock.
//   - A launch may fail at an enqueue, at Submit (nothing runs) or at Wait (all, some or none of
//   its
//     work has run); the device may be lost for good.
//   - Memory that was never written reads as NaN, page-table entries as wild; staging and workspace
//     are poisoned for every launch. Every page that is appended to or read must hold words of the
//     tenant whose launch it is, or zeroes.
//   - Each plan is judged against its batch by the PlanChecker before it runs.
//
// What is wrong is told to the watcher. One thread; nothing of the device is shared.
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
  // Host memory of a request goes into (or out of) launch `serial`: its tenant, 0 if it has
  // none.
  virtual int OnStaged(const void* host, int64_t bytes, uint64_t serial) = 0;
  // The launch has been submitted, and what it takes is staged.
  virtual void OnSubmitted(uint64_t serial) = 0;
  // The launch has completed well, at the clock's time.
  virtual void OnLaunchDone(uint64_t serial) = 0;
  // Nothing that the launch should have written may be relied on.
  virtual void OnLaunchFailed(uint64_t serial) = 0;
};

enum class DeviceFault { kNone, kEnqueue, kSubmit, kWaitAllRan, kWaitSomeRan, kWaitNoneRan, kLost };

struct FakeDeviceOptions {
  uint64_t seed = 0;
  bool unified = false;             // the host's memory, one launch slot
  bool runs_at_submit = false;      // a unified device has completed then, too
  bool runs_after_failure = false;  // launches still run behind one that has run and then failed
  int64_t latency_us = 0;           // of a launch, at most
  int32_t expanded_min_rows = 0;    // from which the expanded form is taken
  kernels::PlanTraits traits;
};

class FakeDevice final : public kernels::AttentionBackend {
 public:
  FakeDevice(const FakeDeviceOptions& options, scheduler::SimulatedClock* clock,
             DeviceWatcher* watcher);
  ~FakeDevice() override;

  // The next launch meets the fault; kLost: everything from now on fails.
  void Arm(DeviceFault fault) { armed_ = fault; }
  bool lost() const { return lost_; }
  // Faults that launches have met.
  int64_t faults() const { return faults_; }
  int64_t launches() const { return launches_; }
  int64_t commands() const { return commands_; }
  // Whether a launch that has not ended reads or writes the memory.
  bool Uses(const void* host, int64_t bytes) const;
  // When the next running launch ends; -1: none runs.
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
  std::span<uint32_t> PageTables() override { return host_tables_; }
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> AllocateHost(size_t bytes) override;
  absl::Status LoadWeights(int32_t slot, const kernels::Geometry& geometry, int32_t head_begin,
                           int32_t head_end, const kernels::Bf16* w_uk,
                           const kernels::Bf16* w_uv) override;
  absl::Status FreeWeights(int32_t slot) override;
  absl::Status ReadKv(const kernels::AppendRecord& where, kernels::Bf16* out) override;

  absl::Status BeginLaunch(int32_t slot) override;
  absl::StatusOr<const void*> StageInput(int32_t slot, const void* host, int64_t bytes) override;
  absl::StatusOr<void*> StageOutput(int32_t slot, void* host, int64_t bytes) override;
  absl::StatusOr<const void*> StageInputParts(int32_t slot, int32_t rows,
                                              std::span<const kernels::InputPart> parts) override;
  absl::StatusOr<void*> StageOutputParts(int32_t slot, int32_t rows,
                                         std::span<const kernels::OutputPart> parts) override;
  absl::StatusOr<void*> SlotWorkspace(int32_t slot, int64_t bytes) override;
  absl::Status WritePages(int32_t slot, std::span<const kernels::PageRange> ranges) override;
  absl::Status PublishPageTable(int32_t slot,
                                std::span<const kernels::TableRange> changed) override;
  absl::Status AppendKv(int32_t slot, std::span<const kernels::AppendRecord> records) override;
  absl::Status Absorb(int32_t slot, const kernels::Geometry& geometry, kernels::DType in,
                      kernels::DType out,
                      std::span<const kernels::ProjectionRecord> records) override;
  absl::Status Run(int32_t slot, const kernels::AttentionParams& params) override;
  absl::Status Combine(int32_t slot, const kernels::AttentionParams& params) override;
  absl::Status Project(int32_t slot, const kernels::Geometry& geometry, kernels::DType in,
                       kernels::DType out,
                       std::span<const kernels::ProjectionRecord> records) override;
  absl::Status Submit(int32_t slot) override;
  bool Done(int32_t slot) override;
  absl::StatusOr<int64_t> Wait(int32_t slot) override;

 private:
  enum class State { kIdle, kRecording, kRunning };
  enum class Verb { kPages, kTables, kAppend, kAbsorb, kProject, kRun, kCombine };
  struct Command {
    Verb verb = Verb::kPages;
    kernels::Geometry geometry;
    kernels::DType in = kernels::DType::kBf16, out = kernels::DType::kBf16;
    std::span<const kernels::PageRange> ranges;
    std::span<const kernels::AppendRecord> appends;
    std::span<const kernels::ProjectionRecord> projections;
    kernels::AttentionParams params;
    int64_t first_entry = 0;  // kTables, with the entries as they were at the call
    std::vector<uint32_t> entries;
  };
  // Device memory that stands for host memory, row by row.
  struct Staged {
    static constexpr int64_t kInPlace = -1;
    int64_t device = 0, bytes = 0;  // place in the slot's memory; kInPlace: the host's own
    std::byte* host = nullptr;
    int64_t row_bytes = 0, pitch = 0;
    int32_t rows = 0;
    int tenant = 0;
    bool output = false;
  };
  struct Slot {
    State state = State::kIdle;
    uint64_t serial = 0;
    std::vector<std::byte> memory;
    int64_t used = 0, in_bytes = 0, out_bytes = 0, work_bytes = 0;
    std::vector<Staged> staged;
    std::vector<Command> commands;
    size_t run = 0;     // commands that have run
    size_t to_run = 0;  // ... that will
    bool fails = false;
    int64_t started_at = 0, done_at = 0;
    int64_t page_ranges = 0, table_ranges = 0;
    int64_t requests = 0, rows = 0, packed_rows = 0;  // of Run
    // Partials between Run and Combine.
    std::vector<double> partial_sums, partial_most, partial_total;
  };
  struct Weights {
    kernels::Geometry geometry;
    std::vector<uint16_t> uk, uv;
    std::vector<bool> loaded;
  };
  struct Piece {  // what a work item makes of one packed row
    double most = 0, total = 0;
    std::vector<double> sums;
  };

  void Violation(const std::string& what);
  absl::Status Recording(int32_t slot) const;
  absl::StatusOr<Command*> Record(int32_t slot, Verb verb);
  absl::StatusOr<int64_t> Take(int32_t slot, int64_t bytes, int64_t* used, int64_t limit,
                               const char* what);
  // Room for a matrix in parts: staging memory, or the workspace of a unified device.
  absl::StatusOr<int64_t> TakePiece(int32_t slot, int64_t bytes, bool output);
  std::byte* Place(Slot& slot, int64_t at) { return slot.memory.data() + at; }
  int TenantAt(const Slot& slot, const void* device) const;
  // Of a unified device: what the launch reads or writes where it is.
  absl::Status StageInPlace(int32_t slot, void* host, int64_t bytes, bool output);
  void CopyIn(Slot& slot, const Staged& staged);
  // The page tables that a launch reads.
  std::span<const uint32_t> tables() const { return options_.unified ? host_tables_ : tables_; }
  void Execute(Slot& slot, size_t end);
  void Execute(Slot& slot, const Command& command);
  void WriteRange(const kernels::PageRange& range);
  void Append(Slot& slot, const kernels::AppendRecord& record);
  void ProjectRows(Slot& slot, const Command& command, const kernels::ProjectionRecord& record);
  void CheckPlan(const kernels::AttentionParams& params);
  void RunPlan(Slot& slot, const kernels::AttentionParams& params);
  void RunItem(Slot& slot, const kernels::AttentionParams& params, const kernels::WorkInfo& item);
  void AttendPiece(const kernels::AttentionParams& params, const kernels::RequestRecord& request,
                   const kernels::WorkInfo& item, int row, int head, int tenant);
  void Store(const kernels::AttentionParams& params, const kernels::RequestRecord& request, int row,
             int head, const Piece& piece);
  void CombinePlan(Slot& slot, const kernels::AttentionParams& params);
  // Elements of the pool; null, and a violation, when the entry or the place is wild.
  uint16_t* Element(int64_t page_table, int64_t layer_offset, int64_t row_stride, int page_size,
                    int position, std::span<const uint32_t> tables);
  void CheckWords(const uint16_t* first, int64_t count, int tenant, bool fresh, const char* where);
  // Whether a launch that runs uses the weights.
  bool UsesWeights(int32_t slot) const;
  // Whether the memory is of AllocateHost: the scheduler's own, of no tenant.
  bool IsOwn(const void* host) const;
  const Weights* WeightsOf(int32_t slot, int head_begin, int heads);

  const FakeDeviceOptions options_;
  scheduler::SimulatedClock* const clock_;
  DeviceWatcher* const watcher_;
  kernels::BackendInfo info_;
  kernels::BackendLimits limits_;
  uint64_t random_;
  std::vector<uint16_t> pool_;
  std::vector<uint32_t> host_tables_, tables_;
  std::vector<Slot> slots_;
  std::vector<Weights> weights_;
  std::vector<std::span<std::byte>> own_;  // memory of AllocateHost, which the engine keeps
  std::vector<int32_t> running_;           // slots by submission
  scheduler::testing::PlanChecker checker_;
  std::vector<scheduler::PlanRequest> plan_requests_;  // scratch
  Piece piece_, merged_;                               // scratch
  DeviceFault armed_ = DeviceFault::kNone;
  bool lost_ = false;
  uint64_t next_serial_ = 1;
  int64_t faults_ = 0, launches_ = 0, commands_ = 0, last_done_ = 0;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_DEVICE_FAKE_DEVICE_H_
