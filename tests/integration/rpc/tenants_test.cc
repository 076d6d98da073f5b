// One tenant takes as much as it can of a running server, and another tenant still works: each
// resource in turn, over the wire.
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/cpp/streams/errors.h"
#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/attention.grpc.pb.h"
#include "mla/v1/model.grpc.pb.h"
#include "mla/v1/sequence.grpc.pb.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

constexpr char kModel[] = "m";

// Stubs whose calls act for one tenant.
class Caller final {
 public:
  Caller(const TestServer& server, std::string tenant)
      : tenant_(std::move(tenant)),
        channel_(grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials())),
        models(v1::Models::NewStub(channel_)),
        sequences(v1::Sequences::NewStub(channel_)),
        attention(v1::Attention::NewStub(channel_)),
        admin(v1::Admin::NewStub(channel_)) {}

  std::unique_ptr<grpc::ClientContext> Context() const {
    auto context = std::make_unique<grpc::ClientContext>();
    context->AddMetadata("mla-tenant", tenant_);
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return context;
  }

  grpc::Status Register(const std::string& model_id = kModel, v1::ErrorDetail* detail = nullptr,
                        uint32_t lease_ms = 0) {
    v1::RegisterRequest request;
    v1::ModelSpec* model = request.mutable_model();
    model->set_model_id(model_id);
    v1::Geometry* geometry = model->mutable_geometry();
    geometry->set_num_heads(kHeads);
    geometry->set_kv_lora_rank(32);
    geometry->set_rope_dim(8);
    model->set_layers(1);
    model->set_softmax_scale(0.5);
    model->set_rope_owner(v1::ROPE_OWNER_WORKER);
    request.set_lease_ms(lease_ms);
    v1::RegisterReply reply;
    const auto context = Context();
    const grpc::Status status = models->Register(context.get(), request, &reply);
    Detail(*context, detail);
    return status;
  }

  grpc::Status Unregister(const std::string& model_id = kModel) {
    v1::UnregisterRequest request;
    request.set_model_id(model_id);
    v1::UnregisterReply reply;
    return models->Unregister(Context().get(), request, &reply);
  }

  // Returns 0 if it is refused.
  uint64_t Open(grpc::Status* status = nullptr, v1::ErrorDetail* detail = nullptr) {
    v1::OpenRequest request;
    request.set_model_id(kModel);
    request.set_lease_ms(60000);
    v1::OpenReply reply;
    const auto context = Context();
    const grpc::Status answer = sequences->Open(context.get(), request, &reply);
    if (status != nullptr) *status = answer;
    Detail(*context, detail);
    return answer.ok() ? reply.sequence().sequence_id() : 0;
  }

  static void Detail(const grpc::ClientContext& context, v1::ErrorDetail* detail) {
    const auto& trailer = context.GetServerTrailingMetadata();
    const auto found = trailer.find("mla-error-detail-bin");
    if (detail == nullptr || found == trailer.end()) return;
    ASSERT_TRUE(detail->ParseFromArray(found->second.data(), int(found->second.size())));
  }

  static constexpr uint32_t kHeads = 16;

 private:
  const std::string tenant_;
  const std::shared_ptr<grpc::Channel> channel_;

 public:
  const std::unique_ptr<v1::Models::Stub> models;
  const std::unique_ptr<v1::Sequences::Stub> sequences;
  const std::unique_ptr<v1::Attention::Stub> attention;
  const std::unique_ptr<v1::Admin::Stub> admin;
};

using Attend = grpc::ClientReaderWriter<v1::AttendStreamRequest, v1::AttendStreamReply>;

// An Attend stream whose messages a test writes by hand.
class Stream final {
 public:
  explicit Stream(const Caller& caller)
      : context_(caller.Context()), stream_(caller.attention->Attend(context_.get())) {}
  ~Stream() {
    context_->TryCancel();
    stream_->Finish();
  }

  void Cancel() { context_->TryCancel(); }
  bool Write(const v1::AttendStreamRequest& request) { return stream_->Write(request); }
  v1::AttendStreamReply Read() {
    v1::AttendStreamReply reply;
    EXPECT_TRUE(stream_->Read(&reply));
    return reply;
  }

