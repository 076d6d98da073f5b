#include "kernels/reference/reference_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace mla::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Finds rows or entries in the pool.
struct Plane {
  KvRowLayout at;
  int64_t page_table, layer_offset, row_stride;
  int32_t page_size;
};

Plane PlaneOfRows(const AttentionDesc& desc, const SegmentRecord& segment) {
  const Geometry& g = desc.geometry;
  return {MakeKvRowLayout(desc.kv_format, g.kv_lora_rank, g.rope_dim), segment.page_table,
          segment.layer_offset, segment.row_stride, segment.page_size};
}

Plane PlaneOfEntries(const AttentionDesc& desc, const WindowRecord& window) {
  const Geometry& g = desc.geometry;
  return {MakeKvRowLayout(desc.entry_format, g.kv_lora_rank, g.rope_dim), window.page_table,
          window.layer_offset, window.row_stride, window.page_size};
}

// Finds the positions that a query row attends to: KV rows first, then entries.
void FindPositions(const AttentionDesc& desc, const SegmentRecord& segment,
                   const WindowRecord* window, int32_t q_row, ReferenceScratch& scratch) {
  const int32_t visible = VisibleRows(segment, q_row);
  std::vector<int32_t>& positions = scratch.positions;
  positions.clear();
  int32_t bound = visible;  // a list may name positions below it
  if (desc.attention == AttentionKind::kDense) {
    for (int32_t j = 0; j < visible; ++j) positions.push_back(j);
  }
  if (window != nullptr) {
    for (int32_t j = visible - WindowRows(*window, visible); j < visible; ++j)
      positions.push_back(j);
    bound = WholeEntries(*window, visible);
  }
  scratch.first_entry = positions.size();
  if (window != nullptr && segment.list_begin == nullptr) {
    for (int32_t j = 0; j < bound; ++j) positions.push_back(j);
  }
  if (desc.attention == AttentionKind::kDense || segment.list_begin == nullptr) return;
  if (window == nullptr) scratch.first_entry = std::numeric_limits<size_t>::max();
  const int32_t before = segment.list_begin[0];
  for (int32_t i = segment.list_begin[q_row]; i < segment.list_begin[q_row + 1]; ++i) {
    const int32_t position = segment.list[i - before];
    if (position >= 0 && position < bound) positions.push_back(position);
  }
}

// Decodes the rows and entries at scratch.positions.
void DecodeRows(const Plane& rows, const Plane& entries, float kv_scale, const PoolView& pool,
                ReferenceScratch& scratch) {
  const size_t dim = static_cast<size_t>(rows.at.latent_dim + rows.at.rope_dim);
  scratch.rows.resize(scratch.positions.size() * dim);
  for (size_t j = 0; j < scratch.positions.size(); ++j) {
    const Plane& plane = j < scratch.first_entry ? rows : entries;
    const int32_t position = scratch.positions[j];
    const int32_t in_page = position % plane.page_size;
    const std::byte* const page = pool.Row(plane.page_table, plane.layer_offset, plane.row_stride,
                                           plane.page_size, position - in_page);
    DecodeKvRow(plane.at, kHostFp8, kv_scale,
                KvRowIn(plane.at, page, plane.row_stride, plane.page_size, in_page),
                &scratch.rows[j * dim]);
  }
}

// Computes the query in latent space, so that one loop serves both forms. The expanded form's key
// is [W_UK c, rope], and q · (W_UK c) = (q W_UK) · c exactly.
void LatentQuery(const AttentionDesc& desc, const SegmentRecord& segment,
                 const ReferenceWeights& weights, int32_t q_row, int32_t head,
                 std::vector<double>& query) {
  const Geometry& g = desc.geometry;
  const int64_t base = q_row * segment.q_row_stride + head * segment.q_head_stride;
  query.assign(static_cast<size_t>(g.kv_row_dim()), 0.0);
  if (desc.form == AttentionForm::kAbsorbed) {
    for (int32_t i = 0; i < g.kv_row_dim(); ++i) {
      query[i] = LoadElement(segment.q, desc.q_dtype, base + i);
    }
    return;
  }
  const int64_t model_head = segment.head_offset + head;
  for (int32_t n = 0; n < g.nope_dim; ++n) {
    const double q = LoadElement(segment.q, desc.q_dtype, base + n);
    const Bf16* row = weights.w_uk + model_head * weights.head_stride + n * g.kv_lora_rank;
    for (int32_t i = 0; i < g.kv_lora_rank; ++i) query[i] += q * ToFloat(row[i]);
  }
  for (int32_t i = 0; i < g.rope_dim; ++i) {
    query[g.kv_lora_rank + i] = LoadElement(segment.q, desc.q_dtype, base + g.nope_dim + i);
  }
}

