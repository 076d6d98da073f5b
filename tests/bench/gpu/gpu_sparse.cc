// Times the indexer, and attention with lists or windows, on this machine's GPU, through the
// backend: GPU time by events, the L2 overwritten before each launch, median. The time excludes
// copies.
//
//   gpu_sparse --what indexer [--batch 64] [--context 65536] [--top-k 2048] [--index-heads 64]
//   gpu_sparse --what decode  [...] [--heads 128] [--kv bf16|fp8_tensor|fp8_row]
//   gpu_sparse --what window  [--batch 128] [--context 65536] [--heads 128] [--window 128]
//              [--ratio 4] [--top-k 512] [--kv bf16|fp8_page]
//              [--query-rows 1] [--iterations 30] [--image FILE] [--json FILE]
//
// indexer: logits and the choice. decode: the same, then attention to the chosen rows. window:
// DeepSeek V4's attention to the rows of the window and to the entries of random lists; top-k 0 is
// all entries. A line for each: microseconds (median, least), and for the indexer GB/s of index
// keys.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "scheduler/planning/planner.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

using kernels::AttentionKind;
using kernels::Bf16;
using kernels::KvFormat;

constexpr int32_t kPage = 64;
constexpr int64_t kFlushBytes = int64_t{256} << 20;
constexpr int32_t kWarmUp = 3;

struct Flags {
  std::string what = "indexer", kv = "bf16", image, json;
  int32_t batch = 64, context = 65536, top_k = 2048, index_heads = 64, heads = 128;
  int32_t window = 128, ratio = 4, query_rows = 1, iterations = 30;
};

class Bench {
 public:
  Bench(const Flags& flags, KvFormat format, std::unique_ptr<kernels::hip::HipBackend> backend)
      : flags_(flags), format_(format), backend_(std::move(backend)) {}
  absl::Status Run();

 private:
  bool indexes() const { return flags_.what != "window"; }
  bool attends() const { return flags_.what != "indexer"; }
  bool windowed() const { return flags_.what == "window"; }
  int32_t latent() const { return windowed() ? 448 : 512; }
  int32_t row_dim() const { return latent() + 64; }
  int32_t entries() const { return windowed() ? flags_.context / flags_.ratio : 0; }
  int32_t listed() const {
    const int32_t most = windowed() ? entries() : flags_.context;
    return windowed() && flags_.top_k == 0 ? 0 : std::min(flags_.top_k, most);
  }
  int32_t places() const {
    if (!windowed()) return listed();
    return std::min(flags_.window, flags_.context) + (flags_.top_k == 0 ? entries() : listed());
  }
  int64_t rows() const { return int64_t{flags_.batch} * flags_.query_rows; }
  static int64_t Pages(int32_t positions) { return (positions + kPage - 1) / kPage; }
  // For one request.
  int64_t pages_of_rows() const { return attends() ? Pages(flags_.context) : 0; }
  int64_t pages_of_keys() const { return indexes() ? Pages(flags_.context) : 0; }
  int64_t pages_of_entries() const { return Pages(entries()); }
  int64_t pages() const {
    return flags_.batch * (pages_of_rows() + pages_of_keys() + pages_of_entries());
  }
  int64_t group_bytes() const { return group_bytes_; }

  absl::Status Setup();
  absl::Status FillPool(KvFormat format, int64_t first, int64_t count);
  void MakeInputs();
  absl::Status PublishTables();
  void MakeLists();
  // Addresses of a launch's tensors.
  struct Places {
    const void *q, *inputs, *sinks, *begins;
    void *o, *lse, *lists;
  };
  absl::StatusOr<Places> Place();
  kernels::AttentionDesc Desc() const {
    kernels::AttentionDesc desc;
    desc.geometry = {flags_.heads, latent(), 64, 0, 0};
    desc.kv_format = desc.entry_format = format_;
    desc.attention = windowed() ? AttentionKind::kWindow : AttentionKind::kSparse;
    return desc;
  }
  kernels::SegmentRecord Segment(const Places& at, int32_t request) const;
  kernels::SelectRecord Select(const Places& at, int32_t request) const;
  absl::Status Launch(const kernels::PlanView* plan, int64_t* ns);

