#include "tests/conformance/sparse/window_workload.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/host_memory/host_backend.h"
#include "kernels/reference/reference_attention.h"

namespace mla::conformance {
namespace {

using kernels::AttentionBackend;
using kernels::DType;
using kernels::KvFormat;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr uint32_t kNowhere = 0xffffffff;
constexpr int64_t kPoolBytes = 64 << 20;
constexpr int32_t kTableEntries = 4096;
constexpr int32_t kMostRequests = 8;
constexpr float kLayerScale = 1.0f / 50;
constexpr float kSoftmaxScale = 0.25f;

// Source of random requests.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int32_t Of(std::vector<int32_t> values) { return values[random_() % values.size()]; }
  bool Once(uint64_t in) { return random_() % in == 0; }
  WindowRequest Request() {
    WindowRequest r;
    r.window = Of({1, 8, 8, 33, 128});
    r.ratio = Of({0, 1, 4, 4, 8, 128});
    r.page = Of({1, 4, 64});
    r.entry_page = Of({1, 2, 16});
    r.q_rows = Of({1, 1, 2, 3, 6, 7});
    r.cached = Of({0, 1, 7, 130, 300});
    if (r.q_rows == 7) r.cached = 0;
    r.lists = static_cast<WindowLists>(random_() % 4);
    r.sinks = static_cast<WindowSinks>(random_() % 4);
    r.nan = Once(9);
    return r;
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace

std::string ToString(const WindowCase& c) {
  std::string text =
      absl::StrCat("window seed ", c.seed, " heads ", c.heads, " row ", c.latent, "+", c.rope, " ",
                   Name(c.rows), "/", Name(c.entries), " units ", c.units);
  for (const WindowRequest& r : c.requests) {
    absl::StrAppend(&text, " [window ", r.window, " ratio ", r.ratio, " pages ", r.page, "/",
                    r.entry_page, " cached ", r.cached, " q ", r.q_rows, " lists ",
                    static_cast<int>(r.lists), " sinks ", static_cast<int>(r.sinks),
                    r.nan ? " nan]" : "]");
  }
  return text;
}

std::vector<WindowCase> WindowCases() {
  std::vector<WindowCase> cases;
  Draw draw(11);
  const std::vector<std::pair<KvFormat, KvFormat>> formats = {
      {KvFormat::kFp8Page, KvFormat::kFp8Page}, {KvFormat::kBf16, KvFormat::kBf16},
      {KvFormat::kFp8Page, KvFormat::kBf16},    {KvFormat::kBf16, KvFormat::kFp8Page},
      {KvFormat::kFp8Row, KvFormat::kFp8Page},  {KvFormat::kFp8Tensor, KvFormat::kFp8Tensor}};
  for (uint64_t i = 0; i < 72; ++i) {
    WindowCase c;
    c.seed = i + 1;
    c.heads = draw.Of({8, 20, 64, 1, 3});
    const bool wide = i % 12 == 0;
    c.latent = wide ? 448 : draw.Of({64, 96, 40});
    c.rope = wide ? 64 : draw.Of({16, 8});
    if (wide) c.heads = 4;
    std::tie(c.rows, c.entries) = formats[i % formats.size()];
    c.q = draw.Once(3) ? DType::kF32 : DType::kBf16;
    c.o = draw.Once(2) ? DType::kF32 : DType::kBf16;
    c.units = draw.Of({1, 2, 7, 40});
    const int32_t count = draw.Of({1, 2, 3});
    for (int32_t k = 0; k < count; ++k) c.requests.push_back(draw.Request());
    cases.push_back(c);
  }
  return cases;
}

std::vector<WindowCase> WideWindowCases(int32_t count, uint64_t seed) {
  std::vector<WindowCase> cases;
  Draw draw(seed);
  for (int32_t i = 0; i < count; ++i) {
    WindowCase c;
    c.seed = seed << 32 | static_cast<uint32_t>(i);  // other seeds have other cases
    // 72 and 127 do not fill a tile of 64 or 128 packed rows.
    c.heads = draw.Of({8, 16, 20, 64, 128, 1, 72, 127});
    c.latent = 448;
    c.rope = 64;
    c.rows = c.entries = i % 3 == 0 ? KvFormat::kBf16 : KvFormat::kFp8Page;
    c.o = draw.Once(2) ? DType::kF32 : DType::kBf16;
    c.units = draw.Of({1, 2, 7, 40});
    const int32_t requests = draw.Of({1, 2, 3});
    for (int32_t k = 0; k < requests; ++k) c.requests.push_back(draw.Request());
    cases.push_back(c);
  }
  return cases;
}

std::vector<WindowCase> DirectedWindowCases() {
  using enum WindowLists;
  constexpr auto kAny = WindowSinks::kAny;
  // window, ratio, page, entry_page, cached, q_rows, lists
  const std::vector<std::vector<WindowRequest>> launches = {
      {{64, 0, 64, 1, 63, 1, kNone, kAny}, {64, 0, 64, 1, 64, 1, kNone, kAny}},
      {{64, 0, 64, 1, 62, 1, kNone, kAny}, {32, 4, 4, 2, 31, 1, kNone, kAny}},
      {{33, 4, 3, 5, 130, 2, kNone, kAny}, {33, 4, 3, 4, 95, 1, kSome, kAny}},
      {{8, 4, 4, 3, 127, 3, kHoles, kAny}, {1, 1, 7, 7, 0, 1, kNone, kAny}},
      {{128, 2, 64, 16, 127, 1, kNone, kAny}, {1, 1, 1, 1, 30, 2, kTwice, kAny}},
      {{33, 1, 5, 3, 31, 1, kTwice, kAny}, {8, 8, 6, 2, 55, 7, kTwice, kAny}},
  };
  constexpr int32_t kHeads[] = {64, 128, 1, 72};
  std::vector<WindowCase> cases;
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp8Page}) {
    for (const std::vector<WindowRequest>& requests : launches) {
      WindowCase c;
      c.seed = (uint64_t{9} << 40) + cases.size();
      // Each launch has other heads in the other format.
      c.heads = kHeads[(cases.size() + cases.size() / launches.size()) % std::size(kHeads)];
      c.latent = 448;
      c.rope = 64;
      c.rows = c.entries = format;
      c.o = cases.size() % 2 == 0 ? DType::kBf16 : DType::kF32;
      c.units = static_cast<int32_t>(1 + cases.size() % 3);
      c.requests = requests;
      cases.push_back(c);
    }
  }
  return cases;
}

kernels::BackendLimits WindowLimits() {
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = kPoolBytes;
  limits.page_table_entries = kTableEntries;
  limits.launch_slots = 1;
  limits.launch_requests = kMostRequests;
  limits.launch_rows = 256;
  limits.launch_packed_rows = 1 << 14;
  limits.max_o_dim = 512;
  limits.partial_rows = 1 << 14;
  limits.work_items = limits.reduce_partials = 1 << 14;
  limits.reduce_tiles = 1 << 12;
  limits.max_top_k = 64;
  limits.max_geometry = {128, 448, 64, 0, 0};
  limits.table_ranges = 1;
  limits.staging_in_bytes = limits.staging_out_bytes = 16 << 20;
  limits.slot_workspace_bytes = 1 << 20;
  return limits;
}

WindowWorkload::WindowWorkload(const WindowCase& c) : c_(c), random_(c.seed) {
  for (const WindowRequest& r : c.requests) Make(r);
  group_bytes_ = (group_bytes_ + kernels::kPageGranuleBytes - 1) / kernels::kPageGranuleBytes *
                 kernels::kPageGranuleBytes;
  std::vector<uint32_t*> pages;
  for (uint32_t& entry : table_) {
    if (entry == 0) pages.push_back(&entry);
  }
  std::shuffle(pages.begin(), pages.end(), random_);
  for (size_t i = 0; i < pages.size(); ++i) {
    *pages[i] = static_cast<uint32_t>(int64_t(i) * group_bytes_ / kernels::kPageGranuleBytes);
  }
}

kernels::AttentionDesc WindowWorkload::Desc() const {
  kernels::AttentionDesc desc;
  desc.geometry = {c_.heads, c_.latent, c_.rope, 0, 0};
  desc.attention = kernels::AttentionKind::kWindow;
  desc.kv_format = c_.rows;
  desc.entry_format = c_.entries;
  desc.q_dtype = c_.q;
  desc.o_dtype = c_.o;
  return desc;
}

absl::Status WindowWorkload::Place(kernels::LaunchLayout* layout, Tensors* t, Places* at) const {
  absl::Status status;
  const auto take = [&status](auto place) {
    status.Update(place.status());
    return place.ok() ? *place : nullptr;
  };
  const auto input = [&](const auto& v) {
    return take(layout->Input(v.data(), static_cast<int64_t>(v.size() * sizeof(v[0]))));
  };
  const auto output = [&](auto& v) {
    return take(layout->Output(v.data(), static_cast<int64_t>(v.size() * sizeof(v[0]))));
  };
  *at = {input(t->rows), input(t->entries), input(t->narrow_q),  input(t->sinks),
         input(t->list), input(t->begin),   output(t->narrow_o), output(t->lse)};
  return status;
}

absl::Status WindowWorkload::Run(AttentionBackend& backend, const PlanBuilder& plan, int32_t units,
                                 int64_t only) {
  const kernels::AttentionDesc desc = Desc();
  if (absl::Status s = backend.CanRun(desc); !s.ok()) return s;
  kernels::LaunchLayout layout(backend, 0);
  layout.Reserve(8 * tensors_.size(), 4 * tensors_.size());
  std::vector<kernels::SegmentRecord> segments;
  std::vector<kernels::WindowRecord> windows;
  std::vector<kernels::AppendRecord> appends;
  std::vector<PlanShape> shapes;
  std::vector<bool> ran(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (only >= 0 && static_cast<int64_t>(i) != only) continue;
    ran[i] = true;
    const WindowRequest& r = c_.requests[i];
    Tensors& t = tensors_[i];
    t.narrow_q = Narrowed(t.q, c_.q);
    t.narrow_o.assign(t.q.size() * kernels::ElementSize(c_.o), std::byte{0x11});
    t.lse.assign(static_cast<size_t>(r.q_rows) * c_.heads, 7.0f);
    Places places;
    if (absl::Status s = Place(&layout, &t, &places); !s.ok()) return s;
    AddAppends(r, t, places, &appends);
    segments.push_back(Segment(r, t, places));
    windows.push_back(
        {r.window, r.ratio, t.entry_table, kEntryOffset, t.entry_stride, r.entry_page,
         r.sinks == WindowSinks::kNone ? nullptr : static_cast<const float*>(places.sinks)});
    shapes.push_back({r.q_rows, t.longest, c_.heads, false});
  }
  kernels::PlanTraits traits = backend.Traits(desc);
  if (traits.max_q_rows_per_tile != 1) return absl::InternalError("tiles of several query rows");
  traits.units = units;
  auto planned = plan(shapes, traits);
  if (!planned.ok()) return planned.status();
  const kernels::TableRange all{0, static_cast<int64_t>(table_.size())};
  kernels::Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  launch.page_tables = table_;
  launch.table_changes = {&all, 1};
  launch.appends = appends;
  launch.absorbed.desc = desc;
  launch.absorbed.segments = segments;
  launch.absorbed.windows = windows;
  launch.absorbed.plan = *planned;
  if (absl::Status s = backend.Submit(0, launch); !s.ok()) return s;
  if (absl::Status s = backend.Wait(0).status(); !s.ok()) return s;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!ran[i]) continue;
    Tensors& t = tensors_[i];
    t.o.resize(t.q.size());
    for (size_t k = 0; k < t.o.size(); ++k) {
      t.o[k] = kernels::LoadElement(t.narrow_o.data(), c_.o, static_cast<int64_t>(k));
    }
  }
  return absl::OkStatus();
}

