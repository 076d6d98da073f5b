#include "tests/conformance/cases/case_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "tests/conformance/cases/random.h"

namespace mla::conformance {
namespace {

using kernels::AttentionForm;
using kernels::DType;
using kernels::Geometry;

const char* Name(Route route) {
  constexpr const char* kNames[] = {"absorbed", "expanded", "absorb+project"};
  return kNames[static_cast<int>(route)];
}

const char* Name(InputKind kind) {
  constexpr const char* kNames[] = {"normal", "dominant", "cancellation",    "hostile",
                                    "spread", "sink",     "last-key",        "small-end",
                                    "unit",   "large",    "dominant-latent", "true-cancellation"};
  return kNames[static_cast<int>(kind)];
}

double RequestFlop(const Geometry& g, const RequestSpec& r) {
  return 2.0 * r.q_rows * r.num_heads * r.kv_rows() * (2.0 * g.kv_lora_rank + g.rope_dim);
}

DType PickDType(Random& random) { return random.OneIn(3) ? DType::kF32 : DType::kBf16; }

const std::vector<int32_t> kQueryRows = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 64};

// Draws the stage first, so that decode, extend and prefill are equally frequent.
RequestSpec SampleRequest(Random& random, const SamplerOptions& options, int32_t model_heads,
                          bool slice_heads) {
  RequestSpec r;
  r.page_size = random.Pick(options.page_sizes);
  const std::vector<int32_t> cached = {1, r.page_size - 1, r.page_size, r.page_size + 1, 4097};
  switch (random.Below(3)) {
    case 0:  // decode: few rows on a cache
      r.q_rows = static_cast<int32_t>(random.Below(9));
      r.cached_rows = random.Pick(cached);
      break;
    case 1:  // extend: more rows on a cache
      r.q_rows = random.Pick(kQueryRows);
      r.cached_rows = random.Pick(cached);
      break;
    default:  // prefill: no cache
      r.q_rows = random.Pick(kQueryRows);
      break;
  }
  r.num_heads = model_heads;
  if (slice_heads && model_heads > 1) {
    r.num_heads = static_cast<int32_t>(1 + random.Below(model_heads));
    r.head_offset = static_cast<int32_t>(random.Below(model_heads - r.num_heads + 1));
  }
  r.layer = static_cast<int32_t>(random.Below(2));
  r.causal = !random.OneIn(8);
  return r;
}

// Reduces the case until it fits: fewer requests, then a shorter cache, fewer rows, fewer heads.
void Shrink(CaseSpec& spec, double max_flop) {
  while (spec.Flop() > max_flop && spec.requests.size() > 1) spec.requests.pop_back();
  RequestSpec& r = spec.requests.front();
  if (spec.Flop() > max_flop) r.cached_rows = std::min(r.cached_rows, r.page_size + 1);
  while (spec.Flop() > max_flop && r.q_rows > 1) r.q_rows /= 2;
  while (spec.Flop() > max_flop && r.num_heads > 1) r.num_heads /= 2;
}

// A case of one request in the first format of `options`, in one unit, of full dims.
CaseSpec AbsorbedCase(const SamplerOptions& options, InputKind inputs, int32_t heads,
                      int32_t q_rows, int32_t keys) {
  CaseSpec spec = SampleCase(options, 8500000 + static_cast<uint64_t>(heads));
  spec.geometry = options.full;
  spec.geometry.num_heads = heads;
  spec.route = Route::kAbsorbed;
  spec.inputs = inputs;
  spec.q_dtype = spec.latent_q_dtype = DType::kBf16;
  spec.kv_source = DType::kBf16;
  spec.softmax_scale = 0.135234f;
  for (float& scale : spec.kv_scales) scale = 0.01f;
  spec.kv_format = options.kv_formats[0];
  spec.units = 1;
  RequestSpec r;
  r.num_heads = heads;
  r.q_rows = q_rows;
  r.cached_rows = keys - q_rows;
  r.page_size = 64;
  spec.requests = {r};
  return spec;
}

}  // namespace

