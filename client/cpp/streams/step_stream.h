// A session's transport: sends requests of the stepping protocol in order and matches replies to
// them. stream.h does so over gRPC and ring_stream.h through shared memory; shared_stream.h sends
// the messages over gRPC and the tensors through shared memory. Internal to the library. Threading:
// any thread.
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

// Tensors of an attend, in the order of the contract; empty if the attend has no such tensor. For
// an end_step, `kv` has its tails.
struct InputTensors {
  std::span<const std::byte> kv, q, lists;
  size_t size() const { return kv.size() + q.size() + lists.size(); }
};

// The reply for which a request waits. The caller sets the places of the tensors.
struct PendingReply {
  std::span<std::byte> o, lse, chosen;
  void* stream = nullptr;  // AttendCall::stream
  bool chained = false;    // AttendCall::chained
  // The tensors of the request in the form in which they are sent, if that is not the caller's
  // form.
  std::vector<int32_t> lists;
  std::vector<std::byte> kv, q;
  // Kind of the request, which the reply must match unless it is an error; set by Send.
  v1::AttendStreamRequest::BodyCase asked = v1::AttendStreamRequest::BODY_NOT_SET;
  v1::AttendStreamReply reply;
  absl::Status status;
  bool done = false;
  // Counts the tensors of the request that the transport may still read. 0 after a Wait that
  // failed. After a Wait that succeeded none is read, but gRPC may hold its views a little longer.
  std::atomic<int32_t> borrowed{0};
};

// Returns DATA_LOSS if a reply that is not an error has another kind than the request.
absl::Status CheckAnswer(v1::AttendStreamRequest::BodyCase asked,
                         v1::AttendStreamReply::BodyCase answer);

// Belongs to the process that made it. In a forked child, requests fail with the reason "forked",
// Allocate returns nothing and Close does nothing. The object must not be destroyed there.
class StepStream {
 public:
  virtual ~StepStream() = default;
  // Returns true in a process that did not make the object.
  bool left() const { return home_.left(); }

  // Returns "inline": all of it in gRPC messages; "shm": tensors in shared memory; "ring": all of
  // it there; "ucx": all of it over UCX.
  virtual std::string_view transport() const = 0;
  // Returns the most tensor bytes of one request or reply.
  virtual uint64_t message_bytes() const = 0;
  // Returns true if these tensors may go as one request whatever their size, because they are used
  // in place.
  virtual bool InPlace(const InputTensors& inputs, const PendingReply& pending) const = 0;
  // Returns true if each list must have the model's top_k entries.
  virtual bool FillsLists() const { return false; }
  // Sends `request` (its tag is set here) with these tensors. They and the places in `pending` must
  // stay valid until Wait has returned.
  virtual void Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
                    const std::shared_ptr<PendingReply>& pending) = 0;
  // Requests that are sent from here on may be kept, to travel together, until SendHeld, which must
  // be called soon. Wait sends them, too.
  virtual void Hold() {}
  virtual void SendHeld() {}
  // Waits for the reply. After the timeout it cancels the stream, and returns when the transport
  // has stopped reading the tensors.
  virtual absl::Status Wait(PendingReply* pending) = 0;
  // Takes replies that have come, and waits for none. Returns true if Wait would not wait for this
  // one.
  virtual bool Ready(PendingReply* pending) = 0;
  // Waits until requests under way have finished, then ends the stream; cancels it after the
  // timeout.
  virtual absl::Status Close() = 0;
  // Session::Cancel.
  virtual void Cancel(const absl::Status& why) {}
  // Returns memory in which tensors need not be copied, aligned to 64 bytes; empty if it has none
  // left.
  virtual std::span<std::byte> Allocate(uint64_t bytes) = 0;
  virtual void Free(std::span<std::byte> block) = 0;
  // Returns device memory for the same purpose; null if it has none, for the reason in
  // device_status().
  virtual DeviceRegion* device() const { return nullptr; }
  virtual absl::Status device_status() const {
    return absl::UnavailableError("device memory: rings alone have some");
  }

  // Sends a request without tensors and waits for its reply.
  absl::Status Call(v1::AttendStreamRequest* request, PendingReply* result) {
    auto pending = std::make_shared<PendingReply>();
    Send(request, {}, pending);
    absl::Status status = Wait(pending.get());
    result->reply.Swap(&pending->reply);
    return status;
  }

 protected:
  // Replace Send and Wait in a forked child.
  void Refuse(PendingReply* pending) const;
  absl::Status WaitElsewhere(PendingReply* pending) const;

 private:
  const Home home_;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAMS_STEP_STREAM_H_
