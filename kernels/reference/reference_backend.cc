#include "kernels/reference/reference_backend.h"

#include <chrono>
#include <cstring>
#include <iterator>
#include <vector>

#include "kernels/host_memory/transfers.h"
#include "kernels/projected_weights.h"

namespace mla::kernels {
namespace {

int64_t HeadBytes(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                  int32_t head) {
  return WindowOf(geometry, shape, part, head, 1).Bytes(shape.weights);
}

// Place of a head's weights, in bytes from W_UQ of all heads, which W_O of all heads follows. With
// as many heads as the model has, it is the place after the part.
int64_t OffsetOf(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                 int32_t head) {
  int64_t offset = part == ProjectedPart::kQueries
                       ? 0
                       : OffsetOf(geometry, shape, ProjectedPart::kQueries, geometry.num_heads);
  for (int32_t h = 0; h < head; ++h) offset += HeadBytes(geometry, shape, part, h);
  return offset;
}

// Returns the weights of all heads that codes stand for.
std::vector<Bf16> Widened(const Geometry& geometry, const ProjectedShape& shape, ProjectedPart part,
                          const std::byte* packed) {
  std::vector<Bf16> weights;
  for (int32_t head = 0; head < geometry.num_heads; ++head) {
    const WeightWindow window = WindowOf(geometry, shape, part, head, 1);
    const std::byte* const own = packed + OffsetOf(geometry, shape, part, head);
    for (int64_t r = 0; r < window.rows; ++r) {
      for (int64_t c = 0; c < window.columns; ++c) {
        const auto code = static_cast<uint8_t>(own[r * window.columns + c]);
        weights.push_back(WidenedWeight(code, ScaleOf(window, own, window.BlockOf(r, c))));
      }
    }
  }
  return weights;
}

}  // namespace

ReferenceBackend::ReferenceBackend() {
  info_.name = "reference";
  info_.description = "oracle: fp32 in, fp64 accumulation, one thread";
  info_.device = "host CPU";
  info_.arch = "portable";
  info_.supported =
      "bf16, fp8_tensor, fp8_row or fp8_page rows, bf16 or fp32 queries and outputs, any heads, "
      "dims and "
      "page size";
  info_.kv_formats.assign(std::begin(kKvFormats), std::end(kKvFormats));
  info_.sparse = true;
  info_.selects = true;
  info_.windows = true;
  info_.projects = true;
  info_.projects_codes = true;
  info_.units = 1;
  info_.unified_memory = true;
  info_.splits_queries = true;
  info_.absorbed_q_of_bf16 = DType::kF32;  // nothing is rounded between the projections
}

PlanTraits ReferenceBackend::Traits(const AttentionDesc& desc) const {
  PlanTraits traits;
  traits.max_heads_per_tile = desc.form == AttentionForm::kExpanded ? 1 : 0;
  traits.max_q_rows_per_tile = desc.attention == AttentionKind::kDense ? 0 : 1;
  return traits;
}

// Both forms take the same arithmetic here, so the expanded form is never cheaper.
int32_t ReferenceBackend::ExpandedFormMinRows(const Geometry&) const {
  return limits().launch_rows + 1;
}

int64_t ReferenceBackend::PackedWeightBytes(const Geometry& geometry, int32_t heads) const {
  return static_cast<int64_t>(sizeof(Bf16)) * heads * geometry.kv_lora_rank *
         (geometry.nope_dim + geometry.v_dim);
}

void ReferenceBackend::PackWeights(const Geometry& geometry, int32_t heads, const Bf16* w_uk,
                                   const Bf16* w_uv, std::byte* packed) const {
  const size_t uk = static_cast<size_t>(geometry.kv_lora_rank) * geometry.nope_dim;
  const size_t uv = static_cast<size_t>(geometry.kv_lora_rank) * geometry.v_dim;
  for (int32_t head = 0; head < heads; ++head, w_uk += uk, w_uv += uv) {
    std::memcpy(packed, w_uk, sizeof(Bf16) * uk);
    std::memcpy(packed + sizeof(Bf16) * uk, w_uv, sizeof(Bf16) * uv);
    packed += sizeof(Bf16) * (uk + uv);
  }
}

void ReferenceBackend::UnpackWeights(const Geometry& geometry, const std::byte* packed, Bf16* w_uk,
                                     Bf16* w_uv) const {
  const size_t uk = sizeof(Bf16) * geometry.kv_lora_rank * geometry.nope_dim;
  const size_t uv = sizeof(Bf16) * geometry.kv_lora_rank * geometry.v_dim;
  std::memcpy(w_uk, packed, uk);
  std::memcpy(w_uv, packed + uk, uv);
}

// The weights are packed as they come, in the order of the heads: W_UQ of all heads, then W_O.
int64_t ReferenceBackend::PackedProjectedBytes(const Geometry& geometry,
                                               const ProjectedShape& shape) const {
  return OffsetOf(geometry, shape, ProjectedPart::kOutputs, geometry.num_heads);
}

void ReferenceBackend::PackProjected(const Geometry& geometry, const ProjectedShape& shape,
                                     ProjectedPart part, int32_t head, const void* weights,
                                     std::byte* packed) const {
  std::memcpy(packed + OffsetOf(geometry, shape, part, head), weights,
              static_cast<size_t>(HeadBytes(geometry, shape, part, head)));
}

void ReferenceBackend::UnpackProjected(const Geometry& geometry, const ProjectedShape& shape,
                                       ProjectedPart part, int32_t head, const std::byte* packed,
                                       void* weights) const {
  std::memcpy(weights, packed + OffsetOf(geometry, shape, part, head),
              static_cast<size_t>(HeadBytes(geometry, shape, part, head)));
}

ReferenceWeights ReferenceBackend::WeightsOf(int32_t slot) const {
  if (slot < 0) return {};
  const WeightSlot& weights = Weights(slot);
  const Geometry& g = weights.geometry;
  const auto* first = weights.memory.As<const Bf16>();
  return {first, first + static_cast<int64_t>(g.kv_lora_rank) * g.nope_dim,
          static_cast<int64_t>(g.kv_lora_rank) * (g.nope_dim + g.v_dim)};
}

void ReferenceBackend::Start(int32_t slot, const Launch& launch) {
  const auto begin = std::chrono::steady_clock::now();
  const PoolView pool = Pool(launch.page_tables);
  for (const PageTransfer& transfer : launch.page_writes) WritePages(pool.base, transfer);
  for (const PageRange& range : launch.pages) WritePageRange(pool, range);
  for (const AppendRecord& record : launch.appends) AppendRows(pool, record, 0, record.rows);
  for (const SelectRecord& record : launch.selects) {
    for (int32_t row = 0; row < record.rows; ++row) ReferenceSelectRow(record, pool, row);
  }
  ProjectRows(launch.queries, ProjectedPart::kQueries);
  Project(launch.absorb, /*absorb=*/true);
  Attend(launch.absorbed, pool);
  Project(launch.project, /*absorb=*/false);
  Attend(launch.expanded, pool);
  ProjectRows(launch.hiddens, ProjectedPart::kOutputs);
  for (const PageTransfer& transfer : launch.page_reads) ReadPages(pool.base, transfer);
  if (static_cast<size_t>(slot) >= nanoseconds_.size()) nanoseconds_.resize(slot + 1);
  nanoseconds_[slot] =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin)
          .count();
}

