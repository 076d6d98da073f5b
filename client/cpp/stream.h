// The client's end of one Attend stream. Internal to the library.
//
// Requests are sent in the order of Send, each from its header bytes and the caller's tensors;
// replies are matched by tag and their tensors copied once, to where the caller wants them.
//
// A read is under way only while replies are awaited, and it is the sending thread that starts it,
// behind its write: nothing is left to do between a reply's arrival and waking its waiter, and no
// second thread works on the connection while the next request is sent. A stream that the server
// has ended is therefore noticed by the next Send.
//
// Ownership: shared by session, steps and pending calls; gRPC's callbacks end before it does.
// Threading: any thread; one mutex.
#ifndef MLA_CLIENT_CPP_STREAM_H_
#define MLA_CLIENT_CPP_STREAM_H_

#include <grpcpp/client_context.h>
#include <grpcpp/impl/codegen/client_callback.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "client/cpp/step_stream.h"
#include "mla/v1/attention.pb.h"
#include "proto/tensor_codec.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace mla::client {

class Stream final : public StepStream,
                     public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Stream(std::shared_ptr<grpc::Channel> channel, const std::string& tenant, uint64_t boot_id,
         std::chrono::milliseconds timeout, uint64_t message_bytes);
  ~Stream() override;

  std::string_view transport() const override { return "inline"; }
  uint64_t message_bytes() const override { return message_bytes_; }
  bool InPlace(std::span<const std::byte>, std::span<const std::byte>,
               const PendingReply&) const override {
    return false;
  }
  void Send(v1::AttendStreamRequest* request, std::span<const std::byte> first,
            std::span<const std::byte> second,
            const std::shared_ptr<PendingReply>& pending) override;
  absl::Status Wait(PendingReply* pending) override;
  absl::Status Close() override;
  std::span<std::byte> Allocate(uint64_t) override { return {}; }
  void Free(std::span<std::byte>) override {}
  void Cut() { context_.TryCancel(); }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  absl::Status Take(uint64_t* tag);
  void CopyPayload(PendingReply* pending) const;
  void StartNextWrite();
  void EndSending();

  const uint64_t boot_id_;
  const std::chrono::milliseconds timeout_;
  const uint64_t message_bytes_;
  grpc::ClientContext context_;
  std::shared_ptr<grpc::Channel> channel_;

  // Reading side.
  grpc::ByteBuffer incoming_;
  std::vector<grpc::Slice> slices_;
  std::vector<wire::Fragment> fragments_;
  std::string header_bytes_;
  v1::AttendStreamReply reply_;
  wire::PayloadRange payload_;

  std::atomic<uint64_t> next_tag_{1};

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  grpc::ByteBuffer outgoing_;
  std::deque<grpc::ByteBuffer> queue_;
  int32_t starting_ = 0;  // calls of Send that have not started their operations yet
  bool writing_ = false, reading_ = false, closing_ = false, half_closed_ = false, done_ = false;
  absl::Status final_status_;
  absl::Status broken_;  // why the stream was cut by this side
  absl::flat_hash_map<uint64_t, std::shared_ptr<PendingReply>> pending_;  // by tag
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAM_H_
