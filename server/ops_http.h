// The operations port: plain HTTP, GET only, fixed paths, read-only.
//
// Each path is answered by a function; everything else is 404, other methods 405. Connections are
// bounded and time out after 5 s. It serves metrics, health and the status page; nothing on it
// changes the server.
//
// Threading: handlers run on the port's own thread, one at a time.
#ifndef MLA_SERVER_OPS_HTTP_H_
#define MLA_SERVER_OPS_HTTP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace mla::server {

struct HttpReply {
  int status = 200;
  const char* content_type = "text/plain; charset=utf-8";
  std::string body;
};

// `query` is the part behind '?', without it.
using HttpHandler = std::function<HttpReply(const std::string& query)>;

class OpsHttp final {
 public:
  // Listens on "host:port" (port 0: any). INVALID_ARGUMENT for an address that cannot be read,
  // UNAVAILABLE when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<OpsHttp>> Start(const std::string& address,
                                                        int32_t connections,
                                                        std::map<std::string, HttpHandler> paths);
  ~OpsHttp();
  int port() const { return port_; }

  // What a GET of `path` answers; used by the port and by tests.
  HttpReply Answer(const std::string& method, const std::string& path,
                   const std::string& query) const;

 private:
  explicit OpsHttp(std::map<std::string, HttpHandler> paths) : paths_(std::move(paths)) {}

  const std::map<std::string, HttpHandler> paths_;
  void* daemon_ = nullptr;  // MHD_Daemon
  int port_ = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_OPS_HTTP_H_
