// Mutual TLS: who may connect, as which tenant, and which ways stay closed. Certificates are made
// by the openssl command at run time.
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"
#include "mla/v1/admin.grpc.pb.h"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

class TlsTest : public ::testing::Test {
 protected:
  TlsTest()
      : server_([this](server::Config& config) {
          config.tls.cert = authority_.File("server.pem");
          config.tls.key = authority_.File("server.key");
          authority_.Write("ca.used.pem", authority_.Read("ca.pem"));
          config.tls.client_ca = authority_.File("ca.used.pem");
          authority_.Revoke("used.crl", "ca", {});
          config.tls.client_crl = authority_.File("used.crl");
          config.tls.reload_ms = 200;
          config.listen.operators = "blue,someone";
          config.listen.unix_path = "";
        }) {}

  absl::StatusOr<std::unique_ptr<client::Client>> Connect(const client::ClientOptions& options) {
    return client::Client::Connect(server_.tcp_target(), options);
  }

  Authority authority_;
  TestServer server_;
};

TEST_F(TlsTest, TheNameInTheCertificateIsTheTenant) {
  auto red_options = authority_.As("red");
  red_options.tenant = "blue";  // metadata is ignored over TLS
  auto red = Connect(red_options);
  ASSERT_TRUE(red.ok()) << red.status();
  auto blue = Connect(authority_.As("blue"));
  ASSERT_TRUE(blue.ok()) << blue.status();
  Worker worker(red->get(), {}, "m", 1);
  Track track = *worker.Open();
  EXPECT_EQ(worker.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  EXPECT_EQ((*blue)->ListModels()->models_size(), 0);
  EXPECT_EQ((*blue)->GetSequences({track.sequence.id()}, false)->not_found_size(), 1);
}

TEST_F(TlsTest, TheFirstAlternativeNameCountsBeforeAllOthers) {
  auto red = Connect(authority_.As("red"));
  auto alias = Connect(authority_.As("alias"));
  auto blue = Connect(authority_.As("blue"));
  ASSERT_TRUE(red.ok() && alias.ok() && blue.ok()) << alias.status();
  ASSERT_TRUE((*alias)->RegisterModel(SpecOf({}, "m")).ok());
  EXPECT_EQ((*red)->ListModels()->models_size(), 1);
  EXPECT_EQ((*blue)->ListModels()->models_size(), 0);
}

TEST_F(TlsTest, OnlyCertificatesOfTheAuthorityGetIn) {
  client::ClientOptions without_tls;
  without_tls.call_timeout_ms = 2000;
  const auto plain = Connect(without_tls);
  EXPECT_TRUE(absl::IsUnavailable(plain.status())) << plain.status();
  for (const char* name : {"foreign", "expired"}) {
    const auto client = Connect(authority_.As(name));
    EXPECT_TRUE(absl::IsUnavailable(client.status())) << name << client.status();
  }
  // The client checks the server's identity as well.
  auto suspicious = authority_.As("red");
  suspicious.tls_ca = authority_.File("other.pem");
  EXPECT_TRUE(absl::IsUnavailable(Connect(suspicious).status()));
  auto elsewhere = authority_.As("red");
  elsewhere.tls_server_name = "example.org";
  EXPECT_TRUE(absl::IsUnavailable(Connect(elsewhere).status()));
}

TEST_F(TlsTest, NoCertificateAtAll) {
  std::ifstream file(authority_.File("ca.pem"));
  std::ostringstream ca;
  ca << file.rdbuf();
  grpc::SslCredentialsOptions ssl;
  ssl.pem_root_certs = ca.str();
  grpc::ChannelArguments arguments;
  arguments.SetSslTargetNameOverride("localhost");
  const auto stub = v1::Admin::NewStub(
      grpc::CreateCustomChannel(server_.tcp_target(), grpc::SslCredentials(ssl), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(3));
  v1::GetServerInfoReply reply;
  EXPECT_EQ(stub->GetServerInfo(&context, {}, &reply).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, ACertificateWithoutANameIsUnauthenticated) {
  const auto client = Connect(authority_.As("nameless"));
  EXPECT_TRUE(absl::IsUnauthenticated(client.status())) << client.status();
}

TEST_F(TlsTest, OnlyOperatorsDrain) {
  auto red = Connect(authority_.As("red"));
  ASSERT_TRUE(red.ok()) << red.status();
  const auto refused = (*red)->Drain(100, true);
  EXPECT_TRUE(absl::IsPermissionDenied(refused.status())) << refused.status();
  EXPECT_EQ(client::DetailOf(refused.status())->reason(), "not_an_operator");
  EXPECT_TRUE(*(*red)->IsServing());
  auto blue = Connect(authority_.As("blue"));
  ASSERT_TRUE(blue.ok()) << blue.status();
  const auto drained = (*blue)->Drain(100, false);
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_TRUE(drained->drained());
}

TEST_F(TlsTest, RenewedCertificatesAreUsed) {
  // The server gets a certificate that clients of the old name refuse.
  authority_.Make("server", "ca", "/CN=renewed", "DNS:renewed.example", 30);
  auto options = authority_.As("red");
  options.tls_server_name = "renewed.example";
  absl::Status status;
  for (int i = 0; i < 50; ++i) {
    status = Connect(options).status();
    if (status.ok()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  EXPECT_EQ(status, absl::OkStatus());
}

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 100; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  return false;
}

// `cp` truncates the target first, so a file may be cut, mixed or out of date in between. New
// connections use the last good files during that time.
TEST_F(TlsTest, TheLastGoodFilesStayInUse) {
  const int port = server_.server().ops_port();
  const std::string cert = authority_.Read("server.pem"), key = authority_.Read("server.key");
  const std::string ca = authority_.Read("ca.pem");
  authority_.Make("late", "ca", "/CN=localhost", "DNS:localhost", -1);
  const struct {
    const char* what;
    std::string cert, key, client_ca;
  } kBad[] = {{"empty certificate", "", key, ca},
              {"empty key", cert, "", ca},
              {"empty authorities", cert, key, ""},
              {"garbage", "garbage", "garbage", ca},
              {"half a certificate", cert.substr(0, cert.size() / 2), key, ca},
              {"mismatched pair", cert, authority_.Read("red.key"), ca},
              {"expired", authority_.Read("late.pem"), authority_.Read("late.key"), ca}};
  int refused = 0;
  for (const auto& bad : kBad) {
    authority_.Write("server.pem", bad.cert);
    authority_.Write("server.key", bad.key);
    authority_.Write("ca.used.pem", bad.client_ca);
    const std::string line =
        absl::StrCat("\nmla_tls_reloads_total{result=\"refused\"} ", ++refused, "\n");
    EXPECT_TRUE(Eventually([&] {
      return HttpGet(port, "/metrics").find(line) != std::string::npos;
    })) << bad.what;
    EXPECT_NE(HttpGet(port, "/metrics").find("\nmla_tls_files_refused 1\n"), std::string::npos);
    EXPECT_NE(HttpGet(port, "/readyz?verbose").find("TLS files not in use: tls."),
              std::string::npos);
    const auto client = Connect(authority_.As("red"));
    EXPECT_TRUE(client.ok()) << bad.what << client.status();
  }
  authority_.Make("server", "ca", "/CN=renewed", "DNS:renewed.example", 30);
  authority_.Write("ca.used.pem", ca);
  auto options = authority_.As("red");
  options.tls_server_name = "renewed.example";
  EXPECT_TRUE(Eventually([&] { return Connect(options).ok(); }));
  const std::string metrics = HttpGet(port, "/metrics");
  EXPECT_NE(metrics.find("\nmla_tls_files_refused 0\n"), std::string::npos);
  EXPECT_NE(metrics.find("mla_tls_expiry_timestamp_seconds{file=\"cert\"}"), std::string::npos);
}

TEST_F(TlsTest, RevokedClientsAreRefusedOnOpenConnectionsToo) {
  auto red = Connect(authority_.As("red"));
  auto blue = Connect(authority_.As("blue"));
  ASSERT_TRUE(red.ok() && blue.ok());
  authority_.Revoke("used.crl", "ca", {"red"});
  EXPECT_TRUE(Eventually([&] { return absl::IsUnauthenticated((*red)->GetStats().status()); }));
  const absl::Status refused = (*red)->GetStats().status();
  EXPECT_NE(refused.message().find("revoked"), std::string::npos) << refused;
  EXPECT_TRUE(absl::IsUnauthenticated(Connect(authority_.As("red")).status()));
  EXPECT_TRUE((*blue)->GetStats().ok());
  EXPECT_TRUE(Connect(authority_.As("blue")).ok());
  // A revocation list of another authority does not replace it.
  authority_.Revoke("used.crl", "other", {"foreign"});
  EXPECT_TRUE(Eventually([&] {
    return HttpGet(server_.server().ops_port(), "/readyz?verbose").find("not signed by") !=
           std::string::npos;
  }));
  EXPECT_TRUE(absl::IsUnauthenticated((*red)->GetStats().status()));
  authority_.Revoke("used.crl", "ca", {});
  EXPECT_TRUE(Eventually([&] { return (*red)->GetStats().ok(); }));
}

TEST(TlsFilesTest, AnExpiredCertificateIsNotReady) {
  Authority authority;
  authority.MakeShort("server", 8);
  const TestServer server([&](server::Config& config) {
    config.listen.unix_path = "";
    config.tls.cert = authority.File("server.pem");
    config.tls.key = authority.File("server.key");
    config.tls.client_ca = authority.File("ca.pem");
    config.tls.reload_ms = 200;
  });
  const int port = server.server().ops_port();
  EXPECT_EQ(HttpGet(port, "/readyz"), "200 ready\n");
  EXPECT_TRUE(Eventually([&] { return HttpGet(port, "/readyz") == "503 not ready\n"; }));
  EXPECT_NE(HttpGet(port, "/readyz?verbose").find("tls.cert has expired"), std::string::npos);
  EXPECT_EQ(HttpGet(port, "/livez"), "200 alive\n");
}

TEST(TlsFilesTest, BadFilesStopTheStart) {
  const Authority authority;
  server::Config config = SmallConfig();
  config.listen.unix_path = "";
  config.tls.cert = authority.File("server.pem");
  config.tls.key = authority.File("red.key");
  config.tls.client_ca = authority.File("ca.pem");
  auto started = server::Server::Start({config, {}});
  EXPECT_TRUE(absl::IsInvalidArgument(started.status())) << started.status();
  EXPECT_NE(started.status().message().find("tls.key"), std::string::npos) << started.status();
  config.tls.key = authority.File("absent.key");
  EXPECT_TRUE(absl::IsInvalidArgument(server::Server::Start({config, {}}).status()));
  config.tls.key = authority.File("server.key");
  config.tls.client_ca = authority.File("server.key");
  EXPECT_TRUE(absl::IsInvalidArgument(server::Server::Start({config, {}}).status()));
  config.tls.client_ca = authority.File("ca.pem");
  config.tls.client_crl = authority.File("ca.pem");
  EXPECT_TRUE(absl::IsInvalidArgument(server::Server::Start({config, {}}).status()));
  config.tls.client_crl = "";
  config.tls.cert = authority.File("expired.pem");
  config.tls.key = authority.File("expired.key");
  const absl::Status expired = server::Server::Start({config, {}}).status();
  EXPECT_NE(expired.message().find("tls.cert"), std::string::npos) << expired;
  EXPECT_NE(expired.message().find("expired at "), std::string::npos) << expired;
}

// --- The unix socket of a server with TLS. No certificate identifies callers there.

class UnixBesideTlsTest : public ::testing::Test {
 protected:
  std::unique_ptr<TestServer> Serve(const std::string& unix_tenant) const {
    return std::make_unique<TestServer>([&](server::Config& config) {
      config.tls.cert = authority_->File("server.pem");
      config.tls.key = authority_->File("server.key");
      config.tls.client_ca = authority_->File("ca.pem");
      config.listen.unix_tenant = unix_tenant;
    });
  }

  static mode_t ModeOf(const std::string& path) {
    struct stat found {};
    EXPECT_EQ(lstat(path.c_str(), &found), 0) << path;
    return found.st_mode & 0777;
  }

  // Shared by all tests: making certificates is slow, and no test changes them.
  static void SetUpTestSuite() { authority_ = new Authority; }
  static void TearDownTestSuite() { delete authority_; }

  static absl::StatusOr<std::unique_ptr<client::Client>> As(const TestServer& server,
                                                            const std::string& tenant) {
    client::ClientOptions options;
    options.tenant = tenant;
    return client::Client::Connect(server.unix_target(), options);
  }

  static inline Authority* authority_ = nullptr;
};

TEST_F(UnixBesideTlsTest, OnlyTheServersOwnUserMayConnect) {
  const auto server = Serve("");
  const std::string path = server->folder().File("mla.sock");
  EXPECT_EQ(ModeOf(path) & 0177, 0u);
  EXPECT_TRUE(As(*server, "any").ok());
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_EQ(chmod(server->folder().path().c_str(), 0755), 0);
  const pid_t child = fork();
  if (child == 0) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    const int one = socket(AF_UNIX, SOCK_STREAM, 0);
    const bool other = setgid(65534) == 0 && setuid(65534) == 0;
    const int failed = connect(one, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    _exit(other && failed != 0 && errno == EACCES ? 0 : 1);
  }
  int ended = 0;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
}

TEST_F(UnixBesideTlsTest, ItsCallersHaveTheTenantOfTheConfiguration) {
  const auto server = Serve("blue");
  EXPECT_EQ(ModeOf(server->folder().File("mla.sock")), 0660u);
  auto unnamed = As(*server, "");
  ASSERT_TRUE(unnamed.ok()) << unnamed.status();
  ASSERT_TRUE((*unnamed)->RegisterModel(SpecOf({}, "m")).ok());
  auto blue = client::Client::Connect(server->tcp_target(), authority_->As("blue"));
  auto red = client::Client::Connect(server->tcp_target(), authority_->As("red"));
  ASSERT_TRUE(blue.ok() && red.ok());
  EXPECT_EQ((*blue)->ListModels()->models_size(), 1);
  EXPECT_EQ((*red)->ListModels()->models_size(), 0);
  auto claims_red = As(*server, "red");
  ASSERT_TRUE(claims_red.ok());
  EXPECT_EQ((*claims_red)->ListModels()->models_size(), 1);
  EXPECT_EQ((*claims_red)->Drain(0, false).status().code(), absl::StatusCode::kPermissionDenied);

  // Rings and streams that claim to be red's are treated as blue's, too.
  Worker worker(claims_red->get(), {}, "m", 1);
  Track track = *worker.Open();
  EXPECT_EQ(worker.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  client::ClientOptions streams;
  streams.tenant = "red";
  streams.transport = client::ClientOptions::Transport::kInline;
  auto over_grpc = client::Client::Connect(server->unix_target(), streams);
  ASSERT_TRUE(over_grpc.ok());
  Worker other(over_grpc->get(), {}, "m", 2);
  EXPECT_EQ(other.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST_F(UnixBesideTlsTest, AnyNameCountsWhereTheConfigurationSaysSo) {
  const auto server = Serve("*");
  EXPECT_EQ(ModeOf(server->folder().File("mla.sock")), 0660u);
  auto red = As(*server, "red");
  ASSERT_TRUE(red.ok());
  ASSERT_TRUE((*red)->RegisterModel(SpecOf({}, "m")).ok());
  EXPECT_EQ((*As(*server, "blue"))->ListModels()->models_size(), 0);
  EXPECT_EQ((*As(*server, "red"))->ListModels()->models_size(), 1);
}

}  // namespace
}  // namespace mla::integration
