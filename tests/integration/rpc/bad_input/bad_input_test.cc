// Hostile values in every field of every request. Each is refused under the field's own path or
// accepted, as its rule says. The server never crashes and goes on serving good steps.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>

#include "absl/strings/strip.h"
#include "client/cpp/shared_memory/shared_memory.h"
#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/attention.grpc.pb.h"
#include "mla/v1/cache.grpc.pb.h"
#include "mla/v1/model.grpc.pb.h"
#include "mla/v1/sequence.grpc.pb.h"
#include "tests/integration/rpc/bad_input/field_rules.h"
#include "tests/integration/test_server.h"
#include "tests/integration/window_worker.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using google::protobuf::Message;

class BadInputTest : public ::testing::Test {
 protected:
  BadInputTest()
      : server_([this](server::Config& config) {
          config.limits.step_lease_ms = 60000;
          config.limits.kv_wait_ms = 1;
          config.wire.max_watchers = 40;  // the server notices with a delay that a watcher has gone
          config.checkpoint.path = folder_.File("checkpoints");
        }),
        client_(server_.Connect()),
        worker_(client_.get(), {}, "m", 1),
        channel_(grpc::CreateChannel(server_.unix_target(), grpc::InsecureChannelCredentials())),
        sequences_(v1::Sequences::NewStub(channel_)),
        models_(v1::Models::NewStub(channel_)) {}

  // Checks a reply against the rule of the changed field. INTERNAL, UNKNOWN and UNAVAILABLE mean
  // that something broke, whatever the value.
  static void Check(const Mutation& mutation, int code, const std::string& message,
                    const v1::ErrorDetail& detail) {
    const std::string what = mutation.ToString() + ": " + message;
    for (const grpc::StatusCode broken : {grpc::INTERNAL, grpc::UNKNOWN, grpc::UNAVAILABLE}) {
      EXPECT_NE(code, broken) << what;
    }
    const auto found = FieldRules().find(mutation.field);
    ASSERT_NE(found, FieldRules().end()) << mutation.field << " has no rule in field_rules.cc";
    const FieldRule& rule = found->second;
    const bool inside = mutation.value >= rule.low && mutation.value <= rule.high;
    if (code != grpc::INVALID_ARGUMENT) {
      EXPECT_TRUE(inside) << what << ": code " << code;
      return;
    }
    EXPECT_FALSE(inside && rule.coupled.empty()) << what;
    // Models are named in requests of several kinds.
    const std::string field(absl::StripPrefix(detail.field(), "part.header."));
    EXPECT_TRUE(rule.coupled.contains(field) || (!inside && field == rule.path))
        << what << ": refused as " << detail.field();
    EXPECT_FALSE(detail.field().empty()) << what;
    EXPECT_FALSE(detail.limit().empty()) << what;
    EXPECT_FALSE(detail.got().empty()) << what;
  }

  void CheckAlive(const std::string& what) {
    auto track = worker_.Open();
    ASSERT_TRUE(track.ok()) << what << ": " << track.status();
    const absl::Status status = worker_.Step({&*track}, {2}, v1::PROFILE_ABSORBED);
    EXPECT_EQ(status, absl::OkStatus()) << "after " << what;
  }

  // `call(context, request)` with one field of `request` changed at a time.
  template <typename Request, typename Call>
  void TryUnary(Request request, Call call) {
    ForEachMutation(&request, &seen_, [&](const Mutation& mutation) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
      const grpc::Status status = call(&context, static_cast<const Request&>(*mutation.request));
      v1::ErrorDetail detail;
      const auto& trailer = context.GetServerTrailingMetadata();
      if (const auto found = trailer.find("mla-error-detail-bin"); found != trailer.end()) {
        EXPECT_TRUE(detail.ParseFromArray(found->second.data(), int(found->second.size())));
      }
      Check(mutation, status.error_code(), status.error_message(), detail);
      if (++cases_ % 16 == 0) CheckAlive(mutation.ToString());
    });
  }

  void TrySequences();
  void TryTailsAndLeases(const client::Sequence& sequence);
  void TryModels();
  void TryUpload();
  void TryPages();
  void TryEvents();
  void TryCheckpoints();
  void TryAdmin();
  void TryStream();

  const TempFolder folder_;
  TestServer server_;
  std::unique_ptr<client::Client> client_;
  Worker worker_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Sequences::Stub> sequences_;
  std::unique_ptr<v1::Models::Stub> models_;
  std::set<std::string> seen_;
  int cases_ = 0;
};

