#include "base/control_groups.h"

#include <fstream>
#include <sstream>

namespace mla::base {
namespace {

struct Mount {
  std::string group;   // group of its top folder
  std::string folder;  // where it is mounted
};

// Returns true if a list, separated by commas, has the word.
bool HasWord(const std::string& list, std::string_view word) {
  std::istringstream words(list);
  for (std::string one; std::getline(words, one, ',');) {
    if (one == word) return true;
  }
  return false;
}

// Returns the group in version 2, or in the hierarchy of version 1 that has the controller.
std::vector<Mount> MountsOf(int version, std::string_view controller, const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // ID PARENT DEVICE ROOT FOLDER OPTIONS [TAGS...] - TYPE SOURCE OPTIONS
    std::istringstream words(line);
    std::string skipped, type, options;
    Mount mount;
    words >> skipped >> skipped >> skipped >> mount.group >> mount.folder;
    while (words >> skipped && skipped != "-") {
    }
    if (!(words >> type >> skipped >> options)) continue;
    const bool fits =
        version == 2 ? type == "cgroup2" : type == "cgroup" && HasWord(options, controller);
    if (fits) mounts.push_back(mount);
  }
  if (mounts.empty()) {  // the usual place
    const std::string folder = "/sys/fs/cgroup";
    mounts.push_back({"/", version == 2 ? folder : folder + "/" + std::string(controller)});
  }
  return mounts;
}

// Appends the folders of the group and of the groups around it, up to the top of the mount. A group
// outside the mounted ones, as seen inside some kinds of containers, counts as the group at the
// top.
void AddFolders(const Mount& mount, const std::string& group, int version, const std::string& root,
                std::vector<ControlGroup>* groups) {
  const std::string top = mount.group == "/" ? "" : mount.group;
  const bool inside = group.compare(0, top.size(), top) == 0 &&
                      (group.size() == top.size() || group[top.size()] == '/') &&
                      group.find("/..") == std::string::npos;
  std::string below = inside ? group.substr(top.size()) : "";
  while (!below.empty() && below != "/") {
    groups->push_back({root + mount.folder + below, version});
    below.resize(below.rfind('/'));
  }
  groups->push_back({root + mount.folder, version});
}

}  // namespace

std::vector<ControlGroup> ControlGroupsOf(std::string_view controller, const std::string& root) {
  std::vector<ControlGroup> groups;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // HIERARCHY:CONTROLLERS:GROUP; of version 2 the first is 0, the second is empty.
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const int version = controllers.empty() ? 2 : 1;
    if (version == 1 && !HasWord(controllers, controller)) continue;
    const std::string group = line.substr(second + 1);
    for (const Mount& mount : MountsOf(version, controller, root)) {
      AddFolders(mount, group, version, root, &groups);
    }
  }
  return groups;
}

}  // namespace mla::base
