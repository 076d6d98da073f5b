// Random operations on a KvCache, compared with an oracle that shares no code with it: for each
// sequence the list of row ids it should hold. The pool's bytes are simulated too: zeroing waits
// until launches take it, in pieces, and copies until a layer is written. Steps end between layers,
// and some launches fail after an unknown part of their work. Rows are then read back through the
// published page tables alone. So a lost copy, a wrong page, a stale table or a word of another
// tenant has the same effect here as in production.
//
// MLA_TEST_SEED sets the first seed, MLA_TEST_LONG runs twenty times as much.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/testing/long_runs.h"
#include "scheduler/kvcache/kv_cache_simulation.h"
#include "scheduler/kvcache/prefix/token_book.h"

namespace mla::kvcache {
namespace {

// One seed.
class Simulation {
 public:
  explicit Simulation(uint32_t seed) : random_(seed) {
    const int64_t granules = 24 + Below(300);
    const int64_t slabs[] = {0, 0, 256, 1024, 2048};
    const KvCacheOptions options{.bytes = granules * kernels::kPageGranuleBytes + Below(256),
                                 .slab_bytes = std::min<int64_t>(slabs[Below(5)], granules * 256),
                                 .max_sequences = kSequences,
                                 .max_pages_per_sequence = kTablePages};
    device_.words().assign(static_cast<size_t>(options.bytes / 8), 0);
    host_tables_.assign(kSequences * kTablePages, kUnpublished);
    device_.tables() = host_tables_;
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
    device_.FinishAll(random_, *cache_);
    Expect(PageWork() == 0, "work left after all were released");
    Expect(cache_->stats().groups_used == 0, "groups left after all were released");
    Expect(cache_->stats().groups_shared == 0, "shares left after all were released");
    for (const LayoutId layout : layout_ids_) cache_->DropCached(layout);
    Expect(cache_->stats().groups_cached == 0, "cached groups left after all were dropped");
  }

  const std::string& fault() const { return fault_; }
  int64_t refused() const { return refused_; }
  int64_t failed() const { return device_.failed(); }
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
        return device_.Finish(random_, *cache_);
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

  // Tells the cache what the sequence's rows stand for, and what some rows after them will.
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