  const Flags flags_;
  const KvFormat format_;
  std::unique_ptr<kernels::hip::HipBackend> backend_;
  int64_t group_bytes_ = 0;
  std::unique_ptr<scheduler::MetadataBuffers> buffers_;
  scheduler::Planner planner_;
  std::unique_ptr<kernels::HostBuffer> q_, o_;
  kernels::hip::DeviceBuffer flush_;
  kernels::LaunchLayout layout_;
  std::vector<uint32_t> table_;
  std::vector<int32_t> lists_, begins_;
  std::vector<std::byte> inputs_;  // for the indexer
  std::vector<float> sinks_;
};

absl::Status Bench::Setup() {
  const kernels::KvRowLayout row = kernels::MakeKvRowLayout(format_, latent(), 64);
  const kernels::KvRowLayout key = kernels::MakeKvRowLayout(KvFormat::kIndexKey, 128, 0);
  group_bytes_ = kernels::KvPageBytes(key, key.row_bytes, kPage);
  if (attends()) {
    group_bytes_ = std::max(group_bytes_, kernels::KvPageBytes(row, row.row_bytes, kPage));
  }
  const int64_t granule = kernels::kPageGranuleBytes;
  group_bytes_ = (group_bytes_ + granule - 1) / granule * granule;
  const int64_t packed = rows() * flags_.heads;
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = pages() * group_bytes();
  limits.page_table_entries = pages();
  limits.launch_slots = 1;
  limits.launch_requests = flags_.batch;
  limits.launch_rows = static_cast<int32_t>(rows());
  limits.launch_packed_rows = packed;
  limits.partial_rows = 400000;
  limits.max_o_dim = 512;
  limits.max_top_k = std::max(flags_.top_k, 1);
  limits.staging_in_bytes = packed * 1152 + rows() * (int64_t{flags_.index_heads} * 260 + 4096) +
                            rows() * listed() * 4 + (1 << 20);
  limits.staging_out_bytes = packed * 1028 + (1 << 20);
  limits.slot_workspace_bytes = rows() * listed() * 4 + (1 << 20);
  limits.work_items = 100000;
  limits.reduce_tiles = 50000;
  limits.reduce_partials = 100000;
  limits.table_ranges = 1;
  if (absl::Status s = backend_->Configure(limits); !s.ok()) return s;
  layout_ = kernels::LaunchLayout(*backend_, 0);
  auto buffers =
      scheduler::MetadataBuffers::Create({1024, 100000, 50000, 100000, 400000}, *backend_);
  if (!buffers.ok()) return buffers.status();
  buffers_ = *std::move(buffers);
  auto q = backend_->AllocateHost(packed * 1152);
  auto o = backend_->AllocateHost(packed * 1028);
  if (!q.ok() || !o.ok()) return q.ok() ? o.status() : q.status();
  q_ = *std::move(q);
  o_ = *std::move(o);
  auto flush = kernels::hip::DeviceBuffer::Create(&backend_->runtime(), "flush", kFlushBytes);
  if (!flush.ok()) return flush.status();
  flush_ = *std::move(flush);
  MakeInputs();
  MakeLists();
  const int64_t keys = flags_.batch * pages_of_keys();
  absl::Status s = FillPool(KvFormat::kIndexKey, 0, keys);
  if (s.ok()) s = FillPool(format_, keys, pages() - keys);
  return s.ok() ? PublishTables() : s;
}

void Bench::MakeInputs() {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  auto* queries = reinterpret_cast<Bf16*>(q_->bytes().data());
  for (size_t i = 0; i < q_->bytes().size() / 2; ++i) queries[i] = kernels::ToBf16(normal(random));
  for (int32_t head = 0; head < flags_.heads; ++head) sinks_.push_back(normal(random));
  const kernels::IndexerShape shape{flags_.index_heads, 128};
  inputs_.resize(static_cast<size_t>(rows() * shape.input_bytes(kernels::DType::kBf16)));
  for (int64_t r = 0; indexes() && r < rows(); ++r) {
    std::byte* const row_inputs =
        &inputs_[static_cast<size_t>(r * shape.input_bytes(kernels::DType::kBf16))];
    for (int32_t i = 0; i < flags_.index_heads * 128; ++i) {
      const Bf16 value = kernels::ToBf16(normal(random));
      std::memcpy(row_inputs + i * 2, &value, 2);
    }
    for (int32_t i = 0; i < flags_.index_heads; ++i) {
      const float weight = normal(random);
      std::memcpy(row_inputs + flags_.index_heads * 256 + i * 4, &weight, 4);
    }
  }
}

