#include "scheduler/kvcache/kv_cache.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

constexpr int64_t kMaxBytes = (int64_t{1} << 32) * kernels::kPageGranuleBytes;
constexpr int32_t kMaxRows = std::numeric_limits<int32_t>::max();

absl::Status Invalid(const char* field, int64_t got, const std::string& limit) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": got ", got, ", limit ", limit));
}

absl::Status Reserved(SeqSlot sequence) {
  return absl::FailedPreconditionError(
      absl::StrCat("sequence slot ", sequence, " has an open reservation"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Create(const KvCacheOptions& options,
                                                         std::span<uint32_t> page_tables) {
  if (options.bytes < kernels::kPageGranuleBytes || options.bytes > kMaxBytes) {
    return Invalid("kv_cache.bytes", options.bytes,
                   absl::StrCat(kernels::kPageGranuleBytes, "..", kMaxBytes));
  }
  if (options.slab_bytes < 0 || options.slab_bytes > options.bytes) {
    return Invalid("kv_cache.slab_bytes", options.slab_bytes, absl::StrCat("0..", options.bytes));
  }
  if (options.max_sequences < 1) {
    return Invalid("kv_cache.max_sequences", options.max_sequences, "at least 1");
  }
  if (options.max_pages_per_sequence < 1) {
    return Invalid("kv_cache.max_pages_per_sequence", options.max_pages_per_sequence, "at least 1");
  }
  const int64_t entries = int64_t{options.max_sequences} * options.max_pages_per_sequence;
  if (static_cast<int64_t>(page_tables.size()) < entries) {
    return Invalid("page table entries", static_cast<int64_t>(page_tables.size()),
                   absl::StrCat("at least ", entries));
  }
  return std::unique_ptr<KvCache>(new KvCache(options, page_tables));
}

KvCache::KvCache(const KvCacheOptions& options, std::span<uint32_t> page_tables)
    : options_(options),
      tables_(page_tables),
      pool_(options.bytes, options.slab_bytes),
      sequences_(static_cast<size_t>(options.max_sequences)) {
  for (SeqSlot slot = options.max_sequences; slot-- > 0;) {
    sequences_[static_cast<size_t>(slot)].next_free = free_slot_;
    free_slot_ = slot;
  }
  list_rows_.reserve(sequences_.size());
}

KvCache::~KvCache() = default;

absl::StatusOr<LayoutId> KvCache::AddLayout(const GroupLayout& layout, PoolAccount* account) {
  if (layout.page_size < 1) return Invalid("layout.page_size", layout.page_size, "at least 1");
  if (layout.layers.empty()) return Invalid("layout.layers", 0, "at least 1");
  if (layout.bytes < 1) return Invalid("layout.bytes", layout.bytes, "at least 1");
  if (layout.bytes > options_.bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "page group: ", layout.layers.size(), " layers x ", layout.page_size, " tokens need ",
        layout.bytes, " bytes, more than the pool, limit ", options_.bytes));
  }
  auto id = pool_.AddLayout(layout, account);
  if (id.ok() && static_cast<size_t>(*id) >= layout_sequences_.size()) {
    layout_sequences_.resize(static_cast<size_t>(*id) + 1);
  }
  return id;
}

absl::Status KvCache::RemoveLayout(LayoutId layout) {
  if (!pool_.Has(layout)) return Invalid("layout", layout, "a registered one");
  const int32_t open = layout_sequences_[static_cast<size_t>(layout)];
  if (open > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("layout ", layout, " is used by ", open, " sequences"));
  }
  DropCached(layout);
  for (size_t i = restoring_.size(); i-- > 0;) {
    if (restoring_[i].layout == layout) DropRestore(restoring_[i].id);
  }
  if (events_ != nullptr) events_->DropLayout(layout);
  pool_.RemoveLayout(layout);
  return absl::OkStatus();
}

absl::StatusOr<SeqSlot> KvCache::Open(LayoutId layout, TenantKey tenant, LayoutId window) {
  for (const LayoutId used : {layout, window == kNoWindow ? layout : window}) {
    if (!pool_.Has(used)) return Invalid("layout", used, "a registered one");
  }
  if (tenant >= kMaxTenantKey) {
    return Invalid("tenant", tenant, absl::StrCat("below ", kMaxTenantKey));
  }
  MLA_RETURN_IF_ERROR(CheckSlots(window == kNoWindow ? 1 : 2));
  const SeqSlot slot = TakeSlot(layout, tenant);
  if (window != kNoWindow) Mutable(slot).window = TakeSlot(window, tenant);
  return slot;
}

