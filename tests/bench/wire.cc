// What the service costs beside the kernel, by path, between two processes.
//
//   wire_benchmark [--json FILE] [--seconds S]     (S: time for one row, default 0.4)
//
// Paths: grpc_unary and grpc_stream are bare gRPC without server logic; inline is an Attend stream
// over gRPC; shm the same with tensors in shared memory; ring_futex and ring_spin the command ring
// with both sides sleeping or spinning. The kernel computes nothing. One request is under way at a
// time: a decode step is 61 dependent calls.
//
// p50_us and p99_us: one attend, from handing the request over to holding its reply. gbps: tensor
// bytes of both directions over that time plus the time to write each byte once on the sending
// side and to read it once on the receiving side. copied_bytes: payload bytes that the server
// copied per attend. allocations: heap allocations of the whole server process per attend.
// token_ms: a whole step of 61 layers, begin and end included. `x bare`: ratio to grpc_stream.
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "client/cpp/shared_memory.h"
#include "client/cpp/stream.h"
#include "mla/v1/sequence.grpc.pb.h"
#include "tests/bench/wire_server.h"

namespace mla::bench {
namespace {

using Clock = std::chrono::steady_clock;
using client::PendingReply;
using client::SharedMemory;
using Stub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

constexpr auto kTimeout = std::chrono::seconds(60);

struct Shape {
  const char* name;
  v1::Profile profile;
  uint32_t batch;
  uint64_t kv() const { return uint64_t{batch} * (kLora + kRope) * 2; }
  uint64_t q() const {
    const uint32_t dim = profile == v1::PROFILE_ABSORBED ? kLora + kRope : kNope + kRope;
    return uint64_t{batch} * kHeads * dim * 2;
  }
  uint64_t o() const {
    return uint64_t{batch} * kHeads * (profile == v1::PROFILE_ABSORBED ? kLora : kV) * 2;
  }
  uint64_t in() const { return kv() + q(); }  // kv is a multiple of 64 bytes
};

constexpr Shape kShapes[] = {
    {"EXPANDED-1", v1::PROFILE_EXPANDED, 1},     {"EXPANDED-32", v1::PROFILE_EXPANDED, 32},
    {"EXPANDED-128", v1::PROFILE_EXPANDED, 128}, {"ABSORBED-1", v1::PROFILE_ABSORBED, 1},
    {"ABSORBED-32", v1::PROFILE_ABSORBED, 32},   {"ABSORBED-128", v1::PROFILE_ABSORBED, 128},
};

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "wire_benchmark: %s\n", why.c_str());
  std::exit(1);
}

void Check(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

v1::AttendStreamRequest AttendOf(const Shape& shape, uint64_t step, uint32_t layer) {
  v1::AttendStreamRequest request;
  v1::Attend* attend = request.mutable_attend();
  attend->set_step_id(step);
  attend->set_layer(layer);
  attend->set_row_count(shape.batch);
  attend->set_num_heads(kHeads);
  attend->set_profile(shape.profile);
  attend->set_has_kv(true);
  return request;
}

// One way to the server. `in` and `out` are where the tensors of an attend are written and read.
class Path {
 public:
  virtual ~Path() = default;
  virtual void Call(v1::AttendStreamRequest request) = 0;  // begin, end or abort
  virtual void Attend(uint64_t step, uint32_t layer) = 0;
  virtual bool commits() const { return true; }  // false: there is no service behind it
  std::span<std::byte> in, out;
};

// --- Bare gRPC: the message's first eight bytes say how large the reply is to be.
class BareStream final : public Path,
                         public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  BareStream(const std::shared_ptr<grpc::Channel>& channel, const Shape& shape)
      : in_memory_(shape.in()), out_memory_(shape.o()) {
    in = in_memory_;
    out = out_memory_;
    Stub(channel).PrepareBidiStreamingCall(&context_, kBareStream, {}, this);
    AddHold();
    StartRead(&incoming_);
    StartCall();
  }
  ~BareStream() override {
    StartWritesDone();
    RemoveHold();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  void Call(v1::AttendStreamRequest) override {}
  bool commits() const override { return false; }
  void Attend(uint64_t, uint32_t) override {
    const uint64_t wanted = out.size();
    std::memcpy(in.data(), &wanted, sizeof(wanted));
    const grpc::Slice slice(in.data(), in.size(), grpc::Slice::STATIC_SLICE);
    outgoing_ = grpc::ByteBuffer(&slice, 1);
    StartWrite(&outgoing_);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return answered_ && written_; });
    answered_ = written_ = false;
  }
  void OnWriteDone(bool) override {
    const std::lock_guard lock(mutex_);
    written_ = true;
    changed_.notify_all();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    std::vector<grpc::Slice> slices;
    if (!incoming_.Dump(&slices).ok()) Die("a reply cannot be read");
    std::byte* to = out.data();
    for (const grpc::Slice& slice : slices) {
      std::memcpy(to, slice.begin(), slice.size());
      to += slice.size();
    }
    slices.clear();
    incoming_.Clear();
    StartRead(&incoming_);
    const std::lock_guard lock(mutex_);
    answered_ = true;
    changed_.notify_all();
  }
  void OnDone(const grpc::Status&) override {
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

 private:
  std::vector<std::byte> in_memory_, out_memory_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_, outgoing_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool answered_ = false, written_ = false, done_ = false;
};

