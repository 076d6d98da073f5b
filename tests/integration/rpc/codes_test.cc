// Every status code that the contract can give, provoked over the wire.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "client/cpp/streams/errors.h"
#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/attention.grpc.pb.h"
#include "mla/v1/model.grpc.pb.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using absl::StatusCode;
using client::ClientOptions;
using client::DetailOf;

ClientOptions As(const std::string& tenant) {
  ClientOptions options;
  options.tenant = tenant;
  return options;
}

TEST(CodesTest, ForeignAndAbsentAreTheSame) {
  const TestServer server;
  const auto red = server.Connect(As("red"));
  const auto blue = server.Connect(As("blue"));
  Worker worker(red.get(), {}, "m", 1);
  Track track = *worker.Open();
  EXPECT_EQ(blue->OpenSequence("m").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(blue->UnregisterModel("m").code(), StatusCode::kNotFound);
  const auto seen = blue->GetSequences({track.sequence.id()}, false);
  ASSERT_TRUE(seen.ok());
  EXPECT_EQ(seen->not_found_size(), 1);
  EXPECT_EQ(seen->sequences_size(), 0);
  const auto released = blue->ReleaseSequences({track.sequence.id(), 12345});
  ASSERT_TRUE(released.ok());
  EXPECT_EQ(released->released(), 0u);
  EXPECT_EQ(released->not_found_size(), 2);
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());

  // The other tenant has a model of the same name, but the sequence stays foreign.
  Worker other(blue.get(), {}, "m", 2);
  const auto step = other.session().Begin("m", {{&track.sequence, 1}});
  EXPECT_EQ(step.status().code(), StatusCode::kNotFound) << step.status();
}

TEST(CodesTest, RegisterTwice) {
  const TestServer server;
  const auto client = server.Connect();
  const v1::ModelSpec spec = SpecOf({}, "m");
  EXPECT_TRUE(client->RegisterModel(spec).ok());
  EXPECT_TRUE(client->RegisterModel(spec).ok());
  v1::ModelSpec other = spec;
  other.set_layers(3);
  EXPECT_EQ(client->RegisterModel(other).status().code(), StatusCode::kAlreadyExists);
  const auto list = client->ListModels();
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->models_size(), 1);
  EXPECT_EQ(list->models(0).model().layers(), 2u);
}