absl::Status KvCache::CheckSlots(int32_t wanted) const {
  if (open_sequences_ + wanted <= options_.max_sequences) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("sequences: all in use, limit ", options_.max_sequences));
}

SeqSlot KvCache::TakeSlot(LayoutId layout, TenantKey tenant) {
  const SeqSlot slot = free_slot_;
  Sequence& sequence = sequences_[static_cast<size_t>(slot)];
  free_slot_ = sequence.next_free;
  sequence = Sequence();
  sequence.layout = layout;
  sequence.tenant = tenant;
  ++layout_sequences_[static_cast<size_t>(layout)];
  ++open_sequences_;
  return slot;
}

absl::StatusOr<SeqSlot> KvCache::Fork(SeqSlot parent, int32_t length) {
  const Sequence& from = Get(parent);
  if (from.rows_reserved != kNone) return Reserved(parent);
  if (length < least_length(parent) || length > from.length) {
    return Invalid("fork length", length, absl::StrCat(least_length(parent), "..", from.length));
  }
  MLA_RETURN_IF_ERROR(CheckSlots(from.window == kNone ? 1 : 2));
  const SeqSlot child = ForkList(parent, length);
  if (from.window != kNone) Mutable(child).window = ForkList(from.window, length);
  CheckAfterMutation();
  return child;
}

SeqSlot KvCache::ForkList(SeqSlot parent, int32_t length) {
  const Sequence& from = Get(parent);
  const SeqSlot child = TakeSlot(from.layout, from.tenant);
  Sequence& target = Mutable(child);
  target.length = length;
  target.pages = PagesFor(from, length);
  target.pages_gone = from.pages_gone;
  const auto shared = TableOf(parent).first(static_cast<size_t>(target.pages));
  std::copy(shared.begin(), shared.end(), TableOf(child).begin());
  for (const uint32_t entry : shared) pool_.Share(entry);
  target.chain = from.chain;
  target.declared = from.declared;
  target.pages_cached = from.pages_cached;
  Undeclare(child, length);
  return child;
}

void KvCache::SkipPages(SeqSlot slot, int32_t pages) {
  Sequence& sequence = Mutable(WithWindow(slot));
  const GroupLayout& layout = pool_.layout(sequence.layout);
  Require(sequence.length == 0 && sequence.pages == 0 && sequence.rows_reserved == kNone &&
              layout.window > 0,
          "pages are skipped that the sequence has");
  sequence.length = pages * layout.page_size;
  sequence.pages_gone = pages;
}

absl::Status KvCache::Truncate(SeqSlot slot, int32_t length) {
  const Sequence& sequence = Get(slot);
  if (sequence.rows_reserved != kNone) return Reserved(slot);
  if (length < least_length(slot) || length > sequence.length) {
    return Invalid("truncate length", length,
                   absl::StrCat(least_length(slot), "..", sequence.length));
  }
  ForLists(slot, [&](SeqSlot list) {
    Sequence& cut = Mutable(list);
    cut.length = length;
    Undeclare(list, length);
    ShrinkTo(list, PagesFor(cut, length), Freed::kTruncated);
  });
  CheckAfterMutation();
  return absl::OkStatus();
}

void KvCache::Release(SeqSlot slot, Freed why) {
  ForLists(slot, [&](SeqSlot list) { ReleaseList(list, why); });
  CheckAfterMutation();
}

void KvCache::ReleaseList(SeqSlot slot, Freed why) {
  Sequence& sequence = Mutable(slot);
  if (sequence.rows_reserved != kNone) EndCopy(slot, /*keep=*/false);
  PublishRest(slot);
  ShrinkTo(slot, 0, why);
  --layout_sequences_[static_cast<size_t>(sequence.layout)];
  --open_sequences_;
  sequence = Sequence();
  sequence.next_free = free_slot_;
  free_slot_ = slot;
}

absl::Status KvCache::Reserve(std::span<const StepRows> rows) {
  const std::span<const StepRows> lists = ByList(rows);
  MLA_RETURN_IF_ERROR(CheckReserve(lists));
  absl::Status status = TryReserve(lists);
  // Up to three bounds can refuse one after another: on groups, on slabs, and the pool itself.
  for (int bound = 0; bound < 3 && !status.ok() && MakeRoom(lists); ++bound) {
    status = TryReserve(lists);
  }
  return status;
}

