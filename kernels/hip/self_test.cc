#include "kernels/hip/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace mla::gpu {
namespace {

using kernels::AttentionBackend;
using kernels::Bf16;
using kernels::DType;
using kernels::Geometry;
using kernels::ToBf16;
using kernels::ToFloat;

constexpr Geometry kGeometry{4, 512, 64, 128, 128};
constexpr int32_t kHeads = 4;
constexpr int32_t kRows = 150;  // two cached pages and a half
// Query rows of each launch. With all heads they make a tile for one block of the smallest of the
// attention kernels, and one that takes the largest where all units are busy (ChooseAttend).
constexpr int32_t kQueries[] = {2, 20};
constexpr int32_t kMostQueries = 20;
constexpr int32_t kMostUnits = 1024;  // that get work
constexpr int32_t kPage = 64;
constexpr int32_t kRowDim = 576;
constexpr int32_t kQDim = 192;
constexpr int32_t kODim = 128;
constexpr float kScale = 0.07f;
constexpr int64_t kRowBytes = kRowDim * sizeof(Bf16);
constexpr uint32_t kPages[] = {2 * 288, 0, 288};  // granules; a page is 288 of them
constexpr int32_t kCut = 96;                      // where the plan splits the tile
// Latent outputs that bf16 does not tell from (1, -1). W_UV of +-0.5 makes the difference up to
// 2^-11, many times what sums in fp32 may be off.
constexpr float kNarrow[] = {1.0f + 0x1p-10f, -1.0f};
constexpr double kNarrowOff = 2e-5;

// Small values without structure, the same on every machine.
std::vector<Bf16> Pattern(size_t count, uint32_t seed) {
  std::vector<Bf16> v(count);
  uint32_t state = seed;
  for (Bf16& x : v) {
    state = state * 1664525u + 1013904223u;
    x = ToBf16((static_cast<float>(state >> 8) / 8388608.0f - 1.0f) * 0.5f);
  }
  return v;
}

struct Data {
  explicit Data(int32_t rows)
      : queries(rows), o(size_t(rows) * kHeads * kODim, NAN), lse(size_t(rows) * kHeads, NAN) {
    std::copy(std::begin(kNarrow), std::end(kNarrow), narrow.begin());
  }

