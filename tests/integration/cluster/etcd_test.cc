// The cluster's client with a real etcd: members that come, go and do not answer, and a registry
// that is away.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "absl/strings/str_cat.h"
#include "client/cpp/cluster/registry.h"
#include "etcd/rpc.grpc.pb.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/processes.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

constexpr char kGolden[] = "tests/cluster/placement_golden.txt";

// etcd, which ./dev setup and ./dev test unpack below the clone; or the system's.
std::string EtcdProgram() {
  std::error_code error;
  const auto golden = std::filesystem::canonical(kGolden, error);
  const auto unpacked =
      golden.parent_path().parent_path().parent_path() / "build/tools/usr/bin/etcd";
  for (const std::string& path : {unpacked.string(), std::string("/usr/bin/etcd")}) {
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return "";
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

class Etcd final {
 public:
  // With `tls` clients need certificates of that authority.
  explicit Etcd(const Authority* tls = nullptr) : tls_(tls) { Start(); }

  std::string target() const {
    return absl::StrCat(tls_ != nullptr ? "etcds" : "etcd", "://127.0.0.1:", port_, "/fleet");
  }
  // The files of one of the authority's clients.
  client::EtcdFiles FilesOf(const std::string& name) const {
    return {tls_->File("ca.pem"), tls_->File(name + ".pem"), tls_->File(name + ".key")};
  }

  void Start() {
    const std::string url =
        absl::StrCat(tls_ != nullptr ? "https" : "http", "://127.0.0.1:", port_);
    const std::string peer = absl::StrCat("http://127.0.0.1:", peer_port_);
    process_.emplace(absl::StrCat(
        EtcdProgram(), " --data-dir=", folder_.File("data"), " --listen-client-urls=", url,
        " --advertise-client-urls=", url, " --listen-peer-urls=", peer,
        " --initial-advertise-peer-urls=", peer, " --initial-cluster=default=", peer, TlsFlags(),
        " >", folder_.File("log"), " 2>&1"));
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
    channel_ =
        grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port_), Credentials(), arguments);
    EXPECT_TRUE(Eventually([&] { return Put("other/x", "y"); }));
  }
  void Kill() {
    process_->Signal(SIGKILL);
    process_->Finish();
    process_.reset();
  }

  bool Put(const std::string& key, const std::string& value) {
    etcdserverpb::PutRequest request;
    request.set_key(key);
    request.set_value(value);
    etcdserverpb::PutResponse reply;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    // Nothing moves a connection on between calls but gRPC's own look every five seconds, so the
    // call itself waits until etcd has started.
    context.set_wait_for_ready(true);
    return etcdserverpb::KV::NewStub(channel_)->Put(&context, request, &reply).ok();
  }
  // As `announce` does. New sequences avoid members that drain, and values that name none.
  void Announce(const std::string& name, const std::string& address, bool draining = false) {
    EXPECT_TRUE(
        Put("fleet/servers/" + name, absl::StrCat(R"({"address":")", address, R"(","draining":)",
                                                  draining ? "true" : "false", "}")));
  }
  void Withdraw(const std::string& name) { EXPECT_TRUE(Put("fleet/servers/" + name, "gone")); }

 private:
  std::string TlsFlags() const {
    if (tls_ == nullptr) return "";
    return absl::StrCat(" --client-cert-auth --trusted-ca-file=", tls_->File("ca.pem"),
                        " --cert-file=", tls_->File("server.pem"),
                        " --key-file=", tls_->File("server.key"));
  }
  std::shared_ptr<grpc::ChannelCredentials> Credentials() const {
    if (tls_ == nullptr) return grpc::InsecureChannelCredentials();
    return grpc::SslCredentials(
        {tls_->Read("ca.pem"), tls_->Read("blue.key"), tls_->Read("blue.pem")});
  }

  const Authority* const tls_;
  TempFolder folder_;
  const int port_ = FreePort(), peer_port_ = FreePort();
  std::optional<BackgroundCommand> process_;
  std::shared_ptr<grpc::Channel> channel_;
};

class EtcdTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(EtcdProgram(), "") << "no etcd: run ./dev setup"; }

  client::ClusterOptions Options(const std::string& home) {
    client::ClusterOptions options;
    options.home = home;
    options.refresh_s = 0.05;
    return options;
  }
  size_t MembersOf(FleetWorker* worker) {
    const auto members = worker->client().Members();
    return members.ok() ? members->size() : 0;
  }
};