// Adds up the products of the query with kRows rows. A sum is a chain of additions, so several of
// them at a time take hardly longer than one.
template <size_t kRows>
void Dots(const std::vector<double>& query, const float* rows, double* dots) {
  double sums[kRows] = {};
  for (size_t i = 0; i < query.size(); ++i) {
    for (size_t j = 0; j < kRows; ++j) sums[j] += query[i] * rows[j * query.size() + i];
  }
  std::copy_n(sums, kRows, dots);
}

// Fills logits[j] for the rows attended to. Returns their maximum, NaN logits excepted.
double Logits(float softmax_scale, ReferenceScratch& scratch) {
  const size_t dim = scratch.query.size(), count = scratch.positions.size();
  scratch.logits.resize(count);
  size_t j = 0;
  for (; j + 8 <= count; j += 8) Dots<8>(scratch.query, &scratch.rows[j * dim], &scratch.logits[j]);
  for (; j < count; ++j) Dots<1>(scratch.query, &scratch.rows[j * dim], &scratch.logits[j]);
  double maximum = -kInfinity;
  for (double& logit : scratch.logits) {
    logit *= softmax_scale;
    if (logit > maximum) maximum = logit;
  }
  return maximum;
}

// Stores the latent output in the output row, multiplied by W_UV in the expanded form.
void StoreOutput(const AttentionDesc& desc, const SegmentRecord& segment,
                 const ReferenceWeights& weights, int32_t q_row, int32_t head, double inverse,
                 ReferenceScratch& scratch) {
  const Geometry& g = desc.geometry;
  const int64_t base = q_row * segment.o_row_stride + head * segment.o_head_stride;
  if (desc.form == AttentionForm::kAbsorbed) {
    for (int32_t i = 0; i < desc.value_dim(); ++i) {
      StoreElement(segment.o, desc.o_dtype, base + i, scratch.sum[i] * inverse);
    }
    return;
  }
  const int64_t model_head = segment.head_offset + head;
  scratch.expanded.assign(static_cast<size_t>(g.v_dim), 0.0);
  for (int32_t i = 0; i < g.kv_lora_rank; ++i) {
    const double latent = scratch.sum[i] * inverse;
    const Bf16* row = weights.w_uv + model_head * weights.head_stride + i * g.v_dim;
    for (int32_t v = 0; v < g.v_dim; ++v) scratch.expanded[v] += latent * ToFloat(row[v]);
  }
  for (int32_t v = 0; v < g.v_dim; ++v) {
    StoreElement(segment.o, desc.o_dtype, base + v, scratch.expanded[v]);
  }
}

// Computes the output row and LSE of one head from the decoded rows.
void AttendHead(const AttentionDesc& desc, const SegmentRecord& segment, const WindowRecord* window,
                const ReferenceWeights& weights, int32_t q_row, int32_t head,
                ReferenceScratch& scratch) {
  // The sum has this width. The expanded form sums latent values, because W_UV is applied to the
  // sum.
  const int32_t dim =
      desc.form == AttentionForm::kAbsorbed ? desc.value_dim() : desc.geometry.kv_lora_rank;
  LatentQuery(desc, segment, weights, q_row, head, scratch.query);
  const double maximum = Logits(segment.softmax_scale, scratch);
  // Without a finite maximum (no key, or only -Inf and NaN logits) 0 keeps exp well defined.
  const double shift = maximum == -kInfinity ? 0.0 : maximum;
  double total = 0.0;
  scratch.sum.assign(static_cast<size_t>(dim), 0.0);
  for (size_t j = 0; j < scratch.positions.size(); ++j) {
    const double weight = std::exp(scratch.logits[j] - shift);
    total += weight;
    const float* const row = &scratch.rows[j * scratch.query.size()];
    for (int32_t i = 0; i < dim; ++i) scratch.sum[i] += weight * row[i];
  }
  const double lse = total == 0.0 ? -kInfinity : shift + std::log(total);
  double inverse = total == 0.0 ? 0.0 : 1.0 / total;
  if (window != nullptr && window->sinks != nullptr) {
    inverse *= SinkFactor(window->sinks[head], lse);
  }
  StoreOutput(desc, segment, weights, q_row, head, inverse, scratch);
  if (segment.lse != nullptr) {
    segment.lse[q_row * segment.lse_row_stride + head * segment.lse_head_stride] =
        static_cast<float>(lse);
  }
}

}  // namespace

