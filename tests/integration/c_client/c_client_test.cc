// Tests the border between C and the library: structs of other versions, null pointers, errors, and
// the program step.c on every transport. The C++ library's tests cover the calls themselves.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "client/c/mla_client.h"
#include "client/cpp/cluster/placement.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

using ClientHandle = std::unique_ptr<mla_client, decltype(&mla_client_free)>;

// The contents of an error, which is freed.
struct Said {
  explicit Said(mla_error* error)
      : code(mla_error_code(error)),
        field(mla_error_field(error)),
        limit(mla_error_limit(error)),
        got(mla_error_got(error)),
        reason(mla_error_reason(error)) {
    mla_error_free(error);
  }
  mla_code code;
  std::string field, limit, got, reason;
};

ClientHandle Connect(const TestServer& server) {
  mla_client* client = nullptr;
  EXPECT_EQ(mla_connect(server.unix_target().c_str(), nullptr, &client, nullptr), MLA_OK);
  return {client, mla_client_free};
}

mla_model SmallModel() {
  mla_model model{};
  model.struct_size = sizeof(model);
  model.model_id = "m";
  model.num_heads = 2;
  model.kv_lora_rank = 32;
  model.rope_dim = 8;
  model.nope_dim = 16;
  model.v_dim = 16;
  model.layers = 1;
  model.softmax_scale = 0.25;
  return model;
}

class StepProgramTest : public ::testing::TestWithParam<const char*> {};

TEST_P(StepProgramTest, AnswersAreRight) {
  const TestServer server([](server::Config& config) { config.limits.max_row_dim = 576; });
  const std::string command =
      std::string("tests/integration/c_client/step ") + server.unix_target() + " " + GetParam();
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

INSTANTIATE_TEST_SUITE_P(Transports, StepProgramTest, ::testing::Values("inline", "shm", "ring"),
                         [](const auto& info) { return std::string(info.param); });

// Where UCX is not installed, this fails.
class UcxStepProgramTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    setenv("MLA_TEST_UCX", "1", 1);
    setenv("UCX_TLS", "tcp", 1);  // of both sides
  }
  void TearDown() override {
    unsetenv("MLA_TEST_UCX");
    unsetenv("UCX_TLS");
  }
};

