// Weights in a drain to another server: workers go on there without an upload, and a transfer that
// is refused, damaged or cut leaves the receiver as it was and the sender serving.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"
#include "mla/v1/model.grpc.pb.h"
#include "tests/integration/hand_over/cutting_proxy.h"
#include "tests/integration/hand_over/weights_fixture.h"
#include "tests/integration/projected/projected_model.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

class WeightsByBackendTest : public WeightsTest, public ::testing::WithParamInterface<const char*> {
 protected:
  // Starts a server on one of the product's backends; the fixture's have a decorator around them.
  std::unique_ptr<TestServer> ServeOn(const std::string& backend) {
    return std::make_unique<TestServer>([&](server::Config& config) {
      config.tls.cert = authority_.File("server.pem");
      config.tls.key = authority_.File("server.key");
      config.tls.client_ca = authority_.File("ca.pem");
      config.listen.operators = "blue,localhost";
      config.listen.unix_path = "";
      config.backend = backend;
    });
  }
};

// From one backend to the other: they keep weights in different forms.
TEST_P(WeightsByBackendTest, WorkersGoOnWithoutAnUpload) {
  const std::string to = GetParam(), from = to == "cpu" ? "reference" : "cpu";
  a_ = ServeOn(from);
  red_ = Connect(*a_, "red");
  blue_ = Connect(*a_, "blue");
  worker_ = std::make_unique<Worker>(red_.get(), Dims(), "m", 1);
  ASSERT_EQ(worker_->Upload(), absl::OkStatus());
  Track track = *worker_->Open();
  ASSERT_EQ(worker_->Step({&track}, {40}, v1::PROFILE_EXPANDED), absl::OkStatus());
  const auto b = ServeOn(to);
  const auto drained = Drain(Address(*b));
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(OutcomeOf(*drained, track).outcome(), v1::HAND_OVER_OUTCOME_MOVED);
  ExpectAnswers(&track, *b);
}

TEST_P(WeightsByBackendTest, AnswersOfProjectedNeedNoUploadEither) {
  const std::string to = GetParam(), from = to == "cpu" ? "reference" : "cpu";
  a_ = ServeOn(from);
  red_ = Connect(*a_, "red");
  blue_ = Connect(*a_, "blue");
  const ProjectedDims dims;
  ProjectedWorker here(red_.get(), dims, "p", 3);
  ASSERT_EQ(here.Upload(/*fp8=*/false), absl::OkStatus());
  ProjectedTrack track = *here.Open();
  double worst = 0;
  ASSERT_EQ(here.Step({&track}, {40}, v1::DTYPE_F32, &worst), absl::OkStatus());
  // A model whose weights came as 8-bit codes moves as what these stand for.
  ProjectedWorker codes(red_.get(), dims, "codes", 4);
  ASSERT_EQ(codes.Upload(/*fp8=*/true), absl::OkStatus());
  // One that is held as codes moves as codes, to a server that may hold what they stand for.
  ProjectedDims wide;
  wide.dims.nope = 40;
  wide.dims.v = 64;
  wide.weights = v1::DTYPE_F8_E4M3;
  ProjectedWorker held(red_.get(), wide, "held", 6);
  ASSERT_EQ(held.Upload(/*fp8=*/true), absl::OkStatus());

  const auto b = ServeOn(to);
  const auto drained = Drain(Address(*b));
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(Outcomes(*a_, "moved"), 3);
  const auto client = Connect(*b, "red");
  ProjectedWorker there(client.get(), dims, "p", 3);  // the same seed, so the same weights
  auto sequence = client->Attach(track.sequence.id());
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ProjectedTrack copy{*std::move(sequence), track.cache};
  for (const uint32_t rows : {40, 1}) {
    ASSERT_EQ(there.Step({&copy}, {rows}, v1::DTYPE_F32, &worst), absl::OkStatus()) << rows;
  }
  // Processors with products of bf16 round queries and softmax weights of the expanded form.
  EXPECT_LT(worst, 1e-5);
  EXPECT_GT(worst, 0);
  copy.sequence.Detach();
  const v1::ListModelsReply list = *client->ListModels();
  EXPECT_EQ(list.models_size(), 3);
  for (const v1::ModelInfo& model : list.models()) {
    EXPECT_TRUE(model.weights_complete()) << model.model().model_id();
  }
  // The server accepts equal weights again, and no others. So the weights that came are equal.
  ProjectedWorker again(client.get(), dims, "codes", 4);
  EXPECT_EQ(again.Upload(/*fp8=*/true), absl::OkStatus());
  // The server that gets the weights may hold another type than the worker has registered.
  ProjectedWorker same(client.get(), wide, "held", 6);
  EXPECT_EQ(same.Upload(/*fp8=*/true), absl::OkStatus());
  ProjectedWorker other(client.get(), dims, "codes", 5);
  EXPECT_EQ(other.Upload(/*fp8=*/true).code(), absl::StatusCode::kAlreadyExists);
}

