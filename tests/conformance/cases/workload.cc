#include "tests/conformance/cases/workload.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <span>
#include <tuple>

#include "kernels/formats/fp8.h"
#include "tests/conformance/cases/random.h"

namespace mla::conformance {
namespace {

using kernels::Bf16;
using kernels::DType;
using kernels::Geometry;
using kernels::kPageGranuleBytes;

constexpr float kDeviation = 0.1f;
constexpr int32_t kLayers = 2;

std::vector<std::byte> Encode(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * kernels::ElementSize(dtype));
  if (dtype == DType::kF32) {
    // Without rows both pointers may be null, which memcpy does not allow.
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  auto* out = reinterpret_cast<Bf16*>(bytes.data());
  for (size_t i = 0; i < values.size(); ++i) out[i] = kernels::ToBf16(values[i]);
  return bytes;
}

std::vector<Bf16> RoundAll(const std::vector<float>& values) {
  std::vector<Bf16> out(values.size());
  std::transform(values.begin(), values.end(), out.begin(), kernels::ToBf16);
  return out;
}

// Editable fp32 form of one request before it is encoded.
struct Draft {
  const CaseSpec& spec;
  const RequestSpec& request;
  std::vector<float> q, kv;

  int32_t row_dim() const { return spec.geometry.kv_row_dim(); }
  int32_t rope_of_query() const { return spec.q_dim() - spec.geometry.rope_dim; }
  float* Query(int64_t row, int64_t head) {
    return q.data() + (row * request.num_heads + head) * spec.q_dim();
  }
  float* Key(int64_t row) { return kv.data() + row * row_dim(); }
};

// Makes every head's logit of `key` about `logit` larger than the others. The rotated part carries
// it if there is one, because it enters every route unchanged.
void MakeDominant(Random& random, int64_t key, float logit, Draft& d) {
  const Geometry& g = d.spec.geometry;
  const bool by_rope = g.rope_dim > 0;
  if (!by_rope && d.spec.route != Route::kAbsorbed) return;
  const int32_t dim = by_rope ? g.rope_dim : g.kv_lora_rank;
  const int32_t q_first = by_rope ? d.rope_of_query() : 0;
  const int32_t k_first = by_rope ? g.kv_lora_rank : 0;
  const float amplitude =
      std::sqrt(logit / (d.spec.softmax_scale * static_cast<float>(std::max(dim, 1))));
  for (int32_t i = 0; i < dim; ++i) {
    const float sign = random.OneIn(2) ? amplitude : -amplitude;
    d.Key(key)[k_first + i] += sign;
    for (int64_t row = 0; row < d.request.q_rows; ++row) {
      for (int64_t head = 0; head < d.request.num_heads; ++head) {
        d.Query(row, head)[q_first + i] += sign;
      }
    }
  }
}

// Values come as v + c, -v + c; two rotated dims contribute +512 and -512 to every logit.
void MakeCancelling(Random& random, Draft& d) {
  const Geometry& g = d.spec.geometry;
  for (int64_t row = 0; row + 1 < d.request.kv_rows(); row += 2) {
    for (int32_t i = 0; i < g.kv_lora_rank; ++i) {
      const float v = d.Key(row)[i];
      d.Key(row)[i] = v + 0.05f;
      d.Key(row + 1)[i] = -v + 0.05f;
    }
  }
  if (g.rope_dim < 2) return;
  for (int64_t row = 0; row < d.request.kv_rows(); ++row) {
    d.Key(row)[g.kv_lora_rank] = 8.0f;
    d.Key(row)[g.kv_lora_rank + 1] = -8.0f;
  }
  for (int64_t row = 0; row < d.request.q_rows; ++row) {
    for (int64_t head = 0; head < d.request.num_heads; ++head) {
      d.Query(row, head)[d.rope_of_query()] = 64.0f;
      d.Query(row, head)[d.rope_of_query() + 1] = 64.0f;
    }
  }
}

// Puts NaN in one query row of one head. In a late KV row it puts NaN, an infinity or a number that
// KV rows do not hold in the latent part, or an infinity in the rotated part; earlier query rows of
// a causal request must not notice it. Also puts denormals.
void MakeHostile(Random& random, Draft& d) {
  const Geometry& g = d.spec.geometry;
  // Few enough that the outputs are not denormal, because denormal outputs have too few digits to
  // compare.
  const int64_t elements = d.request.kv_rows() * static_cast<int64_t>(d.row_dim());
  for (int64_t n = 0; n < std::min<int64_t>(20, elements / 16); ++n) {
    const int64_t row = random.Below(d.request.kv_rows());
    d.Key(row)[random.Below(d.row_dim())] = random.OneIn(2) ? 1e-40f : -3e-39f;
  }
  if (random.OneIn(2)) {
    float* q = d.Query(random.Below(d.request.q_rows), random.Below(d.request.num_heads));
    q[random.Below(d.spec.q_dim())] = std::numeric_limits<float>::quiet_NaN();
  }
  const int64_t late = d.request.kv_rows() - 1 - random.Below(std::min(3, d.request.q_rows));
  switch (random.Below(3)) {
    case 0: {
      constexpr float kInfinity = std::numeric_limits<float>::infinity();
      const std::vector<float> values = {std::numeric_limits<float>::quiet_NaN(), kInfinity,
                                         -kInfinity, 1.3e24f, -3e38f};
      const int64_t at = random.Below(g.kv_lora_rank);
      d.Key(late)[at] = random.Pick(values);
      break;
    }
    case 1:
      if (g.rope_dim == 0) break;
      d.Key(late)[g.kv_lora_rank + random.Below(g.rope_dim)] =
          random.OneIn(2) ? std::numeric_limits<float>::infinity()
                          : -std::numeric_limits<float>::infinity();
      break;
    default:
      break;
  }
}

// Aligns the latent part of one key with the absorbed query of one row and head, so that its logit
// there is about 20 larger than the others.
void MakeDominantLatent(Random& random, const Weights& weights, Draft& d) {
  const Geometry& g = d.spec.geometry;
  const int64_t key = random.Below(d.request.kv_rows());
  const int64_t head = random.Below(d.request.num_heads);
  const float* const q = d.Query(random.Below(d.request.q_rows), head);
  std::vector<double> latent(static_cast<size_t>(g.kv_lora_rank), 0.0);
  double norm = 0.0;
  for (int32_t i = 0; i < g.kv_lora_rank; ++i) {
    for (int32_t n = 0; n < g.nope_dim; ++n) {
      const int64_t at =
          ((d.request.head_offset + head) * g.nope_dim + n) * int64_t{g.kv_lora_rank} + i;
      latent[i] += double{q[n]} * kernels::ToFloat(weights.w_uk[static_cast<size_t>(at)]);
    }
    norm += latent[i] * latent[i];
  }
  if (norm == 0.0) return;
  for (int32_t i = 0; i < g.kv_lora_rank; ++i) {
    d.Key(key)[i] += static_cast<float>(20.0 / (d.spec.softmax_scale * norm) * latent[i]);
  }
}

void MakeTrulyCancelling(Draft& d) {
  for (int64_t row = 0; row + 1 < d.request.kv_rows(); row += 2) {
    for (int32_t i = 0; i < d.spec.geometry.kv_lora_rank; ++i) d.Key(row + 1)[i] = -d.Key(row)[i];
  }
}

// Makes groups of some rows smaller than other groups by more than the range of a shared scale. The
// rows are none, all, or a few.
void MakeApart(Random& random, Draft& d) {
  const int64_t one_in = random.Pick(std::vector<int64_t>{0, 0, 1, 16});
  const int32_t group = kernels::TraitsOf(d.spec.kv_format).group;
  for (int64_t row = 0; one_in > 0 && row < d.request.kv_rows(); ++row) {
    if (!random.OneIn(one_in)) continue;
    float by = 1.0f;
    for (int32_t i = 0; i < d.spec.geometry.kv_lora_rank; ++i) {
      if (i % group == 0)
        by = random.OneIn(2) ? std::ldexp(1.0f, -6 - static_cast<int>(random.Below(4))) : 1.0f;
      d.Key(row)[i] *= by;
    }
  }
}

// Every other row's groups have two scales, and rows next to it have one. The first half of the
// groups shares a binade, and its largest magnitude is just below the end of it.
void MakeSmallEnd(Draft& d) {
  constexpr float kLargest = 4.0f * kDeviation;
  const int32_t dim = d.spec.geometry.kv_lora_rank;
  const int32_t group = kernels::TraitsOf(d.spec.kv_format).group;
  for (int64_t row = 0; row < d.request.kv_rows(); row += 2) {
    for (int32_t i = 0; i < dim; ++i) {
      float& x = d.Key(row)[i];
      x = group > 0 && i % group == 0 ? kLargest : std::clamp(x, -kLargest, kLargest);
      if (i >= dim / 2) x = std::ldexp(x, -7);
    }
  }
}

// Shifts values to three deviations above zero, which adds the same to all logits of a query.
void MakePositive(Draft& d) {
  for (int64_t row = 0; row < d.request.kv_rows(); ++row) {
    for (int32_t i = 0; i < d.spec.geometry.kv_lora_rank; ++i) d.Key(row)[i] += 3.0f * kDeviation;
  }
}

kernels::KvRowLayout RowLayoutOf(const CaseSpec& spec) {
  return kernels::MakeKvRowLayout(spec.kv_format, spec.geometry.kv_lora_rank,
                                  spec.geometry.rope_dim);
}

float DeviationOf(InputKind kind) {
  return kind == InputKind::kUnit ? 1.0f : kind == InputKind::kLarge ? 3.0f : kDeviation;
}

// Deviation of queries such that products of row_dim terms become logits of the wanted deviation.
float QueryDeviation(const CaseSpec& spec) {
  if (spec.inputs != InputKind::kSpread) return DeviationOf(spec.inputs);
  const auto dim = static_cast<float>(spec.geometry.kv_row_dim());
  return spec.logit_deviation / (spec.softmax_scale * kDeviation * std::sqrt(dim));
}

}  // namespace

void UpdateStored(const CaseSpec& spec, const RequestSpec& request, RequestData& data) {
  constexpr auto kKind = kernels::Fp8Kind::kE4m3Fn;
  const kernels::KvRowLayout at = RowLayoutOf(spec);
  const float scale = spec.kv_scales[request.layer];
  const auto dim = static_cast<size_t>(spec.geometry.kv_row_dim());
  const size_t row_bytes = dim * kernels::ElementSize(spec.kv_source);
  data.stored.resize(data.kv.size() / row_bytes * dim);
  std::vector<std::byte> row(static_cast<size_t>(at.row_bytes + at.page_scales_bytes));
  const std::byte* const first = row.data();
  for (size_t i = 0; i * row_bytes < data.kv.size(); ++i) {
    kernels::EncodeKvRow(at, kKind, data.kv.data() + i * row_bytes, spec.kv_source, scale,
                         kernels::KvRowIn(at, row.data(), at.row_bytes, 1, 0));
    kernels::DecodeKvRow(at, kKind, scale, kernels::KvRowIn(at, first, at.row_bytes, 1, 0),
                         data.stored.data() + i * dim);
  }
}

namespace {

// Changes a query so that rounding to e4m3 keeps it, divided by the power of two that brings its
// largest magnitude to at most 448 and to more than 224
// (kernels/hip/device/sm90/decode/rows64_codes/queries.h).
void RoundQuery(std::span<float> query) {
  uint32_t largest = 0;
  for (float& x : query) {
    x = kernels::ToFloat(kernels::ToBf16(x));
    largest = std::max(largest, std::bit_cast<uint32_t>(x) & 0x7fffffffu);
  }
  const uint32_t exponent = (largest >> 23) + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0);
  if (exponent < 20 || exponent > 250) return;
  const float scale = std::bit_cast<float>((exponent - 8) << 23);
  constexpr auto kKind = kernels::Fp8Kind::kE4m3Fn;
  for (float& x : query) {
    x = kernels::DecodeFp8(kernels::EncodeFp8(x / scale, kKind), kKind) * scale;
  }
}

RequestData MakeRequest(Random& random, const CaseSpec& spec, const RequestSpec& request,
                        const Weights* weights) {
  Draft draft{spec, request, {}, {}};
  draft.q.resize(static_cast<size_t>(request.q_rows) * request.num_heads * spec.q_dim());
  draft.kv.resize(static_cast<size_t>(request.kv_rows()) * draft.row_dim());
  const float deviation = DeviationOf(spec.inputs);
  FillNormal(random, QueryDeviation(spec), draft.q.data(), static_cast<int64_t>(draft.q.size()));
  FillNormal(random, deviation, draft.kv.data(), static_cast<int64_t>(draft.kv.size()));
  const bool plain = spec.inputs == InputKind::kNormal || spec.inputs == InputKind::kHostile;
  if (plain && kernels::TraitsOf(spec.kv_format).shares_scale) MakeApart(random, draft);
  if (request.repeats > 1) MakePositive(draft);
  if (request.q_rows > 0) {
    if (spec.inputs == InputKind::kDominantKey) {
      const int64_t key = random.Below(request.kv_rows());
      MakeDominant(random, key, 20.0f, draft);
    }
    if (spec.inputs == InputKind::kSink) MakeDominant(random, 0, 10.0f, draft);
    if (spec.inputs == InputKind::kLastKey) {
      MakeDominant(random, request.kv_rows() - 1, 10.0f, draft);
    }
    if (spec.inputs == InputKind::kSmallEnd) MakeSmallEnd(draft);
    if (spec.inputs == InputKind::kCancellation) MakeCancelling(random, draft);
    if (spec.inputs == InputKind::kHostile) MakeHostile(random, draft);
    if (spec.inputs == InputKind::kDominantLatent) MakeDominantLatent(random, *weights, draft);
    if (spec.inputs == InputKind::kTrueCancellation) MakeTrulyCancelling(draft);
  }
  if (spec.RoundsRotated()) {
    for (int64_t row = 0; row < request.q_rows; ++row) {
      for (int32_t head = 0; head < request.num_heads; ++head) {
        float* const rotated = draft.Query(row, head) + draft.rope_of_query();
        for (int32_t i = 0; i < spec.geometry.rope_dim; ++i) {
          rotated[i] = kernels::ToFloat(kernels::ToBf16(rotated[i]));
        }
      }
    }
  }
  if (spec.RoundsProbabilities() && spec.route == Route::kAbsorbed && !spec.rounds_queries) {
    for (int64_t i = 0; i < int64_t{request.q_rows} * request.num_heads; ++i) {
      RoundQuery({draft.q.data() + i * spec.q_dim(), static_cast<size_t>(spec.q_dim())});
    }
  }
  RequestData data;
  if (spec.sparse) {
    data.lists = MakeLists(random, request);
    const std::vector<bool> listed = RowsListed(request, data.lists);
    for (size_t row = 0; row < listed.size(); ++row) {
      if (listed[row]) continue;
      std::fill_n(draft.Key(static_cast<int64_t>(row)), draft.row_dim(),
                  std::numeric_limits<float>::quiet_NaN());
    }
  }
  data.q = Encode(draft.q, spec.q_dtype);
  data.kv = Encode(draft.kv, spec.kv_source);
  UpdateStored(spec, request, data);
  return data;
}

// Gives every sequence its page groups: all groups of all sequences in one random order, with gaps.
void PlacePages(Random& random, Workload& workload, int64_t base_granule) {
  struct Group {
    size_t request, entry;
    int64_t granules;
  };
  std::vector<Group> groups;
  const kernels::KvRowLayout row = RowLayoutOf(workload.spec);
  const int64_t padding = random.OneIn(3) ? 64 : 0;
  for (size_t i = 0; i < workload.requests.size(); ++i) {
    const RequestSpec& request = workload.spec.requests[i];
    RequestData& data = workload.requests[i];
    data.row_stride = row.row_bytes + padding;
    const int64_t page_bytes = kernels::KvPageBytes(row, data.row_stride, request.page_size);
    data.layer_offset = page_bytes * request.layer;
    const int64_t bytes = page_bytes * kLayers;
    const size_t pages =
        static_cast<size_t>((request.kv_rows() + request.page_size - 1) / request.page_size);
    const size_t entries = pages * static_cast<size_t>(request.repeats);
    data.page_table.assign(entries + kWildEntries, kWildEntry);
    for (size_t entry = 0; entry < pages; ++entry) {
      groups.push_back({i, entry, (bytes + kPageGranuleBytes - 1) / kPageGranuleBytes});
    }
  }
  for (size_t i = groups.size(); i > 1; --i) {
    std::swap(groups[i - 1], groups[static_cast<size_t>(random.Below(static_cast<int64_t>(i)))]);
  }
  workload.first_granule = base_granule;
  int64_t next = base_granule + random.Below(4);
  for (const Group& group : groups) {
    workload.requests[group.request].page_table[group.entry] = static_cast<uint32_t>(next);
    next += group.granules + (random.OneIn(4) ? 1 : 0);
  }
  workload.granules = next + 1 - base_granule;
  for (size_t i = 0; i < workload.requests.size(); ++i) {
    const auto repeats = static_cast<size_t>(workload.spec.requests[i].repeats);
    std::vector<uint32_t>& table = workload.requests[i].page_table;
    const size_t pages = (table.size() - kWildEntries) / repeats;
    for (size_t entry = pages; entry < pages * repeats; ++entry) {
      table[entry] = table[entry - pages];
    }
  }
}

// Sizes of the finite elements of V.
struct ValueSizes {
  double maximum = 0.0, sum = 0.0;
  int64_t count = 0;

