// Times absorbed decode on this machine's GPU through the backend: GPU time of attention and
// combine by events, the L2 overwritten before each launch, median. The time excludes planning and
// copies, as in the published tables of other libraries. It also times the whole launch on an idle
// device, from the call that submits it until its outputs are in host memory.
//
//   gpu_bench [--heads 16,128] [--batch 1,16,64,128] [--context 1024,4096,16384,65536]
//             [--iterations 30] [--ragged 1] [--query-rows 1] [--max-gb 20] [--image FILE]
//             [--kv bf16|fp8_tensor|fp8_row] [--compute bf16|fp8] [--sparse topk=2048]
//             [--whole 1] [--streamed 1] [--spread 0] [--small-rows N] [--json FILE]
//
// --compute fp8: 8-bit products over 8-bit rows, if there is a kernel for them. --whole: requests
// of equal length are not cut, so that nothing is merged and only the attention kernel is timed.
// --streamed: queries arrive and outputs leave while the kernel runs, if there is a kernel for
// that. --spread: values of every second group of 128 are divided by 2^N; from 5 on, groups of
// fp8_row have scales of their own. --sparse: each query row has an index list of this many random
// positions, ascending, or of all. --small-rows: most KV rows an item for which batches are cut for
// the smallest blocks (PlanTraits::small), instead of the backend's own; 0 has none cut that way.
//
// A line per shape: microseconds (median, least), TB/s of KV rows read once, TFLOPS, microseconds
// of the launch as a whole (median).
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "scheduler/planning/metadata_buffers.h"
#include "scheduler/planning/planner.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

using kernels::Bf16;

constexpr int32_t kPage = 64;
constexpr int32_t kRowDim = 576;
constexpr int64_t kQueryBytes = kRowDim * sizeof(Bf16);
constexpr int64_t kFlushBytes = int64_t{256} << 20;
constexpr int32_t kNeverCutRows = 1 << 24;  // overhead of an item, so large that no cut pays

struct Flags {
  std::vector<int32_t> heads{16, 128}, batch{1, 16, 64, 128}, context{1024, 4096, 16384, 65536};
  int32_t iterations = 30;
  bool ragged = false, whole = false, streamed = false;
  int32_t spread = 0;  // binades between groups of a row's values
  int32_t query_rows = 1;
  int32_t small_rows = -1;  // below 0: as the backend has it
  double max_gb = 20.0;
  std::string kv = "bf16";  // format of the rows
  std::string compute = "bf16";
  std::string sparse;  // empty: dense; else topk=N
  int32_t top_k = 0;   // N of it
  std::string json;    // file for rows of JSON
  std::string image;   // file with device code to use instead of the built-in code
};

struct Shape {
  int32_t heads, batch, context;
  std::vector<int32_t> lengths;
  int64_t rows = 0;   // KV rows that all requests attend to, counted a query row each with lists
  int64_t pages = 0;  // for all requests
};

Shape MakeShape(const Flags& flags, int32_t heads, int32_t batch, int32_t context) {
  Shape shape{heads, batch, context, std::vector<int32_t>(batch, context)};
  std::mt19937 random(1);
  std::uniform_real_distribution<double> spread(0.25, 1.75);
  for (int32_t& n : shape.lengths) {
    if (flags.ragged) n = std::max(1, static_cast<int32_t>(context * spread(random)));
    shape.rows += flags.top_k > 0 ? int64_t{flags.query_rows} * std::min(n, flags.top_k) : n;
    shape.pages += (n + kPage - 1) / kPage;
  }
  return shape;
}

constexpr float kLayerScale = 0.01f;

class Bench {
 public:
  Bench(const Flags& flags, kernels::KvFormat format,
        std::unique_ptr<kernels::hip::HipBackend> backend)
      : flags_(flags), format_(format), backend_(std::move(backend)) {}

  absl::Status Setup(const std::vector<Shape>& shapes);
  absl::Status Time(const Shape& shape);
  std::span<const std::string> rows() const { return rows_; }  // rows of JSON