// The peer's worker has registered the model with codes, and there are none where the weights come
// from. Weights without a digest are known by the model that the worker has registered.
TEST_P(WeightsByBackendTest, APeerOfCodesKeepsItsOwn) {
  const std::string to = GetParam(), from = to == "cpu" ? "reference" : "cpu";
  const bool codes = to == "reference";
  ProjectedDims wide;
  wide.dims.nope = 40;
  wide.dims.v = 64;
  ProjectedDims narrow = wide;
  narrow.weights = v1::DTYPE_F8_E4M3;
  a_ = ServeOn(from);
  red_ = Connect(*a_, "red");
  blue_ = Connect(*a_, "blue");
  for (const char* name : {"there", "not_yet"}) {
    ProjectedWorker here(red_.get(), wide, name, 6);
    ASSERT_EQ(here.Upload(/*fp8=*/true), absl::OkStatus());
  }
  const auto b = ServeOn(to);
  const auto client = Connect(*b, "red");
  ProjectedWorker there(client.get(), narrow, "there", 6);
  ASSERT_EQ(there.Upload(/*fp8=*/true), absl::OkStatus());
  const uint64_t used = UsedOf(*b, v1::QUOTA_RESOURCE_WEIGHT_BYTES);
  ProjectedWorker later(client.get(), narrow, "not_yet", 6);
  const auto drained = Drain(Address(*b));
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(Outcomes(*a_, "moved"), codes ? 1 : 2);
  EXPECT_EQ(Outcomes(*a_, "refused"), codes ? 1 : 0);
  EXPECT_EQ(UsedOf(*b, v1::QUOTA_RESOURCE_WEIGHT_BYTES), codes ? used : 2 * used);

  // The header alone is refused, before any chunk; a worker brings the codes.
  std::vector<Message> messages(1);
  Message::Header* const header = messages[0].mutable_header();
  header->set_model_id("not_yet");
  header->set_tenant("red");
  *header->mutable_model() = SpecOf(wide, "not_yet");
  v1::UploadWeightsReply reply;
  v1::ErrorDetail detail;
  EXPECT_FALSE(Send(*b, "blue", messages, &reply, &detail).ok());
  EXPECT_EQ(detail.reason(), codes ? "other_dtype" : "missing");
  EXPECT_EQ(detail.field(), codes ? "header.model.projected_dtype" : "trailer");
  EXPECT_EQ(later.Upload(/*fp8=*/true), absl::OkStatus());
  EXPECT_EQ(UsedOf(*b, v1::QUOTA_RESOURCE_WEIGHT_BYTES), 2 * used);
  EXPECT_EQ(Send(*b, "blue", messages, &reply, &detail).ok(), codes);
}

INSTANTIATE_TEST_SUITE_P(To, WeightsByBackendTest, ::testing::Values("cpu", "reference"));

TEST_F(WeightsTest, ModelsGoWithOrWithoutSequencesAndAreCounted) {
  FillWithWeights();
  Worker idle(red_.get(), Dims(), "idle", 7);
  ASSERT_EQ(idle.Upload(), absl::OkStatus());
  Worker bare(red_.get(), Dims(), "bare", 8);  // has no weights, and no sequences
  const auto b = Serve();
  const auto drained = Drain(Address(*b));
  ASSERT_TRUE(drained.ok()) << drained.status();
  ExpectAnswers(&tracks_[0], *b);
  EXPECT_EQ(Outcomes(*a_, "moved"), 2);
  EXPECT_EQ(Outcomes(*a_, "refused"), 0);
  EXPECT_EQ(Outcomes(*a_, "failed"), 0);
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_taken_total"), 2);
  EXPECT_EQ(Counted(*a_, "mla_hand_over_weights_bytes_total{direction=\"out\"}"),
            2.0 * kWeightBytes);
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_bytes_total{direction=\"in\"}"), 2.0 * kWeightBytes);
  // Weights stay at the sender, too, which serves on if the drain is cancelled.
  ASSERT_TRUE(blue_->CancelDrain().ok());
  Track track = *worker_->Open();
  EXPECT_EQ(worker_->Step({&track}, {2}, v1::PROFILE_EXPANDED), absl::OkStatus());
  std::vector<std::string> complete;
  const v1::ListModelsReply list = *Connect(*b, "red")->ListModels();
  for (const v1::ModelInfo& model : list.models()) {
    if (model.weights_complete()) complete.push_back(model.model().model_id());
  }
  std::sort(complete.begin(), complete.end());
  EXPECT_EQ(complete, (std::vector<std::string>{"idle", "m"}));
  // Back again: the first server still has equal weights.
  const auto back = Connect(*b, "blue")->Drain(kDrainMs, false, {Address(*a_)});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(Outcomes(*b, "moved"), 2);
}