  void Add(double value) {
    if (!std::isfinite(value)) return;
    maximum = std::max(maximum, std::abs(value));
    sum += std::abs(value);
    ++count;
  }
  double Mean() const { return count > 0 ? sum / static_cast<double>(count) : 0.0; }
};

ValueSizes LatentSizes(const RequestData& data, const Geometry& g) {
  ValueSizes sizes;
  for (size_t row = 0; row < data.stored.size(); row += static_cast<size_t>(g.kv_row_dim())) {
    for (int32_t i = 0; i < g.kv_lora_rank; ++i) {
      sizes.Add(data.stored[row + static_cast<size_t>(i)]);
    }
  }
  return sizes;
}

// Sizes of up-projected values: of all rows if that is cheap, otherwise of the first rows that are
// finite. Rows that no list names are NaN, and the first rows may all be such.
ValueSizes ExpandedSizes(const RequestData& data, const Weights& weights) {
  const Geometry& g = weights.geometry;
  const size_t a_row = static_cast<size_t>(g.num_heads) * g.v_dim * g.kv_lora_rank;
  size_t rows = std::max<size_t>(2, size_t{4000000} / a_row);
  ValueSizes sizes;
  for (size_t row = 0; row < data.stored.size() && rows > 0;
       row += static_cast<size_t>(g.kv_row_dim())) {
    const float* const latent = data.stored.data() + row;
    if (!std::all_of(latent, latent + g.kv_lora_rank, [](float f) { return std::isfinite(f); })) {
      continue;
    }
    --rows;
    for (int32_t column = 0; column < g.v_dim * g.num_heads; ++column) {
      const size_t head = static_cast<size_t>(column / g.v_dim), v = column % g.v_dim;
      double sum = 0.0;
      for (size_t i = 0; i < static_cast<size_t>(g.kv_lora_rank); ++i) {
        sum += static_cast<double>(latent[i]) *
               kernels::ToFloat(weights.w_uv[(head * g.kv_lora_rank + i) * g.v_dim + v]);
      }
      sizes.Add(sum);
    }
  }
  return sizes;
}

}  // namespace

