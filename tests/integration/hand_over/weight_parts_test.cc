// Weights of one model that several calls bring at a time: they count when all have come, and
// whatever spoils one call, or comes too late, leaves nothing.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "mla/v1/model.grpc.pb.h"
#include "scheduler/testing/faulty_backend.h"
#include "server/control/weights_transfer.h"
#include "server/pages/page_digest.h"
#include "tests/integration/hand_over/weights_fixture.h"

namespace mla::integration {
namespace {

constexpr uint64_t kAttempt = 41;

// One UploadWeights call of a transfer, sent message by message.
class TransferCall final {
 public:
  explicit TransferCall(std::unique_ptr<v1::Models::Stub> stub)
      : stub_(std::move(stub)), writer_(stub_->UploadWeights(&context_, &reply_)) {
    digest_.Begin();
  }
  // Sends the header; returns true once the server has accepted it.
  bool Begin(const Message& header) {
    writer_->Write(header);
    writer_->WaitForInitialMetadata();
    return context_.GetServerInitialMetadata().contains("mla-accepted");
  }
  bool Chunk(const Message& chunk) {
    digest_.Add(chunk.chunk().payload());
    return writer_->Write(chunk);
  }
  // Sends the trailer, which `spoil` may change, and returns the reason of the refusal, or "".
  std::string End(uint32_t parts, const std::function<void(Message::Trailer*)>& spoil = {}) {
    Message message;
    message.mutable_trailer()->set_xxh3(digest_.End());
    message.mutable_trailer()->set_parts(parts);
    if (spoil) spoil(message.mutable_trailer());
    writer_->Write(message);
    return Finish();
  }
  // Ends the call as it is.
  std::string Finish() {
    writer_->WritesDone();
    const grpc::Status status = writer_->Finish();
    if (status.ok()) return "";
    v1::ErrorDetail detail;
    const auto& trailer = context_.GetServerTrailingMetadata();
    const auto found = trailer.find("mla-error-detail-bin");
    if (found == trailer.end() ||
        !detail.ParseFromArray(found->second.data(), int(found->second.size()))) {
      return absl::StrCat("no detail: ", status.error_message());
    }
    EXPECT_NE(detail.field(), "") << detail.reason();
    return detail.reason();
  }
  void Break() { context_.TryCancel(); }
  const v1::UploadWeightsReply& reply() const { return reply_; }

 private:
  const std::unique_ptr<v1::Models::Stub> stub_;
  grpc::ClientContext context_;
  v1::UploadWeightsReply reply_;
  std::unique_ptr<grpc::ClientWriter<Message>> writer_;
  server::PageDigest digest_{server::DigestKind::kXxh3};
};

class WeightPartsTest : public WeightsTest {
 protected:
  WeightPartsTest() {
    const std::vector<Message> messages = Messages();
    header_ = messages.front();
    header_.mutable_header()->set_attempt(kAttempt);
    Message::Header* const part = part_.mutable_header();
    part->set_model_id("m");
    part->set_tenant("red");
    part->set_attempt(kAttempt);
    part->set_is_part(true);
    for (size_t i = 1; i + 1 < messages.size(); ++i) Split(messages[i].chunk());
  }
  // Adds a chunk of all heads as one chunk a head.
  void Split(const Message::Chunk& chunk) {
    const Dims dims;
    const auto uk = static_cast<size_t>(dims.nope * dims.lora) * sizeof(uint16_t);
    const auto uv = static_cast<size_t>(dims.v * dims.lora) * sizeof(uint16_t);
    for (uint32_t head = 0; head < chunk.head_count(); ++head) {
      Message::Chunk* const to = chunks_.emplace_back().mutable_chunk();
      to->set_layer(chunk.layer());
      to->set_head_begin(chunk.head_begin() + head);
      to->set_head_count(1);
      to->set_payload(chunk.payload().substr(head * uk, uk) +
                      chunk.payload().substr(chunk.head_count() * uk + head * uv, uv));
    }
  }
  std::unique_ptr<TransferCall> Call(const TestServer& server, const std::string& who = "blue") {
    return std::make_unique<TransferCall>(StubOf(server, who));
  }
  // Calls that have begun: the transfer's, and a part's.
  std::unique_ptr<TransferCall> Lead(const TestServer& server) {
    auto call = Call(server);
    EXPECT_TRUE(call->Begin(header_));
    return call;
  }
  std::unique_ptr<TransferCall> Part(const TestServer& server) {
    auto call = Call(server);
    EXPECT_TRUE(call->Begin(part_));
    return call;
  }
  // Sends every chunk from `first` on, each `step`th.
  void Chunks(TransferCall& call, size_t first, size_t step) {
    for (size_t i = first; i < chunks_.size(); i += step) EXPECT_TRUE(call.Chunk(chunks_[i]));
  }
  void ExpectWhole(const TestServer& server) {
    const v1::ListModelsReply list = *Connect(server, "red")->ListModels();
    ASSERT_EQ(list.models_size(), 1);
    EXPECT_TRUE(list.models(0).weights_complete());
    EXPECT_EQ(UsedOf(server, v1::QUOTA_RESOURCE_WEIGHT_BYTES), kWeightBytes);
  }

