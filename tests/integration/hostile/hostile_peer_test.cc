// A drain to a peer that holds a certificate of the authority and sends arbitrary replies. The
// server keeps running, keeps its sequences and spends little on the replies.
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/cache.pb.h"
#include "mla/v1/model.pb.h"
#include "tests/integration/hand_over/hand_over_fixture.h"
#include "tests/integration/hostile/hostile_server.h"

namespace mla::integration {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr uint64_t kBootId = 77;
constexpr char kInfo[] = "/mla.v1.Admin/GetServerInfo";
constexpr char kQuota[] = "/mla.v1.Admin/GetQuota";
constexpr char kEvict[] = "/mla.v1.Admin/EvictSequences";
constexpr char kImport[] = "/mla.v1.Cache/Import";
constexpr char kUpload[] = "/mla.v1.Models/UploadWeights";

HostileAnswer Of(std::vector<std::string> messages) {
  HostileAnswer answer;
  answer.messages = std::move(messages);
  return answer;
}

std::string InfoBytes(uint64_t boot_id) {
  v1::GetServerInfoReply info;
  info.set_boot_id(boot_id);
  info.add_capabilities("hand_over");
  return info.SerializeAsString();
}

// `bytes` of empty messages in the field with this number. Each takes two bytes here, and about
// seventy once it is parsed.
std::string EmptyMessages(int field, size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; i += 2) text[i] = static_cast<char>(field << 3 | 2);
  return text;
}

// This process's peak resident memory, in bytes.
size_t PeakBytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoull(line.substr(6)) * 1024;
  }
  return 0;
}

class HostilePeerTest : public HandOverTest {
 protected:
  HostilePeerTest() : peer_(Credentials()) { BehaveWell(); }

  void BehaveWell() {
    peer_.Answer(kInfo, Of({InfoBytes(kBootId)}));
    v1::GetQuotaReply quota;
    quota.add_server()->set_name("sequences");
    peer_.Answer(kQuota, Of({quota.SerializeAsString()}));
    v1::EvictSequencesReply evicted;
    evicted.set_boot_id(kBootId);
    peer_.Answer(kEvict, Of({evicted.SerializeAsString()}));
  }
  std::string address() const { return Address(peer_.port()); }
  // Drains to a peer that answers Import with `answer`, and expects that the sequence stays, for a
  // reason.
  void ExpectKept(const HostileAnswer& answer, const std::string& what) {
    SCOPED_TRACE(what);
    peer_.Answer(kImport, answer);
    const int imports = peer_.calls(kImport);
    const auto drained = Drain(address());
    ASSERT_TRUE(drained.ok()) << drained.status();
    EXPECT_GT(peer_.calls(kImport), imports);
    const v1::HandedOver& outcome = OutcomeOf(*drained, tracks_[0]);
    EXPECT_EQ(outcome.outcome(), v1::HAND_OVER_OUTCOME_KEPT) << outcome.message();
    EXPECT_EQ(outcome.reason(), "peer_failed") << outcome.message();
    EXPECT_NE(outcome.message(), "");
    ASSERT_TRUE(blue_->CancelDrain().ok());
    ExpectHere(&tracks_[0]);
  }

  HostileServer peer_;

 private:
  std::shared_ptr<grpc::ServerCredentials> Credentials() const {
    grpc::SslServerCredentialsOptions ssl;
    ssl.pem_key_cert_pairs = {{authority_.Read("server.key"), authority_.Read("server.pem")}};
    return grpc::SslServerCredentials(ssl);
  }
};

TEST_F(HostilePeerTest, AnswersOfAnImportThatAreNoneKeepTheSequence) {
  Fill(1);
  v1::ImportReply other;
  other.set_boot_id(kBootId);
  other.mutable_sequence()->set_sequence_id(1);
  // Field 1 of a reply is the sequence, whose text fields must be UTF-8.
  std::string no_utf8 = other.SerializeAsString();
  v1::SequenceInfo info;
  info.set_model_id("model");
  const std::string named = info.SerializeAsString();
  no_utf8 = absl::StrCat("\x0a", std::string(1, static_cast<char>(named.size())), named);
  no_utf8.replace(no_utf8.find("model"), 5, "\xff\xfe\xfd\xfc\xfb");
  ExpectKept(Of({"\xff\xff\xff\xff"}), "no message");
  ExpectKept(Of({no_utf8}), "no UTF-8");
  ExpectKept(Of({}), "OK without a reply");
  ExpectKept(Of({other.SerializeAsString()}), "another sequence");
  ExpectKept(Of({other.SerializeAsString(), other.SerializeAsString()}), "two replies");
  HostileAnswer open = Of({"\xff\xff\xff\xff"});
  open.ends = false;
  ExpectKept(open, "no message, and no end of the call");
  HostileAnswer hasty = Of({"\xff\xff\xff\xff"});
  hasty.reads = false;
  ExpectKept(hasty, "no message, before any row");
  HostileAnswer failing;
  failing.status = {static_cast<grpc::StatusCode>(9999), "no such code"};
  ExpectKept(failing, "a code that there is not");
  EXPECT_GT(peer_.calls(kEvict), 0);
}

