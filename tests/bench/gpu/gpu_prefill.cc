// Times prefill in the expanded form on this machine's GPU, kernel by kernel: up-projection of keys
// and values from cached rows, and attention on them. GPU time by events, the L2 overwritten before
// each launch, median.
//
//   gpu_prefill [--heads 16,128] [--rows 1024,4096,16384] [--context 0] [--iterations 20]
//               [--dims 128,128] [--workspace-mb 640] [--dtype bf16|fp8] [--image FILE]
//               [--json FILE]
//
// --dims: nope_dim and v_dim. --dtype fp8: rows of fp8_tensor, keys, values and probabilities as
// e4m3.
//
// One request of `rows` new rows on `context` cached ones, causal. A line per shape: microseconds
// and TFLOPS of both kernels (at 128,128 2 x 320 operations a head and visible pair, and 2 x 512 x
// 256 a head and row), and their sum.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/formats/fp8.h"
#include "kernels/hip/args/arch_traits.h"
#include "kernels/hip/hip_backend.h"
#include "scheduler/planning/planner.h"
#include "scheduler/planning/round_planner.h"
#include "scheduler/testing/heap_buffers.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

using kernels::Bf16;
using kernels::hip::DeviceBuffer;

constexpr int32_t kPage = 64;
constexpr int32_t kRowDim = kernels::hip::kExpandedLora + kernels::hip::kExpandedRope;
constexpr int64_t kFlushBytes = int64_t{256} << 20;

struct Flags {
  std::vector<int32_t> heads{16, 128}, rows{1024, 4096, 16384};
  std::vector<int32_t> dims{128, 128};  // nope_dim and v_dim
  int32_t context = 0, iterations = 20;
  int64_t workspace_mb = 640;
  std::string dtype = "bf16";
  std::string json;   // file for rows of JSON
  std::string image;  // file with device code to use instead of the built-in code
};

class Prefill {
 public:
  static absl::StatusOr<std::unique_ptr<Prefill>> Create(const Flags& flags);
  absl::Status Time(int32_t heads, int32_t rows);
  std::span<const std::string> json() const { return json_; }  // rows

 private:
  struct Times {
    int64_t expand = 0, attend = 0;  // nanoseconds
  };
  absl::Status LoadKernels(std::span<const kernels::hip::KernelImage> images);
  absl::StatusOr<DeviceBuffer> Random(int64_t bytes, uint32_t seed);
  absl::StatusOr<DeviceBuffer> RandomCodes(int64_t bytes);
  bool fp8() const { return flags_.dtype == "fp8"; }
  kernels::ExpandedDims dims() const { return {flags_.dims[0], flags_.dims[1]}; }
  int32_t q_dim() const { return dims().nope + kernels::hip::kExpandedRope; }
  int64_t row_bytes() const { return kRowDim * (fp8() ? 1 : int64_t{sizeof(Bf16)}); }
  template <class T>
  absl::StatusOr<DeviceBuffer> Upload(std::span<const T> values);
  absl::Status Prepare(int32_t heads, int32_t rows);
  absl::Status Plan(int32_t heads, int32_t rows);
  absl::StatusOr<Times> Launch();

  Flags flags_;
  std::vector<std::string> json_;
  std::unique_ptr<kernels::hip::HipBackend> backend_;
  kernels::hip::GpuRuntime* runtime_ = nullptr;
  const kernels::hip::ArchTraits* arch_ = nullptr;
  kernels::hip::Stream stream_ = nullptr;
  const kernels::hip::ExpandVariant* variant_ = nullptr;
  kernels::hip::Function expand_ = nullptr, attend_ = nullptr;
  kernels::hip::LaunchShape attend_shape_;
  std::vector<kernels::hip::Event> events_;
  kernels::RoundTraits round_traits_;
  std::unique_ptr<scheduler::RoundPlanner> round_planner_;
  std::unique_ptr<scheduler::RoundBuffers> round_buffers_;
  kernels::RoundView rounds_;
  std::unique_ptr<scheduler::MetadataBuffers> buffers_;
  DeviceBuffer workspace_, flush_, partial_o_, partial_lse_;
  DeviceBuffer pool_, table_, q_, o_, lse_, w_uk_, w_uv_, weights_;
  DeviceBuffer requests_, expansions_, items_, unit_indptr_;
  kernels::SegmentRecord request_ = {};
  kernels::hip::ExpandArgs expand_args_ = {};
  kernels::hip::ExpandedArgs attend_args_ = {};
};