absl::Status WindowWorkload::Check() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    for (int32_t row = 0; row < c_.requests[i].q_rows; ++row) {
      for (int32_t head = 0; head < c_.heads; ++head) {
        if (absl::Status s = CheckRow(i, row, head); !s.ok()) return s;
      }
    }
  }
  return absl::OkStatus();
}

void WindowWorkload::Make(const WindowRequest& r) {
  Tensors& t = tensors_.emplace_back();
  const int32_t visible = r.cached + r.q_rows, entries = Whole(r, r.q_rows - 1);
  t.rows.assign(static_cast<size_t>(visible) * dim(), kNaN);
  t.entries.assign(static_cast<size_t>(entries) * dim(), kNaN);
  t.q.resize(static_cast<size_t>(r.q_rows) * c_.heads * dim());
  for (float& value : t.q) value = 0.4f * Normal();
  for (int32_t head = 0; head < c_.heads; ++head) {
    t.sinks.push_back(r.sinks == WindowSinks::kInfinite        ? kInf
                      : r.sinks == WindowSinks::kMinusInfinite ? -kInf
                                                               : 3.0f * Normal());
  }
  MakeLists(r, &t);
  const int32_t first = std::max(0, r.cached + 1 - r.window);
  for (int32_t row = first; row < visible; ++row) Fill(&t.rows, row);
  std::set<int32_t> chosen;
  for (const std::multiset<int32_t>& of_row : t.chosen) chosen.insert(of_row.begin(), of_row.end());
  for (const int32_t entry : chosen) Fill(&t.entries, entry);
  if (r.nan) t.rows[static_cast<size_t>(r.cached) * dim() + 1] = kNaN;
  t.stored_rows = Stored(t.rows, c_.rows);
  t.stored_entries = Stored(t.entries, c_.entries);
  // Pages before the window have been freed.
  t.row_table = Table((visible + r.page - 1) / r.page, first / r.page);
  t.entry_table = Table((entries + r.entry_page - 1) / r.entry_page, 0);
  const int64_t gap = random_() % 2 == 0 ? 0 : 16;
  t.row_stride = Layout(c_.rows).row_bytes + gap;
  t.entry_stride = Layout(c_.entries).row_bytes + gap;
  for (const auto& [format, stride, rows] :
       {std::tuple(c_.rows, t.row_stride, r.page),
        std::tuple(c_.entries, t.entry_stride, r.entry_page)}) {
    group_bytes_ =
        std::max(group_bytes_, kEntryOffset + kernels::KvPageBytes(Layout(format), stride, rows));
  }
}