TEST_F(EtcdTest, AMemberThatJoinsGetsSequencesAndOneThatDrainsGetsNone) {
  Etcd etcd;
  TestServer a, b;
  etcd.Announce("a", a.tcp_target());
  ASSERT_TRUE(etcd.Put("fleet/servers/bad", "nonsense"));
  ASSERT_TRUE(etcd.Put("fleet2/servers/c", R"({"address":"c:1"})"));
  FleetWorker worker(etcd.target(), {}, Options(b.tcp_target()));
  EXPECT_EQ(MembersOf(&worker), 1u);
  FleetTrack first = worker.Open();
  EXPECT_EQ(first.sequence.address(), a.tcp_target());
  etcd.Announce("b", b.tcp_target());
  ASSERT_TRUE(Eventually([&] { return MembersOf(&worker) == 2; }));
  FleetTrack second = worker.Open();
  EXPECT_EQ(second.sequence.address(), b.tcp_target());
  EXPECT_EQ(worker.Step({&first, &second}, {3, 4}), absl::OkStatus());
  etcd.Announce("b", b.tcp_target(), /*draining=*/true);
  ASSERT_TRUE(Eventually([&] { return *worker.client().Home() == a.tcp_target(); }));
  EXPECT_EQ(worker.Open().sequence.address(), a.tcp_target());
  // A server that has left the registry and answers keeps what it has.
  etcd.Withdraw("b");
  ASSERT_TRUE(Eventually([&] { return MembersOf(&worker) == 1; }));
  EXPECT_EQ(worker.Step({&first, &second}, {1, 1}), absl::OkStatus());
  EXPECT_FALSE(second.sequence.lost());
}

TEST_F(EtcdTest, StepsGoOnWhileTheRegistryIsAway) {
  Etcd etcd;
  TestServer a;
  etcd.Announce("a", a.tcp_target());
  client::ClusterOptions options = Options(a.tcp_target());
  options.keep_s = 1.0;
  FleetWorker worker(etcd.target(), {}, options);
  FleetTrack track = worker.Open();
  etcd.Kill();
  FleetTrack second = worker.Open();
  EXPECT_EQ(worker.Step({&track, &second}, {3, 1}), absl::OkStatus());
  ASSERT_TRUE(Eventually([&] { return !worker.client().Members().ok(); }));
  EXPECT_EQ(ReasonIn(worker.client().OpenSequence(kModel).status()), "registry_away");
  EXPECT_EQ(worker.Step({&track, &second}, {1, 1}), absl::OkStatus());
  etcd.Start();
  ASSERT_TRUE(Eventually([&] { return worker.client().Members().ok(); }));
  EXPECT_EQ(worker.Open().sequence.address(), a.tcp_target());
}

TEST_F(EtcdTest, AStepDoesNotWaitForAMemberThatHasGoneSilent) {
  Etcd etcd;
  ServerProcess a({}), b({});
  etcd.Announce("a", a.target());
  etcd.Announce("b", b.target());
  client::ClientOptions inline_only;
  inline_only.transport = client::ClientOptions::Transport::kInline;
  inline_only.call_timeout_ms = 2000;
  FleetWorker worker(etcd.target(), inline_only, Options(a.target()));
  FleetTrack first = worker.Open();
  const auto there = worker.client().ServerAt(b.target());
  ASSERT_TRUE((*there)->RegisterModel(SpecOf(worker.dims(), kModel)).ok());
  auto opened = (*there)->OpenSequence(kModel);
  FleetTrack second{*worker.client().Attach(kModel, opened->id()), DenseCache(2)};
  opened->Detach();
  auto step = worker.Begin({&first, &second}, {2, 2}, /*partial=*/true);
  ASSERT_TRUE(step.ok()) << step.status();
  b.Signal(SIGSTOP);
  // Its announcer's lease ends while the step waits for it: far sooner than the call's own minute.
  std::thread registry([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    etcd.Withdraw("b");
  });
  EXPECT_EQ(worker.Layer(step->get(), 0, {&first, &second}, {2, 2}, v1::PROFILE_ABSORBED, {1}),
            absl::OkStatus());
  registry.join();
  ASSERT_EQ((*step)->failed().size(), 1u);
  EXPECT_EQ((*step)->failed()[0].address, b.target());
  EXPECT_EQ((*step)->failed()[0].status.code(), absl::StatusCode::kUnavailable)
      << (*step)->failed()[0].status;
  EXPECT_TRUE(second.sequence.lost());
  EXPECT_EQ(worker.Layer(step->get(), 1, {&first, &second}, {2, 2}, v1::PROFILE_ABSORBED, {1}),
            absl::OkStatus());
  EXPECT_EQ((*step)->End().value(), (std::vector<uint64_t>{2, 0}));
  worker.Settle({&first, &second});
  const auto found = worker.client().Recover(&second.sequence);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->address, a.target());
  second.cache = DenseCache(2);
  EXPECT_EQ(worker.Step({&first, &second}, {1, 5}), absl::OkStatus());
  b.Signal(SIGCONT);
}