class BareUnary final : public Path {
 public:
  BareUnary(const std::shared_ptr<grpc::Channel>& channel, const Shape& shape)
      : stub_(channel), in_memory_(shape.in()), out_memory_(shape.o()) {
    in = in_memory_;
    out = out_memory_;
  }
  void Call(v1::AttendStreamRequest) override {}
  bool commits() const override { return false; }
  void Attend(uint64_t, uint32_t) override {
    const uint64_t wanted = out.size();
    std::memcpy(in.data(), &wanted, sizeof(wanted));
    const grpc::Slice slice(in.data(), in.size(), grpc::Slice::STATIC_SLICE);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer reply;
    grpc::ClientContext context;
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    grpc::Status result;
    stub_.UnaryCall(&context, kBareUnary, {}, &request, &reply, [&](grpc::Status status) {
      const std::lock_guard lock(mutex);
      result = std::move(status);
      done = true;
      changed.notify_all();
    });
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
    std::vector<grpc::Slice> slices;
    if (!result.ok() || !reply.Dump(&slices).ok()) Die("a unary call failed");
    std::byte* to = out.data();
    for (const grpc::Slice& part : slices) {
      std::memcpy(to, part.begin(), part.size());
      to += part.size();
    }
  }

 private:
  Stub stub_;
  std::vector<std::byte> in_memory_, out_memory_;
};

// --- The service over gRPC, with tensors in the message or in shared memory.
class ServiceStream final : public Path {
 public:
  ServiceStream(const std::shared_ptr<grpc::Channel>& channel, const Shape& shape,
                std::unique_ptr<SharedMemory> memory)
      : shape_(shape),
        memory_(std::move(memory)),
        stream_(channel, "", 1, kTimeout, kMessageBytes) {
    if (memory_ == nullptr) {
      in_memory_.resize(shape.in());
      out_memory_.resize(shape.o());
      in = in_memory_;
      out = out_memory_;
    } else {
      in = memory_->Allocate(shape.in());
      out = memory_->Allocate(shape.o());
    }
  }
  void Call(v1::AttendStreamRequest request) override {
    PendingReply result;
    Check(stream_.Call(&request, &result));
  }
  void Attend(uint64_t step, uint32_t layer) override {
    v1::AttendStreamRequest request = AttendOf(shape_, step, layer);
    const auto pending = std::make_shared<PendingReply>();
    if (memory_ != nullptr) {
      v1::SharedTensors* shared = request.mutable_shared();
      shared->set_handle(std::string(memory_->handle()));
      shared->set_in_offset(memory_->OffsetOf(in.data()));
      shared->set_in_length(in.size());
      shared->set_out_offset(memory_->OffsetOf(out.data()));
      shared->set_out_length(out.size());
      stream_.Send(&request, {}, {}, pending);
    } else {
      pending->o = out;
      stream_.Send(&request, in.first(shape_.kv()), in.subspan(shape_.kv()), pending);
    }
    Check(stream_.Wait(pending.get()));
  }

 private:
  const Shape shape_;
  const std::unique_ptr<SharedMemory> memory_;
  client::Stream stream_;
  std::vector<std::byte> in_memory_, out_memory_;
};

// --- The service over a command ring.
class Ring final : public Path {
 public:
  Ring(const Shape& shape, std::unique_ptr<SharedMemory> memory) : memory_(std::move(memory)) {
    in = memory_->Allocate(shape.in());
    out = memory_->Allocate(shape.o());
    message_ = memory_->Allocate(65536);
    entry_.kind = wire::kEntryAttend;
    entry_.profile = static_cast<uint8_t>(shape.profile);
    entry_.flags = wire::kEntryHasKv;
    entry_.row_count = shape.batch;
    entry_.num_heads = kHeads;
    entry_.in_offset = memory_->OffsetOf(in.data());
    entry_.out_offset = memory_->OffsetOf(out.data());
  }
  void Call(v1::AttendStreamRequest request) override {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryMessage;
    entry.row_count = static_cast<uint32_t>(request.ByteSizeLong());
    entry.num_heads = 32768;
    entry.in_offset = memory_->OffsetOf(message_.data());
    entry.out_offset = entry.in_offset + 32768;
    request.SerializeToArray(message_.data(), static_cast<int>(entry.row_count));
    const wire::CompletionEntry done = Do(entry);
    v1::AttendStreamReply reply;
    if (!reply.ParseFromString(std::string(memory_->Message(done))) || reply.has_error()) {
      Die(reply.ShortDebugString());
    }
  }
  void Attend(uint64_t step, uint32_t layer) override {
    entry_.step_id = step;
    entry_.layer = layer;
    const wire::CompletionEntry done = Do(entry_);
    if (done.kind != wire::kEntryAttend) Die("an attend failed");
  }