  v1::AttendStreamReply Begin(uint64_t step, uint64_t sequence, uint32_t rows,
                              uint32_t lease_ms = 0) {
    v1::AttendStreamRequest request;
    request.set_tag(step);
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(step);
    begin->set_model_id(kModel);
    begin->set_lease_ms(lease_ms);
    v1::StepSequence* entry = begin->add_sequences();
    entry->set_sequence_id(sequence);
    entry->set_epoch(1);
    entry->set_rows(rows);
    EXPECT_TRUE(Write(request));
    return Read();
  }

  static v1::AttendStreamRequest Rows(uint64_t step, uint32_t row, uint32_t rows, bool has_kv) {
    v1::AttendStreamRequest request;
    request.set_tag(1000 + row);
    v1::Attend* attend = request.mutable_attend();
    attend->set_step_id(step);
    attend->set_row_begin(row);
    attend->set_row_count(rows);
    attend->set_num_heads(Caller::kHeads);
    attend->set_profile(v1::PROFILE_ABSORBED);
    attend->set_has_kv(has_kv);
    attend->set_q_dtype(v1::DTYPE_BF16);
    attend->set_o_dtype(v1::DTYPE_F32);
    const size_t elements = size_t{rows} * 40 * (Caller::kHeads + (has_kv ? 1 : 0));
    request.set_payload(std::string(2 * elements, '\0'));
    return request;
  }

 private:
  const std::unique_ptr<grpc::ClientContext> context_;
  const std::unique_ptr<Attend> stream_;
};

void ExpectTenantBound(const v1::ErrorDetail& detail, const char* reason, const char* resource) {
  EXPECT_EQ(detail.reason(), reason);
  EXPECT_EQ(detail.resource(), resource);
  EXPECT_EQ(detail.bound_of(), "tenant");
  EXPECT_GT(detail.bound(), 0u);
  EXPECT_GE(detail.wanted(), 1u);
  EXPECT_LT(detail.free(), detail.wanted());
  EXPECT_GT(detail.retry_after_ms(), 0u);
}