TEST_F(EtcdTest, ATombstoneThatLeadsNowhereLeavesTheOtherWays) {
  Etcd etcd;
  auto a = std::make_unique<TestServer>();
  TestServer b;
  etcd.Announce("a", a->tcp_target());
  etcd.Announce("b", b.tcp_target());
  FleetWorker worker(etcd.target(), {}, Options(a->tcp_target()));
  FleetTrack track = worker.Open();
  // In place of a drain: another sequence at b, under the first one's name in the registry.
  const auto there = worker.client().ServerAt(b.tcp_target());
  ASSERT_TRUE((*there)->RegisterModel(SpecOf(worker.dims(), kModel)).ok());
  const auto registry = client::RegistryOf(etcd.target());
  ASSERT_TRUE(registry.ok());
  EXPECT_EQ(*(*registry)->Moved(track.sequence.id()), "");
  ASSERT_EQ((*registry)->WriteMoved({1, track.sequence.id()}, b.tcp_target()), absl::OkStatus());
  EXPECT_EQ(*(*registry)->Moved(track.sequence.id()), b.tcp_target());
  EXPECT_EQ(*(*registry)->Moved(2), "");
  // b does not have it, so the tombstone leads nowhere and other ways are taken.
  a.reset();
  const auto found = worker.client().Recover(&track.sequence);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "none");
  EXPECT_EQ(found->address, b.tcp_target());
}

TEST_F(EtcdTest, MembersAndTombstonesTravelOverTls) {
  const Authority authority;
  Etcd etcd(&authority);
  TestServer a, b;
  etcd.Announce("a", a.tcp_target());
  client::ClusterOptions options = Options(a.tcp_target());
  options.etcd = etcd.FilesOf("red");
  FleetWorker worker(etcd.target(), {}, options);
  FleetTrack track = worker.Open();
  EXPECT_EQ(track.sequence.address(), a.tcp_target());
  etcd.Announce("b", b.tcp_target());
  EXPECT_TRUE(Eventually([&] { return MembersOf(&worker) == 2; }));
  EXPECT_EQ(worker.Step({&track}, {3}), absl::OkStatus());
  const auto registry = client::RegistryOf(etcd.target(), etcd.FilesOf("red"));
  ASSERT_TRUE(registry.ok()) << registry.status();
  ASSERT_EQ((*registry)->WriteMoved({7}, b.tcp_target()), absl::OkStatus());
  EXPECT_EQ((*registry)->Moved(7).value(), b.tcp_target());

  // A peer without a certificate, with one of another authority, or that trusts another one, learns
  // nothing.
  client::EtcdFiles nameless = etcd.FilesOf("red"), distrustful = etcd.FilesOf("red");
  nameless.cert = nameless.key = "";
  distrustful.ca = authority.File("other.pem");
  for (const client::EtcdFiles& files : {nameless, etcd.FilesOf("foreign"), distrustful}) {
    const auto refused = client::RegistryOf(etcd.target(), files);
    ASSERT_TRUE(refused.ok()) << refused.status();
    EXPECT_EQ(ReasonIn((*refused)->Read().status()), "registry_away");
  }
  client::EtcdFiles missing = etcd.FilesOf("red");
  missing.key = authority.File("no-such-file");
  EXPECT_TRUE(absl::IsInvalidArgument(client::RegistryOf(etcd.target(), missing).status()));
}

TEST_F(EtcdTest, CertificatesThatChangeAreReadAgain) {
  const Authority authority;
  Etcd etcd(&authority);
  etcd.Announce("a", "a:1");
  const auto use = [&](const std::string& name) {
    authority.Write("used.pem", authority.Read(name + ".pem"));
    authority.Write("used.key", authority.Read(name + ".key"));
  };
  use("foreign");
  const auto registry = client::RegistryOf(etcd.target(), etcd.FilesOf("used"));
  ASSERT_TRUE(registry.ok()) << registry.status();
  EXPECT_EQ(ReasonIn((*registry)->Read().status()), "registry_away");
  use("red");
  const auto members = (*registry)->Read();
  ASSERT_TRUE(members.ok()) << members.status();
  EXPECT_EQ(members->size(), 1u);
}

// `mlactl announce` of a server, as node-1:50551.
class Announce final {
 public:
  Announce(const Etcd& etcd, const ServerProcess& server)
      : registry_(*client::RegistryOf(etcd.target())),
        command_(absl::StrCat(kMlactl, " announce --node=node-1 --address=node-1:50551",
                              " --registry=", etcd.target(), " --target=", server.target())) {}