// With a digest of its own the model is known to have the same weights, so none cross.
TEST_F(WeightsTest, WeightsThatThePeerHasDoNotCross) {
  const std::string digest(32, 'd');
  FillWithWeights({}, digest);
  const auto b = Serve();
  RegisterWithDigest(*Connect(*b, "red"), digest);
  ASSERT_TRUE(Drain(Address(*b)).ok());
  EXPECT_EQ(Outcomes(*a_, "moved"), 2);
  EXPECT_EQ(Counted(*a_, "mla_hand_over_weights_bytes_total{direction=\"out\"}"),
            1.0 * kWeightBytes);
}

// The peer has other weights or another model under the name, or no room for the tenant or for all.
TEST_F(WeightsTest, WhatThePeerRefusesLeavesItUnchanged) {
  FillWithWeights();
  const auto refused = [&](const TestServer& b, uint64_t used) {
    const double before = Outcomes(*a_, "refused");
    ASSERT_TRUE(Drain(Address(b)).ok());
    EXPECT_EQ(Outcomes(*a_, "refused"), before + 1);
    EXPECT_EQ(UsedOf(b, v1::QUOTA_RESOURCE_WEIGHT_BYTES), used);
    EXPECT_EQ(Counted(b, "mla_hand_over_weights_taken_total"), 0);
    ASSERT_TRUE(blue_->CancelDrain().ok());
    // The sequence has gone all the same, if it may; the sender serves.
    tracks_.clear();
    tracks_.push_back(*worker_->Open());
    EXPECT_EQ(worker_->Step({&tracks_[0]}, {2}, v1::PROFILE_EXPANDED), absl::OkStatus());
  };
  {
    const auto b = Serve();
    const auto client = Connect(*b, "red");
    Worker other(client.get(), Dims(), "m", 77);
    ASSERT_EQ(other.Upload(), absl::OkStatus());
    refused(*b, kWeightBytes);
    Track track = *other.Open();
    EXPECT_EQ(other.Step({&track}, {2}, v1::PROFILE_EXPANDED), absl::OkStatus());
  }
  {
    const auto b = Serve();
    Dims wide;
    wide.heads = 2;
    const auto client = Connect(*b, "red");
    Worker other(client.get(), wide, "m", 77);
    refused(*b, 0);
  }
  refused(*Serve([](server::Config& config) { config.limits.weights_bytes = kWeightBytes - 1; }),
          0);
  const auto b = Serve();
  v1::SetQuotaRequest quota;
  quota.set_tenant("red");
  v1::QuotaBound* const bound = quota.add_bounds();
  bound->set_resource(v1::QUOTA_RESOURCE_WEIGHT_BYTES);
  bound->set_bound(kWeightBytes - 1);
  ASSERT_TRUE(Connect(*b, "blue")->SetQuota(quota).ok());
  refused(*b, 0);
}

// A peer that admits fewer uploads than there are streams gets the models one after another.
TEST_F(WeightsTest, APeerOfOneUploadAtATimeGetsAllWeights) {
  FillWithWeights();
  Worker second(red_.get(), Dims(), "second", 7), third(red_.get(), Dims(), "third", 8);
  ASSERT_EQ(second.Upload(), absl::OkStatus());
  ASSERT_EQ(third.Upload(), absl::OkStatus());
  const auto b = Serve([](server::Config& config) { config.wire.max_uploads = 1; });
  ASSERT_TRUE(Drain(Address(*b)).ok());
  EXPECT_EQ(Outcomes(*a_, "moved"), 3);
  ExpectAnswers(&tracks_[0], *b);
}

