// Clients whose server sends arbitrary replies. The C++ library, the C library and mlactl report an
// error within bounded time, and their process goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/printable.h"
#include "client/c/mla_client.h"
#include "client/cpp/client.h"
#include "client/cpp/pages_file.h"
#include "client/cpp/session.h"
#include "mla/v1/attention.pb.h"
#include "tests/integration/hostile/hostile_server.h"
#include "tests/integration/processes.h"

namespace mla::integration {
namespace {

constexpr char kInfo[] = "/mla.v1.Admin/GetServerInfo";
constexpr char kImport[] = "/mla.v1.Cache/Import";
constexpr char kRenew[] = "/mla.v1.Sequences/RenewLease";
constexpr char kUpload[] = "/mla.v1.Models/UploadWeights";

HostileAnswer Of(std::vector<std::string> messages) {
  HostileAnswer answer;
  answer.messages = std::move(messages);
  return answer;
}

// A call with one reply gets status OK and bytes that are not a message.
std::vector<HostileAnswer> NoReplies() {
  std::vector<HostileAnswer> answers = {Of({"\xff\xff\xff\xff"}), Of({}), Of({"", ""})};
  answers.push_back(Of({"\xff\xff\xff\xff"}));
  answers.back().ends = false;
  answers.push_back(Of({"\xff\xff\xff\xff"}));
  answers.back().reads = false;
  return answers;
}

class HostileRepliesTest : public ::testing::Test {
 protected:
  HostileRepliesTest() {
    v1::GetServerInfoReply info;
    info.set_boot_id(1);
    info.mutable_limits()->set_max_tail_bytes(64);
    server_.Answer(kInfo, Of({info.SerializeAsString()}));
    client::ClientOptions options;
    options.call_timeout_ms = 2000;
    options.request_timeout_ms = 2000;
    options.renew_leases = false;
    auto client = client::Client::Connect(server_.target(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }

  HostileServer server_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(HostileRepliesTest, ImportsAndUploadsReportRepliesThatAreNone) {
  for (const HostileAnswer& answer : NoReplies()) {
    server_.Answer(kImport, answer);
    int parts = 0;
    const auto imported =
        client_->ImportPages({}, [&]() -> absl::StatusOr<std::optional<v1::PagesPart>> {
          if (++parts > 3) return std::nullopt;
          return v1::PagesPart();
        });
    EXPECT_EQ(imported.status().code(), absl::StatusCode::kInternal) << imported.status();
    server_.Answer(kUpload, answer);
    int chunks = 0;
    const auto uploaded = client_->UploadWeights("m", [&]() -> std::optional<client::WeightsChunk> {
      if (++chunks > 3) return std::nullopt;
      return client::WeightsChunk{0, 0, 1, std::string(1 << 20, 'w')};
    });
    EXPECT_EQ(uploaded.status().code(), absl::StatusCode::kInternal) << uploaded.status();
  }
}

TEST_F(HostileRepliesTest, StreamsOfRepliesEndWithTheFirstThatIsNone) {
  HostileAnswer garbage = Of({"", "\xff\xff\xff\xff", "", ""});
  garbage.ends = false;
  for (const char* const method :
       {"/mla.v1.Cache/Export", "/mla.v1.Cache/WatchEvents", "/mla.v1.Admin/WatchStatus"}) {
    server_.Answer(method, garbage);
  }
  int seen = 0;
  const absl::Status exported = client_->ExportPages({}, [&](const v1::PagesPart&) {
    ++seen;
    return absl::OkStatus();
  });
  const absl::Status events = client_->WatchEvents(0, [&](const v1::WatchEventsReply&) {
    ++seen;
    return true;
  });
  const absl::Status status = client_->WatchStatus(0, [&](const v1::StatusUpdate&) {
    ++seen;
    return true;
  });
  for (const absl::Status& one : {exported, events, status}) {
    EXPECT_EQ(one.code(), absl::StatusCode::kInternal) << one;
  }
  EXPECT_EQ(seen, 3);
}

TEST_F(HostileRepliesTest, UnaryCallsReportRepliesThatAreNone) {
  for (const HostileAnswer& answer : {Of({"\xff\xff"}), Of({})}) {
    server_.Answer("/mla.v1.Admin/GetStats", answer);
    const auto stats = client_->GetStats();
    EXPECT_EQ(stats.status().code(), absl::StatusCode::kInternal) << stats.status();
  }
  HostileAnswer failing;
  failing.status = {static_cast<grpc::StatusCode>(9999), "no such code"};
  server_.Answer("/mla.v1.Admin/GetStats", failing);
  EXPECT_EQ(client_->GetStats().status().raw_code(), static_cast<int>(absl::StatusCode::kUnknown));
}

v1::ModelSpec Model(uint32_t v_dim) {
  v1::ModelSpec model;
  model.set_model_id("m");
  model.set_layers(1);
  for (const auto set : {&v1::Geometry::set_num_heads, &v1::Geometry::set_kv_lora_rank,
                         &v1::Geometry::set_rope_dim, &v1::Geometry::set_nope_dim}) {
    (model.mutable_geometry()->*set)(1);
  }
  model.mutable_geometry()->set_v_dim(v_dim);
  return model;
}

// Model(v_dim) for the C library.
mla_model ModelOfC(uint32_t v_dim) {
  mla_model model{};
  model.struct_size = sizeof(model);
  model.model_id = "m";
  model.layers = model.num_heads = model.kv_lora_rank = model.rope_dim = model.nope_dim = 1;
  model.v_dim = v_dim;
  return model;
}

// The server registers and lists this model.
void AnswerModel(HostileServer& server, uint32_t v_dim) {
  v1::RegisterReply registered;
  registered.set_boot_id(1);
  *registered.mutable_model() = Model(v_dim);
  server.Answer("/mla.v1.Models/Register", Of({registered.SerializeAsString()}));
  v1::ListModelsReply listed;
  listed.set_boot_id(1);
  *listed.add_models()->mutable_model() = Model(v_dim);
  server.Answer("/mla.v1.Models/List", Of({listed.SerializeAsString()}));
}

// With a larger shape, calls would read and write beyond the caller's memory.
TEST_F(HostileRepliesTest, AModelHasTheShapeThatWasRegistered) {
  AnswerModel(server_, 1 << 20);
  EXPECT_EQ(client_->RegisterModel(Model(4)).status().code(), absl::StatusCode::kDataLoss);
  AnswerModel(server_, 4);
  ASSERT_TRUE(client_->RegisterModel(Model(4)).ok());
  ASSERT_TRUE(client_->ListModels().ok());
  AnswerModel(server_, 5);
  const auto session = *client_->OpenSession();
  EXPECT_EQ(session->Begin("m", {}).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(HostileRepliesTest, TailsAndLengthsAreWhatWasAskedFor) {
  v1::OpenReply opened;
  opened.set_boot_id(1);
  opened.mutable_sequence()->set_sequence_id(7);
  server_.Answer("/mla.v1.Sequences/Open", Of({opened.SerializeAsString()}));
  auto sequence = *client_->OpenSequence("m");
  for (const auto& [bytes, part] : std::vector<std::pair<uint64_t, std::string>>{
           {uint64_t{1} << 63, ""}, {uint64_t{1} << 63, "x"}, {65, "x"}, {2, "xxx"}, {64, ""}}) {
    v1::ReadTailReply tail;
    tail.set_boot_id(1);
    tail.set_tail_bytes(bytes);
    tail.set_tail(part);
    server_.Answer("/mla.v1.Sequences/ReadTail", Of({tail.SerializeAsString()}));
    EXPECT_EQ(sequence.ReadTail().status().code(), absl::StatusCode::kDataLoss) << bytes << part;
  }
  v1::ListModelsReply models;
  models.set_boot_id(1);
  *models.add_models()->mutable_model() = Model(4);
  server_.Answer("/mla.v1.Models/List", Of({models.SerializeAsString()}));
  for (const int lengths : {0, 2}) {
    v1::AttendStreamReply begun, ended;
    begun.set_tag(1);
    begun.set_boot_id(1);
    begun.mutable_begin_step()->set_total_rows(1);
    ended.set_tag(2);
    ended.set_boot_id(1);
    ended.mutable_end_step();
    for (int i = 0; i < lengths; ++i) ended.mutable_end_step()->add_lengths(9);
    HostileAnswer attend = Of({begun.SerializeAsString(), ended.SerializeAsString()});
    attend.reads = attend.ends = false;
    server_.Answer("/mla.v1.Attention/Attend", attend);
    const auto session = *client_->OpenSession();
    const auto step = session->Begin("m", {{&sequence, 1}});
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_EQ((*step)->End().status().code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(sequence.length(), 0u);
  }
  sequence.Detach();
}

TEST_F(HostileRepliesTest, TheCLibraryReportsUploadsWithoutReply) {
  mla_client* client = nullptr;
  mla_error* error = nullptr;
  ASSERT_EQ(mla_connect(server_.target().c_str(), nullptr, &client, &error), MLA_OK)
      << mla_error_message(error);
  const uint16_t weights[4] = {};
  const mla_weights head = {0, 0, 1, weights, weights};
  // Sizes come from the shape that the caller registered, never from the server.
  AnswerModel(server_, 1 << 20);
  EXPECT_EQ(mla_upload_weights(client, "m", &head, 1, nullptr, &error), MLA_FAILED_PRECONDITION);
  EXPECT_THAT(mla_error_message(error), ::testing::HasSubstr("model_id: this client has not"));
  mla_error_free(error);
  AnswerModel(server_, 4);
  const mla_model model = ModelOfC(4);
  ASSERT_EQ(mla_register_model(client, &model, nullptr, &error), MLA_OK)
      << mla_error_message(error);
  for (const HostileAnswer& answer : NoReplies()) {
    server_.Answer(kUpload, answer);
    EXPECT_EQ(mla_upload_weights(client, "m", &head, 1, nullptr, &error), MLA_INTERNAL);
    mla_error_free(error);
  }
  mla_client_free(client);
}

TEST_F(HostileRepliesTest, TheCLibraryTakesNoOtherShapeAndNoOtherLengths) {
  mla_connect_options options{};
  options.struct_size = sizeof(options);
  options.request_timeout_ms = 2000;  // of the abort at the end, which gets no answer
  mla_client* client = nullptr;
  ASSERT_EQ(mla_connect(server_.target().c_str(), &options, &client, nullptr), MLA_OK);
  const mla_model model = ModelOfC(4);
  AnswerModel(server_, 1 << 20);
  EXPECT_EQ(mla_register_model(client, &model, nullptr, nullptr), MLA_DATA_LOSS);
  AnswerModel(server_, 4);
  EXPECT_EQ(mla_register_model(client, &model, nullptr, nullptr), MLA_OK);

  v1::OpenReply opened;
  opened.set_boot_id(1);
  opened.mutable_sequence()->set_sequence_id(7);
  server_.Answer("/mla.v1.Sequences/Open", Of({opened.SerializeAsString()}));
  mla_sequence* sequence = nullptr;
  ASSERT_EQ(mla_sequence_open(client, "m", nullptr, &sequence, nullptr), MLA_OK);
  v1::AttendStreamReply begun, ended;
  begun.set_tag(1);
  ended.set_tag(2);
  for (v1::AttendStreamReply* const reply : {&begun, &ended}) reply->set_boot_id(1);
  begun.mutable_begin_step()->set_total_rows(1);
  ended.mutable_end_step();  // without the length of the step's sequence
  HostileAnswer attend = Of({begun.SerializeAsString(), ended.SerializeAsString()});
  attend.reads = attend.ends = false;
  server_.Answer("/mla.v1.Attention/Attend", attend);
  mla_session* session = nullptr;
  mla_step* step = nullptr;
  ASSERT_EQ(mla_session_open(client, &session, nullptr), MLA_OK);
  const mla_step_rows rows = {sequence, 1};
  ASSERT_EQ(mla_step_begin(session, "m", &rows, 1, nullptr, &step, nullptr), MLA_OK);
  EXPECT_EQ(mla_step_end(step, nullptr, nullptr), MLA_DATA_LOSS);
  EXPECT_EQ(mla_sequence_length(sequence), 0u);
  mla_step_free(step);
  mla_session_free(session);
  mla_sequence_free(sequence);
  mla_client_free(client);
}

// Waits until the server has got as many renewals more. The thread that sends them has no one to
// tell when it ends, and all sequences would end with their leases.
void AwaitRenewals(const HostileServer& server, int count) {
  const int before = server.calls(kRenew);
  while (server.calls(kRenew) < before + count) std::this_thread::yield();
}

TEST_F(HostileRepliesTest, RenewalsGoOnWhateverTheServerAnswers) {
  HostileAnswer undecodable;
  undecodable.status = {grpc::StatusCode::FAILED_PRECONDITION, "a proxy is between"};
  undecodable.trailers = {{"mla-error-detail-bin", "\xff\xff\xff"}};
  client::ClientOptions options;
  options.sequence_lease_ms = 300;
  mla_connect_options c_options{};
  c_options.struct_size = sizeof(c_options);
  c_options.sequence_lease_ms = 300;
  for (const HostileAnswer& answer : {Of({"\xff\xff\xff\xff"}), Of({}), undecodable}) {
    server_.Answer(kRenew, answer);
    {
      const auto client = client::Client::Connect(server_.target(), options);
      ASSERT_TRUE(client.ok()) << client.status();
      AwaitRenewals(server_, 4);
    }
    mla_client* client = nullptr;
    ASSERT_EQ(mla_connect(server_.target().c_str(), &c_options, &client, nullptr), MLA_OK);
    AwaitRenewals(server_, 4);
    mla_client_free(client);
  }
}

TEST_F(HostileRepliesTest, MlactlReportsAnImportWithoutReply) {
  const TempFolder folder;
  const std::string file = folder.File("rows.mlapages");
  {
    auto pages = *client::PagesFileWriter::Create(file, std::nullopt);
    v1::PagesPart part;
    part.mutable_header()->set_rows(1);
    ASSERT_TRUE(pages->Add(part).ok());
    part.mutable_trailer();
    ASSERT_TRUE(pages->Add(part).ok());
    ASSERT_TRUE(pages->Finish().ok());
  }
  for (const HostileAnswer& answer : NoReplies()) {
    server_.Answer(kImport, answer);
    const Result result =
        Shell(absl::StrCat(kMlactl, " --target=", server_.target(), " import m ", file));
    EXPECT_EQ(result.code, 3) << result.output;
    EXPECT_NE(result.output.find("mlactl: INTERNAL: "), std::string::npos) << result.output;
  }
}

// Ends a line and begins a forged one, clears the screen, and reverses text.
constexpr char kForged[] = "x\nmlactl: all is well\x1b[2J\u009b2J\u202egpj\u2028y";

TEST_F(HostileRepliesTest, MlactlPrintsNothingThatControlsATerminal) {
  v1::GetServerInfoReply info;
  info.set_boot_id(1);
  info.set_server_version(kForged);
  info.add_capabilities(kForged);
  info.mutable_backend()->set_name(kForged);
  info.add_backends()->set_reason(kForged);
  server_.Answer(kInfo, Of({info.SerializeAsString()}));
  v1::GetReply sequences;
  sequences.set_boot_id(1);
  sequences.add_sequences()->set_client_id(kForged);
  server_.Answer("/mla.v1.Sequences/Get", Of({sequences.SerializeAsString()}));
  v1::StatusUpdate update;
  update.set_message(kForged);
  server_.Answer("/mla.v1.Admin/WatchStatus", Of({update.SerializeAsString()}));
  v1::WatchEventsReply events;
  events.add_events()->set_model_id(kForged);
  server_.Answer("/mla.v1.Cache/WatchEvents", Of({events.SerializeAsString()}));
  v1::ErrorDetail detail;
  detail.set_reason(kForged);
  HostileAnswer failing;
  failing.status = {grpc::StatusCode::INTERNAL, kForged};
  failing.trailers = {{"mla-error-detail-bin", detail.SerializeAsString()}};
  server_.Answer("/mla.v1.Models/List", failing);
  for (const char* const words :
       {"info", "info --json", "sequences", "sequences --json", "watch --count=1",
        "watch --count=1 --json", "events --count=1", "events --count=1 --json", "models"}) {
    const std::string output =
        Shell(absl::StrCat(kMlactl, " --target=", server_.target(), " ", words)).output;
    EXPECT_NE(output.find("gpj"), std::string::npos) << words << output;
    for (const absl::string_view line : absl::StrSplit(output, '\n')) {
      EXPECT_TRUE(base::IsPrintable({line.data(), line.size()})) << words << ": " << line;
      EXPECT_NE(line, "mlactl: all is well") << words;
    }
  }
}

}  // namespace
}  // namespace mla::integration
