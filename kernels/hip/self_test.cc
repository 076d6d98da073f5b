#include "kernels/hip/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/hip/common/expanded_args.h"

namespace mla::gpu {
namespace {

using kernels::AttentionBackend;
using kernels::Bf16;
using kernels::DType;
using kernels::Geometry;
using kernels::RequestRecord;
using kernels::ToBf16;
using kernels::ToFloat;

constexpr Geometry kGeometry{4, 512, 64, 128, 128};
constexpr int32_t kHeads = 4;
constexpr int32_t kRowDim = 576;
constexpr int32_t kQDim = 192;
constexpr int32_t kODim = 128;
constexpr float kScale = 0.135f;
constexpr int64_t kRowBytes = kRowDim * sizeof(Bf16);
constexpr int32_t kMostUnits = 1024;  // that get work

// One launch: a request whose queries are the last of its rows, one without any key, and short ones
// of the same rows. Each unit gets a piece of the first, the second whole, and a short one.
struct Shape {
  int32_t kv_rows;
  int32_t page_size;
  int32_t cut;       // KV row where the first request's tile is split
  int32_t absorbed;  // query rows in the absorbed form; 0: none
  int32_t expanded;  // and in the expanded form
  bool all_units;    // as many units have work as the device has, else two
  bool nan_row;      // the last KV row holds a NaN
};
// Small ones first: what is wrong with a kernel shows there already, as a rule. Two query rows make
// a tile for one block of the smallest of the attention kernels, twenty one that takes the largest
// where all units are busy (ChooseAttend). The others are for the turns of loops: at least 12 tiles
// of 64 KV rows in every piece, pages of three rows, more query rows than a tile.
constexpr Shape kShapes[] = {{150, 64, 96, 2, 2, false, false},
                             {150, 64, 96, 20, 20, true, false},
                             {1600, 3, 800, 2, 0, false, true},
                             {1600, 3, 800, 20, 0, true, true},
                             {850, 3, 0, 0, 130, true, true}};
constexpr int32_t kMostRows = 1600;
constexpr int32_t kMostQueries = 130;
constexpr int32_t kMostAbsorbed = 20;
constexpr int32_t kShortRows = 7;  // KV rows of a short request
constexpr int32_t kMostPages = (kMostRows + 2) / 3;
constexpr int64_t kPoolBytes = int64_t{kMostPages} * 14 * kernels::kPageGranuleBytes;

// As in conformance: of the largest value, of the wanted output, of all outputs, of a log-sum-exp.
constexpr double kOfValue = 2e-3, kOfOutput = 0.016, kCosine = 1e-5, kLse = 1e-3;
// Latent outputs that bf16 does not tell from (1, -1). W_UV of up to 0.2 makes the difference up to
// 2^-12, many times what sums in fp32 may be off.
constexpr float kNarrow[] = {1.0f + 0x1p-10f, -1.0f};
constexpr double kNarrowOff = 1e-5;

// Small values without structure, the same on every machine.
std::vector<Bf16> Pattern(size_t count, uint32_t seed) {
  std::vector<Bf16> v(count);
  uint32_t state = seed;
  for (Bf16& x : v) {
    state = state * 1664525u + 1013904223u;
    x = ToBf16((static_cast<float>(state >> 8) / 8388608.0f - 1.0f) * 0.2f);
  }
  return v;
}

std::vector<float> Floats(const std::vector<Bf16>& from) {
  std::vector<float> to(from.size());
  std::transform(from.begin(), from.end(), to.begin(), ToFloat);
  return to;
}

// sum of a[i] * b[i], in lanes that the compiler can make a vector.
float Dot(const float* a, const float* b, int32_t count) {
  constexpr int32_t kLanes = 16;
  float lanes[kLanes] = {};
  for (int32_t i = 0; i < count; i += kLanes) {
    for (int32_t k = 0; k < kLanes; ++k) lanes[k] += a[i + k] * b[i + k];
  }
  double sum = 0.0;
  for (const float lane : lanes) sum += lane;
  return static_cast<float>(sum);
}

struct Weights {
  std::vector<Bf16> uk = Pattern(size_t{kHeads} * 128 * 512, 3);
  std::vector<Bf16> uv = Pattern(size_t{kHeads} * 512 * 128, 4);
  std::vector<float> uk_floats = Floats(uk), uv_floats = Floats(uv);
};

struct Data {
  explicit Data(const Shape& s)
      : shape(s),
        queries(std::max(s.absorbed, s.expanded)),
        rows(queries + 2),
        o(size_t(rows) * kHeads * kODim, 0.5f),
        lse(size_t(rows) * kHeads, 0.5f) {
    if (s.nan_row) kv[size_t(s.kv_rows - 1) * kRowDim + 5] = 0x7fc0;
    kv_floats = Floats(kv);
    std::copy(std::begin(kNarrow), std::end(kNarrow), narrow.begin());
  }