  const int32_t queries;
  std::vector<Bf16> kv = Pattern(size_t{kRows} * kRowDim, 1);
  std::vector<Bf16> q = Pattern(size_t(queries) * kHeads * kQDim, 2);
  std::vector<Bf16> w_uk = Pattern(size_t{kHeads} * 128 * 512, 3);
  std::vector<Bf16> w_uv = Pattern(size_t{kHeads} * 512 * 128, 4);
  std::vector<float> narrow = std::vector<float>(512, 0.0f);
  std::vector<float> narrow_o = std::vector<float>(size_t{kHeads} * kODim, NAN);
  std::vector<float> o, lse;
  // The same by the expanded form.
  std::vector<float> expanded_o = o, expanded_lse = lse;
};

struct Answer {
  std::vector<double> o;
  double lse = 0.0;
};

Answer Expected(const Data& d, int32_t row, int32_t head) {
  std::vector<double> latent(kRowDim, 0.0);
  const Bf16* q = &d.q[(static_cast<size_t>(row) * kHeads + head) * kQDim];
  const Bf16* uk = &d.w_uk[static_cast<size_t>(head) * 128 * 512];
  const Bf16* uv = &d.w_uv[static_cast<size_t>(head) * 512 * 128];
  for (int c = 0; c < 512; ++c) {
    for (int k = 0; k < 128; ++k) latent[c] += double{ToFloat(q[k])} * ToFloat(uk[k * 512 + c]);
    latent[c] = ToFloat(ToBf16(static_cast<float>(latent[c])));
  }
  for (int c = 0; c < 64; ++c) latent[512 + c] = ToFloat(q[128 + c]);
  const int visible = kRows - d.queries + row + 1;
  std::vector<double> weight(visible, 0.0), sum(512, 0.0);
  double total = 0.0;
  for (int j = 0; j < visible; ++j) {
    for (int c = 0; c < kRowDim; ++c) weight[j] += latent[c] * ToFloat(d.kv[j * kRowDim + c]);
    weight[j] = std::exp(weight[j] * kScale);
    total += weight[j];
    for (int c = 0; c < 512; ++c) sum[c] += weight[j] * ToFloat(d.kv[j * kRowDim + c]);
  }
  Answer answer{std::vector<double>(kODim, 0.0), std::log(total)};
  for (int v = 0; v < kODim; ++v) {
    for (int c = 0; c < 512; ++c) answer.o[v] += sum[c] / total * ToFloat(uv[c * kODim + v]);
  }
  return answer;
}

absl::Status CompareRow(const Answer& want, const float* o, float lse, const std::string& where) {
  if (!(std::abs(lse - want.lse) < 2e-3)) {
    return absl::InternalError(absl::StrCat(where, ": lse: got ", lse, ", want ", want.lse));
  }
  for (int v = 0; v < kODim; ++v) {
    if (std::abs(o[v] - want.o[v]) < 0.02) continue;
    return absl::InternalError(
        absl::StrCat(where, ": output column ", v, ": got ", o[v], ", want ", want.o[v]));
  }
  return absl::OkStatus();
}

absl::Status CompareNarrow(const Data& d) {
  for (int32_t head = 0; head < kHeads; ++head) {
    const Bf16* uv = &d.w_uv[static_cast<size_t>(head) * 512 * kODim];
    for (int v = 0; v < kODim; ++v) {
      const double want =
          double{kNarrow[0]} * ToFloat(uv[v]) + double{kNarrow[1]} * ToFloat(uv[kODim + v]);
      const float got = d.narrow_o[static_cast<size_t>(head) * kODim + v];
      if (std::abs(got - want) < kNarrowOff) continue;
      return absl::InternalError(absl::StrCat("fp32 latent outputs, head ", head,
                                              ": output column ", v, ": got ", got, ", want ",
                                              want));
    }
  }
  return absl::OkStatus();
}

absl::Status Compare(const Data& d) {
  for (int32_t row = 0; row < d.queries; ++row) {
    for (int32_t head = 0; head < kHeads; ++head) {
      const Answer want = Expected(d, row, head);
      const size_t at = static_cast<size_t>(row) * kHeads + head;
      const std::string where =
          absl::StrCat(" form, row ", row, " of ", d.queries, ", head ", head);
      absl::Status s = CompareRow(want, &d.o[at * kODim], d.lse[at], "absorbed" + where);
      if (s.ok()) {
        s = CompareRow(want, &d.expanded_o[at * kODim], d.expanded_lse[at], "expanded" + where);
      }
      if (!s.ok()) return s;
    }
  }
  return CompareNarrow(d);
}

// The plan: one tile cut in two, so that partial tiles and their merge are exercised. Further units
// do the same again, and write the same.
struct Plan {
  std::vector<int32_t> work_indptr{0};
  std::vector<kernels::WorkInfo> work_info;
  std::vector<int32_t> reduce_indptr{0, 2};
  std::vector<kernels::ReduceTile> reduce_final_map;
  std::vector<int32_t> reduce_partial_map;

  Plan(int32_t queries, int32_t units) : reduce_partial_map{0, queries * kHeads} {
    const uint32_t heads = kernels::PackHeads(0, kHeads);
    do {
      work_info.push_back({0, 0, 0, queries, 0, kCut, kRows - kCut, heads});
      work_indptr.push_back(static_cast<int32_t>(work_info.size()));
      work_info.push_back({0, queries * kHeads, 0, queries, kCut, kRows, 0, heads});
      work_indptr.push_back(static_cast<int32_t>(work_info.size()));
    } while (static_cast<int32_t>(work_info.size()) + 2 <= units);
    reduce_final_map = {{0, 0, queries, heads}};
  }
  kernels::PlanView View() const {
    return {work_indptr,
            work_info,
            reduce_indptr,
            reduce_final_map,
            reduce_partial_map,
            2 * reduce_partial_map[1],
            1};
  }
};

// The expanded form's: a tile a head, whole.
struct ExpandedFormPlan {
  std::vector<int32_t> work_indptr{0, kHeads / 2, kHeads};
  std::vector<kernels::WorkInfo> work_info;
  std::vector<int32_t> reduce_indptr{0};