// Runs a step as any worker whose requests are staged; rings have memory of their own.
void ExpectStepsWork(const TestServer& server, const std::string& tenant, uint32_t rows = 2) {
  client::ClientOptions options;
  options.tenant = tenant;
  options.transport = client::ClientOptions::Transport::kInline;
  options.request_timeout_ms = 15000;
  const auto client = server.Connect(options);
  Worker worker(client.get(), {}, "own-model", 3);
  auto track = worker.Open();
  ASSERT_TRUE(track.ok()) << track.status();
  EXPECT_EQ(worker.Step({&*track}, {rows}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(TenantsTest, SequencesOfOneTenantLeaveRoomForOthers) {
  const TestServer server([](server::Config& config) { config.limits.max_sequences = 32; });
  Caller a(server, "a"), b(server, "b");
  ASSERT_TRUE(a.Register().ok());
  grpc::Status status;
  v1::ErrorDetail detail;
  int opened = 0;
  while (opened < 100 && a.Open(&status, &detail) != 0) ++opened;
  EXPECT_EQ(opened, 28);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  ExpectTenantBound(detail, "sequences_exhausted", "sequences");
  ASSERT_TRUE(b.Register().ok());
  EXPECT_NE(b.Open(), 0u);
}

TEST(TenantsTest, ModelsOfOneTenantLeaveRoomForOthers) {
  const TestServer server([](server::Config& config) { config.limits.max_models = 8; });
  Caller a(server, "a"), b(server, "b");
  v1::ErrorDetail detail;
  int registered = 0;
  while (registered < 100 && a.Register("m" + std::to_string(registered), &detail).ok()) {
    ++registered;
  }
  EXPECT_EQ(registered, 7);
  ExpectTenantBound(detail, "models_exhausted", "models");
  EXPECT_TRUE(b.Register().ok());
}

TEST(TenantsTest, PagesOfOneTenantLeaveRoomForOthers) {
  const TestServer server([](server::Config& config) {
    config.limits.kv_cache_bytes = 1 << 20;
    config.limits.max_step_rows = 4096;
  });
  Caller a(server, "a");
  ASSERT_TRUE(a.Register().ok());
  Stream stream(a);
  uint64_t step = 1;
  v1::AttendStreamReply reply;
  do {
    reply = stream.Begin(step, a.Open(), 1024);
  } while (!reply.has_error() && ++step < 50);
  ASSERT_TRUE(reply.has_error());
  EXPECT_EQ(reply.error().detail().reason(), "pages_exhausted");
  EXPECT_EQ(reply.error().detail().bound_of(), "tenant");
  ExpectStepsWork(server, "b");
}

TEST(TenantsTest, OpenStepsOfOneTenantLeaveRoomForOthers) {
  const TestServer server([](server::Config& config) { config.limits.max_open_steps = 8; });
  Caller a(server, "a");
  ASSERT_TRUE(a.Register().ok());
  Stream stream(a);
  v1::AttendStreamReply reply = stream.Begin(1, a.Open(), 1, 3600000);
  EXPECT_EQ(reply.error().detail().field(), "begin_step.lease_ms") << "an hour's lease is refused";
  uint64_t step = 1;
  do {
    reply = stream.Begin(step, a.Open(), 1, 60000);
  } while (!reply.has_error() && ++step < 50);
  EXPECT_EQ(step, 5u);
  ExpectTenantBound(reply.error().detail(), "steps_exhausted", "open_steps");
  ExpectStepsWork(server, "b");
}

TEST(TenantsTest, QueuedRequestsOfOneTenantLeaveRoomForOthers) {
  const TestServer server([](server::Config& config) {
    config.limits.queue_requests = 64;
    config.limits.kv_wait_ms = config.limits.queue_ms = 30000;
  });
  Caller a(server, "a");
  ASSERT_TRUE(a.Register().ok());
  Stream stream(a);
  ASSERT_FALSE(stream.Begin(1, a.Open(), 1000).has_error());
  // Queries whose KV rows have not arrived wait for them.
  for (uint32_t row = 1; row <= 80; ++row)
    ASSERT_TRUE(stream.Write(Stream::Rows(1, row, 1, false)));
  const v1::AttendStreamReply refused = stream.Read();
  ExpectTenantBound(refused.error().detail(), "queue_full", "queued_requests");
  ExpectStepsWork(server, "b");
}

// Replies that no client reads keep their staging memory. Another tenant's requests must not wait
// for wire.slow_reader_ms.
TEST(TenantsTest, SlowReadersOfOneTenantLeaveStagingForOthers) {
  const TestServer server([](server::Config& config) {
    config.wire.staging_bytes = int64_t{16} << 20;
    config.wire.inflight_bytes = int64_t{8} << 20;
    config.wire.slow_reader_ms = 600000;
    config.limits.max_step_rows = 2048;
  });
  Caller a(server, "a");
  ASSERT_TRUE(a.Register().ok());
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::thread> writers;
  for (int i = 0; i < 3; ++i) {
    streams.push_back(std::make_unique<Stream>(a));
    ASSERT_FALSE(streams.back()->Begin(1 + i, a.Open(), 300).has_error());
    // Each reply is 614 KiB. Writing blocks once the server has stopped reading.
    writers.emplace_back([stream = streams.back().get(), i] {
      for (int k = 0; k < 20; ++k) {
        if (!stream->Write(Stream::Rows(1 + i, 0, 300, true))) break;
      }
    });
  }
  const auto staged = [&] {
    v1::GetQuotaRequest request;
    request.set_tenant("a");
    v1::GetQuotaReply reply;
    EXPECT_TRUE(a.admin->GetQuota(a.Context().get(), request, &reply).ok());
    return reply.tenants(0).resources(v1::QUOTA_RESOURCE_STAGED_BYTES - 1);
  };
  // Waits until the tenant has its full share and is refused more.
  while (staged().refused() < 10) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_LE(staged().used(), uint64_t{8} << 20);
  const std::string metrics = HttpGet(server.server().ops_port(), "/metrics");
  EXPECT_NE(metrics.find("\nmla_staging_used_bytes "), std::string::npos);
  EXPECT_NE(metrics.find("mla_tenant_used{resource=\"staged_bytes\",tenant=\"a\"} "),
            std::string::npos);
  ExpectStepsWork(server, "b", 1500);  // small requests fit between those that are held
  for (const auto& stream : streams) stream->Cancel();
  for (std::thread& writer : writers) writer.join();
}

// Tenant names without resources do not keep new tenants out.
TEST(TenantsTest, InventedNamesDoNotLockOutNewTenants) {
  const TestServer server([](server::Config& config) { config.limits.max_tenants = 16; });
  for (int i = 0; i < 64; ++i) {
    Caller invented(server, "invented-" + std::to_string(i));
    const grpc::Status status = invented.Register();
    ASSERT_TRUE(status.ok()) << i << ": " << status.error_message();
    ASSERT_TRUE(invented.Unregister().ok());
  }
  ExpectStepsWork(server, "b");
}

// Uploads that send nothing hold a control thread each.
TEST(TenantsTest, IdleUploadsLeaveLeasesAndAdministrationToOthers) {
  const TestServer server([](server::Config& config) {
    config.wire.control_threads = 16;
    config.wire.max_watchers = 2;
  });
  Caller b(server, "b");
  ASSERT_TRUE(b.Register().ok());
  const uint64_t sequence = b.Open();
  std::vector<std::unique_ptr<Caller>> tenants;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<v1::UploadWeightsReply> replies(71);
  std::vector<std::unique_ptr<grpc::ClientWriter<v1::UploadWeightsRequest>>> uploads;
  for (size_t i = 0; i < replies.size(); ++i) {
    if (i % 24 == 0) {
      tenants.push_back(std::make_unique<Caller>(server, "flood-" + std::to_string(i)));
    }
    contexts.push_back(tenants.back()->Context());
    uploads.push_back(tenants.back()->models->UploadWeights(contexts.back().get(), &replies[i]));
  }
  // As many as possible are in progress.
  v1::GetQuotaRequest all_tenants;
  all_tenants.set_all(true);
  for (uint64_t held = 0, bound = 1; held < bound;) {
    v1::GetQuotaReply quota;
    ASSERT_TRUE(b.admin->GetQuota(b.Context().get(), all_tenants, &quota).ok());
    held = quota.server(v1::QUOTA_RESOURCE_UPLOADS - 1).used();
    bound = quota.server(v1::QUOTA_RESOURCE_UPLOADS - 1).bound();
  }
  for (int i = 0; i < 20; ++i) {
    v1::RenewLeaseRequest renew;
    renew.add_sequence_ids(sequence);
    v1::RenewLeaseReply renewed;
    const grpc::Status status = b.sequences->RenewLease(b.Context().get(), renew, &renewed);
    EXPECT_TRUE(status.ok()) << status.error_message();
    v1::GetReply got;
    EXPECT_TRUE(b.sequences->Get(b.Context().get(), {}, &got).ok());
    v1::GetServerInfoReply info;
    EXPECT_TRUE(b.admin->GetServerInfo(b.Context().get(), {}, &info).ok());
  }
  EXPECT_NE(b.Open(), 0u) << "ordinary calls of others get through as well";
  EXPECT_EQ(HttpGet(server.server().ops_port(), "/readyz").substr(0, 3), "200");
  for (const auto& context : contexts) context->TryCancel();
  for (const auto& upload : uploads) upload->Finish();
}

TEST(TenantsTest, AnIdleUploadIsCancelled) {
  const TestServer server([](server::Config& config) { config.wire.upload_idle_ms = 100; });
  Caller a(server, "a");
  ASSERT_TRUE(a.Register().ok());
  for (const bool with_header : {false, true}) {
    const auto context = a.Context();
    v1::UploadWeightsReply reply;
    const auto upload = a.models->UploadWeights(context.get(), &reply);
    if (with_header) {
      v1::UploadWeightsRequest header;
      header.mutable_header()->set_model_id(kModel);
      ASSERT_TRUE(upload->Write(header));
    }
    EXPECT_EQ(upload->Finish().error_code(), grpc::CANCELLED);
  }
}

TEST(TenantsTest, QuotasAreSetAtRunTime) {
  const TestServer server;
  Caller operator_(server, "operator"), a(server, "a");
  ASSERT_TRUE(a.Register().ok());
  v1::SetQuotaRequest request;
  request.set_tenant("a");
  v1::QuotaBound* bound = request.add_bounds();
  bound->set_resource(v1::QUOTA_RESOURCE_SEQUENCES);
  bound->set_bound(2);
  request.set_weight(5);
  v1::SetQuotaReply reply;
  ASSERT_TRUE(operator_.admin->SetQuota(operator_.Context().get(), request, &reply).ok());
  EXPECT_EQ(reply.quota().weight(), 5u);
  EXPECT_EQ(reply.quota().resources(2).bound(), 2u);
  EXPECT_EQ(reply.quota().resources(2).source(), v1::QUOTA_SOURCE_RUNTIME);
  EXPECT_NE(a.Open(), 0u);
  const uint64_t second = a.Open();
  EXPECT_NE(second, 0u);
  // A bound below the current use: both stay.
  bound->set_bound(1);
  ASSERT_TRUE(operator_.admin->SetQuota(operator_.Context().get(), request, &reply).ok());
  EXPECT_EQ(reply.quota().resources(2).used(), 2u);
  v1::ErrorDetail detail;
  grpc::Status status;
  EXPECT_EQ(a.Open(&status, &detail), 0u);
  ExpectTenantBound(detail, "sequences_exhausted", "sequences");
  v1::SetQuotaRequest reset;
  reset.set_tenant("a");
  reset.set_reset(true);
  ASSERT_TRUE(operator_.admin->SetQuota(operator_.Context().get(), reset, &reply).ok());
  EXPECT_EQ(reply.quota().resources(2).source(), v1::QUOTA_SOURCE_DEFAULT);
  EXPECT_NE(a.Open(), 0u);
  const std::string metrics = HttpGet(server.server().ops_port(), "/metrics");
  EXPECT_NE(metrics.find("mla_tenant_used{resource=\"sequences\",tenant=\"a\"} 3"),
            std::string::npos);
  EXPECT_NE(metrics.find("mla_bound_refusals_total{bound_of=\"tenant\",resource=\"sequences\"} 1"),
            std::string::npos);
}

TEST(TenantsTest, OperatorsEvictWhatAnotherTenantHolds) {
  const TestServer server;
  const auto client = server.Connect();
  Caller a(server, "a");
  ASSERT_TRUE(a.Register().ok());
  const uint64_t first = a.Open();
  ASSERT_NE(a.Open(), 0u);
  v1::EvictSequencesRequest request;
  request.set_tenant("a");
  EXPECT_TRUE(absl::IsInvalidArgument(client->EvictSequences(request).status()))
      << "everything goes only when that is said";
  request.add_sequence_ids(first);
  request.add_sequence_ids(7);
  const auto evicted = client->EvictSequences(request);
  ASSERT_TRUE(evicted.ok()) << evicted.status();
  EXPECT_EQ(evicted->evicted(), 1u);
  EXPECT_EQ(evicted->not_found_size(), 1);
  const auto model = client->EvictModel("a", kModel);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->evicted_sequences(), 1u);
  EXPECT_TRUE(absl::IsNotFound(client->EvictModel("a", kModel).status()));
}

TEST(TenantsTest, ADrainIsUndone) {
  const TestServer server;
  const auto client = server.Connect();
  EXPECT_TRUE(absl::IsFailedPrecondition(client->CancelDrain().status()));
  ASSERT_TRUE(client->Drain(100, false)->drained());
  EXPECT_FALSE(*client->IsServing());
  ASSERT_TRUE(client->CancelDrain().ok());
  EXPECT_TRUE(*client->IsServing());
  ExpectStepsWork(server, "b");
  // A call that waits for a step: its caller learns that it was cancelled.
  Caller a(server, "a");
  ASSERT_TRUE(a.Register().ok());
  Stream stream(a);
  ASSERT_FALSE(stream.Begin(1, a.Open(), 1).has_error());
  absl::StatusOr<v1::DrainReply> waited = absl::UnknownError("");
  std::thread drain([&] { waited = client->Drain(60000, true); });
  while (!client->CancelDrain().ok()) std::this_thread::yield();
  drain.join();
  ASSERT_TRUE(waited.ok()) << waited.status();
  EXPECT_TRUE(waited->cancelled());
  EXPECT_FALSE(waited->drained());
  EXPECT_FALSE(server.exit_requested());
  EXPECT_TRUE(*client->IsServing());
}

TEST(TenantsTest, AModelWithALeaseGoesWithItsClient) {
  const TestServer server;
  Caller a(server, "a");
  ASSERT_TRUE(a.Register("gone", nullptr, 100).ok());
  ASSERT_TRUE(a.Register("stays").ok());
  v1::ListModelsReply reply;
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    reply.Clear();
    ASSERT_TRUE(a.models->List(a.Context().get(), {}, &reply).ok());
  } while (reply.models_size() != 1);
  EXPECT_EQ(reply.models(0).model().model_id(), "stays");
}

}  // namespace
}  // namespace mla::integration