kernels::AttentionDesc CaseSpec::Desc() const {
  kernels::AttentionDesc desc;
  desc.geometry = geometry;
  desc.form = route == Route::kExpanded ? AttentionForm::kExpanded : AttentionForm::kAbsorbed;
  desc.q_dtype = route == Route::kAbsorbProject ? latent_q_dtype : q_dtype;
  desc.o_dtype = route == Route::kAbsorbProject ? latent_o_dtype : o_dtype;
  desc.kv_format = kv_format;
  desc.page_size = requests.empty() ? 64 : requests.front().page_size;
  if (sparse) desc.attention = kernels::AttentionKind::kSparse;
  desc.products = products;
  desc.streamed = streamed;
  return desc;
}

int32_t CaseSpec::q_dim() const {
  return route == Route::kAbsorbed ? geometry.absorbed_q_dim() : geometry.expanded_q_dim();
}

int32_t CaseSpec::o_dim() const {
  return route == Route::kAbsorbed ? geometry.kv_lora_rank : geometry.v_dim;
}

double CaseSpec::Flop() const {
  double flop = 0.0;
  for (const RequestSpec& r : requests) flop += RequestFlop(geometry, r);
  return flop;
}

int64_t CaseSpec::PackedRows() const {
  int64_t rows = 0;
  for (const RequestSpec& r : requests) rows += static_cast<int64_t>(r.q_rows) * r.num_heads;
  return rows;
}

bool ComputeInFp8(CaseSpec& spec) {
  if (spec.kv_format == kernels::KvFormat::kBf16) return false;
  if (spec.route == Route::kAbsorbProject) return false;
  if (IsWide(spec.inputs)) return false;
  spec.products = kernels::DType::kFp8E4m3;
  return true;
}

bool Stream(CaseSpec& spec, bool own_rows) {
  constexpr int64_t kFewRows = 16;
  if (spec.route != Route::kAbsorbed || spec.sparse || spec.q_dtype != kernels::DType::kBf16 ||
      spec.kv_format != kernels::KvFormat::kBf16 || spec.PackedRows() <= kFewRows) {
    return false;
  }
  spec.streamed = true;
  spec.own_rows = own_rows;
  if (own_rows) spec.kv_source = kernels::DType::kBf16;  // as the queries
  spec.units = std::numeric_limits<int32_t>::max();
  return true;
}

std::string ToString(const CaseSpec& spec) {
  std::string text = absl::StrCat("case ", spec.seed, " ", Name(spec.route), " ", Name(spec.inputs),
                                  " units=", spec.units, " source=", kernels::Name(spec.kv_source),
                                  " queries=", kernels::Name(spec.q_dtype), " ",
                                  kernels::ToString(spec.Desc()), " requests:");
  for (const RequestSpec& r : spec.requests) {
    absl::StrAppend(&text, " {q=", r.q_rows, " cached=", r.cached_rows, " heads=", r.head_offset,
                    "+", r.num_heads, " page=", r.page_size, " layer=", r.layer,
                    r.causal ? "" : " full", "}");
    if (r.repeats > 1) absl::StrAppend(&text, " x", r.repeats);
    if (spec.sparse) absl::StrAppend(&text, " lists ", static_cast<int>(r.lists));
  }
  if (spec.streamed) text += spec.own_rows ? " streamed with own rows" : " streamed";
  return text;
}

std::vector<Geometry> ReleasedGeometries() {
  return {{0, 512, 64, 128, 128}, {0, 32, 16, 16, 16}, {0, 96, 32, 64, 64}};
}

std::vector<Geometry> OddGeometries() {
  return {{0, 33, 7, 5, 9},    {0, 1, 0, 1, 1},   {0, 20, 12, 24, 40},
          {0, 130, 3, 31, 17}, {0, 48, 0, 16, 8}, {0, 7, 9, 11, 13}};
}