  explicit ExpandedFormPlan(int32_t queries) {
    for (int32_t head = 0; head < kHeads; ++head) {
      work_info.push_back(
          {0, kernels::kUnsplit, 0, queries, 0, kRows, 0, kernels::PackHeads(head, head + 1)});
    }
  }
  kernels::PlanView View() const { return {work_indptr, work_info, reduce_indptr, {}, {}, 0, 2}; }
};

// Addresses of one launch in the backend's memory.
struct Staged {
  const void *kv, *q, *narrow;
  void *absorbed, *latent, *o, *lse, *expanded_o, *expanded_lse, *narrow_o;
};

absl::StatusOr<Staged> Stage(AttentionBackend& backend, Data& d) {
  const size_t packed = size_t(d.queries) * kHeads;
  auto kv = backend.StageInput(0, d.kv.data(), d.kv.size() * sizeof(Bf16));
  auto q = backend.StageInput(0, d.q.data(), d.q.size() * sizeof(Bf16));
  auto narrow = backend.StageInput(0, d.narrow.data(), d.narrow.size() * sizeof(float));
  auto o = backend.StageOutput(0, d.o.data(), d.o.size() * sizeof(float));
  auto lse = backend.StageOutput(0, d.lse.data(), d.lse.size() * sizeof(float));
  auto expanded_o =
      backend.StageOutput(0, d.expanded_o.data(), d.expanded_o.size() * sizeof(float));
  auto expanded_lse =
      backend.StageOutput(0, d.expanded_lse.data(), d.expanded_lse.size() * sizeof(float));
  auto narrow_o = backend.StageOutput(0, d.narrow_o.data(), d.narrow_o.size() * sizeof(float));
  auto absorbed = backend.SlotWorkspace(0, packed * kRowDim * sizeof(Bf16));
  auto latent = backend.SlotWorkspace(0, packed * 512 * sizeof(float));
  for (const absl::Status& status : {kv.status(), q.status(), o.status(), lse.status(),
                                     expanded_o.status(), expanded_lse.status(), absorbed.status(),
                                     latent.status(), narrow.status(), narrow_o.status()}) {
    if (!status.ok()) return status;
  }
  return Staged{*kv, *q,   *narrow,     *absorbed,     *latent,
                *o,  *lse, *expanded_o, *expanded_lse, *narrow_o};
}

kernels::RequestRecord Request(const Staged& s, int32_t queries) {
  kernels::RequestRecord r = {};
  r.q = s.absorbed;
  r.o = s.latent;
  r.lse = static_cast<float*>(s.lse);
  r.q_row_stride = kHeads * kRowDim;
  r.q_head_stride = kRowDim;
  r.o_row_stride = kHeads * 512;
  r.o_head_stride = 512;
  r.lse_row_stride = kHeads;
  r.lse_head_stride = 1;
  r.row_stride = kRowBytes;
  r.page_size = kPage;
  r.q_rows = queries;
  r.kv_rows = kRows;
  r.num_heads = kHeads;
  r.softmax_scale = kScale;
  r.causal = 1;
  return r;
}

kernels::RequestRecord ExpandedFormRequest(const Staged& s, int32_t queries) {
  kernels::RequestRecord r = Request(s, queries);
  r.q = s.q;
  r.o = s.expanded_o;
  r.lse = static_cast<float*>(s.expanded_lse);
  r.q_row_stride = kHeads * kQDim;
  r.q_head_stride = kQDim;
  r.o_row_stride = kHeads * kODim;
  r.o_head_stride = kODim;
  return r;
}

absl::Status Launch(AttentionBackend& backend, Data& d) {
  if (absl::Status s = backend.BeginLaunch(0); !s.ok()) return s;
  absl::StatusOr<Staged> staged = Stage(backend, d);
  if (!staged.ok()) return staged.status();
  std::memcpy(backend.PageTables().data(), kPages, sizeof(kPages));
  const kernels::TableRange table{0, 3};
  const kernels::AppendRecord append{staged->kv, DType::kBf16, kRowDim, 0,     0,
                                     kRowBytes,  kPage,        0,       kRows, kRowDim};
  const kernels::ProjectionRecord absorb{
      staged->q, staged->absorbed, kHeads * kQDim, kQDim, kHeads * kRowDim,
      kRowDim,   d.queries,        kHeads,         0,     0};
  const kernels::ProjectionRecord project[] = {
      {staged->latent, staged->o, kHeads * 512, 512, kHeads * kODim, kODim, d.queries, kHeads, 0,
       0},
      {staged->narrow, staged->narrow_o, 512, 0, kHeads * kODim, kODim, 1, kHeads, 0, 0}};
  const kernels::RequestRecord request = Request(*staged, d.queries);
  const Plan plan(d.queries,
                  d.queries == kMostQueries ? std::min(backend.Info().units, kMostUnits) : 2);
  kernels::AttentionParams params;
  params.desc.geometry = kGeometry;
  params.desc.o_dtype = DType::kF32;
  params.requests = {&request, 1};
  params.page_tables = backend.PageTables().data();
  params.plan = plan.View();
  const kernels::RequestRecord expanded_request = ExpandedFormRequest(*staged, d.queries);
  const ExpandedFormPlan expanded_plan(d.queries);
  kernels::AttentionParams expanded = params;
  expanded.desc.form = kernels::AttentionForm::kExpanded;
  expanded.requests = {&expanded_request, 1};
  expanded.plan = expanded_plan.View();
  absl::Status s = backend.PublishPageTable(0, {&table, 1});
  if (s.ok()) s = backend.AppendKv(0, {&append, 1});
  if (s.ok()) s = backend.Absorb(0, kGeometry, DType::kBf16, DType::kBf16, {&absorb, 1});
  if (s.ok()) s = backend.Run(0, params);
  if (s.ok()) s = backend.Combine(0, params);
  if (s.ok()) s = backend.Project(0, kGeometry, DType::kF32, DType::kF32, project);
  if (s.ok()) s = backend.Run(0, expanded);
  if (s.ok()) s = backend.Combine(0, expanded);
  if (s.ok()) s = backend.Submit(0);
  if (!s.ok()) return s;
  return backend.Wait(0).status();
}

}  // namespace

