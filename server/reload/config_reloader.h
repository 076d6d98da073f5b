// Reads the configuration again while the server runs: when the process is told to (SIGHUP), and
// when the file has changed.
//
// The configuration is taken over as a whole or not at all. It is refused if it has a fault, if a
// key differs that only a restart can change, and if a shorter default lease would end sequences
// that connected clients still renew by the old one. Then the last good configuration stays in use.
//
// Threading: one thread.
#ifndef MLA_SERVER_RELOAD_CONFIG_RELOADER_H_
#define MLA_SERVER_RELOAD_CONFIG_RELOADER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/config/config.h"

namespace mla::server {

struct ReloadHooks {
  std::function<LoadedConfig()> load;        // all sources, as at the start
  std::function<std::string()> contents;     // of the file; constant without one
  std::function<void(const Config&)> apply;  // takes the live keys over
};

class ConfigReloader final {
 public:
  // `running` is the configuration of a file with these `contents`, as it was loaded at the start,
  // before sizes were chosen.
  ConfigReloader(Config running, std::string contents, ReloadHooks hooks);

  // Reads all sources. OK: they are in use, or say nothing new. INVALID_ARGUMENT or
  // FAILED_PRECONDITION (needs a restart): nothing was taken over; the message has every reason.
  absl::Status Reload();
  // Reloads if the file differs from what it was at the last reload, and is the same as at the last
  // look: a file that is being written is left alone. Returns true if it has reloaded.
  bool Look();

  const ReloadStats& status() const { return status_; }
  const Config& running() const { return running_; }

 private:
  absl::Status Check(const LoadedConfig& read, const ConfigChanges& changes) const;

  const ReloadHooks hooks_;
  Config running_;
  int64_t longest_lease_ms_;      // default of sequences since the start: clients may renew by it
  std::string used_, looked_at_;  // contents of the file
  ReloadStats status_;
};

// Contents of a file of at most a megabyte; an error's text where it cannot be read, so that files
// that come and go differ. An empty path: constant.
std::string FileContents(const std::string& path);

}  // namespace mla::server

#endif  // MLA_SERVER_RELOAD_CONFIG_RELOADER_H_
