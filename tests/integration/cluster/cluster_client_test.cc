// The cluster's client over real servers.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <set>

#include "absl/strings/str_join.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

using client::ClusterOptions;

class ClusterTest : public ::testing::Test {
 protected:
  void Serve(int count, const std::function<void(server::Config&)>& change = {}) {
    for (int i = 0; i < count; ++i) {
      servers_.push_back(std::make_unique<TestServer>(change));
      addresses_.push_back(servers_.back()->tcp_target());
    }
  }
  std::string target() const { return absl::StrJoin(addresses_, ","); }
  // A worker whose home is a server, by its number.
  FleetWorker At(size_t home, const std::string& name = "") {
    client::ClientOptions options;
    options.client_id = name;
    ClusterOptions cluster;
    cluster.home = addresses_[home];
    cluster.costs.full_s = 0;  // a few rows fill a good part of a pool this small
    return FleetWorker(target(), options, cluster);
  }
  // A sequence of `worker` on a server, opened by a client whose home that is.
  FleetTrack OpenOn(FleetWorker* worker, size_t server) {
    const auto there = worker->client().ServerAt(addresses_[server]);
    EXPECT_TRUE(there.ok()) << there.status();
    EXPECT_TRUE((*there)->RegisterModel(SpecOf(worker->dims(), kModel)).ok());
    auto opened = (*there)->OpenSequence(kModel);
    EXPECT_TRUE(opened.ok()) << opened.status();
    auto attached = worker->client().Attach(kModel, opened->id());
    EXPECT_TRUE(attached.ok()) << attached.status();
    opened->Detach();
    EXPECT_EQ(attached->address(), addresses_[server]);
    return {*std::move(attached), DenseCache(worker->dims().layers)};
  }

  std::vector<std::unique_ptr<TestServer>> servers_;
  std::vector<std::string> addresses_;
};

TEST_F(ClusterTest, SequencesWithoutAPrefixGoHomeAndNoServerIsAsked) {
  Serve(3);
  FleetWorker worker = At(1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(worker.Open().sequence.address(), addresses_[1]);
  }
  EXPECT_EQ(worker.client().counts().asked, 0u);
  EXPECT_EQ(worker.client().counts().opened, 3u);
  EXPECT_EQ(servers_[0]->Connect()->GetStats()->sequences(), 0u);
}

TEST_F(ClusterTest, AStepOverServersIsAsOneOfOneServer) {
  Serve(3);
  FleetWorker worker = At(0);
  std::vector<FleetTrack> tracks;
  for (const size_t server : {0, 1, 0, 2, 2}) tracks.push_back(OpenOn(&worker, server));
  std::vector<FleetTrack*> all;
  for (FleetTrack& one : tracks) all.push_back(&one);
  // The first and the third are of one server and do not lie together, the last two do.
  EXPECT_EQ(worker.Step(all, {5, 3, 4, 2, 6}), absl::OkStatus());
  EXPECT_EQ(worker.Step(all, {1, 1, 1, 1, 1}), absl::OkStatus());
  EXPECT_EQ(worker.Step(all, {3, 3, 3, 3, 3}, v1::PROFILE_ABSORBED, {3, 2, 1, 0, 3}),
            absl::OkStatus());
  EXPECT_EQ(worker.Step(all, {2, 1, 2, 1, 1}), absl::OkStatus());
  const std::vector<uint64_t> lengths = {11, 7, 8, 4, 11};
  for (size_t i = 0; i < tracks.size(); ++i) {
    EXPECT_EQ(tracks[i].sequence.length(), lengths[i]) << i;
    ASSERT_EQ(tracks[i].sequence.Refresh(), absl::OkStatus());
    EXPECT_EQ(tracks[i].sequence.length(), lengths[i]) << i;
  }
}

