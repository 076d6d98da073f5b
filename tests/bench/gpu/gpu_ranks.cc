// Times steps that several ranks share, as one process next to a server: each rank is a client with
// a ring, a stream and a slice of the heads of its own, as with tensor parallelism.
//
//   gpu_ranks --target unix:/run/mla-server/mla.sock [--ranks 2] [--profile absorbed|expanded|both]
//             [--batch 1,32] [--layers 61] [--heads 128] [--context 2048] [--steps 20]
//             [--spin-us 100000] [--device 0]
//
// Before each attend a kernel writes every byte of a rank's q, rank 0's kv, and reads every byte of
// its last o. Then all streams wait for all of these kernels, as for a sum over the ranks. Steps
// whose calls a thread awaits are followed by steps of chained calls; the program compares the
// outputs of their last layers, which may differ by 2^-7 of the largest value of a row and head.
// The time is measured between two events of rank 0's stream around the step, divided by the
// layers; the median of the steps. The server's mla_launches_ahead_total says how many launches
// went ahead. NVIDIA only.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "tests/bench/gpu/gpu_programs.h"
#include "tests/bench/gpu/step_worker.h"

namespace mla::bench {
namespace {

using kernels::hip::DevicePtr;
using kernels::hip::GpuRuntime;

constexpr uint32_t kFillRows = 1024;  // rows of a step that fills the context
constexpr uint32_t kLeaseMs = 60000;
constexpr int kWarmUps = 3;
constexpr char kModel[] = "gpu_ranks";

struct Flags {
  std::string target, profile = "both";
  std::vector<int32_t> batch{1, 32};
  int32_t ranks = 2, layers = 61, heads = 128, context = 2048, steps = 20, spin_us = 100000,
          device = 0;
};

std::vector<uint16_t> Values(size_t count, uint32_t seed) {
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<uint16_t>(0x3c00u | (seed >> 31) << 15 | (seed >> 16 & 0x1ffu));
  }
  return values;
}

struct Rank {
  std::unique_ptr<client::Client> client;
  std::unique_ptr<client::Session> session;
  kernels::hip::Stream stream = nullptr;
  kernels::hip::Event touched = nullptr;
  std::span<std::byte> in, out;
};

class Worker {
 public:
  explicit Worker(const Flags& flags) : flags_(flags) {}
  ~Worker() {
    for (Rank& rank : ranks_) rank.session.reset();
    sequences_.clear();
    if (!ranks_.empty()) ranks_[0].client->UnregisterModel(kModel).IgnoreError();
  }

  absl::Status Open(const std::vector<Point>& points);
  // Returns the time of a layer in us.
  absl::StatusOr<double> RunStep(const Point& point, bool chained);
  // The outputs of the last step's last layer, rank by rank.
  absl::StatusOr<std::vector<std::byte>> Outputs(const Point& point);

 private:
  absl::Status OpenGpu();
  absl::Status OpenRank(uint64_t in, uint64_t out);
  absl::Status RegisterModel(client::Client& client, bool weights) const;
  absl::Status Fill(client::Sequence* sequence);
  absl::Status Touch(const Point& point);
  absl::Status RunLayers(const std::vector<std::unique_ptr<client::Step>>& steps,
                         const Point& point, bool chained);