 private:
  absl::Status FillPool(int64_t bytes);
  void MakeLists(const Shape& shape);
  // Nanoseconds of the kernels, and of the whole launch if the device is `idle` before it.
  struct Nanos {
    int64_t kernels = 0, launch = 0;
  };
  absl::Status Launch(const Shape& shape, const kernels::PlanView& plan, bool idle, Nanos* ns);
  absl::Status Repeat(const Shape& shape, const kernels::PlanView& plan, bool idle,
                      std::vector<int64_t>* times);

  int64_t row_bytes() const { return row_.row_bytes; }
  int64_t page_bytes() const { return kPage * row_bytes(); }
  kernels::AttentionDesc Desc(const Shape& shape) const {
    kernels::AttentionDesc desc;
    desc.geometry = {shape.heads, 512, 64, 128, 128};
    desc.kv_format = format_;
    if (flags_.top_k > 0) desc.attention = kernels::AttentionKind::kSparse;
    if (flags_.compute == "fp8") desc.products = kernels::DType::kFp8E4m3;
    desc.streamed = flags_.streamed;
    return desc;
  }

  Flags flags_;
  std::vector<std::string> rows_;
  const kernels::KvFormat format_;
  const kernels::KvRowLayout row_ = kernels::MakeKvRowLayout(format_, 512, 64);
  std::unique_ptr<kernels::hip::HipBackend> backend_;
  std::unique_ptr<scheduler::MetadataBuffers> buffers_;
  scheduler::Planner planner_;
  std::unique_ptr<kernels::HostBuffer> q_, o_;
  kernels::hip::DeviceBuffer flush_;
  kernels::LaunchLayout layout_;
  std::vector<kernels::SegmentRecord> records_;
  // Lists of all query rows of a shape; and for each request in turn, where its rows' lists begin.
  std::vector<int32_t> lists_, list_begins_;
};

absl::Status Bench::Setup(const std::vector<Shape>& shapes) {
  int64_t pages = 0, batch = 0, packed = 0;
  for (const Shape& s : shapes) {
    pages = std::max(pages, s.pages);
    batch = std::max<int64_t>(batch, s.batch);
    packed = std::max<int64_t>(packed, int64_t{s.batch} * s.heads * flags_.query_rows);
  }
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = pages * page_bytes();
  limits.page_table_entries = pages;
  limits.launch_slots = 1;
  limits.launch_requests = static_cast<int32_t>(batch);
  limits.launch_rows = static_cast<int32_t>(batch * flags_.query_rows);
  limits.launch_packed_rows = packed;
  limits.partial_rows = 400000;
  limits.max_o_dim = 512;
  limits.max_top_k = flags_.top_k;
  limits.staging_in_bytes =
      packed * kQueryBytes + (1 << 20) + batch * (flags_.query_rows + 1) * (flags_.top_k + 1) * 4;
  limits.staging_out_bytes = packed * 516 * 4 + (1 << 20);
  limits.work_items = 100000;
  limits.reduce_tiles = 50000;
  limits.reduce_partials = 100000;
  if (absl::Status s = backend_->Configure(limits); !s.ok()) return s;
  layout_ = kernels::LaunchLayout(*backend_, 0);
  const scheduler::PlanCapacity capacity{1024, 100000, 50000, 100000, 400000};
  auto buffers = scheduler::MetadataBuffers::Create(capacity, *backend_);
  if (!buffers.ok()) return buffers.status();
  buffers_ = *std::move(buffers);
  auto q = backend_->AllocateHost(packed * kQueryBytes);
  if (!q.ok()) return q.status();
  q_ = *std::move(q);
  auto o = backend_->AllocateHost(packed * 516 * 4);
  if (!o.ok()) return o.status();
  o_ = *std::move(o);
  auto flush = kernels::hip::DeviceBuffer::Create(&backend_->runtime(), "flush", kFlushBytes);
  if (!flush.ok()) return flush.status();
  flush_ = *std::move(flush);
  return FillPool(limits.kv_pool_bytes);
}

