// Times absorbed decode on this machine's GPU through the backend: GPU time of attention and
// combine by events, the L2 overwritten before each launch, median. The time excludes planning and
// copies, as in the published tables of other libraries. It also times the whole launch on an idle
// device, from the call that submits it until its outputs are visible: with tensors in host memory,
// and with tensors in device memory that another process may map.
//
//   gpu_bench [--heads 16,128] [--batch 1,16,64,128] [--context 1024,4096,16384,65536]
//             [--iterations 30] [--ragged 1] [--query-rows 1] [--max-gb 20] [--image FILE]
//             [--kv bf16|fp8_tensor|fp8_row] [--compute bf16|fp8] [--sparse topk=2048]
//             [--whole 1] [--streamed 1] [--spread 0] [--small-rows N] [--item-rows N]
//             [--peers FILE] [--json FILE]
//
// --compute fp8: 8-bit products over 8-bit rows, if there is a kernel for them. --whole: requests
// of equal length are not cut, so that nothing is merged and only the attention kernel is timed.
// --streamed: queries arrive and outputs leave while the kernel runs, if there is a kernel for
// that. --spread: values of every second group of 128 are divided by 2^N; from 5 on, groups of
// fp8_row have scales of their own. --sparse: each query row has an index list of this many random
// positions, ascending, or of all. --small-rows: most KV rows an item for which batches are cut for
// the smallest blocks (PlanTraits::small; 0: never); --item-rows: KV rows that an item is charged
// (PlanTraits::item_overhead_rows); both instead of the backend's own.
// --peers: times of other libraries (peers/peer_times.h) for shapes "h=H b=B ctx=C", one query row
// over bf16 rows of equal length, and "decode h=H b=B topk=K", lists over rows of fp8_row.
//
// A line per shape: microseconds (median, least), TB/s of KV rows read once, TFLOPS, microseconds
// of the launch from host and from device memory (medians), and the best peer's time over ours.
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
#include "base/status_macros.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "kernels/shared_device_memory.h"
#include "scheduler/planning/planner.h"
#include "tests/bench/gpu/gpu_programs.h"
#include "tests/bench/gpu/peers/peer_times.h"

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
  int32_t small_rows = -1, item_rows = -1;  // below 0: as the backend has it
  double max_gb = 20.0;
  std::string kv = "bf16", compute = "bf16";  // formats of the rows and of products
  std::string sparse;                         // empty: dense; else topk=N
  int32_t top_k = 0;                          // N of it
  std::string json;                           // file for rows of JSON
  std::string peers;                          // file with times of other libraries
  std::string image;  // file with device code to use instead of the built-in code
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
  Bench(const Flags& flags, kernels::KvFormat format, PeerTimes peers,
        std::unique_ptr<kernels::hip::HipBackend> backend)
      : flags_(flags), format_(format), peers_(std::move(peers)), backend_(std::move(backend)) {}

  absl::Status Setup(const std::vector<Shape>& shapes);
  absl::Status Time(const Shape& shape);
  std::span<const std::string> rows() const { return rows_; }  // rows of JSON
  // Returns how fast the timed shapes are next to the peers; empty without --peers.
  std::string Summary() const { return peers_.empty() ? "" : ratios_.Summary(); }

 private:
  absl::Status FillPool(int64_t bytes);
  void MakeLists(const Shape& shape);
  // Times the kernels alone, or the whole launch on an idle device, with tensors in host or in
  // device memory.
  enum class Timed { kKernels, kHostLaunch, kDeviceLaunch };
  struct Tensors {
    const Bf16* q;
    Bf16* o;
    float* lse;
  };
  absl::StatusOr<Tensors> Place(int64_t packed, bool on_device);
  absl::Status MakeRecords(const Shape& shape, const Tensors& tensors);
  // Returns nanoseconds.
  absl::StatusOr<int64_t> Launch(const Shape& shape, const kernels::PlanView& plan, Timed timed);
  // Median and least microseconds.
  struct Times {
    double us = 0, least_us = 0;
  };
  absl::StatusOr<Times> Repeat(const Shape& shape, const kernels::PlanView& plan, Timed timed);
  void Report(const Shape& shape, const kernels::PlanView& plan, const Times& kernels,
              const Times& launch, const Times& on_device);
  std::string PeerShape(const Shape& shape) const;

  int64_t page_bytes() const { return kPage * row_.row_bytes; }
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
  PeerRatios ratios_;
  const kernels::KvFormat format_;
  const kernels::KvRowLayout row_ = kernels::MakeKvRowLayout(format_, 512, 64);
  const PeerTimes peers_;
  std::unique_ptr<kernels::hip::HipBackend> backend_;
  std::unique_ptr<scheduler::MetadataBuffers> buffers_;
  scheduler::Planner planner_;
  std::unique_ptr<kernels::HostBuffer> q_, o_;
  std::unique_ptr<kernels::SharedDeviceMemory> on_device_;  // queries, then outputs; may be null
  int64_t outputs_at_ = 0;                                  // bytes before the latter
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
  MLA_RETURN_IF_ERROR(backend_->Configure(limits));
  layout_ = kernels::LaunchLayout(*backend_, 0);
  const scheduler::PlanCapacity capacity{1024, 100000, 50000, 100000, 400000};
  MLA_ASSIGN_OR_RETURN(buffers_, scheduler::MetadataBuffers::Create(capacity, *backend_));
  MLA_ASSIGN_OR_RETURN(q_, backend_->AllocateHost(packed * kQueryBytes));
  MLA_ASSIGN_OR_RETURN(o_, backend_->AllocateHost(packed * 516 * 4));
  outputs_at_ = (packed * kQueryBytes + 255) / 256 * 256;
  // Without such memory, launches from device memory are not timed.
  auto shared = backend_->AllocateShared(outputs_at_ + packed * 516 * 4, 0);
  if (shared.ok()) on_device_ = *std::move(shared);
  MLA_ASSIGN_OR_RETURN(
      flush_, kernels::hip::DeviceBuffer::Create(&backend_->runtime(), "flush", kFlushBytes));
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
  const int64_t block = std::min(bytes, kRows * row_.row_bytes);
  MLA_ASSIGN_OR_RETURN(const auto host, backend_->AllocateHost(block));
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  auto* q = reinterpret_cast<Bf16*>(q_->bytes().data());
  for (size_t i = 0; i < q_->bytes().size() / 2; ++i) q[i] = kernels::ToBf16(normal(random));
  std::vector<float> values(kRowDim);
  std::byte* row = host->bytes().data();
  for (int64_t i = 0; i < block / row_.row_bytes; ++i, row += row_.row_bytes) {
    for (float& x : values) x = normal(random);
    for (int32_t k = 0; k < kRowDim; ++k)
      values[k] *= std::ldexp(1.0f, -flags_.spread * (k / 128 % 2));
    kernels::EncodeKvRow(row_, kernels::Fp8Kind::kE4m3Fn, values.data(), kernels::DType::kF32,
                         kLayerScale, {row, row + row_.scales_at});
  }
  if (on_device_ != nullptr) {
    MLA_RETURN_IF_ERROR(backend_->WriteShared(on_device_->bytes().data(), q_->bytes().data(),
                                              static_cast<int64_t>(q_->bytes().size())));
  }
  kernels::hip::GpuRuntime& runtime = backend_->runtime();
  for (int64_t at = 0; at < bytes; at += block) {
    MLA_RETURN_IF_ERROR(runtime.CopyIn(backend_->pool() + at, host->bytes().data(),
                                       std::min(block, bytes - at), backend_->compute_stream()));
  }
  return runtime.Synchronize(backend_->compute_stream());
}