void BadInputTest::TrySequences() {
  const auto release = [this](const grpc::Status& status, const v1::SequenceInfo& opened) {
    if (status.ok()) client_->ReleaseSequences({opened.sequence_id()}).IgnoreError();
    return status;
  };
  v1::OpenRequest open;
  open.set_model_id("m");
  open.set_client_id("bad");
  open.set_lease_ms(100);
  open.mutable_prefix()->add_token_ids(1);
  TryUnary(open, [&](auto* context, const auto& request) {
    v1::OpenReply reply;
    return release(sequences_->Open(context, request, &reply), reply.sequence());
  });
  // A new sequence each time, because a successful call changes its epoch.
  Track track = *worker_.Open();
  v1::ForkRequest fork;
  fork.set_sequence_id(track.sequence.id());
  fork.set_expected_epoch(track.sequence.epoch());
  TryUnary(fork, [&](auto* context, const auto& request) {
    v1::ForkReply reply;
    return release(sequences_->Fork(context, request, &reply), reply.sequence());
  });
  v1::MatchRequest match;
  match.set_sequence_id(track.sequence.id());
  match.set_expected_epoch(track.sequence.epoch());
  match.mutable_prefix()->add_page_keys(std::string(32, 'k'));
  TryUnary(match, [&](auto* context, v1::MatchRequest request) {
    const Track fresh = *worker_.Open();
    if (request.sequence_id() == track.sequence.id()) request.set_sequence_id(fresh.sequence.id());
    v1::MatchReply reply;
    return sequences_->Match(context, request, &reply);
  });
  v1::ProbeRequest probe;
  probe.set_model_id("m");
  probe.mutable_prefix()->add_token_ids(1);
  TryUnary(probe, [&](auto* context, const auto& request) {
    v1::ProbeReply reply;
    return sequences_->Probe(context, request, &reply);
  });
  v1::TruncateRequest truncate;
  truncate.set_sequence_id(track.sequence.id());
  truncate.set_expected_epoch(track.sequence.epoch());
  TryUnary(truncate, [&](auto* context, v1::TruncateRequest request) {
    const Track fresh = *worker_.Open();
    if (request.sequence_id() == track.sequence.id()) request.set_sequence_id(fresh.sequence.id());
    v1::TruncateReply reply;
    return sequences_->Truncate(context, request, &reply);
  });
  TryTailsAndLeases(track.sequence);
}

void BadInputTest::TryTailsAndLeases(const client::Sequence& sequence) {
  v1::ReadTailRequest tail;
  tail.set_sequence_id(sequence.id());
  tail.set_expected_epoch(sequence.epoch());
  TryUnary(tail, [&](auto* context, const auto& request) {
    v1::ReadTailReply reply;
    return sequences_->ReadTail(context, request, &reply);
  });
  v1::RenewLeaseRequest renew;
  renew.add_sequence_ids(sequence.id());
  TryUnary(renew, [&](auto* context, const auto& request) {
    v1::RenewLeaseReply reply;
    return sequences_->RenewLease(context, request, &reply);
  });
  v1::ReleaseRequest gone;
  gone.add_sequence_ids(5);
  TryUnary(gone, [&](auto* context, const auto& request) {
    v1::ReleaseReply reply;
    return sequences_->Release(context, request, &reply);
  });
  v1::GetRequest get, all;
  get.add_sequence_ids(5);
  all.set_all_tenants(true);
  for (const v1::GetRequest& one : {get, all}) {
    TryUnary(one, [&](auto* context, const auto& request) {
      v1::GetReply reply;
      return sequences_->Get(context, request, &reply);
    });
  }
}

