// Computes attention in host memory, for production. It takes any shape, uses the machine's best
// vector instructions, and hands out the plan's work items dynamically.
//
// A launch becomes a job of the worker pool, with one phase a part. Free threads take attention
// items one at a time, then shares of the merges of split tiles. A merge waits only for the pieces
// of its own tile. See kernels/cpu/README.md for the inner loops.
//
// Threading: as AttentionBackend demands. Wait computes on the calling thread, too.
#ifndef MLA_KERNELS_CPU_CPU_BACKEND_H_
#define MLA_KERNELS_CPU_CPU_BACKEND_H_

#include <atomic>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend_registry.h"
#include "kernels/cpu/items/item_runner.h"
#include "kernels/cpu/items/launch_selects.h"
#include "kernels/cpu/items/row_projection.h"
#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/cpu/workers/worker_pool.h"
#include "kernels/host_memory/host_backend.h"
#include "kernels/types/page_ranges.h"

namespace mla::kernels {

class CpuBackend final : public HostBackend {
 public:
  // options.threads 0 means every CPU the process may use; options.cpu_isa is the highest level to
  // use. INVALID_ARGUMENT for an unknown level or a negative thread count.
  static absl::StatusOr<std::unique_ptr<CpuBackend>> Create(const BackendOptions& options);
  // As Create, with the caller's inner loops; options.cpu_isa does not apply. Tests use it for
  // levels that the machine cannot run.
  static absl::StatusOr<std::unique_ptr<CpuBackend>> CreateWith(const cpu::KernelSet& kernels,
                                                                const BackendOptions& options);
  ~CpuBackend() override;

  const BackendInfo& Info() const override { return info_; }
  absl::Status CanRun(const AttentionDesc& desc) const override;
  PlanTraits Traits(const AttentionDesc& desc) const override;
  int32_t ExpandedFormMinRows(const Geometry& geometry) const override;

 private:
  // One phase of the job, with its inputs.
  struct Phase {
    enum class Kind : uint8_t {
      kWritePages,
      kPages,
      kAppend,
      kSelect,
      kMergeSelected,
      kQueries,
      kAbsorb,
      kProject,
      kHiddens,
      kPrepareMerges,
      kAttend,
      kReadPages
    };
    Kind kind = Kind::kPages;
    // kPages: ranges to carry out, and for each of them the number of the phase's items before it.
    // Null first_item: one thread carries out the ranges one after another.
    std::span<const PageRange> pages;
    const int64_t* first_item = nullptr;
    cpu::RunContext run;  // kPrepareMerges, kAttend
    int32_t shares = 1;   // per query row, for kSelect and kMergeSelected
  };
  // Bound of the phases for page ranges that depend on each other. Ranges after the last phase are
  // carried out by one thread.
  static constexpr int32_t kMaxPagePhases = 256;
  // Page phases, page writes and reads, appends, selections and their merges, two projections of
  // heads and two of rows, and attention in either form with its merges.
  static constexpr int32_t kMaxPhases = kMaxPagePhases + 2 + 1 + 2 + 2 + 2 + 2 * 2;
  struct Job {
    const Launch* launch = nullptr;
    PoolView pool;
    std::vector<Phase> phases;  // capacity kMaxPhases
    int32_t page_phases = 0;
    std::vector<int64_t> first_item;  // capacity limits.page_ranges
    cpu::WorkerPool::Job work;
  };

  CpuBackend(const cpu::KernelSet& kernels, const BackendOptions& options, int32_t threads);

  int64_t OwnWorkspaceSize(const BackendLimits& limits) const override;
  absl::Status ConfigureOwn(const BackendLimits& limits) override;
  absl::Status CheckAttention(const AttentionParams& params) const override;
  int64_t PackedWeightBytes(const Geometry& geometry, int32_t heads) const override;
  void PackWeights(const Geometry& geometry, int32_t heads, const Bf16* w_uk, const Bf16* w_uv,
                   std::byte* packed) const override;
  void UnpackWeights(const Geometry& geometry, const std::byte* packed, Bf16* w_uk,
                     Bf16* w_uv) const override;
  int64_t PackedProjectedBytes(const Geometry& geometry,
                               const ProjectedShape& shape) const override;
  void PackProjected(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                     int32_t head, const void* weights, std::byte* packed) const override;
  void UnpackProjected(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                       int32_t head, const std::byte* packed, void* weights) const override;
  void Start(int32_t slot, const Launch& launch) override;
  bool Finished(int32_t slot) override;
  absl::StatusOr<int64_t> Finish(int32_t slot) override;

  int64_t ScratchBytes(const BackendLimits& limits) const;
  int64_t PartialRowFloats(const BackendLimits& limits) const;
  static void AddPhase(Job& job, const Phase& phase, int64_t items);
  void AddPagePhases(Job& job);
  void AddAttention(Job& job, const AttentionParams& params);
  void WritePagesItem(const Job& job, const Phase& phase, int64_t item) const;
  static void AddTransfers(Job& job, Phase::Kind kind, std::span<const PageTransfer> transfers);
  static void TransferItem(const Job& job, const Phase& phase, int64_t item);
  static void AppendItem(const Job& job, int64_t item);
  void AddSelects(Job& job);
  void Execute(const Job& job, const Phase& phase, int64_t item, int32_t place);
  void PrepareMerges(const cpu::RunContext& run);
  void RunItem(const cpu::RunContext& run, int64_t item, int32_t place);
  void MergeItem(const cpu::RunContext& run, int64_t item);
  void ProjectItem(const Projection& projection, bool absorb, int64_t item, int32_t place);
  void ProjectRowsItem(const RowProjection& projection, ProjectedPart part, int64_t item,
                       int32_t place);
  // The first of the records that have the same weights, and their items.
  struct RowGroup {
    std::span<const RowProjectionRecord> records;
    int64_t rows = 0;
    int64_t blocks = 0;  // of kTileRows rows
    int32_t columns = 0;
    int64_t items() const { return blocks * columns; }
  };
  RowGroup FirstGroup(std::span<const RowProjectionRecord> records, const Geometry& geometry,
                      ProjectedPart part) const;
  void AddRowProjection(Job& job, const RowProjection& projection, ProjectedPart part) const;
  cpu::PackedWeights WeightsOf(int32_t slot) const;

  const cpu::KernelSet& kernels_;
  BackendOptions options_;
  BackendInfo info_;
  std::vector<MappedMemory> scratch_;  // by place
  int64_t scratch_bytes_ = 0;
  cpu::LaunchSelects selects_;
  MappedMemory partial_o_, partial_lse_;
  MappedMemory tile_of_partial_;  // int32 [partial_rows]: reduce tile of a partial's first row
  std::vector<std::atomic<int32_t>> unfinished_;  // pieces of a reduce tile still running
  std::vector<std::unique_ptr<Job>> jobs_;        // by launch slot
  PageRangeRuns page_runs_;
  std::unique_ptr<cpu::WorkerPool> pool_;
};

// Adds the row "cpu", preferred over "reference".
absl::Status RegisterCpu(BackendRegistry& registry);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_CPU_CPU_BACKEND_H_
