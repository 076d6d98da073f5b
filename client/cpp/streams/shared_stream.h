// Sends messages over gRPC and tensors in a shared-memory region. Internal to the library.
//
// Ownership: owns the region and the stream. Threading: any thread.
#ifndef MLA_CLIENT_CPP_STREAMS_SHARED_STREAM_H_
#define MLA_CLIENT_CPP_STREAMS_SHARED_STREAM_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/streams/step_stream.h"
#include "client/cpp/streams/tensor_placement.h"

namespace mla::client {

class SharedStream final : public StepStream {
 public:
  // `timeout`: time to close the region; the stream has its own timeout for requests.
  SharedStream(std::unique_ptr<SharedMemory> memory, std::shared_ptr<StepStream> stream,
               std::chrono::milliseconds timeout, const wire::ThreadTeamOptions& copies);
  ~SharedStream() override;

  std::string_view transport() const override { return "shm"; }
  uint64_t message_bytes() const override { return message_bytes_; }
  bool InPlace(const InputTensors& inputs, const PendingReply& pending) const override {
    return AreInPlace(*memory_, inputs, pending);
  }
  void Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
            const std::shared_ptr<PendingReply>& pending) override;
  absl::Status Wait(PendingReply* pending) override;
  bool Ready(PendingReply* pending) override;
  absl::Status Close() override;
  void Cancel(const absl::Status& why) override { stream_->Cancel(why); }
  std::span<std::byte> Allocate(uint64_t bytes) override {
    return left() ? std::span<std::byte>() : memory_->Allocate(bytes);
  }
  void Free(std::span<std::byte> block) override {
    if (!left()) memory_->Free(block);
  }

 private:
  struct InFlight {
    std::shared_ptr<PendingReply> pending;  // the caller's
    std::shared_ptr<PendingReply> message;  // the stream's, without tensors
    TensorPlacement room;
  };

  std::shared_ptr<InFlight> FlightOf(const PendingReply* pending);
  absl::Status Finish(const std::shared_ptr<InFlight>& flight);

  const std::unique_ptr<SharedMemory> memory_;
  const std::shared_ptr<StepStream> stream_;
  const std::chrono::milliseconds timeout_;
  const uint64_t message_bytes_;
  wire::ThreadTeam copier_;

  Mutex mutex_;
  std::list<std::shared_ptr<InFlight>> in_flight_ ABSL_GUARDED_BY(mutex_);  // in the order sent
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAMS_SHARED_STREAM_H_
