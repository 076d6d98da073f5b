#include "tests/bench/wire/wire_stock.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <cstring>
#include <thread>

namespace mla::bench {
namespace {

std::string TargetIn(const std::string& folder) { return "unix:" + folder + "/stock"; }

class StockService final : public v1::Attention::Service {
 public:
  explicit StockService(const Shared* shared)
      : shared_(shared), team_(shared->touch_threads, &shared->touch) {}

  grpc::Status Attend(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::AttendStreamReply, v1::AttendStreamRequest>* stream) override {
    v1::AttendStreamRequest request;
    v1::AttendStreamReply reply;
    while (stream->Read(&request)) {
      const std::string& payload = request.payload();
      uint64_t reply_bytes = 0;
      if (payload.size() < sizeof(reply_bytes)) break;
      std::memcpy(&reply_bytes, payload.data(), sizeof(reply_bytes));
      std::string& out = *reply.mutable_payload();
      if (out.size() != reply_bytes) out.resize(reply_bytes);
      if (shared_->touch.load() != 0) {
        sum_ += team_.Sum(payload.data(), payload.size());
        team_.Fill(out.data(), out.size(), 1);
      }
      if (!stream->Write(reply)) break;
    }
    return grpc::Status::OK;
  }

 private:
  const Shared* const shared_;
  ParallelTouch team_;
  uint64_t sum_ = 0;
};

}  // namespace

void ServeStock(const std::string& folder, Shared* shared) {
  StockService service(shared);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddListeningPort(TargetIn(folder), grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  shared->stock_ready = 1;
  while (shared->stop.load() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  server->Shutdown(std::chrono::system_clock::now());
}

StockStream::StockStream(const std::string& folder, const Shape& shape) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  stub_ = v1::Attention::NewStub(
      grpc::CreateCustomChannel(TargetIn(folder), grpc::InsecureChannelCredentials(), arguments));
  stream_ = stub_->Attend(&context_);
  request_.mutable_payload()->resize(shape.in());
  reply_.mutable_payload()->resize(shape.o());
  in = {reinterpret_cast<std::byte*>(request_.mutable_payload()->data()), shape.in()};
  out = {reinterpret_cast<std::byte*>(reply_.mutable_payload()->data()), shape.o()};
}

StockStream::~StockStream() {
  stream_->WritesDone();
  const grpc::Status status = stream_->Finish();
  if (!status.ok()) Die("stock stream: " + status.error_message());
}

void StockStream::Attend(uint64_t, uint32_t) {
  const uint64_t wanted = out.size();
  std::memcpy(in.data(), &wanted, sizeof(wanted));
  if (!stream_->Write(request_) || !stream_->Read(&reply_) || reply_.payload().size() != wanted) {
    Die("the stock stream has ended");
  }
  out = {reinterpret_cast<std::byte*>(reply_.mutable_payload()->data()), wanted};
}

}  // namespace mla::bench
