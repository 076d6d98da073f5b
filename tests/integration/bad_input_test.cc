// Hostile values in every field of every message: refused or answered, never a crash, and the
// engine serves a good step after each of them.
#include <google/protobuf/descriptor.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <functional>

#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/attention.grpc.pb.h"
#include "mla/v1/model.grpc.pb.h"
#include "mla/v1/sequence.grpc.pb.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr uint64_t kValues[] = {0,
                                1,
                                (uint64_t{1} << 31) - 1,
                                uint64_t{1} << 31,
                                (uint64_t{1} << 32) - 1,
                                (uint64_t{1} << 63) - 1,
                                ~uint64_t{0}};

// Sets a scalar field (element 0 of a repeated one) to `value`, narrowed as the type demands.
// False for types that take no number.
bool SetField(Message* message, const FieldDescriptor* field, uint64_t value) {
  const auto* reflection = message->GetReflection();
  const bool repeated = field->is_repeated();
  if (repeated && reflection->FieldSize(*message, field) == 0) return false;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      repeated ? reflection->SetRepeatedUInt32(message, field, 0, static_cast<uint32_t>(value))
               : reflection->SetUInt32(message, field, static_cast<uint32_t>(value));
      return true;
    case FieldDescriptor::CPPTYPE_UINT64:
      repeated ? reflection->SetRepeatedUInt64(message, field, 0, value)
               : reflection->SetUInt64(message, field, value);
      return true;
    case FieldDescriptor::CPPTYPE_ENUM:
      reflection->SetEnumValue(message, field, static_cast<int>(value));
      return true;
    case FieldDescriptor::CPPTYPE_BOOL:
      reflection->SetBool(message, field, value != 0);
      return true;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      reflection->SetDouble(message, field,
                            value == ~uint64_t{0} ? -1.0 : static_cast<double>(value));
      return true;
    case FieldDescriptor::CPPTYPE_STRING:
      reflection->SetString(message, field, std::string(value % 1000, 'x'));
      return true;
    default:
      return false;
  }
}

// Calls `use(mutated, path)` for every field below `message` with every value.
void ForEachMutation(const Message& message, Message* root, Message* node, const std::string& path,
                     const std::function<void(const Message&, const std::string&)>& use) {
  const auto* descriptor = node->GetDescriptor();
  const auto* reflection = node->GetReflection();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    const std::string name = path + "." + field->name();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (field->is_repeated()) {
        if (reflection->FieldSize(*node, field) == 0) continue;
        ForEachMutation(message, root, reflection->MutableRepeatedMessage(node, field, 0), name,
                        use);
      } else if (reflection->HasField(*node, field)) {
        ForEachMutation(message, root, reflection->MutableMessage(node, field), name, use);
      }
      continue;
    }
    const std::unique_ptr<Message> before(node->New());
    before->CopyFrom(*node);
    for (const uint64_t value : kValues) {
      if (!SetField(node, field, value)) break;
      use(*root, name + "=" + std::to_string(value));
      node->CopyFrom(*before);
    }
  }
}

class BadInputTest : public ::testing::Test {
 protected:
  BadInputTest()
      : server_([](server::Config& config) {
          config.limits.step_lease_ms = 60000;
          config.limits.kv_wait_ms = 1;
        }),
        client_(server_.Connect()),
        worker_(client_.get(), {}, "m", 1),
        channel_(grpc::CreateChannel(server_.unix_target(), grpc::InsecureChannelCredentials())) {}

  // Every value that a refusal may legitimately have; INTERNAL, UNKNOWN and UNAVAILABLE mean that
  // something broke.
  static void CheckCode(int code, const std::string& message, const std::string& what) {
    EXPECT_NE(code, grpc::StatusCode::INTERNAL) << what << ": " << message;
    EXPECT_NE(code, grpc::StatusCode::UNKNOWN) << what << ": " << message;
    EXPECT_NE(code, grpc::StatusCode::UNAVAILABLE) << what << ": " << message;
    EXPECT_NE(code, grpc::StatusCode::DATA_LOSS) << what << ": " << message;
  }

  void CheckAlive(const std::string& what) {
    auto track = worker_.Open();
    ASSERT_TRUE(track.ok()) << what << ": " << track.status();
    const absl::Status status = worker_.Step({&*track}, {2}, v1::PROFILE_ABSORBED);
    EXPECT_EQ(status, absl::OkStatus()) << "after " << what;
  }

  template <typename Request, typename Call>
  void TryUnary(Request request, Call call) {
    int cases = 0;
    ForEachMutation(
        request, &request, &request, request.GetTypeName(),
        [&](const Message& mutated, const std::string& what) {
          grpc::ClientContext context;
          const grpc::Status status = call(&context, static_cast<const Request&>(mutated));
          CheckCode(status.error_code(), status.error_message(), what);
          if (status.error_code() == grpc::StatusCode::INVALID_ARGUMENT) {
            EXPECT_EQ(context.GetServerTrailingMetadata().count("mla-error-detail-bin"), 1u)
                << what;
          }
          if (++cases % 8 == 0) CheckAlive(what);
        });
    EXPECT_GT(cases, 0) << request.GetTypeName();
  }

