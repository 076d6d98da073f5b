// Servers of this host: found by their sockets, whatever a registry knows of them.
//
// The name service and lists have addresses only, and with TLS a path in a registry is not enough
// to trust a socket. So the caller names the sockets of this host, and a server is reached by the
// one that answers with its boot id.
#ifndef MLA_CLIENT_CPP_SAME_HOST_H_
#define MLA_CLIENT_CPP_SAME_HOST_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace mla::client {

// At most this number of sockets of one host is looked at.
inline constexpr size_t kMostSockets = 64;

// Threading: any thread.
class SameHost final {
 public:
  using BootIdOf = std::function<absl::StatusOr<uint64_t>(const std::string& path)>;

  // `pattern` gives the paths of the sockets, with wildcards as in glob(7); empty: none.
  // `boot_id_of` asks the server at a path.
  SameHost(std::string pattern, BootIdOf boot_id_of)
      : pattern_(std::move(pattern)), boot_id_of_(std::move(boot_id_of)) {}
  bool looks() const { return !pattern_.empty(); }
  // Returns the socket of that server; "" if it has none on this host.
  std::string PathOf(uint64_t boot_id);

 private:
  using File = std::tuple<std::string, dev_t, ino_t>;  // another file is another server's

  std::vector<File> Files() const;

  const std::string pattern_;
  const BootIdOf boot_id_of_;
  Mutex mutex_;
  std::map<File, uint64_t> known_ ABSL_GUARDED_BY(mutex_);  // boot ids
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SAME_HOST_H_