absl::StatusOr<Bench::Tensors> Bench::Place(int64_t packed, bool on_device) {
  const int64_t q_bytes = packed * kQueryBytes, o_bytes = packed * 512 * 2, lse_bytes = packed * 4;
  if (on_device) {
    std::byte* const at = on_device_->bytes().data();
    std::byte* const out = at + outputs_at_;
    const void* const q = layout_.SharedInput(at, q_bytes);
    void* const o = layout_.SharedOutput(out, o_bytes);
    void* const lse = layout_.SharedOutput(out + o_bytes, lse_bytes);
    return Tensors{static_cast<const Bf16*>(q), static_cast<Bf16*>(o), static_cast<float*>(lse)};
  }
  std::byte* const out = o_->bytes().data();
  MLA_ASSIGN_OR_RETURN(const void* const q, layout_.Input(q_->bytes().data(), q_bytes));
  MLA_ASSIGN_OR_RETURN(void* const o, layout_.Output(out, o_bytes));
  MLA_ASSIGN_OR_RETURN(void* const lse, layout_.Output(out + o_bytes, lse_bytes));
  return Tensors{static_cast<const Bf16*>(q), static_cast<Bf16*>(o), static_cast<float*>(lse)};
}

absl::Status Bench::MakeRecords(const Shape& shape, const Tensors& tensors) {
  const void *lists = nullptr, *begins = nullptr;
  if (flags_.top_k > 0) {
    const auto list_bytes = static_cast<int64_t>(lists_.size()) * 4;
    const auto begin_bytes = static_cast<int64_t>(list_begins_.size()) * 4;
    MLA_ASSIGN_OR_RETURN(lists, layout_.Input(lists_.data(), list_bytes));
    MLA_ASSIGN_OR_RETURN(begins, layout_.Input(list_begins_.data(), begin_bytes));
  }
  records_.assign(shape.batch, {});
  int64_t entry = 0;
  for (int32_t i = 0; i < shape.batch; ++i) {
    kernels::SegmentRecord& r = records_[i];
    const int64_t first = int64_t{i} * flags_.query_rows * shape.heads;
    r.q = tensors.q + first * kRowDim;
    r.o = tensors.o + first * 512;
    r.lse = tensors.lse + first;
    r.q_head_stride = kRowDim;
    r.q_row_stride = int64_t{shape.heads} * kRowDim;
    r.o_head_stride = 512;
    r.o_row_stride = int64_t{shape.heads} * 512;
    r.lse_head_stride = 1;
    r.lse_row_stride = shape.heads;
    r.page_table = entry;
    r.row_stride = row_.row_bytes;
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
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Bench::Launch(const Shape& shape, const kernels::PlanView& plan,
                                      Timed timed) {
  layout_.Clear();
  MLA_ASSIGN_OR_RETURN(
      const Tensors tensors,
      Place(int64_t{shape.batch} * shape.heads * flags_.query_rows, timed == Timed::kDeviceLaunch));
  MLA_RETURN_IF_ERROR(MakeRecords(shape, tensors));
  kernels::Launch launch;
  launch.inputs = layout_.inputs();
  launch.outputs = layout_.outputs();
  launch.absorbed.desc = Desc(shape);
  launch.absorbed.segments = records_;
  launch.absorbed.plan = plan;
  // Overwrites the L2 and keeps the device busy while the host enqueues.
  kernels::hip::GpuRuntime& runtime = backend_->runtime();
  MLA_RETURN_IF_ERROR(runtime.Fill(flush_.at(), 0, kFlushBytes, backend_->compute_stream()));
  if (timed != Timed::kKernels) {
    MLA_RETURN_IF_ERROR(runtime.Synchronize(backend_->compute_stream()));
  }
  const auto before = std::chrono::steady_clock::now();
  MLA_RETURN_IF_ERROR(backend_->Submit(0, launch));
  MLA_ASSIGN_OR_RETURN(const int64_t of_kernels, backend_->Wait(0));
  const std::chrono::nanoseconds whole = std::chrono::steady_clock::now() - before;
  return timed == Timed::kKernels ? of_kernels : whole.count();
}

absl::StatusOr<Bench::Times> Bench::Repeat(const Shape& shape, const kernels::PlanView& plan,
                                           Timed timed) {
  std::vector<int64_t> times;
  for (int32_t i = -3; i < flags_.iterations; ++i) {  // the first three warm up
    MLA_ASSIGN_OR_RETURN(const int64_t ns, Launch(shape, plan, timed));
    if (i >= 0) times.push_back(ns);
  }
  std::sort(times.begin(), times.end());
  if (times.empty()) return absl::InvalidArgumentError("--iterations: got 0, want 1 or more");
  return Times{static_cast<double>(times[times.size() / 2]) / 1e3,
               static_cast<double>(times[0]) / 1e3};
}

std::string Bench::PeerShape(const Shape& shape) const {
  if (flags_.ragged || flags_.whole || flags_.query_rows != 1) return "";
  if (flags_.top_k > 0) {
    if (format_ != kernels::KvFormat::kFp8Row) return "";
    return absl::StrFormat("decode h=%d b=%d topk=%d", shape.heads, shape.batch, flags_.top_k);
  }
  if (format_ != kernels::KvFormat::kBf16) return "";
  return absl::StrFormat("h=%d b=%d ctx=%d", shape.heads, shape.batch, shape.context);
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
  MLA_RETURN_IF_ERROR(backend_->Submit(0, tables));
  MLA_RETURN_IF_ERROR(backend_->Wait(0).status());

  const kernels::AttentionDesc desc = Desc(shape);
  MLA_RETURN_IF_ERROR(backend_->CanRun(desc));
  std::vector<scheduler::PlanSegment> requests;
  for (const int32_t n : shape.lengths) {
    const bool sparse = flags_.top_k > 0;
    requests.push_back(
        {flags_.query_rows, sparse ? std::min(n, flags_.top_k) : n, shape.heads, !sparse});
  }
  if (flags_.top_k > 0) MakeLists(shape);
  kernels::PlanTraits traits = backend_->Traits(desc);
  if (flags_.item_rows >= 0) traits.item_overhead_rows = flags_.item_rows;
  if (flags_.whole) traits.item_overhead_rows = kNeverCutRows;
  kernels::SmallBatches& small = traits.small;
  if (flags_.small_rows >= 0) small.unit_kv_rows = flags_.small_rows;
  auto plan = planner_.Build(requests, traits, *buffers_);
  if (!plan.ok()) return plan.status();
  Times times[3];
  for (const Timed timed : {Timed::kKernels, Timed::kHostLaunch, Timed::kDeviceLaunch}) {
    if (timed == Timed::kDeviceLaunch && on_device_ == nullptr) continue;
    MLA_ASSIGN_OR_RETURN(times[static_cast<int>(timed)], Repeat(shape, *plan, timed));
  }
  Report(shape, *plan, times[0], times[1], times[2]);
  return absl::OkStatus();
}

void Bench::Report(const Shape& shape, const kernels::PlanView& plan, const Times& kernels,
                   const Times& launch, const Times& on_device) {
  // The heads of all query rows use a KV row. With lists, only the query row whose list names it
  // does.
  const int32_t meets = flags_.top_k > 0 ? 1 : flags_.query_rows;
  const double flop = 2.0 * static_cast<double>(shape.rows) * shape.heads * meets * (576 + 512);
  const std::string name = PeerShape(shape);
  const PeerTime* const peer = name.empty() ? nullptr : peers_.Best(name);
  if (peer != nullptr) ratios_.Add(name, peer->us / kernels.us);
  std::printf(
      "%s%s%sh=%d b=%d ctx=%d%s q=%d: %.1f us (least %.1f) %.2f TB/s %.0f TFLOPS, launch from host "
      "memory %.1f us, from device memory %s, %zu items, %zu merged tiles%s\n",
      format_ == kernels::KvFormat::kBf16 ? "" : (flags_.kv + " ").c_str(),
      flags_.compute == "fp8" ? "products " : "",
      flags_.top_k > 0 ? (flags_.sparse + " ").c_str() : "", shape.heads, shape.batch,
      shape.context, flags_.ragged ? " ragged" : "", flags_.query_rows, kernels.us,
      kernels.least_us, static_cast<double>(shape.rows * row_.row_bytes) / kernels.us / 1e6,
      flop / kernels.us / 1e6, launch.us,
      on_device.us > 0 ? absl::StrFormat("%.1f us", on_device.us).c_str() : "not timed",
      plan.work_info.size(), plan.reduce_final_map.size(),
      peer == nullptr
          ? ""
          : absl::StrFormat(", %.2f of %s (%.1f us)", peer->us / kernels.us, peer->peer, peer->us)
                .c_str());
  std::fflush(stdout);
  rows_.push_back(absl::StrFormat(
      R"({"bench": "gpu_decode", "kv": "%s", "compute": "%s", "heads": %d, "batch": %d, )"
      R"("context": %d, "ragged": %s, "query_rows": %d, "merged_tiles": %d, "us": %.1f, )"
      R"("least_us": %.1f, "tflops": %.0f, "launch_us": %.1f, "device_launch_us": %.1f%s})",
      flags_.kv, flags_.compute, shape.heads, shape.batch, shape.context,
      flags_.ragged ? "true" : "false", flags_.query_rows, plan.reduce_final_map.size(), kernels.us,
      kernels.least_us, flop / kernels.us / 1e6, launch.us, on_device.us,
      peer == nullptr ? "" : ", " + peer->JsonFields(kernels.us)));
}

// Checks flags that depend on each other, and reads top_k.
absl::StatusOr<kernels::KvFormat> CheckFlags(Flags* flags) {
  const auto* const format =
      std::find_if(std::begin(kernels::kKvFormats), std::end(kernels::kKvFormats),
                   [&](kernels::KvFormat f) { return Name(f) == flags->kv; });
  if (format == std::end(kernels::kKvFormats)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--kv: got '%s', want bf16, fp8_tensor or fp8_row", flags->kv));
  }
  if (flags->compute != "bf16" && (flags->compute != "fp8" || flags->kv == "bf16")) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--compute: got '%s', want bf16, or fp8 with rows of 8 bits", flags->compute));
  }
  absl::string_view top_k = flags->sparse;
  if (!top_k.empty() && (!absl::ConsumePrefix(&top_k, "topk=") ||
                         !absl::SimpleAtoi(top_k, &flags->top_k) || flags->top_k < 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--sparse: got '%s', want topk=N", flags->sparse));
  }
  return *format;
}

absl::Status Run(const Flags& flags, kernels::KvFormat format, PeerTimes peers) {
  MLA_ASSIGN_OR_RETURN(auto backend, AnyGpu(flags.image));
  const int64_t row_bytes = kernels::MakeKvRowLayout(format, 512, 64).row_bytes;
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
  Bench bench(flags, format, std::move(peers), std::move(backend));
  MLA_RETURN_IF_ERROR(bench.Setup(shapes));
  for (const Shape& shape : shapes) MLA_RETURN_IF_ERROR(bench.Time(shape));
  if (const std::string summary = bench.Summary(); !summary.empty()) {
    std::printf("%s\n", summary.c_str());
  }
  return WriteJsonRows(flags.json, bench.rows());
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
                        {"--streamed", &flags.streamed}, {"--small-rows", &flags.small_rows},
                        {"--peers", &flags.peers},       {"--item-rows", &flags.item_rows}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  absl::StatusOr<kernels::KvFormat> format = s.ok() ? CheckFlags(&flags) : s;
  absl::StatusOr<PeerTimes> peers = PeerTimes();
  if (format.ok() && !flags.peers.empty()) peers = PeerTimes::Read(flags.peers);
  s = format.ok() ? peers.status() : format.status();
  const int failure = s.ok() ? 1 : 2;  // 2: flags
  if (s.ok()) s = Run(flags, *format, *std::move(peers));
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : failure;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
