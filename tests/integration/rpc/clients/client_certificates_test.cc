// Certificates that change while the C++ client and the C client are connected: rotated, missing
// for a moment, half-written. Certificates are made by the openssl command at run time.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/c/mla_client.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "client/cpp/tls_files.h"
#include "tests/integration/hand_over/authority.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using CClient = std::unique_ptr<mla_client, decltype(&mla_client_free)>;
using CSequence = std::unique_ptr<mla_sequence, decltype(&mla_sequence_free)>;

// Only a test that fails waits for all these tries.
bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 300; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return false;
}

// The files used.pem, used.key and used.ca of an authority's folder are a client's.
class ClientFiles {
 public:
  explicit ClientFiles(const Authority& authority) : authority_(authority) { Use("red", "ca"); }

  // Goes over to the certificate of `name` and the roots `ca`.
  void Use(const std::string& name, const std::string& ca) const {
    authority_.Write("used.ca", authority_.Read(ca + ".pem"));
    authority_.Write("used.pem", authority_.Read(name + ".pem"));
    authority_.Write("used.key", authority_.Read(name + ".key"));
  }

  client::TlsFiles::Paths Paths() const {
    return {authority_.File("used.ca"), authority_.File("used.pem"), authority_.File("used.key")};
  }
  client::ClientOptions Options() const {
    client::ClientOptions options;
    options.tls_ca = Paths().ca;
    options.tls_cert = Paths().cert;
    options.tls_key = Paths().key;
    options.tls_server_name = "localhost";
    return options;
  }

  // Calls `check` in each state in which the files cannot be used, with words for it, and leaves
  // the files in the last one.
  void WhileBad(const std::function<void(const std::string&)>& check) const {
    const std::string cert = authority_.Read("blue.pem"), key = authority_.Read("blue.key");
    const struct {
      const char *what, *file;
      std::string text;
    } kBad[] = {{"the new certificate without its key", "used.pem", cert},
                {"half a certificate", "used.pem", cert.substr(0, cert.size() / 2)},
                {"an empty key", "used.key", ""},
                {"half a key", "used.key", key.substr(0, key.size() / 2)},
                {"garbage for authorities", "used.ca", "garbage"}};
    for (const auto& bad : kBad) {
      authority_.Write(bad.file, bad.text);
      check(bad.what);
      Use("red", "ca");
    }
    for (const char* const file : {"used.ca", "used.pem", "used.key"}) {
      EXPECT_EQ(std::remove(authority_.File(file).c_str()), 0);
      check(absl::StrCat("no ", file));
    }
  }

 private:
  const Authority& authority_;
};

class ClientCertificatesTest : public ::testing::Test {
 protected:
  ClientCertificatesTest()
      : files_(authority_), server_([this](server::Config& config) {
          authority_.Write("trusted.pem", authority_.Read("ca.pem"));
          config.tls.cert = authority_.File("server.pem");
          config.tls.key = authority_.File("server.key");
          config.tls.client_ca = authority_.File("trusted.pem");
          config.tls.reload_ms = 200;
          config.listen.unix_path = "";
        }) {}