CaseSpec SampleCase(const SamplerOptions& options, uint64_t index) {
  Random random(options.seed * 0x9e3779b97f4a7c15ull + index);
  const std::vector<Geometry> geometries =
      options.geometries.empty() ? ReleasedGeometries() : options.geometries;
  CaseSpec spec;
  spec.seed = index;
  // The smallest dims are the cheapest and test control flow best, so they are drawn most often.
  spec.geometry = random.OneIn(2) ? geometries[1 % geometries.size()] : random.Pick(geometries);
  spec.geometry.num_heads = random.Pick(options.heads);
  const int64_t route = random.Below(options.expanded ? 5 : 4);
  spec.route = route == 4   ? Route::kExpanded
               : route == 3 ? Route::kAbsorbProject
                            : Route::kAbsorbed;
  constexpr InputKind kKinds[] = {InputKind::kNormal, InputKind::kNormal, InputKind::kDominantKey,
                                  InputKind::kCancellation, InputKind::kHostile};
  spec.inputs = kKinds[random.Below(5)];
  spec.q_dtype = PickDType(random);
  spec.o_dtype = PickDType(random);
  spec.kv_source = PickDType(random);
  // Absorbed queries are as wide as the queries that they are made from, as in backends.
  spec.latent_q_dtype = spec.q_dtype;
  spec.latent_o_dtype = DType::kF32;
  spec.softmax_scale = static_cast<float>(
      1.3 / std::sqrt(static_cast<double>(spec.geometry.nope_dim + spec.geometry.rope_dim)));
  spec.units = random.Pick(options.units);
  Random of_rows(options.seed * 0x9e3779b97f4a7c15ull - index);
  spec.kv_format = of_rows.Pick(options.kv_formats);
  // Rows of deviation 1/10 use the full range, or little of it, or exceed it in places.
  for (float& scale : spec.kv_scales) scale = of_rows.Pick<float>({0.0011f, 0.25f, 0x1p-11f});
  const int64_t count = 1 + random.Below(8);
  const bool slice_heads = random.OneIn(4);
  for (int64_t i = 0; i < count; ++i) {
    spec.requests.push_back(SampleRequest(random, options, spec.geometry.num_heads, slice_heads));
  }
  Shrink(spec, random.OneIn(200)  ? options.max_flop
               : random.OneIn(10) ? 6 * options.typical_flop
                                  : options.typical_flop);
  return spec;
}

std::vector<CaseSpec> LargeCases(const SamplerOptions& options, int32_t count) {
  constexpr int32_t kShapes[20][3] = {
      // heads, q rows, cached rows
      {128, 1, 4097}, {128, 2, 4097}, {128, 4, 2000}, {64, 5, 4097},  {16, 17, 4097},
      {128, 33, 200}, {128, 64, 65},  {24, 64, 1000}, {128, 64, 0},   {16, 64, 4097},
      {12, 9, 4097},  {3, 64, 4097},  {128, 7, 1025}, {64, 3, 9000},  {8, 1, 40000},
      {128, 1, 9001}, {1, 64, 8193},  {64, 33, 700},  {128, 3, 3333}, {16, 6, 16385}};
  std::vector<CaseSpec> cases;
  for (int32_t i = 0; i < std::min(count, 20); ++i) {
    CaseSpec spec = SampleCase(options, 1000000 + static_cast<uint64_t>(i));
    spec.geometry = options.full;
    spec.geometry.num_heads = kShapes[i][0];
    spec.softmax_scale = 0.135234f;
    RequestSpec r;
    r.num_heads = kShapes[i][0];
    r.q_rows = kShapes[i][1];
    r.cached_rows = kShapes[i][2];
    r.page_size = options.page_sizes[static_cast<size_t>(i) % options.page_sizes.size()];
    spec.requests = {r};
    spec.units = options.units[static_cast<size_t>(i / 2) % options.units.size()];
    cases.push_back(spec);
  }
  return cases;
}

std::vector<CaseSpec> WideCases(const SamplerOptions& options, int32_t first, int32_t count,
                                DType latent_q) {
  constexpr InputKind kKinds[] = {InputKind::kUnit, InputKind::kLarge, InputKind::kDominantLatent,
                                  InputKind::kTrueCancellation};
  constexpr int32_t kOneKey = 13;  // of 32, in the expanded form: outputs are values as they are
  std::vector<CaseSpec> cases;
  for (int32_t i = first; i < first + count; ++i) {
    CaseSpec spec = SampleCase(options, 4000000 + static_cast<uint64_t>(i));
    spec.inputs = kKinds[i % 4];
    spec.route = i / 4 % 4 == 3 && options.expanded ? Route::kExpanded : Route::kAbsorbProject;
    if (i % 32 == kOneKey) {
      spec.requests.resize(1);
      spec.requests.front().q_rows = 1;
      spec.requests.front().cached_rows = 0;
    }
    // Dtype that clients send, the same for all, so that the bf16 form has the same inputs.
    spec.q_dtype = DType::kBf16;
    spec.latent_q_dtype = latent_q;
    cases.push_back(spec);
  }
  return cases;
}

