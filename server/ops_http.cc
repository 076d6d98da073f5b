#include "server/ops_http.h"

#include <microhttpd.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace mla::server {
namespace {

constexpr unsigned kTimeoutSeconds = 5;

MHD_Result AppendArgument(void* out, MHD_ValueKind, const char* key, const char* value) {
  auto* query = static_cast<std::string*>(out);
  absl::StrAppend(query, query->empty() ? "" : "&", key, value == nullptr ? "" : "=",
                  value == nullptr ? "" : value);
  return MHD_YES;
}

MHD_Result Handle(void* self, MHD_Connection* connection, const char* url, const char* method,
                  const char*, const char*, size_t* upload_size, void** state) {
  // The first call shows the headers only; answering on the second lets the library read on.
  static int seen;
  if (*state == nullptr) {
    *state = &seen;
    return MHD_YES;
  }
  if (*upload_size != 0) {  // a body is not looked at
    *upload_size = 0;
    return MHD_YES;
  }
  std::string query;
  MHD_get_connection_values(connection, MHD_GET_ARGUMENT_KIND, AppendArgument, &query);
  const HttpReply reply = static_cast<OpsHttp*>(self)->Answer(method, url, query);
  MHD_Response* response = MHD_create_response_from_buffer(
      reply.body.size(), const_cast<char*>(reply.body.data()), MHD_RESPMEM_MUST_COPY);
  MHD_add_response_header(response, "Content-Type", reply.content_type);
  MHD_add_response_header(response, "Cache-Control", "no-store");
  MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
  MHD_add_response_header(response, "Content-Security-Policy",
                          "default-src 'none'; style-src "
                          "'unsafe-inline'");
  const MHD_Result queued =
      MHD_queue_response(connection, static_cast<unsigned>(reply.status), response);
  MHD_destroy_response(response);
  return queued;
}

}  // namespace

HttpReply OpsHttp::Answer(const std::string& method, const std::string& path,
                          const std::string& query) const {
  if (method != "GET" && method != "HEAD") return {405, "text/plain", "GET only\n"};
  const auto found = paths_.find(path);
  if (found != paths_.end()) return found->second(query);
  HttpReply reply = {404, "text/plain; charset=utf-8", "not found; there are:\n"};
  for (const auto& [known, handler] : paths_) absl::StrAppend(&reply.body, known, "\n");
  return reply;
}

absl::StatusOr<std::unique_ptr<OpsHttp>> OpsHttp::Start(const std::string& address,
                                                        int32_t connections,
                                                        std::map<std::string, HttpHandler> paths) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("ops.listen: got ", address));
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error =
          getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found);
      error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ops.listen: ", address, ": ", gai_strerror(error)));
  }
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  std::unique_ptr<OpsHttp> port(new OpsHttp(std::move(paths)));
  unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL;
  if (found->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
  MHD_Daemon* daemon = MHD_start_daemon(
      flags, 0, nullptr, nullptr, Handle, port.get(), MHD_OPTION_SOCK_ADDR, found->ai_addr,
      MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(connections),
      MHD_OPTION_CONNECTION_TIMEOUT, kTimeoutSeconds, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
      size_t{32768}, MHD_OPTION_END);
  if (daemon == nullptr) {
    return absl::UnavailableError(absl::StrCat("ops.listen: cannot bind ", address));
  }
  port->daemon_ = daemon;
  port->port_ = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port;
  return port;
}

OpsHttp::~OpsHttp() {
  if (daemon_ != nullptr) MHD_stop_daemon(static_cast<MHD_Daemon*>(daemon_));
}

}  // namespace mla::server