// Two peers share the sequences, so both get the weights; a third one gets neither.
TEST_F(WeightsTest, EachPeerThatGetsSequencesGetsTheirWeightsOnce) {
  FillWithWeights();
  for (int i = 0; i < 3; ++i) {
    tracks_.push_back(*worker_->Open());
    ASSERT_EQ(worker_->Step({&tracks_.back()}, {40}, v1::PROFILE_EXPANDED), absl::OkStatus());
  }
  const auto smaller = [](server::Config& config) { config.limits.kv_cache_bytes /= 8; };
  const auto b = Serve(), c = Serve(), small = Serve(smaller);
  const auto drained = blue_->Drain(kDrainMs, false, {Address(*small), Address(*b), Address(*c)});
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(Outcomes(*a_, "moved"), 2);
  EXPECT_EQ(Outcomes(*a_, "refused") + Outcomes(*a_, "failed"), 0);
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_taken_total"), 1);
  EXPECT_EQ(Counted(*c, "mla_hand_over_weights_taken_total"), 1);
  EXPECT_EQ(SequencesOf(*b) + SequencesOf(*c), 4u);
  ExpectEmpty(*small, "it has the least room");
  for (Track& track : tracks_) {
    const bool at_b = OutcomeOf(*drained, track).peer() == Address(*b);
    ExpectAnswers(&track, at_b ? *b : *c);
  }
}

TEST_F(WeightsTest, ACutConnectionLeavesTheReceiverAsItWasAndTheSenderServing) {
  int cut_in_weights = 0;
  for (const int64_t bytes : {6000, 9000, 12000, 15000, 18000, 24000}) {
    tracks_.clear();
    FillWithWeights();
    const auto b = Serve();
    CuttingProxy proxy(b->server().tcp_port(), bytes, 1);  // nothing answers afterwards
    const auto drained = Drain(Address(proxy.port()));
    if (!drained.ok()) continue;
    ASSERT_TRUE(blue_->CancelDrain().ok());
    if (Outcomes(*a_, "failed") == 1 && Counted(*b, "mla_hand_over_weights_taken_total") == 0) {
      ++cut_in_weights;
      EXPECT_TRUE(Eventually([&] { return UsedOf(*b, v1::QUOTA_RESOURCE_MODELS) == 0; }));
      ExpectEmpty(*b, absl::StrCat(bytes));
      ExpectHere(&tracks_[0]);
    }
    Track track = *worker_->Open();
    EXPECT_EQ(worker_->Step({&track}, {2}, v1::PROFILE_EXPANDED), absl::OkStatus());
  }
  EXPECT_GT(cut_in_weights, 1);
}

// A failure to read them, here of the device, costs the weights alone.
TEST_F(WeightsTest, WeightsThatCannotBeReadStayAndSequencesMove) {
  scheduler::testing::FaultyBackend* faults = nullptr;
  a_ = Serve({}, &faults);
  red_ = Connect(*a_, "red");
  blue_ = Connect(*a_, "blue");
  worker_ = std::make_unique<Worker>(red_.get(), Dims(), "m", 1);
  ASSERT_EQ(worker_->Upload(), absl::OkStatus());
  Track track = *worker_->Open();
  ASSERT_EQ(worker_->Step({&track}, {4}, v1::PROFILE_EXPANDED), absl::OkStatus());
  faults->FailAt(scheduler::testing::FaultPoint::kReadWeights, 5);
  const auto b = Serve();
  const auto drained = Drain(Address(*b));
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(Outcomes(*a_, "failed"), 1);
  EXPECT_EQ(UsedOf(*b, v1::QUOTA_RESOURCE_WEIGHT_BYTES), 0u);
  EXPECT_EQ(OutcomeOf(*drained, track).outcome(), v1::HAND_OVER_OUTCOME_MOVED);
  ExpectMoved(&track, *b, Address(*b));
  const auto client = Connect(*b, "red");
  Worker worker(client.get(), Dims(), "m", 1);
  EXPECT_EQ(worker.Upload(), absl::OkStatus());
}