  std::unique_ptr<client::Client> Connect() const {
    auto client = client::Client::Connect(server_.tcp_target(), files_.Options());
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  CClient ConnectC() const {
    const client::TlsFiles::Paths paths = files_.Paths();
    mla_connect_options options{};
    options.struct_size = sizeof(options);
    options.tls_ca = paths.ca.c_str();
    options.tls_cert = paths.cert.c_str();
    options.tls_key = paths.key.c_str();
    options.tls_server_name = "localhost";
    mla_client* client = nullptr;
    EXPECT_EQ(mla_connect(server_.tcp_target().c_str(), &options, &client, nullptr), MLA_OK);
    return {client, mla_client_free};
  }

  static CSequence OpenC(mla_client* client) {
    mla_sequence* sequence = nullptr;
    EXPECT_EQ(mla_sequence_open(client, "m", nullptr, &sequence, nullptr), MLA_OK);
    return {sequence, mla_sequence_free};
  }

  // Server and clients go over to another authority, and the clients to another tenant.
  void RotateAll() {
    authority_.Make("server", "other", "/CN=localhost", "DNS:localhost,IP:127.0.0.1", 30);
    authority_.Write("trusted.pem", authority_.Read("other.pem"));
    authority_.Make("blue", "other", "/CN=blue", "", 30);
    files_.Use("blue", "other");
  }

  Authority authority_;
  ClientFiles files_;
  TestServer server_;
};

TEST_F(ClientCertificatesTest, CallsAndStreamsAfterAChangeHaveTheNewOne) {
  const auto client = Connect();
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  ASSERT_EQ(worker.Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  RotateAll();
  // The server may be the later one to see its files.
  EXPECT_TRUE(Eventually([&] {
    const auto models = client->ListModels();
    return models.ok() && models->models_size() == 0;  // of blue
  }));
  // The stream is still red's, on the connection on which it has begun.
  EXPECT_EQ(worker.Step({&track}, {1}, v1::PROFILE_ABSORBED), absl::OkStatus());
  const auto session = client->OpenSession();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto step = (*session)->Begin("m", {{&track.sequence, 1}});
  EXPECT_EQ(step.status().code(), absl::StatusCode::kNotFound) << step.status();
}

TEST_F(ClientCertificatesTest, CallsOfTheCLibraryAfterAChangeHaveTheNewOne) {
  const auto red = Connect();
  ASSERT_TRUE(red->RegisterModel(SpecOf({}, "m")).ok());
  const CClient client = ConnectC();
  const CSequence sequence = OpenC(client.get());
  mla_session* session = nullptr;
  ASSERT_EQ(mla_session_open(client.get(), &session, nullptr), MLA_OK);
  const mla_step_rows rows = {sequence.get(), 1};
  mla_step* step = nullptr;
  ASSERT_EQ(mla_step_begin(session, "m", &rows, 1, nullptr, &step, nullptr), MLA_OK);
  RotateAll();
  EXPECT_TRUE(Eventually([&] {  // blue does not have it
    return mla_sequence_refresh(sequence.get(), nullptr) == MLA_NOT_FOUND;
  }));
  EXPECT_EQ(mla_step_abort(step, nullptr), MLA_OK);  // on red's stream
  mla_step_free(step);
  mla_session_free(session);
}

TEST_F(ClientCertificatesTest, FilesThatCannotBeUsedChangeNothing) {
  const auto client = Connect();
  ASSERT_TRUE(client->RegisterModel(SpecOf({}, "m")).ok());
  const CClient c_client = ConnectC();
  const CSequence c_sequence = OpenC(c_client.get());
  std::vector<std::unique_ptr<client::Session>> sessions;
  files_.WhileBad([&](const std::string& what) {
    const auto models = client->ListModels();
    ASSERT_TRUE(models.ok()) << what << models.status();
    EXPECT_EQ(models->models_size(), 1) << what;
    EXPECT_EQ(mla_sequence_refresh(c_sequence.get(), nullptr), MLA_OK) << what;
    // A connection carries eight sessions, so the ninth needs another one.
    for (int i = 0; i < 8; ++i) {
      sessions.push_back(*client->OpenSession());
      auto sequence = client->OpenSequence("m");
      ASSERT_TRUE(sequence.ok()) << what << sequence.status();
      const auto step = sessions.back()->Begin("m", {{&*sequence, 1}});
      ASSERT_TRUE(step.ok()) << what << step.status();
      EXPECT_EQ((*step)->Abort(), absl::OkStatus()) << what;
    }
  });
  // Nothing is dead: the first call after the files have come uses them.
  files_.Use("blue", "ca");
  const auto models = client->ListModels();
  ASSERT_TRUE(models.ok()) << models.status();
  EXPECT_EQ(models->models_size(), 0);
  EXPECT_EQ(mla_sequence_refresh(c_sequence.get(), nullptr), MLA_NOT_FOUND);
}

TEST(TlsFilesTest, CredentialsChangeWithFilesThatCanBeUsedAlone) {
  const Authority authority;
  const ClientFiles used(authority);
  const auto files = client::TlsFiles::Open(used.Paths(), "tls_");
  ASSERT_TRUE(files.ok()) << files.status();
  const auto first = (*files)->Current();
  EXPECT_EQ((*files)->Current(), first);
  used.Use("red", "ca");
  EXPECT_EQ((*files)->Current(), first) << "the same text once more";
  used.WhileBad([&](const std::string& what) { EXPECT_EQ((*files)->Current(), first) << what; });
  used.Use("blue", "ca");
  const auto second = (*files)->Current();
  EXPECT_NE(second, first);
  EXPECT_EQ((*files)->Current(), second);
  authority.Write("used.ca", authority.Read("other.pem"));
  EXPECT_NE((*files)->Current(), second);
}

TEST(TlsFilesTest, WhatIsWrongIsNamed) {
  const Authority authority;
  const ClientFiles used(authority);
  const auto refusal = [&] {
    const absl::Status status = client::TlsFiles::Open(used.Paths(), "tls_").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  authority.Write("used.key", authority.Read("blue.key"));
  EXPECT_EQ(refusal(), "tls_key: " + used.Paths().key + ": does not belong to tls_cert");
  authority.Write("used.key", "garbage");
  EXPECT_EQ(refusal(), "tls_key: " + used.Paths().key + ": holds no unencrypted PEM private key");
  authority.Write("used.pem", "garbage");
  EXPECT_EQ(refusal(), "tls_cert: " + used.Paths().cert + ": holds no PEM certificate");
  authority.Write("used.ca", std::string((size_t{16} << 20) + 1, 'x'));
  EXPECT_EQ(refusal(), "tls_ca: " + used.Paths().ca + ": has more than 16777216 bytes");
  authority.Write("used.ca", "");
  EXPECT_EQ(refusal(), "tls_ca: " + used.Paths().ca + ": holds no PEM certificate");
  std::remove(used.Paths().ca.c_str());
  EXPECT_EQ(refusal(), "tls_ca: " + used.Paths().ca + ": cannot be read");

  client::ClientOptions options = used.Options();
  options.tls_key = "";
  const absl::Status status = client::Client::Connect("localhost:1", options).status();
  EXPECT_EQ(status.message(), "tls_key: got no path, must be set with the other files of TLS");
}

}  // namespace
}  // namespace mla::integration
