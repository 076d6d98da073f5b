#include "kernels/hip/self_test/sparse.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/self_test/data.h"
#include "kernels/hip/self_test/plan.h"
#include "kernels/launch_layout.h"

namespace mla::kernels::hip::self_test {
namespace {

constexpr int32_t kDim = 512, kLatent = 448;
constexpr int32_t kRowsSeen[] = {200, 7};  // seen by the two query rows
constexpr int32_t kWindow = 128, kRatio = 4, kCut = 96;
constexpr int32_t kRows = kRowsSeen[0], kEntries = kRows / kRatio;
constexpr int32_t kPage = 64, kEntryPage = 16;
// Devices may have other kernels for more packed rows than a block of 64 holds.
constexpr int32_t kWindowHeads[] = {20, 72};
constexpr int32_t kRowPages = (kRows + kPage - 1) / kPage;
constexpr int32_t kKeys = 300, kIndexHeads = 8;
constexpr double kOfLogit = 1e-3;  // relative to the largest
constexpr int32_t kList[] = {-1, 0};

// Returns a table of `pages` pages of `bytes` each, the last page first.
std::vector<uint32_t> Table(int32_t pages, int64_t bytes) {
  const int64_t granules = (bytes + kPageGranuleBytes - 1) / kPageGranuleBytes;
  std::vector<uint32_t> table;
  for (int32_t page = pages; page > 0; --page) {
    table.push_back(static_cast<uint32_t>((page - 1) * granules));
  }
  return table;
}

// Returns the values that rows of `values` have after encoding and decoding.
std::vector<float> Stored(const KvRowLayout& layout, const std::vector<Bf16>& values) {
  constexpr auto kKind = Fp8Kind::kE4m3Fn;
  const auto dim = static_cast<size_t>(layout.latent_dim + layout.rope_dim);
  std::vector<std::byte> row(static_cast<size_t>(layout.row_bytes + layout.page_scales_bytes));
  const std::byte* const bytes = row.data();
  std::vector<float> stored(values.size());
  for (size_t i = 0; i < values.size(); i += dim) {
    EncodeKvRow(layout, kKind, &values[i], DType::kBf16, 1.0f,
                KvRowIn(layout, row.data(), layout.row_bytes, 1, 0));
    DecodeKvRow(layout, kKind, 1.0f, KvRowIn(layout, bytes, layout.row_bytes, 1, 0), &stored[i]);
  }
  return stored;
}

// Places tensors in the backend's memory; keeps the first error.
class Stage {
 public:
  explicit Stage(AttentionBackend& backend) : layout_(backend, 0) {}
  template <class T>
  const T* In(const std::vector<T>& v) {
    return Taken<const T>(layout_.Input(v.data(), static_cast<int64_t>(v.size() * sizeof(T))));
  }
  template <class T>
  T* Out(std::vector<T>& v) {
    return Taken<T>(layout_.Output(v.data(), static_cast<int64_t>(v.size() * sizeof(T))));
  }
  absl::Status Run(AttentionBackend& backend, Launch& launch) {
    if (!status_.ok()) return status_;
    const TableRange table{0, static_cast<int64_t>(launch.page_tables.size())};
    launch.inputs = layout_.inputs();
    launch.outputs = layout_.outputs();
    launch.table_changes = {&table, 1};
    absl::Status s = backend.Submit(0, launch);
    return s.ok() ? backend.Wait(0).status() : s;
  }

