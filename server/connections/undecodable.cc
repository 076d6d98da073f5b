#include "server/connections/undecodable.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "server/grpc/grpc_status.h"

namespace mla::server {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerRpcInfo;

class Interceptor final : public grpc::experimental::Interceptor {
 public:
  Interceptor(ServerRpcInfo* info, const UndecodableCounter* counter)
      : info_(info), counter_(counter) {}

  void Intercept(InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = methods->GetSendStatus();
      // Every INTERNAL of our own handlers has a text, so this one comes from gRPC.
      if (status.error_code() == grpc::StatusCode::INTERNAL && status.error_message().empty()) {
        Replace(methods);
      }
    }
    methods->Proceed();
  }

 private:
  void Replace(InterceptorBatchMethods* methods) {
    const absl::Status status =
        RefuseField("request", "undecodable bytes",
                    absl::StrCat("a serialized request of ", info_->method()), "malformed");
    methods->ModifySendStatus(ToGrpcStatus(status, nullptr));
    if (auto* trailers = methods->GetSendTrailingMetadata(); trailers != nullptr) {
      trailers->emplace(kErrorDetailKey, ToErrorDetail(status).SerializeAsString());
    }
    if (*counter_) (*counter_)(*info_->server_context());
  }

  ServerRpcInfo* const info_;
  const UndecodableCounter* const counter_;
};

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(UndecodableCounter counter) : counter_(std::move(counter)) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    const auto type = info->type();
    if (type != ServerRpcInfo::Type::UNARY && type != ServerRpcInfo::Type::SERVER_STREAMING) {
      return nullptr;
    }
    return new Interceptor(info, &counter_);
  }

 private:
  const UndecodableCounter counter_;
};

}  // namespace

std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
InterceptUndecodable(UndecodableCounter counter) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<Factory>(std::move(counter)));
  return factories;
}

}  // namespace mla::server
