// Every refusal of a control call has an error detail: the field, its value, valid values and the
// reason.
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/error.pb.h"
#include "mla/v1/model.grpc.pb.h"
#include "mla/v1/sequence.grpc.pb.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

class RefusalsTest : public ::testing::Test {
 protected:
  RefusalsTest()
      : server_([](server::Config& config) {
          config.limits.kv_cache_bytes = int64_t{4} << 20;
          config.limits.max_sequences = 2;
          config.limits.max_step_sequences = 2;
          config.limits.max_models = 2;
          config.wire.max_watchers = 1;
          config.listen.plain_operators = "none";
        }),
        client_(server_.Connect()),
        worker_(client_.get(), {}, "m", 1),
        channel_(grpc::CreateChannel(server_.unix_target(), grpc::InsecureChannelCredentials())),
        models_(v1::Models::NewStub(channel_)),
        sequences_(v1::Sequences::NewStub(channel_)),
        admin_(v1::Admin::NewStub(channel_)) {}

  // Expects that `call` is refused for `reason` with a complete detail, and returns the detail.
  v1::ErrorDetail Expect(const std::string& reason, grpc::StatusCode code,
                         const std::function<grpc::Status(grpc::ClientContext*)>& call,
                         const std::string& tenant = "") {
    grpc::ClientContext context;
    if (!tenant.empty()) context.AddMetadata("mla-tenant", tenant);
    const grpc::Status status = call(&context);
    EXPECT_EQ(status.error_code(), code) << reason << ": " << status.error_message();
    EXPECT_FALSE(status.error_message().empty()) << reason;
    v1::ErrorDetail detail;
    const auto& trailers = context.GetServerTrailingMetadata();
    const auto found = trailers.find("mla-error-detail-bin");
    EXPECT_NE(found, trailers.end()) << reason;
    if (found != trailers.end()) {
      EXPECT_TRUE(detail.ParseFromString({found->second.data(), found->second.size()}));
    }
    EXPECT_EQ(detail.reason(), reason);
    EXPECT_FALSE(detail.field().empty()) << reason;
    EXPECT_FALSE(detail.limit().empty()) << reason;
    EXPECT_FALSE(detail.got().empty()) << reason;
    return detail;
  }

  grpc::Status Open(grpc::ClientContext* context, const std::string& model,
                    const std::string& request_id = "") {
    v1::OpenRequest request;
    request.set_model_id(model);
    request.set_request_id(request_id);
    v1::OpenReply reply;
    return sequences_->Open(context, request, &reply);
  }

