// Holds the five arrays of an execution plan, preallocated. One MetadataBuffers holds one plan; the
// engine owns several and never refills one that a running launch still reads.
#ifndef MLA_SCHEDULER_PLANNING_METADATA_BUFFERS_H_
#define MLA_SCHEDULER_PLANNING_METADATA_BUFFERS_H_

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/types/work_info.h"

namespace mla::scheduler {

struct PlanCapacity {
  int64_t units = 0;
  int64_t work_items = 0;
  int64_t reduce_tiles = 0;
  int64_t reduce_partials = 0;
  int64_t partial_rows = 0;  // packed rows of the partial buffers
  // Returns the number of host bytes of a MetadataBuffers with this capacity.
  int64_t bytes() const;
  friend bool operator==(const PlanCapacity&, const PlanCapacity&) = default;
};

class MetadataBuffers final {
 public:
  // The memory comes from backend.AllocateHost, so that device copies reach it directly.
  // INVALID_ARGUMENT names a capacity that is out of range: units must be at least 1, the others at
  // least 0, all below 2^31.
  static absl::StatusOr<std::unique_ptr<MetadataBuffers>> Create(
      const PlanCapacity& capacity, kernels::AttentionBackend& backend);
  // Creates the buffers in the given memory of at least capacity.bytes().
  static absl::StatusOr<std::unique_ptr<MetadataBuffers>> Create(
      const PlanCapacity& capacity, std::unique_ptr<kernels::HostBuffer> memory);

  const PlanCapacity& capacity() const { return capacity_; }
  // work_indptr has capacity().units + 1 entries, reduce_indptr capacity().reduce_tiles + 1.
  std::span<int32_t> work_indptr() { return work_indptr_; }
  std::span<kernels::WorkInfo> work_info() { return work_info_; }
  std::span<int32_t> reduce_indptr() { return reduce_indptr_; }
  std::span<kernels::ReduceTile> reduce_final_map() { return reduce_final_map_; }
  std::span<int32_t> reduce_partial_map() { return reduce_partial_map_; }
  // Returns a view of the filled part, without a generation. REQUIRES: within capacity().
  kernels::PlanView View(const PlanCapacity& filled) const;

 private:
  MetadataBuffers(const PlanCapacity& capacity, std::unique_ptr<kernels::HostBuffer> memory);

  PlanCapacity capacity_;
  std::unique_ptr<kernels::HostBuffer> memory_;
  std::span<int32_t> work_indptr_;
  std::span<kernels::WorkInfo> work_info_;
  std::span<int32_t> reduce_indptr_;
  std::span<kernels::ReduceTile> reduce_final_map_;
  std::span<int32_t> reduce_partial_map_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PLANNING_METADATA_BUFFERS_H_
