#include "server/operations/ops_http.h"

#include <microhttpd.h>
#include <netdb.h>
#include <strings.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace mla::server {
namespace {

using std::chrono::steady_clock;

constexpr unsigned kIdleSeconds = 5;  // without a byte
constexpr unsigned kBacklog = 128;
constexpr auto kSweep = std::chrono::milliseconds(250);

// The headers that announce a body.
struct BodyHeaders {
  int lengths = 0;
  bool empty = true;  // true: no length except 0, and no transfer coding
};

MHD_Result NoteBody(void* out, MHD_ValueKind, const char* key, const char* value) {
  auto* const body = static_cast<BodyHeaders*>(out);
  if (strcasecmp(key, MHD_HTTP_HEADER_CONTENT_LENGTH) == 0) {
    ++body->lengths;
    body->empty = body->empty && value != nullptr && std::strcmp(value, "0") == 0;
  } else if (strcasecmp(key, MHD_HTTP_HEADER_TRANSFER_ENCODING) == 0) {
    body->empty = false;
  }
  return MHD_YES;
}

// Returns true if the request has a body, or headers that contradict each other.
bool HasBody(MHD_Connection* connection) {
  BodyHeaders body;
  MHD_get_connection_values(connection, MHD_HEADER_KIND, NoteBody, &body);
  return body.lengths > 1 || !body.empty;
}

// Each connection carries one request: a proxy and this library may disagree where a request ends,
// and the bytes after it must not become another request.
MHD_Result Reply(MHD_Connection* connection, const HttpReply& reply) {
  MHD_Response* response = MHD_create_response_from_buffer(
      reply.body.size(), const_cast<char*>(reply.body.data()), MHD_RESPMEM_MUST_COPY);
  MHD_add_response_header(response, "Content-Type", reply.content_type);
  MHD_add_response_header(response, "Connection", "close");
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

MHD_Result AppendArgument(void* out, MHD_ValueKind, const char* key, const char* value) {
  auto* query = static_cast<std::string*>(out);
  absl::StrAppend(query, query->empty() ? "" : "&", key, value == nullptr ? "" : "=",
                  value == nullptr ? "" : value);
  return MHD_YES;
}

}  // namespace

// Callbacks of the library, on the port's own thread.
struct OpsHttpCallbacks {
  static MHD_Result Handle(void* self, MHD_Connection* connection, const char* url,
                           const char* method, const char*, const char*, size_t* upload_size,
                           void** state) {
    // The first call brings the headers only; answering in the second call makes the library read
    // on.
    static int seen;
    if (*state == nullptr) {
      *state = &seen;
      static_cast<OpsHttp*>(self)->OnRequest(connection);
      if (!HasBody(connection)) return MHD_YES;
      return Reply(connection, {400, "text/plain", "requests have no body\n"});
    }
    if (*upload_size != 0) return MHD_NO;
    HttpRequest request;
    MHD_get_connection_values(connection, MHD_GET_ARGUMENT_KIND, AppendArgument, &request.query);
    const char* const accept =
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_ACCEPT);
    if (accept != nullptr) request.accept = accept;
    return Reply(connection, static_cast<OpsHttp*>(self)->Answer(method, url, request));
  }

  static void Notify(void* self, MHD_Connection* connection, void**,
                     MHD_ConnectionNotificationCode code) {
    auto* const port = static_cast<OpsHttp*>(self);
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) return port->OnClosed(connection);
    const auto* info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info != nullptr) port->OnOpened(connection, info->connect_fd);
  }
};

void OpsHttp::OnOpened(const void* key, int descriptor) {
  const MutexLock lock(mutex_);
  if (connections_.size() >= limit_) Displace();
  connections_[key] = {descriptor, false, steady_clock::now()};
}

void OpsHttp::OnClosed(const void* key) {
  const MutexLock lock(mutex_);
  connections_.erase(key);
}

void OpsHttp::OnRequest(const void* key) {
  const MutexLock lock(mutex_);
  const auto entry = connections_.find(key);
  if (entry == connections_.end()) return;
  entry->second.requested = true;
  entry->second.since = steady_clock::now();
}

// Shutting the socket down makes the library see its end and close it.
void OpsHttp::Displace() {
  const auto oldest =
      std::min_element(connections_.begin(), connections_.end(), [](const auto& a, const auto& b) {
        return std::pair(a.second.requested, a.second.since) <
               std::pair(b.second.requested, b.second.since);
      });
  shutdown(oldest->second.descriptor, SHUT_RDWR);
  connections_.erase(oldest);
}

void OpsHttp::Sweep() {
  MutexLock lock(mutex_);
  while (!stopped_.WaitFor(lock, kSweep,
                           [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; })) {
    const auto now = steady_clock::now();
    for (auto it = connections_.begin(); it != connections_.end();) {
      const Connection& one = it->second;
      const auto most = one.requested ? kAnswerTimeout : kHeaderTimeout;
      const bool overdue = now - one.since > most;
      if (overdue) shutdown(one.descriptor, SHUT_RDWR);
      it = overdue ? connections_.erase(it) : std::next(it);
    }
  }
}

HttpReply OpsHttp::Answer(const std::string& method, const std::string& path,
                          const HttpRequest& request) const {
  if (method != "GET" && method != "HEAD") return {405, "text/plain", "GET only\n"};
  const auto found = paths_.find(path);
  if (found != paths_.end()) return found->second(request);
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
  addrinfo* addresses = nullptr;
  if (const int error =
          getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &addresses);
      error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ops.listen: ", address, ": ", gai_strerror(error)));
  }
  const absl::Cleanup free_found = [addresses] { freeaddrinfo(addresses); };
  const size_t limit = static_cast<size_t>(connections) + kReserve;
  std::unique_ptr<OpsHttp> port(new OpsHttp(limit, std::move(paths)));
  unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL;
  if (addresses->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
  errno = 0;
  MHD_Daemon* daemon = MHD_start_daemon(
      flags, 0, nullptr, nullptr, OpsHttpCallbacks::Handle, port.get(), MHD_OPTION_SOCK_ADDR,
      addresses->ai_addr, MHD_OPTION_NOTIFY_CONNECTION, OpsHttpCallbacks::Notify, port.get(),
      MHD_OPTION_STRICT_FOR_CLIENT, 1,
      // Connections that were shut down but are not closed yet count too.
      MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(2 * limit), MHD_OPTION_CONNECTION_TIMEOUT,
      kIdleSeconds, MHD_OPTION_CONNECTION_MEMORY_LIMIT, size_t{32768},
      MHD_OPTION_LISTEN_BACKLOG_SIZE, kBacklog, MHD_OPTION_END);
  if (daemon == nullptr) {
    const std::string why = errno != 0 ? absl::StrCat(": ", std::strerror(errno)) : "";
    return absl::UnavailableError(absl::StrCat("ops.listen: cannot bind ", address, why));
  }
  port->daemon_ = daemon;
  port->port_ = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT)->port;
  return port;
}

OpsHttp::~OpsHttp() {
  if (daemon_ != nullptr) MHD_stop_daemon(static_cast<MHD_Daemon*>(daemon_));
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    stopped_.NotifyAll();
  }
  sweeper_.join();
}

}  // namespace mla::server