float LoadElement(const void* base, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(base)[index];
  return ToFloat(static_cast<const Bf16*>(base)[index]);
}

void StoreElement(void* base, DType dtype, int64_t index, double value) {
  const float narrow = static_cast<float>(value);
  if (dtype == DType::kF32) {
    static_cast<float*>(base)[index] = narrow;
  } else {
    static_cast<Bf16*>(base)[index] = ToBf16(narrow);
  }
}

void ReferenceAttendRow(const AttentionDesc& desc, const SegmentRecord& segment,
                        const WindowRecord* window, const PoolView& pool,
                        const ReferenceWeights& weights, int32_t q_row, ReferenceScratch& scratch) {
  const Plane rows = PlaneOfRows(desc, segment);
  const Plane entries = window == nullptr ? rows : PlaneOfEntries(desc, *window);
  FindPositions(desc, segment, window, q_row, scratch);
  DecodeRows(rows, entries, segment.kv_scale, pool, scratch);
  for (int32_t head = 0; head < segment.num_heads; ++head) {
    AttendHead(desc, segment, window, weights, q_row, head, scratch);
  }
}

void ReferenceSelectRow(const SelectRecord& record, const PoolView& pool, int32_t row) {
  const int32_t heads = record.indexer.heads, dim = record.indexer.dim;
  const int32_t visible = SelectVisible(record, row);
  const int32_t count = SelectedRows(record, row);
  const auto* const inputs =
      static_cast<const std::byte*>(record.inputs) + row * record.indexer.input_bytes(record.dtype);
  const auto* const weights = inputs + int64_t{heads} * dim * int64_t(ElementSize(record.dtype));
  const KvRowLayout layout = MakeKvRowLayout(KvFormat::kIndexKey, dim, 0);
  std::vector<float> key(static_cast<size_t>(dim));
  std::vector<std::pair<double, int32_t>> best;  // sorted by (-logit, position)
  for (int32_t position = 0; position < visible; ++position) {
    const int32_t in_page = position % record.page_size;
    const std::byte* const page = pool.Row(record.page_table, record.layer_offset,
                                           record.row_stride, record.page_size, position - in_page);
    DecodeKvRow(layout, kHostFp8, 1.0f,
                KvRowIn(layout, page, record.row_stride, record.page_size, in_page), key.data());
    double logit = 0.0;
    for (int32_t head = 0; head < heads; ++head) {
      double dot = 0.0;
      for (int32_t i = 0; i < dim; ++i) {
        dot += double{LoadElement(inputs, record.dtype, int64_t{head} * dim + i)} * key[i];
      }
      float weight = 0.0f;
      std::memcpy(&weight, weights + head * int64_t{sizeof weight}, sizeof weight);
      logit += double{weight} * (dot > 0.0 || std::isnan(dot) ? dot : 0.0);
    }
    best.emplace_back(std::isnan(logit) ? -kInfinity : -logit, position);
  }
  std::sort(best.begin(), best.end());
  int32_t* const list = SelectedList(record, row);
  for (int32_t i = 0; i < count; ++i) list[i] = best[static_cast<size_t>(i)].second;
  std::sort(list, list + count);
  CopyWanted(record, row);
}