void WindowWorkload::MakeLists(const WindowRequest& r, Tensors* t) {
  t->begin.push_back(3);
  for (int32_t row = 0; row < r.q_rows; ++row) {
    const int32_t whole = Whole(r, row);
    std::vector<int32_t> all(static_cast<size_t>(whole));
    std::iota(all.begin(), all.end(), 0);
    if (r.lists != WindowLists::kNone) {
      std::shuffle(all.begin(), all.end(), random_);
      all.resize(r.lists == WindowLists::kEmpty || whole == 0 ? 0 : 1 + random_() % whole);
    }
    if (r.lists == WindowLists::kTwice) {
      const std::vector<int32_t> once = all;
      all.insert(all.end(), once.begin(), once.end());
      std::shuffle(all.begin(), all.end(), random_);
    }
    t->chosen.emplace_back(all.begin(), all.end());
    if (r.lists == WindowLists::kHoles) {
      const int32_t none[] = {-1, whole, whole + 1000, INT32_MAX, INT32_MIN};
      for (const int32_t entry : none) {
        all.insert(all.begin() + static_cast<int64_t>(random_() % (all.size() + 1)), entry);
      }
    }
    t->list.insert(t->list.end(), all.begin(), all.end());
    t->begin.push_back(3 + static_cast<int32_t>(t->list.size()));
    const int32_t held = std::min(r.window, r.cached + row + 1);
    t->longest = std::max(t->longest, held + static_cast<int32_t>(all.size()));
  }
}