// Fills groups [first, first + count) by repeating some pages of rows of `format`.
absl::Status Bench::FillPool(KvFormat format, int64_t first, int64_t count) {
  constexpr int64_t kGroups = 256;
  const int64_t groups = std::min(count, kGroups);
  if (groups == 0) return absl::OkStatus();
  auto host = backend_->AllocateHost(static_cast<size_t>(groups * group_bytes()));
  if (!host.ok()) return host.status();
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const bool keys = format == KvFormat::kIndexKey;
  const kernels::KvRowLayout row =
      kernels::MakeKvRowLayout(format, keys ? 128 : latent(), keys ? 0 : 64);
  std::vector<float> values(static_cast<size_t>(row.latent_dim + row.rope_dim));
  for (int64_t group = 0; group < groups; ++group) {
    std::byte* const page = (*host)->bytes().data() + group * group_bytes();
    for (int32_t i = 0; i < kPage; ++i) {
      for (float& x : values) x = normal(random);
      kernels::EncodeKvRow(row, kernels::Fp8Kind::kE4m3Fn, values.data(), kernels::DType::kF32,
                           0.01f, kernels::KvRowIn(row, page, row.row_bytes, kPage, i));
    }
  }
  kernels::hip::GpuRuntime& runtime = backend_->runtime();
  for (int64_t done = 0; done < count; done += groups) {
    const int64_t bytes = std::min(groups, count - done) * group_bytes();
    absl::Status s =
        runtime.CopyIn(backend_->pool() + static_cast<uint64_t>((first + done) * group_bytes()),
                       (*host)->bytes().data(), bytes, backend_->compute_stream());
    if (!s.ok()) return s;
  }
  return runtime.Synchronize(backend_->compute_stream());
}

// Groups of keys come first in the pool. In the table, each request has its pages of rows, keys and
// entries one after the other.
absl::Status Bench::PublishTables() {
  std::vector<uint32_t> groups(static_cast<size_t>(pages()));
  std::iota(groups.begin(), groups.end(), 0u);
  const auto keys_end = groups.begin() + flags_.batch * pages_of_keys();
  std::shuffle(groups.begin(), keys_end, std::mt19937(3));
  std::shuffle(keys_end, groups.end(), std::mt19937(4));
  auto key = groups.begin(), row = keys_end;
  const auto add = [this](auto& from, int64_t count) {
    for (int64_t i = 0; i < count; ++i, ++from) {
      table_.push_back(*from * static_cast<uint32_t>(group_bytes() / kernels::kPageGranuleBytes));
    }
  };
  for (int32_t i = 0; i < flags_.batch; ++i) {
    add(row, pages_of_rows());
    add(key, pages_of_keys());
    add(row, pages_of_entries());
  }
  const kernels::TableRange all{0, pages()};
  kernels::Launch launch;
  launch.page_tables = table_;
  launch.table_changes = {&all, 1};
  absl::Status s = backend_->Submit(0, launch);
  return s.ok() ? backend_->Wait(0).status() : s;
}

void Bench::MakeLists() {
  std::mt19937 random(4);
  std::vector<int32_t> all;
  for (int32_t request = 0; request < flags_.batch; ++request) {
    begins_.push_back(static_cast<int32_t>(lists_.size()));
    for (int32_t row = 0; row < flags_.query_rows; ++row) {
      const int32_t visible = flags_.context - flags_.query_rows + row + 1;
      all.resize(static_cast<size_t>(windowed() ? visible / flags_.ratio : visible));
      std::iota(all.begin(), all.end(), 0);
      std::sample(all.begin(), all.end(), std::back_inserter(lists_), listed(), random);
      begins_.push_back(static_cast<int32_t>(lists_.size()));
    }
  }
}