absl::StatusOr<std::unique_ptr<Prefill>> Prefill::Create(const Flags& flags) {
  auto self = std::make_unique<Prefill>();
  self->flags_ = flags;
  auto backend = AnyGpu(flags.image);
  if (!backend.ok()) return backend.status();
  self->backend_ = *std::move(backend);
  self->runtime_ = &self->backend_->runtime();
  self->arch_ = kernels::hip::FindArchTraits(self->runtime_->arch());
  self->stream_ = self->backend_->compute_stream();
  auto images = kernels::hip::BuiltInKernelImages();
  std::string file;
  if (!flags.image.empty()) {
    std::ifstream in(flags.image, std::ios::binary);
    file.assign(std::istreambuf_iterator<char>(in), {});
    images = {{self->runtime_->arch(), std::as_bytes(std::span<const char>(file))}};
  }
  if (absl::Status s = self->LoadKernels(images); !s.ok()) return s;
  scheduler::RoundCapacity capacity;
  capacity.units = self->runtime_->units() * MostExpandedBlocks(*self->arch_);
  capacity.items = 200000;
  capacity.expansions = 4096;
  capacity.segments = 1;
  self->round_planner_ = std::make_unique<scheduler::RoundPlanner>(capacity);
  self->round_buffers_ = std::make_unique<scheduler::RoundBuffers>(capacity);
  kernels::RoundTraits& rounds = self->round_traits_;
  rounds.first_carry_row = 60000;
  rounds.carry_rows = 32768;
  rounds.workspace_bytes = flags.workspace_mb << 20;
  self->buffers_ = scheduler::testing::MakeBuffers({1024, 200000, 50000, 100000, 1 << 20});
  const int64_t partial_rows = rounds.first_carry_row + rounds.carry_rows;
  for (const auto& [buffer, bytes] :
       {std::pair(&self->workspace_, rounds.workspace_bytes), std::pair(&self->flush_, kFlushBytes),
        std::pair(&self->partial_o_, partial_rows * self->dims().value * 4),
        std::pair(&self->partial_lse_, partial_rows * 4)}) {
    auto allocated = DeviceBuffer::Create(self->runtime_, "bench", bytes);
    if (!allocated.ok()) return allocated.status();
    *buffer = *std::move(allocated);
  }
  self->events_.resize(2 * 1024 + 1);
  for (kernels::hip::Event& event : self->events_) {
    auto created = self->runtime_->CreateEvent();
    if (!created.ok()) return created.status();
    event = *created;
  }
  return self;
}

