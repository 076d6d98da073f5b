// Two servers with mutual TLS, of which one has a model with weights; and the messages of a
// transfer of weights, as a server that drains sends them.
#ifndef MLA_TESTS_INTEGRATION_HAND_OVER_WEIGHTS_FIXTURE_H_
#define MLA_TESTS_INTEGRATION_HAND_OVER_WEIGHTS_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "mla/v1/model.grpc.pb.h"
#include "tests/integration/hand_over/hand_over_fixture.h"
#include "tests/integration/worker.h"

namespace mla::integration {

using Message = v1::UploadWeightsRequest;

// [heads, nope, lora] and [heads, lora, v] of two layers, bf16.
inline constexpr uint64_t kWeightBytes = 2 * 4 * 32 * (16 + 16) * 2;

class WeightsTest : public HandOverTest {
 protected:
  // Starts the server that drains, with red's worker, its weights and a sequence.
  void FillWithWeights(const Change& change = {}, const std::string& digest = "",
                       scheduler::testing::FaultyBackend** faults = nullptr) {
    a_ = Serve(change, faults);
    red_ = Connect(*a_, "red");
    blue_ = Connect(*a_, "blue");
    if (!digest.empty()) RegisterWithDigest(*red_, digest);
    worker_ = std::make_unique<Worker>(red_.get(), Dims(), "m", 1);
    ASSERT_EQ(worker_->Upload(), absl::OkStatus());
    tracks_.push_back(*worker_->Open());
    ASSERT_EQ(worker_->Step({&tracks_.back()}, {40}, v1::PROFILE_EXPANDED), absl::OkStatus());
  }
  static void RegisterWithDigest(client::Client& client, const std::string& digest) {
    v1::ModelSpec spec = SpecOf(Dims(), "digested");
    spec.set_weights_digest(digest);
    ASSERT_TRUE(client.RegisterModel(spec).ok());
    std::mt19937_64 random(9);
    std::vector<client::WeightsChunk> chunks = ChunksOf(Dims(), RandomWeights(Dims(), &random));
    size_t next = 0;
    const auto reply =
        client.UploadWeights("digested", [&]() -> std::optional<client::WeightsChunk> {
          if (next == chunks.size()) return std::nullopt;
          return chunks[next++];
        });
    ASSERT_TRUE(reply.ok()) << reply.status();
  }
  static double Counted(const TestServer& server, const std::string& metric) {
    const std::string text = HttpGet(server.server().ops_port(), "/metrics");
    const size_t at = text.find(absl::StrCat("\n", metric, " "));
    if (at == text.npos) ADD_FAILURE() << metric << " is not in " << text;
    return at == text.npos ? -1 : std::stod(text.substr(at + metric.size() + 2));
  }
  static double Outcomes(const TestServer& server, const std::string& outcome) {
    return Counted(server, absl::StrCat("mla_hand_over_weights_total{outcome=\"", outcome, "\"}"));
  }
  // Returns how much of a resource red uses there.
  uint64_t UsedOf(const TestServer& server, v1::QuotaResource resource) {
    v1::GetQuotaReply quota = *Connect(server, "red")->GetQuota();
    for (const v1::QuotaUsage& usage : quota.tenants(0).resources()) {
      if (usage.resource() == resource) return usage.used();
    }
    return 0;
  }
  void ExpectEmpty(const TestServer& server, const std::string& what) {
    EXPECT_EQ(UsedOf(server, v1::QUOTA_RESOURCE_WEIGHT_BYTES), 0u) << what;
    EXPECT_EQ(UsedOf(server, v1::QUOTA_RESOURCE_MODELS), 0u) << what;
    EXPECT_EQ(Connect(server, "red")->ListModels()->models_size(), 0) << what;
  }
  // Runs steps of the moved sequence there, in both forms, with the weights that came with it.
  void ExpectAnswers(Track* track, const TestServer& there) {
    const auto client = Connect(there, "red");
    Worker worker(client.get(), Dims(), "m", 2);
    worker.set_weights(worker_->weights());
    auto sequence = client->Attach(track->sequence.id());
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    Track copy{*std::move(sequence), track->cache};
    // 40 rows take the expanded form on the CPU backend, one takes the absorbed one.
    for (const uint32_t rows : {40, 1}) {
      EXPECT_EQ(worker.Step({&copy}, {rows}, v1::PROFILE_EXPANDED), absl::OkStatus()) << rows;
    }
    EXPECT_EQ(worker.Step({&copy}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
    copy.sequence.Detach();
  }

  // The messages of a whole upload of the worker's model, as a server that drains sends them.
  std::vector<Message> Messages() const {
    std::vector<Message> messages(1);
    Message::Header* const header = messages[0].mutable_header();
    header->set_model_id("m");
    header->set_tenant("red");
    *header->mutable_model() = SpecOf(Dims(), "m");
    std::mt19937_64 random(5);
    std::string all;
    for (const client::WeightsChunk& chunk : ChunksOf(Dims(), RandomWeights(Dims(), &random))) {
      Message::Chunk* const to = messages.emplace_back().mutable_chunk();
      to->set_layer(chunk.layer);
      to->set_head_begin(chunk.head_begin);
      to->set_head_count(chunk.head_count);
      to->set_payload(chunk.bytes);
      all += to->payload();
    }
    std::string digest(SHA256_DIGEST_LENGTH, '\0');
    SHA256(reinterpret_cast<const unsigned char*>(all.data()), all.size(),
           reinterpret_cast<unsigned char*>(digest.data()));
    messages.emplace_back().mutable_trailer()->set_sha256(digest);
    return messages;
  }
  std::unique_ptr<v1::Models::Stub> StubOf(const TestServer& server, const std::string& who) {
    const grpc::SslCredentialsOptions ssl = {
        authority_.Read("ca.pem"), authority_.Read(who + ".key"), authority_.Read(who + ".pem")};
    return v1::Models::NewStub(grpc::CreateChannel(Address(server), grpc::SslCredentials(ssl)));
  }
  // Sends messages as `who`; returns the status, whose detail is in `detail`.
  grpc::Status Send(const TestServer& server, const std::string& who,
                    const std::vector<Message>& messages, v1::UploadWeightsReply* reply,
                    v1::ErrorDetail* detail) {
    const auto stub = StubOf(server, who);
    grpc::ClientContext context;
    const auto writer = stub->UploadWeights(&context, reply);
    for (const Message& message : messages) {
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    const auto& trailer = context.GetServerTrailingMetadata();
    if (const auto found = trailer.find("mla-error-detail-bin"); found != trailer.end()) {
      EXPECT_TRUE(detail->ParseFromArray(found->second.data(), int(found->second.size())));
    }
    return status;
  }
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_HAND_OVER_WEIGHTS_FIXTURE_H_