// Makes a different list for each query row.
void Bench::MakeLists(const Shape& shape) {
  std::mt19937 random(4);
  lists_.clear();
  list_begins_.clear();
  std::vector<int32_t> all;
  for (const int32_t context : shape.lengths) {
    list_begins_.push_back(static_cast<int32_t>(lists_.size()));
    for (int32_t row = 0; row < flags_.query_rows; ++row) {
      all.resize(context - flags_.query_rows + row + 1);
      std::iota(all.begin(), all.end(), 0);
      std::sample(all.begin(), all.end(), std::back_inserter(lists_), flags_.top_k, random);
      list_begins_.push_back(static_cast<int32_t>(lists_.size()));
    }
  }
}

// Fills the pool by repeating some rows.
absl::Status Bench::FillPool(int64_t bytes) {
  constexpr int64_t kRows = 16384;
  const int64_t block = std::min(bytes, kRows * row_bytes());
  auto host = backend_->AllocateHost(block);
  if (!host.ok()) return host.status();
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  auto* q = reinterpret_cast<Bf16*>(q_->bytes().data());
  for (size_t i = 0; i < q_->bytes().size() / 2; ++i) q[i] = kernels::ToBf16(normal(random));
  std::vector<float> values(kRowDim);
  std::byte* row = (*host)->bytes().data();
  for (int64_t i = 0; i < block / row_bytes(); ++i, row += row_bytes()) {
    for (float& x : values) x = normal(random);
    for (int32_t k = 0; k < kRowDim; ++k)
      values[k] *= std::ldexp(1.0f, -flags_.spread * (k / 128 % 2));
    kernels::EncodeKvRow(row_, kernels::Fp8Kind::kE4m3Fn, values.data(), kernels::DType::kF32,
                         kLayerScale, {row, row + row_.scales_at});
  }
  kernels::hip::GpuRuntime& runtime = backend_->runtime();
  for (int64_t at = 0; at < bytes; at += block) {
    absl::Status s = runtime.CopyIn(backend_->pool() + at, (*host)->bytes().data(),
                                    std::min(block, bytes - at), backend_->compute_stream());
    if (!s.ok()) return s;
  }
  return runtime.Synchronize(backend_->compute_stream());
}

absl::Status Bench::Launch(const Shape& shape, const kernels::PlanView& plan, bool idle,
                           Nanos* ns) {
  const int64_t packed = int64_t{shape.batch} * shape.heads * flags_.query_rows;
  layout_.Clear();
  auto q = layout_.Input(q_->bytes().data(), packed * kQueryBytes);
  if (!q.ok()) return q.status();
  auto o = layout_.Output(o_->bytes().data(), packed * 512 * 2);
  if (!o.ok()) return o.status();
  auto lse = layout_.Output(o_->bytes().data() + packed * 1024, packed * 4);
  if (!lse.ok()) return lse.status();
  const void *lists = nullptr, *begins = nullptr;
  if (flags_.top_k > 0) {
    auto staged = layout_.Input(lists_.data(), static_cast<int64_t>(lists_.size()) * 4);
    if (!staged.ok()) return staged.status();
    lists = *staged;
    staged = layout_.Input(list_begins_.data(), static_cast<int64_t>(list_begins_.size()) * 4);
    if (!staged.ok()) return staged.status();
    begins = *staged;
  }
  records_.assign(shape.batch, {});
  int64_t entry = 0;
  for (int32_t i = 0; i < shape.batch; ++i) {
    kernels::SegmentRecord& r = records_[i];
    const int64_t first = int64_t{i} * flags_.query_rows * shape.heads;
    r.q = static_cast<const Bf16*>(*q) + first * kRowDim;
    r.o = static_cast<Bf16*>(*o) + first * 512;
    r.lse = static_cast<float*>(*lse) + first;
    r.q_head_stride = kRowDim;
    r.q_row_stride = int64_t{shape.heads} * kRowDim;
    r.o_head_stride = 512;
    r.o_row_stride = int64_t{shape.heads} * 512;
    r.lse_head_stride = 1;
    r.lse_row_stride = shape.heads;
    r.page_table = entry;
    r.row_stride = row_bytes();
    r.kv_scale = kLayerScale;
    r.page_size = kPage;
    r.q_rows = flags_.query_rows;
    r.kv_rows = shape.lengths[i];
    r.num_heads = shape.heads;
    r.softmax_scale = 0.0721687f;
    r.causal = 1;
    if (flags_.top_k > 0) {
      const int64_t at = int64_t{i} * (flags_.query_rows + 1);
      r.list_begin = static_cast<const int32_t*>(begins) + at;
      r.list = static_cast<const int32_t*>(lists) + list_begins_[at];
    }
    entry += (shape.lengths[i] + kPage - 1) / kPage;
  }
  kernels::Launch launch;
  launch.inputs = layout_.inputs();
  launch.outputs = layout_.outputs();
  launch.absorbed.desc = Desc(shape);
  launch.absorbed.segments = records_;
  launch.absorbed.plan = plan;
  // Overwrites the L2 and keeps the device busy while the host enqueues.
  absl::Status s =
      backend_->runtime().Fill(flush_.at(), 0, kFlushBytes, backend_->compute_stream());
  if (s.ok() && idle) s = backend_->runtime().Synchronize(backend_->compute_stream());
  if (!s.ok()) return s;
  const auto before = std::chrono::steady_clock::now();
  if (s = backend_->Submit(0, launch); !s.ok()) return s;
  auto time = backend_->Wait(0);
  if (!time.ok()) return time.status();
  ns->kernels = *time;
  ns->launch = std::chrono::nanoseconds(std::chrono::steady_clock::now() - before).count();
  return absl::OkStatus();
}

