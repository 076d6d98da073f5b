// Keeps one server in the registry of a cluster (etcd): the command `announce` runs next to each.
//
// The server itself opens no connection to the registry. Its entry there ends kLeaseSeconds after
// this process, its host or its network has failed, and at once when the server does not answer.
#ifndef MLA_CLIENT_MLACTL_FLEET_ANNOUNCER_H_
#define MLA_CLIENT_MLACTL_FLEET_ANNOUNCER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/members.h"
#include "client/cpp/cluster/registry.h"
#include "client/mlactl/cli/common.h"
#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

// The registry forgets a server after so long without news of it; news come so often.
inline constexpr int64_t kLeaseSeconds = 4;
inline constexpr int64_t kTurnMs = 1000;

void AddAnnounceCommand(Program* program);

// Returns `text` as a registry accepts it: printable, and no longer than that.
std::string ShownText(const std::string& text);

// Belongs to one thread. The registry must outlive it.
class Announcer final {
 public:
  // `common` has the server's target as this host reaches it; `address` is how workers reach it,
  // `node` the name of this host.
  Announcer(const CommonOptions& common, client::Registry* registry, const std::string& address,
            const std::string& node);
  // Asks the server, and tells the registry. If either does not answer, what was announced ends
  // with its lease, at the latest.
  absl::Status Turn();
  // Takes the server out of the registry.
  void Withdraw() { registry_->Withdraw().IgnoreError(); }

 private:
  absl::Status Ask();
  absl::Status AskSeldom();

  CommonOptions common_;
  client::Registry* const registry_;
  std::unique_ptr<client::Client> client_;  // null: not connected
  client::Member member_;
  uint64_t turn_ = 0;  // since it was connected
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_FLEET_ANNOUNCER_H_
