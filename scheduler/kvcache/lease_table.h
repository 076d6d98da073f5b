// Keeps the deadlines of leases. The engine grants a lease to each sequence and open step, and
// renews it at every use or renewal by the client. It takes back the objects whose leases ran out.
//
// A lease is named by a small integer of the caller's choice (a sequence slot, a step index). Times
// are nanoseconds of the scheduler's monotonic clock and are passed in by the caller; nothing here
// reads a clock. Expired leases come out ordered by deadline, then id, so the same calls give the
// same order in every run.
//
// Grant, Renew, Drop and PopExpired are O(log leases) and allocate nothing. Threading: owned by the
// engine role.
#ifndef MLA_SCHEDULER_KVCACHE_LEASE_TABLE_H_
#define MLA_SCHEDULER_KVCACHE_LEASE_TABLE_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace mla::kvcache {

class LeaseTable final {
 public:
  static constexpr int32_t kNone = -1;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // Ids are in [0, max_leases).
  explicit LeaseTable(int32_t max_leases);

  // Starts a lease, or sets the deadline of a running one; the lease has expired once the time is
  // deadline_ns. REQUIRES: the id is in range.
  void Grant(int32_t id, int64_t deadline_ns);
  // Moves the deadline to now_ns + duration_ns, never to an earlier time. Returns false and changes
  // nothing if the lease does not run or had expired by now_ns, because a lost lease does not come
  // back.
  bool Renew(int32_t id, int64_t now_ns, int64_t duration_ns);
  // Extends all leases by this time.
  void Postpone(int64_t nanos);
  // Ends a lease before its deadline; does nothing if there is none.
  void Drop(int32_t id);

  bool Has(int32_t id) const;
  // 0 if the lease has expired or does not run.
  int64_t left_ns(int32_t id, int64_t now_ns) const;
  // Returns the deadline of the lease that expires first; kNever if none runs.
  int64_t next_deadline_ns() const;
  // Ends one lease whose deadline has come and returns its id; kNone if there is none.
  int32_t PopExpired(int64_t now_ns);

  int32_t size() const { return static_cast<int32_t>(heap_.size()); }
  // Checks everything and returns a description of the fault, empty if there is none; for tests.
  std::string CheckInvariants() const;

 private:
  struct Lease {
    int64_t deadline_ns;
    int32_t id;
    friend auto operator<=>(const Lease&, const Lease&) = default;
  };

  void Place(size_t position, const Lease& lease);
  void SiftUp(size_t position);
  void SiftDown(size_t position);

  std::vector<Lease> heap_;         // binary heap, earliest first
  std::vector<int32_t> positions_;  // index in heap_ by id; kNone if the lease does not run
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_LEASE_TABLE_H_
