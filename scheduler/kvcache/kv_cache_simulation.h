// One seed of the model test of KvCache.
#ifndef MLA_SCHEDULER_KVCACHE_KV_CACHE_SIMULATION_H_
#define MLA_SCHEDULER_KVCACHE_KV_CACHE_SIMULATION_H_

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/prefix/token_book.h"

namespace mla::kvcache {

inline constexpr int kOperations = 2'100;  // a run; two million in all
inline constexpr int32_t kSequences = 14, kTablePages = 24, kMostLayers = 3;
inline constexpr TenantKey kTenants = 3;
inline constexpr uint32_t kUnpublished = 0x0badcafe;

inline const GroupLayout kLayouts[] = {
    MakeLayout({.row_bytes = 16, .page_size = 3, .layers = 2}),  // 1 granule
    MakeLayout({.row_bytes = 8, .page_size = 1, .layers = 1}),   // 1 granule, one row a page
    MakeLayout({.row_bytes = 40, .page_size = 7, .layers = 3}),  // 4 granules
    MakeLayout(
        {.row_bytes = 64, .page_size = 16, .layers = 3}),  // 12 granules: more than some slabs
};

struct ModelSequence {
  bool open = false;
  int layout = 0;
  TenantKey tenant = 0;
  std::vector<uint64_t> rows = {};     // committed
  std::vector<uint64_t> written = {};  // of the open reservation, so far
  // Tokens of its rows: of those that are committed and of some to come.
  std::vector<uint32_t> tokens = {};
  int32_t reserved = -1;  // rows of it, or -1
  WorkTicket ticket = 0;  // of its work
};

class Simulation {
 public:
  explicit Simulation(uint32_t seed) : random_(seed) {
    const int64_t granules = 24 + Below(300);
    const int64_t slabs[] = {0, 0, 256, 1024, 2048};
    const KvCacheOptions options{.bytes = granules * kernels::kPageGranuleBytes + Below(256),
                                 .slab_bytes = std::min<int64_t>(slabs[Below(5)], granules * 256),
                                 .max_sequences = kSequences,
                                 .max_pages_per_sequence = kTablePages};
    words_.assign(static_cast<size_t>(options.bytes / 8), 0);
    host_tables_.assign(kSequences * kTablePages, kUnpublished);
    device_tables_ = host_tables_;
    cache_ = KvCache::Create(options, host_tables_).value();
    for (int i = 0; i < 4; ++i) layout_ids_[i] = cache_->AddLayout(kLayouts[i]).value();
  }

  void Run() {
    for (int op = 0; op < kOperations && fault_.empty(); ++op) {
      Step();
      if (op % 32 == 0 && fault_.empty()) fault_ = cache_->CheckInvariants();
    }
    for (SeqSlot s = 0; s < kSequences && fault_.empty(); ++s) {
      if (model_[s].open) Release(s);
    }
    while (!running_.empty()) Finish();
    Expect(cache_->work().queued() == 0, "work left after all were released");
    Expect(cache_->stats().groups_used == 0, "groups left after all were released");
    Expect(cache_->stats().groups_shared == 0, "shares left after all were released");
    for (const LayoutId layout : layout_ids_) cache_->DropCached(layout);
    Expect(cache_->stats().groups_cached == 0, "cached groups left after all were dropped");
  }

  const std::string& fault() const { return fault_; }
  int64_t refused() const { return refused_; }
  int64_t failed() const { return failed_; }
  int64_t matched() const { return matched_; }
  int64_t in_page() const { return in_page_; }
  const PrefixStats& prefixes() const { return cache_->prefix_stats(); }
  KvCacheStats stats() const { return cache_->stats(); }

 private:
  int32_t Below(int32_t bound) { return static_cast<int32_t>(random_() % bound); }
  void Expect(bool holds, const char* what) {
    if (!holds && fault_.empty()) fault_ = what;
  }

