#include "scheduler/planning/metadata_buffers.h"

#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::scheduler {
namespace {

// Each array starts at a multiple of a cache line, so that no two arrays share one.
constexpr int64_t kAlignment = 64;

constexpr int64_t Padded(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

template <typename T>
constexpr int64_t ArrayBytes(int64_t count) {
  return Padded(count * static_cast<int64_t>(sizeof(T)));
}

absl::Status CheckRange(const char* name, int64_t got, int64_t least) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1;
  if (got >= least && got <= kMost) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("plan capacity.", name, ": got ", got, ", limit ", least, "..", kMost));
}

absl::Status Check(const PlanCapacity& capacity) {
  if (auto s = CheckRange("units", capacity.units, 1); !s.ok()) return s;
  if (auto s = CheckRange("work_items", capacity.work_items, 0); !s.ok()) return s;
  if (auto s = CheckRange("reduce_tiles", capacity.reduce_tiles, 0); !s.ok()) return s;
  if (auto s = CheckRange("reduce_partials", capacity.reduce_partials, 0); !s.ok()) return s;
  return CheckRange("partial_rows", capacity.partial_rows, 0);
}

template <typename T>
std::span<T> Take(std::byte*& next, int64_t count) {
  const std::span<T> taken(reinterpret_cast<T*>(next), static_cast<size_t>(count));
  next += ArrayBytes<T>(count);
  return taken;
}

}  // namespace

int64_t PlanCapacity::bytes() const {
  return ArrayBytes<kernels::WorkInfo>(work_items) + ArrayBytes<kernels::ReduceTile>(reduce_tiles) +
         ArrayBytes<int32_t>(units + 1) + ArrayBytes<int32_t>(reduce_tiles + 1) +
         ArrayBytes<int32_t>(reduce_partials) + kAlignment;
}

absl::StatusOr<std::unique_ptr<MetadataBuffers>> MetadataBuffers::Create(
    const PlanCapacity& capacity, kernels::AttentionBackend& backend) {
  if (auto s = Check(capacity); !s.ok()) return s;
  MLA_ASSIGN_OR_RETURN(auto memory, backend.AllocateHost(static_cast<size_t>(capacity.bytes())));
  return Create(capacity, std::move(memory));
}

absl::StatusOr<std::unique_ptr<MetadataBuffers>> MetadataBuffers::Create(
    const PlanCapacity& capacity, std::unique_ptr<kernels::HostBuffer> memory) {
  if (auto s = Check(capacity); !s.ok()) return s;
  const auto got = static_cast<int64_t>(memory->bytes().size());
  if (got < capacity.bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan memory: got ", got, " bytes, limit at least ", capacity.bytes()));
  }
  return std::unique_ptr<MetadataBuffers>(new MetadataBuffers(capacity, std::move(memory)));
}

MetadataBuffers::MetadataBuffers(const PlanCapacity& capacity,
                                 std::unique_ptr<kernels::HostBuffer> memory)
    : capacity_(capacity), memory_(std::move(memory)) {
  std::byte* next = memory_->bytes().data();
  const auto past = reinterpret_cast<uintptr_t>(next) % kAlignment;
  if (past != 0) next += kAlignment - past;
  work_info_ = Take<kernels::WorkInfo>(next, capacity_.work_items);
  reduce_final_map_ = Take<kernels::ReduceTile>(next, capacity_.reduce_tiles);
  work_indptr_ = Take<int32_t>(next, capacity_.units + 1);
  reduce_indptr_ = Take<int32_t>(next, capacity_.reduce_tiles + 1);
  reduce_partial_map_ = Take<int32_t>(next, capacity_.reduce_partials);
}

kernels::PlanView MetadataBuffers::View(const PlanCapacity& filled) const {
  kernels::PlanView view;
  view.work_indptr = work_indptr_.first(static_cast<size_t>(filled.units) + 1);
  view.work_info = work_info_.first(static_cast<size_t>(filled.work_items));
  view.reduce_indptr = reduce_indptr_.first(static_cast<size_t>(filled.reduce_tiles) + 1);
  view.reduce_final_map = reduce_final_map_.first(static_cast<size_t>(filled.reduce_tiles));
  view.reduce_partial_map = reduce_partial_map_.first(static_cast<size_t>(filled.reduce_partials));
  view.partial_rows = static_cast<int32_t>(filled.partial_rows);
  return view;
}

}  // namespace mla::scheduler
