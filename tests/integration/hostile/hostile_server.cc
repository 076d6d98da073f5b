#include "tests/integration/hostile/hostile_server.h"

#include <grpcpp/server_builder.h>
#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace mla::integration {

class HostileServer::Call final : public grpc::ServerGenericBidiReactor {
 public:
  Call(grpc::GenericCallbackServerContext* context, HostileAnswer answer)
      : answer_(std::move(answer)) {
    for (const auto& [key, value] : answer_.trailers) context->AddTrailingMetadata(key, value);
    for (const auto& [key, value] : answer_.initial) context->AddInitialMetadata(key, value);
    if (!answer_.initial.empty()) StartSendInitialMetadata();
    if (answer_.compressed) context->set_compression_algorithm(GRPC_COMPRESS_GZIP);
    if (answer_.reads) {
      StartRead(&request_);
    } else {
      Begin();
    }
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      StartRead(&request_);
    } else {
      Begin();
    }
  }
  void OnWriteDone(bool /*ok*/) override { Next(); }
  void OnCancel() override { End(grpc::Status::CANCELLED); }
  void OnDone() override { delete this; }

 private:
  void Begin() {
    if (answer_.hold) {
      answer_.hold([this] { Next(); });
    } else {
      Next();
    }
  }
  void Next() {
    if (sent_ < answer_.messages.size()) {
      const std::string& message = answer_.messages[sent_++];
      const grpc::Slice slice(message);
      reply_ = grpc::ByteBuffer(&slice, 1);
      StartWrite(&reply_);
    } else if (answer_.ends) {
      End(answer_.status);
    }
  }
  void End(const grpc::Status& status) {
    {
      const MutexLock lock(mutex_);
      if (ended_) return;
      ended_ = true;
    }
    Finish(status);
  }

  const HostileAnswer answer_;
  grpc::ByteBuffer request_, reply_;
  size_t sent_ = 0;
  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

grpc::ServerGenericBidiReactor* HostileServer::Service::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  return new Call(context, server_->Take(context->method()));
}

HostileServer::HostileServer(const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  grpc::ServerBuilder builder;
  // By one address: another process may have the port at localhost's other one.
  builder.AddListeningPort("127.0.0.1:0", credentials, &port_);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterCallbackGenericService(&service_);
  server_ = builder.BuildAndStart();
  EXPECT_NE(server_, nullptr);
}

HostileServer::~HostileServer() { server_->Shutdown(std::chrono::system_clock::now()); }

void HostileServer::Answer(const std::string& method, HostileAnswer answer) {
  const MutexLock lock(mutex_);
  answers_[method] = std::move(answer);
}

HostileAnswer HostileServer::Take(const std::string& method) {
  const MutexLock lock(mutex_);
  ++calls_[method];
  if (const auto found = answers_.find(method); found != answers_.end()) return found->second;
  HostileAnswer none;
  none.status = {grpc::StatusCode::UNIMPLEMENTED, "no such method"};
  return none;
}

std::string HostileServer::target() const { return absl::StrCat("127.0.0.1:", port_); }

int HostileServer::calls(const std::string& method) const {
  const MutexLock lock(mutex_);
  const auto found = calls_.find(method);
  return found == calls_.end() ? 0 : found->second;
}

}  // namespace mla::integration