 private:
  wire::CompletionEntry Do(const wire::SubmissionEntry& entry) {
    if (!memory_->Submit(entry)) Die("the ring is full");
    wire::CompletionEntry done;
    Check(memory_->Wait(&done, kTimeout));
    return done;
  }

  const std::unique_ptr<SharedMemory> memory_;
  std::span<std::byte> message_;
  wire::SubmissionEntry entry_{};
};

// --------------------------------------------------------------------------------- Measurement

struct Row {
  std::string path, shape;
  double p50_us = 0, p99_us = 0, gbps = 0, token_ms = 0;
  double copied_bytes = 0, allocations = 0;
};

class Benchmark {
 public:
  Benchmark(const std::string& folder, Shared* shared, double seconds)
      : folder_(folder), shared_(shared), seconds_(seconds) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    channel_ = grpc::CreateCustomChannel("unix:" + folder + "/s",
                                         grpc::InsecureChannelCredentials(), arguments);
  }

  Row Measure(const std::string& name, const Shape& shape) {
    OpenSequences(shape.batch);
    Row row{name, shape.name};
    const std::unique_ptr<Path> path = Open(name, shape);
    Steps(*path, 0.1 * seconds_);  // warm
    Settle();
    const uint64_t copied = shared_->copied_bytes;
    const int64_t allocations = shared_->allocations;
    const int64_t attends = Steps(*path, seconds_);
    Settle();
    row.copied_bytes = static_cast<double>(shared_->copied_bytes - copied) / attends;
    row.allocations = static_cast<double>(shared_->allocations - allocations) / attends;
    std::sort(micros_.begin(), micros_.end());
    row.p50_us = micros_[micros_.size() / 2];
    row.p99_us = micros_[micros_.size() * 99 / 100];
    row.token_ms = step_ms_;
    shared_->touch = 1;
    touch_ = true;
    Steps(*path, 0.5 * seconds_);
    touch_ = false;
    shared_->touch = 0;
    std::sort(micros_.begin(), micros_.end());
    row.gbps = static_cast<double>(shape.in() + shape.o()) / micros_[micros_.size() / 2] * 1e-3;
    CloseSequences();
    return row;
  }

 private:
  std::unique_ptr<Path> Open(const std::string& name, const Shape& shape) {
    if (name == "grpc_unary") return std::make_unique<BareUnary>(channel_, shape);
    if (name == "grpc_stream") return std::make_unique<BareStream>(channel_, shape);
    if (name == "inline") return std::make_unique<ServiceStream>(channel_, shape, nullptr);
    client::SharedMemoryOptions options;
    options.ring = name != "shm";
    options.bytes = shape.in() + shape.o() + (1 << 20);
    if (name == "ring_spin") options.spin_us = options.server_spin_us = kLongestSpinMicros;
    auto memory = SharedMemory::Connect(folder_ + "/s.shm", options);
    Check(memory.status());
    if (name == "shm") return std::make_unique<ServiceStream>(channel_, shape, *std::move(memory));
    return std::make_unique<Ring>(shape, *std::move(memory));
  }

  void OpenSequences(uint32_t count) {
    const auto stub = v1::Sequences::NewStub(channel_);
    for (uint32_t i = 0; i < count; ++i) {
      grpc::ClientContext context;
      v1::OpenRequest request;
      request.set_model_id(kModel);
      v1::OpenReply reply;
      const grpc::Status status = stub->Open(&context, request, &reply);
      if (!status.ok()) Die(status.error_message());
      sequences_.push_back(reply.sequence());
    }
  }

  void CloseSequences() {
    const auto stub = v1::Sequences::NewStub(channel_);
    grpc::ClientContext context;
    v1::ReleaseRequest request;
    for (const v1::SequenceInfo& info : sequences_) request.add_sequence_ids(info.sequence_id());
    v1::ReleaseReply reply;
    stub->Release(&context, request, &reply);
    sequences_.clear();
  }

  v1::AttendStreamRequest Begin(uint64_t step) const {
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(step);
    begin->set_model_id(kModel);
    for (const v1::SequenceInfo& info : sequences_) {
      v1::StepSequence* rows = begin->add_sequences();
      rows->set_sequence_id(info.sequence_id());
      rows->set_epoch(info.epoch());
      rows->set_start_position(info.length());
      rows->set_rows(1);
    }
    return request;
  }

  // Whole steps for that long; the first one always, the last one as far as time allows.
  int64_t Steps(Path& path, double seconds) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    micros_.clear();
    std::vector<double> steps;
    do {
      const uint64_t step = ++step_;
      const auto start = Clock::now();
      path.Call(Begin(step));
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const auto before = Clock::now();
        if (touch_) std::memset(path.in.data(), static_cast<int>(layer), path.in.size());
        path.Attend(step, layer);
        if (touch_) sum_ += Sum(path.out.data(), path.out.size());
        micros_.push_back(std::chrono::duration<double, std::micro>(Clock::now() - before).count());
      }
      v1::AttendStreamRequest last;
      last.mutable_end_step()->set_step_id(step);
      path.Call(std::move(last));
      steps.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      if (path.commits()) {
        for (v1::SequenceInfo& info : sequences_) info.set_length(info.length() + 1);
      }
    } while (Clock::now() < end);
    std::sort(steps.begin(), steps.end());
    step_ms_ = steps[steps.size() / 2];
    return static_cast<int64_t>(micros_.size());
  }

  // Lets the server publish its counters.
  static void Settle() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }

  const std::string folder_;
  Shared* const shared_;
  const double seconds_;
  std::shared_ptr<grpc::Channel> channel_;
  std::vector<v1::SequenceInfo> sequences_;
  std::vector<double> micros_;
  double step_ms_ = 0;
  uint64_t step_ = 0, sum_ = 0;
  bool touch_ = false;
};

