// Answers of the probes of supervisors and load balancers over HTTP.
#ifndef MLA_SERVER_OPERATIONS_PROBES_H_
#define MLA_SERVER_OPERATIONS_PROBES_H_

#include <string>
#include <utility>

#include "server/connections/tls_files.h"
#include "server/lifecycle/server_state.h"
#include "server/operations/ops_http.h"
#include "server/reload/live_settings.h"

namespace mla::server {

// Threading: any thread. All that it reads must outlive it.
class Probes final {
 public:
  // `tls` is null without TLS. `notes`: lines that Ready adds to a verbose reply.
  Probes(const ServerState* state, const LiveSettings* live, const TlsFiles* tls, std::string notes)
      : state_(state), live_(live), tls_(tls), notes_(std::move(notes)) {}

  // Alive means that this process can answer, and that it may serve again. A lost device never
  // comes back to the process, and a launch that has hung for this long will most likely not end.
  // The reply then tells the supervisor to restart the server. Readiness, not this reply, says
  // whether it serves now.
  HttpReply Alive() const;
  // `query` "verbose": the reply has the reasons.
  HttpReply Ready(const std::string& query) const;

 private:
  const ServerState* const state_;
  const LiveSettings* const live_;
  const TlsFiles* const tls_;
  const std::string notes_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_OPERATIONS_PROBES_H_