  void Step() {
    const SeqSlot s = Below(kSequences);
    if (!model_[s].open) {
      const SeqSlot parent = Below(2 * kSequences);
      return parent < kSequences && model_[parent].open ? Fork(parent) : Open();
    }
    switch (Below(20)) {
      case 0:
        return Below(4) == 0 ? Fork(s) : Release(s);
      case 1:
        return Below(3) == 0 ? Truncate(s) : Verify(s);
      case 2:
        return Verify(s);
      case 3:
        return Below(8) == 0 ? ReplaceLayout() : Verify(s);
      case 4:
      case 5:
      case 6:
        return Write(s);
      case 7:
      case 8:
        return Reserve();
      case 9:
        return Below(2) == 0 ? Launch() : Declare(s);
      case 11:
        return Below(4) == 0 ? Release(s) : Declare(s);
      case 10:
        return Finish();
      default:
        return End(s);
    }
  }

  void Open() {
    int layout = Below(4);
    auto tenant = static_cast<TenantKey>(Below(kTenants));
    const ModelSequence* known = nullptr;
    if (!histories_.empty() && Below(3) != 0) {
      known = &histories_[static_cast<size_t>(Below(static_cast<int32_t>(histories_.size())))];
      if (Below(8) != 0) std::tie(layout, tenant) = std::tie(known->layout, known->tenant);
    }
    const auto slot = cache_->Open(layout_ids_[layout], tenant);
    if (!slot.ok()) return Expect(false, "a closed slot, yet Open refused");
    Expect(!model_[*slot].open, "Open returned a slot in use");
    model_[*slot] = {.open = true, .layout = layout, .tenant = tenant};
    if (known != nullptr) TakePrefix(*slot, *known);
  }

  std::shared_ptr<const PrefixChain> ChainOf(const ModelSequence& m) {
    return tokens_.Chain(m.tenant, m.layout, kLayouts[m.layout].page_size, m.tokens);
  }

  // Says of a sequence what its rows are, and of some that are to come.
  void Declare(SeqSlot s) {
    ModelSequence& m = model_[s];
    if (m.reserved >= 0 || m.rows.empty()) return;
    m.tokens.clear();
    for (const uint64_t row : m.rows) m.tokens.push_back(tokens_.Of(row));
    for (int32_t more = Below(12); more > 0; --more) m.tokens.push_back(tokens_.New());
    cache_->Declare(s, ChainOf(m), static_cast<int32_t>(m.tokens.size()));
    if (histories_.size() < 24) histories_.emplace_back();
    histories_[static_cast<size_t>(Below(static_cast<int32_t>(histories_.size())))] = m;
  }

  // Matches the tokens of some sequence there was, changed at the end or as they are, which may be
  // of another tenant or layout.
  void TakePrefix(SeqSlot s, const ModelSequence& known) {
    ModelSequence& m = model_[s];
    m.tokens = known.tokens;
    m.tokens.resize(static_cast<size_t>(Below(static_cast<int32_t>(m.tokens.size()) + 1)));
    const size_t same = m.tokens.size();
    for (int32_t more = Below(4); more > 0; --more) m.tokens.push_back(tokens_.New());
    if (m.tokens.empty()) return;
    const int32_t most = Below(3) == 0 ? Below(30) : 1 << 20;
    cache_->Declare(s, ChainOf(m), static_cast<int32_t>(m.tokens.size()));
    const PrefixMatch match = cache_->Match(s, most);
    const auto found = static_cast<size_t>(match.rows);
    Expect(cache_->length(s) == match.rows, "a match of another length");
    Expect(match.rows <= most && found <= same, "rows were found that there are not");
    Expect(found == 0 || (m.tenant == known.tenant && m.layout == known.layout),
           "rows of another tenant or layout were found");
    for (size_t i = 0; i < found && fault_.empty(); ++i) {
      m.rows.push_back(tokens_.RowOf(m.tokens[i]));
      Expect(m.rows.back() != 0, "a row was found that was not committed");
    }
    // What was not found is written as something else, so that a token names one row.
    m.tokens.resize(found);
    cache_->Undeclare(s, static_cast<int32_t>(found));
    for (int32_t more = Below(9); more > 0 && found > 0; --more) m.tokens.push_back(tokens_.New());
    if (found > 0) cache_->Declare(s, ChainOf(m), static_cast<int32_t>(m.tokens.size()));
    matched_ += found > 0;
    in_page_ += match.rows % kLayouts[m.layout].page_size != 0;
  }

