// Holds the whole server in one object: engine, services, listeners and operations port.
//
// Life: Start builds everything in order (backend, memory check, engine, listeners, warm-up) and
// returns when the server is Serving. Shutdown drains, stops listening, answers the calls under way
// and releases everything. The destructor does the same with a deadline of 0.
//
// Threading: Start, Shutdown and the destructor from one thread; everything else from any.
#ifndef MLA_SERVER_SERVER_H_
#define MLA_SERVER_SERVER_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/backend_registry.h"
#include "server/config/config.h"
#include "server/lifecycle/drain.h"
#include "server/metrics/metrics.h"

namespace mla::server {

struct ServerOptions {
  Config config;
  // Called when an operator asks the process to exit after a drain. May be empty.
  std::function<void()> on_exit_request;
  // If not null, this backend is used instead of the configured one, for tests of faults that no
  // machine shows on demand. Usually null.
  std::unique_ptr<kernels::AttentionBackend> backend = nullptr;
  // A registry to choose from instead of AllBackends(), also for such tests. Null: AllBackends().
  const kernels::BackendRegistry* registry = nullptr;
  // The program of relays (relay/), for tests whose own program is not mla-server. Empty: this
  // process's own.
  std::string relay_program = {};
};

class Server final {
 public:
  // The status tells why the server could not start: a bad option (INVALID_ARGUMENT), no usable
  // backend (FAILED_PRECONDITION, NOT_FOUND), too little memory (RESOURCE_EXHAUSTED), an address in
  // use (UNAVAILABLE).
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options);
  ~Server();

  int tcp_port() const;  // 0: no ops listener
  int ops_port() const;  // 0: no ops listener
  uint64_t boot_id() const;

  // Returns true while /livez is 200: see docs/operations.md. Any thread.
  bool Alive() const;
  // Applies the keys of `config` for which IsLive is true, and ignores the others. They count for
  // calls, sequences and waits that begin from now on; nothing in use is taken away. Waits for a
  // running launch.
  void Apply(const Config& config);
  // Tells metrics and /readyz?verbose about the configuration on disk.
  void NoteConfig(const ReloadStats& status);
  // Looks at the files of tls.* at once.
  void LookAtTls();

  DrainResult Shutdown(std::chrono::milliseconds drain_deadline);

 private:
  struct Parts;
  explicit Server(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_SERVER_H_