TEST(CodesTest, RowsOfEightBitsAndTheirScales) {
  const TestServer server;
  const auto client = server.Connect();
  EXPECT_THAT(client->info().capabilities(), ::testing::Contains("fp8"));
  EXPECT_THAT(client->info().kv_formats(),
              ::testing::ElementsAre(v1::KV_FORMAT_BF16, v1::KV_FORMAT_FP8_TENSOR,
                                     v1::KV_FORMAT_FP8_ROW, v1::KV_FORMAT_FP8_PAGE));
  v1::ModelSpec spec = SpecOf({}, "bf16");
  const auto bf16 = client->RegisterModel(spec);
  ASSERT_TRUE(bf16.ok());
  EXPECT_EQ(bf16->model().kv_format(), v1::KV_FORMAT_BF16);
  EXPECT_TRUE(bf16->scales_complete());
  spec.set_model_id("fp8");
  spec.set_kv_format(v1::KV_FORMAT_FP8_TENSOR);
  const auto conflict = client->RegisterModel(spec);
  EXPECT_EQ(conflict.status().code(), StatusCode::kInvalidArgument) << "kv_dtype says bf16";
  EXPECT_EQ(DetailOf(conflict.status())->field(), "model.kv_format");
  spec.clear_kv_dtype();
  const auto fp8 = client->RegisterModel(spec);
  ASSERT_TRUE(fp8.ok()) << fp8.status();
  EXPECT_EQ(fp8->model().kv_format(), v1::KV_FORMAT_FP8_TENSOR);
  EXPECT_EQ(fp8->model().kv_dtype(), v1::DTYPE_UNSPECIFIED);
  EXPECT_FALSE(fp8->scales_complete());
  EXPECT_LT(fp8->page_group_bytes(), bf16->page_group_bytes());

  const std::vector<float> scales(spec.layers(), 0.25f);
  EXPECT_EQ(client->UploadScales("fp8", std::span(scales).first(1)).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(client->UploadScales("bf16", scales).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(client->UploadScales("absent", scales).code(), StatusCode::kNotFound);
  EXPECT_TRUE(client->UploadScales("fp8", scales).ok());
  const auto list = client->ListModels();
  ASSERT_TRUE(list.ok());
  for (const v1::ModelInfo& info : list->models()) EXPECT_TRUE(info.scales_complete());

  // A refused scale leaves no model.
  spec.set_model_id("refused");
  const auto refused = client->RegisterModel(spec, 0, std::vector<float>(spec.layers(), -1.0f));
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(refused.status())->field(), "kv_scales[0]");
  EXPECT_EQ(client->ListModels()->models_size(), 2);
}

TEST(CodesTest, ModelsInUseStay) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  {
    Track track = *worker.Open();
    EXPECT_EQ(client->UnregisterModel("m").code(), StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(client->UnregisterModel("m"), absl::OkStatus());
  EXPECT_EQ(client->UnregisterModel("m").code(), StatusCode::kNotFound);
}

TEST(CodesTest, OpenAndForkAreIdempotentByRequestId) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  auto first = client->OpenSequence("m", "same");
  auto again = client->OpenSequence("m", "same");
  ASSERT_TRUE(first.ok() && again.ok());
  EXPECT_EQ(first->id(), again->id());
  again->Detach();
  EXPECT_NE(client->OpenSequence("m", "different")->id(), first->id());
}

// Begins a step with the position that a client remembers, after another handle has changed the
// sequence.
v1::AttendStreamReply BeginRaw(const TestServer& server, uint64_t id, uint64_t epoch,
                               uint64_t position) {
  const auto stub = v1::Attention::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->Attend(&context);
  v1::AttendStreamRequest request;
  request.mutable_begin_step()->set_step_id(77);
  request.mutable_begin_step()->set_model_id("m");
  v1::StepSequence* sequence = request.mutable_begin_step()->add_sequences();
  sequence->set_sequence_id(id);
  sequence->set_epoch(epoch);
  sequence->set_start_position(position);
  sequence->set_rows(1);
  v1::AttendStreamReply reply;
  EXPECT_TRUE(stream->Write(request) && stream->Read(&reply));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  return reply;
}

TEST(CodesTest, StaleEpochAndPosition) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {4}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const uint64_t id = track.sequence.id(), old = track.sequence.epoch();
  ASSERT_EQ(track.sequence.Truncate(2), absl::OkStatus());
  const v1::AttendStreamReply epoch = BeginRaw(server, id, old, 2);
  EXPECT_EQ(epoch.error().code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(epoch.error().detail().reason(), "epoch_mismatch");
  EXPECT_EQ(epoch.error().detail().field(), "begin_step.sequences[0].epoch");
  EXPECT_EQ(epoch.error().detail().last_good_position(), 2u);
  for (const uint64_t position : {0, 1, 3, 4}) {
    const v1::AttendStreamReply stale = BeginRaw(server, id, old + 1, position);
    EXPECT_EQ(stale.error().code(), grpc::StatusCode::FAILED_PRECONDITION) << position;
    EXPECT_EQ(stale.error().detail().reason(), "position_mismatch") << position;
  }
  EXPECT_TRUE(BeginRaw(server, id, old + 1, 2).has_begin_step());
  auto begun = worker.session().Begin("m", {{&track.sequence, 1}});
  ASSERT_TRUE(begun.ok()) << begun.status();
  // During a step, Fork and Truncate are refused.
  EXPECT_EQ(track.sequence.Fork().status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(track.sequence.Truncate(1).code(), StatusCode::kFailedPrecondition);
  ASSERT_EQ((*begun)->Abort(), absl::OkStatus());
  EXPECT_EQ(track.sequence.Truncate(9).code(), StatusCode::kInvalidArgument);
}

TEST(CodesTest, UnsupportedShapesAreListed) {
  const TestServer server;
  const auto client = server.Connect();
  v1::ModelSpec spec = SpecOf({}, "m");
  spec.mutable_geometry()->set_num_heads(17);  // above limits.max_heads
  const auto refused = client->RegisterModel(spec);
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(refused.status())->field(), "model.geometry.num_heads");
  EXPECT_EQ(DetailOf(refused.status())->limit(), "1..16");
  EXPECT_EQ(DetailOf(refused.status())->got(), "17");
  EXPECT_FALSE(client->info().supported_shapes().empty());
}

TEST(CodesTest, PoolExhaustedNamesPagesAndRecovers) {
  const TestServer server(
      [](server::Config& config) { config.limits.kv_cache_bytes = int64_t{1} << 20; });
  const auto client = server.Connect();
  Dims dims;
  dims.page = 64;
  dims.layers = 8;  // a page group of 64 x 40 x 2 x 8 = 40 KiB
  Worker worker(client.get(), dims, "m", 1);
  std::vector<Track> tracks;
  absl::Status status;
  while (status.ok() && tracks.size() < 60) {
    tracks.push_back(*worker.Open());
    status = worker.Step({&tracks.back()}, {1}, v1::PROFILE_APPEND_ONLY);
  }
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
  EXPECT_FALSE(DetailOf(status)->reason().empty());
  tracks.erase(tracks.begin());
  EXPECT_EQ(worker.Step({&tracks.back()}, {1}, v1::PROFILE_APPEND_ONLY), absl::OkStatus());
}

TEST(CodesTest, TooManySequences) {
  const TestServer server([](server::Config& config) {
    config.limits.max_sequences = 32;
    config.tenants.bounds[scheduler::Resource::kSequences] = 32;
  });
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  std::vector<Track> tracks;
  for (int i = 0; i < 32; ++i) tracks.push_back(*worker.Open());
  EXPECT_EQ(worker.Open().status().code(), StatusCode::kResourceExhausted);
}

TEST(CodesTest, RowsThatNeverComeEndTheWait) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  auto step = worker.session().Begin("m", {{&track.sequence, 2}});
  ASSERT_TRUE(step.ok());
  const auto q = RandomBf16(static_cast<size_t>(2 * 4 * worker.dims().row()), &worker.random());
  std::vector<float> o(2 * 4 * 32);
  client::AttendCall call;
  call.row_count = 2;
  call.num_heads = 4;
  call.profile = v1::PROFILE_ABSORBED;
  call.o_dtype = v1::DTYPE_F32;
  call.q = q.data();
  call.o = o.data();
  EXPECT_EQ((*step)->Attend(call).status().code(), StatusCode::kFailedPrecondition);
  call.timeout_us = 20000;  // below limits.kv_wait_ms
  EXPECT_EQ((*step)->Attend(call).status().code(), StatusCode::kDeadlineExceeded);
}