  void Fork(SeqSlot s) {
    ModelSequence& parent = model_[s];
    const bool full = std::all_of(std::begin(model_), std::end(model_),
                                  [](const ModelSequence& m) { return m.open; });
    const auto rows = static_cast<int32_t>(parent.rows.size());
    const int32_t length = Below(2) == 0 ? rows : Below(rows + 1);
    const auto child = cache_->Fork(s, length);
    Expect(child.ok() == (parent.reserved < 0 && !full), "Fork answered wrongly");
    if (!child.ok()) return;
    Expect(!model_[*child].open, "Fork returned a slot in use");
    model_[*child] = {.open = true, .layout = parent.layout, .tenant = parent.tenant};
    model_[*child].rows.assign(parent.rows.begin(), parent.rows.begin() + length);
    const auto declared = std::min(parent.tokens.size(), static_cast<size_t>(length));
    model_[*child].tokens.assign(parent.tokens.begin(),
                                 parent.tokens.begin() + static_cast<int64_t>(declared));
  }

  void Truncate(SeqSlot s) {
    ModelSequence& m = model_[s];
    const auto length = Below(static_cast<int32_t>(m.rows.size()) + 1);
    const bool ok = cache_->Truncate(s, length).ok();
    Expect(ok == (m.reserved < 0), "Truncate answered wrongly");
    if (ok) m.rows.resize(static_cast<size_t>(length));
    if (ok && m.tokens.size() > m.rows.size()) m.tokens.resize(m.rows.size());
  }

  void Release(SeqSlot s) {
    cache_->Release(s);
    model_[s] = {};
  }

  // Gives up an unused layout and registers it again.
  void ReplaceLayout() {
    const int layout = Below(4);
    const bool used =
        std::any_of(std::begin(model_), std::end(model_),
                    [&](const ModelSequence& m) { return m.open && m.layout == layout; });
    const bool ok = cache_->RemoveLayout(layout_ids_[layout]).ok();
    Expect(ok != used, "RemoveLayout answered wrongly");
    if (ok) layout_ids_[layout] = cache_->AddLayout(kLayouts[layout]).value();
  }

  uint32_t* HostTable(SeqSlot s) { return host_tables_.data() + cache_->page_table(s); }
  static int32_t Pages(const ModelSequence& m, size_t rows) {
    const auto page = static_cast<size_t>(kLayouts[m.layout].page_size);
    return static_cast<int32_t>((rows + page - 1) / page);
  }

  // Groups that the rows need beyond what the sequences hold, steps taken one after the other.
  int64_t GroupsWanted(const std::vector<StepRows>& rows) {
    std::map<uint32_t, int> holders;
    for (SeqSlot s = 0; s < kSequences; ++s) {
      if (!model_[s].open) continue;
      const size_t held = model_[s].rows.size() + std::max(0, model_[s].reserved);
      for (int32_t p = 0; p < Pages(model_[s], held); ++p) ++holders[HostTable(s)[p]];
    }
    int64_t wanted = 0;
    for (const StepRows& row : rows) {
      const ModelSequence& m = model_[row.sequence];
      const size_t length = m.rows.size();
      wanted += Pages(m, length + static_cast<size_t>(row.rows)) - Pages(m, length);
      const bool inside = length % static_cast<size_t>(kLayouts[m.layout].page_size) != 0;
      if (row.rows == 0 || !inside) continue;
      int& sharers = holders[HostTable(row.sequence)[Pages(m, length) - 1]];
      if (sharers > 1) {
        ++wanted;
        --sharers;
      }
    }
    return wanted;
  }

