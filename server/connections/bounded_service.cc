#include "server/connections/bounded_service.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpcpp/impl/rpc_service_method.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "mla/v1/sequence.pb.h"
#include "server/admission/prefix_turns.h"
#include "server/grpc/grpc_status.h"
#include "server/lifecycle/upload_reader.h"

namespace mla::server {
namespace {

using grpc::internal::MethodHandler;
using grpc::internal::RpcMethod;

// Gives access to the handlers that generated code made for a service's methods, which gRPC shows
// only to derived classes.
class HandlerOf final : public grpc::Service {
 public:
  static MethodHandler* At(grpc::Service* service, int index) {
    return (service->*&HandlerOf::GetHandler)(index);
  }
};

RpcMethod::RpcType TypeOf(const google::protobuf::MethodDescriptor& method) {
  if (method.client_streaming()) {
    return method.server_streaming() ? RpcMethod::BIDI_STREAMING : RpcMethod::CLIENT_STREAMING;
  }
  return method.server_streaming() ? RpcMethod::SERVER_STREAMING : RpcMethod::NORMAL_RPC;
}

// Returns true if messages of the type have a prefix, which takes long to parse and to hash.
bool HasPrefix(const google::protobuf::Descriptor& type) {
  for (int i = 0; i < type.field_count(); ++i) {
    if (type.field(i)->message_type() == v1::Prefix::descriptor()) return true;
  }
  return false;
}

// Returns the same bytes as the C++ interface holds them, without copying.
grpc::ByteBuffer Share(grpc_byte_buffer* bytes) {
  std::vector<grpc::Slice> slices;
  grpc_byte_buffer_reader reader;
  if (grpc_byte_buffer_reader_init(&reader, bytes) == 0) return {};
  grpc_slice slice;
  while (grpc_byte_buffer_reader_next(&reader, &slice) != 0) {
    slices.emplace_back(slice, grpc::Slice::STEAL_REF);
  }
  grpc_byte_buffer_reader_destroy(&reader);
  return {slices.data(), slices.size()};
}

// Handles a method with one request.
class BoundedHandler final : public MethodHandler {
 public:
  // `inner` belongs to its service; all pointers must outlive this.
  BoundedHandler(MethodHandler* inner, const google::protobuf::Descriptor* contract,
                 const AdmitRequest* admit, const BeginTurn* begin_turn)
      : inner_(inner),
        contract_(contract),
        admit_(admit),
        begin_turn_(HasPrefix(*contract) ? begin_turn : nullptr) {}

  // gRPC calls this first, without telling who the caller is. So nothing is parsed yet: the bytes
  // become the "request".
  void* Deserialize(grpc_call* /*call*/, grpc_byte_buffer* bytes, grpc::Status* status,
                    void** /*handler_data*/) override {
    *status = grpc::Status::OK;
    return bytes;
  }

  void RunHandler(const HandlerParameter& param) override {
    auto* const bytes = static_cast<grpc_byte_buffer*>(param.request);
    const int64_t size =
        bytes == nullptr ? 0 : static_cast<int64_t>(grpc_byte_buffer_length(bytes));
    scheduler::TenantUse use;
    grpc::Status status = param.status;
    if (status.ok() && size > kUncountedRequestBytes) {
      status = ToGrpcStatus(Admit(*param.server_context, bytes, size, &use), param.server_context);
    }
    void* request = nullptr;
    void* data = nullptr;
    if (status.ok()) {
      request = inner_->Deserialize(param.call->call(), bytes, &status, &data);
    } else if (bytes != nullptr) {
      grpc_byte_buffer_destroy(bytes);
    }
    inner_->RunHandler(HandlerParameter(param.call, param.server_context, request, status, data,
                                        param.call_requester));
    PrefixTurns::End();  // if the call was refused before its handler ended it
  }

 private:
  absl::Status Admit(const grpc::ServerContextBase& caller, grpc_byte_buffer* bytes, int64_t size,
                     scheduler::TenantUse* use) const {
    MLA_ASSIGN_OR_RETURN(*use, (*admit_)(caller, size));
    if (begin_turn_ != nullptr) {
      MLA_RETURN_IF_ERROR((*begin_turn_)(caller));
    }
    return CheckUnknownFields(Share(bytes), *contract_);
  }

  MethodHandler* const inner_;
  const google::protobuf::Descriptor* const contract_;
  const AdmitRequest* const admit_;
  const BeginTurn* const begin_turn_;  // null: calls take no turns
};

// Handles a method whose handler reads its requests.
class SameHandler final : public MethodHandler {
 public:
  explicit SameHandler(MethodHandler* inner) : inner_(inner) {}
  void RunHandler(const HandlerParameter& param) override { inner_->RunHandler(param); }

 private:
  MethodHandler* const inner_;
};

}  // namespace

BoundedService::BoundedService(grpc::Service* service,
                               const google::protobuf::ServiceDescriptor& contract,
                               AdmitRequest admit, BeginTurn begin_turn)
    : admit_(std::move(admit)), begin_turn_(std::move(begin_turn)) {
  names_.reserve(static_cast<size_t>(contract.method_count()));
  // Generated services hold their methods in the order of the contract.
  for (int i = 0; i < contract.method_count(); ++i) {
    const google::protobuf::MethodDescriptor& method = *contract.method(i);
    names_.push_back(absl::StrCat("/", contract.full_name(), "/", method.name()));
    MethodHandler* const inner = HandlerOf::At(service, i);
    MethodHandler* handler = nullptr;
    if (method.client_streaming()) {
      handler = new SameHandler(inner);
    } else {
      handler = new BoundedHandler(inner, method.input_type(), &admit_, &begin_turn_);
    }
    AddMethod(new grpc::internal::RpcServiceMethod(names_.back().c_str(), TypeOf(method), handler));
  }
}

}  // namespace mla::server