const Weights& WeightsFor(const Geometry& geometry) {
  using Key = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>;
  static std::mutex& mutex = *new std::mutex;
  static auto& cache = *new std::map<Key, std::unique_ptr<Weights>>;
  const Key key{geometry.num_heads, geometry.kv_lora_rank, geometry.rope_dim, geometry.nope_dim,
                geometry.v_dim};
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Weights>& entry = cache[key];
  if (entry != nullptr) return *entry;
  entry = std::make_unique<Weights>();
  entry->geometry = geometry;
  Random random(static_cast<uint64_t>(geometry.num_heads * 1000003 + geometry.kv_lora_rank));
  const auto make = [&](int64_t columns) {
    std::vector<float> values(static_cast<size_t>(geometry.num_heads) * geometry.kv_lora_rank *
                              static_cast<size_t>(columns));
    FillNormal(random, kDeviation, values.data(), static_cast<int64_t>(values.size()));
    return RoundAll(values);
  };
  entry->w_uk = make(geometry.nope_dim);
  entry->w_uv = make(geometry.v_dim);
  return *entry;
}

Workload MakeWorkload(const CaseSpec& spec, int64_t base_granule) {
  Random random(spec.seed ^ 0x5bd1e995u);
  Workload workload;
  workload.spec = spec;
  if (spec.route != Route::kAbsorbed) workload.weights = &WeightsFor(spec.geometry);
  for (const RequestSpec& request : spec.requests) {
    workload.requests.push_back(MakeRequest(random, spec, request, workload.weights));
    RequestData& data = workload.requests.back();
    const ValueSizes sizes = spec.route == Route::kAbsorbed
                                 ? LatentSizes(data, spec.geometry)
                                 : ExpandedSizes(data, *workload.weights);
    workload.max_abs_value = std::max(workload.max_abs_value, sizes.maximum);
    data.mean_abs_value = sizes.Mean();
  }
  PlacePages(random, workload, base_granule);
  return workload;
}

}  // namespace mla::conformance
