// Times steps of a worker and a server, as two processes of one host: the cost of a layer with
// tensors in the server's GPU memory, or in host memory.
//
//   gpu_step --target unix:/run/mla-server/mla.sock [--memory device|chained|host|both]
//            [--profile absorbed|expanded|both] [--batch 1,32] [--layers 61] [--heads 128]
//            [--context 2048]
//            [--steps 20] [--spin-us 100000] [--device 0] [--ops HOST:PORT] [--json FILE]
//
// device: before each attend a kernel of the worker writes every byte of q and kv and reads every
// byte of the last o. The time is measured between two events of the worker's stream around the
// step, divided by the layers. The time of those kernels alone is printed, too. The same follows
// with chained calls (AttendCall::chained; "chained" runs only these): the stream instead of a
// thread waits for replies, and gets all layers ahead. host: the time from the entry in the ring to
// its reply. Results are the medians of the steps, or of their attends.
//
// --ops: where the server answers GET /metrics. A line then gives the host's work for a layer, by
// the server's counters: copied tensor bytes, sleeps of a thread that waited for the GPU, and the
// share of the layer's time in which a thread polled for the worker's kernels, and for the launch.
// The worker copies nothing and never sleeps; it polls for its reply.
//
// Before it times, the program runs a step in each way and compares the outputs of the last layer:
// they must be bit-identical, unless launches cut the contexts differently, as launches of large
// steps from host memory do. Then they may differ as the outputs of one request in two batches: by
// 2^-7 of the largest value of a row and head. NVIDIA only; the worker may use another GPU of the
// host (--device).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "kernels/hip/runtime/gpu_runtime.h"
#include "tests/bench/gpu/gpu_programs.h"
#include "tests/bench/gpu/step_worker.h"
#include "tests/bench/gpu/trace/server_trace.h"

namespace mla::bench {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::hip::DevicePtr;
using kernels::hip::GpuRuntime;

constexpr uint32_t kFillRows = 1024;  // rows of a step that fills the context
constexpr uint32_t kLeaseMs = 60000;
constexpr int kWarmUps = 3;
constexpr char kModel[] = "gpu_step";

double Micros(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Flags {
  std::string target, memory = "both", profile = "both", ops, json;
  std::vector<int32_t> batch{1, 32};
  int32_t layers = 61, heads = 128, context = 2048, steps = 20, spin_us = 100000, device = 0;
};

// Small finite values of either sign.
std::vector<uint16_t> Values(size_t count, uint32_t seed) {
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<uint16_t>(0x3c00u | (seed >> 31) << 15 | (seed >> 16 & 0x1ffu));
  }
  return values;
}

// Times of one way to pass tensors.
struct Times {
  double layer_us = 0;  // median
  double least_us = 0;
  double attend_us = 0;  // from the entry to the reply, median
  double touch_us = 0;   // the worker's kernel alone
  double kernel_us = 0;  // the server's kernels, by its replies
  double queue_us = 0;
  ServerTrace trace;  // per layer; zeros without --ops
};

class Worker {
 public:
  explicit Worker(const Flags& flags) : flags_(flags) {}
  ~Worker();

  absl::Status Open(const std::vector<Point>& points);
  // Returns the outputs of a step's last layer.
  absl::StatusOr<std::vector<std::byte>> LastOutputs(const Point& point, Way way);
  absl::StatusOr<Times> Time(const Point& point, Way way);

 private:
  absl::Status OpenGpu();
  absl::Status RegisterModel(bool weights);
  absl::Status UploadWeights();
  absl::Status Fill(client::Sequence* sequence);
  absl::Status Touch(const Point& point, bool reads);
  absl::Status RunStep(const Point& point, Way way);
  absl::Status RunLayers(client::Step& step, const Point& point, Way way);
  absl::Status Finish(client::PendingAttend& pending, Clock::time_point begun);
  absl::StatusOr<double> TimeTouches(const Point& point);
  absl::Status AwaitStream();
  absl::StatusOr<ServerTrace> Trace() const {
    return flags_.ops.empty() ? ServerTrace() : ReadTrace(flags_.ops);
  }
  client::AttendCall Call(const Point& point, Way way) const;