// Sizes vary widely, so that using another row's scale shows.
void WindowWorkload::Fill(std::vector<float>* values, int32_t row) {
  for (int32_t i = 0; i < dim(); ++i) {
    const float size = std::ldexp(1.0f, static_cast<int>((row * 7 + i / 16) % 5) - 3);
    (*values)[static_cast<size_t>(row) * dim() + i] = size * Normal();
  }
}

std::vector<float> WindowWorkload::Stored(const std::vector<float>& sent, KvFormat format) const {
  const kernels::KvRowLayout at = Layout(format);
  std::vector<std::byte> page(static_cast<size_t>(at.row_bytes + at.page_scales_bytes));
  const std::byte* const first = page.data();
  std::vector<float> stored(sent.size());
  for (size_t row = 0; row < sent.size(); row += static_cast<size_t>(dim())) {
    EncodeKvRow(at, kernels::kHostFp8, &sent[row], DType::kF32, kLayerScale,
                KvRowIn(at, page.data(), at.row_bytes, 1, 0));
    DecodeKvRow(at, kernels::kHostFp8, kLayerScale, KvRowIn(at, first, at.row_bytes, 1, 0),
                &stored[row]);
  }
  return stored;
}

int64_t WindowWorkload::Table(int32_t pages, int32_t gone) {
  const auto first = static_cast<int64_t>(table_.size());
  for (int32_t page = 0; page < pages; ++page) table_.push_back(page < gone ? kNowhere : 0);
  table_.push_back(kNowhere);
  return first;
}

