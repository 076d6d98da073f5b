#include "tests/integration/test_server.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "server/logging/logging.h"

namespace mla::integration {

TempFolder::TempFolder() {
  char name[] = "/tmp/mla-test-XXXXXX";
  path_ = mkdtemp(name);
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

server::Config SmallConfig() {
  server::Config config;
  config.backend = "reference";
  config.listen.address = "127.0.0.1:0";
  config.ops.address = "127.0.0.1:0";
  config.limits.kv_cache_bytes = int64_t{8} << 20;
  config.limits.default_page_size = 4;
  config.limits.max_sequences = 64;
  config.limits.max_sequence_rows = 4096;
  config.limits.max_pages_per_sequence = 1024;
  config.limits.max_models = 4;
  config.limits.max_layers = 8;
  config.limits.max_heads = 16;
  config.limits.max_row_dim = 128;
  config.limits.max_v_dim = 64;
  config.limits.weights_bytes = int64_t{4} << 20;
  config.limits.max_step_rows = 1024;
  config.limits.max_step_sequences = 32;
  config.limits.max_open_steps = 16;
  config.limits.max_participants = 4;
  config.limits.queue_requests = 256;
  config.limits.launch_rows = 512;
  config.limits.launch_packed_rows = 8192;
  config.limits.launch_requests = 64;
  config.limits.prefill_rows = 256;
  config.limits.kv_wait_ms = 200;
  config.limits.step_lease_ms = 30000;  // so long that a busy machine does not look like a dead
                                        // worker
  config.wire.message_bytes = int64_t{1} << 20;
  config.wire.inflight_bytes = int64_t{4} << 20;
  config.wire.staging_bytes = int64_t{32} << 20;
  // Set by tests that have a relay's program among their data.
  config.ucx.enabled = std::getenv("MLA_TEST_UCX") != nullptr;
  return config;
}

TestServer::TestServer(const std::function<void(server::Config&)>& change,
                       std::function<std::unique_ptr<kernels::AttentionBackend>()> backend)
    : config_(SmallConfig()), backend_(std::move(backend)) {
  server::ConfigureLogging("text", "error");
  config_.listen.unix_path = folder_.File("mla.sock");
  if (change) change(config_);
  Restart();
}

void TestServer::Restart() {
  server_.reset();
  server::ServerOptions options;
  options.config = config_;
  options.on_exit_request = [this] { exit_requested_ = true; };
  if (backend_) options.backend = backend_();
  options.relay_program = "tests/integration/ucx/ucx_relay";
  auto started = server::Server::Start(std::move(options));
  if (!started.ok()) {
    std::fprintf(stderr, "the server did not start: %s\n", started.status().ToString().c_str());
    std::abort();
  }
  server_ = *std::move(started);
}

std::string TestServer::tcp_target() const {
  return absl::StrCat("127.0.0.1:", server_->tcp_port());
}

std::unique_ptr<client::Client> TestServer::Connect(client::ClientOptions options) const {
  auto connected = client::Client::Connect(unix_target(), options);
  if (!connected.ok()) {
    std::fprintf(stderr, "cannot connect: %s\n", connected.status().ToString().c_str());
    std::abort();
  }
  return *std::move(connected);
}

std::string HttpGet(int port, const std::string& path, const std::string& method) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    close(fd);
    return "";
  }
  const std::string request =
      absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  std::string answer;
  if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) {
      answer.append(buffer, static_cast<size_t>(n));
    }
  }
  close(fd);
  const size_t space = answer.find(' ');
  const size_t body = answer.find("\r\n\r\n");
  if (space == std::string::npos || body == std::string::npos) return "";
  return answer.substr(space + 1, 3) + " " + answer.substr(body + 4);
}

}  // namespace mla::integration