// Times of launches, in ascending order.
absl::Status Bench::Repeat(const Shape& shape, const kernels::PlanView& plan, bool idle,
                           std::vector<int64_t>* times) {
  for (int32_t i = -3; i < flags_.iterations; ++i) {  // the first three warm up
    Nanos ns;
    if (absl::Status s = Launch(shape, plan, idle, &ns); !s.ok()) return s;
    if (i >= 0) times->push_back(idle ? ns.launch : ns.kernels);
  }
  std::sort(times->begin(), times->end());
  return absl::OkStatus();
}

absl::Status Bench::Time(const Shape& shape) {
  std::vector<uint32_t> pages(shape.pages);
  std::iota(pages.begin(), pages.end(), 0u);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(3));
  for (int64_t i = 0; i < shape.pages; ++i) {
    pages[i] *= static_cast<uint32_t>(page_bytes() / kernels::kPageGranuleBytes);
  }
  const kernels::TableRange all{0, shape.pages};
  kernels::Launch tables;
  tables.page_tables = pages;
  tables.table_changes = {&all, 1};
  absl::Status s = backend_->Submit(0, tables);
  if (s.ok()) s = backend_->Wait(0).status();
  if (!s.ok()) return s;

  const kernels::AttentionDesc desc = Desc(shape);
  if (absl::Status can = backend_->CanRun(desc); !can.ok()) return can;
  std::vector<scheduler::PlanSegment> requests;
  for (const int32_t n : shape.lengths) {
    const bool sparse = flags_.top_k > 0;
    requests.push_back(
        {flags_.query_rows, sparse ? std::min(n, flags_.top_k) : n, shape.heads, !sparse});
  }
  if (flags_.top_k > 0) MakeLists(shape);
  kernels::PlanTraits traits = backend_->Traits(desc);
  if (flags_.whole) traits.item_overhead_rows = kNeverCutRows;
  kernels::SmallBatches& small = traits.small;
  if (flags_.small_rows >= 0) small.unit_kv_rows = small.lone_kv_rows = flags_.small_rows;
  auto plan = planner_.Build(requests, traits, *buffers_);
  if (!plan.ok()) return plan.status();
  std::vector<int64_t> times, launches;
  s = Repeat(shape, *plan, false, &times);
  if (s.ok()) s = Repeat(shape, *plan, true, &launches);
  if (!s.ok()) return s;
  const double launch_us = static_cast<double>(launches[launches.size() / 2]) / 1e3;
  const double us = static_cast<double>(times[times.size() / 2]) / 1e3;
  // The heads of all query rows use a KV row. With lists, only the query row whose list names it
  // does.
  const int32_t meets = flags_.top_k > 0 ? 1 : flags_.query_rows;
  const double flop = 2.0 * static_cast<double>(shape.rows) * shape.heads * meets * (576 + 512);
  std::printf(
      "%s%s%sh=%d b=%d ctx=%d%s q=%d: %.1f us (least %.1f) %.2f TB/s %.0f TFLOPS, launch %.1f us, "
      "%zu items, %zu merged tiles\n",
      format_ == kernels::KvFormat::kBf16 ? "" : (flags_.kv + " ").c_str(),
      flags_.compute == "fp8" ? "products " : "",
      flags_.top_k > 0 ? (flags_.sparse + " ").c_str() : "", shape.heads, shape.batch,
      shape.context, flags_.ragged ? " ragged" : "", flags_.query_rows, us,
      static_cast<double>(times[0]) / 1e3, static_cast<double>(shape.rows * row_bytes()) / us / 1e6,
      flop / us / 1e6, launch_us, plan->work_info.size(), plan->reduce_final_map.size());
  std::fflush(stdout);
  rows_.push_back(absl::StrFormat(
      R"({"bench": "gpu_decode", "kv": "%s", "compute": "%s", "heads": %d, "batch": %d, )"
      R"("context": %d, "ragged": %s, "query_rows": %d, "merged_tiles": %d, "us": %.1f, )"
      R"("least_us": %.1f, "tflops": %.0f, "launch_us": %.1f})",
      flags_.kv, flags_.compute, shape.heads, shape.batch, shape.context,
      flags_.ragged ? "true" : "false", flags_.query_rows, plan->reduce_final_map.size(), us,
      static_cast<double>(times[0]) / 1e3, flop / us / 1e6, launch_us));
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--heads", &flags.heads},       {"--batch", &flags.batch},
                        {"--context", &flags.context},   {"--iterations", &flags.iterations},
                        {"--ragged", &flags.ragged},     {"--query-rows", &flags.query_rows},
                        {"--max-gb", &flags.max_gb},     {"--image", &flags.image},
                        {"--json", &flags.json},         {"--kv", &flags.kv},
                        {"--sparse", &flags.sparse},     {"--compute", &flags.compute},
                        {"--whole", &flags.whole},       {"--spread", &flags.spread},
                        {"--streamed", &flags.streamed}, {"--small-rows", &flags.small_rows}};
  if (absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known); !s.ok()) {
    std::fprintf(stderr, "%s\n", s.ToString().c_str());
    return 2;
  }
  absl::string_view top_k = flags.sparse;
  const auto* const format =
      std::find_if(std::begin(kernels::kKvFormats), std::end(kernels::kKvFormats),
                   [&](kernels::KvFormat f) { return Name(f) == flags.kv; });
  if (format == std::end(kernels::kKvFormats)) {
    std::fprintf(stderr, "--kv: got '%s', want bf16, fp8_tensor or fp8_row\n", flags.kv.c_str());
    return 2;
  }
  if (flags.compute != "bf16" && (flags.compute != "fp8" || flags.kv == "bf16")) {
    std::fprintf(stderr, "--compute: got '%s', want bf16, or fp8 with rows of 8 bits\n",
                 flags.compute.c_str());
    return 2;
  }
  if (!flags.sparse.empty() && (!absl::ConsumePrefix(&top_k, "topk=") ||
                                !absl::SimpleAtoi(top_k, &flags.top_k) || flags.top_k < 1)) {
    std::fprintf(stderr, "--sparse: got '%s', want topk=N\n", flags.sparse.c_str());
    return 2;
  }
  const int64_t row_bytes = kernels::MakeKvRowLayout(*format, 512, 64).row_bytes;
  auto backend = AnyGpu(flags.image);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    return 1;
  }
  std::vector<Shape> shapes;
  for (const int32_t heads : flags.heads) {
    for (const int32_t context : flags.context) {
      for (const int32_t batch : flags.batch) {
        Shape shape = MakeShape(flags, heads, batch, context);
        if (static_cast<double>(shape.rows * row_bytes) <= flags.max_gb * 1e9) {
          shapes.push_back(std::move(shape));
        }
      }
    }
  }
  Bench bench(flags, *format, *std::move(backend));
  absl::Status s = bench.Setup(shapes);
  for (const Shape& shape : shapes) {
    if (s.ok()) s = bench.Time(shape);
  }
  if (s.ok()) s = WriteJsonRows(flags.json, bench.rows());
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
