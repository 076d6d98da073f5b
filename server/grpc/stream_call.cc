#include "server/grpc/stream_call.h"

#include <utility>

namespace mla::server {

// ---------------------------------------------------------------------------------- StreamCall

void StreamCall::StartRead(grpc::ByteBuffer* message) {
  references_.fetch_add(1, std::memory_order_relaxed);
  stream_.Read(message, &read_);
}

void StreamCall::StartWrite(const grpc::ByteBuffer& message) {
  references_.fetch_add(1, std::memory_order_relaxed);
  stream_.Write(message, &written_);
}

void StreamCall::Finish(const grpc::Status& status) { stream_.Finish(status, &finished_); }

void StreamCall::WriteAndFinish(const grpc::ByteBuffer& message, const grpc::Status& status) {
  stream_.WriteAndFinish(message, {}, status, &finished_);
}

void StreamCall::ReadDone(bool ok) {
  handler_.load(std::memory_order_acquire)->OnReadDone(ok);
  Release();
}

void StreamCall::WriteDone(bool ok) {
  handler_.load(std::memory_order_acquire)->OnWriteDone(ok);
  Release();
}

void StreamCall::Ended(bool) {
  StreamHandler* const handler = handler_.load(std::memory_order_acquire);
  if (handler != nullptr && context_.IsCancelled()) handler->OnCancel();
  Release();
}

void StreamCall::Finished(bool) { Release(); }

void StreamCall::Release() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  handler_.load(std::memory_order_acquire)->OnDone();
}

// ---------------------------------------------------------------------------------- RefuseCall

namespace {

class RefusedCall final : public StreamHandler {
 public:
  explicit RefusedCall(std::unique_ptr<StreamCall> call) : call_(std::move(call)) {}
  void Finish(const grpc::Status& status) {
    call_->Serve(this);
    call_->Finish(status);
  }
  void OnReadDone(bool) override {}
  void OnWriteDone(bool) override {}
  void OnCancel() override {}
  void OnDone() override { delete this; }

 private:
  const std::unique_ptr<StreamCall> call_;
};

}  // namespace

void RefuseCall(std::unique_ptr<StreamCall> call, const grpc::Status& status) {
  (new RefusedCall(std::move(call)))->Finish(status);
}

// ------------------------------------------------------------------------------ StreamAcceptor

StreamAcceptor::StreamAcceptor(CompletionPoller* poller, Ask ask, Accept accept)
    : poller_(poller), ask_(std::move(ask)), accept_(std::move(accept)) {}

void StreamAcceptor::Start() {
  next_ = std::make_unique<StreamCall>(poller_);
  ask_(next_.get(), poller_, static_cast<StreamEvent*>(this));
}

void StreamAcceptor::OnEvent(bool ok) {
  std::unique_ptr<StreamCall> call = std::move(next_);
  if (!ok) return;  // the server is shut down
  Start();
  accept_(std::move(call));
}

}  // namespace mla::server
