// What every backend in host memory shares: the pool, the page tables, the slots and their recorded
// commands. A derived class says what it supports and executes a recorded launch.
//
// Memory is unified: StageInput and StageOutput return the host address itself and cost nothing.
// The KV pool is a sparse mapping in which rows lie as the row format says (bf16, row-major),
// without any repacking.
//
// Enqueue calls only record; their spans are read when the launch executes, as the seam allows.
// Threading: as AttentionBackend demands (one thread at a time); derived classes may execute on
// threads of their own between Submit and the end of Wait.
#ifndef MLA_KERNELS_HOST_HOST_BACKEND_H_
#define MLA_KERNELS_HOST_HOST_BACKEND_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/host/input_map.h"
#include "kernels/host/mapped_memory.h"

namespace mla::kernels {

// One enqueued verb. Which spans are meaningful follows from `kind`.
struct HostCommand {
  enum class Kind : uint8_t { kPages, kAppend, kAbsorb, kProject, kRun };
  Kind kind = Kind::kPages;
  DType in = DType::kBf16;           // kAbsorb, kProject
  DType out = DType::kBf16;          // kAbsorb, kProject
  Geometry geometry;                 // kAbsorb, kProject
  std::span<const PageRange> pages;  // inside the pool
  std::span<const AppendRecord> appends;
  std::span<const ProjectionRecord> projections;
  AttentionParams attention;         // kRun
  const InputMap* inputs = nullptr;  // of the launch; queries may lie in pieces
};

// Where KV rows lie: pool base and the table that addresses it.
struct PoolView {
  std::byte* base = nullptr;
  int64_t bytes = 0;
  const uint32_t* page_tables = nullptr;

  // First byte of row `position` of a sequence; 64-bit throughout.
  std::byte* Row(int64_t page_table, int64_t layer_offset, int64_t row_stride, int32_t page_size,
                 int32_t position) const {
    const int64_t granule = page_tables[page_table + position / page_size];
    return base + granule * kPageGranuleBytes + layer_offset + (position % page_size) * row_stride;
  }
};

// Copies rows [row_begin, row_end) of the record into their pages, as kernels/dtype.h says that
// they are stored.
void AppendRows(const PoolView& pool, const AppendRecord& record, int32_t row_begin,
                int32_t row_end);

// Carries out one range; its source does not overlap its target.
void WritePageRange(const PoolView& pool, const PageRange& range);

class HostBackend : public AttentionBackend {
 public:
  // Commands a launch may record; further ones are RESOURCE_EXHAUSTED.
  static constexpr int32_t kMaxCommands = 1024;
  // Output parts a launch may hand out; further ones are RESOURCE_EXHAUSTED.
  static constexpr int32_t kMaxOutputParts = 16384;

  absl::Status CanRun(const AttentionDesc& desc) const override;
  int64_t WorkspaceSize(const BackendLimits& limits) const override;
  absl::Status Configure(const BackendLimits& limits) override;
  absl::Status Healthy() const override { return absl::OkStatus(); }
  std::span<uint32_t> PageTables() override;
  absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(size_t bytes) override;
  absl::Status LoadWeights(int32_t slot, const Geometry& geometry, int32_t head_begin,
                           int32_t head_end, const Bf16* w_uk, const Bf16* w_uv) override;
  absl::Status FreeWeights(int32_t slot) override;
  absl::Status ReadKv(const AppendRecord& where, Bf16* out) override;

