// Times a layer of PROJECTED and of EXPANDED at decode on this machine's GPU through the backend:
// GPU time by events, the L2 overwritten before each launch, median.
//
//   gpu_projected [--batch 1,32,128] [--context 16384] [--heads 128] [--q-lora-rank 1536]
//                 [--hidden-size 7168] [--iterations 30] [--tflops 0] [--e4m3 0] [--image FILE]
//                 [--json FILE]
//
// With --e4m3 1 PROJECTED and its two products also run with W_UQ and W_O of e4m3, in turns with
// those of bf16; a second line a batch has their times. The floor of these reads half the bytes.
//
// Both have the same rows, weights and plan; every launch absorbs queries, attends and projects
// outputs of `batch` sequences. PROJECTED makes the queries of low-rank ones before, and hidden
// states after. The launches take turns, because the device's clocks fall with the work that it has
// had: EXPANDED, PROJECTED, and each of the layer's parts as a launch of its own. A line a batch:
// microseconds of both (median, least), of the parts (queries and hiddens are the two products),
// what PROJECTED takes in addition, that as a
// multiple of the products' floor, and the bytes of a token's tensors in both profiles, as the
// launches' inputs and outputs add up to. The floor is the longer of two times: half the time in
// which the device copies W_UQ and W_O, because a copy reads and writes; and the time of the
// products' floating-point operations at --tflops, as measured in large products (0: the first time
// alone).
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/formats/fp8.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "kernels/projected_weights.h"
#include "scheduler/planning/planner.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

using kernels::Bf16;
using kernels::DType;
using kernels::ProjectedPart;

constexpr int32_t kPage = 64, kLora = 512, kRope = 64, kNope = 128, kValue = 128;
constexpr int32_t kRowDim = kLora + kRope, kQueryDim = kNope + kRope;
constexpr int64_t kRowBytes = kRowDim * int64_t{sizeof(Bf16)};
constexpr int64_t kFlushBytes = int64_t{256} << 20;

struct Flags {
  std::vector<int32_t> batch{1, 32, 128};
  int32_t context = 16384, heads = 128, q_lora_rank = 1536, hidden_size = 7168, iterations = 30,
          tflops = 0, e4m3 = 0;
  std::string json, image;
};

// The parts of a launch: all of a profile, or one of PROJECTED's.
enum class Parts { kExpanded, kProjected, kQueries, kAbsorb, kAttend, kProject, kHiddens };

// The weights slots, by the type of W_UQ and W_O. EXPANDED uses the first.
constexpr int32_t kBf16Slot = 0, kCodesSlot = 1;

struct Kind {
  Parts parts;
  int32_t slot;  // of W_UQ and W_O
};
// The kinds of launches, in their turns; the last kCodesKinds only with --e4m3.
constexpr Kind kKinds[] = {{Parts::kExpanded, kBf16Slot}, {Parts::kProjected, kBf16Slot},
                           {Parts::kQueries, kBf16Slot},  {Parts::kAbsorb, kBf16Slot},
                           {Parts::kAttend, kBf16Slot},   {Parts::kProject, kBf16Slot},
                           {Parts::kHiddens, kBf16Slot},  {Parts::kProjected, kCodesSlot},
                           {Parts::kQueries, kCodesSlot}, {Parts::kHiddens, kCodesSlot}};
constexpr size_t kCodesKinds = 3;

struct Times {
  double median = 0, least = 0;  // microseconds
  int64_t token_bytes = 0;       // of tensors, without the rotations of a step
};
// The times of each kind of launch.
using AllTimes = std::array<Times, std::size(kKinds)>;

class Bench {
 public:
  Bench(const Flags& flags, std::unique_ptr<kernels::hip::HipBackend> backend)
      : flags_(flags),
        geometry_{flags.heads, kLora, kRope, kNope, kValue},
        shape_{flags.q_lora_rank, flags.hidden_size},
        backend_(std::move(backend)) {}

  absl::Status Setup();
  absl::Status Time(int32_t batch);
  std::span<const std::string> rows() const { return rows_; }  // rows of JSON

