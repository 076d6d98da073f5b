// Asks several servers at the same time what they would find of a prefix.
//
// The calling thread alone sends the requests and takes the answers: each over the connection that
// its client keeps for unary calls. A thread for each request would cost more than the request.
#ifndef MLA_CLIENT_CPP_PROBES_H_
#define MLA_CLIENT_CPP_PROBES_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace mla::client {

class Probes final {
 public:
  // Returns the answers of Client::Probe from each of `clients`, in their order; the clients must
  // live as long as the call. Returns once all have answered, and at most `timeout_ms` (> 0) later:
  // the others are DEADLINE_EXCEEDED. Threading: any thread; starts none.
  static std::vector<absl::StatusOr<v1::ProbeReply>> Ask(std::span<Client* const> clients,
                                                         const std::string& model_id,
                                                         const v1::Prefix& prefix,
                                                         int64_t timeout_ms);
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_PROBES_H_
