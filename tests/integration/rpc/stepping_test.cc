// The stepping protocol end to end; every reply is compared with a dense model.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "client/cpp/streams/errors.h"
#include "mla/v1/attention.grpc.pb.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using absl::StatusCode;
using client::DetailOf;

TEST(SteppingTest, PrefillAndDecodeAbsorbed) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track a = *worker.Open(), b = *worker.Open();
  EXPECT_EQ(worker.Step({&a}, {9}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&a, &b}, {1, 13}, v1::PROFILE_ABSORBED), absl::OkStatus());
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(worker.Step({&b, &a}, {1, 1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
  EXPECT_EQ(a.sequence.length(), 15u);
  EXPECT_EQ(b.sequence.length(), 18u);
}

TEST(SteppingTest, Bf16OutputsAndOddHeads) {
  const TestServer server;
  const auto client = server.Connect();
  Dims dims;
  dims.heads = 3;
  dims.lora = 33;  // an odd size, so that lse follows an output of odd length
  dims.rope = 6;
  Worker worker(client.get(), dims, "odd", 2);
  Track track = *worker.Open();
  EXPECT_EQ(worker.Step({&track}, {5}, v1::PROFILE_ABSORBED, {}, v1::DTYPE_BF16), absl::OkStatus());
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED, {}, v1::DTYPE_BF16), absl::OkStatus());
}

