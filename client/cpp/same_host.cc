#include "client/cpp/same_host.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

namespace mla::client {

std::vector<SameHost::File> SameHost::Files() const {
  std::vector<File> files;
  glob_t matches{};
  if (glob(pattern_.c_str(), 0, nullptr, &matches) == 0) {
    for (size_t i = 0; i < matches.gl_pathc && files.size() < kMostSockets; ++i) {
      struct stat about {};
      if (stat(matches.gl_pathv[i], &about) != 0) continue;  // it has gone
      files.emplace_back(matches.gl_pathv[i], about.st_dev, about.st_ino);
    }
  }
  globfree(&matches);
  return files;
}

std::string SameHost::PathOf(uint64_t boot_id) {
  std::vector<File> files = Files();
  std::map<File, uint64_t> known;
  {
    const MutexLock lock(mutex_);
    for (const File& one : files) {
      if (const auto found = known_.find(one); found != known_.end()) known.insert(*found);
    }
    known_ = known;
  }
  // The one that had this boot id is asked first, then new files, then those of others.
  const auto turn = [&](const File& one) {
    const auto found = known.find(one);
    return found == known.end() ? 1 : found->second == boot_id ? 0 : 2;
  };
  std::stable_sort(files.begin(), files.end(),
                   [&](const File& a, const File& b) { return turn(a) < turn(b); });
  for (const File& one : files) {
    const absl::StatusOr<uint64_t> file_boot_id = boot_id_of_(std::get<0>(one));
    if (!file_boot_id.ok()) continue;  // whatever listens there, if anything does
    {
      const MutexLock lock(mutex_);
      known_[one] = *file_boot_id;
    }
    if (*file_boot_id == boot_id) return std::get<0>(one);
  }
  return "";
}

}  // namespace mla::client