void BadInputTest::TryModels() {
  v1::RegisterRequest reg;
  *reg.mutable_model() = SpecOf({}, "mutant");
  v1::RegisterRequest fp8 = reg;
  fp8.mutable_model()->clear_kv_dtype();
  fp8.mutable_model()->set_kv_format(v1::KV_FORMAT_FP8_TENSOR);
  for (uint32_t layer = 0; layer < fp8.model().layers(); ++layer) fp8.add_kv_scales(0.5f);
  for (const v1::RegisterRequest& request : {reg, fp8}) {
    TryUnary(request, [&](auto* context, const auto& mutant) {
      v1::RegisterReply reply;
      const grpc::Status status = models_->Register(context, mutant, &reply);
      if (status.ok()) client_->UnregisterModel(reply.model().model_id()).IgnoreError();
      return status;
    });
  }
  // Lists of numbers that only models with a window have; window_test and page_stream_test cover
  // them.
  seen_.insert({"mla.v1.ModelSpec.ratios", "mla.v1.RegisterRequest.sinks", "mla.v1.EndStep.tails",
                "mla.v1.PagesHeader.sinks"});
  // Parts of transfers to another tenant: tests of hand-overs cover them.
  seen_.insert({"mla.v1.UploadWeightsRequest.Header.kv_scales",
                "mla.v1.UploadWeightsRequest.Header.sinks",
                "mla.v1.UploadWeightsRequest.Trailer.xxh3"});
  ASSERT_TRUE(client_->RegisterModel(fp8.model()).ok());
  v1::UploadScalesRequest scales;
  scales.set_model_id(fp8.model().model_id());
  *scales.mutable_scales() = fp8.kv_scales();
  TryUnary(scales, [&](auto* context, const auto& request) {
    v1::UploadScalesReply reply;
    return models_->UploadScales(context, request, &reply);
  });
  v1::UploadSinksRequest sinks;
  ASSERT_TRUE(client_->RegisterModel(WindowWorker(1).Spec("window")).ok());
  sinks.set_model_id("window");
  sinks.set_layer_count(2);
  sinks.set_head_count(4);
  for (int i = 0; i < 8; ++i) sinks.add_sinks(0.5f);
  TryUnary(sinks, [&](auto* context, const auto& request) {
    v1::UploadSinksReply reply;
    return models_->UploadSinks(context, request, &reply);
  });
  v1::UnregisterRequest unregister;
  unregister.set_model_id("absent");
  TryUnary(unregister, [&](auto* context, const auto& request) {
    v1::UnregisterReply reply;
    return models_->Unregister(context, request, &reply);
  });
}

// The three parts of an upload. One of them is changed, the others are valid. The digest is wrong,
// so that no weights are ever accepted.
void BadInputTest::TryUpload() {
  v1::UploadWeightsRequest header, chunk, trailer;
  header.mutable_header()->set_model_id("m");
  chunk.mutable_chunk()->set_head_count(1);
  chunk.mutable_chunk()->set_payload(std::string(2048, '<'));  // 32 x (16 + 16) x 2
  trailer.mutable_trailer()->set_sha256(std::string(32, 'd'));
  const auto upload = [&](auto* context, const v1::UploadWeightsRequest& part) {
    v1::UploadWeightsReply reply;
    const auto writer = models_->UploadWeights(context, &reply);
    writer->Write(part.has_header() ? part : header);
    writer->Write(part.has_chunk() ? part : chunk);
    writer->Write(part.has_trailer() ? part : trailer);
    writer->WritesDone();
    return writer->Finish();
  };
  for (const v1::UploadWeightsRequest& part : {header, chunk, trailer}) TryUnary(part, upload);
}

// An export of two rows, and an import of its messages, one of which is changed.
void BadInputTest::TryPages() {
  Track track = *worker_.Open();
  ASSERT_TRUE(worker_.Step({&track}, {2}, v1::PROFILE_ABSORBED).ok());
  const auto cache = v1::Cache::NewStub(channel_);
  v1::ExportRequest rows;
  rows.set_sequence_id(track.sequence.id());
  rows.set_expected_epoch(track.sequence.epoch());
  rows.set_end_row(2);
  std::vector<v1::ImportRequest> messages(1);
  messages[0].mutable_target()->set_model_id("m");
  messages[0].mutable_target()->set_client_id("bad");
  const auto run = [&](auto* context, const v1::ExportRequest& request, bool keep) {
    const auto reader = cache->Export(context, request);
    v1::PagesPart part;
    while (reader->Read(&part)) {
      if (keep) *messages.emplace_back().mutable_part() = part;
    }
    return reader->Finish();
  };
  grpc::ClientContext first;
  ASSERT_TRUE(run(&first, rows, true).ok());
  ASSERT_EQ(messages.size(), 6u);  // target, header, group, chunk, its end, trailer
  messages[1].mutable_part()->mutable_header()->add_kv_scales(1);
  messages[1].mutable_part()->mutable_header()->mutable_model()->set_weights_digest(
      std::string(32, 'd'));
  TryUnary(rows, [&](auto* context, const auto& request) { return run(context, request, false); });
  for (size_t changed = 0; changed < messages.size(); ++changed) {
    TryUnary(messages[changed], [&](auto* context, const v1::ImportRequest& request) {
      v1::ImportReply reply;
      const auto writer = cache->Import(context, &reply);
      for (size_t i = 0; i < messages.size(); ++i) {
        v1::ImportRequest message = i == changed ? request : messages[i];
        if (i == 1 && i != changed) {  // unchanged
          message.mutable_part()->mutable_header()->clear_kv_scales();
          message.mutable_part()->mutable_header()->mutable_model()->clear_weights_digest();
        }
        if (!writer->Write(message)) break;
      }
      writer->WritesDone();
      const grpc::Status status = writer->Finish();
      if (status.ok()) {
        client_->ReleaseSequences({reply.sequence().sequence_id()}).IgnoreError();
      }
      return status;
    });
  }
}

