// Times the projections around absorbed attention (absorb: 128 to 512, project: 512 to 128 elements
// a head) on this machine's GPU through the backend: GPU time by events, the L2 overwritten before
// each launch, median.
//
//   gpu_project [--heads 16,128] [--rows 1,32,512] [--iterations 30] [--image FILE]
//
// `rows` sequences of one query row each. A line per shape and dtype of the input: microseconds
// (median, least), TB/s of weights read once, TFLOPS.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/hip/hip_backend.h"
#include "kernels/launch_layout.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

using kernels::Bf16;
using kernels::DType;

constexpr int32_t kLora = 512;
constexpr int32_t kRope = 64;
constexpr int32_t kNope = 128;
constexpr int32_t kValue = 128;
constexpr int64_t kFlushBytes = int64_t{256} << 20;

struct Flags {
  std::vector<int32_t> heads{16, 128}, rows{1, 32, 512};
  int32_t iterations = 30;
  std::string image;  // file with device code to use instead of the built-in code
};

struct Shape {
  int32_t heads, rows;
  bool absorb;
  DType in;
  int32_t in_dim() const { return absorb ? kNope + kRope : kLora; }
  int32_t out_dim() const { return absorb ? kLora + kRope : kValue; }
};

class Bench {
 public:
  Bench(const Flags& flags, std::unique_ptr<kernels::hip::HipBackend> backend)
      : flags_(flags), backend_(std::move(backend)) {}

  absl::Status Setup();
  absl::Status Time(const Shape& shape);

 private:
  absl::StatusOr<int64_t> Launch(const Shape& shape);

  Flags flags_;
  std::unique_ptr<kernels::hip::HipBackend> backend_;
  std::unique_ptr<kernels::HostBuffer> in_;
  kernels::hip::DeviceBuffer flush_;
  kernels::LaunchLayout layout_;
  std::vector<kernels::ProjectionRecord> records_;
  kernels::Geometry geometry_;
};

absl::Status Bench::Setup() {
  const int32_t heads = *std::max_element(flags_.heads.begin(), flags_.heads.end());
  const int32_t rows = *std::max_element(flags_.rows.begin(), flags_.rows.end());
  const int64_t tensor = int64_t{rows} * heads * (kLora + kRope) * 4;
  geometry_ = {heads, kLora, kRope, kNope, kValue};
  kernels::BackendLimits limits;
  limits.kv_pool_bytes = 1 << 20;
  limits.page_table_entries = 16;
  limits.weights_slots = 1;
  limits.weights_bytes = int64_t{heads} * kLora * (kNope + kValue) * 2;
  limits.launch_slots = 1;
  limits.launch_requests = rows;
  limits.launch_rows = rows;
  limits.launch_packed_rows = int64_t{rows} * heads;
  limits.max_o_dim = kLora;
  limits.staging_in_bytes = limits.slot_workspace_bytes = tensor;
  limits.max_geometry = geometry_;
  if (absl::Status s = backend_->Configure(limits); !s.ok()) return s;
  layout_ = kernels::LaunchLayout(*backend_, 0);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<Bf16> weights(static_cast<size_t>(heads) * kLora * kNope);
  for (Bf16& x : weights) x = kernels::ToBf16(0.02f * normal(random));
  absl::Status s = backend_->LoadWeights(0, geometry_, 0, heads, weights.data(), weights.data());
  if (!s.ok()) return s;
  auto in = backend_->AllocateHost(static_cast<size_t>(tensor));
  if (!in.ok()) return in.status();
  in_ = *std::move(in);
  // The same bytes serve as values of a bf16 and of an fp32 tensor.
  auto* values = reinterpret_cast<Bf16*>(in_->bytes().data());
  for (int64_t i = 0; i < tensor / 2; ++i) values[i] = weights[static_cast<size_t>(i) % 65536];
  auto flush = kernels::hip::DeviceBuffer::Create(&backend_->runtime(), "flush", kFlushBytes);
  if (!flush.ok()) return flush.status();
  flush_ = *std::move(flush);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Bench::Launch(const Shape& shape) {
  layout_.Clear();
  const int64_t in_size = shape.in == DType::kF32 ? 4 : 2;
  const int64_t in_row = int64_t{shape.heads} * shape.in_dim();
  const int64_t out_row = int64_t{shape.heads} * shape.out_dim();
  auto in = layout_.Input(in_->bytes().data(), shape.rows * in_row * in_size);
  if (!in.ok()) return in.status();
  auto out = layout_.Workspace(shape.rows * out_row * 2);
  if (!out.ok()) return out.status();
  records_.clear();
  for (int32_t row = 0; row < shape.rows; ++row) {
    records_.push_back({static_cast<const std::byte*>(*in) + row * in_row * in_size,
                        static_cast<Bf16*>(*out) + row * out_row, in_row, shape.in_dim(), out_row,
                        shape.out_dim(), 1, shape.heads, 0, 0});
  }
  kernels::Launch launch;
  launch.inputs = layout_.inputs();
  (shape.absorb ? launch.absorb : launch.project) = {
      geometry_, shape.in, DType::kBf16, records_, {}};
  // Overwrites the L2 and keeps the device busy while the host enqueues.
  absl::Status s =
      backend_->runtime().Fill(flush_.at(), 0, kFlushBytes, backend_->compute_stream());
  if (s.ok()) s = backend_->Submit(0, launch);
  if (!s.ok()) return s;
  return backend_->Wait(0);
}

absl::Status Bench::Time(const Shape& shape) {
  std::vector<int64_t> times;
  for (int32_t i = -3; i < flags_.iterations; ++i) {  // the first three warm up
    auto ns = Launch(shape);
    if (!ns.ok()) return ns.status();
    if (i >= 0) times.push_back(*ns);
  }
  std::sort(times.begin(), times.end());
  const double us = static_cast<double>(times[times.size() / 2]) / 1e3;
  const double weights = double{kLora} * kNope * shape.heads;
  std::printf("%s h=%d rows=%d %s: %.1f us (least %.1f) %.2f TB/s %.0f TFLOPS\n",
              shape.absorb ? "absorb " : "project", shape.heads, shape.rows,
              kernels::Name(shape.in), us, static_cast<double>(times[0]) / 1e3,
              2.0 * weights / us / 1e6, 2.0 * weights * shape.rows / us / 1e6);
  std::fflush(stdout);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--heads", &flags.heads},
                        {"--rows", &flags.rows},
                        {"--iterations", &flags.iterations},
                        {"--image", &flags.image}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  if (s.ok() && (flags.heads.empty() || flags.rows.empty() || flags.iterations < 1)) {
    s = absl::InvalidArgumentError("--heads, --rows and --iterations: want at least one");
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
  for (const int32_t heads : flags.heads) {
    for (const int32_t rows : flags.rows) {
      for (const bool absorb : {true, false}) {
        for (const DType in : {DType::kBf16, DType::kF32}) {
          if (s.ok()) s = bench.Time({heads, rows, absorb, in});
        }
      }
    }
  }
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
