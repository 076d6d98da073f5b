// Bytes that are not messages: the stream ends with INVALID_ARGUMENT, and the server goes on.
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <future>
#include <random>

#include "proto/wire/tensor_codec.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

// Sends raw bytes on an Attend stream and reports how it ended.
class RawCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Messages are cut into slices of `slice_bytes`, so that every field is cut somewhere.
  RawCall(const std::shared_ptr<grpc::Channel>& channel, std::vector<std::string> messages,
          size_t slice_bytes = 1)
      : messages_(std::move(messages)), slice_bytes_(slice_bytes) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>(channel)
        .PrepareBidiStreamingCall(&context_, "/mla.v1.Attention/Attend", {}, this);
    StartRead(&incoming_);
    OnWriteDone(true);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    ++replies_;
    StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return;
    if (next_ == messages_.size()) return StartWritesDone();
    const std::string& message = messages_[next_++];
    std::vector<grpc::Slice> slices;
    for (size_t at = 0; at < message.size(); at += slice_bytes_) {
      slices.emplace_back(message.substr(at, slice_bytes_));
    }
    outgoing_ = grpc::ByteBuffer(slices.data(), slices.size());
    StartWrite(&outgoing_);
  }
  void OnDone(const grpc::Status& status) override { done_.set_value(status); }
  grpc::Status Wait() { return done_.get_future().get(); }
  int replies() const { return replies_; }
  // Detail of the status. REQUIRES: Wait has returned.
  v1::ErrorDetail Detail() const {
    v1::ErrorDetail detail;
    const auto& trailer = context_.GetServerTrailingMetadata();
    const auto found = trailer.find("mla-error-detail-bin");
    EXPECT_TRUE(found != trailer.end() &&
                detail.ParseFromString(std::string(found->second.data(), found->second.size())));
    return detail;
  }

 private:
  grpc::ClientContext context_;
  std::vector<std::string> messages_;
  const size_t slice_bytes_;
  size_t next_ = 0;
  grpc::ByteBuffer incoming_, outgoing_;
  int replies_ = 0;
  std::promise<grpc::Status> done_;
};

class GarbageTest : public ::testing::Test {
 protected:
  GarbageTest()
      : client_(server_.Connect()),
        worker_(client_.get(), {}, "m", 1),
        channel_(grpc::CreateChannel(server_.unix_target(), grpc::InsecureChannelCredentials())) {}
  TestServer server_;
  std::unique_ptr<client::Client> client_;
  Worker worker_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(GarbageTest, BytesThatAreNoMessage) {
  const std::vector<std::string> kGarbage = {
      "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  // an endless varint
      std::string("\x08", 1),                          // a tag without its value
      "\x12\x7f short",                                // a length past the end
      std::string("\x00\x01", 2),                      // field 0
      "\x0b\x0c",                                      // groups
      "\xfa\x7f\xff\xff\xff\xff\x0f",                  // a payload of 4 GiB that does not follow
      "\x12\x02\xff\xff",                              // a begin_step that is not a BeginStep
  };
  for (const std::string& bytes : kGarbage) {
    RawCall call(channel_, {bytes});
    EXPECT_EQ(call.Wait().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(call.replies(), 0);
    EXPECT_EQ(call.Detail().field(), "message");
    EXPECT_EQ(call.Detail().reason(), "malformed");
    EXPECT_EQ(call.Detail().got(), std::to_string(bytes.size()) + " bytes");
    EXPECT_EQ(call.Detail().limit(), "an AttendStreamRequest");
  }
  const int64_t bound = SmallConfig().wire.message_bytes;
  RawCall large(channel_, {"\xfa\x7f\xff\xff\xff\x07" + std::string(bound, 'x')}, 65536);
  EXPECT_EQ(large.Wait().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(large.Detail().field(), "message");
  EXPECT_EQ(large.Detail().reason(), "message_size");
  EXPECT_EQ(large.Detail().limit(), "at most " + std::to_string(bound) + " bytes");
  Track track = *worker_.Open();
  EXPECT_EQ(worker_.Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

// A recorded message with a byte changed at every offset gets a reply or a disconnect, never worse.
TEST_F(GarbageTest, ByteFlipsAtEveryOffset) {
  v1::AttendStreamRequest begin;
  begin.set_tag(3);
  begin.mutable_begin_step()->set_step_id(4);
  begin.mutable_begin_step()->set_model_id("m");
  begin.mutable_begin_step()->add_sequences()->set_rows(1);
  begin.set_payload("tensor bytes");
  const std::string good = begin.SerializeAsString();
  std::mt19937_64 random(7);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 + random() % 255));
    RawCall call(channel_, {bad});
    const grpc::Status status = call.Wait();
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::INVALID_ARGUMENT)
        << "offset " << at << ": " << status.error_message();
    EXPECT_EQ(call.replies(), status.ok() ? 1 : 0) << "offset " << at;
  }
  Track track = *worker_.Open();
  EXPECT_EQ(worker_.Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST_F(GarbageTest, FieldsInAnyOrder) {
  // Payload first, then the body, then the tag: legal protobuf that our own client never sends.
  v1::AttendStreamRequest tail;
  tail.mutable_abort_step()->set_step_id(1);
  v1::AttendStreamRequest tag;
  tag.set_tag(8);
  std::string message;
  wire::EncodeHeader(v1::AttendStreamRequest(), 4, &message);
  message += "abcd" + tail.SerializeAsString() + tag.SerializeAsString();
  RawCall call(channel_, {message, tag.SerializeAsString()});
  EXPECT_TRUE(call.Wait().ok());
  EXPECT_EQ(call.replies(), 2);
}

}  // namespace
}  // namespace mla::integration