  void Reserve() {
    std::vector<StepRows> rows;
    bool one_layout = true;
    const bool same_layout = Below(2) == 0;
    for (SeqSlot s = 0; s < kSequences; ++s) {
      const ModelSequence& m = model_[s];
      if (!m.open || m.reserved >= 0 || Below(3) != 0) continue;
      if (same_layout && !rows.empty() && m.layout != model_[rows[0].sequence].layout) continue;
      const auto room = cache_->max_rows(s) - static_cast<int32_t>(m.rows.size());
      rows.push_back({s, Below(std::min(room, Below(8) == 0 ? 60 : 3) + 1)});
      one_layout &= m.layout == model_[rows[0].sequence].layout;
    }
    if (rows.empty()) return;
    std::shuffle(rows.begin(), rows.end(), random_);
    const int64_t wanted = GroupsWanted(rows);
    const LayoutId layout = layout_ids_[model_[rows[0].sequence].layout];
    const int64_t free = cache_->free_groups(layout);
    const int64_t idle = cache_->idle_groups(layout);
    const uint64_t evicted = cache_->prefix_stats().evicted;
    const auto tables_before = host_tables_;
    const KvCacheStats stats_before = cache_->stats();
    const int64_t queued = cache_->work().queued();
    // A copy of the same step or of one before, not done yet, may make a sequence copy a page that
    // it could have kept.
    const auto more = static_cast<int64_t>(rows.size());
    const absl::Status status = cache_->Reserve(rows);
    const bool evicts = cache_->prefix_stats().evicted != evicted;
    if (one_layout && status.ok() && !evicts) {
      Expect(wanted <= free, "Reserve found more than is free");
    }
    if (one_layout && !status.ok())
      Expect(wanted + more > free + idle, "Reserve refused what fits");
    if (!status.ok()) {
      ++refused_;
      Expect(status.code() == absl::StatusCode::kResourceExhausted, "wrong status code");
      Expect(cache_->work().queued() == queued, "work of nothing");
      Expect(cache_->stats().groups_used == stats_before.groups_used, "refusal took groups");
      Expect(cache_->stats().groups_shared == stats_before.groups_shared, "refusal lost shares");
      ExpectSameTables(tables_before);
      Expect(!evicts, "a refusal evicted groups");
      // What is cached has not stood in its way.
      if (one_layout && Below(4) == 0) {
        for (const LayoutId id : layout_ids_) cache_->DropCached(id);
        Expect(wanted + more > cache_->free_groups(layout), "cached groups did not yield");
      }
      return;
    }
    const int64_t left = cache_->free_groups(layout);
    if (one_layout && !evicts) {
      Expect(left <= free - wanted && left >= free - wanted - more, "free groups miscounted");
    }
    for (const StepRows& row : rows) {
      model_[row.sequence].reserved = row.rows;
      model_[row.sequence].ticket = cache_->work().last();
    }
    if (Below(4) == 0) Launch();
  }

  void ExpectSameTables(const std::vector<uint32_t>& before) {
    for (SeqSlot s = 0; s < kSequences; ++s) {
      if (!model_[s].open) continue;
      const size_t held = model_[s].rows.size() + std::max(0, model_[s].reserved);
      const auto first = static_cast<size_t>(cache_->page_table(s));
      for (size_t p = 0; p < static_cast<size_t>(Pages(model_[s], held)); ++p) {
        Expect(host_tables_[first + p] == before[first + p], "refusal changed a table");
      }
    }
  }

  void CarryOut(const kernels::PageRange& all) {
    for (int32_t i = 0; i < all.count; ++i) {
      const kernels::PageRange range = all.place(i);
      const auto target = words_.begin() + range.target_offset / 8;
      if (range.zeroes()) {
        std::fill_n(target, range.bytes / 8, 0);
      } else {
        std::copy_n(words_.begin() + range.source_offset / 8, range.bytes / 8, target);
      }
    }
  }

