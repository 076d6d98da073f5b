// Attention to a window and to entries (kernels/window.h) against an oracle of its own in fp64:
// reference, and every CPU level.
//
// Rows and entries that a query row does not attend to are NaN, and page tables lead nowhere where
// a window has gone by.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/emulation/emulated_levels.h"
#include "kernels/reference/reference_backend.h"
#include "tests/conformance/suite/plan_builder.h"
#include "tests/conformance/suite/scheduler_plan.h"

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
constexpr float kLayerScale = 1.0f / 50;

enum class Lists { kNone, kSome, kHoles, kEmpty };
enum class Sinks { kNone, kAny, kInfinite, kMinusInfinite };

struct Request {
  int32_t window = 8, ratio = 4, page = 4, entry_page = 2, cached = 40, q_rows = 1;
  Lists lists = Lists::kNone;
  Sinks sinks = Sinks::kAny;
  bool nan = false;  // a row that is attended to holds NaN
};

struct Case {
  uint64_t seed = 0;
  int32_t heads = 8, latent = 32, rope = 16;
  KvFormat rows = KvFormat::kBf16, entries = KvFormat::kBf16;
  DType q = DType::kBf16, o = DType::kF32;
  int32_t units = 1;
  std::vector<Request> requests;
};

struct Subject {
  std::string name;
  std::unique_ptr<AttentionBackend> backend;
};

void AddLevel(const kernels::cpu::KernelSet& level, int32_t threads, bool deterministic,
              std::vector<Subject>* subjects) {
  kernels::BackendOptions options;
  options.threads = threads;
  options.pin_threads = false;
  options.spin_us = 0;
  options.deterministic = deterministic;
  auto made = kernels::CpuBackend::CreateWith(level, options);
  ASSERT_TRUE(made.ok());
  subjects->push_back({level.name, *std::move(made)});
}

void Configure(std::vector<Subject>* subjects) {
  for (Subject& subject : *subjects) {
    kernels::BackendLimits limits;
    limits.kv_pool_bytes = kPoolBytes;
    limits.page_table_entries = kTableEntries;
    limits.launch_slots = 1;
    limits.launch_requests = 8;
    limits.launch_rows = 256;
    limits.launch_packed_rows = 1 << 14;
    limits.max_o_dim = 512;
    limits.partial_rows = 1 << 14;
    limits.reduce_tiles = 1 << 12;
    limits.max_top_k = 64;
    limits.max_geometry = {64, 448, 64, 0, 0};
    ASSERT_TRUE(subject.backend->Configure(limits).ok());
  }
}

std::vector<Subject> Subjects() {
  std::vector<Subject> subjects;
  subjects.push_back({"reference", std::make_unique<kernels::ReferenceBackend>()});
  int32_t threads = 1;
  for (const kernels::cpu::KernelSet* level : kernels::cpu::UsableLevels()) {
    AddLevel(*level, threads = threads % 3 + 1, false, &subjects);
  }
  AddLevel(kernels::cpu::kEmulatedAmxKernels, 2, false, &subjects);
  AddLevel(kernels::cpu::kEmulatedAvx512Bf16Kernels, 1, false, &subjects);
  Configure(&subjects);
  return subjects;
}

// What a request is made of, and where it lies.
struct Tensors {
  std::vector<float> rows, entries, q, sinks;  // as sent, NaN where nothing may be read
  std::vector<float> stored_rows, stored_entries;
  std::vector<int32_t> list, begin;       // as SegmentRecord has them
  std::vector<std::set<int32_t>> chosen;  // entries that a query row attends to
  int64_t row_table = 0, entry_table = 0, row_stride = 0, entry_stride = 0;
  int32_t longest = 0;  // places
  std::vector<float> o, lse;
};

class Workload {
 public:
  explicit Workload(const Case& c) : c_(c), random_(c.seed) {
    for (const Request& r : c.requests) Make(r);
    std::vector<uint32_t*> pages;
    for (uint32_t& entry : table_) {
      if (entry == 0) pages.push_back(&entry);
    }
    std::shuffle(pages.begin(), pages.end(), random_);
    for (size_t i = 0; i < pages.size(); ++i) {
      *pages[i] = static_cast<uint32_t>(i * kGroupBytes / kernels::kPageGranuleBytes);
    }
    EXPECT_LE(static_cast<int64_t>(pages.size()) * kGroupBytes, kPoolBytes);
  }