// Weights are lost to the peer alone: the drain goes on with the sequences.
TEST_F(HostilePeerTest, AnswersOfAnUploadThatAreNoneCostNothing) {
  Fill(1);
  ASSERT_EQ(worker_->Upload(), absl::OkStatus());
  const HostileAnswer garbage = Of({"\xff\xff\xff\xff"});
  ExpectKept(garbage, "a peer that takes no weights");
  EXPECT_EQ(peer_.calls(kUpload), 0);
  v1::GetServerInfoReply info;
  info.set_boot_id(kBootId);
  info.add_capabilities("hand_over");
  info.add_capabilities("hand_over_weights");
  peer_.Answer(kInfo, Of({info.SerializeAsString()}));
  v1::UploadWeightsReply other, incomplete, many;
  other.set_boot_id(kBootId + 1);
  other.set_complete(true);
  incomplete.set_boot_id(kBootId);
  many.set_boot_id(kBootId);
  many.set_complete(true);
  many.set_bytes(uint64_t{1} << 60);
  HostileAnswer hasty = garbage, failing;
  hasty.reads = false;
  failing.status = {static_cast<grpc::StatusCode>(9999), "no such code"};
  int failed = 0;
  for (const HostileAnswer& answer :
       {garbage, Of({}), Of({EmptyMessages(1, 60 * kMiB)}), Of({other.SerializeAsString()}),
        Of({incomplete.SerializeAsString()}), Of({many.SerializeAsString()}),
        Of({many.SerializeAsString(), many.SerializeAsString()}), hasty, failing}) {
    peer_.Answer(kUpload, answer);
    ExpectKept(garbage, absl::StrCat("answer ", ++failed));
    EXPECT_EQ(peer_.calls(kUpload), failed);
    const std::string metrics = HttpGet(a_->server().ops_port(), "/metrics");
    EXPECT_NE(
        metrics.find(absl::StrCat("mla_hand_over_weights_total{outcome=\"failed\"} ", failed)),
        std::string::npos)
        << metrics;
    EXPECT_EQ(worker_->Step({&tracks_[0]}, {1}, v1::PROFILE_EXPANDED), absl::OkStatus());
  }
  // A peer that takes parts. Unless it accepts the first call, no part follows.
  info.add_capabilities("hand_over_weight_parts");
  peer_.Answer(kInfo, Of({info.SerializeAsString()}));
  const auto expect_failed = [&](HostileAnswer answer, int calls) {
    peer_.Answer(kUpload, answer);
    const int before = peer_.calls(kUpload);
    ExpectKept(garbage, absl::StrCat("answer ", ++failed));
    EXPECT_EQ(peer_.calls(kUpload) - before, calls);
    EXPECT_NE(HttpGet(a_->server().ops_port(), "/metrics")
                  .find(absl::StrCat("mla_hand_over_weights_total{outcome=\"failed\"} ", failed)),
              std::string::npos);
    EXPECT_EQ(worker_->Step({&tracks_[0]}, {1}, v1::PROFILE_EXPANDED), absl::OkStatus());
  };
  HostileAnswer silent = hasty;
  silent.messages.clear();
  for (const HostileAnswer& answer : {hasty, silent}) expect_failed(answer, 1);
  const int streams = server::Config().hand_over_streams;
  for (HostileAnswer answer : {garbage, Of({}), Of({other.SerializeAsString()}),
                               Of({incomplete.SerializeAsString()}), Of({many.SerializeAsString()}),
                               Of({many.SerializeAsString(), many.SerializeAsString()}), failing}) {
    answer.initial["mla-accepted"] = "1";
    expect_failed(answer, streams);
  }
}

TEST_F(HostilePeerTest, AnswersAreBoundedBeforeTheyAreParsed) {
  Fill(1);
  const std::string large = EmptyMessages(1, 60 * kMiB);
  for (const bool compressed : {false, true}) {
    for (const char* const method : {kInfo, kQuota}) {
      BehaveWell();
      HostileAnswer answer = Of({large});
      answer.compressed = compressed;
      peer_.Answer(method, answer);
      const size_t before = PeakBytes();
      const auto drained = Drain(address());
      EXPECT_FALSE(drained.ok()) << method;
      // This process holds the bytes themselves, too: at most three copies while they are sent.
      EXPECT_LT(PeakBytes() - before, 400 * kMiB) << method << compressed;
      EXPECT_TRUE(*red_->IsServing());
    }
    BehaveWell();
    HostileAnswer answer = Of({large});
    answer.compressed = compressed;
    const size_t before = PeakBytes();
    ExpectKept(answer, "a large reply");
    EXPECT_LT(PeakBytes() - before, 400 * kMiB) << compressed;
  }
}

TEST_F(HostilePeerTest, AnswersBeforeTheFirstSequenceRefuseTheDrain) {
  Fill(1);
  const auto expect_refused = [&](const char* what) {
    const auto drained = Drain(address());
    EXPECT_FALSE(drained.ok()) << what;
    const auto detail = client::DetailOf(drained.status());
    ASSERT_TRUE(detail.has_value()) << what << drained.status();
    EXPECT_EQ(detail->field(), "to") << what;
    EXPECT_NE(detail->reason(), "") << what;
    EXPECT_TRUE(*red_->IsServing()) << what;
  };
  for (const char* const method : {kInfo, kQuota}) {
    for (const HostileAnswer& answer : {Of({"\xff\xff"}), Of({}), Of({"", ""})}) {
      BehaveWell();
      peer_.Answer(method, answer);
      expect_refused(method);
    }
    BehaveWell();
    HostileAnswer failing;
    failing.status = {static_cast<grpc::StatusCode>(9999), "\x1b[31mno such code"};
    peer_.Answer(method, failing);
    expect_refused(method);
  }
  BehaveWell();
  peer_.Answer(kInfo, Of({InfoBytes(0)}));
  expect_refused("a boot id of 0");
  EXPECT_EQ(peer_.calls(kImport), 0);
}

}  // namespace
}  // namespace mla::integration