  const Shape shape;
  const int32_t queries;  // of the first request
  const int32_t rows;     // of q: those, then one of the empty and one of the short requests
  std::vector<Bf16> kv = Pattern(size_t(shape.kv_rows) * kRowDim, 1);
  std::vector<Bf16> q = Pattern(size_t(rows) * kHeads * kQDim, 2);
  std::vector<float> kv_floats;
  std::vector<float> narrow = std::vector<float>(512, 0.0f);
  std::vector<float> narrow_o = std::vector<float>(size_t{kHeads} * kODim, NAN);
  std::vector<float> o, lse;
  // The same by the expanded form.
  std::vector<float> expanded_o = o, expanded_lse = lse;

  // KV rows that row `row` of q sees.
  int32_t Visible(int32_t row) const {
    if (row < queries) return shape.kv_rows - queries + row + 1;
    return row == queries ? 0 : kShortRows;
  }
};

struct Answer {
  std::vector<double> o = std::vector<double>(kODim, 0.0);
  double lse = -INFINITY;
};

// `rounded`: absorbed queries are bf16.
Answer Expected(const Data& d, const Weights& w, int32_t row, int32_t head, bool rounded) {
  std::vector<float> latent(kRowDim, 0.0f);
  const Bf16* q = &d.q[(static_cast<size_t>(row) * kHeads + head) * kQDim];
  const float* uk = &w.uk_floats[static_cast<size_t>(head) * 128 * 512];
  const float* uv = &w.uv_floats[static_cast<size_t>(head) * 512 * 128];
  for (int k = 0; k < 128; ++k) {
    for (int c = 0; c < 512; ++c) latent[c] += ToFloat(q[k]) * uk[k * 512 + c];
  }
  for (int c = 0; c < 512 && rounded; ++c) latent[c] = ToFloat(ToBf16(latent[c]));
  for (int c = 0; c < 64; ++c) latent[512 + c] = ToFloat(q[128 + c]);
  Answer answer;
  const int32_t visible = d.Visible(row);
  if (visible == 0) return answer;
  std::vector<float> sum(512, 0.0f);
  double total = 0.0;
  for (int32_t j = 0; j < visible; ++j) {
    const float* kv = &d.kv_floats[static_cast<size_t>(j) * kRowDim];
    const auto weight = static_cast<float>(std::exp(Dot(latent.data(), kv, kRowDim) * kScale));
    total += weight;
    for (int c = 0; c < 512; ++c) sum[c] += weight * kv[c];
  }
  answer.lse = std::log(total);
  for (int c = 0; c < 512; ++c) {
    for (int v = 0; v < kODim; ++v) answer.o[v] += sum[c] / total * uv[c * kODim + v];
  }
  return answer;
}

// Blocks that items are dealt to, in either form.
int32_t UnitsOf(const AttentionBackend& backend, bool expanded) {
  kernels::AttentionDesc desc;
  desc.geometry = kGeometry;
  if (expanded) desc.form = kernels::AttentionForm::kExpanded;
  return std::min(backend.Traits(desc).units, kMostUnits);
}

// Of which each unit gets three, at least, where all of them are to have work.
int32_t ShortRequests(const AttentionBackend& backend) {
  return 3 * UnitsOf(backend, true) / kHeads + 1;
}

// The largest up-projected value of the first rows, which is below that of all.
double LargestValue(const Data& d, const Weights& w) {
  double largest = 0.0;
  for (int32_t row = 0; row < 4; ++row) {
    std::vector<float> value(kODim, 0.0f);
    for (int c = 0; c < 512; ++c) {
      const float x = d.kv_floats[static_cast<size_t>(row) * kRowDim + c];
      for (int v = 0; v < kODim; ++v) value[v] += x * w.uv_floats[c * kODim + v];
    }
    for (const float x : value) largest = std::max(largest, std::abs(double{x}));
  }
  return largest;
}

bool Near(double got, double want, double off) {
  if (std::isnan(want)) return std::isnan(got);
  return got == want || std::abs(got - want) <= off;
}

absl::Status Wrong(const std::string& where, double got, double want) {
  return absl::InternalError(absl::StrCat(where, ": got ", got, ", want ", want));
}

// Every row of the outputs, with one head each, and the first row with all.
absl::Status CompareForm(const Data& d, const Weights& w, bool expanded) {
  const std::vector<float>& o = expanded ? d.expanded_o : d.o;
  const std::vector<float>& lse = expanded ? d.expanded_lse : d.lse;
  const double of_value = kOfValue * LargestValue(d, w);
  double errors = 0.0, norms = 0.0;
  const std::string form =
      absl::StrCat(expanded ? "expanded" : "absorbed", " form, ", d.shape.kv_rows, " keys, row ");
  for (int32_t row = 0; row < d.rows; ++row) {
    for (int32_t head = 0; head < kHeads; ++head) {
      if (d.queries > 2 && row > 0 && row % kHeads != head) continue;
      const Answer want = Expected(d, w, row, head, !expanded);
      const size_t at = static_cast<size_t>(row) * kHeads + head;
      const std::string where = absl::StrCat(form, row, " of ", d.rows, ", head ", head);
      if (!Near(lse[at], want.lse, kLse)) return Wrong(where + ": lse", lse[at], want.lse);
      for (int v = 0; v < kODim; ++v) {
        const double got = o[at * kODim + v];
        const double off = std::max(of_value, kOfOutput * std::abs(want.o[v]));
        if (!Near(got, want.o[v], off)) {
          return Wrong(absl::StrCat(where, ": output column ", v), got, want.o[v]);
        }
        if (std::isnan(got)) continue;
        errors += (got - want.o[v]) * (got - want.o[v]);
        norms += got * got + want.o[v] * want.o[v];
      }
    }
  }
  if (errors <= kCosine * norms) return absl::OkStatus();
  return Wrong(absl::StrCat(expanded ? "expanded" : "absorbed", " form, ", d.shape.kv_rows,
                            " keys: cosine difference of all outputs"),
               errors / norms, 0.0);
}

absl::Status CompareNarrow(const Data& d, const Weights& w) {
  for (int32_t head = 0; head < kHeads; ++head) {
    const float* uv = &w.uv_floats[static_cast<size_t>(head) * 512 * kODim];
    for (int v = 0; v < kODim; ++v) {
      const double want = double{kNarrow[0]} * uv[v] + double{kNarrow[1]} * uv[kODim + v];
      const float got = d.narrow_o[static_cast<size_t>(head) * kODim + v];
      if (std::abs(got - want) < kNarrowOff) continue;
      return Wrong(absl::StrCat("fp32 latent outputs, head ", head, ": output column ", v), got,
                   want);
    }
  }
  return absl::OkStatus();
}

// Records and plans, in either form: request 0, the empty one, and `shorts` short ones, which are
// all the same and write the same.
struct Work {
  std::vector<RequestRecord> requests;
  std::vector<int32_t> work_indptr{0}, reduce_indptr{0}, reduce_partial_map;
  std::vector<kernels::WorkInfo> work_info;
  std::vector<kernels::ReduceTile> reduce_final_map;
  int32_t partial_rows = 0;
  uint64_t generation = 0;

