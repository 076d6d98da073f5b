#include "client/cpp/probes.h"

#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_unary_call.h>

#include <memory>
#include <utility>

#include "client/cpp/client_impl.h"

namespace mla::client {
namespace {

// One probe that is under way.
struct Request {
  grpc::ClientContext context;
  v1::ProbeReply reply;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::ProbeReply>> reader;
};

}  // namespace

std::vector<absl::StatusOr<v1::ProbeReply>> Probes::Ask(std::span<Client* const> clients,
                                                        const std::string& model_id,
                                                        const v1::Prefix& prefix,
                                                        int64_t timeout_ms) {
  v1::ProbeRequest message;
  message.set_model_id(model_id);
  *message.mutable_prefix() = prefix;
  std::vector<absl::StatusOr<v1::ProbeReply>> answers(clients.size(), v1::ProbeReply());
  std::vector<std::unique_ptr<Request>> requests(clients.size());
  size_t waiting = 0;
  // All of them are prepared first, because that calls functions of the user, which may throw.
  for (size_t i = 0; i < clients.size(); ++i) {
    Client::Impl& client = *clients[i]->impl_;
    if (absl::Status lost = client.Lost(); !lost.ok()) {
      answers[i] = std::move(lost);
      continue;
    }
    requests[i] = std::make_unique<Request>();
    client.Prepare(&requests[i]->context, Millis(timeout_ms - client.options.call_timeout_ms));
    ++waiting;
  }
  if (waiting == 0) return answers;  // a process that was forked may not use the library
  grpc::CompletionQueue queue;
  for (size_t i = 0; i < clients.size(); ++i) {
    if (requests[i] == nullptr) continue;
    Request& request = *requests[i];
    // One broken connection must not hold the others up.
    const auto connection = clients[i]->impl_->connections->ForCall(Millis(0));
    request.reader = connection->sequences->AsyncProbe(&request.context, message, &queue);
    request.reader->Finish(&request.reply, &request.status, &request);
  }
  // Every request has a deadline, so each of them ends.
  void* ended = nullptr;
  bool ok = false;
  for (; waiting > 0; --waiting) queue.Next(&ended, &ok);
  queue.Shutdown();
  while (queue.Next(&ended, &ok)) {
  }
  for (size_t i = 0; i < clients.size(); ++i) {
    if (requests[i] == nullptr) continue;
    Request& request = *requests[i];
    absl::Status status = FromGrpc(request.status, request.context);
    if (status.ok()) status = clients[i]->impl_->CheckBoot(request.reply.boot_id());
    if (status.ok()) {
      answers[i] = std::move(request.reply);
    } else {
      answers[i] = std::move(status);
    }
  }
  return answers;
}

}  // namespace mla::client
