// The ways to the server that wire_benchmark compares, each with one request under way at a time.
//
// Every path owns the memory of its tensors: `in` is what an attend sends, kv then q, and `out`
// what it receives. Failures end the program. Threading: one caller.
#ifndef MLA_TESTS_BENCH_WIRE_PATHS_H_
#define MLA_TESTS_BENCH_WIRE_PATHS_H_

#include <grpcpp/channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/shared_memory.h"
#include "client/cpp/stream.h"
#include "tests/bench/wire_server.h"

namespace mla::bench {

using client::PendingReply;
using client::SharedMemory;
using BareStub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

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

[[noreturn]] inline void Die(const std::string& why) {
  std::fprintf(stderr, "wire_benchmark: %s\n", why.c_str());
  std::exit(1);
}

inline void Check(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
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

// One way to the server. `in` and `out` are where the tensors of an attend are written and read.
class Path {
 public:
  virtual ~Path() = default;
  virtual void Call(v1::AttendStreamRequest request) = 0;  // begin, end or abort
  virtual void Attend(uint64_t step, uint32_t layer) = 0;
  virtual bool commits() const { return true; }  // false: there is no service behind it
  std::span<std::byte> in, out;
};

inline void CopyTo(std::span<std::byte> out, const std::vector<grpc::Slice>& slices) {
  for (const grpc::Slice& slice : slices) {
    if (slice.size() > out.size()) Die("a reply is larger than asked for");
    std::memcpy(out.data(), slice.begin(), slice.size());
    out = out.subspan(slice.size());
  }
}

// --- Bare gRPC: the message's first eight bytes say how large the reply is to be.
class BareStream final : public Path,
                         public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  BareStream(const std::shared_ptr<grpc::Channel>& channel, const Shape& shape)
      : in_memory_(shape.in()), out_memory_(shape.o()) {
    in = in_memory_;
    out = out_memory_;
    BareStub(channel).PrepareBidiStreamingCall(&context_, kBareStream, {}, this);
    AddHold();
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
    StartRead(&incoming_);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return answered_ && written_; });
    answered_ = written_ = false;
  }
  void OnWriteDone(bool) override {
    bool both = false;
    {
      const std::lock_guard lock(mutex_);
      written_ = true;
      both = answered_;
    }
    if (both) changed_.notify_all();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    std::vector<grpc::Slice> slices;
    if (!incoming_.Dump(&slices).ok()) Die("a reply cannot be read");
    CopyTo(out, slices);
    slices.clear();
    incoming_.Clear();
    bool both = false;
    {
      const std::lock_guard lock(mutex_);
      answered_ = true;
      both = written_;
    }
    if (both) changed_.notify_all();
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
    if (!result.ok() || !reply.Dump(&slices).ok()) Die("unary: " + result.error_message());
    CopyTo(out, slices);
  }

 private:
  BareStub stub_;
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

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_PATHS_H_