  int32_t dim() const { return c_.latent + c_.rope; }
  const Tensors& first() const { return tensors_[0]; }
  // All requests in one launch, or one of them alone.
  void Run(AttentionBackend& backend, const PlanBuilder& plan, int32_t units, int64_t only = -1) {
    kernels::AttentionDesc desc;
    desc.geometry = {c_.heads, c_.latent, c_.rope, 0, 0};
    desc.attention = kernels::AttentionKind::kWindow;
    desc.kv_format = c_.rows;
    desc.entry_format = c_.entries;
    desc.q_dtype = c_.q;
    desc.o_dtype = c_.o;
    ASSERT_TRUE(backend.CanRun(desc).ok());
    std::vector<kernels::SegmentRecord> segments;
    std::vector<kernels::WindowRecord> windows;
    std::vector<kernels::AppendRecord> appends;
    std::vector<PlanShape> shapes;
    std::vector<std::vector<std::byte>> queries(tensors_.size()), outputs(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (only >= 0 && static_cast<int64_t>(i) != only) continue;
      const Request& r = c_.requests[i];
      Tensors& t = tensors_[i];
      AddAppends(r, t, &appends);
      queries[i] = Narrowed(t.q, c_.q);
      outputs[i].assign(t.q.size() * kernels::ElementSize(c_.o), std::byte{0x11});
      t.lse.assign(static_cast<size_t>(r.q_rows) * c_.heads, 7.0f);
      segments.push_back(Segment(r, t, queries[i].data(), outputs[i].data()));
      windows.push_back({r.window, r.ratio, t.entry_table, kEntryOffset, t.entry_stride,
                         r.entry_page, r.sinks == Sinks::kNone ? nullptr : t.sinks.data()});
      shapes.push_back({r.q_rows, t.longest, c_.heads, false});
    }
    kernels::PlanTraits traits = backend.Traits(desc);
    EXPECT_EQ(traits.max_q_rows_per_tile, 1);
    traits.units = units;
    auto planned = plan(shapes, traits);
    ASSERT_TRUE(planned.ok()) << planned.status();
    kernels::Launch launch;
    launch.page_tables = table_;
    launch.appends = appends;
    launch.absorbed.desc = desc;
    launch.absorbed.segments = segments;
    launch.absorbed.windows = windows;
    launch.absorbed.plan = *planned;
    ASSERT_TRUE(backend.Submit(0, launch).ok());
    ASSERT_TRUE(backend.Wait(0).ok());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (outputs[i].empty()) continue;
      tensors_[i].o.resize(tensors_[i].q.size());
      for (size_t k = 0; k < tensors_[i].o.size(); ++k) {
        tensors_[i].o[k] = kernels::LoadElement(outputs[i].data(), c_.o, static_cast<int64_t>(k));
      }
    }
  }

  void Check() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      for (int32_t row = 0; row < c_.requests[i].q_rows; ++row) {
        for (int32_t head = 0; head < c_.heads; ++head) CheckRow(i, row, head);
        if (testing::Test::HasFailure()) return;
      }
    }
  }

 private:
  static constexpr int64_t kRowOffset = 64, kEntryOffset = 128, kGroupBytes = 64 << 10;

  float Normal() { return normal_(random_); }
  int32_t Whole(const Request& r, int32_t row) const {
    return r.ratio == 0 ? 0 : (r.cached + row + 1) / r.ratio;
  }

  void Make(const Request& r) {
    Tensors& t = tensors_.emplace_back();
    const int32_t visible = r.cached + r.q_rows, entries = Whole(r, r.q_rows - 1);
    t.rows.assign(static_cast<size_t>(visible) * dim(), kNaN);
    t.entries.assign(static_cast<size_t>(entries) * dim(), kNaN);
    t.q.resize(static_cast<size_t>(r.q_rows) * c_.heads * dim());
    for (float& value : t.q) value = 0.4f * Normal();
    for (int32_t head = 0; head < c_.heads; ++head) {
      t.sinks.push_back(r.sinks == Sinks::kInfinite        ? kInf
                        : r.sinks == Sinks::kMinusInfinite ? -kInf
                                                           : 3.0f * Normal());
    }
    MakeLists(r, &t);
    const int32_t first = std::max(0, r.cached + 1 - r.window);
    for (int32_t row = first; row < visible; ++row) Fill(&t.rows, row);
    std::set<int32_t> chosen;
    for (const std::set<int32_t>& of_row : t.chosen) chosen.insert(of_row.begin(), of_row.end());
    for (const int32_t entry : chosen) Fill(&t.entries, entry);
    if (r.nan) t.rows[static_cast<size_t>(r.cached) * dim() + 1] = kNaN;
    t.stored_rows = Stored(t.rows, c_.rows);
    t.stored_entries = Stored(t.entries, c_.entries);
    // Pages before the window have gone.
    t.row_table = Table((visible + r.page - 1) / r.page, first / r.page);
    t.entry_table = Table((entries + r.entry_page - 1) / r.entry_page, 0);
    const int64_t gap = random_() % 2 == 0 ? 0 : 16;
    t.row_stride = Layout(c_.rows).row_bytes + gap;
    t.entry_stride = Layout(c_.entries).row_bytes + gap;
    EXPECT_LE(kRowOffset + kernels::KvPageBytes(Layout(c_.rows), t.row_stride, r.page),
              kGroupBytes);
  }

  void MakeLists(const Request& r, Tensors* t) {
    t->begin.push_back(3);
    for (int32_t row = 0; row < r.q_rows; ++row) {
      const int32_t whole = Whole(r, row);
      std::vector<int32_t> all(static_cast<size_t>(whole));
      std::iota(all.begin(), all.end(), 0);
      if (r.lists != Lists::kNone) {
        std::shuffle(all.begin(), all.end(), random_);
        all.resize(r.lists == Lists::kEmpty || whole == 0 ? 0 : 1 + random_() % whole);
      }
      t->chosen.emplace_back(all.begin(), all.end());
      if (r.lists == Lists::kHoles) {
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

  // Of very different sizes, so that a scale that is not the row's own shows.
  void Fill(std::vector<float>* values, int32_t row) {
    for (int32_t i = 0; i < dim(); ++i) {
      const float size = std::ldexp(1.0f, static_cast<int>((row * 7 + i / 16) % 5) - 3);
      (*values)[static_cast<size_t>(row) * dim() + i] = size * Normal();
    }
  }

  kernels::KvRowLayout Layout(KvFormat format) const {
    return kernels::MakeKvRowLayout(format, c_.latent, c_.rope);
  }

  std::vector<float> Stored(const std::vector<float>& sent, KvFormat format) const {
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

  int64_t Table(int32_t pages, int32_t gone) {
    const auto first = static_cast<int64_t>(table_.size());
    for (int32_t page = 0; page < pages; ++page) table_.push_back(page < gone ? kNowhere : 0);
    table_.push_back(kNowhere);
    return first;
  }

  std::vector<std::byte> Narrowed(const std::vector<float>& values, DType dtype) const {
    std::vector<std::byte> bytes(values.size() * kernels::ElementSize(dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      kernels::StoreElement(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
    }
    return bytes;
  }

  void AddAppends(const Request& r, const Tensors& t, std::vector<kernels::AppendRecord>* to) {
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
    record.kv = t.rows.data() + int64_t{record.first_position} * dim();
    record.format = c_.rows;
    to->push_back(record);
    record.page_table = t.entry_table;
    record.layer_offset = kEntryOffset;
    record.row_stride = t.entry_stride;
    record.page_size = r.entry_page;
    record.first_position = 0;
    record.rows = static_cast<int32_t>(t.entries.size()) / dim();
    record.kv = t.entries.data();
    record.format = c_.entries;
    to->push_back(record);
  }

  kernels::SegmentRecord Segment(const Request& r, Tensors& t, const void* q, void* o) const {
    kernels::SegmentRecord s{};
    s.q = q;
    s.o = o;
    s.lse = t.lse.data();
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
    s.softmax_scale = 0.25f;
    s.causal = 1;
    s.kv_scale = kLayerScale;
    if (r.lists == Lists::kNone) return s;
    s.list = t.list.data();
    s.list_begin = t.begin.data();
    return s;
  }

  void CheckRow(size_t index, int32_t row, int32_t head) const {
    const Request& r = c_.requests[index];
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
      logits.push_back(dot * 0.25);
    }
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit);
    const double with_sink =
        sum + (r.sinks == Sinks::kNone ? 0.0 : std::exp(double{t.sinks[head]}));
    const double lse = std::log(sum);
    SCOPED_TRACE("request " + std::to_string(index) + " row " + std::to_string(row) + " head " +
                 std::to_string(head));
    if (std::isnan(lse)) {
      EXPECT_TRUE(std::isnan(t.lse[packed]));
      return;
    }
    EXPECT_NEAR(t.lse[packed], lse, 2e-3 + 1e-5 * std::abs(lse));
    double largest = 0;
    for (const float* key : keys) {
      for (int32_t i = 0; i < dim(); ++i) largest = std::max(largest, std::abs(double{key[i]}));
    }
    for (int32_t i = 0; i < dim(); ++i) {
      double want = 0;
      for (size_t k = 0; k < keys.size(); ++k) want += std::exp(logits[k]) / with_sink * keys[k][i];
      ASSERT_NEAR(t.o[packed * dim() + i], want, 4e-3 * largest + 8e-3 * std::abs(want)) << i;
    }
  }

  const Case c_;
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  std::vector<uint32_t> table_;
  std::vector<Tensors> tensors_;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  std::mt19937_64 random(11);
  const auto pick = [&](auto of) { return of[random() % of.size()]; };
  using Ints = std::vector<int32_t>;
  const std::vector<std::pair<KvFormat, KvFormat>> formats = {
      {KvFormat::kFp8Page, KvFormat::kFp8Page}, {KvFormat::kBf16, KvFormat::kBf16},
      {KvFormat::kFp8Page, KvFormat::kBf16},    {KvFormat::kBf16, KvFormat::kFp8Page},
      {KvFormat::kFp8Row, KvFormat::kFp8Page},  {KvFormat::kFp8Tensor, KvFormat::kFp8Tensor}};
  for (uint64_t i = 0; i < 72; ++i) {
    Case c;
    c.seed = i + 1;
    c.heads = pick(Ints{8, 20, 64, 1, 3});
    const bool wide = i % 12 == 0;
    c.latent = wide ? 448 : pick(Ints{64, 96, 40});
    c.rope = wide ? 64 : pick(Ints{16, 8});
    if (wide) c.heads = 4;
    std::tie(c.rows, c.entries) = formats[i % formats.size()];
    c.q = random() % 3 == 0 ? DType::kF32 : DType::kBf16;
    c.o = random() % 2 == 0 ? DType::kF32 : DType::kBf16;
    c.units = pick(Ints{1, 2, 7, 40});
    const int count = 1 + static_cast<int>(random() % 3);
    for (int k = 0; k < count; ++k) {
      Request r;
      r.window = pick(Ints{1, 8, 8, 33, 128});
      r.ratio = pick(Ints{0, 1, 4, 4, 8, 128});
      r.page = pick(Ints{1, 4, 64});
      r.entry_page = pick(Ints{1, 2, 16});
      r.q_rows = pick(Ints{1, 1, 2, 3, 6, 7});
      r.cached = pick(Ints{0, 1, 7, 130, 300});
      if (r.q_rows == 7) r.cached = 0;
      r.lists = static_cast<Lists>(random() % 4);
      r.sinks = static_cast<Sinks>(random() % 4);
      r.nan = random() % 9 == 0;
      c.requests.push_back(r);
    }
    cases.push_back(c);
  }
  return cases;
}

TEST(WindowTest, AgreesWithTheOracle) {
  std::vector<Subject> subjects = Subjects();
  ASSERT_GT(subjects.size(), 3u);
  EvenPlanBuilder even;
  const auto evenly = [&even](std::span<const PlanShape> shapes,
                              const kernels::PlanTraits& traits) {
    return even.Build(shapes, traits);
  };
  for (Subject& subject : subjects) {
    const PlanBuilder plans[] = {SchedulerPlanBuilder(*subject.backend), evenly};
    for (const Case& c : Cases()) {
      Workload workload(c);
      for (const PlanBuilder& plan : plans) {
        SCOPED_TRACE(subject.name + " seed " + std::to_string(c.seed));
        workload.Run(*subject.backend, plan, c.units);
        workload.Check();
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// With a deterministic backend.
TEST(WindowTest, ARowAloneIsWhatItIsInCompany) {
  std::vector<Subject> subjects;
  for (const kernels::cpu::KernelSet* level : kernels::cpu::UsableLevels()) {
    AddLevel(*level, 2, true, &subjects);
  }
  Configure(&subjects);
  for (Subject& subject : subjects) {
    const PlanBuilder plan = SchedulerPlanBuilder(*subject.backend);
    for (const Case& c : Cases()) {
      if (c.requests.size() < 2 || c.seed % 3 != 0) continue;
      SCOPED_TRACE(subject.name + " seed " + std::to_string(c.seed));
      Workload together(c), alone(c);
      together.Run(*subject.backend, plan, c.units);
      alone.Run(*subject.backend, plan, 1, 0);
      const Tensors &a = together.first(), &b = alone.first();
      ASSERT_EQ(a.o.size(), b.o.size());
      EXPECT_EQ(std::memcmp(a.o.data(), b.o.data(), a.o.size() * sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)), 0);
    }
  }
}

TEST(SinkFactorTest, TakesWhatTheSinkTakes) {
  EXPECT_DOUBLE_EQ(kernels::SinkFactor(1.5f, 1.5), 0.5);
  EXPECT_EQ(kernels::SinkFactor(-kInf, 0.0), 1.0);
  EXPECT_EQ(kernels::SinkFactor(kInf, 0.0), 0.0);
  EXPECT_EQ(kernels::SinkFactor(kInf, -double{kInf}), 1.0);  // of an output that is 0
}

}  // namespace
}  // namespace mla::conformance
