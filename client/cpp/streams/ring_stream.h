// The client's end of one command ring. Internal to the library.
//
// Tensors that lie in the ring's own memory (Allocate), in the order and with the padding of the
// contract, are used in place. All other tensors are copied into it and out of it.
//
// Streams of a GPU wait for chained calls even if no thread of the process does. So while such
// calls are under way, a thread of this object checks that the server is still there, and lets the
// streams go on if it is not. The first chained call starts the thread.
//
// Ownership: shared by session, steps and pending calls. Threading: any thread; one mutex. One of
// the waiting threads takes completions for all.
#ifndef MLA_CLIENT_CPP_STREAMS_RING_STREAM_H_
#define MLA_CLIENT_CPP_STREAMS_RING_STREAM_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "client/cpp/shared_memory/ring_memory.h"
#include "client/cpp/streams/step_stream.h"
#include "client/cpp/streams/tensor_placement.h"
#include "proto/wire/ring_layout.h"

namespace mla::client {

class RingStream final : public StepStream {
 public:
  RingStream(std::unique_ptr<RingMemory> memory, uint64_t boot_id,
             std::chrono::milliseconds timeout, uint64_t message_bytes,
             const wire::ThreadTeamOptions& copies);
  ~RingStream() override;

  std::string_view transport() const override { return memory_->transport(); }
  uint64_t message_bytes() const override { return message_bytes_; }
  bool InPlace(const InputTensors& inputs, const PendingReply& pending) const override {
    return AreInPlace(*memory_, inputs, pending);
  }
  bool FillsLists() const override { return true; }
  void Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
            const std::shared_ptr<PendingReply>& pending) override;
  // Sends an attend whose tensors the caller has placed in the region or in device memory. All
  // fields of `entry` are set except its sequence and tag; `places` matter where tensors travel.
  // DEADLINE_EXCEEDED if no room became free within `room`; nothing has changed then. If the attend
  // is chained, the stream of `pending` makes the copies `in` before the server reads the tensors,
  // and the copies `out` when the outputs are there.
  absl::Status SendPlaced(wire::SubmissionEntry entry, const RingPlaces& places,
                          std::span<const DeviceCopy> in, std::span<const DeviceCopy> out,
                          std::chrono::milliseconds room,
                          const std::shared_ptr<PendingReply>& pending);
  // Captures such a call, which is chained, in the graph of `stream`, with its copies. Nothing is
  // sent.
  absl::StatusOr<RingMemory::GraphEntry> Capture(wire::SubmissionEntry entry,
                                                 std::span<const DeviceCopy> in,
                                                 std::span<const DeviceCopy> out, void* stream);
  // Sends captured calls, as calls of step `step_id`, for the next launch of `exec` on `stream`.
  // Each has a pending reply of the stream's. Errors: as SendPlaced; RESOURCE_EXHAUSTED if the ring
  // has fewer entries. Nothing was sent then.
  absl::Status Replay(std::span<const RingMemory::GraphEntry> calls, uint64_t step_id, void* exec,
                      void* stream, std::chrono::steady_clock::time_point until,
                      std::span<const std::shared_ptr<PendingReply>> pending);
  // Sends a message in the same way. `tails`, for an end_step, are copied.
  absl::Status SendMessage(v1::AttendStreamRequest* request, std::span<const std::byte> tails,
                           std::chrono::steady_clock::time_point until,
                           const std::shared_ptr<PendingReply>& pending);
  void Hold() override;
  void SendHeld() override;
  absl::Status Wait(PendingReply* pending) override;
  bool Ready(PendingReply* pending) override;
  // Waits until `until` at most. Returns false if the reply has not come yet, also if that time has
  // passed before; nothing has changed then.
  bool WaitUntil(PendingReply* pending, std::chrono::steady_clock::time_point until);
  // Returns OK while the stream can be used, else the reason why it cannot.
  absl::Status broken();
  RingMemory& memory() { return *memory_; }
  // Ends the stream. First waits, for `wait` at most, until requests under way have ended and the
  // server has aborted open steps.
  void End(std::chrono::milliseconds wait);
  absl::Status Close() override;
  std::span<std::byte> Allocate(uint64_t bytes) override {
    return left() ? std::span<std::byte>() : memory_->Allocate(bytes);
  }
  void Free(std::span<std::byte> block) override {
    if (!left()) memory_->Free(block);
  }
  DeviceRegion* device() const override {
    return memory_->has_device_memory() ? memory_->device() : nullptr;
  }
  absl::Status device_status() const override;

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  struct InFlight {
    std::shared_ptr<PendingReply> pending;
    TensorPlacement room;  // room for the tensors, or for a message and its reply
    Deadline deadline;     // set for a chained call, because it may be that no thread waits for it
  };

  // Checks that replies will come in the order of requests, so that a GPU's stream may wait for its
  // own.
  absl::Status CheckChain(const PendingReply& pending, bool is_attend) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes note of a request that was sent, or that has its reply.
  void Add(uint64_t tag, InFlight flight) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  InFlight Remove(std::map<uint64_t, InFlight>::iterator flight)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool PlaceMessage(std::span<const std::byte> tails, v1::AttendStreamRequest* request,
                    InFlight* flight, wire::SubmissionEntry* entry);
  absl::Status CheckSend(const PendingReply& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool SubmitNext(wire::SubmissionEntry* entry, InFlight* flight)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A chained call is under way.
  void NoteChained(InFlight* flight) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // kBreaks: the deadline is a request's, and the stream cannot be used after it. kReturns: the
  // caller only stops waiting.
  enum class Late { kBreaks, kReturns };
  void SendUntil(Deadline deadline, Late late, v1::AttendStreamRequest* request,
                 const InputTensors& inputs, const std::shared_ptr<PendingReply>& pending);
  absl::Status TakeOne(MutexLock* lock, Deadline deadline, Late late = Late::kBreaks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status StartWatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Watch();
  void LookAround() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopWatch();
  static void TakeMessage(std::string_view bytes, PendingReply* pending);
  absl::Status Finish(const wire::CompletionEntry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Break(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<RingMemory> memory_;
  const uint64_t boot_id_;
  const std::chrono::milliseconds timeout_;
  const uint64_t message_bytes_;
  wire::ThreadTeam copier_;

  Mutex mutex_;
  CondVar changed_;
  bool polling_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_tag_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, InFlight> in_flight_ ABSL_GUARDED_BY(mutex_);
  // Counts the attends in flight, so that a chained call need not look at each of them. If some are
  // chained, all are, by one stream.
  struct Attends {
    size_t awaited = 0, chained = 0;
    void* stream = nullptr;  // of the chained ones
  };
  Attends attends_ ABSL_GUARDED_BY(mutex_);
  CondVar watch_;
  bool watched_ ABSL_GUARDED_BY(mutex_) = false;  // chained calls are under way
  bool unwatched_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;  // started under the mutex, ended by the destructor
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAMS_RING_STREAM_H_
