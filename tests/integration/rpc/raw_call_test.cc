// Calls that no stub of the contract makes: compressed messages, bodies that are not messages, and
// messages that become large when parsed.
#include <grpc/byte_buffer.h>
#include <grpc/compression.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/error.pb.h"
#include "mla/v1/sequence.pb.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// `size` zeros, compressed by gzip or zlib.
std::string CompressedZeros(size_t size, grpc_compression_algorithm algorithm) {
  constexpr int kGzipFormat = 16, kWindowBits = 15;
  z_stream stream{};
  EXPECT_EQ(
      deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED,
                   kWindowBits + (algorithm == GRPC_COMPRESS_GZIP ? kGzipFormat : 0), 9, Z_RLE),
      Z_OK);
  std::string zeros(std::min(size, 4 * kMiB), '\0'), out, buffer(kMiB, '\0');
  for (size_t left = size; left > 0 || stream.avail_out == 0;) {
    if (stream.avail_in == 0 && left > 0) {
      stream.next_in = reinterpret_cast<Bytef*>(zeros.data());
      stream.avail_in = static_cast<uInt>(std::min(left, zeros.size()));
      left -= stream.avail_in;
    }
    stream.next_out = reinterpret_cast<Bytef*>(buffer.data());
    stream.avail_out = static_cast<uInt>(buffer.size());
    deflate(&stream, left == 0 ? Z_FINISH : Z_NO_FLUSH);
    out.append(buffer.data(), buffer.size() - stream.avail_out);
  }
  deflateEnd(&stream);
  return out;
}

// This process's peak resident memory, in bytes.
size_t PeakBytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoull(line.substr(6)) * 1024;
  }
  return 0;
}

struct Answer {
  grpc_status_code code = GRPC_STATUS_UNKNOWN;
  std::string text;
  v1::ErrorDetail detail;
};

// One call of gRPC's core that sends its message unchanged; `body` was compressed with `algorithm`.
class RawCall {
 public:
  explicit RawCall(const std::string& target)
      : queue_(grpc_completion_queue_create_for_pluck(nullptr)) {
    grpc_channel_credentials* credentials = grpc_insecure_credentials_create();
    channel_ = grpc_channel_create(target.c_str(), credentials, nullptr);
    grpc_channel_credentials_release(credentials);
  }
  ~RawCall() {
    grpc_channel_destroy(channel_);
    grpc_completion_queue_shutdown(queue_);
    grpc_completion_queue_destroy(queue_);
  }

  Answer Send(const char* method, const std::string& body, grpc_compression_algorithm algorithm) {
    const gpr_timespec deadline =
        gpr_time_add(gpr_now(GPR_CLOCK_REALTIME), gpr_time_from_seconds(60, GPR_TIMESPAN));
    grpc_call* call =
        grpc_channel_create_call(channel_, nullptr, GRPC_PROPAGATE_DEFAULTS, queue_,
                                 grpc_slice_from_static_string(method), nullptr, deadline, nullptr);
    grpc_metadata encoding{};
    encoding.key = grpc_slice_from_static_string(GRPC_COMPRESSION_REQUEST_ALGORITHM_MD_KEY);
    const char* name = nullptr;
    grpc_compression_algorithm_name(algorithm, &name);
    encoding.value = grpc_slice_from_static_string(name);
    grpc_slice slice = grpc_slice_from_copied_buffer(body.data(), body.size());
    grpc_byte_buffer* message = grpc_raw_compressed_byte_buffer_create(&slice, 1, algorithm);
    grpc_byte_buffer* reply = nullptr;
    grpc_metadata_array initial, trailing;
    grpc_metadata_array_init(&initial);
    grpc_metadata_array_init(&trailing);
    Answer answer;
    grpc_slice text = grpc_empty_slice();
    grpc_op ops[6] = {};
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[0].data.send_initial_metadata.metadata = &encoding;
    ops[0].data.send_initial_metadata.count = 1;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = message;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = &reply;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.trailing_metadata = &trailing;
    ops[5].data.recv_status_on_client.status = &answer.code;
    ops[5].data.recv_status_on_client.status_details = &text;
    EXPECT_EQ(grpc_call_start_batch(call, ops, 6, this, nullptr), GRPC_CALL_OK);
    grpc_completion_queue_pluck(queue_, this, gpr_inf_future(GPR_CLOCK_REALTIME), nullptr);
    answer.text = Text(text);
    for (size_t i = 0; i < trailing.count; ++i) {
      if (Text(trailing.metadata[i].key) != "mla-error-detail-bin") continue;
      EXPECT_TRUE(answer.detail.ParseFromString(Text(trailing.metadata[i].value)));
    }
    grpc_slice_unref(slice);
    grpc_slice_unref(text);
    grpc_byte_buffer_destroy(message);
    if (reply != nullptr) grpc_byte_buffer_destroy(reply);
    grpc_metadata_array_destroy(&initial);
    grpc_metadata_array_destroy(&trailing);
    grpc_call_unref(call);
    return answer;
  }

