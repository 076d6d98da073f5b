// What a session needs of a transport: requests of the stepping protocol sent in order, replies
// matched to them. stream.h carries it over gRPC, ring_stream.h through shared memory, and
// shared_stream.h the messages over gRPC and the tensors through shared memory. Internal to
// the library. Threading: any thread.
#ifndef MLA_CLIENT_CPP_STREAMS_STEP_STREAM_H_
#define MLA_CLIENT_CPP_STREAMS_STEP_STREAM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/shared_memory/device_region.h"
#include "client/cpp/shared_memory/home.h"
#include "mla/v1/attention.pb.h"

namespace mla::client {

// Tensors of an attend, in the order of the contract; empty where there is none. Of an end_step,
// its tails in place of kv.
struct InputTensors {
  std::span<const std::byte> kv, q, lists;
  size_t size() const { return kv.size() + q.size() + lists.size(); }
};

// What a request waits for. The tensors' places are set by the caller.
struct PendingReply {
  std::span<std::byte> o, lse, chosen;
  void* stream = nullptr;  // AttendCall::stream
  bool chained = false;    // AttendCall::chained
  // Of the request, as they are sent, where the caller's are not.
  std::vector<int32_t> lists;
  std::vector<std::byte> kv, q;
  // What was asked, which a reply that is no error must answer; set by Send.
  v1::AttendStreamRequest::BodyCase asked = v1::AttendStreamRequest::BODY_NOT_SET;
  v1::AttendStreamReply reply;
  absl::Status status;
  bool done = false;
  // Of the request's tensors, those that the transport may still read. 0 after a Wait that failed;
  // after one that succeeded none is read, though gRPC may hold its views a little longer.
  std::atomic<int32_t> borrowed{0};
};

// DATA_LOSS unless a reply that is no error answers what was asked.
absl::Status CheckAnswer(v1::AttendStreamRequest::BodyCase asked,
                         v1::AttendStreamReply::BodyCase answer);

// Belongs to the process that made it. In one that was forked from there, requests fail with the
// reason "forked", there is no memory, Close ends nothing, and the object must not be destroyed.
class StepStream {
 public:
  virtual ~StepStream() = default;
  // Returns true in any other process than the one that made it.
  bool left() const { return home_.left(); }

  // "inline": all of it in gRPC messages; "shm": tensors in shared memory; "ring": all of it there.
  virtual std::string_view transport() const = 0;
  // Tensor bytes of one request or reply at most.
  virtual uint64_t message_bytes() const = 0;
  // True if these tensors may go as one request whatever their size: they stay where they are.
  virtual bool InPlace(const InputTensors& inputs, const PendingReply& pending) const = 0;
  // Whether lists must have the model's top_k entries each.
  virtual bool FillsLists() const { return false; }
  // Sends `request` (its tag is set here) with these tensors. They and the places in `pending` must
  // stay valid until Wait has returned.
  virtual void Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
                    const std::shared_ptr<PendingReply>& pending) = 0;
  // Waits for the reply. When the timeout passes, cancels the stream first, and returns when the
  // tensors are no longer read.
  virtual absl::Status Wait(PendingReply* pending) = 0;
  // Lets what is under way finish, then ends the stream; cancels it after the timeout.
  virtual absl::Status Close() = 0;
  // Memory in which tensors need not be copied, aligned to 64 bytes; empty: there is none.
  virtual std::span<std::byte> Allocate(uint64_t bytes) = 0;
  virtual void Free(std::span<std::byte> block) = 0;
  // Device memory of the same use; null: there is none, for the reason given.
  virtual DeviceRegion* device() const { return nullptr; }
  virtual absl::Status device_status() const {
    return absl::UnavailableError("device memory: rings alone have some");
  }

  // Send and Wait without tensors.
  absl::Status Call(v1::AttendStreamRequest* request, PendingReply* result) {
    auto pending = std::make_shared<PendingReply>();
    Send(request, {}, pending);
    absl::Status status = Wait(pending.get());
    result->reply.Swap(&pending->reply);
    return status;
  }

 protected:
  // Send and Wait of a copy in another process.
  void Refuse(PendingReply* pending) const;
  absl::Status WaitElsewhere(PendingReply* pending) const;

 private:
  const Home home_;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAMS_STEP_STREAM_H_