  absl::Status BeginLaunch(int32_t slot) override;
  absl::StatusOr<const void*> StageInput(int32_t slot, const void* host, int64_t bytes) override;
  absl::StatusOr<void*> StageOutput(int32_t slot, void* host, int64_t bytes) override;
  // For derived classes that say so in Info().
  absl::StatusOr<const void*> StageInputFragments(int32_t slot,
                                                  const FragmentedInput& input) override;
  absl::StatusOr<const void*> StageInputParts(int32_t slot, int32_t rows,
                                              std::span<const InputPart> parts) override;
  absl::StatusOr<void*> StageOutputParts(int32_t slot, int32_t rows,
                                         std::span<const OutputPart> parts) override;
  absl::StatusOr<void*> SlotWorkspace(int32_t slot, int64_t bytes) override;
  absl::Status WritePages(int32_t slot, std::span<const PageRange> ranges) override;
  absl::Status PublishPageTable(int32_t slot, std::span<const TableRange> changed) override;
  absl::Status AppendKv(int32_t slot, std::span<const AppendRecord> records) override;
  absl::Status Absorb(int32_t slot, const Geometry& geometry, DType in, DType out,
                      std::span<const ProjectionRecord> records) override;
  absl::Status Run(int32_t slot, const AttentionParams& params) override;
  absl::Status Combine(int32_t slot, const AttentionParams& params) override;
  absl::Status Project(int32_t slot, const Geometry& geometry, DType in, DType out,
                       std::span<const ProjectionRecord> records) override;
  absl::Status Submit(int32_t slot) override;
  bool Done(int32_t slot) override;
  absl::StatusOr<int64_t> Wait(int32_t slot) override;

 protected:
  // Weights of one slot: a place for every head of the model, filled by any number of LoadWeights
  // calls. Heads not loaded yet read as zero and are refused by the checks.
  struct WeightSlot {
    bool used = false;
    Geometry geometry;
    std::vector<bool> loaded;  // by head
    MappedMemory memory;       // head after head; layout of one head chosen by the derived class
    int64_t charged_bytes = 0;
  };

  // Bytes of derived-class memory that Configure takes beyond what is common.
  virtual int64_t OwnWorkspaceSize(const BackendLimits& limits) const = 0;
  virtual absl::Status ConfigureOwn(const BackendLimits& limits) = 0;
  // Bytes of repacked weights, proportional to the heads, and the repacking itself into zeroed
  // memory of that size. Each head is packed for itself, so ranges of heads can be packed one by
  // one.
  virtual int64_t PackedWeightBytes(const Geometry& geometry, int32_t heads) const = 0;
  virtual void PackWeights(const Geometry& geometry, int32_t heads, const Bf16* w_uk,
                           const Bf16* w_uv, std::byte* packed) const = 0;
  // Refuses a Run that the configured limits or weights do not cover.
  virtual absl::Status CheckAttention(const AttentionParams& params) const;
  // Called in submission order. The commands of `slot` stay as they are until Finish has returned.
  virtual void Start(int32_t slot) = 0;
  virtual bool Finished(int32_t slot) = 0;
  virtual absl::StatusOr<int64_t> Finish(int32_t slot) = 0;

  std::span<const HostCommand> Commands(int32_t slot) const { return slots_[slot].commands; }
  const BackendLimits& limits() const { return limits_; }
  PoolView Pool() const;
  const WeightSlot& Weights(int32_t slot) const { return weights_[slot]; }

 private:
  enum class SlotState : uint8_t { kIdle, kRecording, kRunning };
  struct HandOut {  // columns of a matrix, from the workspace to the host buffer that wants them
    const std::byte* source;
    std::byte* target;
    int64_t row_bytes, pitch;
    int32_t rows;
  };
  struct Slot {
    SlotState state = SlotState::kIdle;
    std::vector<HostCommand> commands;  // capacity kMaxCommands, never regrown
    MappedMemory workspace;
    int64_t workspace_used = 0;
    int64_t page_ranges = 0;  // recorded so far
    int64_t table_ranges = 0;
    std::vector<HandOut> hand_outs;  // capacity kMaxOutputParts, never regrown
    InputMap inputs;
  };

  absl::Status CheckRecording(int32_t slot) const;
  absl::StatusOr<HostCommand*> Record(int32_t slot, HostCommand::Kind kind);
  bool HoldsHeads(int32_t slot, int32_t head_begin, int32_t heads) const;
  absl::Status RecordProjections(int32_t slot, HostCommand::Kind kind, const Geometry& geometry,
                                 DType in, DType out, std::span<const ProjectionRecord> records);

  bool configured_ = false;
  BackendLimits limits_;
  MappedMemory pool_;
  MappedMemory page_tables_;
  std::vector<Slot> slots_;
  std::vector<WeightSlot> weights_;
  int64_t weight_bytes_used_ = 0;
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_HOST_HOST_BACKEND_H_