  // A launch that carries some page work, of one tenant or of any.
  void Launch() {
    if (running_.size() == 2) Finish();
    LaunchWork work;
    WorkRoom room{.places = kMostLayers + Below(4), .bytes = 1 + Below(4096)};
    if (Below(2) == 0) {
      cache_->work().TakeAny(&room, &work);
    } else {
      cache_->work().Take(static_cast<TenantKey>(Below(kTenants)), cache_->work().last(), &room,
                          &work);
    }
    if (!work.empty()) running_.push_back(std::move(work));
  }

  // Ends the oldest launch. When it fails, those behind it fail too.
  void Finish() {
    if (running_.empty()) return;
    if (Below(5) != 0) {
      for (const kernels::PageRange& range : running_.front().ranges()) CarryOut(range);
      cache_->work().Acknowledge(&running_.front());
      running_.pop_front();
      return;
    }
    ++failed_;
    for (const LaunchWork& work : running_) {
      for (const kernels::PageRange& range : work.ranges()) {
        if (Below(3) != 0) CarryOut(range);
      }
    }
    for (; !running_.empty(); running_.pop_back()) cache_->work().Requeue(&running_.back());
  }

  // Brings the sequence to where a launch may write its rows: its work is done, its table
  // published.
  void Prepare(SeqSlot s) {
    const ModelSequence& m = model_[s];
    while (!running_.empty()) Finish();
    while (cache_->work().Waits(m.tenant, m.ticket)) {
      LaunchWork work;
      WorkRoom room{.places = kMostLayers + Below(4), .bytes = 1 << 20};
      cache_->work().Take(m.tenant, m.ticket, &room, &work);
      running_.push_back(std::move(work));
      while (!running_.empty()) Finish();
    }
    const kernels::TableRange range = cache_->TakeTableChange(s);
    std::copy_n(host_tables_.begin() + range.first, range.count,
                device_tables_.begin() + range.first);
    if (Below(16) == 0) cache_->UnpublishTable(s);
  }

  // Index in words_ of a row of one layer, by the published table.
  size_t WordOf(SeqSlot s, size_t position, int32_t layer) {
    const GroupLayout& layout = kLayouts[model_[s].layout];
    const size_t page = position / static_cast<size_t>(layout.page_size);
    const size_t inside = position % static_cast<size_t>(layout.page_size);
    const uint32_t entry = device_tables_[static_cast<size_t>(cache_->page_table(s)) + page];
    const size_t byte = size_t{entry} * 256 + static_cast<size_t>(layout.rows(layer).offset) +
                        inside * static_cast<size_t>(layout.rows(layer).row_stride);
    return byte / 8;
  }

  static uint64_t WordFor(TenantKey tenant, uint64_t row, int32_t layer) {
    return (uint64_t{tenant} + 1) << 56 | row << 8 | static_cast<uint64_t>(layer);
  }

  // Writes some of the reserved rows, from the first unwritten one on.
  void Write(SeqSlot s) {
    ModelSequence& m = model_[s];
    if (m.reserved <= static_cast<int32_t>(m.written.size())) return;
    Prepare(s);
    const GroupLayout& layout = kLayouts[m.layout];
    const int32_t left = m.reserved - static_cast<int32_t>(m.written.size());
    for (int32_t count = 1 + Below(left); count > 0; --count) {
      const uint64_t row = next_row_++;
      const size_t position = m.rows.size() + m.written.size();
      for (int32_t layer = 0; layer < static_cast<int32_t>(layout.layers.size()); ++layer) {
        const size_t first = WordOf(s, position, layer);
        const auto words = static_cast<size_t>(layout.rows(0).row_stride / 8);
        if (first + words > words_.size()) return Expect(false, "a row outside the pool");
        std::fill_n(words_.begin() + static_cast<int64_t>(first), words,
                    WordFor(m.tenant, row, layer));
      }
      m.written.push_back(row);
    }
  }