  TestServer server_;
  std::unique_ptr<client::Client> client_;
  Worker worker_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(BadInputTest, SequencesAndModels) {
  const auto sequences = v1::Sequences::NewStub(channel_);
  const auto models = v1::Models::NewStub(channel_);
  Track track = *worker_.Open();
  v1::OpenRequest open;
  open.set_model_id("m");
  open.set_client_id("bad");
  open.set_lease_ms(100);
  TryUnary(open, [&](auto* context, const auto& request) {
    v1::OpenReply reply;
    const grpc::Status status = sequences->Open(context, request, &reply);
    if (status.ok()) client_->ReleaseSequences({reply.sequence().sequence_id()}).IgnoreError();
    return status;
  });
  v1::ForkRequest fork;
  fork.set_sequence_id(track.sequence.id());
  fork.set_expected_epoch(track.sequence.epoch());
  fork.set_length(0);
  TryUnary(fork, [&](auto* context, const auto& request) {
    v1::ForkReply reply;
    const grpc::Status status = sequences->Fork(context, request, &reply);
    if (status.ok()) client_->ReleaseSequences({reply.sequence().sequence_id()}).IgnoreError();
    return status;
  });
  v1::TruncateRequest truncate;
  truncate.set_sequence_id(track.sequence.id());
  truncate.set_expected_epoch(track.sequence.epoch());
  TryUnary(truncate, [&](auto* context, const auto& request) {
    v1::TruncateReply reply;
    return sequences->Truncate(context, request, &reply);
  });
  v1::RenewLeaseRequest renew;
  renew.add_sequence_ids(track.sequence.id());
  TryUnary(renew, [&](auto* context, const auto& request) {
    v1::RenewLeaseReply reply;
    return sequences->RenewLease(context, request, &reply);
  });
  v1::ReleaseRequest release;
  release.add_sequence_ids(5);
  TryUnary(release, [&](auto* context, const auto& request) {
    v1::ReleaseReply reply;
    return sequences->Release(context, request, &reply);
  });
  v1::RegisterRequest reg;
  *reg.mutable_model() = SpecOf({}, "mutant");
  TryUnary(reg, [&](auto* context, const auto& request) {
    v1::RegisterReply reply;
    const grpc::Status status = models->Register(context, request, &reply);
    if (status.ok()) client_->UnregisterModel(reply.model().model_id()).IgnoreError();
    return status;
  });
}

TEST_F(BadInputTest, StreamMessages) {
  const auto stub = v1::Attention::NewStub(channel_);
  Track track = *worker_.Open();
  const Dims dims;
  int cases = 0;
  const auto exchange = [&](const v1::AttendStreamRequest& mutated, const std::string& what) {
    grpc::ClientContext context;
    const auto stream = stub->Attend(&context);
    v1::AttendStreamRequest begin;
    begin.mutable_begin_step()->set_step_id(9);
    begin.mutable_begin_step()->set_model_id("m");
    v1::StepSequence* sequence = begin.mutable_begin_step()->add_sequences();
    sequence->set_sequence_id(track.sequence.id());
    sequence->set_epoch(track.sequence.epoch());
    sequence->set_rows(2);
    v1::AttendStreamReply reply;
    if (!mutated.has_begin_step()) {
      ASSERT_TRUE(stream->Write(begin) && stream->Read(&reply)) << what;
      ASSERT_TRUE(reply.has_begin_step()) << what << reply.DebugString();
    }
    ASSERT_TRUE(stream->Write(mutated)) << what;
    ASSERT_TRUE(stream->Read(&reply)) << what;
    EXPECT_EQ(reply.tag(), mutated.tag()) << what;
    if (reply.has_error()) {
      CheckCode(reply.error().code(), reply.error().message(), what);
      EXPECT_NE(reply.error().code(), 0) << what;
      if (reply.error().code() == grpc::StatusCode::INVALID_ARGUMENT) {
        EXPECT_FALSE(reply.error().detail().field().empty()) << what << reply.DebugString();
      }
    }
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok()) << what;
    if (++cases % 8 == 0) CheckAlive(what);
  };
  v1::AttendStreamRequest attend;
  v1::Attend* body = attend.mutable_attend();
  body->set_step_id(9);
  body->set_row_count(2);
  body->set_num_heads(4);
  body->set_profile(v1::PROFILE_ABSORBED);
  body->set_has_kv(true);
  attend.set_payload(std::string(static_cast<size_t>(dims.row()) * 2 * 2 * 5, '\1'));
  v1::AttendStreamRequest begin;
  begin.mutable_begin_step()->set_step_id(9);
  begin.mutable_begin_step()->set_model_id("m");
  v1::StepSequence* sequence = begin.mutable_begin_step()->add_sequences();
  sequence->set_sequence_id(track.sequence.id());
  sequence->set_epoch(track.sequence.epoch());
  sequence->set_rows(2);
  v1::AttendStreamRequest end;
  end.mutable_end_step()->set_step_id(9);
  end.mutable_end_step()->add_committed_rows(1);
  v1::AttendStreamRequest abort;
  abort.mutable_abort_step()->set_step_id(9);
  for (v1::AttendStreamRequest* message : {&attend, &begin, &end, &abort}) {
    ForEachMutation(*message, message, message, "AttendStreamRequest",
                    [&](const Message& mutated, const std::string& what) {
                      exchange(static_cast<const v1::AttendStreamRequest&>(mutated), what);
                    });
  }
  EXPECT_GT(cases, 150);
  CheckAlive("all");
}

TEST_F(BadInputTest, NoBodyIsRefusedAndTheStreamGoesOn) {
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

TEST_F(BadInputTest, OversizeMessagesAndHeadersAreCutOff) {
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
  // Larger ones cost the HTTP/2 library quadratic time before it gives up: see docs/security.md.
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