void ReferenceAbsorbRow(const Geometry& geometry, DType in, DType out,
                        const ProjectionRecord& record, const ReferenceWeights& weights,
                        int32_t row, int32_t head) {
  const int64_t in_base = row * record.in_row_stride + head * record.in_head_stride;
  const int64_t out_base = row * record.out_row_stride + head * record.out_head_stride;
  const int64_t model_head = record.head_offset + head;
  const Bf16* w = weights.w_uk + model_head * weights.head_stride;
  for (int32_t i = 0; i < geometry.kv_lora_rank; ++i) {
    double sum = 0.0;
    for (int32_t n = 0; n < geometry.nope_dim; ++n) {
      sum += static_cast<double>(LoadElement(record.in, in, in_base + n)) *
             ToFloat(w[static_cast<int64_t>(n) * geometry.kv_lora_rank + i]);
    }
    StoreElement(record.out, out, out_base + i, sum);
  }
  for (int32_t i = 0; i < geometry.rope_dim; ++i) {
    StoreElement(record.out, out, out_base + geometry.kv_lora_rank + i,
                 LoadElement(record.in, in, in_base + geometry.nope_dim + i));
  }
}

void ReferenceProjectRow(const Geometry& geometry, DType in, DType out,
                         const ProjectionRecord& record, const ReferenceWeights& weights,
                         int32_t row, int32_t head) {
  const int64_t in_base = row * record.in_row_stride + head * record.in_head_stride;
  const int64_t out_base = row * record.out_row_stride + head * record.out_head_stride;
  const int64_t model_head = record.head_offset + head;
  const Bf16* w = weights.w_uv + model_head * weights.head_stride;
  for (int32_t v = 0; v < geometry.v_dim; ++v) {
    double sum = 0.0;
    for (int32_t i = 0; i < geometry.kv_lora_rank; ++i) {
      sum += static_cast<double>(LoadElement(record.in, in, in_base + i)) *
             ToFloat(w[static_cast<int64_t>(i) * geometry.v_dim + v]);
    }
    StoreElement(record.out, out, out_base + v, sum);
  }
}

void ReferenceQueryRow(const RowProjection& projection, const RowProjectionRecord& record,
                       const ProjectedShape& shape, const Bf16* weights, int32_t row) {
  const Geometry& g = projection.geometry;
  const int32_t dim = g.expanded_q_dim(), pairs = g.rope_dim / 2;
  const float* const rotation =
      record.rotations == nullptr ? nullptr : record.rotations + int64_t{row} * g.rope_dim;
  std::vector<double> query(static_cast<size_t>(dim));
  for (int32_t head = 0; head < g.num_heads; ++head) {
    for (int32_t i = 0; i < dim; ++i, weights += shape.q_lora_rank) {
      query[i] = 0.0;
      for (int32_t k = 0; k < shape.q_lora_rank; ++k) {
        query[i] += static_cast<double>(
                        LoadElement(record.in, projection.in, row * record.in_row_stride + k)) *
                    ToFloat(weights[k]);
      }
    }
    for (int32_t pair = 0; pair < pairs; ++pair) {
      const bool halves = projection.rope == RopeLayout::kHalves;
      double& x = query[g.nope_dim + (halves ? pair : 2 * pair)];
      double& y = query[g.nope_dim + (halves ? pair + pairs : 2 * pair + 1)];
      const double old = x, cosine = rotation[pair], sine = rotation[pairs + pair];
      x = old * cosine - y * sine;
      y = old * sine + y * cosine;
    }
    for (int32_t i = 0; i < dim; ++i) {
      StoreElement(record.out, projection.out,
                   row * record.out_row_stride + int64_t{head} * dim + i, query[i]);
    }
  }
}

void ReferenceHiddenRow(const RowProjection& projection, const RowProjectionRecord& record,
                        const ProjectedShape& shape, const Bf16* weights, int32_t row) {
  const Geometry& g = projection.geometry;
  const int64_t head_weights = int64_t{shape.hidden_size} * g.v_dim;
  for (int32_t i = 0; i < shape.hidden_size; ++i) {
    double sum = 0.0;
    for (int32_t head = 0; head < g.num_heads; ++head) {
      const Bf16* const w = weights + head * head_weights + int64_t{i} * g.v_dim;
      const int64_t in = row * record.in_row_stride + int64_t{head} * g.v_dim;
      for (int32_t k = 0; k < g.v_dim; ++k) {
        sum += static_cast<double>(LoadElement(record.in, projection.in, in + k)) * ToFloat(w[k]);
      }
    }
    StoreElement(record.out, projection.out, row * record.out_row_stride + i, sum);
  }
}

}  // namespace mla::kernels
