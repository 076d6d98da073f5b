// Handles one call of a bidirectional stream of unparsed messages, which a CompletionPoller serves.
//
// Its operations report to a StreamHandler as gRPC's reactors do to theirs. At most one read and
// one write are under way at a time. After Finish come the ends of operations still under way, and
// then OnDone, which may delete the call: no other operation of the call runs or follows then. The
// end of a Write or Finish may still be on another thread's stack, but it does not touch the call.
//
// Ownership: created by its StreamAcceptor; belongs to the handler that accepts it, until OnDone.
// Threading: operations may be started from any thread; callbacks come from the poller's threads.
#ifndef MLA_SERVER_GRPC_STREAM_CALL_H_
#define MLA_SERVER_GRPC_STREAM_CALL_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "server/grpc/completion_poller.h"

namespace mla::server {

class StreamHandler {
 public:
  virtual ~StreamHandler() = default;
  virtual void OnReadDone(bool ok) = 0;
  virtual void OnWriteDone(bool ok) = 0;
  virtual void OnCancel() = 0;  // the client has gone or TryCancel was called
  virtual void OnDone() = 0;
};

class StreamCall final {
 public:
  explicit StreamCall(CompletionPoller* poller) : poller_(poller) {
    poller_->AddCall();
    context_.AsyncNotifyWhenDone(&ended_);
  }
  ~StreamCall() { poller_->RemoveCall(); }
  StreamCall(const StreamCall&) = delete;
  StreamCall& operator=(const StreamCall&) = delete;

  grpc::GenericServerContext& context() { return context_; }
  grpc::GenericServerAsyncReaderWriter& stream() { return stream_; }
  CompletionPoller& poller() { return *poller_; }

  // REQUIRES: accepted. Call it before anything else. `handler` must live until OnDone. If the call
  // has ended by then, the first operation reports it.
  void Serve(StreamHandler* handler) { handler_.store(handler, std::memory_order_release); }

  void StartRead(grpc::ByteBuffer* message);
  void StartWrite(const grpc::ByteBuffer& message);
  // REQUIRES of both: no read or write is under way.
  void Finish(const grpc::Status& status);
  void WriteAndFinish(const grpc::ByteBuffer& message, const grpc::Status& status);

  // Hold delays OnDone until Release; for a thread that is not in a callback of the call. Release
  // may call OnDone itself.
  void Hold() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Release();

 private:
  struct Event final : StreamEvent {
    Event(StreamCall* its_call, void (StreamCall::*what_then)(bool))
        : call(its_call), then(what_then) {}
    void OnEvent(bool ok) override { (call->*then)(ok); }
    StreamCall* const call;
    void (StreamCall::*const then)(bool);
  };

  void ReadDone(bool ok);
  void WriteDone(bool ok);
  void Ended(bool ok);
  void Finished(bool ok);

  CompletionPoller* const poller_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  std::atomic<StreamHandler*> handler_{nullptr};
  // Counts one reference each for Finished, Ended and every operation under way.
  std::atomic<int32_t> references_{2};
  Event read_{this, &StreamCall::ReadDone}, written_{this, &StreamCall::WriteDone};
  Event ended_{this, &StreamCall::Ended}, finished_{this, &StreamCall::Finished};
};

// Ends an accepted call that will not be served.
void RefuseCall(std::unique_ptr<StreamCall> call, const grpc::Status& status);

// Accepts calls, one after another, as long as the server lives.
class StreamAcceptor final : private StreamEvent {
 public:
  // Asks gRPC for the next call, which it will report with `tag`.
  using Ask = std::function<void(StreamCall* call, CompletionPoller* poller, void* tag)>;
  using Accept = std::function<void(std::unique_ptr<StreamCall> call)>;

  // `poller` must outlive it. Its threads call `accept`, which must lead to Serve and in the end to
  // Finish.
  StreamAcceptor(CompletionPoller* poller, Ask ask, Accept accept);
  // REQUIRES: the server was started.
  void Start();

 private:
  void OnEvent(bool ok) override;

  CompletionPoller* const poller_;
  const Ask ask_;
  const Accept accept_;
  std::unique_ptr<StreamCall> next_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_GRPC_STREAM_CALL_H_