 private:
  int64_t projected_bytes() const {
    return int64_t{flags_.heads} *
           (int64_t{kQueryDim} * flags_.q_lora_rank + int64_t{kValue} * flags_.hidden_size) * 2;
  }
  // Microseconds of the products' operations.
  double OperationMicros(int32_t batch) const {
    if (flags_.tflops <= 0) return 0.0;
    return static_cast<double>(projected_bytes()) * batch / (flags_.tflops * 1e6);  // 2 a weight
  }
  int64_t pages() const { return (flags_.context + kPage - 1) / kPage; }  // of a sequence
  absl::Status LoadWeights();
  absl::Status FillPool(int64_t bytes);
  absl::Status SendTables(int32_t batch);
  absl::Status Launch(int32_t batch, const kernels::PlanView& plan, const Kind& kind, int64_t* ns,
                      int64_t* bytes);
  void Report(int32_t batch, const AllTimes& times, double read);
  void ReportCodes(int32_t batch, const AllTimes& times, double read);
  absl::Status LoadProjected(const kernels::ProjectedShape& shape, int32_t slot);
  absl::StatusOr<AllTimes> TakeTurns(int32_t batch, const kernels::PlanView& plan);
  absl::StatusOr<double> CopyMicros(int64_t bytes);
  void AddAttention(int32_t batch, const void* q, void* o, void* between, void* latent,
                    kernels::Launch& launch);

  const Flags flags_;
  const kernels::Geometry geometry_;
  const kernels::ProjectedShape shape_;
  std::unique_ptr<kernels::hip::HipBackend> backend_;
  std::vector<std::string> rows_;
  std::unique_ptr<scheduler::MetadataBuffers> buffers_;
  scheduler::Planner planner_;
  std::unique_ptr<kernels::HostBuffer> in_, out_;
  kernels::hip::DeviceBuffer flush_, copied_;
  kernels::LaunchLayout layout_;
  std::vector<uint32_t> table_;
  std::vector<kernels::SegmentRecord> segments_;
  std::vector<kernels::ProjectionRecord> absorbs_, projects_;
  std::vector<kernels::RowProjectionRecord> queries_, hiddens_;
};

absl::Status Bench::Setup() {
  const int32_t batch = *std::max_element(flags_.batch.begin(), flags_.batch.end());
  const int64_t packed = int64_t{batch} * flags_.heads;
  const int64_t row = int64_t{flags_.heads} * kRowDim + flags_.q_lora_rank + flags_.hidden_size;
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = batch * pages() * kPage * kRowBytes;
  limits.page_table_entries = batch * pages();
  limits.weights_slots = 2;
  limits.weights_bytes =
      2 * projected_bytes() + int64_t{flags_.heads} * kLora * (kNope + kValue) * 2 + (1 << 20);
  limits.launch_slots = 1;
  limits.launch_requests = limits.launch_rows = batch;
  limits.launch_packed_rows = packed;
  limits.partial_rows = 400000;
  limits.max_o_dim = kLora;
  limits.staging_in_bytes = limits.staging_out_bytes = batch * row * 2 + (1 << 20);
  limits.slot_workspace_bytes = 4 * batch * row * 4 + (1 << 20);
  limits.work_items = limits.reduce_partials = 100000;
  limits.reduce_tiles = 50000;
  limits.max_geometry = geometry_;
  absl::Status s = backend_->Configure(limits);
  if (!s.ok()) return s;
  layout_ = kernels::LaunchLayout(*backend_, 0);
  auto buffers =
      scheduler::MetadataBuffers::Create({1024, 100000, 50000, 100000, 400000}, *backend_);
  if (!buffers.ok()) return buffers.status();
  buffers_ = *std::move(buffers);
  for (auto* buffer : {&in_, &out_}) {
    auto made = backend_->AllocateHost(static_cast<size_t>(limits.staging_in_bytes));
    if (!made.ok()) return made.status();
    *buffer = *std::move(made);
  }
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<Bf16> some(1 << 16);
  for (Bf16& x : some) x = kernels::ToBf16(normal(random));
  auto* values = reinterpret_cast<Bf16*>(in_->bytes().data());
  for (size_t i = 0; i < in_->bytes().size() / 2; ++i) values[i] = some[i % some.size()];
  for (auto [buffer, bytes] :
       {std::pair(&flush_, kFlushBytes), std::pair(&copied_, 2 * projected_bytes())}) {
    auto made = kernels::hip::DeviceBuffer::Create(&backend_->runtime(), "flush", bytes);
    if (!made.ok()) return made.status();
    *buffer = *std::move(made);
  }
  s = LoadWeights();
  return s.ok() ? FillPool(limits.kv_pool_bytes) : s;
}