// Returns the rows that each list of the step's sequences gets. The list of a window gets fewer
// than its sequence if pages of it were skipped.
std::span<const StepRows> KvCache::ByList(std::span<const StepRows> rows) {
  list_rows_.clear();
  for (const StepRows& row : rows) {
    list_rows_.push_back(row);
    const SeqSlot window = IsOpen(row.sequence) ? Get(row.sequence).window : kNone;
    if (window == kNone) continue;
    const int64_t wanted = int64_t{length(row.sequence)} + row.rows - length(window);
    list_rows_.push_back({window, static_cast<int32_t>(std::min<int64_t>(wanted, kMaxRows))});
  }
  return list_rows_;
}

absl::Status KvCache::TryReserve(std::span<const StepRows> rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (ReserveOne(rows[i].sequence, rows[i].rows)) continue;
    // The newest is undone first, so that every mark and reference returns to its former value.
    for (size_t done = i + 1; done-- > 0;) UndoReserve(rows[done].sequence);
    CheckAfterMutation();
    return Exhausted(rows, rows[i]);
  }
  for (const StepRows& row : rows) CountReserved(row.sequence);
  CheckAfterMutation();
  return absl::OkStatus();
}

absl::Status KvCache::CheckReserve(std::span<const StepRows> rows) {
  ++reserve_calls_;
  for (const StepRows& row : rows) {
    if (!IsOpen(row.sequence)) return Invalid("step sequence slot", row.sequence, "an open one");
    Sequence& sequence = Mutable(row.sequence);
    if (sequence.rows_reserved != kNone) return Reserved(row.sequence);
    if (sequence.reserve_call == reserve_calls_) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequence slot ", row.sequence, " is twice in one step"));
    }
    sequence.reserve_call = reserve_calls_;
    if (row.rows < 0) return Invalid("step rows", row.rows, "at least 0");
    const int32_t row_limit = max_rows(row.sequence);
    if (row.rows > row_limit - sequence.length) {
      return absl::ResourceExhaustedError(
          absl::StrCat("sequence slot ", row.sequence, " rows: needs ",
                       int64_t{sequence.length} + row.rows, ", limit ", row_limit));
    }
  }
  return absl::OkStatus();
}

bool KvCache::ReserveOne(SeqSlot slot, int32_t rows) {
  Sequence& sequence = Mutable(slot);
  sequence.rows_reserved = rows;
  sequence.pages_before = sequence.pages;
  sequence.entry_before_copy = SlabPool::kNoEntry;
  if (rows == 0) return true;
  if (!CopySharedPage(slot)) return false;
  const int32_t pages = PagesFor(sequence, int64_t{sequence.length} + rows);
  const auto table = TableOf(slot);
  while (sequence.pages < pages) {
    const SlabPool::Taken group = pool_.Take(sequence.layout, sequence.tenant);
    if (group.entry == SlabPool::kNoEntry) return false;
    if (group.dirty) {
      work_.AddZeroing(sequence.tenant, group.entry, pool_.group_bytes(sequence.layout));
    }
    table[static_cast<size_t>(sequence.pages++)] = group.entry;
  }
  return true;
}

// The page of the next row is replaced by a group of the sequence's own if others hold its group
// too, or if an unfinished copy reads that row. The sequence's rows in it are copied, each layer's
// before that layer is first written. The whole group is copied if that saves zeroing another
// tenant's bytes.
bool KvCache::CopySharedPage(SeqSlot slot) {
  Sequence& sequence = Mutable(slot);
  const int32_t row = sequence.length % pool_.layout(sequence.layout).page_size;
  if (row == 0) return true;
  uint32_t& entry = TableOf(slot)[static_cast<size_t>(sequence.pages) - 1];
  if (pool_.references(entry) == 1 && row >= pool_.pinned_rows(entry)) return true;
  const SlabPool::Taken group = pool_.Take(sequence.layout, sequence.tenant);
  if (group.entry == SlabPool::kNoEntry) return false;
  work_.AddCopy(sequence.tenant, sequence.layout, group.entry, entry, row, group.dirty);
  sequence.copy_took_last = pool_.Drop(entry);
  sequence.entry_before_copy = entry;
  entry = group.entry;
  return true;
}

