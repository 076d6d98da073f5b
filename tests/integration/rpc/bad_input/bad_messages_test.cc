// Messages that are wrong as a whole: without a body, with a payload that no body refers to, or
// longer than a message of their kind can be. The stream or call may end; the engine goes on.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/attention.grpc.pb.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

class BadMessagesTest : public ::testing::Test {
 protected:
  BadMessagesTest()
      : client_(server_.Connect()),
        worker_(client_.get(), {}, "m", 1),
        channel_(grpc::CreateChannel(server_.unix_target(), grpc::InsecureChannelCredentials())) {}

  void CheckAlive(const std::string& what) {
    auto track = worker_.Open();
    ASSERT_TRUE(track.ok()) << what << ": " << track.status();
    const absl::Status status = worker_.Step({&*track}, {2}, v1::PROFILE_ABSORBED);
    EXPECT_EQ(status, absl::OkStatus()) << "after " << what;
  }

  TestServer server_;
  std::unique_ptr<client::Client> client_;
  Worker worker_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(BadMessagesTest, PayloadsBelongToAttends) {
  const auto stub = v1::Attention::NewStub(channel_);
  grpc::ClientContext context;
  const auto stream = stub->Attend(&context);
  v1::AttendStreamRequest begin, end, abort, twice;
  begin.mutable_begin_step()->set_model_id("m");
  end.mutable_end_step()->set_step_id(1);
  abort.mutable_abort_step()->set_step_id(1);
  twice.mutable_attend()->set_step_id(1);
  twice.mutable_shared()->set_handle(std::string(16, 'h'));
  v1::AttendStreamReply reply;
  for (v1::AttendStreamRequest* request : {&begin, &end, &abort, &twice}) {
    request->set_payload("x");
    ASSERT_TRUE(stream->Write(*request) && stream->Read(&reply));
    EXPECT_EQ(reply.error().code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(reply.error().detail().field(), "payload") << request->ShortDebugString();
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(BadMessagesTest, NoBodyIsRefusedAndTheStreamGoesOn) {
  const auto stub = v1::Attention::NewStub(channel_);
  grpc::ClientContext context;
  const auto stream = stub->Attend(&context);
  v1::AttendStreamRequest nothing;
  nothing.set_tag(5);
  v1::AttendStreamReply reply;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(stream->Write(nothing));
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.tag(), 5u);
    EXPECT_EQ(reply.error().code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(reply.error().detail().field(), "body");
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

// Two bytes of an empty sequence become a hundred when parsed, and a message has room for half a
// million of them, so they are counted before parsing.
TEST_F(BadMessagesTest, LongHeadersAreRefusedBeforeTheyAreParsed) {
  const auto stub = v1::Attention::NewStub(channel_);
  const auto send = [&](const v1::AttendStreamRequest& request, v1::AttendStreamReply* reply) {
    grpc::ClientContext context;
    const auto stream = stub->Attend(&context);
    stream->Write(request);
    if (stream->Read(reply)) {
      stream->WritesDone();
      EXPECT_TRUE(stream->Finish().ok());
      return grpc::Status::OK;
    }
    return stream->Finish();
  };
  v1::AttendStreamRequest request;
  v1::BeginStep* const begin = request.mutable_begin_step();
  begin->set_step_id(1);
  begin->set_model_id(std::string(128, 'm'));
  const v1::StepSequence most = [] {
    v1::StepSequence sequence;
    sequence.set_sequence_id(~uint64_t{0});
    sequence.set_epoch(~uint64_t{0});
    sequence.set_start_position(~uint64_t{0});
    sequence.set_rows(~uint32_t{0});
    return sequence;
  }();
  for (int i = 0; i < 32; ++i) *begin->add_sequences() = most;  // limits.max_step_sequences
  v1::AttendStreamReply reply;
  EXPECT_TRUE(send(request, &reply).ok());  // the longest valid message; the reply names fields
  EXPECT_EQ(reply.error().detail().field(), "begin_step.sequences[0].start_position");
  begin->clear_sequences();
  for (int i = 0; i < 400000; ++i) begin->add_sequences();
  const grpc::Status refused = send(request, &reply);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), testing::EndsWith(" bytes besides the payload"));
  CheckAlive("a BeginStep of 400,000 sequences");
}

TEST_F(BadMessagesTest, OversizeMessagesAndHeadersAreRefused) {
  const auto stub = v1::Attention::NewStub(channel_);
  {
    grpc::ClientContext context;
    const auto stream = stub->Attend(&context);
    v1::AttendStreamRequest huge;
    huge.set_payload(std::string(size_t{2} << 20, 'x'));
    stream->Write(huge);
    v1::AttendStreamReply reply;
    EXPECT_FALSE(stream->Read(&reply));
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  CheckAlive("a 2 MiB message");
  const auto admin = v1::Admin::NewStub(channel_);
  // Larger headers cost the HTTP/2 library quadratic time before it gives up: see docs/security.md.
  for (const size_t bytes : {size_t{20000}, size_t{1} << 18, size_t{1} << 20}) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    context.AddMetadata("x-bomb", std::string(bytes, 'h'));
    v1::GetStatsReply reply;
    EXPECT_FALSE(admin->GetStats(&context, {}, &reply).ok()) << bytes;
    CheckAlive("a header of " + std::to_string(bytes));
  }
}

}  // namespace
}  // namespace mla::integration