std::vector<std::byte> WindowWorkload::Narrowed(const std::vector<float>& values,
                                                DType dtype) const {
  std::vector<std::byte> bytes(values.size() * kernels::ElementSize(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    kernels::StoreElement(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
  }
  return bytes;
}

void WindowWorkload::AddAppends(const WindowRequest& r, const Tensors& t, const Places& at,
                                std::vector<kernels::AppendRecord>* to) const {
  kernels::AppendRecord record{};
  record.dtype = DType::kF32;
  record.kv_row_stride = dim();
  record.row_dim = dim();
  record.rope_dim = c_.rope;
  record.kv_scale = kLayerScale;
  record.page_table = t.row_table;
  record.layer_offset = kRowOffset;
  record.row_stride = t.row_stride;
  record.page_size = r.page;
  record.first_position = std::max(0, r.cached + 1 - r.window) / r.page * r.page;
  record.rows = r.cached + r.q_rows - record.first_position;
  record.kv = static_cast<const float*>(at.rows) + int64_t{record.first_position} * dim();
  record.format = c_.rows;
  to->push_back(record);
  record.page_table = t.entry_table;
  record.layer_offset = kEntryOffset;
  record.row_stride = t.entry_stride;
  record.page_size = r.entry_page;
  record.first_position = 0;
  record.rows = static_cast<int32_t>(t.entries.size()) / dim();
  record.kv = at.entries;
  record.format = c_.entries;
  to->push_back(record);
}

kernels::SegmentRecord WindowWorkload::Segment(const WindowRequest& r, const Tensors& t,
                                               const Places& at) const {
  kernels::SegmentRecord s{};
  s.q = at.q;
  s.o = at.o;
  s.lse = static_cast<float*>(at.lse);
  s.q_head_stride = s.o_head_stride = dim();
  s.q_row_stride = s.o_row_stride = int64_t{dim()} * c_.heads;
  s.lse_row_stride = c_.heads;
  s.lse_head_stride = 1;
  s.page_table = t.row_table;
  s.layer_offset = kRowOffset;
  s.row_stride = t.row_stride;
  s.page_size = r.page;
  s.q_rows = r.q_rows;
  s.kv_rows = r.cached + r.q_rows;
  s.num_heads = c_.heads;
  s.weights_slot = -1;
  s.softmax_scale = kSoftmaxScale;
  s.causal = 1;
  s.kv_scale = kLayerScale;
  if (r.lists == WindowLists::kNone) return s;
  s.list = static_cast<const int32_t*>(at.list);
  s.list_begin = static_cast<const int32_t*>(at.begin);
  return s;
}

absl::Status WindowWorkload::CheckRow(size_t index, int32_t row, int32_t head) const {
  const WindowRequest& r = c_.requests[index];
  const Tensors& t = tensors_[index];
  const size_t packed = static_cast<size_t>(row) * c_.heads + head;
  std::vector<const float*> keys;
  const int32_t visible = r.cached + row + 1;
  for (int32_t p = std::max(0, visible - r.window); p < visible; ++p) {
    keys.push_back(&t.stored_rows[static_cast<size_t>(p) * dim()]);
  }
  for (const int32_t entry : t.chosen[static_cast<size_t>(row)]) {
    keys.push_back(&t.stored_entries[static_cast<size_t>(entry) * dim()]);
  }
  std::vector<double> logits;
  for (const float* key : keys) {
    double dot = 0;
    for (int32_t i = 0; i < dim(); ++i) {
      const float q = t.q[packed * dim() + i];
      dot += double{c_.q == DType::kF32 ? q : kernels::ToFloat(kernels::ToBf16(q))} * key[i];
    }
    logits.push_back(dot * kSoftmaxScale);
  }
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit);
  const double with_sink =
      sum + (r.sinks == WindowSinks::kNone ? 0.0 : std::exp(double{t.sinks[head]}));
  const double lse = std::log(sum);
  const auto wrong = [&](const std::string& what, double got, double want) {
    return absl::InternalError(absl::StrCat("request ", index, " row ", row, " head ", head, ": ",
                                            what, ": got ", got, ", want ", want));
  };
  const double got_lse = t.lse[packed];
  if (std::isnan(lse)) {
    return std::isnan(got_lse) ? absl::OkStatus() : wrong("lse", got_lse, lse);
  }
  if (!(std::abs(got_lse - lse) <= 2e-3 + 1e-5 * std::abs(lse))) return wrong("lse", got_lse, lse);
  double largest = 0;
  std::vector<double> outputs(static_cast<size_t>(dim()));
  for (size_t k = 0; k < keys.size(); ++k) {
    const double weight = std::exp(logits[k]) / with_sink;
    for (size_t i = 0; i < outputs.size(); ++i) {
      largest = std::max(largest, std::abs(double{keys[k][i]}));
      outputs[i] += weight * keys[k][i];
    }
  }
  for (int32_t i = 0; i < dim(); ++i) {
    const double want = outputs[static_cast<size_t>(i)];
    const double got = t.o[packed * dim() + i];
    if (!(std::abs(got - want) <= 4e-3 * largest + 8e-3 * std::abs(want))) {
      return wrong(absl::StrCat("column ", i), got, want);
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> RunWindows(AttentionBackend& backend, std::span<const PlanBuilder> plans,
                                    std::span<const WindowCase> cases, bool progress) {
  std::vector<std::string> failures;
  auto last = std::chrono::steady_clock::now();
  const auto done = [&](const char* part) {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double, std::milli> taken = now - last;
    last = now;
    if (progress) std::fprintf(stderr, "  %s: %.1f ms\n", part, taken.count());
  };
  for (const WindowCase& c : cases) {
    if (progress) std::fprintf(stderr, "%s\n", ToString(c).c_str());
    WindowWorkload workload(c);
    done("inputs");
    for (const PlanBuilder& plan : plans) {
      absl::Status s = workload.Run(backend, plan, c.units);
      done("launch");
      if (s.ok()) s = workload.Check();
      done("check");
      if (!s.ok()) failures.push_back(absl::StrCat(ToString(c), ": ", s.message()));
    }
  }
  return failures;
}

}  // namespace mla::conformance