TEST(CodesTest, RepeatedRowsMustBeEqual) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  auto step = worker.session().Begin("m", {{&track.sequence, 1}});
  ASSERT_TRUE(step.ok());
  auto kv = RandomBf16(static_cast<size_t>(worker.dims().row()), &worker.random());
  const auto q = RandomBf16(static_cast<size_t>(4 * worker.dims().row()), &worker.random());
  std::vector<float> o(4 * 32), o2(o.size());
  client::AttendCall call;
  call.row_count = 1;
  call.num_heads = 4;
  call.profile = v1::PROFILE_ABSORBED;
  call.o_dtype = v1::DTYPE_F32;
  call.kv = kv.data();
  call.q = q.data();
  call.o = o.data();
  ASSERT_TRUE((*step)->Attend(call).ok());
  call.o = o2.data();
  ASSERT_TRUE((*step)->Attend(call).ok());
  EXPECT_EQ(o, o2);
  kv[3] ^= 1;
  EXPECT_EQ((*step)->Attend(call).status().code(), StatusCode::kAlreadyExists);
}

// A step id that is reused at once for a model with wider rows. A request that was sized for the
// old model must not be computed with the new model's dims.
TEST(CodesTest, ReusedStepIdsCannotChangeTheModel) {
  const TestServer server;
  const auto client = server.Connect();
  Worker narrow(client.get(), {}, "narrow", 1);
  Dims dims;
  dims.lora = 96;
  Worker wide(client.get(), dims, "wide", 2);
  Track a = *narrow.Open(), b = *wide.Open();
  const auto stub = v1::Attention::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  const auto begin = [](const Track& track, const std::string& model) {
    v1::AttendStreamRequest request;
    request.mutable_begin_step()->set_step_id(7);
    request.mutable_begin_step()->set_model_id(model);
    v1::StepSequence* sequence = request.mutable_begin_step()->add_sequences();
    sequence->set_sequence_id(track.sequence.id());
    sequence->set_epoch(track.sequence.epoch());
    sequence->set_rows(1);
    return request;
  };
  v1::AttendStreamRequest abort, attend;
  abort.mutable_abort_step()->set_step_id(7);
  attend.mutable_attend()->set_step_id(7);
  attend.mutable_attend()->set_row_count(1);
  attend.mutable_attend()->set_num_heads(4);
  attend.mutable_attend()->set_profile(v1::PROFILE_ABSORBED);
  attend.mutable_attend()->set_has_kv(true);
  attend.set_payload(std::string(40 * 2 * 5, '\1'));
  for (int i = 0; i < 50; ++i) {
    grpc::ClientContext context;
    const auto stream = stub->Attend(&context);
    // Sent at once, so that the second step begins before the end of the first is known.
    for (const auto& request : {begin(a, "narrow"), abort, begin(b, "wide"), attend}) {
      ASSERT_TRUE(stream->Write(request));
    }
    stream->WritesDone();
    v1::AttendStreamReply reply;
    int replies = 0;
    for (; stream->Read(&reply); ++replies) EXPECT_FALSE(reply.has_attend());
    EXPECT_EQ(replies, 4);
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_EQ(wide.Step({&b}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

// The server enforces exactly the limits that it announces.
TEST(CodesTest, ChunksOfWeightsAreBoundedAsTheLimitsSay) {
  const TestServer server([](server::Config& config) { config.wire.weight_chunk_bytes = 2048; });
  const auto client = server.Connect();
  const v1::Limits& limits = client->info().limits();
  EXPECT_EQ(limits.weight_chunk_bytes(), 2048u);
  EXPECT_EQ(limits.max_participants(), 4u);
  EXPECT_EQ(limits.max_lease_ms(), 3600000u);
  EXPECT_EQ(limits.max_name_bytes(), 128u);
  EXPECT_EQ(limits.slice_wait_us(), 200u);
  EXPECT_EQ(limits.max_layers(), 8u);
  EXPECT_EQ(limits.max_row_dim(), 128u);
  EXPECT_EQ(limits.max_v_dim(), 64u);
  const Worker worker(client.get(), {}, "m", 1);
  const auto upload = [&](uint32_t heads) {
    int sent = 0;
    return client
        ->UploadWeights("m",
                        [&]() -> std::optional<client::WeightsChunk> {
                          if (sent++ > 0) return std::nullopt;
                          return client::WeightsChunk{0, 0, heads, std::string(heads * 2048, '0')};
                        })
        .status();
  };
  EXPECT_EQ(upload(1), absl::OkStatus());
  const absl::Status refused = upload(2);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "chunk.payload: got 4096 bytes, must be at most 2048 bytes");
}

TEST(CodesTest, DigestMismatchDiscardsTheUpload) {
  const TestServer server;
  const auto client = server.Connect();
  const Dims dims;
  ASSERT_TRUE(client->RegisterModel(SpecOf(dims, "m")).ok());
  std::mt19937_64 random(1);
  const std::vector<client::WeightsChunk> chunks = ChunksOf(dims, RandomWeights(dims, &random));
  const auto stub = v1::Models::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::UploadWeightsReply reply;
  const auto upload = stub->UploadWeights(&context, &reply);
  v1::UploadWeightsRequest part;
  part.mutable_header()->set_model_id("m");
  ASSERT_TRUE(upload->Write(part));
  for (const client::WeightsChunk& chunk : chunks) {
    part.mutable_chunk()->set_layer(chunk.layer);
    part.mutable_chunk()->set_head_begin(chunk.head_begin);
    part.mutable_chunk()->set_head_count(chunk.head_count);
    part.mutable_chunk()->set_payload(chunk.bytes);
    ASSERT_TRUE(upload->Write(part));
  }
  part.mutable_trailer()->set_sha256(std::string(32, '\0'));
  upload->Write(part);
  upload->WritesDone();
  EXPECT_EQ(upload->Finish().error_code(), grpc::StatusCode::DATA_LOSS);
  // No byte of it counts, and the correct bytes are accepted after it.
  EXPECT_FALSE(client->ListModels()->models(0).weights_complete());
  size_t next = 0;
  const auto again = client->UploadWeights("m", [&]() -> std::optional<client::WeightsChunk> {
    if (next == chunks.size()) return std::nullopt;
    return chunks[next++];
  });
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->complete());
}

TEST(CodesTest, UploadsOfAPartNameTheRest) {
  const TestServer server;
  const auto client = server.Connect();
  const Dims dims;
  ASSERT_TRUE(client->RegisterModel(SpecOf(dims, "m")).ok());
  std::mt19937_64 random(1);
  std::vector<client::WeightsChunk> chunks = ChunksOf(dims, RandomWeights(dims, &random));
  // Half of the layers: accepted, but not complete; the missing ones are named.
  bool sent = false;
  auto reply = client->UploadWeights("m", [&]() -> std::optional<client::WeightsChunk> {
    if (std::exchange(sent, true)) return std::nullopt;
    return chunks[0];
  });
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_FALSE(reply->complete());
  ASSERT_EQ(reply->missing_layers_size(), 1);
  EXPECT_EQ(reply->missing_layers(0), 1u);
  // The same layer twice in one call.
  int count = 0;
  reply = client->UploadWeights("m", [&]() -> std::optional<client::WeightsChunk> {
    if (count++ == 2) return std::nullopt;
    return chunks[1];
  });
  EXPECT_EQ(reply.status().code(), StatusCode::kInvalidArgument) << reply.status();
  EXPECT_EQ(client->UploadWeights("absent", [] { return std::nullopt; }).status().code(),
            StatusCode::kNotFound);
}

TEST(CodesTest, RestartIsAborted) {
  TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  auto sequence = client->OpenSequence("m");
  ASSERT_TRUE(sequence.ok());
  sequence->Detach();
  server.Restart();
  absl::Status status;
  for (int i = 0; i < 100 && !absl::IsAborted(status); ++i) {
    status = client->GetStats().status();  // UNAVAILABLE while the client reconnects
  }
  EXPECT_EQ(status.code(), StatusCode::kAborted) << status;
  EXPECT_EQ(DetailOf(status)->reason(), "server_restarted");
  EXPECT_EQ(client->OpenSequence("m").status().code(), StatusCode::kAborted);
  // A new client finds a server without state.
  EXPECT_EQ(server.Connect()->OpenSequence("m").status().code(), StatusCode::kNotFound);
}

TEST(CodesTest, TenantNamesAreChecked) {
  const TestServer server;
  EXPECT_EQ(
      client::Client::Connect(server.unix_target(), As(std::string(200, 'x'))).status().code(),
      StatusCode::kInvalidArgument);
  EXPECT_EQ(client::Client::Connect(server.unix_target(), As("two words")).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(CodesTest, WatchersAreBounded) {
  const TestServer server([](server::Config& config) { config.wire.max_watchers = 4; });
  const auto stub = v1::Admin::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  v1::WatchStatusRequest request;
  v1::StatusUpdate update;
  grpc::ClientContext contexts[3];
  for (grpc::ClientContext& context : contexts) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  std::unique_ptr<grpc::ClientReader<v1::StatusUpdate>> watches[3];
  for (int i = 0; i < 2; ++i) {
    watches[i] = stub->WatchStatus(&contexts[i], request);
    ASSERT_TRUE(watches[i]->Read(&update)) << i;
  }
  watches[2] = stub->WatchStatus(&contexts[2], request);
  EXPECT_FALSE(watches[2]->Read(&update));
  EXPECT_EQ(watches[2]->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // The other half is for other tenants.
  grpc::ClientContext other;
  other.AddMetadata("mla-tenant", "other");
  const auto its_watch = stub->WatchStatus(&other, request);
  EXPECT_TRUE(its_watch->Read(&update));
  other.TryCancel();
  its_watch->Finish();
  contexts[0].TryCancel();
  EXPECT_EQ(watches[0]->Finish().error_code(), grpc::StatusCode::CANCELLED);
  // Its place is free once the server has noticed.
  bool admitted = false;
  for (int i = 0; i < 100 && !admitted; ++i) {
    grpc::ClientContext context;
    const auto watch = stub->WatchStatus(&context, request);
    admitted = watch->Read(&update);
    context.TryCancel();
    watch->Finish();
    if (!admitted) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_TRUE(admitted);
  contexts[1].TryCancel();
  watches[1]->Finish();
}

TEST(CodesTest, NobodyThere) {
  client::ClientOptions options;
  options.call_timeout_ms = 500;
  const auto client = client::Client::Connect("unix:/nonexistent/socket", options);
  EXPECT_EQ(client.status().code(), StatusCode::kUnavailable) << client.status();
}

}  // namespace
}  // namespace mla::integration