// Ends the copy on write together with its reservation. If no row is kept, the shared page returns,
// as if there had been no step: layers of the copy may not have been made.
void KvCache::EndCopy(SeqSlot slot, bool keep) {
  Sequence& sequence = Mutable(slot);
  const uint32_t source = std::exchange(sequence.entry_before_copy, SlabPool::kNoEntry);
  if (source == SlabPool::kNoEntry) return;
  uint32_t& entry = TableOf(slot)[static_cast<size_t>(sequence.pages_before) - 1];
  if (keep) return work_.EndCopy(entry);
  // This comes before the copy is dropped, since the copy may be all that keeps its source.
  allocations_ += pool_.references(source) == 0 ? 1 : 0;
  pool_.Share(source);
  freed_[static_cast<size_t>(Freed::kUncommitted)] += DropGroup(entry);
  entry = source;
  sequence.pages_published = std::min(sequence.pages_published, sequence.pages_before - 1);
}

// Drops one reference. If it is the last, work that would only fill the group is cancelled.
bool KvCache::DropGroup(uint32_t entry) {
  if (pool_.references(entry) == 1) work_.Cancel(entry);
  return pool_.Drop(entry);
}

void KvCache::UndoReserve(SeqSlot slot) {
  Sequence& sequence = Mutable(slot);
  const auto table = TableOf(slot);
  while (sequence.pages > sequence.pages_before) {
    const uint32_t entry = table[static_cast<size_t>(--sequence.pages)];
    work_.Cancel(entry);
    pool_.Untake(entry);
  }
  if (sequence.entry_before_copy != SlabPool::kNoEntry) {
    uint32_t& entry = table[static_cast<size_t>(sequence.pages) - 1];
    // This comes before the copy is cancelled, since the copy may be all that keeps its source.
    pool_.Share(sequence.entry_before_copy);
    work_.Cancel(entry);
    pool_.Untake(entry);
    entry = std::exchange(sequence.entry_before_copy, SlabPool::kNoEntry);
  }
  sequence.rows_reserved = kNone;
}

absl::Status KvCache::Exhausted(std::span<const StepRows> rows, const StepRows& at) const {
  const LayoutId layout = Get(at.sequence).layout;
  int64_t wanted = 0;
  for (const StepRows& row : rows) {
    const Sequence& sequence = Get(row.sequence);
    if (sequence.layout != layout) continue;
    wanted += PagesFor(sequence, int64_t{sequence.length} + row.rows) - sequence.pages;
  }
  return absl::ResourceExhaustedError(absl::StrCat("pages: step wants ", wanted,
                                                   " new ones and copies of shared ones, ",
                                                   pool_.free_groups(layout), " are free"));
}

void KvCache::CountReserved(SeqSlot slot) {
  Sequence& sequence = Mutable(slot);
  allocations_ += static_cast<uint64_t>(sequence.pages - sequence.pages_before);
  for (int32_t page = sequence.pages_before; page < sequence.pages; ++page) {
    scrubs_ += pool_.work(TableOf(slot)[static_cast<size_t>(page)]) != kNone;
  }
  if (sequence.entry_before_copy == SlabPool::kNoEntry) return;
  ++allocations_;
  sequence.pages_published = std::min(sequence.pages_published, sequence.pages_before - 1);
  // The page is written below rows that a copy still reads only after a truncation.
  freed_[static_cast<size_t>(Freed::kTruncated)] += sequence.copy_took_last;
}

void KvCache::UnpublishTable(SeqSlot slot) {
  ForLists(slot, [this](SeqSlot list) { Mutable(list).pages_published = 0; });
}

PageNeed KvCache::NeedOf(SeqSlot slot, int32_t rows) const {
  PageNeed need;
  const int64_t length = int64_t{Get(slot).length} + rows;
  for (const SeqSlot list : {slot, Get(slot).window}) {
    if (list == kNone) continue;
    const Sequence& sequence = Get(list);
    const int64_t groups = PagesFor(sequence, length) - sequence.pages;
    need.groups += groups;
    need.bytes += groups * pool_.group_bytes(sequence.layout);
  }
  return need;
}

void KvCache::Commit(SeqSlot slot, int32_t rows) {
  CommitList(slot, rows);
  // Pages that were skipped already count as rows of the window's list.
  const SeqSlot window = Get(slot).window;
  if (window != kNone) CommitList(window, std::max(0, length(slot) - length(window)));
  CheckAfterMutation();
}