absl::StatusOr<int64_t> ReferenceBackend::Finish(int32_t slot) { return nanoseconds_[slot]; }

void ReferenceBackend::Project(const Projection& projection, bool absorb) const {
  const auto project = absorb ? ReferenceAbsorbRow : ReferenceProjectRow;
  for (const ProjectionRecord& record : projection.records) {
    const ReferenceWeights weights = WeightsOf(record.weights_slot);
    for (int32_t row = 0; row < record.rows; ++row) {
      for (int32_t head = 0; head < record.num_heads; ++head) {
        project(projection.geometry, projection.in, projection.out, record, weights, row, head);
      }
    }
  }
}

void ReferenceBackend::ProjectRows(const RowProjection& projection, ProjectedPart part) const {
  const Geometry& g = projection.geometry;
  const auto project = part == ProjectedPart::kQueries ? ReferenceQueryRow : ReferenceHiddenRow;
  for (const RowProjectionRecord& record : projection.records) {
    const WeightSlot& weights = Weights(record.weights_slot);
    const auto* first = weights.projected.As<const Bf16>() +
                        OffsetOf(g, weights.shape, part, 0) / static_cast<int64_t>(sizeof(Bf16));
    std::vector<Bf16> widened;
    if (weights.shape.codes()) {
      widened = Widened(g, weights.shape, part, weights.projected.As<const std::byte>());
      first = widened.data();
    }
    for (int32_t row = 0; row < record.rows; ++row) {
      project(projection, record, weights.shape, first, row);
    }
  }
}

void ReferenceBackend::Attend(const AttentionParams& params, const PoolView& pool) {
  const bool windows = params.desc.attention == AttentionKind::kWindow;
  for (size_t i = 0; i < params.segments.size(); ++i) {
    const SegmentRecord& segment = params.segments[i];
    const WindowRecord* const window = windows ? &params.windows[i] : nullptr;
    const ReferenceWeights weights = WeightsOf(segment.weights_slot);
    for (int32_t row = 0; row < segment.q_rows; ++row) {
      ReferenceAttendRow(params.desc, segment, window, pool, weights, row, scratch_);
    }
  }
}

absl::Status RegisterReference(BackendRegistry& registry) {
  return registry.Add(
      {"reference", 0,
       [](const BackendOptions&) -> absl::StatusOr<std::unique_ptr<AttentionBackend>> {
         return std::make_unique<ReferenceBackend>();
       }});
}

}  // namespace mla::kernels
