// Reads the servers of a cluster from their registry, and keeps a list that outlives the registry.
//
// All who may write to the registry decide where clients connect, so the registry belongs to the
// operators of the servers. Its values are checked nevertheless: a value that does not describe a
// member is left out.
#ifndef MLA_CLIENT_CPP_CLUSTER_MEMBERS_H_
#define MLA_CLIENT_CPP_CLUSTER_MEMBERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "fleet/member.pb.h"

namespace mla::client {

using fleet::Member;

// Bounds of what a registry may say. No cluster needs as much, so a registry that exceeds them is
// faulty.
inline constexpr size_t kMostMembers = 4096;
inline constexpr size_t kMostValueBytes = size_t{64} << 10;  // of a member's JSON
inline constexpr size_t kMostText = 256;                     // bytes of a field of text
inline constexpr int kMostDigests = 256;                     // of models, in a member

// Parses a value of a registry. INVALID_ARGUMENT, with the field, if it is not a member.
absl::StatusOr<Member> ParseMember(std::string_view json);
// Returns such a value. REQUIRES: CheckMember takes the member.
std::string MemberJson(const Member& member);
// Returns OK unless a text is too long or has characters that cannot be printed, or the address is
// missing.
absl::Status CheckMember(const Member& member);
Member MemberAt(const std::string& address);

// A clock, in seconds from any moment on; tests have their own.
using Seconds = std::function<double()>;
double SteadySeconds();

struct MemberListOptions {
  double refresh_s = 1.0;  // time from one reading of the list to the next
  double keep_s = 600.0;   // how long the last list is used while the registry does not answer
  Seconds now = SteadySeconds;
};

// Reads the members again and again, and keeps the last list. Threading: any thread.
class MemberList final {
 public:
  using Read = std::function<absl::StatusOr<std::vector<Member>>()>;
  using OnGone = std::function<void(const std::vector<std::string>& addresses)>;

  // `read` asks the registry. `on_gone` gets the addresses of members that have left, or that have
  // another boot id. Both are called by the thread that refreshes.
  MemberList(Read read, OnGone on_gone, MemberListOptions options = {});
  ~MemberList() { Close(); }

  // Starts a thread that reads until Close. RESOURCE_EXHAUSTED: the process has no more threads.
  absl::Status Start();
  // Asks the registry once; its error if it did not answer.
  absl::Status Refresh();
  // Returns the members, by address. UNAVAILABLE (reason "registry_away") if the registry has never
  // answered, or not for keep_s.
  absl::StatusOr<std::vector<Member>> All() const;
  void Close();

 private:
  const Read read_;
  const OnGone on_gone_;
  const MemberListOptions options_;
  mutable Mutex mutex_;
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool answered_ ABSL_GUARDED_BY(mutex_) = false;
  double answer_time_s_ ABSL_GUARDED_BY(mutex_) = 0;  // of the last good answer
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Member> members_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_MEMBERS_H_