absl::StatusOr<Bench::Places> Bench::Place() {
  const int64_t packed = rows() * flags_.heads;
  const int64_t list_bytes = std::max<int64_t>(static_cast<int64_t>(lists_.size()) * 4, 4);
  layout_.Clear();
  absl::Status status;
  const auto take = [&status](auto place) {
    status.Update(place.status());
    return place.ok() ? *place : nullptr;
  };
  Places places;
  places.q = take(layout_.Input(q_->bytes().data(), packed * row_dim() * 2));
  places.o = take(layout_.Output(o_->bytes().data(), packed * 1024));
  places.lse = take(layout_.Output(o_->bytes().data() + packed * 1024, packed * 4));
  places.inputs = take(layout_.Input(inputs_.data(), static_cast<int64_t>(inputs_.size())));
  places.sinks = take(layout_.Input(sinks_.data(), static_cast<int64_t>(sinks_.size()) * 4));
  places.begins = take(layout_.Input(begins_.data(), static_cast<int64_t>(begins_.size()) * 4));
  places.lists = indexes() ? take(layout_.Workspace(list_bytes))
                           : const_cast<void*>(take(layout_.Input(lists_.data(), list_bytes)));
  if (!status.ok()) return status;
  return places;
}

kernels::SegmentRecord Bench::Segment(const Places& at, int32_t request) const {
  const int64_t first = int64_t{request} * flags_.query_rows * flags_.heads;
  const int64_t begin = int64_t{request} * (flags_.query_rows + 1);
  kernels::SegmentRecord r{};
  r.q = static_cast<const Bf16*>(at.q) + first * row_dim();
  r.o = static_cast<Bf16*>(at.o) + first * 512;
  r.lse = static_cast<float*>(at.lse) + first;
  r.q_head_stride = row_dim();
  r.q_row_stride = int64_t{flags_.heads} * row_dim();
  r.o_head_stride = 512;
  r.o_row_stride = int64_t{flags_.heads} * 512;
  r.lse_head_stride = 1;
  r.lse_row_stride = flags_.heads;
  r.page_table = request * (pages_of_rows() + pages_of_keys() + pages_of_entries());
  r.row_stride = kernels::MakeKvRowLayout(format_, latent(), 64).row_bytes;
  r.page_size = kPage;
  r.kv_scale = 0.01f;
  r.q_rows = flags_.query_rows;
  r.kv_rows = flags_.context;
  r.num_heads = flags_.heads;
  r.weights_slot = -1;
  r.softmax_scale = 0.0721687f;
  r.causal = 1;
  if (listed() == 0) return r;
  r.list_begin = static_cast<const int32_t*>(at.begins) + begin;
  r.list = static_cast<const int32_t*>(at.lists) + begins_[static_cast<size_t>(begin)];
  return r;
}

kernels::SelectRecord Bench::Select(const Places& at, int32_t request) const {
  const int64_t begin = int64_t{request} * (flags_.query_rows + 1);
  kernels::SelectRecord s{};
  s.indexer = {flags_.index_heads, 128};
  s.dtype = kernels::DType::kBf16;
  s.inputs = static_cast<const std::byte*>(at.inputs) +
             request * flags_.query_rows * s.indexer.input_bytes(s.dtype);
  s.page_table = request * (pages_of_rows() + pages_of_keys()) + pages_of_rows();
  s.row_stride = 128;
  s.page_size = kPage;
  s.rows = flags_.query_rows;
  s.kv_rows = flags_.context;
  s.list = static_cast<int32_t*>(at.lists) + begins_[static_cast<size_t>(begin)];
  s.list_begin = static_cast<const int32_t*>(at.begins) + begin;
  return s;
}

absl::Status Bench::Launch(const kernels::PlanView* plan, int64_t* ns) {
  const absl::StatusOr<Places> places = Place();
  if (!places.ok()) return places.status();
  std::vector<kernels::SegmentRecord> segments;
  std::vector<kernels::WindowRecord> windows;
  std::vector<kernels::SelectRecord> selects;
  for (int32_t i = 0; i < flags_.batch; ++i) {
    segments.push_back(Segment(*places, i));
    const kernels::SegmentRecord& r = segments.back();
    if (indexes()) selects.push_back(Select(*places, i));
    if (windowed()) {
      windows.push_back({flags_.window, flags_.ratio, r.page_table + pages_of_rows(), 0,
                         r.row_stride, kPage, static_cast<const float*>(places->sinks)});
    }
  }
  kernels::Launch launch;
  launch.inputs = layout_.inputs();
  launch.selects = selects;
  if (attends()) {
    launch.outputs = layout_.outputs();
    launch.absorbed.desc = Desc();
    launch.absorbed.segments = segments;
    launch.absorbed.windows = windows;
    launch.absorbed.plan = *plan;
  }
  // Overwrites the L2 and keeps the device busy while the host enqueues.
  absl::Status s =
      backend_->runtime().Fill(flush_.at(), 0, kFlushBytes, backend_->compute_stream());
  if (s.ok()) s = backend_->Submit(0, launch);
  if (!s.ok()) return s;
  auto time = backend_->Wait(0);
  if (time.ok()) *ns = *time;
  return time.status();
}