TEST(SteppingTest, ExpandedWithUploadedWeights) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 3);
  Track track = *worker.Open();
  const absl::Status early = worker.Step({&track}, {2}, v1::PROFILE_EXPANDED);
  EXPECT_EQ(early.code(), StatusCode::kFailedPrecondition) << early;
  ASSERT_EQ(worker.Upload(), absl::OkStatus());
  EXPECT_EQ(worker.Step({&track}, {11}, v1::PROFILE_EXPANDED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_EXPANDED), absl::OkStatus());
  // The same cache serves both forms.
  EXPECT_EQ(worker.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(SteppingTest, CpuBackendGivesTheSameAnswers) {
  const TestServer server([](server::Config& config) { config.backend = "cpu"; });
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 4);
  ASSERT_EQ(worker.Upload(), absl::OkStatus());
  Track track = *worker.Open();
  EXPECT_EQ(worker.Step({&track}, {40}, v1::PROFILE_EXPANDED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_EXPANDED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(SteppingTest, ForkContinuesTwoWays) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 5);
  Track parent = *worker.Open();
  ASSERT_EQ(worker.Step({&parent}, {6}, v1::PROFILE_ABSORBED), absl::OkStatus());
  auto child = parent.sequence.Fork();
  ASSERT_TRUE(child.ok()) << child.status();
  Track fork{*std::move(child), parent.cache};
  EXPECT_EQ(fork.sequence.length(), 6u);
  EXPECT_EQ(worker.Step({&parent}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&fork}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&parent, &fork}, {1, 1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_GT(client->GetStats()->copies_on_write(), 0u);

  auto shorter = parent.sequence.Fork(4);
  ASSERT_TRUE(shorter.ok()) << shorter.status();
  Track early{*std::move(shorter), parent.cache};
  early.cache.Truncate(worker.dims(), 4);
  EXPECT_EQ(worker.Step({&early}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(SteppingTest, TruncateStartsANewEpoch) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 6);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {7}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const uint64_t before = track.sequence.epoch();
  ASSERT_EQ(track.sequence.Truncate(5), absl::OkStatus());
  EXPECT_GT(track.sequence.epoch(), before);
  track.cache.Truncate(worker.dims(), 5);
  EXPECT_EQ(worker.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(SteppingTest, VerifiedDraftKeepsAPrefix) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 7);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const uint64_t epoch = track.sequence.epoch();
  EXPECT_EQ(worker.Step({&track}, {4}, v1::PROFILE_ABSORBED, {2}), absl::OkStatus());
  EXPECT_EQ(track.sequence.length(), 5u);
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  ASSERT_EQ(track.sequence.Refresh(), absl::OkStatus());
  EXPECT_EQ(track.sequence.length(), 6u);
  EXPECT_EQ(track.sequence.epoch(), epoch);
}

TEST(SteppingTest, AppendOnlyThenAttend) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 8);
  Track track = *worker.Open();
  EXPECT_EQ(worker.Step({&track}, {10}, v1::PROFILE_APPEND_ONLY), absl::OkStatus());
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(SteppingTest, LargeWorkIsCutByRows) {
  const TestServer server([](server::Config& config) {
    config.wire.message_bytes = 65536;
    config.wire.inflight_bytes = 131072;  // reads pause many times
  });
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 9);
  Track track = *worker.Open();
  EXPECT_EQ(worker.Step({&track}, {500}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_GT(worker.most_messages(), 3u);
}

TEST(SteppingTest, ScarceStagingMemoryOnlyDelays) {
  const TestServer server([](server::Config& config) {
    config.wire.message_bytes = 131072;
    config.wire.inflight_bytes = 1048576;
    config.wire.staging_bytes = 1048576;
  });
  std::vector<std::thread> threads;
  std::vector<absl::Status> statuses(3);
  for (size_t i = 0; i < statuses.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto client = server.Connect();
      Worker worker(client.get(), {}, "m", 90 + i);
      Track track = *worker.Open();
      statuses[i] = worker.Step({&track}, {400}, v1::PROFILE_ABSORBED);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_EQ(status, absl::OkStatus());
}

// The server stops reading a stream that has staged its share until some of it has been answered.
TEST(SteppingTest, AStreamStagesNoMoreThanItsShare) {
  const TestServer server([](server::Config& config) {
    config.wire.message_bytes = 262144;
    config.wire.inflight_bytes = 1048576;
    config.limits.kv_wait_ms = 2000;
  });
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  auto step = worker.session().Begin("m", {{&track.sequence, 512}}, {5, 2, 0});
  ASSERT_TRUE(step.ok()) << step.status();
  // A second stream whose queries wait for rows that never come: 164 KB in and 131 KB out each.
  constexpr int kMessages = 16;
  const auto stub = v1::Attention::NewStub(
      grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->Attend(&context);
  v1::AttendStreamRequest join, query;
  join.mutable_begin_step()->set_step_id(5);
  join.mutable_begin_step()->set_model_id("m");
  join.mutable_begin_step()->set_participants(2);
  v1::StepSequence* const rows = join.mutable_begin_step()->add_sequences();
  rows->set_sequence_id(track.sequence.id());
  rows->set_epoch(track.sequence.epoch());
  rows->set_rows(512);
  query.mutable_attend()->set_step_id(5);
  query.mutable_attend()->set_row_count(512);
  query.mutable_attend()->set_num_heads(4);
  query.mutable_attend()->set_profile(v1::PROFILE_ABSORBED);
  query.set_payload(std::string(512 * 4 * 40 * 2, '\1'));
  v1::AttendStreamReply reply;
  ASSERT_TRUE(stream->Write(join) && stream->Read(&reply) && reply.has_begin_step());
  std::thread writer([&] {
    for (int i = 0; i < kMessages; ++i) EXPECT_TRUE(stream->Write(query)) << i;
    stream->WritesDone();
  });
  uint32_t peak = 0;
  std::thread reader([&] {
    for (int i = 0; i < kMessages; ++i) {
      EXPECT_TRUE(stream->Read(&reply)) << i;
      EXPECT_EQ(reply.error().detail().reason(), "kv_rows_missing");
    }
  });
  for (int i = 0; i < 100; ++i) {
    peak = std::max(peak, client->GetStats()->requests_waiting());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  writer.join();
  reader.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_GE(peak, 2u);
  EXPECT_LE(peak, 5u);  // the fourth begins below 1 MiB, and one more may be in flight
}

TEST(SteppingTest, HeadSlicesOfTwoParticipants) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 10);
  Track track = *worker.Open();
  const Dims& dims = worker.dims();
  auto second = *client->OpenSession();
  client::BeginOptions options;
  options.step_id = 77;
  options.participants = 2;
  auto step1 = worker.session().Begin("m", {{&track.sequence, 2}}, options);
  ASSERT_TRUE(step1.ok()) << step1.status();
  auto step2 = second->Begin("m", {{&track.sequence, 2}}, options);
  ASSERT_TRUE(step2.ok()) << step2.status();
  EXPECT_EQ((*step2)->joined(), 2u);

  const auto row = static_cast<size_t>(dims.row());
  const auto lora = static_cast<size_t>(dims.lora);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const auto kv = RandomBf16(2 * row, &worker.random());
    const auto q = RandomBf16(2 * 2 * row, &worker.random());
    std::vector<float> o1(2 * 2 * lora), o2(o1.size());
    client::AttendCall call;
    call.layer = layer;
    call.row_count = 2;
    call.num_heads = 2;
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.q = q.data();
    // The rank without KV rows sends first and waits for the other rank's rows.
    call.head_offset = 2;
    call.o = o2.data();
    auto waiting = (*step2)->AttendAsync(call);
    call.head_offset = 0;
    call.kv = kv.data();
    call.o = o1.data();
    const auto first = (*step1)->Attend(call);
    ASSERT_TRUE(first.ok()) << first.status();
    const auto late = waiting.Wait();
    ASSERT_TRUE(late.ok()) << late.status();
    EXPECT_EQ(o1, o2);  // equal queries over one shared cache
  }
  // Only the stream that began the step may end it.
  EXPECT_FALSE((*step2)->End().ok());
  EXPECT_TRUE((*step1)->End().ok());
}

TEST(SteppingTest, EndNamesWhatIsMissingAndAbortRestores) {
  const TestServer server;
  const auto client = server.Connect();
  Worker worker(client.get(), {}, "m", 11);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  auto step = worker.session().Begin("m", {{&track.sequence, 1}});
  ASSERT_TRUE(step.ok()) << step.status();
  const auto ended = (*step)->End();
  EXPECT_EQ(ended.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_FALSE(DetailOf(ended.status())->field().empty());
  EXPECT_EQ((*step)->Abort(), absl::OkStatus());
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST(SteppingTest, TwoClientsAtOnce) {
  const TestServer server;
  std::vector<std::thread> threads;
  std::vector<absl::Status> statuses(2);
  for (size_t i = 0; i < statuses.size(); ++i) {
    threads.emplace_back([&, i] {
      client::ClientOptions options;
      options.tenant = i == 0 ? "red" : "blue";
      if (i == 0) options.transport = client::ClientOptions::Transport::kInline;
      const auto client = server.Connect(options);
      Worker worker(client.get(), {}, "m", 20 + i);
      Track track = *worker.Open();
      statuses[i] = worker.Step({&track}, {30}, v1::PROFILE_ABSORBED);
      for (int s = 0; s < 30 && statuses[i].ok(); ++s) {
        statuses[i] = worker.Step({&track}, {1}, v1::PROFILE_ABSORBED);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(statuses[0], absl::OkStatus());
  EXPECT_EQ(statuses[1], absl::OkStatus());
  const auto stats = server.Connect()->GetStats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->requests_failed(), 0u);
  EXPECT_GT(stats->rows_decode(), 0u);
  // gRPC copies tensors once in and never out; the ring copies nothing.
  EXPECT_GT(stats->shared_bytes(), 0u);
  EXPECT_GT(stats->copied_bytes(), 0u);
  EXPECT_LT(stats->copied_bytes(), stats->received_bytes());
}

}  // namespace
}  // namespace mla::integration