  bool IsThere(bool wanted = true) {
    return Eventually([&] {
      const auto members = registry_->Read();
      return members.ok() && members->size() == (wanted ? 1u : 0u);
    });
  }
  // REQUIRES: it is there.
  client::Member Said() { return registry_->Read().value().at(0); }
  BackgroundCommand& command() { return command_; }

 private:
  const std::unique_ptr<client::Registry> registry_;
  BackgroundCommand command_;
};

TEST_F(EtcdTest, AnnounceSaysWhatTheServerHasUntilItIsGone) {
  const Etcd etcd;
  ServerProcess server({});
  Announce announce(etcd, server);
  ASSERT_TRUE(announce.IsThere());
  const client::Member said = announce.Said();
  EXPECT_EQ(said.address(), "node-1:50551");
  EXPECT_EQ(said.node(), "node-1");
  EXPECT_EQ("unix:" + said.socket(), server.target());
  EXPECT_NE(said.device(), "");
  EXPECT_NE(said.version(), "");
  EXPECT_GT(said.bytes_total(), 0u);
  EXPECT_GT(said.bytes_free(), 0u);
  EXPECT_LE(said.bytes_free(), said.bytes_total());
  EXPECT_FALSE(said.draining());
  const auto client = client::Client::Connect(server.target(), {});
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(said.boot_id(), (*client)->info().boot_id());
  v1::ModelSpec spec = SpecOf(Dims(), kModel);
  spec.set_weights_digest(std::string(32, '\x01'));
  ASSERT_TRUE((*client)->RegisterModel(spec).ok());
  const auto sequence = (*client)->OpenSequence(kModel);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_TRUE(Eventually([&] { return announce.Said().sequences() == 1; }));
  EXPECT_TRUE(Eventually([&] { return announce.Said().models_size() == 1; }));
  server.Signal(SIGKILL);
  server.Wait();
  EXPECT_TRUE(announce.IsThere(false));
  announce.command().Signal(SIGTERM);
  const Result ended = announce.command().Finish();
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.output, testing::HasSubstr("announced node-1:50551\nnot announced: "));
}

TEST_F(EtcdTest, AnnounceTakesItsServerOutWhenItEnds) {
  const Etcd etcd;
  const ServerProcess server({});
  for (const int signal : {SIGTERM, SIGKILL}) {  // at once, and with the lease
    Announce announce(etcd, server);
    ASSERT_TRUE(announce.IsThere());
    announce.command().Signal(signal);
    EXPECT_EQ(announce.command().Finish().code, signal == SIGTERM ? 0 : 128 + SIGKILL);
    EXPECT_TRUE(announce.IsThere(false)) << signal;
  }
}

TEST_F(EtcdTest, AnnounceComesBackWithTheRegistry) {
  Etcd etcd;
  const ServerProcess server({});
  Announce announce(etcd, server);
  ASSERT_TRUE(announce.IsThere());
  // etcd remembers the first lease, so only what is written after its end brings the server back.
  etcd.Withdraw("node-1_50551");
  etcd.Kill();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  etcd.Start();
  EXPECT_TRUE(announce.IsThere());
}

TEST_F(EtcdTest, AnnounceRefusesWhatItCannotDo) {
  const auto run = [](const std::string& words) {
    return Shell(absl::StrCat(kMlactl, " announce ", words));
  };
  const std::string etcd = " --registry=etcd://127.0.0.1:1/fleet";
  Result result = run("--address=a:1 --target=a:1,b:1" + etcd);
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, testing::HasSubstr("must be one server"));
  result = run("--address=a:1 --target=a:1 --registry=a:1,b:1");
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, testing::HasSubstr("--registry"));
  EXPECT_EQ(run("--target=a:1" + etcd).code, 1) << "no address";
  EXPECT_EQ(run("--address= --target=a:1" + etcd).code, 1);
  const auto list = client::RegistryOf("a:1,b:1");
  ASSERT_TRUE(list.ok());
  EXPECT_TRUE(absl::IsUnimplemented((*list)->Announce(client::MemberAt("a:1"), 4)));
  EXPECT_EQ((*list)->Withdraw(), absl::OkStatus());
}

TEST_F(EtcdTest, TheNextEndpointAnswersWhereOneDoesNot) {
  Etcd etcd;
  etcd.Announce("a", "a:1");
  const std::string good = etcd.target().substr(std::string("etcd://").size());
  const auto both = client::RegistryOf(absl::StrCat("etcd://127.0.0.1:", FreePort(), ",", good));
  ASSERT_TRUE(both.ok()) << both.status();
  const auto members = (*both)->Read();
  ASSERT_TRUE(members.ok()) << members.status();
  EXPECT_EQ(members->size(), 1u);
}

}  // namespace
}  // namespace mla::integration
