#include "kernels/hip/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/hip/common/expanded_args.h"
#include "kernels/hip/self_test_data.h"
#include "kernels/launch/launch_layout.h"
#include "kernels/launch/read_rows.h"

namespace mla::kernels::hip {
namespace self_test {
namespace {

using kernels::AttentionBackend;
using kernels::DType;
using kernels::LaunchLayout;
using kernels::SegmentRecord;

// Blocks that items are dealt to, in either form.
int32_t UnitsOf(const AttentionBackend& backend, bool expanded) {
  kernels::AttentionDesc desc;
  desc.geometry = kGeometry;
  if (expanded) desc.form = kernels::AttentionForm::kExpanded;
  return std::min(backend.Traits(desc).units, kMostUnits);
}

// Of which each unit gets three, at least, where all of them are to have work.
int32_t ShortSegments(const AttentionBackend& backend) {
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
  const bool plain = d.format == KvFormat::kBf16;
  const std::string form =
      absl::StrCat(expanded ? "expanded" : "absorbed", " form, ", d.shape.kv_rows, " keys, ",
                   plain ? "" : absl::StrCat(Name(d.format), " rows, "), "row ");
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

// Records and plans, in either form: segment 0, the empty one, and `shorts` short ones, which are
// all the same and write the same.
struct Work {
  std::vector<SegmentRecord> segments;
  std::vector<int32_t> work_indptr{0}, reduce_indptr{0}, reduce_partial_map;
  std::vector<kernels::WorkInfo> work_info;
  std::vector<kernels::ReduceTile> reduce_final_map;
  int32_t partial_rows = 0;
  uint64_t generation = 0;
  // Of the expanded form.
  int32_t units = 0;
  std::vector<kernels::Round> rounds;
  std::vector<kernels::Expansion> expansions;
  std::vector<kernels::ExpandedItem> items;
  std::vector<int32_t> unit_indptr;
  kernels::RoundView round_view;

  void Add(int32_t segment, int32_t partial, int32_t q_begin, int32_t q_end, int32_t kv_begin,
           int32_t kv_end, uint32_t heads) {
    work_info.push_back({segment, partial, q_begin, q_end, kv_begin, kv_end,
                         segments[segment].kv_rows - kv_end, heads});
  }
  void EndUnit() { work_indptr.push_back(static_cast<int32_t>(work_info.size())); }
  kernels::PlanView View() const {
    return {work_indptr,        work_info,
            reduce_indptr,      reduce_final_map,
            reduce_partial_map, partial_rows,
            generation,         round_view.rounds.empty() ? nullptr : &round_view};
  }
};

// The tile of segment 0 cut in two, so that partial tiles and their merge are exercised. Further
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
  work.generation = kernels::NextPlanGeneration();
}

// Work items of a tile a head and 128 query rows, whole.
void AddTiles(const Shape& shape, Work& work) {
  constexpr int32_t kTile = kExpandedRows;
  for (int32_t head = 0; head < kHeads; ++head) {
    const uint32_t one = kernels::PackHeads(head, head + 1);
    for (int32_t q = 0; q < shape.expanded; q += kTile) {
      const int32_t end = std::min(shape.expanded, q + kTile);
      work.Add(0, kernels::kUnsplit, q, end, 0, shape.kv_rows - shape.expanded + end, one);
    }
    for (size_t i = 1; i < work.segments.size(); ++i) {
      work.Add(static_cast<int32_t>(i), kernels::kUnsplit, 0, 1, 0, work.segments[i].kv_rows, one);
    }
    work.EndUnit();
  }
}

// An expansion of each segment, of all heads if the workspace holds them, else one for each head; a
// round more whenever it is full.
void AddExpansions(int64_t workspace_bytes, Work& work) {
  int64_t used = 0;
  work.rounds.push_back({});
  for (size_t i = 0; i < work.segments.size(); ++i) {
    const int32_t rows = work.segments[i].kv_rows;
    const int32_t padded = (rows + kExpandedRows - 1) / kExpandedRows * kExpandedRows;
    if (rows == 0) continue;
    const bool all = kernels::ExpansionBytes(padded, kHeads) <= workspace_bytes;
    for (int32_t head = 0; head < kHeads; head += all ? kHeads : 1) {
      const int32_t heads = all ? kHeads : 1;
      const int64_t bytes = kernels::ExpansionBytes(padded, heads);
      if (used + bytes > workspace_bytes) {
        work.rounds.push_back({static_cast<int32_t>(work.expansions.size())});
        used = 0;
      }
      kernels::Round& round = work.rounds.back();
      work.expansions.push_back({used, static_cast<int32_t>(i), 0, rows, padded, head, heads,
                                 round.pairs, round.heads, 1, 0});
      used += bytes;
      ++round.expansions;
      round.pairs += padded / kExpandedRows * heads;
      round.heads += heads;
    }
  }
}

kernels::ExpandedItem ItemOf(const kernels::WorkInfo& info, const kernels::Expansion* expansion) {
  kernels::ExpandedItem item = {};
  item.work = info;
  item.carried_row = kernels::kUnsplit;
  if (expansion == nullptr) return item;
  item.panel_bytes = int64_t{expansion->padded_rows} * kPanelRowBytes;
  const int64_t head_bytes = kPanelsPerHead * item.panel_bytes + kRestBytes;
  item.keys = expansion->base + (info.head_begin() - expansion->head_begin) * head_bytes;
  item.rotated = expansion->base + expansion->heads * head_bytes;
  return item;
}

// Tiles whole, dealt to the units one after the other. What sees no key goes with the first round.
void PlanExpanded(const Shape& shape, const kernels::PlanTraits& traits, Work& work) {
  work.units = traits.units;
  AddTiles(shape, work);
  AddExpansions(traits.rounds.workspace_bytes, work);
  for (size_t r = 0; r < work.rounds.size(); ++r) {
    kernels::Round& round = work.rounds[r];
    std::vector<kernels::ExpandedItem> items;
    for (const kernels::WorkInfo& info : work.work_info) {
      if (info.kv_end == 0 && r == 0) items.push_back(ItemOf(info, nullptr));
      for (int32_t i = 0; i < round.expansions && info.kv_end > 0; ++i) {
        const kernels::Expansion& s = work.expansions[size_t(round.first_expansion + i)];
        const bool holds = s.segment == info.segment && s.head_begin <= info.head_begin() &&
                           info.head_begin() < s.head_begin + s.heads;
        if (holds) items.push_back(ItemOf(info, &s));
      }
    }
    round.first_indptr = static_cast<int32_t>(work.unit_indptr.size());
    for (int32_t unit = 0; unit <= work.units; ++unit) {
      work.unit_indptr.push_back(static_cast<int32_t>(work.items.size()));
      for (size_t i = size_t(unit); unit < work.units && i < items.size();
           i += size_t(work.units)) {
        work.items.push_back(items[i]);
      }
    }
  }
  work.round_view = {work.units, work.rounds, work.expansions, work.items, work.unit_indptr, false};
  work.generation = kernels::NextPlanGeneration();
}

// Addresses of one launch in the backend's memory.
struct Staged {
  const void *kv, *q, *narrow;
  void *absorbed, *latent, *o, *lse, *expanded_o, *expanded_lse, *narrow_o;
};

absl::StatusOr<Staged> Stage(LaunchLayout& layout, Data& d) {
  const int64_t packed = int64_t{std::min(d.rows, kMostAbsorbed + 2)} * kHeads;
  absl::Status status;
  const auto at = [&status](auto place) {
    status.Update(place.status());
    return place.ok() ? *place : nullptr;
  };
  const auto input = [&](const auto& v) {
    return at(layout.Input(v.data(), int64_t(v.size() * sizeof(v[0]))));
  };
  const auto output = [&](auto& v) {
    return at(layout.Output(v.data(), int64_t(v.size() * sizeof(v[0]))));
  };
  const Staged staged{input(d.kv),
                      input(d.q),
                      input(d.narrow),
                      at(layout.Workspace(packed * kRowDim * int64_t{sizeof(Bf16)})),
                      at(layout.Workspace(packed * 512 * int64_t{sizeof(float)})),
                      output(d.o),
                      output(d.lse),
                      output(d.expanded_o),
                      output(d.expanded_lse),
                      output(d.narrow_o)};
  if (!status.ok()) return status;
  return staged;
}

std::vector<SegmentRecord> Segments(const Data& d, const Staged& s, bool expanded, size_t shorts) {
  const int32_t q_dim = expanded ? kQDim : kRowDim, o_dim = expanded ? kODim : 512;
  SegmentRecord r = {};
  r.q_row_stride = kHeads * q_dim;
  r.q_head_stride = q_dim;
  r.o_row_stride = kHeads * o_dim;
  r.o_head_stride = o_dim;
  r.lse_row_stride = kHeads;
  r.lse_head_stride = 1;
  r.row_stride = d.row.row_bytes;
  r.kv_scale = kLayerScale;
  r.page_size = d.shape.page_size;
  r.num_heads = kHeads;
  r.softmax_scale = kScale;
  r.causal = 1;
  std::vector<SegmentRecord> segments;
  for (size_t i = 0; i < 2 + shorts; ++i) {
    const int64_t row = i == 0 ? 0 : d.queries + (i == 1 ? 0 : 1);
    r.q = static_cast<const Bf16*>(expanded ? s.q : s.absorbed) + row * r.q_row_stride;
    r.o = static_cast<float*>(expanded ? s.expanded_o : s.latent) + row * r.o_row_stride;
    r.lse = static_cast<float*>(expanded ? s.expanded_lse : s.lse) + row * kHeads;
    r.q_rows = i == 0 ? d.queries : 1;
    r.kv_rows = i == 0 ? d.shape.kv_rows : i == 1 ? 0 : kShortRows;
    segments.push_back(r);
  }
  return segments;
}

kernels::AttentionParams Form(const Data& d, const Work& work, bool expanded) {
  kernels::AttentionParams params;
  params.desc.kv_format = d.format;
  params.desc.geometry = kGeometry;
  params.desc.o_dtype = DType::kF32;
  if (expanded) params.desc.form = kernels::AttentionForm::kExpanded;
  params.segments = work.segments;
  params.plan = work.View();
  return params;
}

absl::Status Run(AttentionBackend& backend, const kernels::Launch& launch) {
  absl::Status s = backend.Submit(0, launch);
  return s.ok() ? backend.Wait(0).status() : s;
}

// Pages of the sequence in an order of their own, with gaps.
std::vector<uint32_t> Pages(const Shape& shape) {
  const int32_t pages = (shape.kv_rows + shape.page_size - 1) / shape.page_size;
  const int64_t granules =
      (shape.page_size * kRowBytes + kernels::kPageGranuleBytes - 1) / kernels::kPageGranuleBytes;
  std::vector<uint32_t> table(static_cast<size_t>(pages));
  for (int32_t page = 0; page < pages; ++page) {
    const int64_t place = (int64_t{page} * 37 + 1) % pages;
    table[static_cast<size_t>(page)] = static_cast<uint32_t>(place * granules);
  }
  return table;
}

absl::Status Attend(AttentionBackend& backend, Data& d) {
  LaunchLayout layout(backend, 0);
  absl::StatusOr<Staged> staged = Stage(layout, d);
  if (!staged.ok()) return staged.status();
  const std::vector<uint32_t> pages = Pages(d.shape);  // of rows of bf16, which are the largest
  const kernels::TableRange table[] = {{0, 1}, {1, static_cast<int64_t>(pages.size()) - 1}};
  const kernels::AppendRecord append{.kv = staged->kv,
                                     .dtype = DType::kBf16,
                                     .kv_row_stride = kRowDim,
                                     .page_table = 0,
                                     .layer_offset = 0,
                                     .row_stride = d.row.row_bytes,
                                     .page_size = d.shape.page_size,
                                     .first_position = 0,
                                     .rows = d.shape.kv_rows,
                                     .row_dim = kRowDim,
                                     .rope_dim = d.row.rope_dim,
                                     .format = d.format,
                                     .kv_scale = kLayerScale};
  const kernels::ProjectionRecord absorb{
      staged->q, staged->absorbed, kHeads * kQDim, kQDim, kHeads * kRowDim,
      kRowDim,   d.rows,           kHeads,         0,     0};
  const kernels::ProjectionRecord project[] = {
      {staged->latent, staged->o, kHeads * 512, 512, kHeads * kODim, kODim, d.rows, kHeads, 0, 0},
      {staged->narrow, staged->narrow_o, 512, 0, kHeads * kODim, kODim, 1, kHeads, 0, 0}};
  kernels::Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  launch.page_tables = pages;
  launch.table_changes = table;
  launch.appends = {&append, 1};
  Work absorbed, expanded;
  if (d.shape.absorbed > 0) {
    absorbed.segments = Segments(d, *staged, false, 1);
    PlanAbsorbed(d.shape, d.shape.all_units ? UnitsOf(backend, false) : 2, absorbed);
    launch.absorb = {kGeometry, DType::kBf16, DType::kBf16, {&absorb, 1}, {}};
    launch.absorbed = Form(d, absorbed, false);
    launch.project = {kGeometry, DType::kF32, DType::kF32, project, {}};
  }
  if (d.shape.expanded > 0) {
    expanded.segments =
        Segments(d, *staged, true, d.shape.all_units ? size_t(ShortSegments(backend)) : 1);
    kernels::AttentionDesc desc;
    desc.geometry = kGeometry;
    desc.form = kernels::AttentionForm::kExpanded;
    PlanExpanded(d.shape, backend.Traits(desc), expanded);
    launch.expanded = Form(d, expanded, true);
  }
  return Run(backend, launch);
}

// Page work alone: rows that move, pages that are zeroed, at odd places too. Then the rows are
// compared with what is left of them.
absl::Status CheckPages(AttentionBackend& backend) {
  constexpr int64_t kPage = 14 * kernels::kPageGranuleBytes;
  const std::vector<Bf16> kv = Pattern(size_t{3} * kRowDim, 5);
  int32_t differs[3] = {};
  const uint32_t pages[] = {0};
  const kernels::TableRange table{0, 1};
  LaunchLayout layout(backend, 0);
  auto rows = layout.Input(kv.data(), static_cast<int64_t>(kv.size() * sizeof(Bf16)));
  auto flags = layout.Output(differs, sizeof(differs));
  if (!rows.ok() || !flags.ok()) return rows.ok() ? flags.status() : rows.status();
  kernels::AppendRecord record{*rows, DType::kBf16, kRowDim, 0, 0, kRowBytes, 3, 0, 3, kRowDim};
  kernels::Launch launch;
  launch.inputs = layout.inputs();
  launch.page_tables = pages;
  launch.table_changes = {&table, 1};
  launch.appends = {&record, 1};
  if (absl::Status s = Run(backend, launch); !s.ok()) return s;

  kernels::AppendRecord compared = record;
  compared.differs = static_cast<int32_t*>(*flags);
  const kernels::PageRange ranges[] = {
      {kPage, 40 * kPage}, {2 * kPage, kPage, 0}, {0, kPage}, {0, 3 * kRowBytes - 2, 2 * kPage}};
  launch.outputs = layout.outputs();
  launch.pages = ranges;
  launch.table_changes = {};
  launch.appends = {&compared, 1};
  if (absl::Status s = Run(backend, launch); !s.ok()) return s;
  std::vector<Bf16> got(kv.size());
  if (absl::Status s = kernels::ReadRows(backend, 0, pages, record, got.data()); !s.ok()) return s;
  for (size_t i = 0; i < kv.size(); ++i) {
    const Bf16 want = i + 1 < kv.size() ? kv[i] : Bf16{0};
    if (got[i] != want) return Wrong("page work", ToFloat(got[i]), ToFloat(want));
  }
  // The last element was zeroed: the last row alone differs.
  const int32_t found = differs[0] * 4 + differs[1] * 2 + differs[2];
  return found == 1 ? absl::OkStatus() : Wrong("rows sent again, as bits", found, 1);
}

kernels::BackendLimits Limits(const AttentionBackend& backend) {
  const int32_t segments = 2 + ShortSegments(backend);
  kernels::BackendLimits l;
  l.kv_pool_bytes = kPoolBytes;
  l.page_table_entries = kMostPages;
  l.weights_bytes = int64_t{kHeads} * 512 * 256 * sizeof(Bf16);
  l.weights_slots = 1;
  l.launch_slots = 1;
  l.launch_requests = segments;
  l.launch_rows = kMostQueries + segments;
  l.launch_packed_rows = l.launch_rows * kHeads;
  l.partial_rows = 2 * kMostAbsorbed * kHeads;
  l.max_o_dim = 512;
  l.staging_in_bytes = int64_t{4} << 20;
  l.staging_out_bytes = int64_t{4} << 20;
  l.slot_workspace_bytes = int64_t{1} << 20;
  l.work_items = 3 * kMostUnits + 2 * segments * kHeads;
  l.reduce_tiles = 1;
  l.reduce_partials = 2;
  l.round_items = l.work_items;
  l.round_expansions = segments * kHeads;
  l.page_ranges = l.table_ranges = 16;
  l.max_geometry = kGeometry;
  return l;
}

absl::Status CheckShape(AttentionBackend& backend, const Weights& weights, Shape shape,
                        KvFormat format) {
  kernels::AttentionDesc desc;
  desc.geometry = kGeometry;
  desc.kv_format = format;
  if (!backend.CanRun(desc).ok()) shape.absorbed = 0;
  desc.form = kernels::AttentionForm::kExpanded;
  if (!backend.CanRun(desc).ok()) shape.expanded = 0;
  Data data(shape, format);
  absl::Status s = Attend(backend, data);
  if (s.ok() && shape.absorbed > 0) s = CompareForm(data, weights, false);
  if (s.ok() && shape.absorbed > 0) s = CompareNarrow(data, weights);
  if (s.ok() && shape.expanded > 0) s = CompareForm(data, weights, true);
  return s;
}

absl::Status Check(AttentionBackend& backend) {
  const Weights weights;
  absl::Status s =
      backend.LoadWeights(0, kGeometry, 0, kHeads, weights.uk.data(), weights.uv.data());
  if (s.ok()) s = CheckPages(backend);
  for (const KvFormat format : backend.Info().kv_formats) {
    const size_t shapes = format == KvFormat::kBf16 ? std::size(kShapes) : kFp8Shapes;
    for (const Shape& shape : std::span(kShapes).first(shapes)) {
      if (s.ok()) s = CheckShape(backend, weights, shape, format);
    }
  }
  return s;
}

}  // namespace
}  // namespace self_test

kernels::BackendLimits SelfTestLimits(const kernels::AttentionBackend& backend) {
  return self_test::Limits(backend);
}

absl::Status SelfTest(kernels::AttentionBackend& backend) { return self_test::Check(backend); }

}  // namespace mla::kernels::hip