void KvCache::CommitList(SeqSlot slot, int32_t rows) {
  Sequence& sequence = Mutable(slot);
  Require(rows >= 0 && rows <= sequence.rows_reserved, "commit of rows that were not reserved");
  EndCopy(slot, /*keep=*/rows > 0);
  sequence.length += rows;
  sequence.rows_reserved = kNone;
  if (sequence.chain != nullptr) PublishPages(slot);
  ShrinkTo(slot, PagesFor(sequence, sequence.length), Freed::kUncommitted);
  LeaveBehind(slot);
}

// Returns the whole pages that the window has passed, and moves the others to the front of the
// table.
void KvCache::LeaveBehind(SeqSlot slot) {
  Sequence& sequence = Mutable(slot);
  const GroupLayout& layout = pool_.layout(sequence.layout);
  if (layout.window == 0) return;
  const int32_t gone = std::max(0, sequence.length - layout.window) / layout.page_size;
  const int32_t leave = gone - sequence.pages_gone;
  if (leave <= 0) return;
  const auto table = TableOf(slot).first(static_cast<size_t>(sequence.pages));
  for (const uint32_t entry : table.first(static_cast<size_t>(leave))) {
    freed_[static_cast<size_t>(Freed::kTruncated)] += DropGroup(entry);
  }
  std::copy(table.begin() + leave, table.end(), table.begin());
  sequence.pages -= leave;
  sequence.pages_gone = gone;
  sequence.pages_published = 0;
}

void KvCache::Rollback(SeqSlot slot) { Commit(slot, 0); }

void KvCache::ShrinkTo(SeqSlot slot, int32_t pages, Freed why) {
  Sequence& sequence = Mutable(slot);
  const auto table = TableOf(slot);
  while (sequence.pages > pages) {
    freed_[static_cast<size_t>(why)] += DropGroup(table[static_cast<size_t>(--sequence.pages)]);
  }
  sequence.pages_published = std::min(sequence.pages_published, sequence.pages);
}

std::span<uint32_t> KvCache::TableOf(SeqSlot slot) {
  const auto pages = static_cast<size_t>(options_.max_pages_per_sequence);
  return tables_.subspan(static_cast<size_t>(slot) * pages, pages);
}

int32_t KvCache::PagesFor(const Sequence& sequence, int64_t rows) const {
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  return static_cast<int32_t>((rows + page_size - 1) / page_size) - sequence.pages_gone;
}

uint32_t KvCache::copied_group(SeqSlot sequence_slot, PageList list) const {
  const SeqSlot slot = ListOf(sequence_slot, list);
  const Sequence& sequence = Get(slot);
  if (sequence.rows_reserved == kNone || sequence.entry_before_copy == SlabPool::kNoEntry) {
    return SlabPool::kNoEntry;
  }
  return tables_[static_cast<size_t>(TableBegin(slot) + sequence.pages_before - 1)];
}

CopiedGroups KvCache::copied_groups(SeqSlot slot) const {
  CopiedGroups groups;
  for (const PageList list : {PageList::kMain, PageList::kWindow}) {
    if (Has(slot, list)) groups.by_list[static_cast<size_t>(list)] = copied_group(slot, list);
  }
  return groups;
}

uint32_t KvCache::group(SeqSlot sequence_slot, int64_t page, PageList list) const {
  const SeqSlot slot = ListOf(sequence_slot, list);
  const Sequence& sequence = Get(slot);
  const int64_t index = page - sequence.pages_gone;
  Require(index >= 0 && index < sequence.pages, "a page that the sequence does not have");
  return tables_[static_cast<size_t>(TableBegin(slot) + index)];
}

int32_t KvCache::least_length(SeqSlot slot) const {
  const Sequence& sequence = Get(WithWindow(slot));
  if (sequence.pages_gone == 0) return 0;
  const GroupLayout& layout = pool_.layout(sequence.layout);
  return sequence.pages_gone * layout.page_size + layout.window;
}

int32_t KvCache::max_rows(SeqSlot slot) const {
  const int64_t pages = int64_t{options_.max_pages_per_sequence} + Get(slot).pages_gone;
  const int64_t rows = pages * pool_.layout(Get(slot).layout).page_size;
  return static_cast<int32_t>(std::min<int64_t>(rows, kMaxRows));
}

