// Times copies between pinned host memory and the memory of this machine's GPU: each direction
// alone, and both at the same time on streams of their own. This is the least time of a launch with
// such tensors.
//
//   gpu_copies [--in-kib 4608] [--out-kib 4096] [--pieces 1,4,8] [--iterations 60]
//
// The defaults are the queries and the outputs of 32 rows of 128 heads in the absorbed form, in
// bf16. The first line is for each direction alone, in one piece; then there is a line for each
// number of pieces. Times are medians in microseconds, by events: from before the first copy until
// all inputs have arrived, and until all outputs have.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/hip/hip_backend.h"
#include "kernels/hip/runtime/device_memory.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

using kernels::hip::DeviceBuffer;
using kernels::hip::DevicePtr;
using kernels::hip::Event;
using kernels::hip::GpuRuntime;
using kernels::hip::PinnedBuffer;
using kernels::hip::Stream;

struct Flags {
  int64_t in_kib = 4608, out_kib = 4096;
  std::vector<int32_t> pieces{1, 4, 8};
  int32_t iterations = 60;
};

struct Times {
  double in_us = 0, out_us = 0;
};

class Bench {
 public:
  Bench(const Flags& flags, GpuRuntime* runtime) : flags_(flags), runtime_(runtime) {}
  ~Bench() {
    for (Event event : {begun_, in_, out_}) runtime_->Destroy(event);
    for (Stream stream : streams_) runtime_->Destroy(stream);
  }

  absl::Status Setup();
  // Medians for copies in `pieces` pieces.
  absl::StatusOr<Times> Time(bool in, bool out, int64_t pieces);

 private:
  // Begin and bytes of piece `index` of `pieces`.
  static std::pair<int64_t, int64_t> Piece(int64_t bytes, int64_t pieces, int64_t index) {
    const int64_t begin = bytes * index / pieces;
    return {begin, bytes * (index + 1) / pieces - begin};
  }
  absl::Status Copy(bool in, bool out, int64_t pieces);

  Flags flags_;
  GpuRuntime* runtime_;
  Stream streams_[2] = {};
  Event begun_ = nullptr, in_ = nullptr, out_ = nullptr;
  PinnedBuffer host_in_, host_out_;
  DeviceBuffer device_in_, device_out_;
};

absl::Status Bench::Setup() {
  for (Stream& stream : streams_) {
    auto made = runtime_->CreateStream();
    if (!made.ok()) return made.status();
    stream = *made;
  }
  for (Event* event : {&begun_, &in_, &out_}) {
    auto made = runtime_->CreateEvent();
    if (!made.ok()) return made.status();
    *event = *made;
  }
  for (const auto& [kib, host, device] : {std::tuple(flags_.in_kib, &host_in_, &device_in_),
                                          std::tuple(flags_.out_kib, &host_out_, &device_out_)}) {
    auto pinned = PinnedBuffer::Create(runtime_, "copied", kib * 1024);
    if (!pinned.ok()) return pinned.status();
    *host = *std::move(pinned);
    auto buffer = DeviceBuffer::Create(runtime_, "copied", kib * 1024);
    if (!buffer.ok()) return buffer.status();
    *device = *std::move(buffer);
  }
  return absl::OkStatus();
}

absl::Status Bench::Copy(bool in, bool out, int64_t pieces) {
  absl::Status s = runtime_->Record(begun_, streams_[0]);
  if (s.ok()) s = runtime_->WaitFor(streams_[1], begun_);
  for (int64_t i = 0; i < pieces && s.ok(); ++i) {
    if (in) {
      const auto [at, bytes] = Piece(host_in_.size(), pieces, i);
      s = runtime_->CopyIn(device_in_.at() + static_cast<DevicePtr>(at), host_in_.data() + at,
                           bytes, streams_[0]);
    }
    if (out && s.ok()) {
      const auto [at, bytes] = Piece(host_out_.size(), pieces, i);
      s = runtime_->CopyOut(host_out_.data() + at, device_out_.at() + static_cast<DevicePtr>(at),
                            bytes, streams_[1]);
    }
  }
  if (s.ok()) s = runtime_->Record(in_, streams_[0]);
  if (s.ok()) s = runtime_->Record(out_, streams_[1]);
  for (Stream stream : streams_) {
    if (s.ok()) s = runtime_->Synchronize(stream);
  }
  return s;
}

absl::StatusOr<Times> Bench::Time(bool in, bool out, int64_t pieces) {
  constexpr int32_t kWarmUp = 5;
  std::vector<int64_t> ins, outs;
  for (int32_t i = -kWarmUp; i < flags_.iterations; ++i) {
    if (absl::Status s = Copy(in, out, pieces); !s.ok()) return s;
    const auto in_ns = runtime_->ElapsedNs(begun_, in_), out_ns = runtime_->ElapsedNs(begun_, out_);
    if (!in_ns.ok() || !out_ns.ok()) return in_ns.ok() ? out_ns.status() : in_ns.status();
    if (i < 0) continue;
    ins.push_back(*in_ns);
    outs.push_back(*out_ns);
  }
  const auto median = [](std::vector<int64_t>& times) {
    std::sort(times.begin(), times.end());
    return static_cast<double>(times[times.size() / 2]) / 1e3;
  };
  return Times{median(ins), median(outs)};
}

absl::Status Run(Bench& bench, const Flags& flags) {
  if (absl::Status s = bench.Setup(); !s.ok()) return s;
  const auto in = bench.Time(true, false, 1), out = bench.Time(false, true, 1);
  if (!in.ok() || !out.ok()) return in.ok() ? out.status() : in.status();
  std::printf("one direction, 1 piece: in %.1f us, out %.1f us\n", in->in_us, out->out_us);
  for (const int32_t pieces : flags.pieces) {
    const auto both = bench.Time(true, true, pieces);
    if (!both.ok()) return both.status();
    std::printf("both, in %d pieces each: in %.1f us, out %.1f us\n", pieces, both->in_us,
                both->out_us);
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--in-kib", &flags.in_kib},
                        {"--out-kib", &flags.out_kib},
                        {"--pieces", &flags.pieces},
                        {"--iterations", &flags.iterations}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  const bool pieces = std::all_of(flags.pieces.begin(), flags.pieces.end(),
                                  [](int32_t count) { return count >= 1; });
  if (s.ok() && (flags.in_kib < 1 || flags.out_kib < 1 || flags.iterations < 1 || !pieces)) {
    s = absl::InvalidArgumentError(
        "--in-kib, --out-kib, --pieces and --iterations: want at least one");
  }
  if (!s.ok()) {
    std::fprintf(stderr, "%s\n", s.ToString().c_str());
    return 2;
  }
  auto backend = AnyGpu();
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    return 1;
  }
  Bench bench(flags, &(*backend)->runtime());
  s = Run(bench, flags);
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
