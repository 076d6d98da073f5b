// One thread that has a micro-batch under way at each of two servers: it goes on with the one that
// has answered, however long the other one takes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "scheduler/testing/faulty_backend.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

using Transport = client::ClientOptions::Transport;
using scheduler::testing::FaultyBackend;

constexpr size_t kServers = 2;
constexpr int kStepsMeanwhile = 5;

class MicroBatchesTest : public ::testing::TestWithParam<Transport> {
 protected:
  // A sequence at a server, and the tensors of the step over it.
  struct Batch {
    explicit Batch(client::ClusterSequence at) : sequence(std::move(at)) {}
    client::ClusterSequence sequence;
    std::unique_ptr<client::ClusterSession> session;
    std::unique_ptr<client::ClusterStep> step;
    std::vector<float> o;
  };

  void SetUp() override {
    std::vector<std::string> addresses;
    for (size_t i = 0; i < kServers; ++i) {
      servers_.push_back(std::make_unique<TestServer>(nullptr, [this, i] {
        auto made = std::make_unique<FaultyBackend>(std::make_unique<kernels::ReferenceBackend>());
        devices_[i] = made.get();
        return made;
      }));
      addresses.push_back(servers_[i]->unix_target());
    }
    client::ClientOptions options;
    options.transport = GetParam();
    client::ClusterOptions of_cluster;
    of_cluster.home = addresses[0];
    cluster_ =
        *client::ClusterClient::Connect(addresses[0] + "," + addresses[1], options, of_cluster);
    const v1::ModelSpec spec = SpecOf(dims_, kModel);
    ASSERT_TRUE(cluster_->RegisterModel(spec).ok());
    for (const std::string& address : addresses) {
      const auto there = *cluster_->ServerAt(address);
      ASSERT_TRUE(there->RegisterModel(spec).ok());
      auto opened = there->OpenSequence(kModel);
      ASSERT_TRUE(opened.ok()) << opened.status();
      auto attached = cluster_->Attach(kModel, opened->id());
      ASSERT_TRUE(attached.ok()) << attached.status();
      opened->Detach();
      batches_.emplace_back(*std::move(attached));
      batches_.back().session = cluster_->OpenSession(address);
    }
  }
  void TearDown() override {
    for (FaultyBackend* device : devices_) device->ReleaseLaunches();
  }

  // A row that attends to itself alone: its output is its latent row.
  client::AttendCall CallOf(int layer, std::vector<float>* o, uint32_t rows = 1) {
    client::AttendCall call;
    call.layer = static_cast<uint32_t>(layer);
    call.row_count = rows;
    call.num_heads = static_cast<uint32_t>(dims_.heads);
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = kv_.data();
    call.q = q_.data();
    o->assign(rows * OutputsOfARow(), 0);
    call.o = o->data();
    return call;
  }
  size_t OutputsOfARow() const { return static_cast<size_t>(dims_.heads * dims_.lora); }
  void ExpectOutputs(const std::vector<float>& o) const {
    const auto lora = static_cast<size_t>(dims_.lora);
    for (size_t i = 0; i < o.size(); ++i) {
      const size_t row = i / OutputsOfARow();
      const size_t at = row * static_cast<size_t>(dims_.row()) + i % lora;
      ASSERT_NEAR(o[i], FromBf16(kv_[at]), 0.01) << i;
    }
  }
  void Begin(Batch* batch) {
    auto step = batch->session->Begin(kModel, {{&batch->sequence, 1}});
    ASSERT_TRUE(step.ok()) << step.status();
    batch->step = *std::move(step);
  }
  // Asks until the reply is there, then takes it.
  static void TakeReady(client::PendingClusterAttend* pending) {
    ASSERT_TRUE(Eventually([&] { return pending->Ready(); }));
    const auto times = pending->Wait();
    ASSERT_TRUE(times.ok()) << times.status();
    EXPECT_TRUE(pending->Ready());  // nothing is left to wait for
  }
  void EndWithoutRows(Batch* batch) {
    ASSERT_TRUE(batch->step->End({0}).ok());
    batch->step.reset();
  }

  const Dims dims_;
  std::mt19937_64 random_{3};
  const std::vector<uint16_t> kv_ =
      RandomBf16(kServers * static_cast<size_t>(dims_.row()), &random_);
  const std::vector<uint16_t> q_ =
      RandomBf16(kServers * static_cast<size_t>(dims_.heads * dims_.row()), &random_);
  FaultyBackend* devices_[kServers] = {};
  std::vector<std::unique_ptr<TestServer>> servers_;
  std::unique_ptr<client::ClusterClient> cluster_;
  std::vector<Batch> batches_;
};