void WriteJson(const std::vector<Row>& rows, const std::string& path) {
  std::ofstream file(path);
  file << "[\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    file << "  {\"bench\": \"wire\", \"path\": \"" << row.path << "\", \"shape\": \"" << row.shape
         << "\", \"p50_us\": " << row.p50_us << ", \"p99_us\": " << row.p99_us
         << ", \"gbps\": " << row.gbps << ", \"copied_bytes\": " << row.copied_bytes
         << ", \"allocations\": " << row.allocations << ", \"token_ms\": " << row.token_ms << "}"
         << (i + 1 < rows.size() ? "," : "") << "\n";
  }
  file << "]\n";
}

void RunClient(const std::string& folder, Shared* shared, double seconds, const std::string& json) {
  while (shared->ready.load() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::printf("%u cores\n%-12s %-13s %10s %10s %8s %8s %8s %12s %8s %9s\n",
              std::thread::hardware_concurrency(), "path", "shape", "p50 us", "p99 us", "x bare",
              "GB/s", "x bare", "copied", "allocs", "ms/token");
  std::vector<Row> rows;
  Benchmark benchmark(folder, shared, seconds);
  for (const Shape& shape : kShapes) {
    Row bare;
    for (const char* path :
         {"grpc_stream", "grpc_unary", "inline", "shm", "ring_futex", "ring_spin"}) {
      const Row row = benchmark.Measure(path, shape);
      if (row.path == "grpc_stream") bare = row;
      std::printf("%-12s %-13s %10.1f %10.1f %8.2f %8.2f %8.2f %12.0f %8.2f %9.2f\n",
                  row.path.c_str(), row.shape.c_str(), row.p50_us, row.p99_us,
                  row.p50_us / bare.p50_us, row.gbps, row.gbps / bare.gbps, row.copied_bytes,
                  row.allocations, row.token_ms);
      std::fflush(stdout);
      rows.push_back(row);
    }
  }
  if (!json.empty()) WriteJson(rows, json);
}

int Main(double seconds, const std::string& json) {
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const shared = new (page) Shared;
  char name[] = "/tmp/mla-wire-XXXXXX";
  const std::string folder = mkdtemp(name);
  // Before either side has a thread.
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Serve(folder, shared);
    std::_Exit(0);
  }
  RunClient(folder, shared, seconds, json);
  shared->stop = 1;
  int status = 0;
  waitpid(child, &status, 0);
  unlink((folder + "/s").c_str());
  rmdir(folder.c_str());
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) {
  double seconds = 0.4;
  std::string json;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--json=")) {
      json = argument.substr(7);
    } else if (argument == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else if (argument == "--seconds" && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: wire_benchmark [--json FILE] [--seconds S]\n");
      return 2;
    }
  }
  return mla::bench::Main(seconds, json);
}