void BadInputTest::TryEvents() {
  const auto cache = v1::Cache::NewStub(channel_);
  v1::WatchEventsRequest watch;
  watch.set_after(0);  // with any other number, not with all_tenants
  TryUnary(watch, [&](auto* context, const auto& request) {
    const auto events = cache->WatchEvents(context, request);
    v1::WatchEventsReply reply;
    EXPECT_TRUE(events->Read(&reply));
    context->TryCancel();
    events->Finish();
    return grpc::Status::OK;
  });
  TryUnary(v1::ExplainRequest(), [&](auto* context, const auto& request) {
    v1::ExplainReply reply;
    return cache->Explain(context, request, &reply);
  });
  v1::HintRequest hint;
  hint.set_kind(v1::HINT_KIND_PIN);
  hint.set_model_id("m");
  hint.mutable_prefix()->add_page_keys(std::string(32, 'k'));
  TryUnary(hint, [&](auto* context, const auto& request) {
    v1::HintReply reply;
    return cache->Hint(context, request, &reply);
  });
}

void BadInputTest::TryCheckpoints() {
  Track track = *worker_.Open();
  ASSERT_TRUE(worker_.Step({&track}, {2}, v1::PROFILE_ABSORBED).ok());
  const auto cache = v1::Cache::NewStub(channel_);
  v1::CheckpointRequest save;
  save.add_sequence_ids(track.sequence.id());
  TryUnary(save, [&](auto* context, const auto& request) {
    v1::CheckpointReply reply;
    return cache->Checkpoint(context, request, &reply);
  });
  ASSERT_TRUE(client_->Checkpoint({track.sequence.id()}).ok());
  v1::RestoreRequest restore;
  restore.add_sequence_ids(track.sequence.id());
  TryUnary(restore, [&](auto* context, const auto& request) {
    v1::RestoreReply reply;
    return cache->Restore(context, request, &reply);
  });
  v1::DropCheckpointsRequest drop;
  drop.add_sequence_ids(track.sequence.id());
  TryUnary(drop, [&](auto* context, const auto& request) {
    v1::DropCheckpointsReply reply;
    return cache->DropCheckpoints(context, request, &reply);
  });
}

void BadInputTest::TryAdmin() {
  // A server of its own, because it is drained.
  const TestServer server;
  const auto admin = v1::Admin::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  TryUnary(v1::WatchStatusRequest(), [&](auto* context, const auto& request) {
    const auto watch = admin->WatchStatus(context, request);
    v1::StatusUpdate update;
    EXPECT_TRUE(watch->Read(&update));
    context->TryCancel();
    watch->Finish();
    return grpc::Status::OK;
  });
  v1::GetQuotaRequest get_quota;
  get_quota.set_tenant("t");
  TryUnary(get_quota, [&](auto* context, const auto& request) {
    v1::GetQuotaReply reply;
    return admin->GetQuota(context, request, &reply);
  });
  v1::SetQuotaRequest set_quota;
  set_quota.set_tenant("t");
  set_quota.add_bounds()->set_resource(v1::QUOTA_RESOURCE_MODELS);
  TryUnary(set_quota, [&](auto* context, const auto& request) {
    v1::SetQuotaReply reply;
    return admin->SetQuota(context, request, &reply);
  });
  v1::EvictSequencesRequest evict;
  evict.set_tenant("t");
  evict.add_sequence_ids(1);
  TryUnary(evict, [&](auto* context, const auto& request) {
    v1::EvictSequencesReply reply;
    return admin->EvictSequences(context, request, &reply);
  });
  v1::EvictModelRequest evict_model;
  evict_model.set_tenant("t");
  evict_model.set_model_id("absent");
  TryUnary(evict_model, [&](auto* context, const auto& request) {
    v1::EvictModelReply reply;
    return admin->EvictModel(context, request, &reply);
  });
  v1::DrainRequest drain_to;
  drain_to.set_to("a:1");
  drain_to.add_also_to("b:1");
  for (const v1::DrainRequest& drain : {v1::DrainRequest(), drain_to}) {
    TryUnary(drain, [&](auto* context, const auto& request) {
      v1::DrainReply reply;
      return admin->Drain(context, request, &reply);
    });
  }
}