kernels::BackendLimits SelfTestLimits() {
  kernels::BackendLimits l;
  l.kv_pool_bytes = 3 * kPage * kRowBytes;
  l.page_table_entries = 3;
  l.weights_bytes = int64_t{kHeads} * 512 * 256 * sizeof(Bf16);
  l.weights_slots = 1;
  l.launch_slots = 1;
  l.launch_requests = 1;
  l.launch_rows = kMostQueries;
  l.launch_packed_rows = kMostQueries * kHeads;
  l.partial_rows = 2 * kMostQueries * kHeads;
  l.max_o_dim = 512;
  l.staging_in_bytes = int64_t{1} << 20;
  l.staging_out_bytes = int64_t{1} << 20;
  l.slot_workspace_bytes = int64_t{1} << 20;
  l.work_items = kMostUnits;
  l.reduce_tiles = 1;
  l.reduce_partials = 2;
  l.max_geometry = kGeometry;
  return l;
}

absl::Status SelfTest(AttentionBackend& backend) {
  absl::Status s;
  for (const int32_t queries : kQueries) {
    Data data(queries);
    if (queries == kQueries[0]) {
      s = backend.LoadWeights(0, kGeometry, 0, kHeads, data.w_uk.data(), data.w_uv.data());
    }
    if (s.ok()) s = Launch(backend, data);
    if (s.ok()) s = Compare(data);
    if (!s.ok()) return s;
  }
  return s;
}

}  // namespace mla::gpu