  Message header_, part_;        // first messages of both kinds of call
  std::vector<Message> chunks_;  // of one head each
};

TEST_F(WeightPartsTest, ADrainSendsOneModelOverAllStreams) {
  scheduler::testing::FaultyBackend* faults = nullptr;
  FillWithWeights({}, "", &faults);
  const auto b = Serve();
  std::atomic<bool> seen{false};
  faults->OnReadWeights([&](int32_t) { Eventually([&] { return seen.load(); }); });
  auto drains = std::async(std::launch::async, [&] { return Drain(Address(*b)); });
  const auto streams = static_cast<uint64_t>(server::Config().hand_over_streams);
  EXPECT_TRUE(Eventually([&] { return UploadsOf(*b) == streams; }));
  EXPECT_EQ(UsedOf(*b, v1::QUOTA_RESOURCE_MODELS), 1u);
  seen = true;
  ASSERT_TRUE(drains.get().ok());
  EXPECT_EQ(Outcomes(*a_, "moved"), 1);
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_taken_total"), 1);
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_bytes_total{direction=\"in\"}"), kWeightBytes);
  EXPECT_EQ(Counted(*a_, "mla_hand_over_weights_bytes_total{direction=\"out\"}"), kWeightBytes);
  ExpectAnswers(&tracks_[0], *b);
}

TEST_F(WeightPartsTest, WeightsCountWhenAllPartsHaveCome) {
  const auto b = Serve();
  const auto lead = Lead(*b), first = Part(*b), second = Part(*b);
  Chunks(*lead, 0, 3);
  Chunks(*first, 1, 3);
  Chunks(*second, 2, 3);
  EXPECT_EQ(second->End(0), "");
  EXPECT_FALSE(second->reply().complete());
  EXPECT_EQ(first->End(0), "");
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_taken_total"), 0);
  EXPECT_FALSE(Connect(*b, "red")->ListModels()->models(0).weights_complete());
  EXPECT_EQ(lead->End(2), "");
  EXPECT_TRUE(lead->reply().complete());
  EXPECT_EQ(lead->reply().bytes(), kWeightBytes);
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_taken_total"), 1);
  ExpectWhole(*b);
  // A late part of the transfer, and a transfer of the same number again, which finds them there.
  const auto late = Call(*b);
  EXPECT_FALSE(late->Begin(part_));
  EXPECT_EQ(late->Finish(), "transfer_ended");
  const auto again = Lead(*b);
  Chunks(*again, 0, 1);
  EXPECT_EQ(again->End(0), "");
  ExpectWhole(*b);
}

TEST_F(WeightPartsTest, ASpoiltPartLeavesNothing) {
  const auto b = Serve();
  using Spoil = std::function<std::string(TransferCall&)>;
  const std::pair<const char*, Spoil> cases[] = {
      {"repeated",  // what the first call has sent
       [&](TransferCall& part) {
         part.Chunk(chunks_[0]);
         return part.End(0);
       }},
      {"repeated",  // what it has sent itself
       [&](TransferCall& part) {
         part.Chunk(chunks_[1]);
         part.Chunk(chunks_[1]);
         return part.End(0);
       }},
      {"payload_size",
       [&](TransferCall& part) {
         Message chunk = chunks_[1];
         chunk.mutable_chunk()->mutable_payload()->pop_back();
         part.Chunk(chunk);
         return part.End(0);
       }},
      {"out_of_range",
       [&](TransferCall& part) {
         Message chunk = chunks_[1];
         chunk.mutable_chunk()->set_layer(2);
         part.Chunk(chunk);
         return part.End(0);
       }},
      {"digest_mismatch",
       [&](TransferCall& part) {
         part.Chunk(chunks_[1]);
         return part.End(0, [](auto* trailer) { trailer->mutable_xxh3()->front() ^= 1; });
       }},
      {"out_of_range",  // SHA-256, which calls without an attempt have
       [&](TransferCall& part) {
         return part.End(0, [](auto* trailer) {
           trailer->clear_xxh3();
           trailer->set_sha256(std::string(32, 'd'));
         });
       }},
      {"conflict", [&](TransferCall& part) { return part.End(1); }},
      {"order",
       [&](TransferCall& part) {
         part.Chunk(part_);
         return part.End(0);
       }},
      {"missing", [&](TransferCall& part) { return part.Finish(); }},
  };
  for (const auto& [reason, spoil] : cases) {
    const auto lead = Lead(*b), part = Part(*b), good = Part(*b);
    lead->Chunk(chunks_[0]);
    // Once this part has been answered, the server has taken the chunk before, too.
    EXPECT_TRUE(Eventually([&] { return UsedOf(*b, v1::QUOTA_RESOURCE_WEIGHT_BYTES) > 0; }));
    EXPECT_EQ(spoil(*part), reason);
    // The others are told, and the transfer cannot be completed any more.
    good->Chunk(chunks_[2]);
    EXPECT_EQ(good->End(0), "transfer_ended") << reason;
    EXPECT_EQ(lead->End(2), "part_failed") << reason;
    ExpectEmpty(*b, reason);
  }
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_taken_total"), 0);
}

TEST_F(WeightPartsTest, ATransferEndsOnlyWithAllOfItsParts) {
  const auto b = Serve();
  {  // a part is still under way
    const auto lead = Lead(*b), part = Part(*b);
    Chunks(*lead, 0, 1);
    EXPECT_EQ(lead->End(1), "parts_differ");
    ExpectEmpty(*b, "under way");
    part->Chunk(chunks_[0]);
    EXPECT_EQ(part->End(0), "transfer_ended");
    ExpectEmpty(*b, "after it");
  }
  for (const uint32_t parts : {0u, 2u, ~0u}) {
    const auto lead = Lead(*b), part = Part(*b);
    Chunks(*part, 0, 1);
    EXPECT_EQ(part->End(0), "");
    EXPECT_EQ(lead->End(parts), "parts_differ") << parts;
    ExpectEmpty(*b, "another number of parts");
  }
  {  // a head that no call has brought
    const auto lead = Lead(*b), part = Part(*b);
    Chunks(*part, 1, 1);
    EXPECT_EQ(part->End(0), "");
    EXPECT_EQ(lead->End(1), "weights_missing");
    ExpectEmpty(*b, "a head is missing");
  }
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_taken_total"), 0);
}

TEST_F(WeightPartsTest, ASenderThatDiesLeavesNothing) {
  const auto b = Serve();
  {  // between two parts, with one that has ended and one that has not
    const auto lead = Lead(*b), ended = Part(*b), part = Part(*b);
    Chunks(*ended, 0, 2);
    EXPECT_EQ(ended->End(0), "");
    part->Chunk(chunks_[1]);
    lead->Break();
    lead->Finish();
    EXPECT_TRUE(Eventually([&] { return UsedOf(*b, v1::QUOTA_RESOURCE_MODELS) == 0; }));
    ExpectEmpty(*b, "the first call is cut");
    part->Chunk(chunks_[3]);
    EXPECT_EQ(part->End(0), "transfer_ended");
    ExpectEmpty(*b, "a part goes on");
  }
  {  // a part is cut
    const auto lead = Lead(*b), part = Part(*b), other = Part(*b);
    part->Chunk(chunks_[0]);
    part->Break();
    part->Finish();
    EXPECT_TRUE(Eventually([&] { return UploadsOf(*b) == 2; }));
    for (const Message& chunk : chunks_) other->Chunk(chunk);  // the server ends the call at once
    EXPECT_EQ(other->Finish(), "transfer_ended");
    EXPECT_EQ(lead->End(1), "part_failed");
    ExpectEmpty(*b, "a part is cut");
  }
  const auto late = Call(*b);
  EXPECT_FALSE(late->Begin(part_));
  EXPECT_EQ(late->Finish(), "transfer_ended");
}

// Each is refused before it can touch the transfer, which goes on.
TEST_F(WeightPartsTest, PartsOfOthersDoNotReachTheTransfer) {
  const auto b = Serve();
  const auto lead = Lead(*b);
  const auto refused = [&](const std::string& reason, const std::string& who,
                           const std::function<void(Message::Header*)>& change) {
    Message header = part_;
    change(header.mutable_header());
    const auto call = Call(*b, who);
    EXPECT_FALSE(call->Begin(header)) << reason;
    EXPECT_EQ(call->Finish(), reason);
  };
  refused("transfer_ended", "blue", [](auto* header) { header->set_attempt(kAttempt + 1); });
  refused("transfer_ended", "blue", [](auto* header) { header->set_model_id("another"); });
  refused("transfer_ended", "blue", [](auto* header) { header->set_tenant("green"); });
  refused("transfer_ended", "server", [](auto*) {});  // an operator, too, but another one
  refused("not_an_operator", "red", [](auto*) {});
  refused("missing", "blue", [](auto* header) { header->clear_attempt(); });
  refused("conflict", "blue", [](auto* header) { header->clear_tenant(); });
  refused("conflict", "blue",
          [&](auto* header) { *header->mutable_model() = header_.header().model(); });
  refused("conflict", "blue", [](auto* header) { header->add_kv_scales(1); });
  refused("conflict", "blue", [](auto* header) { header->add_sinks(1); });
  refused("upload_under_way", "blue", [&](auto* header) { *header = header_.header(); });
  Chunks(*lead, 0, 1);
  EXPECT_EQ(lead->End(0), "");
  ExpectWhole(*b);
}

TEST_F(WeightPartsTest, PartsAreBounded) {
  const auto b = Serve([](server::Config& config) { config.wire.max_uploads = 6; });
  const auto lead = Lead(*b);
  {  // by the places that the operator has, as a tenant: half of all
    const auto part = Part(*b), second = Part(*b), third = Call(*b);
    EXPECT_FALSE(third->Begin(part_));
    EXPECT_EQ(third->Finish(), "too_many_uploads");
    EXPECT_EQ(part->End(0), "");
    EXPECT_EQ(second->End(0), "");
  }
  for (uint32_t i = 2; i < server::kMostWeightParts; ++i) {
    // A call has its place until it is answered, and a little longer.
    EXPECT_TRUE(Eventually([&] { return UploadsOf(*b) == 1; }));
    EXPECT_EQ(Part(*b)->End(0), "");
  }
  EXPECT_TRUE(Eventually([&] { return UploadsOf(*b) == 1; }));
  const auto one_more = Call(*b);
  EXPECT_FALSE(one_more->Begin(part_));
  EXPECT_EQ(one_more->Finish(), "too_many_parts");
  Chunks(*lead, 0, 1);
  EXPECT_EQ(lead->End(server::kMostWeightParts), "");
  ExpectWhole(*b);
}

}  // namespace
}  // namespace mla::integration