absl::Status Prefill::LoadKernels(std::span<const kernels::hip::KernelImage> images) {
  const kernels::DType products = fp8() ? kernels::DType::kFp8E4m3 : kernels::DType::kBf16;
  const size_t expand = FindExpand(
      *arch_, dims(), fp8() ? kernels::KvFormat::kFp8Tensor : kernels::KvFormat::kBf16, products);
  const size_t attend = FindExpanded(*arch_, dims(), products);
  if (expand == arch_->expand.size() || attend == arch_->expanded.size()) {
    return absl::UnimplementedError("no prefill with these dims and products");
  }
  variant_ = &arch_->expand[expand];
  const kernels::hip::ExpandedVariant& of_attention = arch_->expanded[attend];
  attend_shape_.threads = static_cast<uint32_t>(of_attention.threads);
  attend_shape_.shared_bytes = static_cast<uint32_t>(of_attention.shared_bytes);
  for (const kernels::hip::KernelImage& image : images) {
    if (image.arch != runtime_->arch()) continue;
    auto module = runtime_->Load(image.bytes);
    if (!module.ok()) return module.status();
    for (const auto& [name, shared, function] :
         {std::tuple(variant_->kernel, variant_->shared_bytes, &expand_),
          std::tuple(of_attention.kernel, of_attention.shared_bytes, &attend_)}) {
      auto found = runtime_->Find(*module, name);
      if (!found.ok()) return found.status();
      *function = *found;
      absl::Status s = runtime_->AllowSharedBytes(*found, shared);
      if (!s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

template <class T>
absl::StatusOr<DeviceBuffer> Prefill::Upload(std::span<const T> values) {
  const auto bytes = static_cast<int64_t>(values.size_bytes());
  auto buffer = DeviceBuffer::Create(runtime_, "bench", std::max<int64_t>(bytes, 16));
  if (!buffer.ok()) return buffer.status();
  absl::Status s = runtime_->CopyIn(buffer->at(), values.data(), bytes, stream_);
  if (s.ok()) s = runtime_->Synchronize(stream_);
  if (!s.ok()) return s;
  return buffer;
}

// Codes of N(0, 1) x 50; with a layer's scale of 0.002 they are N(0, 1) / 10.
absl::StatusOr<DeviceBuffer> Prefill::RandomCodes(int64_t bytes) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 50.0f);
  std::vector<uint8_t> codes(static_cast<size_t>(bytes));
  for (uint8_t& code : codes) {
    code = kernels::EncodeFp8(normal(random), kernels::Fp8Kind::kE4m3Fn);
  }
  return Upload<uint8_t>(codes);
}

// N(0, 1) / 10.
absl::StatusOr<DeviceBuffer> Prefill::Random(int64_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::vector<Bf16> block(static_cast<size_t>(std::min<int64_t>(bytes / 2, 1 << 22)));
  for (Bf16& x : block) x = kernels::ToBf16(normal(random));
  auto buffer = DeviceBuffer::Create(runtime_, "bench", bytes);
  if (!buffer.ok()) return buffer.status();
  const auto size = static_cast<int64_t>(block.size() * 2);
  for (int64_t at = 0; at < bytes; at += size) {
    absl::Status s = runtime_->CopyIn(buffer->at() + static_cast<uint64_t>(at), block.data(),
                                      std::min(size, bytes - at), stream_);
    if (!s.ok()) return s;
  }
  if (absl::Status s = runtime_->Synchronize(stream_); !s.ok()) return s;
  return buffer;
}

absl::Status Prefill::Prepare(int32_t heads, int32_t rows) {
  const int32_t kv_rows = rows + flags_.context;
  const int64_t pages = (kv_rows + kPage - 1) / kPage;
  const int64_t column_bytes = int64_t{2} * kernels::hip::kExpandedLora * heads;
  const int64_t packed = int64_t{rows} * heads;
  for (const auto& [buffer, bytes, seed] :
       {std::tuple(&pool_, pages * kPage * row_bytes(), 1u),
        std::tuple(&q_, packed * q_dim() * 2, 2u), std::tuple(&o_, packed * dims().value * 2, 3u),
        std::tuple(&lse_, packed * 4, 4u), std::tuple(&w_uk_, column_bytes * dims().nope, 5u),
        std::tuple(&w_uv_, column_bytes * dims().value, 6u)}) {
    auto made = Random(bytes, seed);
    if (!made.ok()) return made.status();
    *buffer = *std::move(made);
  }
  if (fp8()) {
    auto codes = RandomCodes(pages * kPage * row_bytes());
    if (!codes.ok()) return codes.status();
    pool_ = *std::move(codes);
  }
  if (absl::Status s = Plan(heads, rows); !s.ok()) return s;
  std::vector<uint32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0u);
  std::shuffle(table.begin(), table.end(), std::mt19937(7));
  const uint64_t pointers[2] = {w_uk_.at(), w_uv_.at()};
  const auto keep = [](auto made, DeviceBuffer& into) {
    if (made.ok()) into = *std::move(made);
    return made.status();
  };
  absl::Status s = keep(Upload<uint32_t>(table), table_);
  if (s.ok()) s = keep(Upload<uint64_t>(pointers), weights_);
  if (s.ok()) s = keep(Upload<kernels::SegmentRecord>({&request_, 1}), requests_);
  if (s.ok()) s = keep(Upload(rounds_.expansions), expansions_);
  if (s.ok()) s = keep(Upload(rounds_.items), items_);
  if (s.ok()) s = keep(Upload(rounds_.unit_indptr), unit_indptr_);
  if (!s.ok()) return s;
  expand_args_ = {requests_.As<kernels::SegmentRecord>(),
                  table_.As<uint32_t>(),
                  pool_.As<uint8_t>(),
                  expansions_.As<kernels::hip::Expansion>(),
                  weights_.As<const uint16_t*>(),
                  weights_.As<const uint16_t*>() + 1,
                  workspace_.As<uint8_t>(),
                  kPage * row_bytes(),
                  0,
                  0,
                  0,
                  0};
  attend_args_ = {requests_.As<kernels::SegmentRecord>(),
                  items_.As<kernels::hip::ExpandedItem>(),
                  unit_indptr_.As<int32_t>(),
                  workspace_.As<uint8_t>(),
                  partial_o_.As<float>(),
                  partial_lse_.As<float>(),
                  0};
  return absl::OkStatus();
}

absl::Status Prefill::Plan(int32_t heads, int32_t rows) {
  const int32_t kv_rows = rows + flags_.context;
  kernels::SegmentRecord& r = request_;
  r = {};
  r.q = q_.As<void>();
  r.o = o_.As<void>();
  r.lse = lse_.As<float>();
  r.q_head_stride = q_dim();
  r.q_row_stride = int64_t{heads} * q_dim();
  r.o_head_stride = dims().value;
  r.o_row_stride = int64_t{heads} * dims().value;
  r.lse_head_stride = 1;
  r.lse_row_stride = heads;
  r.row_stride = row_bytes();
  r.kv_scale = fp8() ? 0.002f : 1.0f;
  r.page_size = kPage;
  r.q_rows = rows;
  r.kv_rows = kv_rows;
  r.num_heads = heads;
  r.softmax_scale = 0.0721687f;
  r.causal = 1;
  kernels::AttentionDesc desc;
  desc.geometry = {heads, kernels::hip::kExpandedLora, kernels::hip::kExpandedRope, dims().nope,
                   dims().value};
  desc.form = kernels::AttentionForm::kExpanded;
  scheduler::Planner planner;
  const scheduler::PlanSegment request{rows, kv_rows, heads, true};
  kernels::PlanTraits traits = backend_->Traits(desc);
  round_traits_.dims = traits.rounds.dims;
  traits.rounds = round_traits_;
  auto view = planner.Build({&request, 1}, traits, *buffers_);
  if (!view.ok()) return view.status();
  auto rounds = round_planner_->Build(*view, {&request, 1}, traits, *round_buffers_);
  if (!rounds.ok()) return rounds.status();
  rounds_ = *rounds;
  return absl::OkStatus();
}

absl::StatusOr<Prefill::Times> Prefill::Launch() {
  absl::Status s = runtime_->Fill(flush_.at(), 0, kFlushBytes, stream_);
  size_t event = 0;
  const auto record = [&] {
    if (s.ok()) s = runtime_->Record(events_[event++], stream_);
  };
  record();
  for (const kernels::Round& round : rounds_.rounds) {
    kernels::hip::ExpandArgs expand = expand_args_;
    expand.expansions += round.first_expansion;
    expand.expansion_count = round.expansions;
    expand.pairs = round.pairs;
    expand.blocks = kernels::hip::ExpandBlocks(*arch_, round.pairs, round.heads, round.expansions,
                                               rounds_.units);
    expand.first_tile_pairs =
        kernels::hip::FirstTilePairs(*arch_, round.pairs, round.heads, expand.blocks);
    kernels::hip::LaunchShape shape;
    shape.threads = static_cast<uint32_t>(variant_->threads);
    shape.grid_x = static_cast<uint32_t>(expand.blocks);
    shape.shared_bytes = static_cast<uint32_t>(variant_->shared_bytes);
    if (s.ok()) s = runtime_->Launch(expand_, shape, &expand, stream_);
    record();
    kernels::hip::ExpandedArgs attend = attend_args_;
    attend.unit_indptr += round.first_indptr;
    shape = attend_shape_;
    shape.grid_x = static_cast<uint32_t>(rounds_.units);
    if (s.ok()) s = runtime_->Launch(attend_, shape, &attend, stream_);
    record();
  }
  if (s.ok()) s = runtime_->Synchronize(stream_);
  Times times;
  for (size_t i = 0; i + 1 < event && s.ok(); ++i) {
    auto ns = runtime_->ElapsedNs(events_[i], events_[i + 1]);
    if (!ns.ok()) return ns.status();
    (i % 2 == 0 ? times.expand : times.attend) += *ns;
  }
  if (!s.ok()) return s;
  return times;
}

absl::Status Prefill::Time(int32_t heads, int32_t rows) {
  if (absl::Status s = Prepare(heads, rows); !s.ok()) return s;
  std::vector<int64_t> expand, attend;
  for (int32_t i = -2; i < flags_.iterations; ++i) {  // the first two warm up
    auto times = Launch();
    if (!times.ok()) return times.status();
    if (i < 0) continue;
    expand.push_back(times->expand);
    attend.push_back(times->attend);
  }
  std::sort(expand.begin(), expand.end());
  std::sort(attend.begin(), attend.end());
  const double up_us = static_cast<double>(expand[expand.size() / 2]) / 1e3;
  const double us = static_cast<double>(attend[attend.size() / 2]) / 1e3;
  const double kv_rows = rows + flags_.context;
  const double pairs = rows * (kv_rows - 0.5 * (rows - 1));
  // Operations a head: for a row's up-projection, and for a visible pair.
  const double up_ops = 2.0 * kernels::hip::kExpandedLora * (dims().nope + dims().value);
  const double ops = 2.0 * (q_dim() + dims().value);
  std::printf(
      "%s %d/%d h=%d q=%d kv=%.0f: up-projection %.1f us %.0f TFLOPS, attention %.1f us (least "
      "%.1f) "
      "%.0f "
      "TFLOPS, sum %.1f us; %zu rounds, %zu items%s\n",
      flags_.dtype.c_str(), dims().nope, dims().value, heads, rows, kv_rows, up_us,
      up_ops * kv_rows * heads / up_us / 1e6, us, static_cast<double>(attend[0]) / 1e3,
      ops * pairs * heads / us / 1e6, up_us + us, rounds_.rounds.size(), rounds_.items.size(),
      rounds_.merges ? ", split" : "");
  std::fflush(stdout);
  json_.push_back(absl::StrFormat(
      R"({"bench": "gpu_prefill", "dtype": "%s", "nope": %d, "v": %d, "heads": %d, "rows": %d, )"
      R"("context": %d, "up_projection_us": %.1f, "attention_us": %.1f, "us": %.1f})",
      flags_.dtype, dims().nope, dims().value, heads, rows, flags_.context, up_us, us, up_us + us));
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--heads", &flags.heads},
                        {"--rows", &flags.rows},
                        {"--context", &flags.context},
                        {"--dims", &flags.dims},
                        {"--iterations", &flags.iterations},
                        {"--workspace-mb", &flags.workspace_mb},
                        {"--dtype", &flags.dtype},
                        {"--image", &flags.image},
                        {"--json", &flags.json}};
  absl::Status read = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  if (read.ok() && flags.dtype != "bf16" && flags.dtype != "fp8") {
    read = absl::InvalidArgumentError("--dtype: got '" + flags.dtype + "', want bf16 or fp8");
  }
  if (read.ok() && flags.dims.size() != 2) {
    read = absl::InvalidArgumentError("--dims: want nope_dim and v_dim");
  }
  if (!read.ok()) {
    std::fprintf(stderr, "%s\n", read.ToString().c_str());
    return 2;
  }
  auto prefill = Prefill::Create(flags);
  absl::Status s = prefill.status();
  for (const int32_t heads : flags.heads) {
    for (const int32_t rows : flags.rows) {
      if (s.ok()) s = (*prefill)->Time(heads, rows);
    }
  }
  if (s.ok()) s = WriteJsonRows(flags.json, (*prefill)->json());
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
