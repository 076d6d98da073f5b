// Events of cached rows by tenant: the latest events, and the latest matches that did not find all
// they asked for.
//
// Each tenant's events are numbered without gaps. The first number is a multiple of 2^32 that
// differs each time the tenant gets its first model. So a reader sees from the numbers alone which
// events it has missed. Old events make room for new ones of any tenant: memory is constant after
// construction, except for the names of models.
//
// Threading: any thread; adding copies one event under a lock.
#ifndef MLA_SCHEDULER_KVCACHE_PREFIX_EVENT_LOG_H_
#define MLA_SCHEDULER_KVCACHE_PREFIX_EVENT_LOG_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "scheduler/kvcache/pool/slab_pool.h"
#include "scheduler/kvcache/prefix/prefix_chain.h"

namespace mla::kvcache {

// The reason why a match ended.
enum class MatchEnd : uint8_t {
  kNotAsked,  // no rows were named
  kAll,       // all rows asked for were found
  kAbsent,    // the next page is not known
  kDiverged,  // the cached rows that follow differ
  kEvicted,   // the next page was cached once, but its room was needed
  kDeferred,  // the next page is on its way back from a slower tier
};
inline constexpr size_t kMatchEnds = 6;

enum class EventKind : uint8_t {
  kStored = 1,  // rows of a page can be found from now on
  kEvicted,     // dropped because their room was needed
  kDropped,     // dropped with all rows of the model, which has gone or got other scales
  kExpired,     // a sequence's lease ran out
  kRestored,    // a sequence was opened from its checkpoint, or a page has come back to the pool
  kDemoted,     // a page has left the pool, and has a copy in a slower tier
  kDamaged,     // dropped because a copy in a slower tier had changed
  // A sequence was taken from its client, because an operator evicted it or it was handed over.
  kPreempted,
};

// The tier where rows are, or were. The values are those of mla.v1.CacheTier.
enum class Tier : uint8_t { kPool = 1, kCheckpoint, kHost, kFile };

struct Event {
  uint64_t number = 0;  // given by the log
  EventKind kind = EventKind::kStored;
  Tier tier = Tier::kPool;
  TenantKey tenant = 0;                            // given by the log
  std::shared_ptr<const std::string> tenant_name;  // the tenant's name
  // Name of the model; null: the one that SetLayout gave for the layout.
  std::shared_ptr<const std::string> model;
  uint64_t sequence = 0;  // 0: the event is not of a sequence
  int64_t first_row = 0;
  int64_t rows = 0;
  std::optional<PrefixKey> key;     // of a whole page
  std::optional<PrefixKey> parent;  // of the page before, or the root
  int64_t unix_ms = 0;              // given by the log
};

// A match that ended before it had found all rows asked for.
struct Miss {
  TenantKey tenant = 0;                            // given by the log
  std::shared_ptr<const std::string> tenant_name;  // the tenant's name
  // Name of the model; null: the one that SetLayout gave for the layout.
  std::shared_ptr<const std::string> model;
  uint64_t sequence = 0;
  int64_t first_row = 0;
  int64_t rows_asked = 0;
  int64_t rows_found = 0;
  MatchEnd end = MatchEnd::kAbsent;
  int64_t unix_ms = 0;  // given by the log
};

class EventLog final {
 public:
  // The log keeps this number of events of all tenants together, and as many misses; about 2 MiB.
  static constexpr int32_t kKept = 8192;

  // `seed` determines the tenants' first event numbers.
  explicit EventLog(uint64_t seed, int32_t kept = kKept);

  // --- Called by the engine.
  // From this call on, events of the layout belong to the tenant, and to the model unless they name
  // another one.
  void SetLayout(LayoutId layout, TenantKey tenant, const std::string& tenant_name,
                 const std::string& model);
  void DropLayout(LayoutId layout);
  // Adds an event of the layout; does nothing if the layout does not have a tenant.
  void Add(LayoutId layout, Event event);
  void Add(LayoutId layout, Miss miss);

  // --- For readers. Without a tenant, they get events of all tenants.
  struct Cursor {
    uint64_t next = 0;  // position in the log
  };
  // Returns a cursor after the tenant's event `after`, or before all kept events if that one is not
  // known.
  Cursor After(TenantKey tenant, uint64_t after) const;
  // Returns a cursor after all events.
  Cursor End() const;
  // Returns a cursor before all kept events.
  Cursor Begin() const;
  // Returns the next events, at most `limit`; moves the cursor past them.
  std::vector<Event> Read(std::optional<TenantKey> tenant, size_t limit, Cursor* cursor) const;
  // Returns the latest misses, at most `limit`, the latest first.
  std::vector<Miss> Misses(std::optional<TenantKey> tenant, size_t limit) const;

 private:
  struct Layout {
    TenantKey tenant = 0;
    std::shared_ptr<const std::string> tenant_name;
    std::shared_ptr<const std::string> model;  // null: not in use
    std::shared_ptr<uint64_t> last;  // number of the tenant's last event; shared by all its layouts
  };
  const Layout* Find(LayoutId layout) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t FirstNumber() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the position of the oldest event kept.
  uint64_t Oldest() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  uint64_t seed_ ABSL_GUARDED_BY(mutex_);
  std::vector<Layout> layouts_ ABSL_GUARDED_BY(mutex_);
  std::vector<Event> events_ ABSL_GUARDED_BY(mutex_);  // by position modulo their number
  uint64_t added_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Miss> misses_ ABSL_GUARDED_BY(mutex_);
  uint64_t missed_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_PREFIX_EVENT_LOG_H_