absl::Status Bench::Run() {
  if (absl::Status s = Setup(); !s.ok()) return s;
  kernels::PlanView plan;
  if (attends()) {
    const kernels::AttentionDesc desc = Desc();
    if (absl::Status can = backend_->CanRun(desc); !can.ok()) return can;
    const std::vector<scheduler::PlanSegment> requests(
        static_cast<size_t>(flags_.batch), {flags_.query_rows, places(), flags_.heads, false});
    auto built = planner_.Build(requests, backend_->Traits(desc), *buffers_);
    if (!built.ok()) return built.status();
    plan = *built;
  }
  std::vector<int64_t> times;
  for (int32_t i = -kWarmUp; i < flags_.iterations; ++i) {
    int64_t ns = 0;
    if (absl::Status s = Launch(&plan, &ns); !s.ok()) return s;
    if (i >= 0) times.push_back(ns);
  }
  std::sort(times.begin(), times.end());
  const double us = static_cast<double>(times[times.size() / 2]) / 1e3;
  const double least = static_cast<double>(times[0]) / 1e3;
  std::string text = absl::StrFormat("%s h=%d b=%d ctx=%d q=%d top_k=%d", flags_.what, flags_.heads,
                                     flags_.batch, flags_.context, flags_.query_rows, flags_.top_k);
  if (attends()) absl::StrAppendFormat(&text, " %s %d places", flags_.kv, places());
  absl::StrAppendFormat(&text, ": %.1f us (least %.1f)", us, least);
  if (attends()) {
    const double flop =
        2.0 * static_cast<double>(rows()) * places() * flags_.heads * (row_dim() + 512);
    absl::StrAppendFormat(&text, ", %.0f TFLOPS, %.3f ns a row", flop / us / 1e6,
                          us * 1e3 / static_cast<double>(rows() * places()));
  } else {
    const double keys = static_cast<double>(rows()) * flags_.context * 132 / us / 1e3;
    absl::StrAppendFormat(&text, ", keys %.0f GB/s", keys);
  }
  std::printf("%s\n", text.c_str());
  const std::string row = absl::StrFormat(
      R"({"bench": "gpu_sparse", "what": "%s", "kv": "%s", "heads": %d, "batch": %d, )"
      R"("context": %d, "query_rows": %d, "top_k": %d, "us": %.1f, "least_us": %.1f})",
      flags_.what, flags_.kv, flags_.heads, flags_.batch, flags_.context, flags_.query_rows,
      flags_.top_k, us, least);
  return WriteJsonRows(flags_.json, {&row, 1});
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--what", &flags.what},
                        {"--kv", &flags.kv},
                        {"--image", &flags.image},
                        {"--json", &flags.json},
                        {"--batch", &flags.batch},
                        {"--context", &flags.context},
                        {"--top-k", &flags.top_k},
                        {"--index-heads", &flags.index_heads},
                        {"--heads", &flags.heads},
                        {"--window", &flags.window},
                        {"--ratio", &flags.ratio},
                        {"--query-rows", &flags.query_rows},
                        {"--iterations", &flags.iterations}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  const auto* const format =
      std::find_if(std::begin(kernels::kKvFormats), std::end(kernels::kKvFormats),
                   [&](KvFormat f) { return Name(f) == flags.kv; });
  if (s.ok() && format == std::end(kernels::kKvFormats)) {
    s = absl::InvalidArgumentError("--kv: want a format of rows");
  }
  if (s.ok() && flags.what != "indexer" && flags.what != "decode" && flags.what != "window") {
    s = absl::InvalidArgumentError("--what: want indexer, decode or window");
  }
  if (!s.ok()) {
    std::fprintf(stderr, "%s\n", s.ToString().c_str());
    return 2;
  }
  auto backend = AnyGpu(flags.image);
  s = backend.status();
  if (s.ok()) s = Bench(flags, *format, *std::move(backend)).Run();
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
