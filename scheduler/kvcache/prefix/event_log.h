// What became of cached rows, by tenant: the latest events, and the latest matches that did not
// find all they asked for.
//
// Each tenant's events are numbered without gaps, beginning at a multiple of 2^32 that differs each
// time the tenant gets its first model, so a reader sees from the numbers alone what it has missed.
// Old events make room for new ones of any tenant: memory is constant after construction, but for
// the names of models.
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

// Where a match ended.
enum class MatchEnd : uint8_t {
  kNotAsked,  // no rows were named
  kAll,       // every row that was asked for was found
  kAbsent,    // the next page is not known
  kDiverged,  // what is known goes on with other rows
  kEvicted,   // the next page was there, and its room was needed
  kDeferred,  // the next page is on its way back from a slower tier
};
inline constexpr size_t kMatchEnds = 6;

enum class EventKind : uint8_t {
  kStored = 1,  // rows of a page can be found from now on
  kEvicted,     // they cannot any more: their room was needed
  kDropped,     // all of the model cannot any more: it has gone, or has got other scales
  kExpired,     // a sequence's lease ran out
  kRestored,    // a sequence was opened from its checkpoint, or a page is in the pool again
  kDemoted,     // a page has left the pool, and has a copy in a slower tier
  kDamaged,     // a copy in a slower tier is not what was put there, and was dropped
  kPreempted,   // a sequence was taken from its client: evicted by an operator, or handed over
};

// Where rows are, or were. Numbers of mla.v1.CacheTier.
enum class Tier : uint8_t { kPool = 1, kCheckpoint, kHost, kFile };

struct Event {
  uint64_t number = 0;  // given by the log
  EventKind kind = EventKind::kStored;
  Tier tier = Tier::kPool;
  TenantKey tenant = 0;                            // given by the log
  std::shared_ptr<const std::string> tenant_name;  // likewise
  std::shared_ptr<const std::string> model;        // its name; null: the log gives the layout's
  uint64_t sequence = 0;                           // 0: the event is of none
  int64_t first_row = 0;
  int64_t rows = 0;
  std::optional<PrefixKey> key;     // of a whole page
  std::optional<PrefixKey> parent;  // of the page before, or of the beginning
  int64_t unix_ms = 0;              // given by the log
};

// A match that ended before all rows that were asked for.
struct Miss {
  TenantKey tenant = 0;                            // given by the log
  std::shared_ptr<const std::string> tenant_name;  // likewise
  std::shared_ptr<const std::string> model;        // its name; null: the log gives the layout's
  uint64_t sequence = 0;
  int64_t first_row = 0;
  int64_t rows_asked = 0;
  int64_t rows_found = 0;
  MatchEnd end = MatchEnd::kAbsent;
  int64_t unix_ms = 0;  // given by the log
};

class EventLog final {
 public:
  // Events of all tenants, and as many misses: about 2 MiB.
  static constexpr int32_t kKept = 8192;

  // `seed`: of the numbers that tenants begin with.
  explicit EventLog(uint64_t seed, int32_t kept = kKept);

  // --- By the engine.
  // Events of the layout are the tenant's from now on, and, where they name no other, the model's.
  void SetLayout(LayoutId layout, TenantKey tenant, const std::string& tenant_name,
                 const std::string& model);
  void DropLayout(LayoutId layout);
  // Adds an event of the layout; nothing where the layout has no tenant.
  void Add(LayoutId layout, Event event);
  void Add(LayoutId layout, Miss miss);

  // --- By readers. Without a tenant: of all.
  struct Cursor {
    uint64_t next = 0;  // position in the log
  };
  // A cursor behind the tenant's event `after`, or before all that are kept if that is not known.
  Cursor After(TenantKey tenant, uint64_t after) const;
  // Behind all events.
  Cursor End() const;
  // Before all that are kept.
  Cursor Begin() const;
  // The next events, at most so many; moves the cursor behind them.
  std::vector<Event> Read(std::optional<TenantKey> tenant, size_t most, Cursor* cursor) const;
  // The latest misses, at most so many, the latest first.
  std::vector<Miss> Misses(std::optional<TenantKey> tenant, size_t most) const;

 private:
  struct Layout {
    TenantKey tenant = 0;
    std::shared_ptr<const std::string> tenant_name;
    std::shared_ptr<const std::string> model;  // null: not in use
    std::shared_ptr<uint64_t> last;  // number of the tenant's last event; all its layouts'
  };
  const Layout* Find(LayoutId layout) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t FirstNumber() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Position of the oldest event that is kept.
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