 private:
  static std::string Text(const grpc_slice& slice) {
    return {reinterpret_cast<const char*>(GRPC_SLICE_START_PTR(slice)), GRPC_SLICE_LENGTH(slice)};
  }
  grpc_completion_queue* const queue_;
  grpc_channel* channel_ = nullptr;
};

// One method of every kind: unary, client stream, server stream, and both.
constexpr const char* kMethods[] = {"/mla.v1.Admin/GetServerInfo",  "/mla.v1.Models/UploadWeights",
                                    "/mla.v1.Admin/WatchStatus",    "/mla.v1.Attention/Attend",
                                    "/grpc.health.v1.Health/Check", "/mla.v1.None/None"};

constexpr const char* kOpen = "/mla.v1.Sequences/Open";
constexpr const char* kUploads[] = {"/mla.v1.Models/UploadWeights", "/mla.v1.Cache/Import"};

// Fields that the contract does not know: two bytes each, and a hundred times as much once parsed.
TEST(LargeRequestsTest, MessagesOfManyFieldsAreNotParsed) {
  const TestServer server;
  RawCall raw(server.unix_target());
  const std::string nested("\x12\x80\x80\x80\x01", 5);  // field 2, of 2 MiB
  const size_t before = PeakBytes();
  for (const char* method : {kUploads[0], kUploads[1], kOpen, "/grpc.health.v1.Health/Check"}) {
    for (const std::string& place : {std::string(), nested}) {
      if (method == kOpen && !place.empty()) continue;  // field 2 of Open is not a message
      // Field 15: an empty string, a zero, an empty group, one with the contract's field 1 in it.
      for (const std::string& field : {std::string("\x7a\0", 2), std::string("\x78\0", 2),
                                       std::string("\x7b\x7c"), std::string("\x7b\x0a\0\x7c", 4)}) {
        std::string body = place;
        while (body.size() < 2 * kMiB + 5) body += field;
        const Answer answer = raw.Send(method, body, GRPC_COMPRESS_NONE);
        EXPECT_EQ(answer.code, GRPC_STATUS_INVALID_ARGUMENT) << method << answer.text;
        EXPECT_EQ(answer.detail.field(), "request") << method << answer.text;
        EXPECT_EQ(answer.detail.reason(), "malformed") << method;
      }
    }
  }
  EXPECT_LT(PeakBytes() - before, 64 * kMiB);
}

// A message of a mebibyte must not become a gibibyte in the server's memory.
TEST(CompressedMessagesTest, AreRefusedAndNeverInflated) {
  const TestServer server([](server::Config& config) { config.wire.message_bytes = 4 * kMiB; });
  RawCall raw(server.unix_target());
  for (const size_t size : {size_t{0}, size_t{100}, kMiB, 1024 * kMiB}) {
    for (const auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
      const std::string body = CompressedZeros(size, algorithm);
      ASSERT_LT(body.size(), 2 * kMiB);
      const size_t before = PeakBytes();
      for (const char* method : kMethods) {
        const Answer answer = raw.Send(method, body, algorithm);
        EXPECT_EQ(answer.code, GRPC_STATUS_UNIMPLEMENTED) << method << size << answer.text;
        EXPECT_FALSE(answer.text.empty()) << method << size;
      }
      EXPECT_LT(PeakBytes() - before, 64 * kMiB) << size;
    }
  }
  EXPECT_TRUE(*server.Connect()->IsServing());
}

// A message that was compressed twice is not inflated either.
TEST(CompressedMessagesTest, NestedCompressionIsRefused) {
  const TestServer server;
  RawCall raw(server.unix_target());
  std::string inner = CompressedZeros(256 * kMiB, GRPC_COMPRESS_GZIP);
  std::string outer(compressBound(inner.size()), '\0');
  uLongf size = outer.size();
  ASSERT_EQ(compress(reinterpret_cast<Bytef*>(outer.data()), &size,
                     reinterpret_cast<const Bytef*>(inner.data()), inner.size()),
            Z_OK);
  outer.resize(size);
  EXPECT_EQ(raw.Send(kMethods[0], outer, GRPC_COMPRESS_DEFLATE).code, GRPC_STATUS_UNIMPLEMENTED);
}