// Each change is sent on a stream of its own, on which step 9 of two rows is open.
void BadInputTest::TryStream() {
  const auto stub = v1::Attention::NewStub(channel_);
  Track track = *worker_.Open();
  client::SharedMemoryOptions options;
  options.ring = false;
  options.bytes = 1 << 16;
  const auto region = client::SharedMemory::Connect(server_.folder().File("mla.sock.shm"), options);
  ASSERT_TRUE(region.ok()) << region.status();
  v1::AttendStreamRequest begin, attend, shared, end, abort;
  begin.mutable_begin_step()->set_step_id(9);
  begin.mutable_begin_step()->set_model_id("m");
  v1::StepSequence* const sequence = begin.mutable_begin_step()->add_sequences();
  sequence->set_sequence_id(track.sequence.id());
  sequence->set_epoch(track.sequence.epoch());
  sequence->set_rows(2);
  v1::Attend* const body = attend.mutable_attend();
  body->set_step_id(9);
  body->set_row_count(2);
  body->set_num_heads(4);
  body->set_profile(v1::PROFILE_ABSORBED);
  body->set_has_kv(true);
  body->set_want_lse(true);
  shared = attend;
  attend.set_payload(std::string(800, '\1'));  // 2 rows of 40, then 2 x 4 of 40, bf16
  v1::SharedTensors* const place = shared.mutable_shared();
  place->set_handle(std::string((*region)->handle()));
  place->set_in_length(832);  // as above, with the queries at a multiple of 64
  place->set_out_offset(1024);
  place->set_out_length(544);
  end.mutable_end_step()->set_step_id(9);
  end.mutable_end_step()->add_committed_rows(1);
  abort.mutable_abort_step()->set_step_id(9);
  for (v1::AttendStreamRequest* request : {&begin, &attend, &shared, &end, &abort}) {
    const v1::AttendStreamRequest first = begin;
    ForEachMutation(request, &seen_, [&](const Mutation& mutation) {
      const auto& changed = static_cast<const v1::AttendStreamRequest&>(*mutation.request);
      const std::string what = mutation.ToString();
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
      const auto stream = stub->Attend(&context);
      v1::AttendStreamReply reply;
      if (!changed.has_begin_step()) {
        ASSERT_TRUE(stream->Write(first) && stream->Read(&reply)) << what;
        ASSERT_TRUE(reply.has_begin_step()) << what << reply.DebugString();
      }
      ASSERT_TRUE(stream->Write(changed) && stream->Read(&reply)) << what;
      EXPECT_EQ(reply.tag(), changed.tag()) << what;
      EXPECT_TRUE(!reply.has_error() || reply.error().code() != 0) << what;
      Check(mutation, reply.error().code(), reply.error().message(), reply.error().detail());
      stream->WritesDone();
      EXPECT_TRUE(stream->Finish().ok()) << what;
      if (++cases_ % 16 == 0) CheckAlive(what);
    });
  }
}

TEST_F(BadInputTest, EveryFieldOfEveryRequest) {
  TrySequences();
  TryModels();
  TryUpload();
  TryPages();
  TryEvents();
  TryCheckpoints();
  TryAdmin();
  TryStream();
  CheckAlive("all");
  EXPECT_GT(cases_, 500);
  // Fails if the contract has gained a field without a rule here.
  EXPECT_EQ(seen_, RequestFields());
  for (const auto& [field, rule] : FieldRules()) EXPECT_TRUE(seen_.contains(field)) << field;
}

}  // namespace
}  // namespace mla::integration