TEST_P(UcxStepProgramTest, AnswersAreRight) {
  const TestServer server([](server::Config& config) {
    config.limits.max_row_dim = 576;
    config.ucx.puts = true;
  });
  const std::string command =
      std::string("tests/integration/c_client/step ") + server.tcp_target() + " " + GetParam();
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

INSTANTIATE_TEST_SUITE_P(Transports, UcxStepProgramTest, ::testing::Values("ucx", "ucx_puts"),
                         [](const auto& info) { return std::string(info.param); });

// A server without such memory is an error, not another way.
TEST(UcxDeviceTest, TheServersReasonIsTheErrors) {
  setenv("MLA_TEST_UCX", "1", 1);
  setenv("UCX_TLS", "tcp", 1);
  for (const bool offered : {false, true}) {
    const TestServer server([offered](server::Config& config) {
      config.ucx.puts = true;
      config.ucx.device_memory = offered;
      config.shm.device_bytes = 16 << 20;
    });
    mla_connect_options options{};
    options.struct_size = sizeof(options);
    options.transport = MLA_TRANSPORT_UCX_DEVICE;
    mla_client* client = nullptr;
    ASSERT_EQ(mla_connect(server.tcp_target().c_str(), &options, &client, nullptr), MLA_OK);
    const ClientHandle handle(client, mla_client_free);
    mla_session* session = nullptr;
    mla_error* error = nullptr;
    // The CPU backend has no memory of a GPU.
    ASSERT_EQ(mla_session_open(client, &session, &error),
              offered ? MLA_UNAVAILABLE : MLA_FAILED_PRECONDITION);
    const std::string message = mla_error_message(error);
    EXPECT_EQ(Said(error).field, offered ? "" : "device_memory");
    EXPECT_NE(message.find(offered ? "device memory" : "ucx.device_memory"), std::string::npos)
        << message;
  }
  unsetenv("MLA_TEST_UCX");
  unsetenv("UCX_TLS");
}

TEST(CClientTest, NoServer) {
  mla_client* client = reinterpret_cast<mla_client*>(1);
  mla_error* error = nullptr;
  mla_connect_options options{};
  options.struct_size = sizeof(options);
  options.call_timeout_ms = 200;
  EXPECT_EQ(mla_connect("unix:/nonexistent/mla.sock", &options, &client, &error), MLA_UNAVAILABLE);
  EXPECT_EQ(client, nullptr);
  EXPECT_NE(std::string(mla_error_message(error)), "");
  EXPECT_EQ(mla_error_code(error), MLA_UNAVAILABLE);
  mla_error_free(error);
}

TEST(CClientTest, ProbesByPageNames) {
  const TestServer server;
  mla_client* client = nullptr;
  ASSERT_EQ(mla_connect(server.unix_target().c_str(), nullptr, &client, nullptr), MLA_OK);
  mla_model model{};
  model.struct_size = sizeof(model);
  model.model_id = "m";
  model.num_heads = 2;
  model.kv_lora_rank = 32;
  model.rope_dim = 8;
  model.layers = 1;
  model.page_size = 4;
  model.softmax_scale = 1;
  mla_error* error = nullptr;
  ASSERT_EQ(mla_register_model(client, &model, nullptr, &error), MLA_OK)
      << mla_error_message(error);
  const std::vector<uint32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  unsigned char names[2 * MLA_PAGE_NAME_BYTES];
  ASSERT_EQ(mla_page_names(tokens.data(), tokens.size(), 4, "salt", 4, names, &error), MLA_OK)
      << mla_error_message(error);
  const auto wanted = client::PageNames(tokens, 4, "salt");
  ASSERT_EQ(wanted->size(), 2u);
  EXPECT_EQ(std::string(reinterpret_cast<char*>(names), sizeof(names)),
            (*wanted)[0] + (*wanted)[1]);
  mla_prefix prefix{};
  prefix.struct_size = sizeof(prefix);
  prefix.page_keys = names;
  prefix.page_key_count = 2;
  prefix.page_key_bytes = MLA_PAGE_NAME_BYTES;
  mla_probe probe{};
  probe.struct_size = sizeof(probe);
  ASSERT_EQ(mla_client_probe(client, "m", &prefix, &probe, &error), MLA_OK)
      << mla_error_message(error);
  EXPECT_EQ(probe.rows_asked, 8u);
  EXPECT_EQ(probe.rows_in_pool, 0u);
  EXPECT_GT(probe.bytes_total, 0u);
  EXPECT_GT(probe.bytes_free, 0u);
  EXPECT_LE(probe.bytes_free, probe.bytes_total);
  EXPECT_EQ(probe.draining, 0);
  mla_sequence* sequence = nullptr;
  ASSERT_EQ(mla_sequence_open(client, "m", &prefix, &sequence, &error), MLA_OK)
      << mla_error_message(error);
  ASSERT_EQ(mla_client_probe(client, nullptr, nullptr, &probe, &error), MLA_OK);
  EXPECT_EQ(probe.sequences, 1u);
  EXPECT_EQ(mla_sequence_release(sequence, nullptr), MLA_OK);
  prefix.page_key_bytes = 5;
  EXPECT_EQ(mla_client_probe(client, "m", &prefix, &probe, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(mla_error_field(error)), "prefix.page_key_bytes");
  mla_error_free(error);
  EXPECT_EQ(mla_page_names(tokens.data(), tokens.size(), 0, "salt", 4, names, nullptr),
            MLA_INVALID_ARGUMENT);
  EXPECT_EQ(mla_page_names(tokens.data(), tokens.size(), 4, "", 0, names, nullptr),
            MLA_INVALID_ARGUMENT);
  EXPECT_EQ(mla_page_names(nullptr, 0, 4, "salt", 4, names, nullptr), MLA_INVALID_ARGUMENT);
  mla_client_free(client);
}

TEST(CClientTest, AnErrorThatSaysNothing) {
  EXPECT_EQ(mla_error_code(nullptr), MLA_OK);
  EXPECT_EQ(std::string(mla_error_message(nullptr)), "");
  EXPECT_EQ(std::string(mla_error_field(nullptr)), "");
  EXPECT_EQ(std::string(mla_error_reason(nullptr)), "");
  EXPECT_EQ(std::string(mla_error_peer(nullptr)), "");
  EXPECT_EQ(mla_error_retry_after_ms(nullptr), 0u);
  EXPECT_EQ(mla_error_last_good_position(nullptr), 0u);
  EXPECT_EQ(mla_error_next_row(nullptr), -1);
  mla_error_free(nullptr);
}

TEST(CClientTest, NullArgumentsAreRefusedByName) {
  const TestServer server;
  const ClientHandle client = Connect(server);
  mla_error* error = nullptr;
  mla_client* other = nullptr;
  mla_sequence* sequence = nullptr;
  EXPECT_EQ(mla_connect(nullptr, nullptr, &other, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "target");
  EXPECT_EQ(mla_connect("unix:x", nullptr, nullptr, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "out");
  EXPECT_EQ(mla_register_model(client.get(), nullptr, nullptr, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "model");
  EXPECT_EQ(mla_sequence_open(client.get(), nullptr, nullptr, &sequence, &error),
            MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "model_id");
  const mla_weights missing = {0, 0, 2, "", nullptr};
  EXPECT_EQ(mla_upload_weights(client.get(), "m", &missing, 1, nullptr, &error),
            MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "weights.w_uv");
  EXPECT_EQ(mla_upload_weights(client.get(), "m", nullptr, 1, nullptr, &error),
            MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "weights");
  EXPECT_EQ(mla_upload_scales(client.get(), "m", nullptr, 1, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "scales");
  mla_session* session = nullptr;
  ASSERT_EQ(mla_session_open(client.get(), &session, &error), MLA_OK);
  mla_step* step = nullptr;
  EXPECT_EQ(mla_step_begin(session, "m", nullptr, 1, nullptr, &step, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "rows");
  mla_session_free(session);
  EXPECT_EQ(mla_pending_ready(nullptr), 1);
  EXPECT_EQ(mla_pending_wait(nullptr, nullptr, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "pending");
  EXPECT_EQ(mla_sequence_release(nullptr, &error), MLA_OK);
}

TEST(CClientTest, ServersRefusalsNameTheField) {
  const TestServer server;
  const ClientHandle client = Connect(server);
  mla_error* error = nullptr;
  mla_model model = SmallModel();
  model.layers = 0;
  EXPECT_EQ(mla_register_model(client.get(), &model, nullptr, &error), MLA_INVALID_ARGUMENT);
  const Said said(error);
  EXPECT_EQ(said.code, MLA_INVALID_ARGUMENT);
  EXPECT_EQ(said.field, "model.layers");
  EXPECT_EQ(said.got, "0");
  EXPECT_NE(said.limit, "");
}

// A program that was compiled with an earlier header passes and gets the fields of that header.
TEST(CClientTest, StructsOfEarlierHeaders) {
  const TestServer server;
  const ClientHandle client = Connect(server);
  mla_model model = SmallModel();
  model.sparse_top_k = 77;  // would need sparse attention; lies after the fields that the program
                            // knows
  model.struct_size = offsetof(mla_model, sparse_top_k);
  mla_model_info info;
  std::memset(&info, 0xee, sizeof(info));
  info.struct_size = offsetof(mla_model_info, max_sequence_rows);
  mla_error* error = nullptr;
  ASSERT_EQ(mla_register_model(client.get(), &model, &info, &error), MLA_OK)
      << mla_error_message(error);
  EXPECT_EQ(info.struct_size, offsetof(mla_model_info, max_sequence_rows));
  EXPECT_GT(info.page_groups_max, 0u);
  EXPECT_EQ(info.max_sequence_rows, 0xeeeeeeeeeeeeeeeeu);
}

TEST(CClientTest, StructsOfLaterHeaders) {
  const TestServer server;
  const ClientHandle client = Connect(server);
  struct {
    mla_model model = SmallModel();
    uint64_t added = 0;
  } later;
  static_assert(offsetof(decltype(later), added) == sizeof(mla_model));
  later.model.struct_size = sizeof(later);
  mla_error* error = nullptr;
  EXPECT_EQ(mla_register_model(client.get(), &later.model, nullptr, &error), MLA_OK)
      << mla_error_message(error);
  later.added = 1;
  EXPECT_EQ(mla_register_model(client.get(), &later.model, nullptr, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "model");
  later.model.struct_size = 0;
  EXPECT_EQ(mla_register_model(client.get(), &later.model, nullptr, &error), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(Said(error).field, "model.struct_size");
}

TEST(CClientTest, CallsThatWouldReachPastTensorsAreRefused) {
  const TestServer server;
  const ClientHandle client = Connect(server);
  const mla_model model = SmallModel();
  ASSERT_EQ(mla_register_model(client.get(), &model, nullptr, nullptr), MLA_OK);
  mla_sequence* sequence = nullptr;
  mla_session* session = nullptr;
  mla_step* step = nullptr;
  ASSERT_EQ(mla_sequence_open(client.get(), "m", nullptr, &sequence, nullptr), MLA_OK);
  ASSERT_EQ(mla_session_open(client.get(), &session, nullptr), MLA_OK);
  const mla_step_rows rows = {sequence, 1};
  ASSERT_EQ(mla_step_begin(session, "m", &rows, 1, nullptr, &step, nullptr), MLA_OK);
  std::vector<uint16_t> q(2 * 40), kv(40), o(2 * 32);
  mla_attend right{};
  right.struct_size = sizeof(right);
  right.row_count = 1;
  right.num_heads = 2;
  right.profile = MLA_PROFILE_ABSORBED;
  right.q = q.data();
  right.kv = kv.data();
  right.o = o.data();
  const auto refused = [&](const mla_attend& call) {
    mla_error* error = nullptr;
    EXPECT_EQ(mla_step_attend(step, &call, nullptr, &error), MLA_INVALID_ARGUMENT);
    return Said(error).field;
  };
  mla_attend call = right;
  call.q = nullptr;
  EXPECT_EQ(refused(call), "attend.q");
  call = right;
  call.o = nullptr;
  EXPECT_EQ(refused(call), "attend.o");
  call = right;
  call.profile = static_cast<mla_profile>(7);
  EXPECT_EQ(refused(call), "attend.profile");
  call = right;
  call.q_dtype = static_cast<mla_dtype>(3);
  EXPECT_EQ(refused(call), "attend.q_dtype");
  call = right;
  const int32_t entry = 0;
  call.list_entries = &entry;
  EXPECT_EQ(refused(call), "attend.list_begin");
  call = right;
  call.profile = MLA_PROFILE_APPEND_ONLY;
  call.kv = nullptr;
  EXPECT_EQ(refused(call), "attend.kv");
  EXPECT_EQ(mla_step_attend(step, &right, nullptr, nullptr), MLA_OK);
  EXPECT_EQ(mla_step_abort(step, nullptr), MLA_OK);
  EXPECT_EQ(mla_sequence_length(sequence), 0u);
  mla_step_free(step);
  mla_session_free(session);
  mla_sequence_free(sequence);
}

// Weights arrive complete although a message holds only one head's weights.
TEST(CClientTest, WeightsAreCutByHeads) {
  const TestServer server([](server::Config& config) { config.wire.weight_chunk_bytes = 2048; });
  const ClientHandle client = Connect(server);
  const mla_model model = SmallModel();
  ASSERT_EQ(mla_register_model(client.get(), &model, nullptr, nullptr), MLA_OK);
  const std::vector<uint16_t> w_uk(2 * 16 * 32), w_uv(2 * 32 * 16);
  const mla_weights first = {0, 0, 1, w_uk.data(), w_uv.data()};
  const mla_weights second = {0, 1, 1, w_uk.data(), w_uv.data()};
  const mla_weights both = {0, 0, 2, w_uk.data(), w_uv.data()};
  int32_t complete = -1;
  mla_error* error = nullptr;
  ASSERT_EQ(mla_upload_weights(client.get(), "m", &first, 1, &complete, &error), MLA_OK)
      << mla_error_message(error);
  EXPECT_EQ(complete, 0);
  ASSERT_EQ(mla_upload_weights(client.get(), "m", &second, 1, &complete, &error), MLA_OK)
      << mla_error_message(error);
  EXPECT_EQ(complete, 1);
  EXPECT_EQ(mla_upload_weights(client.get(), "m", &both, 1, &complete, &error), MLA_OK)
      << mla_error_message(error);
  EXPECT_EQ(mla_upload_weights(client.get(), "absent", &both, 1, &complete, &error),
            MLA_FAILED_PRECONDITION);
  mla_error_free(error);
}

}  // namespace
}  // namespace mla::integration
