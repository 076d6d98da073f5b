// The control groups that this process is in, with the limits that a container or a service manager
// sets.
#ifndef MLA_BASE_CONTROL_GROUPS_H_
#define MLA_BASE_CONTROL_GROUPS_H_

#include <string>
#include <string_view>
#include <vector>

namespace mla::base {

struct ControlGroup {
  std::string folder;  // folder of its files
  int version = 2;     // version of control groups, 1 or 2; the names of files differ
};

// Returns the groups whose limits of `controller` ("memory", "cpu") hold for this process, in no
// order: its own and those around it, as far as they can be seen from here, of both versions.
// `root` is prefixed to /proc and /sys for tests.
std::vector<ControlGroup> ControlGroupsOf(std::string_view controller,
                                          const std::string& root = "");

}  // namespace mla::base

#endif  // MLA_BASE_CONTROL_GROUPS_H_
