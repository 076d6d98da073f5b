// The C library with a cluster: the calls of a connection, over several servers.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/c/mla_client.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

constexpr uint32_t kLora = 32, kRow = 40, kHeads = 2;

mla_model SmallModel() {
  mla_model model{};
  model.struct_size = sizeof(model);
  model.model_id = "m";
  model.num_heads = kHeads;
  model.kv_lora_rank = kLora;
  model.rope_dim = 8;
  model.nope_dim = 16;
  model.v_dim = 16;
  model.layers = 1;
  model.softmax_scale = 0.25;
  return model;
}

std::string Reason(mla_error* error) {
  const std::string reason = mla_error_reason(error);
  mla_error_free(error);
  return reason;
}

// A connection to a cluster whose home is the first of the addresses; its model is registered.
mla_client* Connect(const std::string& first, const std::string& second) {
  mla_cluster_options cluster{};
  cluster.struct_size = sizeof(cluster);
  cluster.home = first.c_str();
  cluster.all = 1;
  mla_client* client = nullptr;
  mla_error* error = nullptr;
  EXPECT_EQ(mla_connect_cluster((first + "," + second).c_str(), nullptr, &cluster, &client, &error),
            MLA_OK)
      << mla_error_message(error);
  const mla_model model = SmallModel();
  mla_model_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(mla_register_model(client, &model, &info, &error), MLA_OK) << mla_error_message(error);
  EXPECT_GT(info.page_group_bytes, 0u);
  return client;
}

// A row of ones times `value`, in bf16.
std::vector<uint16_t> RowOf(float value, size_t elements) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return std::vector<uint16_t>(elements, static_cast<uint16_t>(bits >> 16));
}