 private:
  template <class T, class Place>
  T* Taken(const Place& place) {
    status_.Update(place.status());
    return place.ok() ? static_cast<T*>(*place) : nullptr;
  }
  LaunchLayout layout_;
  absl::Status status_;
};

struct Windows {
  Windows(KvFormat of_rows, int32_t num_heads) : format(of_rows), heads(num_heads) {
    for (int32_t head = 0; head < heads; ++head) {
      sinks.push_back(4.0f + 0.125f * static_cast<float>(head));
    }
  }
  const KvFormat format;
  const int32_t heads;
  const KvRowLayout row = MakeKvRowLayout(format, kLatent, kDim - kLatent);
  const std::vector<Bf16> rows = Pattern(size_t{kRows} * kDim, 11);
  const std::vector<Bf16> entries = Pattern(size_t{kEntries} * kDim, 12);
  const std::vector<Bf16> q = Pattern(size_t{2} * static_cast<size_t>(heads) * kDim, 13);
  const std::vector<float> stored_rows = Stored(row, rows), stored_entries = Stored(row, entries);
  const std::vector<int32_t> list{std::begin(kList), std::end(kList)}, list_begin{0, 2};
  std::vector<float> sinks;
  std::vector<float> o = std::vector<float>(q.size(), 0.5f);
  std::vector<float> lse = std::vector<float>(size_t{2} * static_cast<size_t>(heads), 0.5f);
};

// Plans segment 0 in two parts that are merged, and segment 1 whole.
Work PlanOf(const std::vector<SegmentRecord>& segments, int32_t num_heads) {
  Work work;
  work.segments = segments;
  const uint32_t heads = static_cast<uint32_t>(num_heads) << 16;
  work.Add(0, 0, 0, 1, 0, kCut, heads);
  work.EndUnit();
  work.Add(0, num_heads, 0, 1, kCut, kWindow + kEntries, heads);
  work.Add(1, -1, 0, 1, 0, kRowsSeen[1] + 2, heads);
  work.EndUnit();
  work.reduce_final_map.push_back({0, 0, 1, heads});
  work.reduce_partial_map = {0, num_heads};
  work.reduce_indptr.push_back(2);
  work.partial_rows = 2 * num_heads;
  work.generation = NextPlanGeneration();
  return work;
}

absl::Status Attend(AttentionBackend& backend, Windows& w) {
  Stage stage(backend);
  AppendRecord append{};
  append.kv = stage.In(w.rows);
  append.dtype = DType::kBf16;
  append.kv_row_stride = append.row_dim = kDim;
  append.rope_dim = kDim - kLatent;
  append.row_stride = w.row.row_bytes;
  append.page_size = kPage;
  append.rows = kRows;
  append.format = w.format;
  std::vector<AppendRecord> appends = {append, append};
  appends[1].kv = stage.In(w.entries);
  appends[1].page_table = kRowPages;
  appends[1].page_size = kEntryPage;
  appends[1].rows = kEntries;
  const Bf16* const q = stage.In(w.q);
  const float* const sinks = stage.In(w.sinks);
  const int32_t *const list = stage.In(w.list), *const list_begin = stage.In(w.list_begin);
  float *const o = stage.Out(w.o), *const lse = stage.Out(w.lse);
  std::vector<SegmentRecord> segments;
  for (int32_t i = 0; i < 2; ++i) {
    SegmentRecord r{};
    r.q = q + i * w.heads * kDim;
    r.o = o + i * w.heads * kDim;
    r.lse = lse + i * w.heads;
    r.q_row_stride = r.o_row_stride = w.heads * kDim;
    r.q_head_stride = r.o_head_stride = kDim;
    r.lse_row_stride = w.heads;
    r.lse_head_stride = 1;
    r.row_stride = w.row.row_bytes;
    r.page_size = kPage;
    r.q_rows = 1;
    r.kv_rows = kRowsSeen[i];
    r.num_heads = w.heads;
    r.weights_slot = -1;
    r.softmax_scale = kScale;
    r.causal = 1;
    if (i == 1) {
      r.list = list;
      r.list_begin = list_begin;
    }
    segments.push_back(r);
  }
  const std::vector<WindowRecord> windows(
      2, {kWindow, kRatio, kRowPages, 0, w.row.row_bytes, kEntryPage, sinks});
  const Work work = PlanOf(segments, w.heads);
  const std::vector<uint32_t> table = Table(kRowPages + (kEntries + kEntryPage - 1) / kEntryPage,
                                            KvPageBytes(w.row, w.row.row_bytes, kPage));
  Launch launch;
  launch.page_tables = table;
  launch.appends = appends;
  launch.absorbed.desc.geometry = {w.heads, kLatent, kDim - kLatent, 0, 0};
  launch.absorbed.desc.attention = AttentionKind::kWindow;
  launch.absorbed.desc.kv_format = launch.absorbed.desc.entry_format = w.format;
  launch.absorbed.desc.o_dtype = DType::kF32;
  launch.absorbed.segments = work.segments;
  launch.absorbed.windows = windows;
  launch.absorbed.plan = work.View();
  return stage.Run(backend, launch);
}

absl::Status Compare(const Windows& w, int32_t index, int32_t head) {
  const size_t packed_row = static_cast<size_t>(index * w.heads + head);
  const std::vector<float> query =
      Floats({w.q.begin() + static_cast<int64_t>(packed_row) * kDim,
              w.q.begin() + static_cast<int64_t>(packed_row + 1) * kDim});
  std::vector<const float*> keys;
  const int32_t seen = kRowsSeen[index], held = std::min(seen, kWindow);
  for (int32_t i = seen - held; i < seen; ++i) keys.push_back(&w.stored_rows[size_t(i) * kDim]);
  const int32_t named = index == 0 ? seen / kRatio : 1;
  for (int32_t i = 0; i < named; ++i) keys.push_back(&w.stored_entries[size_t(i) * kDim]);
  std::vector<double> sum(kDim, 0.0);
  double total = 0.0;
  for (const float* key : keys) {
    const double weight = std::exp(double{Dot(query.data(), key, kDim)} * kScale);
    total += weight;
    for (int32_t c = 0; c < kDim; ++c) sum[c] += weight * key[c];
  }
  const double with_sink = total + std::exp(double{w.sinks[head]});
  const auto wrong = [&](const std::string& what, double got, double want) {
    return absl::InternalError(absl::StrCat("window, ", Name(w.format), " rows, row ", index,
                                            ", head ", head, ": ", what, ": got ", got, ", want ",
                                            want));
  };
  if (!(std::abs(w.lse[packed_row] - std::log(total)) <= kLse)) {
    return wrong("lse", w.lse[packed_row], std::log(total));
  }
  for (int32_t c = 0; c < kDim; ++c) {
    const double got = w.o[packed_row * kDim + c], want = sum[c] / with_sink;
    const double off = std::max(kOfValue * 0.2, kOfOutput * std::abs(want));  // values reach 0.2
    if (!(std::abs(got - want) <= off)) return wrong(absl::StrCat("column ", c), got, want);
  }
  return absl::OkStatus();
}

absl::Status Compare(const Windows& w) {
  for (int32_t head = 0; head < w.heads; ++head) {
    for (int32_t index = 0; index < 2; ++index) {
      MLA_RETURN_IF_ERROR(Compare(w, index, head));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckWindows(AttentionBackend& backend) {
  for (const KvFormat format : kKvFormats) {
    for (const int32_t heads : kWindowHeads) {
      AttentionDesc desc;
      desc.geometry = {heads, kLatent, kDim - kLatent, 0, 0};
      desc.attention = AttentionKind::kWindow;
      desc.kv_format = desc.entry_format = format;
      if (!backend.Info().windows || !backend.CanRun(desc).ok()) continue;
      Windows windows(format, heads);
      MLA_RETURN_IF_ERROR(Attend(backend, windows));
      MLA_RETURN_IF_ERROR(Compare(windows));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckIndexer(AttentionBackend& backend) {
  if (!backend.Info().selects) return absl::OkStatus();
  const KvRowLayout key = MakeKvRowLayout(KvFormat::kIndexKey, kIndexDim, 0);
  const std::vector<Bf16> keys = Pattern(size_t{kKeys} * kIndexDim, 14);
  const std::vector<Bf16> queries = Pattern(size_t{kIndexHeads} * kIndexDim, 15);
  const std::vector<float> weights = Floats(Pattern(kIndexHeads, 16));
  std::vector<std::byte> inputs(queries.size() * sizeof(Bf16) + weights.size() * sizeof(float));
  std::memcpy(inputs.data(), queries.data(), queries.size() * sizeof(Bf16));
  std::memcpy(inputs.data() + queries.size() * sizeof(Bf16), weights.data(),
              weights.size() * sizeof(float));
  const std::vector<int32_t> begin = {0, kIndexTopK};
  std::vector<int32_t> list(kIndexTopK, -1);
  Stage stage(backend);
  AppendRecord append{};
  append.kv = stage.In(keys);
  append.dtype = DType::kBf16;
  append.kv_row_stride = append.row_dim = append.row_stride = kIndexDim;
  append.page_size = kPage;
  append.rows = kKeys;
  append.format = KvFormat::kIndexKey;
  SelectRecord select{};
  select.inputs = stage.In(inputs);
  select.dtype = DType::kBf16;
  select.indexer = {kIndexHeads, kIndexDim};
  select.row_stride = kIndexDim;
  select.page_size = kPage;
  select.rows = 1;
  select.kv_rows = kKeys;
  select.list_begin = stage.In(begin);
  select.list = stage.Out(list);
  const std::vector<uint32_t> table =
      Table((kKeys + kPage - 1) / kPage, KvPageBytes(key, key.row_bytes, kPage));
  Launch launch;
  launch.page_tables = table;
  launch.appends = {&append, 1};
  launch.selects = {&select, 1};
  MLA_RETURN_IF_ERROR(stage.Run(backend, launch));

  const std::vector<float> stored = Stored(key, keys), wide = Floats(queries);
  std::vector<double> logits(kKeys, 0.0);
  double largest = 0.0;
  for (int32_t i = 0; i < kKeys; ++i) {
    for (int32_t head = 0; head < kIndexHeads; ++head) {
      const float dot =
          Dot(&wide[size_t(head) * kIndexDim], &stored[size_t(i) * kIndexDim], kIndexDim);
      logits[i] += double{weights[head]} * std::max(dot, 0.0f);
    }
    largest = std::max(largest, std::abs(logits[i]));
  }
  std::vector<double> sorted = logits;
  std::nth_element(sorted.begin(), sorted.begin() + kIndexTopK - 1, sorted.end(), std::greater<>());
  const double least = sorted[kIndexTopK - 1] - kOfLogit * largest;
  for (int32_t i = 0; i < kIndexTopK; ++i) {
    const int32_t position = list[i];
    const bool ascends = position >= 0 && position < kKeys && (i == 0 || position > list[i - 1]);
    if (ascends && logits[position] >= least) continue;
    return absl::InternalError(absl::StrCat("indexer: chose position ", position, " as number ", i,
                                            ", none of the best ", kIndexTopK));
  }
  return absl::OkStatus();
}

}  // namespace mla::kernels::hip::self_test