  TestServer server_;
  std::unique_ptr<client::Client> client_;
  Worker worker_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Models::Stub> models_;
  std::unique_ptr<v1::Sequences::Stub> sequences_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

TEST_F(RefusalsTest, OfSequences) {
  Track a = *worker_.Open();
  ASSERT_EQ(worker_.Step({&a}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  auto step = worker_.session().Begin("m", {{&a.sequence, 1}});
  ASSERT_TRUE(step.ok()) << step.status();
  using grpc::StatusCode;
  Expect("model_not_found", StatusCode::NOT_FOUND,
         [&](auto* context) { return Open(context, "absent"); });
  Expect("name_length", StatusCode::INVALID_ARGUMENT,
         [&](auto* context) { return Open(context, std::string(200, 'x')); });
  Expect(
      "name_characters", StatusCode::INVALID_ARGUMENT,
      [&](auto* context) { return Open(context, "m"); }, "two words");
  v1::ForkRequest fork;
  fork.set_sequence_id(a.sequence.id());
  fork.set_expected_epoch(a.sequence.epoch());
  const auto do_fork = [&](grpc::ClientContext* context) {
    v1::ForkReply reply;
    return sequences_->Fork(context, fork, &reply);
  };
  const auto in_step = Expect("in_step", StatusCode::FAILED_PRECONDITION, do_fork);
  EXPECT_EQ(in_step.field(), "sequence_id");
  EXPECT_EQ(in_step.last_good_position(), 3u);
  v1::TruncateRequest truncate;
  truncate.set_sequence_id(a.sequence.id());
  truncate.set_expected_epoch(a.sequence.epoch());
  const auto do_truncate = [&](grpc::ClientContext* context) {
    v1::TruncateReply reply;
    return sequences_->Truncate(context, truncate, &reply);
  };
  EXPECT_EQ(Expect("in_step", StatusCode::FAILED_PRECONDITION, do_truncate).last_good_position(),
            3u);
  ASSERT_TRUE((*step)->Abort().ok());
  truncate.set_length(4);
  Expect("out_of_range", StatusCode::INVALID_ARGUMENT, do_truncate);
  truncate.set_expected_epoch(99);
  Expect("epoch_mismatch", StatusCode::FAILED_PRECONDITION, do_truncate);
  fork.set_expected_epoch(99);
  const auto stale = Expect("epoch_mismatch", StatusCode::FAILED_PRECONDITION, do_fork);
  EXPECT_EQ(stale.last_good_position(), 3u);
  fork.set_sequence_id(1);
  Expect("sequence_not_found", StatusCode::NOT_FOUND, do_fork);
  grpc::ClientContext second;
  ASSERT_TRUE(Open(&second, "m", "once").ok());
  Expect("request_id_reused", StatusCode::ALREADY_EXISTS, [&](auto* context) {
    v1::OpenRequest request;
    request.set_model_id("m");
    request.set_request_id("once");
    request.set_client_id("another");
    v1::OpenReply reply;
    return sequences_->Open(context, request, &reply);
  });
  const auto full = Expect("sequences_exhausted", StatusCode::RESOURCE_EXHAUSTED,
                           [&](auto* context) { return Open(context, "m"); });
  EXPECT_GT(full.retry_after_ms(), 0u);
  fork.set_sequence_id(a.sequence.id());
  fork.set_expected_epoch(a.sequence.epoch());
  Expect("sequences_exhausted", StatusCode::RESOURCE_EXHAUSTED, do_fork);
  Expect("missing", StatusCode::INVALID_ARGUMENT, [&](auto* context) {
    v1::RenewLeaseReply reply;
    return sequences_->RenewLease(context, {}, &reply);
  });
}

TEST_F(RefusalsTest, OfModels) {
  Track a = *worker_.Open();
  using grpc::StatusCode;
  v1::UnregisterRequest unregister;
  const auto do_unregister = [&](grpc::ClientContext* context) {
    v1::UnregisterReply reply;
    return models_->Unregister(context, unregister, &reply);
  };
  unregister.set_model_id("m");
  EXPECT_EQ(Expect("model_in_use", StatusCode::FAILED_PRECONDITION, do_unregister).field(),
            "model_id");
  unregister.set_model_id("absent");
  Expect("model_not_found", StatusCode::NOT_FOUND, do_unregister);
  v1::RegisterRequest request;
  *request.mutable_model() = client_->ListModels()->models(0).model();
  const auto do_register = [&](grpc::ClientContext* context) {
    v1::RegisterReply reply;
    return models_->Register(context, request, &reply);
  };
  request.mutable_model()->set_softmax_scale(7);
  Expect("model_exists", StatusCode::ALREADY_EXISTS, do_register);
  request.mutable_model()->set_model_id("second");
  request.mutable_model()->set_layers(1000);
  Expect("out_of_range", StatusCode::INVALID_ARGUMENT, do_register);
  request.mutable_model()->set_layers(8);
  request.mutable_model()->set_page_size(4096);
  request.mutable_model()->mutable_geometry()->set_kv_lora_rank(120);
  request.mutable_model()->mutable_geometry()->set_rope_dim(8);
  Expect("page_group_too_large", StatusCode::RESOURCE_EXHAUSTED, do_register);
}

// One message of an upload after the header.
TEST_F(RefusalsTest, OfUploads) {
  using grpc::StatusCode;
  const auto upload = [&](std::vector<v1::UploadWeightsRequest> parts) {
    return [this, parts = std::move(parts)](grpc::ClientContext* context) {
      v1::UploadWeightsReply reply;
      const auto writer = models_->UploadWeights(context, &reply);
      for (const auto& part : parts) writer->Write(part);
      writer->WritesDone();
      return writer->Finish();
    };
  };
  v1::UploadWeightsRequest header, foreign, trailer, chunk;
  header.mutable_header()->set_model_id("m");
  foreign.mutable_header()->set_model_id("absent");
  trailer.mutable_trailer()->set_sha256(std::string(32, 'x'));
  chunk.mutable_chunk()->set_layer(99);
  Expect("missing", StatusCode::INVALID_ARGUMENT, upload({}));
  Expect("model_not_found", StatusCode::NOT_FOUND, upload({foreign}));
  Expect("missing", StatusCode::INVALID_ARGUMENT, upload({header}));
  Expect("order", StatusCode::INVALID_ARGUMENT, upload({header, header}));
  Expect("out_of_range", StatusCode::INVALID_ARGUMENT, upload({header, chunk}));
  const auto digest = Expect("digest_mismatch", StatusCode::DATA_LOSS, upload({header, trailer}));
  EXPECT_EQ(digest.got().size(), 64u);
  grpc::ClientContext first;
  v1::UploadWeightsReply reply;
  const auto under_way = models_->UploadWeights(&first, &reply);
  ASSERT_TRUE(under_way->Write(header));
  // The server may not have seen the first one yet.
  for (int i = 0; i < 200; ++i) {
    grpc::ClientContext probe;
    if (upload({header})(&probe).error_code() == StatusCode::ABORTED) break;
  }
  Expect("upload_under_way", StatusCode::ABORTED, upload({header}));
  first.TryCancel();
  under_way->Finish();
}

TEST_F(RefusalsTest, OfAdmin) {
  using grpc::StatusCode;
  Expect("not_an_operator", StatusCode::PERMISSION_DENIED, [&](auto* context) {
    v1::DrainReply reply;
    return admin_->Drain(context, {}, &reply);
  });
  grpc::ClientContext first;
  const auto watch = admin_->WatchStatus(&first, {});
  v1::StatusUpdate update;
  ASSERT_TRUE(watch->Read(&update));
  Expect("too_many_watchers", StatusCode::RESOURCE_EXHAUSTED, [&](auto* context) {
    const auto another = admin_->WatchStatus(context, {});
    return another->Finish();
  });
  first.TryCancel();
  watch->Finish();
}

}  // namespace
}  // namespace mla::integration
