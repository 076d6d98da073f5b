#include "kernels/hip/launch/project_work.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

// Returns the largest number of records of a launch's projections: one for each segment that is
// computed alone, and one for each head slice of segments that are computed together.
int64_t Records(const BackendLimits& l) { return int64_t{2} * l.launch_requests; }

// Returns the number of rows of these records, each counted once for every slice of its heads; and
// tiles.
int64_t Rows(const BackendLimits& l) {
  return std::max<int64_t>(l.launch_rows, l.launch_packed_rows);
}
int64_t Tiles(const BackendLimits& l) { return Records(l) + Rows(l) / kProjectRows + 1; }

}  // namespace

ProjectWork::ProjectWork(const DeviceState& device, const BackendLimits& limits) : device_(device) {
  tiles_.reserve(static_cast<size_t>(Tiles(limits)));
  rows_.reserve(static_cast<size_t>(Rows(limits)));
}

int64_t ProjectWork::MetadataBytes(const BackendLimits& limits) {
  constexpr int64_t kProjections = 2;  // projections of a launch: absorb and project
  return kProjections * (Rows(limits) * static_cast<int64_t>(sizeof(ProjectRow)) +
                         Tiles(limits) * static_cast<int64_t>(sizeof(ProjectTile)));
}

absl::Status ProjectWork::Check(const char* verb, std::span<const ProjectionRecord> records) const {
  for (size_t i = 0; i < records.size(); ++i) {
    const ProjectionRecord& r = records[i];
    if (device_.weights.Holds(r.weights_slot, r.head_offset, r.num_heads)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        verb, ".records[", i, "]: weights slot ", r.weights_slot, " does not hold heads [",
        r.head_offset, ", ", r.head_offset + r.num_heads, ")"));
  }
  return absl::OkStatus();
}

absl::Status ProjectWork::Add(LaunchRecording& recording, std::span<const ProjectionRecord> records,
                              bool absorbs, const ProjectArgs& args) {
  tiles_.clear();
  rows_.clear();
  const int64_t in_bytes = args.in_is_f32 ? 4 : 2, out_bytes = args.out_is_f32 ? 4 : 2;
  int32_t heads = 0;
  const int32_t layer = records.empty() ? 0 : records[0].weights_slot;
  for (const ProjectionRecord& r : records) {
    heads = std::max(heads, r.num_heads);
    const int32_t weights_slot = r.weights_slot - layer;
    if (rows_.size() + static_cast<size_t>(r.rows) > rows_.capacity()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("projection rows: limit ", rows_.capacity()));
    }
    for (int32_t row = 0; row < r.rows; ++row) {
      const bool joins = !tiles_.empty() && tiles_.back().rows < kProjectRows &&
                         tiles_.back().weights_slot == weights_slot &&
                         tiles_.back().head_offset == r.head_offset &&
                         tiles_.back().num_heads == r.num_heads;
      if (!joins) {
        if (tiles_.size() == tiles_.capacity()) {
          return absl::ResourceExhaustedError(
              absl::StrCat("projection tiles: limit ", tiles_.capacity()));
        }
        tiles_.push_back(
            {static_cast<int32_t>(rows_.size()), 0, weights_slot, r.head_offset, r.num_heads});
      }
      ++tiles_.back().rows;
      rows_.push_back({static_cast<const std::byte*>(r.in) + row * r.in_row_stride * in_bytes,
                       static_cast<std::byte*>(r.out) + row * r.out_row_stride * out_bytes,
                       r.in_head_stride, r.out_head_stride});
    }
  }
  if (tiles_.empty()) return absl::OkStatus();
  const bool rows_alone =
      device_.kernels.project_row_wide != nullptr &&
      std::all_of(tiles_.begin(), tiles_.end(), [](const ProjectTile& t) { return t.rows == 1; });
  ProjectArgs complete = args;
  if (rows_alone && tiles_.size() == 1) {
    complete.only_tile = tiles_[0];
    complete.only_row = rows_[0];
    complete.only_weights = absorbs ? device_.weights.UkOf(layer) : device_.weights.UvOf(layer);
  } else {
    MLA_ASSIGN_OR_RETURN(auto rows, recording.metadata().Put(std::span<const ProjectRow>(rows_)));
    MLA_ASSIGN_OR_RETURN(auto tiles,
                         recording.metadata().Put(std::span<const ProjectTile>(tiles_)));
    complete.rows = rows;
    complete.tiles = tiles;
    complete.weights = (absorbs ? device_.weights.w_uk() : device_.weights.w_uv()) + layer;
  }
  LaunchShape shape{.grid_x = static_cast<uint32_t>(tiles_.size()),
                    .threads = kBlockThreads,
                    .overlap_predecessor = true};
  const auto add = [&](Function function, int32_t columns, int32_t shared_bytes) {
    shape.grid_y = static_cast<uint32_t>(heads) * BlocksFor(args.n, columns);
    shape.shared_bytes = static_cast<uint32_t>(shared_bytes);
    return recording.AddKernel(function, shape, complete);
  };
  if (!rows_alone)
    return add(device_.kernels.project, kProjectCols, device_.arch->project_shared_bytes);
  return args.k <= kProjectWideDepth ? add(device_.kernels.project_row_wide, kProjectWideCols,
                                           device_.arch->project_row_wide_shared_bytes)
                                     : add(device_.kernels.project_row_deep, kProjectCols,
                                           device_.arch->project_row_deep_shared_bytes);
}

absl::Status ProjectWork::AddChecked(LaunchRecording& recording, bool absorbs,
                                     const Projection& projection, ProjectArgs args) {
  MLA_RETURN_IF_ERROR(Check(absorbs ? "absorb" : "project", projection.records));
  args.weight_panels = device_.weights.InPanels(projection.geometry);
  args.in_is_f32 = projection.in == DType::kF32;
  args.out_is_f32 = projection.out == DType::kF32;
  args.late = recording.late_word();
  return Add(recording, projection.records, absorbs, args);
}

bool ProjectWork::StartsEarly(const Projection& projection) const {
  return device_.kernels.project_row_wide != nullptr && projection.records.size() == 1 &&
         projection.records[0].rows == 1;
}

absl::Status ProjectWork::AddAbsorb(LaunchRecording& recording, const Projection& projection) {
  ProjectArgs args = {};
  args.k = projection.geometry.nope_dim;
  args.n = projection.geometry.kv_lora_rank;
  args.copy = projection.geometry.rope_dim;
  return AddChecked(recording, true, projection, args);
}

absl::Status ProjectWork::AddProject(LaunchRecording& recording, const Projection& projection) {
  ProjectArgs args = {};
  args.k = projection.geometry.kv_lora_rank;
  args.n = projection.geometry.v_dim;
  return AddChecked(recording, false, projection, args);
}

}  // namespace mla::kernels::hip