TEST(UndecodableTest, BodiesThatAreNoMessagesAreInvalidArgument) {
  const TestServer server;
  RawCall raw(server.unix_target());
  for (const char* method :
       {"/mla.v1.Admin/GetServerInfo", "/mla.v1.Admin/WatchStatus", "/mla.v1.Admin/Drain",
        "/mla.v1.Models/Register", "/mla.v1.Sequences/Open", "/mla.v1.Sequences/RenewLease",
        "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}) {
    for (const std::string& body :
         {std::string(11, '\xff'), std::string("\x0a\xff"), std::string(1000, '\x07')}) {
      const Answer answer = raw.Send(method, body, GRPC_COMPRESS_NONE);
      EXPECT_EQ(answer.code, GRPC_STATUS_INVALID_ARGUMENT) << method << " " << answer.text;
      EXPECT_NE(answer.text.find("request: got "), std::string::npos) << answer.text;
      EXPECT_EQ(answer.detail.field(), "request") << method;
      EXPECT_EQ(answer.detail.reason(), "malformed") << method;
      EXPECT_FALSE(answer.detail.limit().empty() || answer.detail.got().empty()) << method;
    }
  }
  // Refusals are counted like other requests.
  EXPECT_NE(HttpGet(server.server().ops_port(), "/metrics")
                .find("mla_requests_total{code=\"INVALID_ARGUMENT\",tenant=\"default\"} 18\n"),
            std::string::npos);
}

// An Open whose parsed form takes thirty times its bytes: empty page keys, two bytes each.
std::string EmptyPageKeys(size_t bytes) {
  v1::OpenRequest request;
  request.set_model_id("m");
  std::string keys;
  keys.reserve(bytes);
  for (size_t i = 0; i < bytes / 2; ++i) keys.append("\x12\x00", 2);
  std::string body = request.SerializeAsString();
  body += '\x2a';  // field 5, prefix
  for (size_t left = keys.size();; left >>= 7) {
    body += static_cast<char>((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
    if (left <= 0x7f) break;
  }
  return body + keys;
}

TEST(LargeRequestsTest, AreCountedBeforeTheyAreParsed) {
  const TestServer server([](server::Config& config) { config.wire.control_bytes = 2 * kMiB; });
  RawCall raw(server.unix_target());
  // Bytes are counted until just after the reply has been sent.
  const auto send = [&](const std::string& body) {
    Answer answer = raw.Send(kOpen, body, GRPC_COMPRESS_NONE);
    for (int i = 0; i < 1000 && answer.detail.reason() == "control_bytes_full"; ++i) {
      answer = raw.Send(kOpen, body, GRPC_COMPRESS_NONE);
    }
    return answer;
  };
  // One tenant may use half of the bound. The handler refuses the call, so it was parsed. The bytes
  // are released each time.
  for (int calls = 0; calls < 4; ++calls) {
    const Answer parsed = send(EmptyPageKeys(kMiB - 4096));
    EXPECT_EQ(parsed.code, GRPC_STATUS_INVALID_ARGUMENT) << parsed.text;
    EXPECT_EQ(parsed.detail.field(), "prefix.page_keys");
  }
  const Answer refused = raw.Send(kOpen, EmptyPageKeys(kMiB + 4096), GRPC_COMPRESS_NONE);
  EXPECT_EQ(refused.code, GRPC_STATUS_RESOURCE_EXHAUSTED) << refused.text;
  EXPECT_EQ(refused.detail.field(), "request");
  EXPECT_EQ(refused.detail.reason(), "control_bytes_full");
  EXPECT_GT(refused.detail.retry_after_ms(), 0u);
  // Undecodable bytes are counted and released as well.
  const std::string garbage(kMiB - 4096, '\x07');
  for (int calls = 0; calls < 4; ++calls) {
    EXPECT_EQ(send(garbage).detail.reason(), "malformed") << calls;
  }
}

// 64 requests of 4 MiB would take 7 GiB if all of them were parsed at the same time.
TEST(LargeRequestsTest, AFloodOfThemTakesBoundedMemory) {
  constexpr int kCalls = 64;
  const TestServer server;
  const std::string body = EmptyPageKeys(4 * kMiB - 4096);
  const size_t before = PeakBytes();
  std::vector<std::thread> callers;
  std::atomic<int> parsed{0}, refused{0};
  for (int i = 0; i < kCalls; ++i) {
    callers.emplace_back([&] {
      RawCall raw(server.unix_target());
      const Answer answer = raw.Send(kOpen, body, GRPC_COMPRESS_NONE);
      if (answer.code == GRPC_STATUS_INVALID_ARGUMENT) parsed.fetch_add(1);
      if (answer.detail.reason() == "control_bytes_full") refused.fetch_add(1);
    });
  }
  // Small calls of other clients succeed during the flood.
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(*server.Connect()->IsServing());
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(parsed + refused, kCalls);
  EXPECT_GT(parsed, 0);
  // 16 MiB of one tenant, times thirty, and the memory of the callers in this process.
  EXPECT_LT(PeakBytes() - before, 512 * kMiB + 3 * kCalls * body.size());
}

// A part of an upload that is not a message must not be taken for the upload's end.
TEST(UndecodableTest, PartsOfUploadsAreInvalidArgument) {
  const TestServer server;
  RawCall raw(server.unix_target());
  for (const char* method : kUploads) {
    for (const std::string& body :
         {std::string(11, '\xff'), std::string("\x0a\xff"), std::string("\x12\x04\x0a\xff", 4)}) {
      const Answer answer = raw.Send(method, body, GRPC_COMPRESS_NONE);
      EXPECT_EQ(answer.code, GRPC_STATUS_INVALID_ARGUMENT) << answer.text;
      EXPECT_EQ(answer.detail.field(), "request") << method;
      EXPECT_EQ(answer.detail.reason(), "malformed") << method;
    }
  }
}

}  // namespace
}  // namespace mla::integration
