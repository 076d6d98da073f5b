// Keeps the connections of the shared-memory listener that have not sent their request yet. Decides
// how many there may be, and which one a new one displaces.
//
// A client sends its request right after it connects, so a full list holds mostly connections that
// will never send one. The oldest one of the user with the most such connections is displaced: a
// user that floods the listener displaces its own connections and no others.
//
// Threading: one thread.
#ifndef MLA_SERVER_SHARED_MEMORY_UNSENT_CONNECTIONS_H_
#define MLA_SERVER_SHARED_MEMORY_UNSENT_CONNECTIONS_H_

#include <sys/types.h>

#include <cstddef>
#include <list>
#include <optional>

namespace mla::server {

class UnsentConnections final {
 public:
  struct Entry {
    int descriptor = -1;
    uid_t user = 0;
  };

  // Allows at most `most` connections, and at most `most_of_user` of one user. REQUIRES: both are
  // positive.
  UnsentConnections(size_t most, size_t most_of_user) : most_(most), most_of_user_(most_of_user) {}

  // Returns the connection to remove before `user` may add one, or nullopt.
  std::optional<Entry> Displaced(uid_t user) const;
  // REQUIRES: Displaced(user) is nullopt, and `descriptor` is not in the list.
  void Add(int descriptor, uid_t user) { entries_.push_back({descriptor, user}); }
  // Does nothing if the descriptor is not in the list.
  void Remove(int descriptor);

  size_t size() const { return entries_.size(); }

 private:
  const size_t most_, most_of_user_;
  std::list<Entry> entries_;  // oldest first
};

}  // namespace mla::server

#endif  // MLA_SERVER_SHARED_MEMORY_UNSENT_CONNECTIONS_H_