  void Add(int32_t request, int32_t partial, int32_t q_begin, int32_t q_end, int32_t kv_begin,
           int32_t kv_end, uint32_t heads) {
    work_info.push_back({request, partial, q_begin, q_end, kv_begin, kv_end,
                         requests[request].kv_rows - kv_end, heads});
  }
  void EndUnit() { work_indptr.push_back(static_cast<int32_t>(work_info.size())); }
  kernels::PlanView View() const {
    return {work_indptr,        work_info,    reduce_indptr, reduce_final_map,
            reduce_partial_map, partial_rows, generation};
  }
};

// The tile of request 0 cut in two, so that partial tiles and their merge are exercised. Further
// units do the same again, and write the same.
void PlanAbsorbed(const Shape& shape, int32_t units, Work& work) {
  const uint32_t all = kernels::PackHeads(0, kHeads);
  const int32_t tile = shape.absorbed * kHeads;
  do {
    for (const bool second : {false, true}) {
      work.Add(0, second ? tile : 0, 0, shape.absorbed, second ? shape.cut : 0,
               second ? shape.kv_rows : shape.cut, all);
      work.Add(1, kernels::kUnsplit, 0, 1, 0, 0, all);
      work.Add(2, kernels::kUnsplit, 0, 1, 0, kShortRows, all);
      work.EndUnit();
    }
  } while (static_cast<int32_t>(work.work_indptr.size()) + 1 <= units);
  work.reduce_indptr.push_back(2);
  work.reduce_partial_map = {0, tile};
  work.reduce_final_map = {{0, 0, shape.absorbed, all}};
  work.partial_rows = 2 * tile;
  work.generation = 1;
}

// A tile a head and 128 query rows, whole; the backend deals them to its units.
void PlanExpanded(const Shape& shape, Work& work) {
  constexpr int32_t kTile = kExpandedRows;
  for (int32_t head = 0; head < kHeads; ++head) {
    const uint32_t one = kernels::PackHeads(head, head + 1);
    for (int32_t q = 0; q < shape.expanded; q += kTile) {
      const int32_t end = std::min(shape.expanded, q + kTile);
      work.Add(0, kernels::kUnsplit, q, end, 0, shape.kv_rows - shape.expanded + end, one);
    }
    for (size_t i = 1; i < work.requests.size(); ++i) {
      work.Add(static_cast<int32_t>(i), kernels::kUnsplit, 0, 1, 0, work.requests[i].kv_rows, one);
    }
    work.EndUnit();
  }
  work.generation = 2;
}

// Addresses of one launch in the backend's memory.
struct Staged {
  const void *kv, *q, *narrow;
  void *absorbed, *latent, *o, *lse, *expanded_o, *expanded_lse, *narrow_o;
};

absl::StatusOr<Staged> Stage(AttentionBackend& backend, Data& d) {
  const size_t packed = size_t(std::min(d.rows, kMostAbsorbed + 2)) * kHeads;
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

std::vector<RequestRecord> Requests(const Data& d, const Staged& s, bool expanded, size_t shorts) {
  const int32_t q_dim = expanded ? kQDim : kRowDim, o_dim = expanded ? kODim : 512;
  RequestRecord r = {};
  r.q_row_stride = kHeads * q_dim;
  r.q_head_stride = q_dim;
  r.o_row_stride = kHeads * o_dim;
  r.o_head_stride = o_dim;
  r.lse_row_stride = kHeads;
  r.lse_head_stride = 1;
  r.row_stride = kRowBytes;
  r.page_size = d.shape.page_size;
  r.num_heads = kHeads;
  r.softmax_scale = kScale;
  r.causal = 1;
  std::vector<RequestRecord> requests;
  for (size_t i = 0; i < 2 + shorts; ++i) {
    const int64_t row = i == 0 ? 0 : d.queries + (i == 1 ? 0 : 1);
    r.q = static_cast<const Bf16*>(expanded ? s.q : s.absorbed) + row * r.q_row_stride;
    r.o = static_cast<float*>(expanded ? s.expanded_o : s.latent) + row * r.o_row_stride;
    r.lse = static_cast<float*>(expanded ? s.expanded_lse : s.lse) + row * kHeads;
    r.q_rows = i == 0 ? d.queries : 1;
    r.kv_rows = i == 0 ? d.shape.kv_rows : i == 1 ? 0 : kShortRows;
    requests.push_back(r);
  }
  return requests;
}

absl::Status RunForm(AttentionBackend& backend, const Work& work, bool expanded) {
  kernels::AttentionParams params;
  params.desc.geometry = kGeometry;
  params.desc.o_dtype = DType::kF32;
  if (expanded) params.desc.form = kernels::AttentionForm::kExpanded;
  params.requests = work.requests;
  params.page_tables = backend.PageTables().data();
  params.plan = work.View();
  absl::Status s = backend.Run(0, params);
  return s.ok() ? backend.Combine(0, params) : s;
}

absl::Status RunAbsorbed(AttentionBackend& backend, const Data& d, const Staged& staged,
                         Work& work) {
  const kernels::ProjectionRecord absorb{
      staged.q, staged.absorbed, kHeads * kQDim, kQDim, kHeads * kRowDim,
      kRowDim,  d.rows,          kHeads,         0,     0};
  const kernels::ProjectionRecord project[] = {
      {staged.latent, staged.o, kHeads * 512, 512, kHeads * kODim, kODim, d.rows, kHeads, 0, 0},
      {staged.narrow, staged.narrow_o, 512, 0, kHeads * kODim, kODim, 1, kHeads, 0, 0}};
  work.requests = Requests(d, staged, false, 1);
  PlanAbsorbed(d.shape, d.shape.all_units ? UnitsOf(backend, false) : 2, work);
  absl::Status s = backend.Absorb(0, kGeometry, DType::kBf16, DType::kBf16, {&absorb, 1});
  if (s.ok()) s = RunForm(backend, work, false);
  if (s.ok()) s = backend.Project(0, kGeometry, DType::kF32, DType::kF32, project);
  return s;
}

absl::Status Launch(AttentionBackend& backend, Data& d) {
  if (absl::Status s = backend.BeginLaunch(0); !s.ok()) return s;
  absl::StatusOr<Staged> staged = Stage(backend, d);
  if (!staged.ok()) return staged.status();
  // Pages of the sequence in an order of their own, with gaps.
  const int32_t pages = (d.shape.kv_rows + d.shape.page_size - 1) / d.shape.page_size;
  const int64_t granules =
      (d.shape.page_size * kRowBytes + kernels::kPageGranuleBytes - 1) / kernels::kPageGranuleBytes;
  for (int32_t page = 0; page < pages; ++page) {
    const int64_t place = (int64_t{page} * 37 + 1) % pages;
    backend.PageTables()[page] = static_cast<uint32_t>(place * granules);
  }
  const kernels::TableRange table[] = {{0, 1}, {1, pages - 1}};
  const kernels::AppendRecord append{
      staged->kv, DType::kBf16,    kRowDim, 0, 0, kRowBytes, d.shape.page_size,
      0,          d.shape.kv_rows, kRowDim};
  Work absorbed, expanded;
  absl::Status s = backend.PublishPageTable(0, table);
  if (s.ok()) s = backend.AppendKv(0, {&append, 1});
  if (s.ok() && d.shape.absorbed > 0) s = RunAbsorbed(backend, d, *staged, absorbed);
  if (s.ok() && d.shape.expanded > 0) {
    expanded.requests =
        Requests(d, *staged, true, d.shape.all_units ? size_t(ShortRequests(backend)) : 1);
    PlanExpanded(d.shape, expanded);
    s = RunForm(backend, expanded, true);
  }
  if (s.ok()) s = backend.Submit(0);
  return s.ok() ? backend.Wait(0).status() : s;
}

// Page work alone: rows that move, pages that are zeroed, at odd places too. Then the rows are
// compared with what is left of them.
absl::Status CheckPages(AttentionBackend& backend) {
  constexpr int64_t kPage = 14 * kernels::kPageGranuleBytes;
  const std::vector<Bf16> kv = Pattern(size_t{3} * kRowDim, 5);
  int32_t differs[3] = {};
  backend.PageTables()[0] = 0;
  const kernels::TableRange table{0, 1};
  if (absl::Status begun = backend.BeginLaunch(0); !begun.ok()) return begun;
  auto rows = backend.StageInput(0, kv.data(), kv.size() * sizeof(Bf16));
  auto flags = backend.StageOutput(0, differs, sizeof(differs));
  if (!rows.ok() || !flags.ok()) return rows.ok() ? flags.status() : rows.status();
  kernels::AppendRecord record{*rows, DType::kBf16, kRowDim, 0, 0, kRowBytes, 3, 0, 3, kRowDim};
  kernels::AppendRecord compared = record;
  compared.differs = static_cast<int32_t*>(*flags);
  const kernels::PageRange ranges[] = {
      {kPage, 40 * kPage}, {2 * kPage, kPage, 0}, {0, kPage}, {0, 3 * kRowBytes - 2, 2 * kPage}};
  absl::Status s = backend.PublishPageTable(0, {&table, 1});
  if (s.ok()) s = backend.AppendKv(0, {&record, 1});
  if (s.ok()) s = backend.WritePages(0, ranges);
  if (s.ok()) s = backend.AppendKv(0, {&compared, 1});
  if (s.ok()) s = backend.Submit(0);
  if (s.ok()) s = backend.Wait(0).status();
  std::vector<Bf16> got(kv.size());
  if (s.ok()) s = backend.ReadKv(record, got.data());
  if (!s.ok()) return s;
  for (size_t i = 0; i < kv.size(); ++i) {
    const Bf16 want = i + 1 < kv.size() ? kv[i] : Bf16{0};
    if (got[i] != want) return Wrong("page work", ToFloat(got[i]), ToFloat(want));
  }
  // The last element was zeroed: the last row alone differs.
  const int32_t found = differs[0] * 4 + differs[1] * 2 + differs[2];
  return found == 1 ? absl::OkStatus() : Wrong("rows sent again, as bits", found, 1);
}

}  // namespace

kernels::BackendLimits SelfTestLimits(const AttentionBackend& backend) {
  const int32_t requests = 2 + ShortRequests(backend);
  kernels::BackendLimits l;
  l.kv_pool_bytes = kPoolBytes;
  l.page_table_entries = kMostPages;
  l.weights_bytes = int64_t{kHeads} * 512 * 256 * sizeof(Bf16);
  l.weights_slots = 1;
  l.launch_slots = 1;
  l.launch_requests = requests;
  l.launch_rows = kMostQueries + requests;
  l.launch_packed_rows = l.launch_rows * kHeads;
  l.partial_rows = 2 * kMostAbsorbed * kHeads;
  l.max_o_dim = 512;
  l.staging_in_bytes = int64_t{4} << 20;
  l.staging_out_bytes = int64_t{4} << 20;
  l.slot_workspace_bytes = int64_t{1} << 20;
  l.work_items = 3 * kMostUnits + 2 * requests * kHeads;
  l.reduce_tiles = 1;
  l.reduce_partials = 2;
  l.page_ranges = l.table_ranges = 16;
  l.max_geometry = kGeometry;
  return l;
}

absl::Status SelfTest(AttentionBackend& backend) {
  const Weights weights;
  absl::Status s =
      backend.LoadWeights(0, kGeometry, 0, kHeads, weights.uk.data(), weights.uv.data());
  if (s.ok()) s = CheckPages(backend);
  for (const Shape& shape : kShapes) {
    if (!s.ok()) return s;
    Data data(shape);
    s = Launch(backend, data);
    if (s.ok() && shape.absorbed > 0) s = CompareForm(data, weights, false);
    if (s.ok() && shape.absorbed > 0) s = CompareNarrow(data, weights);
    if (s.ok() && shape.expanded > 0) s = CompareForm(data, weights, true);
  }
  return s;
}

}  // namespace mla::gpu