  // Commits what was written, part of it, or nothing.
  void End(SeqSlot s) {
    ModelSequence& m = model_[s];
    if (m.reserved < 0) return;
    if (Below(8) != 0) Write(s);
    if (Below(3) == 0) Verify(s);
    if (Below(6) == 0) {
      cache_->Rollback(s);
    } else {
      const int32_t keep = Below(3) == 0 ? Below(static_cast<int32_t>(m.written.size()) + 1)
                                         : static_cast<int32_t>(m.written.size());
      cache_->Commit(s, keep);
      for (int32_t i = 0; i < keep; ++i) Commit(m, m.written[static_cast<size_t>(i)]);
    }
    m.written.clear();
    m.reserved = -1;
    Expect(!cache_->has_reservation(s), "reservation left");
    Expect(cache_->length(s) == static_cast<int32_t>(m.rows.size()), "wrong length");
  }

  void Commit(ModelSequence& m, uint64_t row) {
    const bool declared = m.tokens.size() > m.rows.size();
    const uint32_t token = declared ? m.tokens[m.rows.size()] : tokens_.New();
    tokens_.Name(row, token);
    m.rows.push_back(row);
  }

  // Reads all rows of a sequence in a step back, and looks for foreign words in all of its groups.
  void Verify(SeqSlot s) {
    const ModelSequence& m = model_[s];
    if (m.reserved >= 0) Prepare(s);
    Expect(cache_->length(s) == static_cast<int32_t>(m.rows.size()), "wrong length");
    Expect(cache_->reserved(s) == std::max(0, m.reserved), "wrong reservation");
    if (m.reserved < 0) return;  // only sequences in a step are read by launches
    const size_t held = m.rows.size() + std::max(0, m.reserved);
    for (int32_t p = 0; p < Pages(m, held); ++p) {
      const uint32_t entry = HostTable(s)[p];
      const size_t first = size_t{entry} * 32;
      const auto count = static_cast<size_t>(kLayouts[m.layout].group_bytes() / 8);
      if (first + count > words_.size()) return Expect(false, "a group outside the pool");
      for (size_t w = first; w < first + count; ++w) {
        const uint64_t owner = words_[w] >> 56;
        if (owner != 0 && owner != m.tenant + 1) return Expect(false, "a word of another tenant");
      }
      const uint32_t published = device_tables_[static_cast<size_t>(cache_->page_table(s) + p)];
      if (entry != published) return Expect(false, "a table entry was not published");
    }
    for (size_t position = 0; position < m.rows.size() + m.written.size(); ++position) {
      const uint64_t row =
          position < m.rows.size() ? m.rows[position] : m.written[position - m.rows.size()];
      for (size_t layer = 0; layer < kLayouts[m.layout].layers.size(); ++layer) {
        const size_t first = WordOf(s, position, layer);
        for (int64_t w = 0; w < kLayouts[m.layout].rows(0).row_stride / 8; ++w) {
          if (words_[first + static_cast<size_t>(w)] != WordFor(m.tenant, row, layer)) {
            return Expect(false, "a row holds something else");
          }
        }
      }
    }
  }

  std::mt19937 random_;
  std::vector<uint64_t> words_;  // the pool
  std::vector<uint32_t> host_tables_;
  std::vector<uint32_t> device_tables_;  // as published
  std::deque<LaunchWork> running_;       // launches, oldest first
  std::unique_ptr<KvCache> cache_;
  LayoutId layout_ids_[4];
  ModelSequence model_[kSequences];
  uint64_t next_row_ = 1;
  std::vector<ModelSequence> histories_;  // sequences that have said what their rows are
  TokenBook tokens_;
  int64_t matched_ = 0, in_page_ = 0, refused_ = 0, failed_ = 0;
  std::string fault_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_KV_CACHE_SIMULATION_H_