std::vector<CaseSpec> SpreadCases(const SamplerOptions& options, int32_t first, int32_t count,
                                  int32_t most_keys) {
  constexpr int32_t kShapes[][3] = {// heads, q rows, cached rows
                                    {128, 1, 700}, {20, 6, 1000}, {64, 2, 65},   {16, 7, 300},
                                    {8, 3, 4097},  {64, 3, 129},  {128, 2, 513}, {24, 1, 2000}};
  constexpr int32_t kLongHeads[] = {20, 64, 17}, kStored = 2048, kLong[] = {1 << 16, 1 << 20};
  constexpr float kDeviations[] = {1.0f, 2.0f, 4.0f, 1.0f, 3.0f};
  std::vector<CaseSpec> cases;
  for (int32_t i = first; i < first + count; ++i) {
    CaseSpec spec = SampleCase(options, 8000000 + static_cast<uint64_t>(i));
    spec.geometry = options.full;
    spec.route = Route::kAbsorbed;
    spec.inputs = InputKind::kSpread;
    spec.q_dtype = spec.latent_q_dtype = DType::kBf16;
    spec.softmax_scale = 0.135234f;
    spec.logit_deviation = kDeviations[i % 5];
    spec.rounds_queries = i % 3 == 2;
    for (float& scale : spec.kv_scales) scale = 0.0011f;  // rows fill the range
    spec.kv_format = options.kv_formats[static_cast<size_t>(i + i / 4) % options.kv_formats.size()];
    RequestSpec r;
    r.page_size = i % 2 == 0 ? 64 : 16;
    r.layer = i % 2;
    if (i % 4 == 3) {
      const int32_t keys = std::min(kLong[i / 4 % 2], most_keys), stored = std::min(keys, kStored);
      r.num_heads = kLongHeads[i / 4 % 3];
      r.q_rows = 1;
      r.cached_rows = stored - 1;
      r.repeats = keys / stored;
      spec.logit_deviation = 1.0f;
      spec.rounds_queries = false;
    } else {
      r.num_heads = kShapes[i % 8][0];
      r.q_rows = kShapes[i % 8][1];
      r.cached_rows = kShapes[i % 8][2];
    }
    spec.geometry.num_heads = r.num_heads;
    spec.requests = {r};
    if (r.repeats == 1) {
      r.cached_rows = 64 + i % 7;
      spec.requests.push_back(r);
    }
    cases.push_back(spec);
  }
  return cases;
}

std::vector<CaseSpec> SinkCases(const SamplerOptions& options) {
  constexpr int32_t kKeys = 16384;
  return {AbsorbedCase(options, InputKind::kSink, 20, 2, kKeys),
          AbsorbedCase(options, InputKind::kSink, 128, 1, kKeys)};
}

std::vector<CaseSpec> LateCases(const SamplerOptions& options) {
  // More than a block of any kernel. Backends otherwise take a kernel for fewer rows, which
  // multiplies in bf16 or has other code for scales. sm_90 does so for these heads, too, if most of
  // its units would be idle.
  constexpr int32_t kHeads = 129, kFewHeads = 8, kUnits = 8;
  constexpr int32_t kKeys = 96;  // more than a tile
  std::vector<CaseSpec> cases;
  const auto add = [&](CaseSpec spec, int32_t units, bool fp8) {
    spec.units = units;
    if (!fp8 || ComputeInFp8(spec)) cases.push_back(std::move(spec));
  };
  SamplerOptions of_format = options;
  for (const kernels::KvFormat format : options.kv_formats) {
    of_format.kv_formats = {format};
    // In one unit, so that one block meets all keys.
    add(AbsorbedCase(of_format, InputKind::kLastKey, kHeads, 1, kKeys), 1, true);
    if (!kernels::TraitsOf(format).shares_scale) continue;
    const CaseSpec many = AbsorbedCase(of_format, InputKind::kSmallEnd, kHeads, 1, kKeys);
    add(many, kUnits, true);
    add(many, kUnits, false);
    add(AbsorbedCase(of_format, InputKind::kSmallEnd, kFewHeads, 1, kKeys), kUnits, false);
  }
  return cases;
}