  // Matches the tokens that a sequence had, unchanged or with another end. That sequence may have
  // been of another tenant or layout.
  void TakePrefix(SeqSlot s, const ModelSequence& known) {
    ModelSequence& m = model_[s];
    m.tokens = known.tokens;
    m.tokens.resize(static_cast<size_t>(Below(static_cast<int32_t>(m.tokens.size()) + 1)));
    const size_t same = m.tokens.size();
    for (int32_t more = Below(4); more > 0; --more) m.tokens.push_back(tokens_.New());
    if (m.tokens.empty()) return;
    const int32_t limit = Below(3) == 0 ? Below(30) : 1 << 20;
    cache_->Declare(s, ChainOf(m), static_cast<int32_t>(m.tokens.size()));
    const PrefixMatch match = cache_->Match(s, limit);
    const auto rows_found = static_cast<size_t>(match.rows);
    Expect(cache_->length(s) == match.rows, "a match of another length");
    Expect(match.rows <= limit && rows_found <= same, "rows were found that there are not");
    Expect(rows_found == 0 || (m.tenant == known.tenant && m.layout == known.layout),
           "rows of another tenant or layout were found");
    for (size_t i = 0; i < rows_found && fault_.empty(); ++i) {
      m.rows.push_back(tokens_.RowOf(m.tokens[i]));
      Expect(m.rows.back() != 0, "a row was found that was not committed");
    }
    // Tokens that were not found are replaced by new ones, so that a token names one row.
    m.tokens.resize(rows_found);
    cache_->Undeclare(s, static_cast<int32_t>(rows_found));
    for (int32_t more = Below(9); more > 0 && rows_found > 0; --more) {
      m.tokens.push_back(tokens_.New());
    }
    if (rows_found > 0) cache_->Declare(s, ChainOf(m), static_cast<int32_t>(m.tokens.size()));
    matched_ += rows_found > 0;
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

  int64_t PageWork() const { return cache_->work().queued() + cache_->work().copies_open(); }
  uint32_t* HostTable(SeqSlot s) { return host_tables_.data() + cache_->page_table(s); }

  // Number of further groups that the rows need, with steps taken one after the other.
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
    const int64_t work = PageWork();
    // While copies that this step or an earlier one asked for are not done, a sequence may have to
    // copy a page that it could otherwise have kept.
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
      Expect(PageWork() == work, "work of nothing");
      Expect(cache_->stats().groups_used == stats_before.groups_used, "refusal took groups");
      Expect(cache_->stats().groups_shared == stats_before.groups_shared, "refusal lost shares");
      ExpectSameTables(tables_before);
      Expect(!evicts, "a refusal evicted groups");
      // Cached groups were not the reason for the refusal.
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
      model_[row.sequence].layers = {};
      model_[row.sequence].torn = false;
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

  // A launch that carries some page work, of one tenant or of any, and the copy of a layer without
  // rows of it: this happens if a launch has no time for the rows.
  void Launch() {
    device_.AwaitSlot(random_, *cache_);
    LaunchWork work;
    WorkRoom room{.places = kMostLayers + Below(4), .bytes = 1 + Below(4096)};
    const SeqSlot s = Below(kSequences);
    if (model_[s].reserved >= 0 && Below(2) == 0) {
      const auto layers = static_cast<int32_t>(kLayouts[model_[s].layout].layers.size());
      cache_->work().TakeLayer(cache_->copied_group(s), Below(layers), &room, &work);
    }
    if (Below(2) == 0) {
      cache_->work().TakeAny(&room, &work);
    } else {
      cache_->work().Take(static_cast<TenantKey>(Below(kTenants)), cache_->work().last(), &room,
                          &work);
    }
    device_.Begin(std::move(work));
  }

  // Brings the sequence to where a launch may write rows: its work is done, its table published.
  void Prepare(SeqSlot s) {
    const ModelSequence& m = model_[s];
    device_.DoQueued(random_, *cache_, m.tenant, m.ticket);
    device_.Publish(*cache_, s, host_tables_);
    if (Below(16) == 0) cache_->UnpublishTable(s);
  }

  // Makes the layer's copy, and then its rows may be written and read.
  void PrepareLayer(SeqSlot s, int32_t layer) {
    Expect(device_.CopyLayer(random_, *cache_, cache_->copied_group(s), layer),
           "no room for one layer");
    model_[s].layers[static_cast<size_t>(layer)] = true;
  }

  // Returns true if launches may read the row: copied rows of a layer are there once that layer was
  // written.
  bool Readable(SeqSlot s, size_t position, size_t layer) {
    const auto page = static_cast<size_t>(kLayouts[model_[s].layout].page_size);
    return cache_->copied_group(s) == SlabPool::kNoEntry || model_[s].layers[layer] ||
           position / page < model_[s].rows.size() / page;
  }

  SimulatedDevice::Row RowOf(SeqSlot s, size_t position, size_t layer) {
    const ModelSequence& m = model_[s];
    return {&kLayouts[m.layout].rows(static_cast<int32_t>(layer)),
            static_cast<size_t>(kLayouts[m.layout].page_size), cache_->page_table(s), position};
  }

  // Writes some of the reserved rows, from the first unwritten one on. Sometimes it writes at one
  // layer only, and then no further rows.
  void Write(SeqSlot s) {
    ModelSequence& m = model_[s];
    if (m.torn || m.reserved <= static_cast<int32_t>(m.written.size())) return;
    Prepare(s);
    const GroupLayout& layout = kLayouts[m.layout];
    const auto layers = static_cast<int32_t>(layout.layers.size());
    const int32_t remaining = m.reserved - static_cast<int32_t>(m.written.size());
    const int32_t alone = Below(6) == 0 ? Below(layers) : -1;
    const int32_t begin = std::max(alone, 0), end = alone < 0 ? layers : alone + 1;
    for (int32_t layer = end; layer-- > begin;) PrepareLayer(s, layer);
    m.torn = alone >= 0 && layers > 1;
    for (int32_t count = 1 + Below(remaining); count > 0; --count) {
      const uint64_t row = next_row_++;
      const size_t position = m.rows.size() + m.written.size();
      for (int32_t layer = begin; layer < end; ++layer) {
        const auto at = static_cast<size_t>(layer);
        if (!device_.Write(RowOf(s, position, at), WordFor(m.tenant, row, at))) {
          return Expect(false, "a row outside the pool");
        }
      }
      if (m.torn) return;
      m.written.push_back(row);
    }
  }

  // Commits the written rows, part of them, or none.
  void End(SeqSlot s) {
    ModelSequence& m = model_[s];
    if (m.reserved < 0) return;
    if (Below(8) != 0) Write(s);
    if (Below(3) == 0) Verify(s);
    if (m.torn || Below(6) == 0) {
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
      // A group filled by a copy keeps its old bytes until its first layer is copied.
      if (entry == cache_->copied_group(s) &&
          std::none_of(m.layers.begin(), m.layers.end(), [](bool made) { return made; })) {
        continue;
      }
      const int64_t bytes = kLayouts[m.layout].group_bytes();
      if (!device_.OnlyOf(entry, bytes, m.tenant + 1)) {
        return Expect(false, "a word of another tenant, or a group outside the pool");
      }
      const uint32_t published = device_.tables()[static_cast<size_t>(cache_->page_table(s) + p)];
      if (entry != published) return Expect(false, "a table entry was not published");
    }
    for (size_t position = 0; position < m.rows.size() + m.written.size(); ++position) {
      const uint64_t row =
          position < m.rows.size() ? m.rows[position] : m.written[position - m.rows.size()];
      for (size_t layer = 0; layer < kLayouts[m.layout].layers.size(); ++layer) {
        if (!Readable(s, position, layer)) continue;
        if (!device_.Holds(RowOf(s, position, layer), WordFor(m.tenant, row, layer))) {
          return Expect(false, "a row holds something else");
        }
      }
    }
  }

  std::mt19937 random_;
  SimulatedDevice device_;
  std::vector<uint32_t> host_tables_;
  std::unique_ptr<KvCache> cache_;
  LayoutId layout_ids_[4];
  ModelSequence model_[kSequences];
  uint64_t next_row_ = 1;
  std::vector<ModelSequence> histories_;  // sequences that have said what their rows are
  TokenBook tokens_;
  int64_t matched_ = 0, in_page_ = 0, refused_ = 0;
  std::string fault_;
};

#ifdef MLA_SANITIZED
constexpr int kRuns = 100;
#else
constexpr int kRuns = 1'000;
#endif
TEST(KvCacheModelTest, AgreesWithTheOracle) {
  const char* seed_text = std::getenv("MLA_TEST_SEED");
  const bool seeded = seed_text != nullptr && *seed_text != '\0';
  const auto first = seeded ? static_cast<uint32_t>(std::atoll(seed_text)) : 1u;
  const int runs = IsLongRun() ? 20 * kRuns : kRuns;
  int64_t refused = 0, failed = 0;
  uint64_t copies = 0, scrubs = 0;
  int64_t matched = 0, in_page = 0;
  uint64_t evicted = 0, superseded = 0;
  for (int run = 0; run < runs; ++run) {
    const uint32_t seed = first + static_cast<uint32_t>(run);
    Simulation simulation(seed);
    simulation.Run();
    ASSERT_EQ(simulation.fault(), "") << "MLA_TEST_SEED=" << seed;
    refused += simulation.refused();
    failed += simulation.failed();
    copies += simulation.stats().copies_on_write;
    scrubs += simulation.stats().scrubs;
    matched += simulation.matched();
    in_page += simulation.in_page();
    evicted += simulation.prefixes().evicted;
    superseded += simulation.prefixes().superseded;
  }
  // The operations must keep reaching the cases they are for.
  EXPECT_GT(refused, 5 * runs);
  EXPECT_GT(failed, 5 * runs);
  EXPECT_GT(copies, static_cast<uint64_t>(5 * runs));
  EXPECT_GT(scrubs, static_cast<uint64_t>(5 * runs));
  EXPECT_GT(matched, 5 * runs);
  EXPECT_GT(in_page, runs);
  EXPECT_GT(evicted, static_cast<uint64_t>(5 * runs));
  EXPECT_GT(superseded, static_cast<uint64_t>(runs) / 10);
}

}  // namespace
}  // namespace mla::kvcache