absl::Status Bench::LoadWeights() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<Bf16> weights(static_cast<size_t>(int64_t{flags_.heads} * kLora * kNope));
  for (Bf16& x : weights) x = kernels::ToBf16(0.02f * normal(random));
  absl::Status s =
      backend_->LoadWeights(0, geometry_, 0, flags_.heads, weights.data(), weights.data());
  if (s.ok()) s = LoadProjected(shape_, kBf16Slot);
  kernels::ProjectedShape codes = shape_;
  codes.weights = DType::kFp8E4m3;
  return s.ok() && flags_.e4m3 != 0 ? LoadProjected(codes, kCodesSlot) : s;
}

// All heads have the weights of the first one.
absl::Status Bench::LoadProjected(const kernels::ProjectedShape& shape, int32_t slot) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  constexpr float kScale = 0.0001f;
  for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
    const kernels::WeightWindow all =
        kernels::WindowOf(geometry_, shape, part, 0, std::min(2, flags_.heads));
    const kernels::WeightWindow own = kernels::WindowOf(geometry_, shape, part, 0, 1);
    // Any head has at most the scales of two.
    std::vector<std::byte> bytes(static_cast<size_t>(own.Bytes(shape.weights) + all.blocks() * 4));
    for (int64_t i = 0; i < own.elements(); ++i) {
      const uint8_t code =
          kernels::EncodeFp8(0.02f * normal(random) / kScale, kernels::Fp8Kind::kE4m3Fn);
      const Bf16 weight = kernels::WidenedWeight(code, kScale);
      if (shape.codes()) {
        bytes[static_cast<size_t>(i)] = std::byte{code};
      } else {
        std::memcpy(&bytes[static_cast<size_t>(i) * sizeof(weight)], &weight, sizeof(weight));
      }
    }
    for (auto at = static_cast<size_t>(own.elements());
         shape.codes() && at + sizeof(kScale) <= bytes.size(); at += sizeof(kScale)) {
      std::memcpy(&bytes[at], &kScale, sizeof(kScale));
    }
    for (int32_t head = 0; head < flags_.heads; ++head) {
      absl::Status s = backend_->LoadProjected(slot, geometry_, shape, part, head, bytes.data());
      if (!s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

// Fills the pool by repeating some rows.
absl::Status Bench::FillPool(int64_t bytes) {
  kernels::hip::GpuRuntime& runtime = backend_->runtime();
  const auto block = static_cast<int64_t>(in_->bytes().size());
  for (int64_t at = 0; at < bytes; at += block) {
    absl::Status s =
        runtime.CopyIn(backend_->pool() + static_cast<uint64_t>(at), in_->bytes().data(),
                       std::min(block, bytes - at), backend_->compute_stream());
    if (!s.ok()) return s;
  }
  return runtime.Synchronize(backend_->compute_stream());
}

absl::Status Bench::SendTables(int32_t batch) {
  table_.resize(static_cast<size_t>(batch * pages()));
  std::iota(table_.begin(), table_.end(), 0u);
  std::shuffle(table_.begin(), table_.end(), std::mt19937(4));
  for (uint32_t& page : table_) page *= kPage * kRowBytes / kernels::kPageGranuleBytes;
  const kernels::TableRange all{0, static_cast<int64_t>(table_.size())};
  kernels::Launch tables;
  tables.page_tables = table_;
  tables.table_changes = {&all, 1};
  const absl::Status s = backend_->Submit(0, tables);
  return s.ok() ? backend_->Wait(0).status() : s;
}

void Bench::AddAttention(int32_t batch, const void* q, void* o, void* between, void* latent,
                         kernels::Launch& launch) {
  const int32_t h = flags_.heads;
  for (int64_t i = 0; i < batch; ++i) {
    auto* const row_q = static_cast<Bf16*>(between) + i * h * kRowDim;
    auto* const row_o = static_cast<float*>(latent) + i * h * kLora;
    absorbs_.push_back({static_cast<const Bf16*>(q) + i * h * kQueryDim, row_q, h * kQueryDim,
                        kQueryDim, h * kRowDim, kRowDim, 1, h, 0, 0});
    projects_.push_back({row_o, static_cast<Bf16*>(o) + i * h * kValue, h * kLora, kLora,
                         h * kValue, kValue, 1, h, 0, 0});
    kernels::SegmentRecord& r = segments_.emplace_back();
    r.q = row_q;
    r.o = row_o;
    r.q_head_stride = kRowDim;
    r.q_row_stride = int64_t{h} * kRowDim;
    r.o_head_stride = kLora;
    r.o_row_stride = int64_t{h} * kLora;
    r.page_table = i * pages();
    r.row_stride = kRowBytes;
    r.kv_scale = 1.0f;
    r.page_size = kPage;
    r.q_rows = 1;
    r.kv_rows = flags_.context;
    r.num_heads = h;
    r.softmax_scale = 0.0721687f;
    r.causal = 1;
  }
  launch.absorb = {geometry_, DType::kBf16, DType::kBf16, absorbs_, {}};
  launch.project = {geometry_, DType::kF32, DType::kBf16, projects_, {}};
  launch.absorbed.desc.geometry = geometry_;
  launch.absorbed.desc.o_dtype = DType::kF32;
  launch.absorbed.segments = segments_;
}

absl::Status Bench::Launch(int32_t batch, const kernels::PlanView& plan, const Kind& kind,
                           int64_t* ns, int64_t* bytes) {
  const Parts parts = kind.parts;
  layout_.Clear();
  segments_.clear();
  absorbs_.clear();
  projects_.clear();
  queries_.clear();
  hiddens_.clear();
  absl::Status status;
  const auto at = [&status](auto place) {
    status.Update(place.status());
    return place.ok() ? *place : nullptr;
  };
  const bool expanded = parts == Parts::kExpanded;
  const int64_t h = flags_.heads, q_row = h * kQueryDim, o_row = h * kValue;
  const int64_t in_row = expanded ? q_row : flags_.q_lora_rank;
  const int64_t out_row = expanded ? o_row : flags_.hidden_size;
  const void* const in = at(layout_.Input(in_->bytes().data(), batch * in_row * 2));
  void* const out = at(layout_.Output(out_->bytes().data(), batch * out_row * 2));
  *bytes = (in_row + out_row) * 2 + kRowBytes;  // and the new row
  const void* q = in;
  void* o = out;
  kernels::Launch launch;
  if (!expanded) {
    void* const made = at(layout_.Workspace(batch * q_row * 2));
    o = at(layout_.Workspace(batch * o_row * 2));
    const auto* const rotations = static_cast<const float*>(
        at(layout_.Input(in_->bytes().data(), batch * kRope * int64_t{sizeof(float)})));
    for (int64_t i = 0; i < batch; ++i) {
      queries_.push_back({static_cast<const Bf16*>(in) + i * in_row,
                          static_cast<Bf16*>(made) + i * q_row, in_row, q_row, 1, kind.slot,
                          rotations + i * kRope});
      hiddens_.push_back({static_cast<const Bf16*>(o) + i * o_row,
                          static_cast<Bf16*>(out) + i * out_row, o_row, out_row, 1, kind.slot,
                          nullptr});
    }
    const kernels::RopeLayout rope = kernels::RopeLayout::kInterleaved;
    if (parts == Parts::kProjected || parts == Parts::kQueries) {
      launch.queries = {geometry_, rope, DType::kBf16, DType::kBf16, queries_};
    }
    if (parts == Parts::kProjected || parts == Parts::kHiddens) {
      launch.hiddens = {geometry_, rope, DType::kBf16, DType::kBf16, hiddens_};
    }
    q = made;
  }
  void* const between = at(layout_.Workspace(batch * h * kRowDim * 2));
  void* const latent = at(layout_.Workspace(batch * h * kLora * 4));
  if (!status.ok()) return status;
  if (parts != Parts::kQueries && parts != Parts::kHiddens) {
    AddAttention(batch, q, o, between, latent, launch);
    launch.absorbed.plan = plan;
  }
  const bool all = expanded || parts == Parts::kProjected;
  if (!all && parts != Parts::kAbsorb) launch.absorb.records = {};
  if (!all && parts != Parts::kAttend) launch.absorbed.segments = {}, launch.absorbed.plan = {};
  if (!all && parts != Parts::kProject) launch.project.records = {};
  launch.inputs = layout_.inputs();
  launch.outputs = layout_.outputs();
  // Overwrites the L2 and keeps the device busy while the host enqueues.
  status = backend_->runtime().Fill(flush_.at(), 0, kFlushBytes, backend_->compute_stream());
  if (status.ok()) status = backend_->Submit(0, launch);
  if (!status.ok()) return status;
  auto time = backend_->Wait(0);
  if (time.ok()) *ns = *time;
  return time.status();
}

absl::StatusOr<AllTimes> Bench::TakeTurns(int32_t batch, const kernels::PlanView& plan) {
  std::vector<int64_t> times[std::size(kKinds)];
  const size_t kinds = std::size(kKinds) - (flags_.e4m3 != 0 ? 0 : kCodesKinds);
  AllTimes result;
  for (int32_t i = -5; i < flags_.iterations; ++i) {  // the first five warm up
    for (size_t k = 0; k < kinds; ++k) {
      int64_t ns = 0;
      absl::Status s = Launch(batch, plan, kKinds[k], &ns, &result[k].token_bytes);
      if (!s.ok()) return s;
      if (i >= 0) times[k].push_back(ns);
    }
  }
  for (size_t k = 0; k < kinds; ++k) {
    std::sort(times[k].begin(), times[k].end());
    result[k].median = static_cast<double>(times[k][times[k].size() / 2]) / 1e3;
    result[k].least = static_cast<double>(times[k][0]) / 1e3;
  }
  return result;
}

// Returns how long the device takes to read as many bytes: half the time of a copy of them, which
// also writes them.
absl::StatusOr<double> Bench::CopyMicros(int64_t bytes) {
  kernels::hip::GpuRuntime& runtime = backend_->runtime();
  const kernels::hip::Stream stream = backend_->compute_stream();
  auto begin = runtime.CreateEvent(), end = runtime.CreateEvent();
  if (!begin.ok() || !end.ok()) return begin.ok() ? end.status() : begin.status();
  std::vector<double> times;
  absl::Status s;
  for (int32_t i = 0; i < flags_.iterations && s.ok(); ++i) {
    s = runtime.Record(*begin, stream);
    if (s.ok()) {
      s = runtime.CopyDevice(copied_.at(), copied_.at() + static_cast<uint64_t>(bytes), bytes,
                             stream);
    }
    if (s.ok()) s = runtime.Record(*end, stream);
    if (s.ok()) s = runtime.Synchronize(stream);
    if (!s.ok()) break;
    auto ns = runtime.ElapsedNs(*begin, *end);
    s = ns.status();
    if (ns.ok()) times.push_back(static_cast<double>(*ns) / 2e3);
  }
  runtime.Destroy(*begin);
  runtime.Destroy(*end);
  if (!s.ok()) return s;
  return *std::min_element(times.begin(), times.end());
}

absl::Status Bench::Time(int32_t batch) {
  absl::Status s = SendTables(batch);
  if (!s.ok()) return s;
  kernels::AttentionDesc desc;
  desc.geometry = geometry_;
  desc.o_dtype = DType::kF32;
  const std::vector<scheduler::PlanSegment> requests(static_cast<size_t>(batch),
                                                     {1, flags_.context, flags_.heads, true});
  auto plan = planner_.Build(requests, backend_->Traits(desc), *buffers_);
  if (!plan.ok()) return plan.status();
  auto read = CopyMicros(projected_bytes());
  if (!read.ok()) return read.status();
  auto turns = TakeTurns(batch, *plan);
  if (!turns.ok()) return turns.status();
  Report(batch, *turns, *read);
  if (flags_.e4m3 != 0) ReportCodes(batch, *turns, *read / 2);
  return absl::OkStatus();
}

const Times& TimesOf(const AllTimes& times, Parts parts, int32_t slot) {
  const auto* const kind =
      std::find_if(std::begin(kKinds), std::end(kKinds),
                   [&](const Kind& kind) { return kind.parts == parts && kind.slot == slot; });
  return times[static_cast<size_t>(kind - kKinds)];
}

void Bench::Report(int32_t batch, const AllTimes& times, double read) {
  const double operations = OperationMicros(batch), floor = std::max(read, operations);
  const auto of = [&](Parts parts) -> const Times& { return TimesOf(times, parts, kBf16Slot); };
  const Times &expanded = of(Parts::kExpanded), &projected = of(Parts::kProjected);
  const double more = projected.median - expanded.median;
  std::printf(
      "batch=%d context=%d h=%d: expanded %.1f us (least %.1f), projected %.1f us (least %.1f), "
      "queries %.1f us, absorb %.1f us, attend %.1f us, project %.1f us, hiddens %.1f us; %.1f us "
      "more, %.2f x the floor of %.1f us (reading W_UQ and W_O %.1f us, multiplying %.1f us); "
      "bytes a token %lld and %lld\n",
      batch, flags_.context, flags_.heads, expanded.median, expanded.least, projected.median,
      projected.least, of(Parts::kQueries).median, of(Parts::kAbsorb).median,
      of(Parts::kAttend).median, of(Parts::kProject).median, of(Parts::kHiddens).median, more,
      more / floor, floor, read, operations, static_cast<long long>(expanded.token_bytes),
      static_cast<long long>(projected.token_bytes));
  std::fflush(stdout);
  rows_.push_back(absl::StrFormat(
      R"({"bench": "gpu_projected", "weights": "bf16", "batch": %d, "context": %d, "heads": %d, )"
      R"("expanded_us": %.2f, "projected_us": %.2f, "queries_us": %.2f, "absorb_us": %.2f, )"
      R"("attend_us": %.2f, "project_us": %.2f, "hiddens_us": %.2f, )"
      R"("more_us": %.2f, "floor_us": %.2f, "read_us": %.2f, "operations_us": %.2f, )"
      R"("token_bytes": %d})",
      batch, flags_.context, flags_.heads, expanded.median, projected.median,
      of(Parts::kQueries).median, of(Parts::kAbsorb).median, of(Parts::kAttend).median,
      of(Parts::kProject).median, of(Parts::kHiddens).median, more, floor, read, operations,
      projected.token_bytes));
}

void Bench::ReportCodes(int32_t batch, const AllTimes& times, double read) {
  const double operations = OperationMicros(batch), floor = std::max(read, operations);
  const Times& expanded = TimesOf(times, Parts::kExpanded, kBf16Slot);
  const Times& projected = TimesOf(times, Parts::kProjected, kCodesSlot);
  const double queries = TimesOf(times, Parts::kQueries, kCodesSlot).median;
  const double hiddens = TimesOf(times, Parts::kHiddens, kCodesSlot).median;
  const double more = projected.median - expanded.median;
  std::printf(
      "batch=%d context=%d h=%d, weights of e4m3: projected %.1f us (least %.1f), queries %.1f us, "
      "hiddens %.1f us; %.1f us more than expanded, %.2f x the floor of %.1f us (reading %.1f us, "
      "multiplying %.1f us)\n",
      batch, flags_.context, flags_.heads, projected.median, projected.least, queries, hiddens,
      more, more / floor, floor, read, operations);
  std::fflush(stdout);
  rows_.push_back(absl::StrFormat(
      R"({"bench": "gpu_projected", "weights": "e4m3", "batch": %d, "context": %d, "heads": %d, )"
      R"("expanded_us": %.2f, "projected_us": %.2f, "queries_us": %.2f, "hiddens_us": %.2f, )"
      R"("more_us": %.2f, "floor_us": %.2f, "read_us": %.2f, "operations_us": %.2f})",
      batch, flags_.context, flags_.heads, expanded.median, projected.median, queries, hiddens,
      more, floor, read, operations));
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--batch", &flags.batch},
                        {"--context", &flags.context},
                        {"--heads", &flags.heads},
                        {"--q-lora-rank", &flags.q_lora_rank},
                        {"--hidden-size", &flags.hidden_size},
                        {"--iterations", &flags.iterations},
                        {"--tflops", &flags.tflops},
                        {"--e4m3", &flags.e4m3},
                        {"--json", &flags.json},
                        {"--image", &flags.image}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  if (s.ok() && (flags.batch.empty() || flags.iterations < 1)) {
    s = absl::InvalidArgumentError("--batch and --iterations: want at least one");
  }
  if (!s.ok()) {
    std::fprintf(stderr, "%s\n", s.ToString().c_str());
    return 2;
  }
  auto backend = AnyGpu(flags.image);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    return 1;
  }
  Bench bench(flags, *std::move(backend));
  s = bench.Setup();
  for (const int32_t batch : flags.batch) {
    if (s.ok()) s = bench.Time(batch);
  }
  if (s.ok()) s = WriteJsonRows(flags.json, bench.rows());
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