TEST_F(ClusterTest, PiecesOfAStepGoWhereTheirRowsAre) {
  Serve(2);
  FleetWorker worker = At(0);
  FleetTrack a = OpenOn(&worker, 0), b = OpenOn(&worker, 1);
  auto step = worker.Begin({&a, &b}, {2, 2});
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ((*step)->owners(), 2u);
  EXPECT_EQ((*step)->total_rows(), 4u);
  const auto row = static_cast<size_t>(worker.dims().row());
  std::mt19937_64 random(3);
  const auto kv = RandomBf16(4 * row, &random), q = RandomBf16(4 * row, &random);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (uint32_t begin = 0; begin < 4; ++begin) {
      std::vector<float> o(static_cast<size_t>(worker.dims().lora));
      client::AttendCall call;
      call.layer = layer;
      call.row_begin = begin;
      call.row_count = call.num_heads = 1;
      call.profile = v1::PROFILE_ABSORBED;
      call.o_dtype = v1::DTYPE_F32;
      call.kv = kv.data() + begin * row;
      call.q = q.data() + begin * row;
      call.o = o.data();
      ASSERT_TRUE((*step)->Attend(call).ok());
      // A sequence's first row attends to itself alone.
      for (size_t d = 0; d < o.size() && begin % 2 == 0; ++d) {
        EXPECT_NEAR(o[d], FromBf16(kv[begin * row + d]), 0.01);
      }
      call.row_begin = 4;
      EXPECT_EQ(client::DetailOf((*step)->Attend(call).status())->field(), "attend.row_begin");
    }
  }
  EXPECT_EQ((*step)->End({2}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*step)->End().value(), (std::vector<uint64_t>{2, 2}));
  EXPECT_EQ((*step)->Attend({}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ClusterTest, WeightsComeToEveryServerThatGetsTheModel) {
  Serve(2);
  FleetWorker worker = At(0);
  ASSERT_EQ(worker.Upload(), absl::OkStatus());  // only the home has the model now
  FleetTrack a = worker.Open();
  FleetTrack b = worker.Open(PrefixOf(1, 8));
  FleetTrack c = OpenOn(&worker, 1);
  EXPECT_EQ(worker.Step({&a, &c}, {3, 4}, v1::PROFILE_EXPANDED), absl::OkStatus());
  EXPECT_EQ(worker.Step({&b, &c}, {9, 1}, v1::PROFILE_EXPANDED), absl::OkStatus());
}

TEST_F(ClusterTest, ARepeatedRegistrationRenewsAndUploadsOnlyWhereTheModelWasLost) {
  Serve(2);
  FleetWorker worker = At(0);
  OpenOn(&worker, 1);
  std::vector<uint64_t> uploads;
  ASSERT_EQ(worker.client().Upload(kModel, "weights",
                                   [&uploads](client::Client* server) {
                                     uploads.push_back(server->info().boot_id());
                                     return absl::OkStatus();
                                   }),
            absl::OkStatus());
  ASSERT_EQ(uploads.size(), 2u);
  const auto repeat = [&worker](uint32_t lease_ms) {
    const auto reply =
        worker.client().RegisterModel(SpecOf(worker.dims(), kModel), lease_ms, {}, {});
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? reply->lease_ms() : 0;
  };
  const auto lease_on = [this](size_t server) {
    const auto models = servers_[server]->Connect()->ListModels();
    EXPECT_TRUE(models.ok() && models->models_size() == 1);
    return models.ok() && models->models_size() == 1 ? models->models(0).lease_ms() : 0;
  };
  EXPECT_EQ(repeat(0), 0u);
  // A lease reaches every server that has the model, and stays with a repeat that has none.
  for (const uint32_t lease_ms : {600'000u, 0u}) {
    EXPECT_EQ(repeat(lease_ms), 600'000u);
    EXPECT_EQ(lease_on(0), 600'000u);
    EXPECT_EQ(lease_on(1), 600'000u);
  }
  worker.Open();
  EXPECT_EQ(uploads.size(), 2u);
  // The model is lost on one server, as it is when its lease ends.
  for (const size_t lost : {size_t{0}, size_t{1}}) {
    const auto direct = servers_[lost]->Connect();
    ASSERT_EQ(direct->UnregisterModel(kModel), absl::OkStatus());
    uploads.clear();
    EXPECT_EQ(repeat(0), 600'000u);
    EXPECT_EQ(lease_on(lost), 600'000u);
    EXPECT_EQ(uploads, std::vector<uint64_t>{direct->info().boot_id()});
  }
}

TEST_F(ClusterTest, ARepeatedRegistrationTakesNoUploadedScalesBack) {
  Serve(2);
  FleetWorker worker = At(0);
  v1::ModelSpec spec = SpecOf(worker.dims(), "scaled");
  spec.clear_kv_dtype();
  spec.set_kv_format(v1::KV_FORMAT_FP8_TENSOR);
  const auto of = [&spec](float scale) { return std::vector<float>(spec.layers(), scale); };
  const auto repeat = [&](std::span<const float> scales) {
    return worker.client().RegisterModel(spec, 0, scales, {}).status();
  };
  ASSERT_EQ(repeat(of(0.5f)), absl::OkStatus());
  ASSERT_EQ(worker.client().Upload("scaled", client::ClusterClient::kScales,
                                   [&of](client::Client* server) {
                                     return server->UploadScales("scaled", of(0.25f));
                                   }),
            absl::OkStatus());
  // A server takes other scales only while no sequence is open.
  const auto sequence = worker.client().OpenSequence("scaled");
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_EQ(repeat({}), absl::OkStatus());
  EXPECT_EQ(repeat(of(0.25f)), absl::OkStatus());
  EXPECT_EQ(client::DetailOf(repeat(of(0.5f)))->reason(), "scales_differ");
}

TEST_F(ClusterTest, AnotherWorkerFindsThePrefixWhereItIs) {
  Serve(4);
  const v1::Prefix prefix = PrefixOf(1, 200);
  std::string address;
  {
    // Its home is among those to which the prefix belongs, so others ask there.
    const auto order = client::ByHash(client::KeyOfPrefix(kModel, prefix), addresses_);
    const auto first = std::find(addresses_.begin(), addresses_.end(), order[0]);
    FleetWorker worker = At(static_cast<size_t>(first - addresses_.begin()), "one");
    FleetTrack track = worker.Open(prefix);
    ASSERT_EQ(track.sequence.length(), 0u);
    ASSERT_EQ(worker.Step({&track}, {201}), absl::OkStatus());
    address = track.sequence.address();
    ASSERT_EQ(track.sequence.Release(), absl::OkStatus());
  }
  for (size_t home = 0; home < 4; ++home) {
    FleetWorker worker = At(home, absl::StrCat("other-", home));
    v1::PrefixMatch match;
    const auto sequence = worker.client().OpenSequence(kModel, prefix, &match);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    EXPECT_EQ(sequence->address(), address);
    EXPECT_EQ(match.rows(), 200u);
    EXPECT_GE(worker.client().counts().asked, 2u);
    EXPECT_LE(worker.client().counts().asked, 4u);
  }
}

TEST_F(ClusterTest, AFullHomeSpills) {
  Serve(2, [](server::Config& config) {
    config.limits.max_sequences = config.limits.max_step_sequences = 2;
  });
  FleetWorker worker = At(0);
  std::vector<FleetTrack> tracks;
  std::multiset<std::string> used;
  for (int i = 0; i < 4; ++i) {
    tracks.push_back(worker.Open());
    used.insert(tracks.back().sequence.address());
  }
  EXPECT_EQ(used.count(addresses_[0]), 2u);
  EXPECT_EQ(used.count(addresses_[1]), 2u);
  EXPECT_EQ(worker.client().counts().spilled, 2u);
  const auto fifth = worker.client().OpenSequence(kModel);
  EXPECT_EQ(fifth.status().code(), absl::StatusCode::kResourceExhausted) << fifth.status();
}

TEST_F(ClusterTest, ARestartedServerGetsSequencesAgain) {
  Serve(1);
  addresses_ = {servers_[0]->unix_target()};  // its port is another one after a restart
  FleetWorker worker = At(0);
  FleetTrack track = worker.Open();
  ASSERT_EQ(worker.Step({&track}, {3}), absl::OkStatus());
  servers_[0]->Restart();
  EXPECT_FALSE(worker.Step({&track}, {1}).ok());
  const auto found = worker.client().Recover(&track.sequence);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "none");
  EXPECT_EQ(found->lost, 3u);
  track.cache = DenseCache(worker.dims().layers);
  EXPECT_EQ(worker.Step({&track}, {4}), absl::OkStatus());
}

TEST_F(ClusterTest, SaysWhatIsWrong) {
  Serve(2);
  EXPECT_EQ(client::ClusterClient::Connect("a", {}).status().code(), absl::StatusCode::kOk)
      << "a list of one server is a cluster";
  EXPECT_EQ(client::ClusterClient::Connect("a,,b", {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonIn(client::ClusterClient::Connect("etcd://127.0.0.1:1/fleet", {}).status()),
            "registry_away");
  EXPECT_EQ(ReasonIn(client::ClusterClient::Connect("dns:///no-such-name.invalid:1", {}).status()),
            "registry_away");
  FleetWorker worker = At(0);
  EXPECT_EQ(ReasonIn(worker.client().OpenSequence("other").status()), "model_not_found");
  EXPECT_EQ(worker.client().Attach(kModel, 7).status().code(), absl::StatusCode::kNotFound);
  FleetTrack a = OpenOn(&worker, 0), b = OpenOn(&worker, 1);
  EXPECT_EQ(client::DetailOf(worker.Begin({&a, &b}, {1, 0}).status())->field(),
            "begin_step.sequences[0].rows");
  EXPECT_EQ(worker.session().Begin(kModel, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

// The transport of a session at a server.
std::string TransportTo(client::ClusterClient* cluster, const std::string& address) {
  const auto server = cluster->ServerAt(address);
  if (!server.ok()) return std::string(server.status().message());
  const auto session = (*server)->OpenSession();
  return session.ok() ? std::string((*session)->transport())
                      : std::string(session.status().message());
}

TEST_F(ClusterTest, ServersOfThisHostAreReachedByTheSocketsThatTheCallerNames) {
  const Authority authority;
  const TempFolder folder;
  const auto serve = [&](const std::string& name) {
    return std::make_unique<TestServer>([&](server::Config& config) {
      config.tls.cert = authority.File("server.pem");
      config.tls.key = authority.File("server.key");
      config.tls.client_ca = authority.File("ca.pem");
      config.listen.unix_tenant = "red";
      config.listen.unix_path = folder.File(name);
    });
  };
  const auto a = serve("a.sock"), b = serve("b.sock"), far = serve("far.other");
  std::vector<std::string> addresses;
  for (const TestServer* one : {a.get(), b.get(), far.get()}) {
    addresses.push_back(absl::StrCat("localhost:", one->server().tcp_port()));
  }
  client::ClusterOptions options;
  options.home = addresses[0];
  const std::string target = absl::StrJoin(addresses, ",");
  {
    FleetWorker worker(target, authority.As("red"), options);
    EXPECT_EQ(TransportTo(&worker.client(), addresses[0]), "inline");
  }
  options.sockets = folder.File("*.sock");
  FleetWorker worker(target, authority.As("red"), options);
  EXPECT_EQ(TransportTo(&worker.client(), addresses[0]), "ring");
  EXPECT_EQ(TransportTo(&worker.client(), addresses[1]), "ring");
  EXPECT_EQ(TransportTo(&worker.client(), addresses[2]), "inline");
  FleetTrack track = worker.Open();
  EXPECT_EQ(track.sequence.address(), addresses[0]);
  EXPECT_EQ(worker.Step({&track}, {3}), absl::OkStatus());
}

TEST_F(ClusterTest, ASequenceThatADrainHasMovedGoesOnAtItsNewServer) {
  Authority authority;
  Serve(2, [&](server::Config& config) {
    config.tls.cert = authority.File("server.pem");
    config.tls.key = authority.File("server.key");
    config.tls.client_ca = authority.File("ca.pem");
    config.listen.operators = "blue,localhost";
    config.listen.unix_path = "";
  });
  for (size_t i = 0; i < 2; ++i) {
    addresses_[i] = absl::StrCat("localhost:", servers_[i]->server().tcp_port());
  }
  ClusterOptions cluster;
  cluster.home = addresses_[0];
  FleetWorker worker(target(), authority.As("red"), cluster);
  FleetTrack a = worker.Open(), b = worker.Open();
  ASSERT_EQ(worker.Step({&a, &b}, {7, 5}), absl::OkStatus());
  ASSERT_EQ(a.sequence.address(), addresses_[0]);
  client::ClientOptions blue = authority.As("blue");
  const auto drainer = client::Client::Connect(addresses_[0], blue);
  ASSERT_TRUE(drainer.ok()) << drainer.status();
  const auto drained = (*drainer)->Drain(20000, false, {addresses_[1]});
  ASSERT_TRUE(drained.ok()) << drained.status();
  // The step finds them; Recover would, too.
  EXPECT_EQ(worker.Step({&a, &b}, {2, 2}), absl::OkStatus());
  EXPECT_EQ(a.sequence.address(), addresses_[1]);
  EXPECT_EQ(b.sequence.length(), 7u);
  const auto found = worker.client().Recover(&a.sequence);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "alive");
  EXPECT_EQ(found->rows, 9u);
  // New ones avoid the server that drains.
  EXPECT_EQ(worker.Open().sequence.address(), addresses_[1]);
}

// Two server processes, of which one is killed.
class KilledOwnerTest : public ::testing::Test {
 protected:
  KilledOwnerTest()
      : a_({}), b_({}), worker_(a_.target() + "," + b_.target(), Options(), Home(a_.target())) {}
  static client::ClientOptions Options() {
    client::ClientOptions options;
    options.call_timeout_ms = 3000;
    return options;
  }
  static ClusterOptions Home(const std::string& address) {
    ClusterOptions options;
    options.home = address;
    return options;
  }
  FleetTrack OpenOn(const ServerProcess& server) {
    const auto there = worker_.client().ServerAt(server.target());
    EXPECT_TRUE((*there)->RegisterModel(SpecOf(worker_.dims(), kModel)).ok());
    auto opened = (*there)->OpenSequence(kModel);
    auto attached = worker_.client().Attach(kModel, opened->id());
    opened->Detach();
    return {*std::move(attached), DenseCache(worker_.dims().layers)};
  }
  void Kill(ServerProcess* server) {
    server->Signal(SIGKILL);
    server->Wait();
  }

  ServerProcess a_, b_;
  FleetWorker worker_;
};

TEST_F(KilledOwnerTest, FailsItsOwnRowsAlone) {
  FleetTrack a = OpenOn(a_), b = OpenOn(b_), c = OpenOn(b_);
  const std::vector<FleetTrack*> all = {&b, &a, &c};
  ASSERT_EQ(worker_.Step(all, {3, 4, 5}), absl::OkStatus());
  auto step = worker_.Begin(all, {2, 2, 2}, /*partial=*/true);
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_EQ(worker_.Layer(step->get(), 0, all, {2, 2, 2}), absl::OkStatus());
  Kill(&b_);
  EXPECT_EQ(worker_.Layer(step->get(), 1, all, {2, 2, 2}, v1::PROFILE_ABSORBED, {0, 2}),
            absl::OkStatus());
  const auto failed = (*step)->failed();
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].address, b_.target());
  EXPECT_EQ(failed[0].sequences, (std::vector<size_t>{0, 2}));
  EXPECT_EQ((*step)->End().value(), (std::vector<uint64_t>{3, 6, 5}));
  worker_.Settle(all);
  for (FleetTrack* track : {&b, &c}) {
    const auto found = worker_.client().Recover(&track->sequence);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->how, "none");
    EXPECT_EQ(found->address, a_.target());
    track->cache = DenseCache(worker_.dims().layers);
  }
  EXPECT_EQ(worker_.Step(all, {5, 1, 7}), absl::OkStatus());
}

TEST_F(KilledOwnerTest, IsReportedToWhoDoesNotWantParts) {
  FleetTrack a = OpenOn(a_), b = OpenOn(b_);
  const std::vector<FleetTrack*> all = {&a, &b};
  auto step = worker_.Begin(all, {1, 1});
  ASSERT_TRUE(step.ok()) << step.status();
  Kill(&b_);
  const absl::Status status = worker_.Layer(step->get(), 0, all, {1, 1});
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonIn(status), "owners_failed");
  EXPECT_NE(status.message().find(b_.target()), std::string::npos) << status;
  EXPECT_EQ((*step)->Abort(), absl::OkStatus());
  const auto begun = worker_.Begin(all, {1, 1});
  EXPECT_EQ(ReasonIn(begun.status()), "owners_failed");
  ASSERT_EQ(worker_.failed().size(), 1u);
  EXPECT_EQ(worker_.failed()[0].sequences, std::vector<size_t>{1});
  // The sub-step that had begun was aborted.
  worker_.Settle(all);
  EXPECT_EQ(worker_.Step({&a}, {2}), absl::OkStatus());
}

TEST_F(KilledOwnerTest, GetsNoNewSequences) {
  FleetTrack a = OpenOn(a_);
  Kill(&a_);
  FleetTrack moved = worker_.Open();  // a_ is the home
  EXPECT_EQ(moved.sequence.address(), b_.target());
  EXPECT_EQ(worker_.Step({&moved}, {3}), absl::OkStatus());
}

TEST_F(KilledOwnerTest, LeavesRowsThatAPeerHas) {
  const v1::Prefix prefix = PrefixOf(1, 32);
  // Both servers have computed the prefix.
  for (ServerProcess* server : {&a_, &b_}) {
    FleetWorker other(server->target(), Options(), Home(server->target()));
    FleetTrack track = other.Open(prefix);
    ASSERT_EQ(other.Step({&track}, {32}), absl::OkStatus());
  }
  auto opened = worker_.client().OpenSequence(kModel, prefix);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->length(), 32u);
  const bool on_a = opened->address() == a_.target();
  Kill(on_a ? &a_ : &b_);
  const auto found = worker_.client().Recover(&*opened, prefix);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "peer");
  EXPECT_EQ(found->address, (on_a ? b_ : a_).target());
  EXPECT_EQ(found->rows, 32u);
  EXPECT_EQ(found->lost, 0u);
}

}  // namespace
}  // namespace mla::integration