TEST_P(MicroBatchesTest, TheOneThatIsReadyGoesOn) {
  Batch &slow = batches_[0], &fast = batches_[1];
  Begin(&slow);
  Begin(&fast);
  devices_[0]->HoldLaunches();
  auto held = slow.step->AttendAsync(CallOf(0, &slow.o));
  for (int step = 0; step < kStepsMeanwhile; ++step) {
    if (step > 0) Begin(&fast);
    for (int layer = 0; layer < dims_.layers; ++layer) {
      auto pending = fast.step->AttendAsync(CallOf(layer, &fast.o));
      TakeReady(&pending);
      ExpectOutputs(fast.o);
      EXPECT_FALSE(held.Ready());
    }
    EndWithoutRows(&fast);
  }
  devices_[0]->ReleaseLaunches();
  TakeReady(&held);
  ExpectOutputs(slow.o);
  for (int layer = 1; layer < dims_.layers; ++layer) {
    auto pending = slow.step->AttendAsync(CallOf(layer, &slow.o));
    TakeReady(&pending);
    ExpectOutputs(slow.o);
  }
  EndWithoutRows(&slow);
}

TEST_P(MicroBatchesTest, ALaterCallIsReadyAfterTheEarlierOnesWithoutWaitingForThem) {
  Batch& batch = batches_[0];
  Begin(&batch);
  std::vector<std::vector<float>> outputs(static_cast<size_t>(dims_.layers));
  std::vector<client::PendingClusterAttend> pending;
  for (int layer = 0; layer < dims_.layers; ++layer) {
    pending.push_back(batch.step->AttendAsync(CallOf(layer, &outputs[static_cast<size_t>(layer)])));
  }
  TakeReady(&pending.back());
  for (size_t i = 0; i + 1 < pending.size(); ++i) TakeReady(&pending[i]);
  for (const auto& o : outputs) ExpectOutputs(o);
  EndWithoutRows(&batch);
}

TEST_P(MicroBatchesTest, AStepOfBothIsReadyOnceBothAre) {
  auto step =
      batches_[1].session->Begin(kModel, {{&batches_[0].sequence, 1}, {&batches_[1].sequence, 1}});
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_EQ((*step)->owners(), kServers);
  devices_[0]->HoldLaunches();
  std::vector<float> o;
  auto pending = (*step)->AttendAsync(CallOf(0, &o, kServers));
  ASSERT_TRUE(Eventually([&] { return devices_[0]->holds_launch(); }));
  EXPECT_FALSE(pending.Ready());
  devices_[0]->ReleaseLaunches();
  TakeReady(&pending);
  ExpectOutputs(o);
  EXPECT_TRUE((*step)->End({0, 0}).ok());
}

TEST_P(MicroBatchesTest, ACallThatIsRefusedIsReady) {
  Batch& batch = batches_[0];
  Begin(&batch);
  auto pending = batch.step->AttendAsync(CallOf(dims_.layers, &batch.o));
  ASSERT_TRUE(Eventually([&] { return pending.Ready(); }));
  EXPECT_TRUE(absl::IsInvalidArgument(pending.Wait().status()));
  EXPECT_TRUE(pending.Ready());
}

TEST_P(MicroBatchesTest, ACallIsReadyWhenItsServerHasEnded) {
  Batch& batch = batches_[1];
  Begin(&batch);
  auto pending = batch.step->AttendAsync(CallOf(0, &batch.o));
  ASSERT_TRUE(Eventually([&] { return pending.Ready(); }));
  servers_[1].reset();
  devices_[1] = devices_[0];
  auto later = batch.step->AttendAsync(CallOf(1, &batch.o));
  ASSERT_TRUE(Eventually([&] { return later.Ready(); }));
  EXPECT_FALSE(later.Wait().ok());
  EXPECT_TRUE(pending.Wait().ok());
  batch.step.reset();
  batch.sequence.Detach();
}

INSTANTIATE_TEST_SUITE_P(Transports, MicroBatchesTest,
                         ::testing::Values(Transport::kInline, Transport::kShm, Transport::kRing),
                         [](const auto& info) {
                           return info.param == Transport::kInline ? "inline"
                                  : info.param == Transport::kShm  ? "shm"
                                                                   : "ring";
                         });

}  // namespace
}  // namespace mla::integration
