// The ways to the server that wire_benchmark compares, each with one request in flight at a time.
//
// Every path owns the memory of its tensors: `in` holds the inputs of an attend, kv then q, and
// `out` receives the outputs. Failures end the program. Threading: one caller.
#ifndef MLA_TESTS_BENCH_WIRE_WIRE_PATHS_H_
#define MLA_TESTS_BENCH_WIRE_WIRE_PATHS_H_

#include <grpcpp/channel.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/streams/stream.h"
#include "tests/bench/wire/wire_server.h"

namespace mla::bench {

using client::PendingReply;
using client::SharedMemory;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr auto kNoSpin = std::chrono::microseconds(0);

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

[[noreturn]] inline void Die(const std::string& why) {
  std::fprintf(stderr, "wire_benchmark: %s\n", why.c_str());
  std::exit(1);
}

inline void Check(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

// Keeps the calling thread, and the threads and processes that it starts from now on, on one CPU;
// -1: on all.
inline void StayOn(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (cpu < 0 || i == cpu) CPU_SET(i, &cpus);
  }
  if (sched_setaffinity(0, sizeof(cpus), &cpus) != 0) Die("there is no CPU of that number");
}

// Two CPUs that this process may use, of different cores: CPUs of one core share its units.
inline std::array<int, 2> TwoCores() {
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) Die("the usable CPUs are not known");
  int first = -1;
  std::string first_core;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &usable)) continue;
    std::string core = std::to_string(cpu);  // where the system does not name its CPUs
    std::getline(
        std::ifstream("/sys/devices/system/cpu/cpu" + core + "/topology/thread_siblings_list"),
        core);
    if (first >= 0 && core != first_core) return {first, cpu};
    if (first < 0) first = cpu, first_core = core;
  }
  Die("there are no two cores");
}

inline v1::AttendStreamRequest AttendOf(const Shape& shape, uint64_t step, uint32_t layer) {
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

// One way to the server. The tensors of an attend are written in `in` and read in `out`.
class Path {
 public:
  virtual ~Path() = default;
  virtual void Call(v1::AttendStreamRequest request) = 0;  // begin, end or abort
  virtual void Attend(uint64_t step, uint32_t layer) = 0;
  // Attends of `count` layers, which may all be under way at once.
  virtual void Attends(uint64_t step, uint32_t layer, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) Attend(step, layer + i);
  }
  virtual uint64_t messages() const { return 0; }  // of UCX that this side has sent
  virtual bool commits() const { return true; }    // false: no service handles it
  std::span<std::byte> in, out;
};

inline void CopyTo(std::span<std::byte> out, const std::vector<grpc::Slice>& slices) {
  for (const grpc::Slice& slice : slices) {
    if (slice.size() > out.size()) Die("a reply is larger than asked for");
    std::memcpy(out.data(), slice.begin(), slice.size());
    out = out.subspan(slice.size());
  }
}