TEST(CClusterTest, AStepOverTwoServersAnswersForBoth) {
  TestServer a, b([](server::Config& config) {
    config.limits.max_sequences = config.limits.max_step_sequences = 1;
  });
  // The home has room for one sequence, so the second one goes to the other server.
  mla_client* const client = Connect(b.tcp_target(), a.tcp_target());
  mla_server_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(mla_client_server_info(client, &info, nullptr), MLA_OK);
  EXPECT_NE(info.boot_id, 0u);
  EXPECT_STRNE(info.backend, "");
  mla_sequence* sequences[2] = {};
  mla_session* session = nullptr;
  for (mla_sequence*& one : sequences) {
    ASSERT_EQ(mla_sequence_open(client, "m", nullptr, &one, nullptr), MLA_OK);
  }
  EXPECT_EQ(mla_sequence_address(sequences[0]), b.tcp_target());
  EXPECT_EQ(mla_sequence_address(sequences[1]), a.tcp_target());
  ASSERT_EQ(mla_session_open(client, &session, nullptr), MLA_OK);
  EXPECT_STREQ(mla_session_transport(session), "inline");
  const mla_step_rows rows[] = {{sequences[0], 1}, {sequences[1], 1}};
  mla_step* step = nullptr;
  mla_error* error = nullptr;
  ASSERT_EQ(mla_step_begin(session, "m", rows, 2, nullptr, &step, &error), MLA_OK)
      << mla_error_message(error);
  EXPECT_EQ(mla_step_total_rows(step), 2u);
  // A row attends to itself alone, so each output is its row.
  std::vector<uint16_t> kv = RowOf(2.0f, kRow);
  const std::vector<uint16_t> other = RowOf(-4.0f, kRow), q = RowOf(1.0f, 2 * kHeads * kRow);
  kv.insert(kv.end(), other.begin(), other.end());
  std::vector<float> o(2 * kHeads * kLora);
  mla_attend call{};
  call.struct_size = sizeof(call);
  call.row_count = 2;
  call.num_heads = kHeads;
  call.profile = MLA_PROFILE_ABSORBED;
  call.o_dtype = MLA_DTYPE_F32;
  call.kv = kv.data();
  call.q = q.data();
  call.o = o.data();
  mla_pending* pending = nullptr;
  ASSERT_EQ(mla_step_attend_async(step, &call, &pending, nullptr), MLA_OK);
  while (mla_pending_ready(pending) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  mla_attend_times times{};
  times.struct_size = sizeof(times);
  ASSERT_EQ(mla_pending_wait(pending, &times, &error), MLA_OK) << mla_error_message(error);
  EXPECT_EQ(times.messages, 2u);
  for (size_t i = 0; i < o.size(); ++i) EXPECT_FLOAT_EQ(o[i], i < o.size() / 2 ? 2.0f : -4.0f);
  for (size_t place = 0; place < 2; ++place) {
    EXPECT_EQ(mla_step_sequence_status(step, place, nullptr), MLA_OK);
  }
  EXPECT_EQ(mla_step_sequence_status(step, 2, nullptr), MLA_INVALID_ARGUMENT);
  const uint32_t committed[] = {1, 0};
  EXPECT_EQ(mla_step_end(step, committed, nullptr), MLA_OK);
  EXPECT_EQ(mla_sequence_length(sequences[0]), 1u);
  EXPECT_EQ(mla_sequence_length(sequences[1]), 0u);
  mla_step_free(step);
  mla_session_free(session);
  for (mla_sequence* one : sequences) EXPECT_EQ(mla_sequence_release(one, nullptr), MLA_OK);
  EXPECT_EQ(mla_unregister_model(client, "m", nullptr), MLA_OK);
  mla_client_free(client);
}

TEST(CClusterTest, ASequenceOfAKilledServerIsRecovered) {
  ServerProcess a({});
  const ServerProcess b({});
  mla_client* const client = Connect(a.target(), b.target());
  mla_sequence* sequence = nullptr;
  mla_session* session = nullptr;
  mla_step* step = nullptr;
  mla_error* error = nullptr;
  ASSERT_EQ(mla_sequence_open(client, "m", nullptr, &sequence, nullptr), MLA_OK);
  EXPECT_EQ(mla_sequence_address(sequence), a.target());
  ASSERT_EQ(mla_session_open(client, &session, nullptr), MLA_OK);
  a.Signal(SIGKILL);
  a.Wait();
  const mla_step_rows rows = {sequence, 1};
  EXPECT_NE(mla_step_begin(session, "m", &rows, 1, nullptr, &step, nullptr), MLA_OK);
  mla_recovery recovery{};
  recovery.struct_size = sizeof(recovery);
  ASSERT_EQ(mla_sequence_recover(client, sequence, nullptr, &recovery, &error), MLA_OK)
      << mla_error_message(error);
  EXPECT_EQ(recovery.how, MLA_RECOVERED_NONE);
  EXPECT_EQ(mla_sequence_address(sequence), b.target());
  ASSERT_EQ(mla_step_begin(session, "m", &rows, 1, nullptr, &step, &error), MLA_OK)
      << mla_error_message(error);
  EXPECT_EQ(mla_step_abort(step, nullptr), MLA_OK);
  mla_step_free(step);
  mla_session_free(session);
  mla_sequence_free(sequence);
  mla_client_free(client);
}

TEST(CClusterTest, AProbeAsksTheServerThatIsTheHomeNow) {
  TestServer a;
  std::optional<TestServer> b;
  b.emplace();
  mla_client* const client = Connect(b->unix_target(), a.unix_target());
  const auto booted = [client] {
    mla_probe probe{};
    probe.struct_size = sizeof(probe);
    mla_error* error = nullptr;
    EXPECT_EQ(mla_client_probe(client, nullptr, nullptr, &probe, &error), MLA_OK)
        << mla_error_message(error);
    mla_error_free(error);
    return probe.boot_id;
  };
  const auto boot_id = [](const TestServer& server) { return server.Connect()->info().boot_id(); };
  EXPECT_EQ(booted(), boot_id(*b));
  b->Restart();
  EXPECT_NE(booted(), 0u);
  b.reset();
  EXPECT_EQ(booted(), boot_id(a));
  mla_client_free(client);
}

TEST(CClusterTest, TheInfoIsThatOfTheServerThatIsTheHomeNow) {
  TestServer a;
  std::optional<TestServer> b;
  b.emplace();
  mla_client* const client = Connect(b->unix_target(), a.unix_target());
  const auto info = [client] {
    mla_server_info known{};
    known.struct_size = sizeof(known);
    mla_error* error = nullptr;
    EXPECT_EQ(mla_client_server_info(client, &known, &error), MLA_OK) << mla_error_message(error);
    mla_error_free(error);
    return known;
  };
  const auto boot_id = [](const TestServer& server) { return server.Connect()->info().boot_id(); };
  const mla_server_info first = info();
  EXPECT_EQ(first.boot_id, boot_id(*b));
  const std::string version = first.server_version, backend = first.backend;
  b->Restart();
  EXPECT_NE(info().boot_id, first.boot_id);
  b.reset();
  EXPECT_EQ(info().boot_id, boot_id(a));
  // Texts outlive the connections that they came by.
  EXPECT_EQ(first.server_version, version);
  EXPECT_EQ(first.backend, backend);
  mla_client_free(client);
}

TEST(CClusterTest, WeightsComeToEveryServerOfTheCluster) {
  TestServer a, b([](server::Config& config) {
    config.limits.max_sequences = config.limits.max_step_sequences = 1;
  });
  mla_client* const client = Connect(b.tcp_target(), a.tcp_target());
  const std::vector<uint16_t> w_uk(kHeads * 16 * kLora), w_uv(kHeads * kLora * 16);
  const mla_weights weights = {0, 0, kHeads, w_uk.data(), w_uv.data()};
  int32_t complete = 0;
  ASSERT_EQ(mla_upload_weights(client, "m", &weights, 1, &complete, nullptr), MLA_OK);
  EXPECT_EQ(complete, 1);
  mla_sequence* sequences[2] = {};
  for (mla_sequence*& one : sequences) {
    ASSERT_EQ(mla_sequence_open(client, "m", nullptr, &one, nullptr), MLA_OK);
  }
  const auto models = a.Connect()->ListModels();
  ASSERT_EQ(models->models_size(), 1);
  EXPECT_TRUE(models->models(0).weights_complete());
  for (mla_sequence* one : sequences) mla_sequence_free(one);
  mla_client_free(client);
}

TEST(CClusterTest, SaysWhatIsWrong) {
  const TestServer server;
  mla_client* client = nullptr;
  mla_error* error = nullptr;
  EXPECT_EQ(mla_connect("a,,b", nullptr, &client, nullptr), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(mla_connect("etcd://127.0.0.1:1/fleet", nullptr, &client, &error), MLA_UNAVAILABLE);
  EXPECT_EQ(Reason(error), "registry_away");
  mla_cluster_options cluster{};
  EXPECT_EQ(mla_connect_cluster("a,b", nullptr, &cluster, &client, nullptr), MLA_INVALID_ARGUMENT)
      << "struct_size";
  cluster.struct_size = sizeof(cluster);
  cluster.keep_ms = -1;
  EXPECT_EQ(mla_connect_cluster("a,b", nullptr, &cluster, &client, nullptr), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(client, nullptr);
  // A sequence of a single server cannot be recovered, nor have part in a cluster's step.
  ASSERT_EQ(mla_connect(server.unix_target().c_str(), nullptr, &client, nullptr), MLA_OK);
  const mla_model model = SmallModel();
  ASSERT_EQ(mla_register_model(client, &model, nullptr, nullptr), MLA_OK);
  mla_sequence* sequence = nullptr;
  ASSERT_EQ(mla_sequence_open(client, "m", nullptr, &sequence, nullptr), MLA_OK);
  EXPECT_STREQ(mla_sequence_address(sequence), "");
  EXPECT_EQ(mla_sequence_recover(client, sequence, nullptr, nullptr, nullptr),
            MLA_FAILED_PRECONDITION);
  mla_client* const fleet = Connect(server.tcp_target(), server.unix_target());
  mla_session* session = nullptr;
  mla_step* step = nullptr;
  ASSERT_EQ(mla_session_open(fleet, &session, nullptr), MLA_OK);
  const mla_step_rows rows = {sequence, 1};
  EXPECT_EQ(mla_step_begin(session, "m", &rows, 1, nullptr, &step, nullptr), MLA_INVALID_ARGUMENT);
  mla_session_free(session);
  mla_client_free(fleet);
  mla_sequence_free(sequence);
  mla_client_free(client);
}

}  // namespace
}  // namespace mla::integration
