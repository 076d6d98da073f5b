// Moves and restores of models with a window. Sinks travel with the rows, and rows are refused if
// the sinks differ.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/test_server.h"
#include "tests/integration/window_worker.h"

namespace mla::integration {
namespace {

constexpr uint32_t kDeadlineMs = 20000;

class WindowMovesTest : public ::testing::Test {
 protected:
  // With mutual TLS; blue and other servers are operators.
  std::unique_ptr<TestServer> Serve() {
    return std::make_unique<TestServer>([&](server::Config& config) {
      config.tls.cert = authority_.File("server.pem");
      config.tls.key = authority_.File("server.key");
      config.tls.client_ca = authority_.File("ca.pem");
      config.listen.operators = "blue,localhost";
      config.listen.unix_path = "";
      config.checkpoint.path = folder_.File(absl::StrCat("checkpoints", ++servers_));
    });
  }
  std::unique_ptr<client::Client> Connect(const TestServer& server, const std::string& name) {
    client::ClientOptions options = authority_.As(name);
    options.sequence_lease_ms = 60000;
    auto client = client::Client::Connect(server.tcp_target(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  // Registers a model that waits for its sinks, and uploads them.
  void Register(client::Client* client, const std::vector<float>& sinks) {
    v1::ModelSpec spec = worker_.Spec("w");
    spec.set_needs_sinks(true);
    ASSERT_TRUE(client->RegisterModel(spec).ok());
    const auto uploaded = client->UploadSinks("w", sinks);
    ASSERT_TRUE(uploaded.ok()) << uploaded.status();
    EXPECT_TRUE(uploaded->complete());
  }
  // A sequence of 97 rows on the server.
  void Fill() {
    Register(red_.get(), worker_.sinks());
    session_ = *red_->OpenSession();
    sequence_ = *red_->OpenSequence("w");
    for (const uint32_t rows : {7, 90}) ExpectGoesOn(session_.get(), &*sequence_, rows);
  }
  void ExpectGoesOn(client::Session* session, client::Sequence* sequence, uint32_t rows) {
    EXPECT_EQ(worker_.Step(session, "w", sequence, &text_, rows), absl::OkStatus());
  }
  v1::HandedOver Drain(const TestServer& to) {
    const auto drained =
        Connect(*a_, "blue")
            ->Drain(kDeadlineMs, false, {absl::StrCat("localhost:", to.server().tcp_port())});
    EXPECT_TRUE(drained.ok()) << drained.status();
    if (!drained.ok() || drained->handed_over_size() != 1) return {};
    return drained->handed_over(0);
  }
  std::vector<float> OtherSinks() {
    std::vector<float> sinks = worker_.sinks();
    sinks.back() += 1;
    return sinks;
  }

  const TempFolder folder_;
  Authority authority_;
  int servers_ = 0;
  WindowWorker worker_{5};
  WindowText text_;
  std::unique_ptr<TestServer> a_ = Serve();
  std::unique_ptr<client::Client> red_ = Connect(*a_, "red");
  std::unique_ptr<client::Session> session_;
  std::optional<client::Sequence> sequence_;
};

TEST_F(WindowMovesTest, ADrainBringsTheSinksToAPeerWithoutTheModel) {
  Fill();
  const auto b = Serve();
  const v1::HandedOver outcome = Drain(*b);
  ASSERT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_MOVED) << outcome.message();
  const auto there = Connect(*b, "red");
  const auto models = there->ListModels();
  ASSERT_EQ(models->models_size(), 1);
  EXPECT_TRUE(models->models(0).model().needs_sinks());
  EXPECT_TRUE(models->models(0).sinks_complete());
  const auto session = *there->OpenSession();
  auto moved = there->Attach(sequence_->id());
  ASSERT_TRUE(moved.ok()) << moved.status();
  EXPECT_EQ(moved->length(), 97u);
  for (const uint32_t rows : {1, 9}) ExpectGoesOn(session.get(), &*moved, rows);
  EXPECT_EQ(client::DetailOf(there->UploadSinks("w", OtherSinks()).status())->reason(),
            "sinks_differ");
}

TEST_F(WindowMovesTest, ADrainBringsTheSinksToAPeerWhoseModelWaitsForThem) {
  Fill();
  const auto b = Serve();
  const auto there = Connect(*b, "red");
  v1::ModelSpec spec = worker_.Spec("w");
  spec.set_needs_sinks(true);
  ASSERT_TRUE(there->RegisterModel(spec).ok());
  ASSERT_FALSE(there->ListModels()->models(0).sinks_complete());
  const v1::HandedOver outcome = Drain(*b);
  ASSERT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_MOVED) << outcome.message();
  EXPECT_TRUE(there->ListModels()->models(0).sinks_complete());
  const auto session = *there->OpenSession();
  auto moved = there->Attach(sequence_->id());
  ASSERT_TRUE(moved.ok()) << moved.status();
  ExpectGoesOn(session.get(), &*moved, 5);
}

// Workers need not bring them again, although no sequence has taken them along.
TEST_F(WindowMovesTest, SinksGoWithoutSequences) {
  Register(red_.get(), worker_.sinks());
  const auto b = Serve(), waiting = Serve(), other = Serve();
  const auto there = Connect(*b, "red");
  v1::ModelSpec spec = worker_.Spec("w");
  spec.set_needs_sinks(true);
  ASSERT_TRUE(Connect(*waiting, "red")->RegisterModel(spec).ok());
  ASSERT_TRUE(Connect(*other, "red")->RegisterModel(spec).ok());
  ASSERT_TRUE(Connect(*other, "red")->UploadSinks("w", OtherSinks()).ok());
  for (const TestServer* const to : {b.get(), waiting.get(), other.get()}) {
    const auto blue = Connect(*a_, "blue");
    const auto drained =
        blue->Drain(kDeadlineMs, false, {absl::StrCat("localhost:", to->server().tcp_port())});
    ASSERT_TRUE(drained.ok()) << drained.status();
    EXPECT_EQ(drained->handed_over_size(), 0);
    ASSERT_TRUE(blue->CancelDrain().ok());
    const auto models = Connect(*to, "red")->ListModels();
    ASSERT_EQ(models->models_size(), 1);
    EXPECT_TRUE(models->models(0).model().needs_sinks());
    EXPECT_TRUE(models->models(0).sinks_complete());
  }
  const std::string sent = HttpGet(a_->server().ops_port(), "/metrics");
  for (const char* const outcome : {"outcome=\"moved\"} 2", "outcome=\"refused\"} 1"}) {
    EXPECT_NE(sent.find(absl::StrCat("mla_hand_over_weights_total{", outcome)), std::string::npos)
        << sent;
  }
  // A step computes with them, against the worker's own model; a model that has others keeps them.
  for (const TestServer* const to : {b.get(), waiting.get()}) {
    const auto client = Connect(*to, "red");
    const auto session = *client->OpenSession();
    auto sequence = client->OpenSequence("w");
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    text_ = {};
    ExpectGoesOn(session.get(), &*sequence, 5);
  }
  const auto client = Connect(*other, "red");
  auto open = client->OpenSequence("w");
  ASSERT_TRUE(open.ok()) << open.status();
  EXPECT_TRUE(client->UploadSinks("w", OtherSinks()).ok());
  EXPECT_EQ(client::DetailOf(client->UploadSinks("w", worker_.sinks()).status())->reason(),
            "sinks_differ");
}

TEST_F(WindowMovesTest, ADrainBringsAModelWhoseHeadsHaveNoSinks) {
  worker_.sinks().assign(worker_.sinks().size(), -std::numeric_limits<float>::infinity());
  Fill();
  const auto b = Serve();
  const v1::HandedOver outcome = Drain(*b);
  ASSERT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_MOVED) << outcome.message();
  const auto there = Connect(*b, "red");
  EXPECT_TRUE(there->ListModels()->models(0).sinks_complete());
  const auto session = *there->OpenSession();
  auto moved = there->Attach(sequence_->id());
  ASSERT_TRUE(moved.ok()) << moved.status();
  ExpectGoesOn(session.get(), &*moved, 5);
}

TEST_F(WindowMovesTest, ADrainLeavesWhatThePeerHasUnderOtherSinks) {
  Fill();
  const auto b = Serve();
  Register(Connect(*b, "red").get(), OtherSinks());
  const v1::HandedOver outcome = Drain(*b);
  EXPECT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_REFUSED) << outcome.message();
  EXPECT_EQ(outcome.reason(), "import_differs");
  ASSERT_TRUE(Connect(*a_, "blue")->CancelDrain().ok());
  ExpectGoesOn(session_.get(), &*sequence_, 3);
}

TEST_F(WindowMovesTest, ACheckpointIsOfTheSinksThatItWasMadeUnder) {
  Fill();
  const uint64_t id = sequence_->id();
  ASSERT_TRUE(red_->Checkpoint({id}).ok());
  ASSERT_TRUE(sequence_->Release().ok());
  ASSERT_TRUE(red_->UnregisterModel("w").ok());
  Register(red_.get(), OtherSinks());
  const auto detail = client::DetailOf(red_->Restore({id}).status());
  ASSERT_TRUE(detail.has_value());
  EXPECT_EQ(detail->reason(), "import_differs");
  EXPECT_EQ(detail->field(), "part.header.sinks");
  ASSERT_TRUE(red_->UploadSinks("w", worker_.sinks()).ok());  // nothing was opened
  auto restored = red_->Restore({id});
  ASSERT_TRUE(restored.ok()) << restored.status();
  ExpectGoesOn(session_.get(), &restored->front(), 5);
}

}  // namespace
}  // namespace mla::integration