int64_t KvCache::free_groups(LayoutId layout) const {
  return pool_.Has(layout) ? pool_.free_groups(layout) : 0;
}

KvCacheStats KvCache::stats() const {
  const SlabPoolStats pool = pool_.stats();
  KvCacheStats stats;
  const auto restoring = static_cast<int64_t>(restoring_.size());
  stats.bytes_total = pool.bytes_total;
  stats.bytes_used = bytes_used();
  stats.groups_used = pool.groups_used - pool.groups_pinned - pool.groups_cached - restoring;
  stats.groups_cached = pool.groups_cached;
  stats.bytes_cached = pool.bytes_cached;
  stats.groups_free = pool.groups_free;
  stats.slabs_free = pool.slabs_free;
  stats.groups_shared = pool.groups_shared;
  stats.groups_pinned = pool.groups_pinned + restoring;
  stats.bytes_pinned = pool.bytes_pinned + restoring_bytes_;
  stats.sequences = open_sequences_;
  stats.allocations = allocations_;
  stats.freed = freed_;
  stats.freed[static_cast<size_t>(Freed::kEvicted)] = prefixes_.stats().freed;
  stats.copies_on_write = work_.groups_copied();
  stats.bytes_copied = work_.bytes_copied();
  stats.scrubs = scrubs_;
  return stats;
}

void KvCache::CheckAfterMutation() const {
  Require(pool_.CountersHold(), "page groups are not conserved");
}

// The lists of a sequence hold the same rows, or reserve the rest of them.
std::string KvCache::CheckWindow(SeqSlot slot) const {
  const Sequence& sequence = Get(slot);
  if (sequence.window == kNone) return "";
  if (!IsOpen(sequence.window)) return absl::StrCat("sequence slot ", slot, ": its window is gone");
  const Sequence& window = Get(sequence.window);
  const int64_t rows = int64_t{sequence.length} + std::max(0, sequence.rows_reserved);
  const int64_t window_rows = int64_t{window.length} + std::max(0, window.rows_reserved);
  if (rows == window_rows && sequence.tenant == window.tenant) return "";
  return absl::StrCat("sequence slot ", slot, ": ", rows, " rows of tenant ", sequence.tenant,
                      ", but its window has ", window_rows, " of tenant ", window.tenant);
}

std::string KvCache::CheckInvariants() const {
  std::unordered_map<uint32_t, int32_t> references;
  int64_t open = 0;
  for (SeqSlot slot = 0; slot < options_.max_sequences; ++slot) {
    const Sequence& sequence = sequences_[static_cast<size_t>(slot)];
    if (sequence.layout == kNone) continue;
    ++open;
    const int64_t rows = int64_t{sequence.length} + std::max(0, sequence.rows_reserved);
    if (sequence.pages != PagesFor(sequence, rows)) {
      return absl::StrCat("sequence slot ", slot, ": ", sequence.pages, " pages for ", rows,
                          " rows");
    }
    if (std::string fault = CheckWindow(slot); !fault.empty()) return fault;
    for (int32_t page = 0; page < sequence.pages; ++page) {
      ++references[tables_[static_cast<size_t>(TableBegin(slot) + page)]];
    }
  }
  if (open != open_sequences_) return "open sequences miscounted";
  prefixes_.AddReferences(&references);
  for (const RestoreRoom& room : restoring_) ++references[room.entry];
  if (std::string fault = prefixes_.CheckInvariants(); !fault.empty()) return fault;
  const uint64_t freed =
      std::accumulate(freed_.begin(), freed_.end(), uint64_t{0}) + prefixes_.stats().freed;
  const int64_t held = pool_.stats().groups_used - pool_.stats().groups_pinned -
                       static_cast<int64_t>(restoring_.size());
  if (allocations_ - freed != static_cast<uint64_t>(held)) {
    return absl::StrCat(allocations_, " groups taken less ", freed, " freed are not the ", held,
                        " in use");
  }
  return pool_.CheckInvariants(references);
}

// ------------------------------------------------------------------------------- Declared contents

void KvCache::Declare(SeqSlot slot, std::shared_ptr<const PrefixChain> chain, int32_t rows) {
  Sequence& sequence = Mutable(slot);
  Require(chain != nullptr && rows >= 0 && rows <= chain->rows() &&
              chain->page_size == pool_.layout(sequence.layout).page_size,
          "rows are declared that the chain does not have");
  sequence.chain = std::move(chain);
  sequence.declared = rows;
  PublishPages(slot);
  CheckAfterMutation();
}

