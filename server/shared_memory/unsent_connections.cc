#include "server/shared_memory/unsent_connections.h"

#include <algorithm>
#include <map>

namespace mla::server {

std::optional<UnsentConnections::Entry> UnsentConnections::Displaced(uid_t user) const {
  std::map<uid_t, size_t> counts;
  for (const Entry& entry : entries_) ++counts[entry.user];
  const auto own = counts.find(user);
  const bool user_full = own != counts.end() && own->second >= most_of_user_;
  if (!user_full && entries_.size() < most_) return std::nullopt;
  uid_t blamed = user;
  if (!user_full) {
    const auto fewer = [](const auto& a, const auto& b) { return a.second < b.second; };
    blamed = std::max_element(counts.begin(), counts.end(), fewer)->first;
  }
  const auto of_blamed = [blamed](const Entry& entry) { return entry.user == blamed; };
  return *std::find_if(entries_.begin(), entries_.end(), of_blamed);
}

void UnsentConnections::Remove(int descriptor) {
  entries_.remove_if([descriptor](const Entry& entry) { return entry.descriptor == descriptor; });
}

}  // namespace mla::server
