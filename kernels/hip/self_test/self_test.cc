#include "kernels/hip/self_test/self_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/runtime/kernel_graphs.h"
#include "kernels/hip/self_test/data.h"
#include "kernels/hip/self_test/digest.h"
#include "kernels/hip/self_test/gate.h"
#include "kernels/hip/self_test/pages.h"
#include "kernels/hip/self_test/plan.h"
#include "kernels/hip/self_test/projected.h"
#include "kernels/hip/self_test/row.h"
#include "kernels/hip/self_test/sparse.h"
#include "kernels/launch_layout.h"

namespace mla::kernels::hip {
namespace self_test {
namespace {

// Number of blocks that items are dealt to, in the given form.
int32_t UnitsOf(const AttentionBackend& backend, bool expanded) {
  AttentionDesc desc;
  desc.geometry = kGeometry;
  if (expanded) desc.form = AttentionForm::kExpanded;
  return std::min(backend.Traits(desc).units, kMostUnits);
}

// Enough for each unit to get at least three, in shapes that give work to all units.
int32_t ShortSegments(const AttentionBackend& backend) {
  return 3 * UnitsOf(backend, true) / kHeads + 1;
}

// The largest up-projected value of the first rows; a lower bound for that of all rows.
double LargestValue(const Data& d, const Weights& w) {
  double largest = 0.0;
  for (int32_t row = 0; row < 4; ++row) {
    std::vector<float> value(static_cast<size_t>(d.o_dim), 0.0f);
    for (int c = 0; c < 512; ++c) {
      const float x = d.kv_floats[static_cast<size_t>(row) * kRowDim + c];
      for (int v = 0; v < d.o_dim; ++v) value[v] += x * w.uv_floats[c * d.o_dim + v];
    }
    for (const float x : value) largest = std::max(largest, std::abs(double{x}));
  }
  return largest;
}

bool Near(double got, double want, double off) {
  if (std::isnan(want)) return std::isnan(got);
  return got == want || std::abs(got - want) <= off;
}

// Compares every row of the outputs at one head each, and the first row at all heads.
absl::Status CompareForm(const Data& d, const Weights& w, bool expanded) {
  const std::vector<float>& o = expanded ? d.expanded_o : d.o;
  const std::vector<float>& lse = expanded ? d.expanded_lse : d.lse;
  const bool exact = d.products == DType::kBf16;
  const auto limit = [&](double plain, double products, double prefill) {
    return exact ? plain : expanded ? prefill : products;
  };
  const double of_value = limit(kOfValue, kOfValueProducts, kOfValuePrefill) * LargestValue(d, w);
  const double of_lse = limit(kLse, kLseProducts, kLsePrefill);
  double errors = 0.0, norms = 0.0;
  const bool bf16_rows = d.format == KvFormat::kBf16;
  const std::string form = absl::StrCat(
      expanded ? "expanded" : "absorbed", " form, ", d.shape.kv_rows, " keys, ",
      bf16_rows ? "" : absl::StrCat(Name(d.format), " rows, "), exact ? "" : "products of 8 bits, ",
      d.shape.lists ? "index lists, " : "", "row ");
  for (int32_t row = 0; row < (d.shape.pieces > 0 ? d.queries : d.rows); ++row) {
    for (int32_t head = 0; head < kHeads; ++head) {
      if (d.queries > 2 && row > 0 && row % kHeads != head) continue;
      const Answer want = Expected(d, w, row, head, !expanded);
      const size_t index = static_cast<size_t>(row) * kHeads + head;
      const std::string where = absl::StrCat(form, row, " of ", d.rows, ", head ", head);
      if (!Near(lse[index], want.lse, of_lse)) return Wrong(where + ": lse", lse[index], want.lse);
      for (int v = 0; v < d.o_dim; ++v) {
        const double got = o[index * d.o_dim + v];
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
  if (errors <= limit(kCosine, kCosineProducts, kCosinePrefill) * norms) return absl::OkStatus();
  return Wrong(absl::StrCat(expanded ? "expanded" : "absorbed", " form, ", d.shape.kv_rows,
                            " keys: cosine difference of all outputs"),
               errors / norms, 0.0);
}

absl::Status CompareNarrow(const Data& d, const Weights& w) {
  for (int32_t head = 0; head < kHeads; ++head) {
    const float* uv = &w.uv_floats[static_cast<size_t>(head) * 512 * d.o_dim];
    for (int v = 0; v < d.o_dim; ++v) {
      const double want = double{kNarrow[0]} * uv[v] + double{kNarrow[1]} * uv[d.o_dim + v];
      const float got = d.narrow_o[static_cast<size_t>(head) * d.o_dim + v];
      if (std::abs(got - want) < kNarrowOff) continue;
      return Wrong(absl::StrCat("fp32 latent outputs, head ", head, ": output column ", v), got,
                   want);
    }
  }
  return absl::OkStatus();
}

// Addresses of one launch in the backend's memory.
struct Staged {
  const void *kv, *q, *narrow, *lists, *list_ends;
  void *absorbed, *latent, *o, *lse, *expanded_o, *expanded_lse, *narrow_o;
};

absl::StatusOr<Staged> Stage(LaunchLayout& layout, Data& d) {
  const int64_t packed = int64_t{std::min(d.rows, kMostAbsorbed + 2)} * kHeads;
  absl::Status status;
  const auto address_of = [&status](auto place) {
    status.Update(place.status());
    return place.ok() ? *place : nullptr;
  };
  const auto input = [&](const auto& v) {
    return address_of(layout.Input(v.data(), int64_t(v.size() * sizeof(v[0]))));
  };
  const auto output = [&](auto& v) {
    return address_of(layout.Output(v.data(), int64_t(v.size() * sizeof(v[0]))));
  };
  const Staged staged{input(d.kv),
                      input(d.q),
                      input(d.narrow),
                      input(d.lists),
                      input(d.list_ends),
                      address_of(layout.Workspace(packed * kRowDim * int64_t{sizeof(Bf16)})),
                      address_of(layout.Workspace(packed * 512 * int64_t{sizeof(float)})),
                      output(d.o),
                      output(d.lse),
                      output(d.expanded_o),
                      output(d.expanded_lse),
                      output(d.narrow_o)};
  if (!status.ok()) return status;
  return staged;
}

// Granules of a layer's part of a page; bf16 rows need the most.
int64_t GranulesOf(const Shape& shape) {
  return (shape.page_size * kRowBytes + kPageGranuleBytes - 1) / kPageGranuleBytes;
}

int64_t LayerOffset(const Shape& shape) {
  return shape.layer * GranulesOf(shape) * kPageGranuleBytes;
}

std::vector<SegmentRecord> Segments(const Data& d, const Staged& s, bool expanded, size_t shorts) {
  const int32_t q_dim = expanded ? d.q_dim : kRowDim, o_dim = expanded ? d.o_dim : 512;
  SegmentRecord r = {};
  r.q_row_stride = kHeads * q_dim;
  r.q_head_stride = q_dim;
  r.o_row_stride = kHeads * o_dim;
  r.o_head_stride = o_dim;
  r.lse_row_stride = kHeads;
  r.lse_head_stride = 1;
  r.row_stride = d.row.row_bytes;
  r.layer_offset = LayerOffset(d.shape);
  r.kv_scale = kLayerScale;
  r.page_size = d.shape.page_size;
  r.softmax_scale = kScale;
  r.causal = 1;
  std::vector<SegmentRecord> segments;
  for (size_t i = 0; i < 2 + shorts; ++i) {
    const int64_t row = i == 0 ? 0 : d.queries + (i == 1 ? 0 : 1);
    r.q = static_cast<const Bf16*>(expanded ? s.q : s.absorbed) + row * r.q_row_stride;
    r.o = static_cast<float*>(expanded ? s.expanded_o : s.latent) + row * r.o_row_stride;
    r.lse = static_cast<float*>(expanded ? s.expanded_lse : s.lse) + row * kHeads;
    r.q_rows = i == 0 ? d.queries : 1;
    r.kv_rows = i == 0 ? d.shape.kv_rows : i == 1 ? d.shape.unlisted : kShortRows;
    r.num_heads = kHeads;
    if (d.shape.lists) {
      r.num_heads = r.q_rows * kHeads;
      r.q_rows = 1;
      const size_t kind = std::min<size_t>(i, 2);
      r.list = static_cast<const int32_t*>(s.lists) + d.list_starts[kind];
      r.list_begin = static_cast<const int32_t*>(s.list_ends) + 2 * kind;
    }
    segments.push_back(r);
  }
  return segments;
}

AttentionParams Form(const Data& d, const Work& work, bool expanded) {
  AttentionParams params;
  params.desc.kv_format = d.format;
  params.desc.geometry = d.geometry;
  params.desc.o_dtype = DType::kF32;
  if (d.shape.lists) params.desc.attention = AttentionKind::kSparse;
  params.desc.products = d.products;
  if (expanded) params.desc.form = AttentionForm::kExpanded;
  params.segments = work.segments;
  params.plan = work.View();
  return params;
}

// Returns the page table of the sequence: its pages lie in the pool out of order, with gaps.
std::vector<uint32_t> Pages(const Shape& shape) {
  const int32_t pages = (shape.kv_rows + shape.page_size - 1) / shape.page_size;
  const int64_t granules = shape.layers * GranulesOf(shape);
  std::vector<uint32_t> table(static_cast<size_t>(pages));
  for (int32_t page = 0; page < pages; ++page) {
    const int64_t place = (int64_t{page} * 37 + 1) % pages;
    table[static_cast<size_t>(page)] = static_cast<uint32_t>(place * granules);
  }
  return table;
}

absl::Status Attend(AttentionBackend& backend, Data& d) {
  LaunchLayout layout(backend, 0);
  MLA_ASSIGN_OR_RETURN(const Staged staged, Stage(layout, d));
  const std::vector<uint32_t> pages = Pages(d.shape);
  const TableRange table[] = {{0, 1}, {1, static_cast<int64_t>(pages.size()) - 1}};
  const AppendRecord append{.kv = staged.kv,
                            .dtype = DType::kBf16,
                            .kv_row_stride = kRowDim,
                            .page_table = 0,
                            .layer_offset = LayerOffset(d.shape),
                            .row_stride = d.row.row_bytes,
                            .page_size = d.shape.page_size,
                            .first_position = 0,
                            .rows = d.shape.kv_rows,
                            .row_dim = kRowDim,
                            .rope_dim = d.row.rope_dim,
                            .format = d.format,
                            .kv_scale = kLayerScale};
  const ProjectionRecord absorb{
      staged.q, staged.absorbed, kHeads * d.q_dim, d.q_dim, kHeads * kRowDim,
      kRowDim,  d.rows,          kHeads,           0,       0};
  const ProjectionRecord project[] = {
      {staged.latent, staged.o, kHeads * 512, 512, kHeads * d.o_dim, d.o_dim, d.rows, kHeads, 0, 0},
      {staged.narrow, staged.narrow_o, 512, 0, kHeads * d.o_dim, d.o_dim, 1, kHeads, 0, 0}};
  Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  launch.page_tables = pages;
  launch.table_changes = table;
  launch.appends = {&append, 1};
  Work absorbed, expanded;
  if (d.shape.absorbed > 0) {
    absorbed.segments = Segments(d, staged, false, 1);
    if (d.shape.pieces > 0) {
      absorbed.segments.resize(1);
      PlanPieces(d.shape, absorbed);
    } else {
      PlanAbsorbed(d, d.shape.all_units ? UnitsOf(backend, false) : 2, absorbed);
    }
    launch.absorb = {d.geometry, DType::kBf16, DType::kBf16, {&absorb, 1}, {}};
    launch.absorbed = Form(d, absorbed, false);
    launch.project = {d.geometry, DType::kF32, DType::kF32, project, {}};
  }
  if (d.shape.expanded > 0) {
    expanded.segments =
        Segments(d, staged, true, d.shape.all_units ? size_t(ShortSegments(backend)) : 1);
    AttentionDesc desc;
    desc.geometry = d.geometry;
    desc.form = AttentionForm::kExpanded;
    PlanExpanded(d.shape, backend.Traits(desc), expanded);
    launch.expanded = Form(d, expanded, true);
  }
  return Run(backend, launch);
}

BackendLimits Limits(const AttentionBackend& backend) {
  const int32_t segments = 2 + ShortSegments(backend);
  BackendLimits l;
  l.kv_pool_bytes = kPoolBytes;
  l.page_table_entries = kMostPages;
  l.weights_bytes =
      int64_t{kHeads} * 512 * (kWideGeometry.nope_dim + kWideGeometry.v_dim) * sizeof(Bf16) +
      kProjectedBytes;
  l.weights_slots = 1;
  l.launch_slots = 1;
  l.launch_requests = segments;
  l.launch_rows = kMostQueries + segments;
  l.launch_packed_rows = l.launch_rows * kHeads;
  l.partial_rows = kMostPieces * kMostAbsorbed * kHeads;
  l.max_o_dim = 512;
  l.staging_in_bytes = int64_t{4} << 20;
  l.staging_out_bytes = int64_t{4} << 20;
  l.slot_workspace_bytes = int64_t{1} << 20;
  l.work_items = 3 * kMostUnits + 2 * segments * kHeads;
  l.reduce_tiles = 1;
  l.reduce_partials = kMostPieces;
  l.round_items = l.work_items;
  l.round_expansions = segments * kHeads;
  l.page_ranges = l.table_ranges = l.digest_parts = 16;
  l.max_geometry = kWideGeometry;
  l.max_top_k = kIndexTopK;
  return l;
}

absl::Status CheckShape(AttentionBackend& backend, const Weights& weights, Shape shape,
                        KvFormat format, DType products, const SelfTestRun& run) {
  MLA_RETURN_IF_ERROR(run.CheckTime());
  AttentionDesc desc;
  desc.geometry = weights.geometry;
  desc.kv_format = format;
  desc.products = products;
  if (shape.lists) desc.attention = AttentionKind::kSparse;
  if (!backend.CanRun(desc).ok()) shape.absorbed = 0;
  desc.form = AttentionForm::kExpanded;
  if (!backend.CanRun(desc).ok()) shape.expanded = 0;
  if (shape.absorbed == 0 && shape.expanded == 0) return absl::OkStatus();
  Data data(weights.geometry, shape, format, products);
  absl::Status s = Attend(backend, data);
  if (s.ok() && shape.absorbed > 0) s = CompareForm(data, weights, false);
  if (s.ok() && shape.absorbed > 0) s = CompareNarrow(data, weights);
  if (s.ok() && shape.expanded > 0) s = CompareForm(data, weights, true);
  return s;
}

absl::Status Load(AttentionBackend& backend, const Weights& weights) {
  return backend.LoadWeights(0, weights.geometry, 0, kHeads, weights.uk.data(), weights.uv.data());
}

// The expanded form at the other dims: few rows of each format, and many bf16 rows.
absl::Status CheckWideHeads(AttentionBackend& backend, const SelfTestRun& run) {
  AttentionDesc desc;
  desc.geometry = kWideGeometry;
  desc.form = AttentionForm::kExpanded;
  if (!backend.CanRun(desc).ok()) return absl::OkStatus();
  const Weights weights(kWideGeometry);
  absl::Status s = Load(backend, weights);
  for (const KvFormat format : backend.Info().kv_formats) {
    for (Shape shape : kWideShapes) {
      shape.absorbed = 0;
      if (shape.all_units && format != KvFormat::kBf16) continue;
      if (s.ok()) s = CheckShape(backend, weights, shape, format, DType::kBf16, run);
    }
  }
  return s;
}

// Tests both forms over rows of one format, dense and with lists.
absl::Status CheckFormat(AttentionBackend& backend, const Weights& weights, KvFormat format,
                         const SelfTestRun& run) {
  const bool all = format == KvFormat::kBf16;
  const size_t shapes = all ? std::size(kShapes) : kFp8Shapes;
  const size_t with_lists = all ? std::size(kListShapes) : kFp8ListShapes;
  absl::Status s;
  for (const auto tested :
       {std::span(kShapes).first(shapes), std::span(kListShapes).first(with_lists)}) {
    for (const Shape& shape : tested) {
      // 8-bit products run first. Otherwise results that exact products have left could pass for
      // theirs.
      Shape absorbed = shape;
      absorbed.expanded = 0;
      if (s.ok() && format != KvFormat::kBf16) {
        s = CheckShape(backend, weights, absorbed, format, DType::kFp8E4m3, run);
      }
      if (s.ok()) s = CheckShape(backend, weights, shape, format, DType::kBf16, run);
    }
  }
  return s;
}

// A tile for one block of the smallest kernel; and a tile for the largest kernel, which is chosen
// because many units are busy, with two blocks each. Over rows of 8 bits the smallest kernels have
// bf16 products, and the largest have 8-bit products.
absl::Status CheckPieces(AttentionBackend& backend, const Weights& weights,
                         const SelfTestRun& run) {
  const int32_t many = std::clamp(UnitsOf(backend, false) / 2, 2, kMostPieces);
  absl::Status s;
  for (const KvFormat format : backend.Info().kv_formats) {
    const DType products = format == KvFormat::kBf16 ? DType::kBf16 : DType::kFp8E4m3;
    if (s.ok()) {
      s = CheckShape(backend, weights, ShapeInPieces(kMostAbsorbed, many), format, products, run);
    }
    if (s.ok()) s = CheckShape(backend, weights, ShapeInPieces(2, 2), format, DType::kBf16, run);
  }
  return s;
}

absl::Status Check(AttentionBackend& backend, SelfTestRun& run) {
  const Weights weights(kGeometry);
  absl::Status s = Load(backend, weights);
  const auto part = [&](std::string_view name, const std::function<absl::Status()>& test) {
    if (s.ok()) s = run.Do(name, test);
  };
  part("pages", [&] { return CheckPages(backend); });
  part("digests", [&] { return CheckDigests(backend); });
  for (const KvFormat format : backend.Info().kv_formats) {
    part(Name(format), [&] { return CheckFormat(backend, weights, format, run); });
  }
  part("pieces", [&] { return CheckPieces(backend, weights, run); });
  part("windows", [&] { return CheckWindows(backend); });
  part("indexer", [&] { return CheckIndexer(backend); });
  part("words", [&] { return CheckGate(backend); });
  part("one_row",
       [&] { return CheckRow(backend, weights, Data(kGeometry, kShapes[0], KvFormat::kBf16)); });
  part("projected", [&] { return CheckProjected(backend); });
  part("wide_heads", [&] { return CheckWideHeads(backend, run); });
  return s;
}

absl::Status CheckPrefill(AttentionBackend& backend, const SelfTestRun& run) {
  const Weights weights(kGeometry);
  absl::Status s = Load(backend, weights);
  for (const KvFormat format : backend.Info().kv_formats) {
    if (format == KvFormat::kBf16) continue;
    for (Shape shape : kShapes) {
      shape.absorbed = 0;
      if (s.ok()) s = CheckShape(backend, weights, shape, format, DType::kFp8E4m3, run);
    }
  }
  return s;
}

absl::Status CheckHostMemory(AttentionBackend& backend, const SelfTestRun& run) {
  const Weights weights(kGeometry);
  absl::Status s = Load(backend, weights);
  if (s.ok()) s = CheckPages(backend);
  if (s.ok()) s = CheckDigests(backend);
  if (s.ok()) s = CheckShape(backend, weights, kShapes[0], KvFormat::kBf16, DType::kBf16, run);
  if (s.ok()) s = CheckGate(backend);
  if (s.ok()) s = CheckRow(backend, weights, Data(kGeometry, kShapes[0], KvFormat::kBf16));
  return s;
}

// Layers in the order of a step, then others out of order, so that state prepared for the next
// launch is right for some launches and wrong for others.
constexpr int32_t kReplayedLayers[] = {0, 1, 2, 3, 4, 5, 2, 2, 5, 0};
// A graph is made only after this many launches.
constexpr int32_t kLaunchesBeforeGraph = KernelGraphs::kUsesBefore;
static_assert(std::size(kReplayedLayers) >= kLaunchesBeforeGraph + 2 * kLeastReplays);

absl::Status CheckReplays(AttentionBackend& backend, const SelfTestRun& run) {
  const Weights weights(kGeometry);
  absl::Status s = Load(backend, weights);
  Shape shape = kShapes[0];
  shape.expanded = 0;
  shape.layers = 1 + *std::max_element(std::begin(kReplayedLayers), std::end(kReplayedLayers));
  uint32_t seed = 100;
  for (const int32_t layer : kReplayedLayers) {
    if (s.ok()) s = run.CheckTime();
    if (!s.ok()) return s;
    shape.layer = layer;
    Data data(kGeometry, shape, KvFormat::kBf16);
    data.kv = Pattern(data.kv.size(), ++seed);
    data.q = Pattern(data.q.size(), ++seed);
    data.Store();
    s = Attend(backend, data);
    // If all kernels use the previous layer, their results agree with each other, so the stored
    // rows are checked too.
    if (s.ok()) s = CheckStored(backend, data, Pages(shape), LayerOffset(shape));
    if (s.ok()) s = CompareForm(data, weights, false);
    if (s.ok()) s = CompareNarrow(data, weights);
  }
  return s;
}

}  // namespace
}  // namespace self_test

BackendLimits SelfTestLimits(const AttentionBackend& backend) { return self_test::Limits(backend); }

absl::Status SelfTest(AttentionBackend& backend, SelfTestRun& run) {
  return self_test::Check(backend, run);
}

absl::Status SelfTestPrefill(AttentionBackend& backend, SelfTestRun& run) {
  return run.Do("prefill", [&] { return self_test::CheckPrefill(backend, run); });
}

absl::Status SelfTestHostMemory(AttentionBackend& backend, SelfTestRun& run) {
  return run.Do("host_memory", [&] { return self_test::CheckHostMemory(backend, run); });
}

absl::Status SelfTestReplays(AttentionBackend& backend, GpuRuntime& runtime, SelfTestRun& run) {
  return run.Do("replays", [&]() -> absl::Status {
    const int64_t before = runtime.graph_launches();
    absl::Status s = self_test::CheckReplays(backend, run);
    const int64_t replays = runtime.graph_launches() - before;
    if (!s.ok() || replays >= kLeastReplays) return s;
    return absl::UnavailableError(absl::StrCat("the runtime launched ", replays, " of ",
                                               std::size(self_test::kReplayedLayers),
                                               " sequences of kernels as graphs"));
  });
}

}  // namespace mla::kernels::hip