void KvCache::Undeclare(SeqSlot slot, int32_t from) {
  Sequence& sequence = Mutable(slot);
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  sequence.pages_cached = std::min(sequence.pages_cached, from / page_size);
  if (sequence.declared <= from) return;
  // A key stands for a whole page, so a part of a page cannot stay declared.
  const bool opaque = sequence.chain != nullptr && sequence.chain->opaque;
  sequence.declared = opaque ? from / page_size * page_size : from;
  if (sequence.declared == 0) sequence.chain.reset();
}

void KvCache::DropCached(LayoutId layout) {
  const int64_t nodes = prefixes_.stats().nodes;
  prefixes_.Drop(layout);
  if (events_ == nullptr || prefixes_.stats().nodes == nodes) return;
  Event event;
  event.kind = EventKind::kDropped;
  events_->Add(layout, std::move(event));
}

void KvCache::Note(SeqSlot slot, EventKind kind) {
  if (events_ == nullptr) return;
  const Sequence& sequence = Get(slot);
  Event event;
  event.kind = kind;
  if (kind == EventKind::kRestored) event.tier = Tier::kCheckpoint;
  event.sequence = sequence.name;
  event.model = sequence.model;
  event.rows = sequence.length;
  events_->Add(sequence.layout, std::move(event));
}

void KvCache::Publish(SeqSlot slot, int32_t page, int32_t rows) {
  const Sequence& sequence = Get(slot);
  const PrefixChain& chain = *sequence.chain;
  const uint32_t entry = TableOf(slot)[static_cast<size_t>(page)];
  if (!prefixes_.Publish(sequence.layout, chain, page, rows, entry) || events_ == nullptr) return;
  Event event;
  event.kind = EventKind::kStored;
  event.sequence = sequence.name;
  event.model = sequence.model;
  event.first_row = int64_t{page} * chain.page_size;
  event.rows = rows;
  if (rows == chain.page_size) event.key = chain.keys[static_cast<size_t>(page)];
  event.parent = chain.parent(page);
  events_->Add(sequence.layout, std::move(event));
}

void KvCache::PublishPages(SeqSlot slot) {
  Sequence& sequence = Mutable(slot);
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  const int32_t whole = std::min(sequence.length, sequence.declared) / page_size;
  for (; sequence.pages_cached < whole; ++sequence.pages_cached) {
    Publish(slot, sequence.pages_cached, page_size);
  }
}

// The sequence is about to end: other sequences may also find the rows of its last page.
void KvCache::PublishRest(SeqSlot slot) {
  const Sequence& sequence = Get(slot);
  if (sequence.chain == nullptr || sequence.chain->opaque) return;
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  const int32_t rest =
      std::min(sequence.length, sequence.declared) - sequence.pages_cached * page_size;
  if (rest <= 0) return;
  Publish(slot, sequence.pages_cached, rest);
}

PrefixMatch KvCache::Match(SeqSlot slot, int32_t most_rows) {
  Sequence& sequence = Mutable(slot);
  Require(sequence.rows_reserved == kNone, "a match for a sequence in a step");
  PrefixMatch match;
  const int32_t page_size = pool_.layout(sequence.layout).page_size;
  const int32_t before = sequence.length;
  const int32_t row_limit = std::min({most_rows, sequence.declared, max_rows(slot)});
  if (row_limit <= before || before % page_size != 0) return match;
  const auto table = TableOf(slot);
  const auto take = [&](const PrefixCache::Found& page_found) {
    pool_.Share(page_found.entry);
    table[static_cast<size_t>(sequence.pages++)] = page_found.entry;
    sequence.length += page_found.rows;
    prefixes_.CountUse(page_found.node);
  };
  match.end = MatchEnd::kAll;
  while (sequence.length < row_limit) {
    const int32_t page = sequence.pages;
    const int32_t rows_left = std::min(row_limit - sequence.length, page_size);
    const bool whole = rows_left == page_size;
    PrefixCache::Found cached;
    if (whole) cached = prefixes_.Find(sequence.layout, *sequence.chain, page);
    if (cached.rows == 0)
      cached = prefixes_.FindRows(sequence.layout, *sequence.chain, page, rows_left);
    const bool away = cached.rows > 0 && cached.entry == SlabPool::kNoEntry;
    if (away && prefixes_.Comes(cached.node)) {
      // The match ends at a page border, so that a later match can go on here.
      match.end = MatchEnd::kDeferred;
      break;
    }
    if (away) {
      cached =
          prefixes_.FindRows(sequence.layout, *sequence.chain, page, rows_left, /*in_pool=*/true);
    }
    if (cached.rows > 0) take(cached);
    if (cached.rows == page_size) {
      sequence.pages_cached = sequence.pages;
    } else if (cached.rows < rows_left) {
      match.end =
          away ? MatchEnd::kEvicted : prefixes_.WhyAbsent(sequence.layout, *sequence.chain, page);
      break;
    }
  }
  match.rows = sequence.length - before;
  prefixes_.CountMatch(match.end, row_limit - before, match.rows);
  if (events_ != nullptr && match.end != MatchEnd::kAll) {
    Miss miss;
    miss.sequence = sequence.name;
    miss.model = sequence.model;
    miss.first_row = before;
    miss.rows_asked = row_limit - before;
    miss.rows_found = match.rows;
    miss.end = match.end;
    events_->Add(sequence.layout, std::move(miss));
  }
  CheckAfterMutation();
  return match;
}