  const Flags flags_;
  std::unique_ptr<GpuRuntime> gpu_;
  kernels::hip::Event begin_ = nullptr, end_ = nullptr;
  kernels::hip::Function touch_ = nullptr;
  DevicePtr sink_ = 0;
  std::vector<Rank> ranks_;
  std::vector<client::Sequence> sequences_;
  uint64_t step_ = 0;
};

absl::Status Worker::OpenGpu() {
  auto gpu = GpuRuntime::Open(kernels::hip::Vendor::kNvidia, flags_.device, {});
  if (!gpu.ok()) return gpu.status();
  gpu_ = *std::move(gpu);
  const auto module = gpu_->Load(std::as_bytes(std::span<const char>(kTouchPtx)));
  if (!module.ok()) return module.status();
  const auto touch = gpu_->Find(*module, kTouchKernel);
  if (!touch.ok()) return touch.status();
  touch_ = *touch;
  for (kernels::hip::Event* event : {&begin_, &end_}) {
    const auto made = gpu_->CreateEvent();
    if (!made.ok()) return made.status();
    *event = *made;
  }
  const auto sink = gpu_->Malloc(kAlignment);
  if (sink.ok()) sink_ = *sink;
  return sink.status();
}

absl::Status Worker::RegisterModel(client::Client& client, bool weights) const {
  v1::ModelSpec spec;
  spec.set_model_id(kModel);
  spec.set_layers(flags_.layers);
  v1::Geometry& geometry = *spec.mutable_geometry();
  geometry.set_num_heads(flags_.heads);
  geometry.set_kv_lora_rank(kLora);
  geometry.set_rope_dim(kRope);
  geometry.set_nope_dim(kNope);
  geometry.set_v_dim(kValue);
  spec.set_softmax_scale(0.0721687f);
  spec.set_rope_owner(v1::ROPE_OWNER_WORKER);
  if (auto registered = client.RegisterModel(spec); !registered.ok()) return registered.status();
  if (!weights) return absl::OkStatus();
  const uint64_t head_bytes = kLora * (kNope + kValue) * 2;
  const std::vector<uint16_t> values = Values(head_bytes / 2, 1);
  uint32_t next_head = 0;
  const auto heads = static_cast<uint32_t>(flags_.heads);
  const auto next = [&]() -> std::optional<client::WeightsChunk> {
    const uint32_t head = next_head++;
    if (head == heads * static_cast<uint32_t>(flags_.layers)) return std::nullopt;
    client::WeightsChunk chunk{head / heads, head % heads, 1, {}};
    chunk.bytes.assign(reinterpret_cast<const char*>(values.data()), head_bytes);
    return chunk;
  };
  return client.UploadWeights(kModel, next).status();
}

absl::Status Worker::OpenRank(uint64_t in, uint64_t out) {
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kRing;
  options.shared_bytes = uint64_t{kFillRows} * (kLora + kRope) * 2 + (8u << 20);
  options.device_bytes = AlignUp(in) + AlignUp(out) + (8u << 20);
  options.device = flags_.device;
  options.spin_us = static_cast<uint32_t>(flags_.spin_us);
  Rank& rank = ranks_.emplace_back();
  auto client = client::Client::Connect(flags_.target, options);
  if (!client.ok()) return client.status();
  rank.client = *std::move(client);
  auto session = rank.client->OpenSession();
  if (!session.ok()) return session.status();
  rank.session = *std::move(session);
  if (absl::Status s = rank.session->DeviceStatus(); !s.ok()) return s;
  rank.in = rank.session->AllocateOnDevice(in);
  rank.out = rank.session->AllocateOnDevice(out);
  if (rank.in.empty() || rank.out.empty()) return absl::ResourceExhaustedError("no device memory");
  const auto stream = gpu_->CreateStream();
  if (!stream.ok()) return stream.status();
  rank.stream = *stream;
  const auto event = gpu_->CreateEvent();
  if (event.ok()) rank.touched = *event;
  return event.status();
}

absl::Status Worker::Fill(client::Sequence* sequence) {
  client::Session& session = *ranks_[0].session;
  const auto context = static_cast<uint32_t>(flags_.context);
  while (sequence->length() < context) {
    const auto rows = std::min(kFillRows, context - static_cast<uint32_t>(sequence->length()));
    const std::vector<uint16_t> kv =
        Values(uint64_t{rows} * (kLora + kRope), static_cast<uint32_t>(sequence->id()));
    auto step = session.Begin(kModel, {{sequence, rows}}, {.lease_ms = kLeaseMs});
    if (!step.ok()) return step.status();
    for (int32_t layer = 0; layer < flags_.layers; ++layer) {
      client::AttendCall call;
      call.layer = static_cast<uint32_t>(layer);
      call.row_count = rows;
      call.num_heads = static_cast<uint32_t>(flags_.heads);
      call.profile = v1::PROFILE_APPEND_ONLY;
      call.kv = kv.data();
      if (absl::Status s = (*step)->Attend(call).status(); !s.ok()) return s;
    }
    if (absl::Status s = (*step)->End().status(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status Worker::Open(const std::vector<Point>& points) {
  uint64_t in = 0, out = 0;
  uint32_t batch = 0;
  bool weights = false;
  for (const Point& point : points) {
    in = std::max(in, point.in_bytes);
    out = std::max(out, point.out_bytes);
    batch = std::max(batch, point.batch);
    weights = weights || !point.absorbed;
  }
  if (absl::Status s = OpenGpu(); !s.ok()) return s;
  ranks_.reserve(static_cast<size_t>(flags_.ranks));
  for (int32_t rank = 0; rank < flags_.ranks; ++rank) {
    if (absl::Status s = OpenRank(in, out); !s.ok()) return s;
  }
  if (absl::Status s = RegisterModel(*ranks_[0].client, weights); !s.ok()) return s;
  for (uint32_t i = 0; i < batch; ++i) {
    auto sequence = ranks_[0].client->OpenSequence(kModel);
    if (!sequence.ok()) return sequence.status();
    sequences_.push_back(*std::move(sequence));
    if (absl::Status s = Fill(&sequences_.back()); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// The ranks' kernels between two layers, and a wait for all of them.
absl::Status Worker::Touch(const Point& point) {
  absl::Status s;
  for (Rank& rank : ranks_) {
    TouchArgs args;
    args.write = reinterpret_cast<DevicePtr>(rank.in.data());
    args.read = reinterpret_cast<DevicePtr>(rank.out.data());
    args.sink = sink_;
    args.write_pieces = static_cast<uint32_t>(point.in_bytes / 16);
    args.read_pieces = static_cast<uint32_t>(point.out_bytes / 16);
    const uint32_t pieces = std::max(args.write_pieces, args.read_pieces);
    const uint32_t blocks = (pieces + kTouchThreads - 1) / kTouchThreads;
    const auto most = static_cast<uint32_t>(gpu_->units());
    if (s.ok()) {
      s = gpu_->Launch(touch_, {.grid_x = std::min(blocks, most), .threads = kTouchThreads}, &args,
                       rank.stream);
    }
    if (s.ok()) s = gpu_->Record(rank.touched, rank.stream);
  }
  for (const Rank& rank : ranks_) {
    for (const Rank& other : ranks_) {
      if (s.ok() && &other != &rank) s = gpu_->WaitFor(rank.stream, other.touched);
    }
  }
  return s;
}

absl::Status Worker::RunLayers(const std::vector<std::unique_ptr<client::Step>>& steps,
                               const Point& point, bool chained) {
  std::vector<client::PendingAttend> pending;
  absl::Status s;
  const auto collect = [&] {
    for (client::PendingAttend& one : pending) {
      const absl::Status waited = one.Wait().status();
      if (s.ok()) s = waited;
    }
    pending.clear();
  };
  for (int32_t layer = 0; s.ok() && layer < flags_.layers; ++layer) {
    s = Touch(point);
    for (size_t i = 0; s.ok() && i < ranks_.size(); ++i) {
      client::AttendCall call;
      call.layer = static_cast<uint32_t>(layer);
      call.row_count = point.batch;
      call.num_heads = static_cast<uint32_t>(flags_.heads / flags_.ranks);
      call.head_offset = call.num_heads * static_cast<uint32_t>(i);
      call.profile = point.absorbed ? v1::PROFILE_ABSORBED : v1::PROFILE_EXPANDED;
      call.kv = i == 0 ? ranks_[i].in.data() : nullptr;
      call.q = ranks_[i].in.data() + point.kv_bytes;
      call.o = ranks_[i].out.data();
      call.stream = ranks_[i].stream;
      call.chained = chained;
      pending.push_back(steps[i]->AttendAsync(call));
    }
    if (!chained) collect();
  }
  if (s.ok()) s = Touch(point);
  if (s.ok()) s = gpu_->Record(end_, ranks_[0].stream);
  collect();
  return s;
}

absl::StatusOr<double> Worker::RunStep(const Point& point, bool chained) {
  std::vector<client::StepRows> rows;
  for (uint32_t i = 0; i < point.batch; ++i) rows.push_back({&sequences_[i], 1});
  client::BeginOptions options{.step_id = (uint64_t{1} << 40) + ++step_, .lease_ms = kLeaseMs};
  options.participants = static_cast<uint32_t>(flags_.ranks);
  std::vector<std::unique_ptr<client::Step>> steps;
  for (Rank& rank : ranks_) {
    auto step = rank.session->Begin(kModel, rows, options);
    if (!step.ok()) return step.status();
    steps.push_back(*std::move(step));
  }
  absl::Status s = gpu_->Record(begin_, ranks_[0].stream);
  if (s.ok()) s = RunLayers(steps, point, chained);
  for (const Rank& rank : ranks_) {
    if (s.ok()) s = gpu_->Synchronize(rank.stream);
  }
  if (!s.ok()) return s;
  // Drops the new rows, so that the context keeps its length.
  s = steps[0]->End(std::vector<uint32_t>(point.batch, 0)).status();
  if (!s.ok()) return s;
  const auto ns = gpu_->ElapsedNs(begin_, end_);
  if (!ns.ok()) return ns.status();
  return static_cast<double>(*ns) / 1e3 / flags_.layers;
}

absl::StatusOr<std::vector<std::byte>> Worker::Outputs(const Point& point) {
  std::vector<std::byte> outputs(ranks_.size() * point.out_bytes);
  for (size_t i = 0; i < ranks_.size(); ++i) {
    absl::Status s = gpu_->CopyOut(outputs.data() + i * point.out_bytes,
                                   reinterpret_cast<DevicePtr>(ranks_[i].out.data()),
                                   static_cast<int64_t>(point.out_bytes), ranks_[i].stream);
    if (s.ok()) s = gpu_->Synchronize(ranks_[i].stream);
    if (!s.ok()) return s;
  }
  return outputs;
}

absl::Status RunPoint(Worker& worker, const Flags& flags, const Point& point) {
  std::vector<std::byte> awaited;
  for (const bool chained : {false, true}) {
    std::vector<double> layers;
    for (int32_t i = -kWarmUps; i < flags.steps; ++i) {
      const auto us = worker.RunStep(point, chained);
      if (!us.ok()) return us.status();
      if (i >= 0) layers.push_back(*us);
    }
    const auto outputs = worker.Outputs(point);
    if (!outputs.ok()) return outputs.status();
    if (!chained) awaited = *outputs;
    const double worst = WorstOfAllowed(awaited, *outputs, point.absorbed ? kLora : kValue);
    std::nth_element(layers.begin(), layers.begin() + layers.size() / 2, layers.end());
    std::printf("%s %s b=%u, %d ranks: %.1f us a layer; outputs differ by %.3f of the bound\n",
                chained ? "chained" : "awaited", point.absorbed ? "absorbed" : "expanded",
                point.batch, flags.ranks, layers[layers.size() / 2], worst);
    std::fflush(stdout);
    if (!(worst <= 1)) return absl::DataLossError("the outputs differ");
  }
  if (std::all_of(awaited.begin(), awaited.end(), [](std::byte b) { return b == std::byte{0}; })) {
    return absl::DataLossError("the outputs are zeros");
  }
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  if (flags.ranks < 1 || flags.heads % flags.ranks != 0) {
    return absl::InvalidArgumentError("--ranks: want a divisor of --heads");
  }
  std::vector<Point> points;
  for (const bool absorbed : {true, false}) {
    if (flags.profile == (absorbed ? "expanded" : "absorbed")) continue;
    for (const int32_t batch : flags.batch) {
      points.push_back(MakePoint(flags.heads / flags.ranks, absorbed, batch));
    }
  }
  Worker worker(flags);
  if (absl::Status s = worker.Open(points); !s.ok()) return s;
  for (const Point& point : points) {
    if (absl::Status s = RunPoint(worker, flags, point); !s.ok()) return s;
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--target", &flags.target},   {"--profile", &flags.profile},
                        {"--batch", &flags.batch},     {"--ranks", &flags.ranks},
                        {"--layers", &flags.layers},   {"--heads", &flags.heads},
                        {"--context", &flags.context}, {"--steps", &flags.steps},
                        {"--spin-us", &flags.spin_us}, {"--device", &flags.device}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  if (s.ok() && flags.target.empty()) s = absl::InvalidArgumentError("--target is missing");
  if (s.ok()) s = Run(flags);
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
