// A real server in this process, on a free port and a unix socket in a folder of its own, with
// limits small enough for tests.
#ifndef MLA_TESTS_INTEGRATION_TEST_SERVER_H_
#define MLA_TESTS_INTEGRATION_TEST_SERVER_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "server/config/config.h"
#include "server/server.h"

namespace mla::integration {

// A fresh folder, removed with its contents.
class TempFolder final {
 public:
  TempFolder();
  ~TempFolder();
  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

class TestServer final {
 public:
  // `change` edits the configuration before the start. A server that does not start ends the test
  // program with its reason. `backend` makes the server's backend; empty: as configured.
  explicit TestServer(const std::function<void(server::Config&)>& change = {},
                      std::function<std::unique_ptr<kernels::AttentionBackend>()> backend = {});

  std::string unix_target() const { return "unix:" + folder_.File("mla.sock"); }
  std::string tcp_target() const;
  server::Server& server() const { return *server_; }
  bool exit_requested() const { return exit_requested_; }
  const TempFolder& folder() const { return folder_; }
  // Stops and starts again on the same socket, as clients see a restart.
  void Restart();

  std::unique_ptr<client::Client> Connect(client::ClientOptions options = {}) const;

 private:
  TempFolder folder_;
  server::Config config_;
  const std::function<std::unique_ptr<kernels::AttentionBackend>()> backend_;
  std::atomic<bool> exit_requested_{false};
  std::unique_ptr<server::Server> server_;
};

// The configuration that TestServer starts from.
server::Config SmallConfig();

// The operations port's reply, "STATUS BODY", or "" if the port cannot be reached.
std::string HttpGet(int port, const std::string& path, const std::string& method = "GET");

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_TEST_SERVER_H_