const std::shared_ptr<const PrefixChain>& KvCache::chain(SeqSlot slot) const {
  return Get(slot).chain;
}

int32_t KvCache::declared(SeqSlot slot) const { return Get(slot).declared; }

// Evicts idle groups if that gives enough room. Otherwise evicts none, because a refused step must
// leave the cache as it is.
bool KvCache::MakeRoom(std::span<const StepRows> rows) {
  const LayoutId layout = Get(rows[0].sequence).layout;
  int64_t wanted = 0;
  for (const StepRows& row : rows) {
    const Sequence& sequence = Get(row.sequence);
    if (sequence.layout != layout) return false;  // steps are of one model
    wanted += PagesFor(sequence, int64_t{sequence.length} + row.rows) - sequence.pages;
    const int32_t inside = sequence.length % pool_.layout(layout).page_size;
    if (row.rows == 0 || inside == 0) continue;
    const uint32_t last = TableOf(row.sequence)[static_cast<size_t>(sequence.pages) - 1];
    // All but one of the sequences that share a page need a copy; the count includes that one, to
    // be on the safe side.
    wanted += pool_.references(last) > 1 || inside < pool_.pinned_rows(last);
  }
  return prefixes_.MakeRoom(layout, wanted, pool_.refusal());
}

KvCache::RestoreRoom KvCache::TakeToRestore(LayoutId layout, TenantKey tenant) {
  SlabPool::Taken group = pool_.Take(layout, tenant);
  // As for a step: another bound may refuse once the first one allows it.
  for (int bound = 0; bound < 3 && group.entry == SlabPool::kNoEntry; ++bound) {
    if (!prefixes_.MakeRoom(layout, 1, pool_.refusal())) break;
    group = pool_.Take(layout, tenant);
  }
  if (group.entry == SlabPool::kNoEntry) return {};
  const RestoreRoom room = {next_restore_++, group.entry, layout};
  restoring_.push_back(room);
  restoring_bytes_ += pool_.group_bytes(layout);
  CheckAfterMutation();
  return room;
}

KvCache::RestoreRoom KvCache::TakeRestoring(uint64_t id) {
  const auto restoring = std::find_if(restoring_.begin(), restoring_.end(),
                                      [id](const RestoreRoom& room) { return room.id == id; });
  if (restoring == restoring_.end()) return {};
  const RestoreRoom room = *restoring;
  restoring_.erase(restoring);
  restoring_bytes_ -= pool_.group_bytes(room.layout);
  return room;
}

void KvCache::Restore(int32_t node, uint64_t id, Tier from) {
  const RestoreRoom room = TakeRestoring(id);
  Require(room.id != 0, "a group is restored that was not taken for it");
  ++allocations_;
  prefixes_.Restore(node, room.entry, from);
  CheckAfterMutation();
}

void KvCache::DropRestore(uint64_t id) {
  const RestoreRoom room = TakeRestoring(id);
  if (room.id == 0) return;
  // The group may still hold bytes of the tenant that had it before.
  pool_.MarkMixed(room.entry);
  pool_.Drop(room.entry);
  CheckAfterMutation();
}

}  // namespace mla::kvcache
