// gRPC as its tutorials use it, which wire_benchmark reports for comparison but judges nothing by.
// It has generated stubs, the synchronous interface on both sides, protobuf messages that hold the
// tensors as bytes, and default settings except for the size of messages. Its server is a separate
// process, because gRPC's pollers would disturb the pollers of the other paths.
#ifndef MLA_TESTS_BENCH_WIRE_WIRE_STOCK_H_
#define MLA_TESTS_BENCH_WIRE_WIRE_STOCK_H_

#include <memory>
#include <string>

#include "mla/v1/attention.grpc.pb.h"
#include "tests/bench/wire/parallel_touch.h"
#include "tests/bench/wire/wire_paths.h"
#include "tests/bench/wire/wire_server.h"

namespace mla::bench {

// Answers at unix:`folder`/stock until shared->stop: each reply has as many bytes as the first
// eight bytes of the request's payload say.
void ServeStock(const std::string& folder, Shared* shared);

class StockStream final : public Path {
 public:
  StockStream(const std::string& folder, const Shape& shape);
  ~StockStream() override;
  void Call(v1::AttendStreamRequest) override {}
  bool commits() const override { return false; }
  void Attend(uint64_t step, uint32_t layer) override;

 private:
  std::unique_ptr<v1::Attention::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttendStreamRequest, v1::AttendStreamReply>> stream_;
  v1::AttendStreamRequest request_;
  v1::AttendStreamReply reply_;
};

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_WIRE_WIRE_STOCK_H_