  const Flags flags_;
  std::unique_ptr<GpuRuntime> gpu_;
  kernels::hip::Stream stream_ = nullptr;
  kernels::hip::Event begin_ = nullptr, end_ = nullptr;
  kernels::hip::Function touch_ = nullptr;
  DevicePtr sink_ = 0;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
  std::vector<client::Sequence> sequences_;
  std::span<std::byte> device_in_, device_out_, host_in_, host_out_;
  std::vector<double> attends_, kernels_, queues_;  // of the steps since the last clear
};

Worker::~Worker() {
  session_.reset();
  sequences_.clear();
  if (client_ != nullptr) client_->UnregisterModel(kModel).IgnoreError();
}

absl::Status Worker::OpenGpu() {
  auto gpu = GpuRuntime::Open(kernels::hip::Vendor::kNvidia, flags_.device, {});
  if (!gpu.ok()) return gpu.status();
  gpu_ = *std::move(gpu);
  const auto code = std::as_bytes(std::span<const char>(kTouchPtx));
  const auto module = gpu_->Load(code);
  if (!module.ok()) return module.status();
  const auto touch = gpu_->Find(*module, kTouchKernel);
  if (!touch.ok()) return touch.status();
  touch_ = *touch;
  const auto stream = gpu_->CreateStream();
  if (!stream.ok()) return stream.status();
  stream_ = *stream;
  for (kernels::hip::Event* event : {&begin_, &end_}) {
    const auto made = gpu_->CreateEvent();
    if (!made.ok()) return made.status();
    *event = *made;
  }
  const auto sink = gpu_->Malloc(kAlignment);
  if (sink.ok()) sink_ = *sink;
  return sink.status();
}

absl::Status Worker::RegisterModel(bool weights) {
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
  if (auto registered = client_->RegisterModel(spec); !registered.ok()) return registered.status();
  return weights ? UploadWeights() : absl::OkStatus();
}

absl::Status Worker::UploadWeights() {
  const uint64_t head_bytes = kLora * (kNope + kValue) * 2;
  const uint64_t most = std::max(head_bytes, client_->info().limits().weight_chunk_bytes());
  const auto heads = static_cast<uint32_t>(std::min<uint64_t>(most / head_bytes, flags_.heads));
  const std::vector<uint16_t> values = Values(heads * head_bytes / 2, 1);
  uint32_t layer = 0, head = 0;
  const auto next = [&]() -> std::optional<client::WeightsChunk> {
    if (layer == static_cast<uint32_t>(flags_.layers)) return std::nullopt;
    client::WeightsChunk chunk{layer, head, std::min(heads, flags_.heads - head), {}};
    chunk.bytes.assign(reinterpret_cast<const char*>(values.data()), chunk.head_count * head_bytes);
    head += chunk.head_count;
    if (head == static_cast<uint32_t>(flags_.heads)) ++layer, head = 0;
    return chunk;
  };
  return client_->UploadWeights(kModel, next).status();
}

absl::Status Worker::Fill(client::Sequence* sequence) {
  const auto context = static_cast<uint32_t>(flags_.context);
  while (sequence->length() < context) {
    const auto rows = std::min(kFillRows, context - static_cast<uint32_t>(sequence->length()));
    const uint64_t bytes = uint64_t{rows} * (kLora + kRope) * 2;
    const std::vector<uint16_t> kv = Values(bytes / 2, static_cast<uint32_t>(sequence->id()));
    std::memcpy(host_in_.data(), kv.data(), bytes);
    auto step = session_->Begin(kModel, {{sequence, rows}}, {.lease_ms = kLeaseMs});
    if (!step.ok()) return step.status();
    for (int32_t layer = 0; layer < flags_.layers; ++layer) {
      client::AttendCall call;
      call.layer = static_cast<uint32_t>(layer);
      call.row_count = rows;
      call.num_heads = static_cast<uint32_t>(flags_.heads);
      call.profile = v1::PROFILE_APPEND_ONLY;
      call.kv = host_in_.data();
      if (absl::Status s = (*step)->Attend(call).status(); !s.ok()) return s;
    }
    if (absl::Status s = (*step)->End().status(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status Worker::Open(const std::vector<Point>& points) {
  uint64_t in = uint64_t{kFillRows} * (kLora + kRope) * 2, out = 0;
  uint32_t batch = 0;
  bool weights = false;
  for (const Point& point : points) {
    in = std::max(in, point.in_bytes);
    out = std::max(out, point.out_bytes);
    batch = std::max(batch, point.batch);
    weights = weights || !point.absorbed;
  }
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kRing;
  options.shared_bytes = AlignUp(in) + AlignUp(out) + (8u << 20);
  options.device_bytes = flags_.memory == "host" ? 0 : options.shared_bytes;
  options.device = flags_.device;
  options.spin_us = static_cast<uint32_t>(flags_.spin_us);
  auto client = client::Client::Connect(flags_.target, options);
  if (!client.ok()) return client.status();
  client_ = *std::move(client);
  if (absl::Status s = RegisterModel(weights); !s.ok()) return s;
  auto session = client_->OpenSession();
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  host_in_ = session_->Allocate(in);
  host_out_ = session_->Allocate(out);
  if (host_in_.empty() || host_out_.empty()) return absl::ResourceExhaustedError("no region");
  if (flags_.memory != "host") {
    if (absl::Status s = OpenGpu(); !s.ok()) return s;
    if (absl::Status s = session_->DeviceStatus(); !s.ok()) return s;
    if (const std::string warning = session_->DeviceWarning(); !warning.empty()) {
      std::fprintf(stderr, "warning: %s\n", warning.c_str());
    }
    device_in_ = session_->AllocateOnDevice(in);
    device_out_ = session_->AllocateOnDevice(out);
    if (device_in_.empty() || device_out_.empty()) {
      return absl::ResourceExhaustedError("no device memory");
    }
  }
  for (uint32_t i = 0; i < batch; ++i) {
    auto sequence = client_->OpenSequence(kModel);
    if (!sequence.ok()) return sequence.status();
    sequences_.push_back(*std::move(sequence));
    if (absl::Status s = Fill(&sequences_.back()); !s.ok()) return s;
  }
  auto* const words = reinterpret_cast<uint32_t*>(host_in_.data());
  for (uint64_t w = 0; w < in / 4; ++w) words[w] = TouchedWord(w);
  return absl::OkStatus();
}

client::AttendCall Worker::Call(const Point& point, Way way) const {
  const bool on_device = way != Way::kHost;
  const std::span<std::byte> in = on_device ? device_in_ : host_in_;
  client::AttendCall call;
  call.row_count = point.batch;
  call.num_heads = static_cast<uint32_t>(flags_.heads);
  call.profile = point.absorbed ? v1::PROFILE_ABSORBED : v1::PROFILE_EXPANDED;
  call.kv = in.data();
  call.q = in.data() + point.kv_bytes;
  call.o = (on_device ? device_out_ : host_out_).data();
  call.stream = stream_;
  call.chained = way == Way::kChained;
  return call;
}

absl::Status Worker::Touch(const Point& point, bool reads) {
  TouchArgs args;
  args.write = reinterpret_cast<DevicePtr>(device_in_.data());
  args.read = reinterpret_cast<DevicePtr>(device_out_.data());
  args.sink = sink_;
  args.write_pieces = static_cast<uint32_t>(point.in_bytes / 16);
  args.read_pieces = reads ? static_cast<uint32_t>(point.out_bytes / 16) : 0;
  const uint32_t pieces = std::max(args.write_pieces, args.read_pieces);
  const uint32_t blocks = (pieces + kTouchThreads - 1) / kTouchThreads;
  return gpu_->Launch(touch_,
                      {.grid_x = std::min(blocks, static_cast<uint32_t>(4 * gpu_->units())),
                       .threads = kTouchThreads},
                      &args, stream_);
}

absl::Status Worker::Finish(client::PendingAttend& pending, Clock::time_point begun) {
  const auto times = pending.Wait();
  if (!times.ok()) return times.status();
  attends_.push_back(Micros(Clock::now() - begun));
  kernels_.push_back(times->kernel_us);
  queues_.push_back(times->queue_us);
  return absl::OkStatus();
}

absl::Status Worker::RunLayers(client::Step& step, const Point& point, Way way) {
  client::AttendCall call = Call(point, way);
  std::vector<client::PendingAttend> chain;
  absl::Status s;
  for (int32_t layer = 0; s.ok() && layer < flags_.layers; ++layer) {
    call.layer = static_cast<uint32_t>(layer);
    if (way != Way::kHost) s = Touch(point, layer > 0);
    if (!s.ok()) return s;
    const Clock::time_point begun = Clock::now();
    client::PendingAttend pending = step.AttendAsync(call);
    if (way == Way::kChained) {
      chain.push_back(std::move(pending));
    } else {
      s = Finish(pending, begun);
    }
  }
  if (s.ok() && way != Way::kHost) {
    s = Touch(point, true);
    if (s.ok()) s = gpu_->Record(end_, stream_);
  }
  for (client::PendingAttend& pending : chain) {
    if (s.ok()) s = Finish(pending, Clock::now());
  }
  return s;
}

absl::Status Worker::RunStep(const Point& point, Way way) {
  std::vector<client::StepRows> rows;
  for (uint32_t i = 0; i < point.batch; ++i) rows.push_back({&sequences_[i], 1});
  auto step = session_->Begin(kModel, rows, {.lease_ms = kLeaseMs});
  if (!step.ok()) return step.status();
  absl::Status s;
  if (way != Way::kHost) s = gpu_->Record(begin_, stream_);
  if (s.ok()) s = RunLayers(**step, point, way);
  if (s.ok() && way != Way::kHost) s = AwaitStream();
  if (!s.ok()) return s;
  // Drops the new rows, so that the context keeps its length.
  return (*step)->End(std::vector<uint32_t>(point.batch, 0)).status();
}

absl::Status Worker::AwaitStream() { return gpu_->Synchronize(stream_); }

absl::StatusOr<std::vector<std::byte>> Worker::LastOutputs(const Point& point, Way way) {
  std::memset(host_out_.data(), 0, host_out_.size());
  if (absl::Status s = RunStep(point, way); !s.ok()) return s;
  std::vector<std::byte> outputs(point.out_bytes);
  if (way == Way::kHost) {
    std::memcpy(outputs.data(), host_out_.data(), outputs.size());
    return outputs;
  }
  absl::Status s = gpu_->CopyOut(outputs.data(), reinterpret_cast<DevicePtr>(device_out_.data()),
                                 static_cast<int64_t>(outputs.size()), stream_);
  if (s.ok()) s = AwaitStream();
  if (!s.ok()) return s;
  return outputs;
}

// Time of one touch, from as many in a row as a step has.
absl::StatusOr<double> Worker::TimeTouches(const Point& point) {
  absl::Status s = gpu_->Record(begin_, stream_);
  for (int32_t i = 0; s.ok() && i <= flags_.layers; ++i) s = Touch(point, true);
  if (s.ok()) s = gpu_->Record(end_, stream_);
  if (s.ok()) s = AwaitStream();
  if (!s.ok()) return s;
  const auto ns = gpu_->ElapsedNs(begin_, end_);
  if (!ns.ok()) return ns.status();
  return static_cast<double>(*ns) / 1e3 / (flags_.layers + 1);
}

absl::StatusOr<Times> Worker::Time(const Point& point, Way way) {
  const bool on_device = way != Way::kHost;
  Times times;
  if (on_device) {
    const auto touch = TimeTouches(point);
    if (!touch.ok()) return touch.status();
    times.touch_us = *touch;
  }
  std::vector<double> layers;
  absl::StatusOr<ServerTrace> before;
  for (int32_t i = -kWarmUps; i < flags_.steps; ++i) {
    if (i == 0) {
      attends_.clear(), kernels_.clear(), queues_.clear();
      before = Trace();
    }
    if (absl::Status s = RunStep(point, way); !s.ok()) return s;
    if (i < 0 || !on_device) continue;
    const auto ns = gpu_->ElapsedNs(begin_, end_);
    if (!ns.ok()) return ns.status();
    layers.push_back(static_cast<double>(*ns) / 1e3 / flags_.layers);
  }
  const absl::StatusOr<ServerTrace> after = Trace();
  if (!before.ok()) return before.status();
  if (!after.ok()) return after.status();
  times.trace = after->Since(*before, 1.0 * flags_.steps * flags_.layers);
  times.attend_us = Median(attends_);
  times.kernel_us = Median(kernels_);
  times.queue_us = Median(queues_);
  const std::vector<double>& measured = on_device ? layers : attends_;
  times.layer_us = Median(measured);
  times.least_us = *std::min_element(measured.begin(), measured.end());
  return times;
}

absl::Status Compare(Worker& worker, const Point& point, const std::string& name) {
  const auto host = worker.LastOutputs(point, Way::kHost);
  if (!host.ok()) return host.status();
  if (std::all_of(host->begin(), host->end(), [](std::byte b) { return b == std::byte{0}; })) {
    return absl::DataLossError("the outputs are zeros");
  }
  for (const Way way : {Way::kDevice, Way::kChained}) {
    const auto device = worker.LastOutputs(point, way);
    if (!device.ok()) return device.status();
    size_t differ = 0;
    for (size_t i = 0; i < host->size(); ++i) differ += (*host)[i] != (*device)[i] ? 1 : 0;
    const double worst = WorstOfAllowed(*host, *device, point.absorbed ? kLora : kValue);
    std::printf("%s: outputs, host and %s: %zu of %zu bytes differ, by %.3f of the bound\n",
                name.c_str(), NameOf(way), differ, host->size(), worst);
    if (!(worst <= 1)) return absl::DataLossError("the outputs differ");
  }
  return absl::OkStatus();
}

std::string Report(const Flags& flags, const Point& point, Way way, const Times& times) {
  const std::string name = absl::StrFormat("%s %s b=%d", NameOf(way),
                                           point.absorbed ? "absorbed" : "expanded", point.batch);
  std::printf(
      "%-22s %7.1f us a layer (least %.1f), attend %.1f, kernels %.0f, queue %.0f, touch %.1f\n",
      name.c_str(), times.layer_us, times.least_us, times.attend_us, times.kernel_us,
      times.queue_us, times.touch_us);
  const ServerTrace& trace = times.trace;
  if (!flags.ops.empty()) {
    std::printf(
        "%-22s a layer: %.0f bytes copied by the host, %.3f sleeps, polling %.1f us (worker's "
        "kernels) and %.1f us (launch), %.0f %%\n",
        "", trace.copied_bytes, trace.sleeps, trace.client_polling_us, trace.launch_polling_us,
        100 * (trace.client_polling_us + trace.launch_polling_us) / times.layer_us);
  }
  std::fflush(stdout);
  return absl::StrFormat(
      R"({"bench": "gpu_step", "memory": "%s", "profile": "%s", "heads": %d, "batch": %d, )"
      R"("context": %d, "layers": %d, "us": %.1f, "least_us": %.1f, "attend_us": %.1f, )"
      R"("kernel_us": %.1f, "touch_us": %.1f, "copied_bytes": %.0f, "sleeps": %.3f, )"
      R"("client_polling_us": %.1f, "launch_polling_us": %.1f})",
      NameOf(way), point.absorbed ? "absorbed" : "expanded", flags.heads, point.batch,
      flags.context, flags.layers, times.layer_us, times.least_us, times.attend_us, times.kernel_us,
      times.touch_us, trace.copied_bytes, trace.sleeps, trace.client_polling_us,
      trace.launch_polling_us);
}

absl::Status Run(const Flags& flags) {
  std::vector<Point> points;
  for (const bool absorbed : {true, false}) {
    if (flags.profile == (absorbed ? "expanded" : "absorbed")) continue;
    for (const int32_t batch : flags.batch)
      points.push_back(MakePoint(flags.heads, absorbed, batch));
  }
  Worker worker(flags);
  if (absl::Status s = worker.Open(points); !s.ok()) return s;
  std::vector<std::string> rows;
  for (const Point& point : points) {
    if (flags.memory == "both") {
      const std::string name =
          absl::StrCat(point.absorbed ? "absorbed" : "expanded", " b=", point.batch);
      if (absl::Status s = Compare(worker, point, name); !s.ok()) return s;
    }
    for (const Way way : {Way::kDevice, Way::kChained, Way::kHost}) {
      if (flags.memory == (way == Way::kHost ? "device" : "host")) continue;
      if (flags.memory == "chained" && way != Way::kChained) continue;
      const auto times = worker.Time(point, way);
      if (!times.ok()) return times.status();
      rows.push_back(Report(flags, point, way, *times));
    }
  }
  return WriteJsonRows(flags.json, rows);
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {
      {"--target", &flags.target},   {"--memory", &flags.memory}, {"--profile", &flags.profile},
      {"--batch", &flags.batch},     {"--layers", &flags.layers}, {"--heads", &flags.heads},
      {"--context", &flags.context}, {"--steps", &flags.steps},   {"--spin-us", &flags.spin_us},
      {"--device", &flags.device},   {"--ops", &flags.ops},       {"--json", &flags.json}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  if (s.ok() && flags.target.empty()) s = absl::InvalidArgumentError("--target is missing");
  if (s.ok()) s = Run(flags);
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