// An operator's certificate does not make a server trusted: it may send anything.
TEST_F(WeightsTest, HostileTransfersLeaveNothing) {
  const auto b = Serve();
  struct Case {
    const char* what;
    const char* reason;
    std::function<void(std::vector<Message>*)> spoil;
  };
  const Case cases[] = {
      {"too short", "payload_size",
       [](auto* m) { (*m)[2].mutable_chunk()->mutable_payload()->pop_back(); }},
      {"too long", "payload_size",
       [](auto* m) { (*m)[2].mutable_chunk()->mutable_payload()->append(2, 'x'); }},
      {"another digest", "digest_mismatch",
       [](auto* m) { m->back().mutable_trailer()->mutable_sha256()->front() ^= 1; }},
      {"a digest of another length", "out_of_range",
       [](auto* m) { m->back().mutable_trailer()->mutable_sha256()->pop_back(); }},
      {"a head twice", "repeated", [](auto* m) { m->insert(m->begin() + 2, (*m)[1]); }},
      {"a layer too many", "out_of_range", [](auto* m) { (*m)[2].mutable_chunk()->set_layer(2); }},
      {"more heads", "out_of_range",
       [](auto* m) { (*m)[2].mutable_chunk()->set_head_count(1u << 30); }},
      {"an infinite weight", "not_finite",
       [](auto* m) { (*m)[2].mutable_chunk()->mutable_payload()->replace(0, 2, "\x80\x7f"); }},
      {"a part that the model lacks", "no_projected_profile",
       [](auto* m) { (*m)[2].mutable_chunk()->set_part(v1::WEIGHT_PART_OUTPUTS); }},
      {"no trailer", "missing", [](auto* m) { m->pop_back(); }},
      {"a part, with the model", "conflict",
       [](auto* m) {
         (*m)[0].mutable_header()->set_attempt(7);
         (*m)[0].mutable_header()->set_is_part(true);
       }},
      {"parts that did not come", "parts_differ",
       [](auto* m) { m->back().mutable_trailer()->set_parts(1); }},
      {"sinks of a model without a window", "wrong_count",
       [](auto* m) { (*m)[0].mutable_header()->add_sinks(0.5f); }},
      {"a header again", "order", [](auto* m) { (*m)[2] = (*m)[0]; }},
      {"more after the trailer", "order", [](auto* m) { m->push_back((*m)[1]); }},
      {"no model", "missing", [](auto* m) { (*m)[0].mutable_header()->clear_model(); }},
      {"a model that is none", "out_of_range",
       [](auto* m) { (*m)[0].mutable_header()->mutable_model()->set_layers(0); }},
      {"a model without weights", "no_expanded_profile",
       [](auto* m) {
         auto* const geometry = (*m)[0].mutable_header()->mutable_model()->mutable_geometry();
         geometry->set_nope_dim(0);
         geometry->set_v_dim(0);
       }},
      {"scales of a format without", "no_layer_scales",
       [](auto* m) { (*m)[0].mutable_header()->add_kv_scales(0.5f); }},
      {"a tenant that is no name", "name_characters",
       [](auto* m) { (*m)[0].mutable_header()->set_tenant("red\n"); }},
  };
  for (const Case& c : cases) {
    std::vector<Message> messages = Messages();
    c.spoil(&messages);
    v1::UploadWeightsReply reply;
    v1::ErrorDetail detail;
    const grpc::Status status = Send(*b, "blue", messages, &reply, &detail);
    EXPECT_FALSE(status.ok()) << c.what;
    EXPECT_EQ(detail.reason(), c.reason) << c.what << ": " << status.error_message();
    EXPECT_NE(detail.field(), "") << c.what;
    ExpectEmpty(*b, c.what);
  }
  EXPECT_EQ(Counted(*b, "mla_hand_over_weights_taken_total"), 0);
}

// Only operators may name a tenant; without one there is nothing to register.
TEST_F(WeightsTest, OperatorsBringThemAndMayRepeatThem) {
  const auto b = Serve();
  v1::UploadWeightsReply reply;
  v1::ErrorDetail detail;
  EXPECT_EQ(Send(*b, "red", Messages(), &reply, &detail).error_code(), grpc::PERMISSION_DENIED);
  EXPECT_EQ(detail.reason(), "not_an_operator");
  std::vector<Message> own = Messages();
  own[0].mutable_header()->clear_tenant();
  EXPECT_EQ(Send(*b, "red", own, &reply, &detail).error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(detail.field(), "header.model");
  ExpectEmpty(*b, "not an operator");
  // The unspoilt messages are accepted, and accepted again.
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(Send(*b, "blue", Messages(), &reply, &detail).ok());
    EXPECT_TRUE(reply.complete());
    EXPECT_EQ(reply.bytes(), kWeightBytes);
  }
  EXPECT_EQ(UsedOf(*b, v1::QUOTA_RESOURCE_WEIGHT_BYTES), kWeightBytes);
}

TEST_F(WeightsTest, WithoutTlsTheyAreRefused) {
  const TestServer plain;
  for (const std::string& target : {plain.unix_target(), plain.tcp_target()}) {
    const auto stub =
        v1::Models::NewStub(grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::UploadWeightsReply reply;
    const auto writer = stub->UploadWeights(&context, &reply);
    writer->Write(Messages()[0]);
    writer->WritesDone();
    EXPECT_EQ(writer->Finish().error_code(), grpc::PERMISSION_DENIED) << target;
  }
}

}  // namespace
}  // namespace mla::integration
