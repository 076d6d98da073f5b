// The operations port: plain HTTP with GET only, fixed paths, read-only.
//
// A function answers each path. Other paths are 404 and other methods 405. Requests with a body, or
// with more than one statement of its length, are 400. It serves metrics, health and the status
// page; nothing on it changes the server. Each connection carries one request.
//
// Stalled clients do not keep probes out: a connection must complete its request header within
// kHeaderTimeout and take its answer within kAnswerTimeout. Beyond `connections` there is a reserve
// of kReserve. When the reserve is used up as well, a new connection displaces the oldest one
// without a complete request, or else the oldest one.
//
// Threading: handlers run on the port's own thread, one at a time. A second thread closes overdue
// connections.
#ifndef MLA_SERVER_OPERATIONS_OPS_HTTP_H_
#define MLA_SERVER_OPERATIONS_OPS_HTTP_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace mla::server {

struct HttpReply {
  int status = 200;
  const char* content_type = "text/plain; charset=utf-8";
  std::string body;
};

struct HttpRequest {
  std::string query;   // the part after '?'
  std::string accept;  // the header; empty: none
};

using HttpHandler = std::function<HttpReply(const HttpRequest& request)>;

class OpsHttp final {
 public:
  static constexpr std::chrono::seconds kHeaderTimeout{3}, kAnswerTimeout{15};
  static constexpr size_t kReserve = 32;

  // Listens on "host:port"; port 0 means any free one. INVALID_ARGUMENT if the address cannot be
  // parsed; UNAVAILABLE if it cannot be bound.
  static absl::StatusOr<std::unique_ptr<OpsHttp>> Start(const std::string& address,
                                                        int32_t connections,
                                                        std::map<std::string, HttpHandler> paths);
  ~OpsHttp();
  int port() const { return port_; }

  // Returns the answer to a GET of `path`; used by the port and by tests.
  HttpReply Answer(const std::string& method, const std::string& path,
                   const HttpRequest& request) const;

 private:
  friend struct OpsHttpCallbacks;

  struct Connection {
    int descriptor = -1;
    bool requested = false;  // its request header is complete
    std::chrono::steady_clock::time_point since;
  };

  OpsHttp(size_t limit, std::map<std::string, HttpHandler> paths)
      : limit_(limit), paths_(std::move(paths)), sweeper_([this] { Sweep(); }) {}
  void OnOpened(const void* key, int descriptor);
  void OnClosed(const void* key);
  void OnRequest(const void* key);
  void Displace() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Sweep();

  const size_t limit_;  // connections, the reserve among them
  const std::map<std::string, HttpHandler> paths_;
  Mutex mutex_;
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<const void*, Connection> connections_ ABSL_GUARDED_BY(mutex_);  // by MHD_Connection
  std::thread sweeper_;
  void* daemon_ = nullptr;  // MHD_Daemon
  int port_ = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_OPERATIONS_OPS_HTTP_H_