std::vector<CaseSpec> EdgeCases(const SamplerOptions& options, int32_t first, int32_t count) {
  // Chosen in turn. The lengths have no common divisor, so that all pairs occur in the long run.
  const std::vector<int32_t> heads = {1, 2, 3, 16, 17, 32, 64, 65, 96, 127, 128};
  const std::vector<int32_t> packed_rows = {1,   15,  16,  17,  63,  64, 65,
                                            127, 128, 129, 192, 193, 260};
  const std::vector<int32_t> kv_rows = {1,  2,  31, 32,  33,  63,  64,  65, 95,
                                        96, 97, 98, 127, 128, 129, 160, 257};
  const std::vector<int32_t> page_sizes = {1, 2, 3, 7, 16, 64, 128};
  const std::vector<int32_t> prefill_rows = {129, 130, 160, 191, 255, 257};
  constexpr Route kRoutes[] = {Route::kAbsorbed, Route::kAbsorbProject, Route::kAbsorbed,
                               Route::kExpanded, Route::kAbsorbed};
  const auto pick = [](const auto& from, int32_t i) {
    return from[static_cast<size_t>(i) % from.size()];
  };
  std::vector<CaseSpec> cases;
  for (int32_t i = first; i < first + count; ++i) {
    CaseSpec spec = SampleCase(options, 3000000 + static_cast<uint64_t>(i));
    spec.geometry = options.full;
    spec.route = kRoutes[i % 5];
    spec.q_dtype = spec.latent_q_dtype = DType::kBf16;
    spec.softmax_scale = 0.135234f;
    RequestSpec r;
    r.page_size = pick(page_sizes, i);
    r.causal = i % 9 != 8;
    r.layer = i % 2;
    if (spec.route == Route::kExpanded) {
      r.num_heads = 1 + i / 5 % 3;
      r.q_rows = pick(prefill_rows, i);
      r.cached_rows = pick(kv_rows, i) - 1;
    } else {
      const int32_t packed = pick(packed_rows, i);
      r.num_heads = pick(heads, i);
      r.q_rows = std::max(1, packed / r.num_heads);
      r.cached_rows = std::max(0, pick(kv_rows, i) - r.q_rows);
    }
    spec.geometry.num_heads = r.num_heads;
    spec.requests = {r};
    RequestSpec beside = r;
    beside.q_rows = 0;
    spec.requests.push_back(beside);
    beside.q_rows = 1 + i % 4;
    beside.cached_rows = pick(kv_rows, i / 2);
    if (spec.route == Route::kAbsorbed || r.num_heads < 4) spec.requests.push_back(beside);
    cases.push_back(spec);
  }
  return cases;
}

std::vector<CaseSpec> PrefillCases(const SamplerOptions& options, int32_t count) {
  constexpr int32_t kShapes[16][3] = {// heads, q rows, cached rows
                                      {2, 300, 0},    {1, 700, 129},  {3, 257, 1000}, {1, 1500, 3},
                                      {4, 128, 2048}, {8, 129, 64},   {1, 1024, 0},   {2, 640, 63},
                                      {16, 130, 1},   {1, 255, 5000}, {5, 200, 127},  {1, 2000, 0},
                                      {12, 150, 40},  {2, 513, 513},  {1, 384, 128},  {24, 129, 0}};
  std::vector<CaseSpec> cases;
  for (int32_t i = 0; i < std::min(count, 16); ++i) {
    CaseSpec spec = SampleCase(options, 2000000 + static_cast<uint64_t>(i));
    spec.geometry = options.full;
    spec.geometry.num_heads = kShapes[i][0];
    spec.route = Route::kExpanded;
    spec.q_dtype = DType::kBf16;
    spec.softmax_scale = 0.135234f;
    RequestSpec r;
    r.num_heads = kShapes[i][0];
    r.q_rows = kShapes[i][1];
    r.cached_rows = kShapes[i][2];
    r.page_size = options.page_sizes[static_cast<size_t>(i) % options.page_sizes.size()];
    r.causal = i % 5 != 4;
    spec.requests = {r};
    RequestSpec small = r;  // a decode request next to it, and an empty one
    small.q_rows = 1 + i % 3;
    small.cached_rows = 77 * i;
    spec.requests.push_back(small);
    small.q_rows = 0;
    spec.requests.push_back(small);
    cases.push_back(spec);
  }
  return cases;
}

}  // namespace mla::conformance