// Waits for the next event of `queue` as client::Stream does: it spins first.
inline bool NextEvent(grpc::CompletionQueue* queue, std::chrono::microseconds spin, void** tag) {
  bool ok = false;
  if (spin.count() > 0) {
    const auto end = std::chrono::steady_clock::now() + spin;
    do {
      const auto status = queue->AsyncNext(tag, &ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
      if (status == grpc::CompletionQueue::GOT_EVENT) return ok;
    } while (std::chrono::steady_clock::now() < end);
  }
  return queue->Next(tag, &ok) && ok;
}

// --- Bare gRPC: the message's first eight bytes give the size of the reply.
class BareStream final : public Path {
 public:
  BareStream(const std::shared_ptr<grpc::Channel>& channel, const Shape& shape,
             std::chrono::microseconds spin)
      : spin_(spin), in_memory_(shape.in()), out_memory_(shape.o()) {
    in = in_memory_;
    out = out_memory_;
    call_ = grpc::GenericStub(channel).PrepareCall(&context_, kBareStream, &queue_);
    call_->StartCall(this);
    Event();
  }
  ~BareStream() override {
    call_->WritesDone(this);
    Event();
    grpc::Status status;
    call_->Finish(&status, this);
    Event();
    if (!status.ok()) Die("stream: " + status.error_message());
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    queue_.Next(&tag, &ok);
  }
  void Call(v1::AttendStreamRequest) override {}
  bool commits() const override { return false; }
  void Attend(uint64_t, uint32_t) override {
    const uint64_t wanted = out.size();
    std::memcpy(in.data(), &wanted, sizeof(wanted));
    const grpc::Slice slice(in.data(), in.size(), grpc::Slice::STATIC_SLICE);
    const grpc::ByteBuffer outgoing(&slice, 1);
    call_->Write(outgoing, &outgoing_);
    call_->Read(&incoming_, &incoming_);
    for (int i = 0; i < 2; ++i) {
      if (Event() == &incoming_) Received();
    }
  }

 private:
  void* Event() {
    void* tag = nullptr;
    if (!NextEvent(&queue_, spin_, &tag)) Die("the bare stream has ended");
    return tag;
  }
  void Received() {
    slices_.clear();
    if (!incoming_.Dump(&slices_).ok()) Die("a reply cannot be read");
    CopyTo(out, slices_);
    slices_.clear();
    incoming_.Clear();
  }

  const std::chrono::microseconds spin_;
  std::vector<std::byte> in_memory_, out_memory_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  grpc::ByteBuffer incoming_;
  char outgoing_ = 0;  // a tag
  std::vector<grpc::Slice> slices_;
};

class BareUnary final : public Path {
 public:
  BareUnary(const std::shared_ptr<grpc::Channel>& channel, const Shape& shape,
            std::chrono::microseconds spin)
      : spin_(spin), stub_(channel), in_memory_(shape.in()), out_memory_(shape.o()) {
    in = in_memory_;
    out = out_memory_;
  }
  ~BareUnary() override {
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    queue_.Next(&tag, &ok);
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
    const auto call = stub_.PrepareUnaryCall(&context, kBareUnary, request, &queue_);
    call->StartCall();
    grpc::Status result;
    call->Finish(&reply, &result, this);
    void* tag = nullptr;
    NextEvent(&queue_, spin_, &tag);
    std::vector<grpc::Slice> slices;
    if (!result.ok() || !reply.Dump(&slices).ok()) Die("unary: " + result.error_message());
    CopyTo(out, slices);
  }

 private:
  const std::chrono::microseconds spin_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::vector<std::byte> in_memory_, out_memory_;
};

// --- The service over gRPC, with tensors in the message or in shared memory.
class ServiceStream final : public Path {
 public:
  ServiceStream(const std::shared_ptr<grpc::Channel>& channel, const Shape& shape,
                std::chrono::microseconds spin, std::unique_ptr<SharedMemory> memory,
                uint64_t piece_bytes = kMessageBytes)
      : shape_(shape),
        piece_rows_(RowsOfPiece(shape, piece_bytes)),
        memory_(std::move(memory)),
        stream_(channel, {"", 1, nullptr, kMessageBytes, kTimeout, spin}) {
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
    if (memory_ == nullptr && piece_rows_ < shape_.batch) return AttendInPieces(step, layer);
    v1::AttendStreamRequest request = AttendOf(shape_, step, layer);
    const auto pending = std::make_shared<PendingReply>();
    if (memory_ != nullptr) {
      v1::SharedTensors* shared = request.mutable_shared();
      shared->set_handle(std::string(memory_->handle()));
      shared->set_in_offset(memory_->OffsetOf(in.data()));
      shared->set_in_length(in.size());
      shared->set_out_offset(memory_->OffsetOf(out.data()));
      shared->set_out_length(out.size());
      stream_.Send(&request, {}, pending);
    } else {
      pending->o = out;
      stream_.Send(&request, {in.first(shape_.kv()), in.subspan(shape_.kv()), {}}, pending);
    }
    Check(stream_.Wait(pending.get()));
  }

 private:
  // Cuts a call whose tensors exceed a message as a session does: into equal pieces, as few as
  // possible.
  static uint32_t RowsOfPiece(const Shape& shape, uint64_t piece_bytes) {
    const uint64_t most = std::max<uint64_t>(1, piece_bytes / (shape.in() / shape.batch));
    const uint64_t pieces = (shape.batch - 1) / most + 1;
    return static_cast<uint32_t>((shape.batch - 1) / pieces + 1);
  }
  void AttendInPieces(uint64_t step, uint32_t layer) {
    const uint64_t kv = shape_.kv() / shape_.batch, q = shape_.q() / shape_.batch;
    const uint64_t o = shape_.o() / shape_.batch;
    std::vector<std::shared_ptr<PendingReply>> pieces;
    for (uint32_t row = 0; row < shape_.batch; row += piece_rows_) {
      const uint32_t rows = std::min(piece_rows_, shape_.batch - row);
      v1::AttendStreamRequest request = AttendOf(shape_, step, layer);
      request.mutable_attend()->set_row_begin(row);
      request.mutable_attend()->set_row_count(rows);
      pieces.push_back(std::make_shared<PendingReply>());
      pieces.back()->o = out.subspan(row * o, rows * o);
      stream_.Send(
          &request,
          {in.subspan(row * kv, rows * kv), in.subspan(shape_.kv() + row * q, rows * q), {}},
          pieces.back());
    }
    for (const auto& piece : pieces) Check(stream_.Wait(piece.get()));
  }

  const Shape shape_;
  const uint32_t piece_rows_;  // most rows of a request
  const std::unique_ptr<SharedMemory> memory_;
  client::Stream stream_;
  std::vector<std::byte> in_memory_, out_memory_;
};

// --- The service over a command ring.
class Ring final : public Path {
 public:
  // `messages`: as of Path; empty: none.
  Ring(const Shape& shape, std::unique_ptr<client::RingMemory> memory,
       std::function<uint64_t()> messages = {})
      : out_bytes_(shape.o()), memory_(std::move(memory)), messages_(std::move(messages)) {
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
    const wire::CompletionEntry done = Do(entry, {entry.in_offset, entry.row_count, 0});
    v1::AttendStreamReply reply;
    if (!reply.ParseFromString(std::string(memory_->Message(done))) || reply.has_error()) {
      Die(reply.ShortDebugString());
    }
  }
  void Attend(uint64_t step, uint32_t layer) override {
    entry_.step_id = step;
    entry_.layer = layer;
    const wire::CompletionEntry done = Do(entry_, {entry_.in_offset, in.size(), out_bytes_});
    if (done.kind != wire::kEntryAttend) Die("an attend failed");
  }
  // All with the same tensors.
  void Attends(uint64_t step, uint32_t layer, uint32_t count) override {
    entry_.step_id = step;
    memory_->Hold();
    for (uint32_t i = 0; i < count; ++i) {
      entry_.layer = layer + i;
      Submit(entry_, {entry_.in_offset, in.size(), out_bytes_});
    }
    memory_->SendHeld();
    for (uint32_t i = 0; i < count; ++i) {
      wire::CompletionEntry done;
      Check(memory_->Wait(&done, kTimeout));
      if (done.kind != wire::kEntryAttend) Die("an attend failed");
    }
  }
  uint64_t messages() const override { return messages_ ? messages_() : 0; }

 private:
  void Submit(const wire::SubmissionEntry& entry, const client::RingPlaces& places) {
    if (!memory_->Submit(entry, places, nullptr, false)) Die("the ring is full");
  }
  wire::CompletionEntry Do(const wire::SubmissionEntry& entry, const client::RingPlaces& places) {
    Submit(entry, places);
    wire::CompletionEntry done;
    Check(memory_->Wait(&done, kTimeout));
    return done;
  }

  const uint64_t out_bytes_;
  const std::unique_ptr<client::RingMemory> memory_;
  const std::function<uint64_t()> messages_;
  std::span<std::byte> message_;
  wire::SubmissionEntry entry_{};
};

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_WIRE_PATHS_H_
