// No tenant ever sees another tenant's bytes: in pages that it gets, in outputs, in exported rows,
// in checkpoint files, or in rows that return from slower tiers.
//
// Three tenants, each with a row value of its own, use everything that moves rows: steps that
// commit some rows or none, forks, truncation, release, matches of prefixes that all of them name
// alike, export and import, and checkpoints. The pool is small, so that page groups change tenants
// all the time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/testing/long_runs.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/integration/dense_model.h"
#include "tests/integration/taint/watching_backend.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

namespace fs = std::filesystem;

constexpr size_t kTenants = 3;
// bf16: 1.1484, 2.5469 and 5.125; they have no byte pattern in common.
constexpr uint16_t kWords[kTenants] = {0x3f93, 0x4023, 0x40a4};
constexpr size_t kOpen = 5;  // sequences of a tenant
constexpr uint32_t kMostRows = 60;

int Operations() { return IsLongRun() ? 40'000 : 1'500; }

// The tenant whose word it is, or kTenants if it is none's.
size_t OwnerOf(uint16_t word) {
  return static_cast<size_t>(std::find(kWords, kWords + kTenants, word) - kWords);
}

// Collects bytes that were seen where they must not be. Any thread.
class Findings {
 public:
  void Add(const std::string& what) {
    const MutexLock lock(mutex_);
    ++count_;
    if (first_.empty()) first_ = what;
  }
  // Checks from now on; the server's own rows at its start belong to no tenant.
  void Begin() {
    const MutexLock lock(mutex_);
    begun_ = true;
  }
  // Checks a page: it may hold words of one tenant, and zeros.
  void LookAtPage(std::span<const uint16_t> words) {
    {
      const MutexLock lock(mutex_);
      if (!begun_) return;
      ++pages_;
    }
    size_t owner = kTenants;
    for (const uint16_t word : words) {
      if (word == 0) continue;
      const size_t of = OwnerOf(word);
      if (of == kTenants) return Add(absl::StrCat("a page has the word ", word));
      if (owner != kTenants && of != owner) return Add("a page has words of two tenants");
      owner = of;
    }
  }
  uint64_t count() const {
    const MutexLock lock(mutex_);
    return count_;
  }
  uint64_t pages() const {
    const MutexLock lock(mutex_);
    return pages_;
  }
  std::string first() const {
    const MutexLock lock(mutex_);
    return first_;
  }

 private:
  mutable Mutex mutex_;
  uint64_t count_ ABSL_GUARDED_BY(mutex_) = 0, pages_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string first_ ABSL_GUARDED_BY(mutex_);
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
};

// Counts the places where four consecutive words are the tenant's; fewer may be chance.
size_t CountOf(size_t tenant, std::span<const char> bytes) {
  std::string marker;
  for (int i = 0; i < 4; ++i) {
    marker.push_back(static_cast<char>(kWords[tenant] & 0xff));
    marker.push_back(static_cast<char>(kWords[tenant] >> 8));
  }
  size_t count = 0;
  for (auto at = bytes.begin();; ++at, ++count) {
    at = std::search(at, bytes.end(), marker.begin(), marker.end());
    if (at == bytes.end()) return count;
  }
}

class Tenant {
 public:
  Tenant(size_t index, const TestServer& server, Findings* findings)
      : index_(index), findings_(findings), random_(index + 1) {
    client::ClientOptions options;
    options.tenant = absl::StrCat("tenant", index);
    options.sequence_lease_ms = 3'600'000;  // none ends while the machine is too busy to renew it
    client_ = server.Connect(options);
    EXPECT_TRUE(client_->RegisterModel(SpecOf(dims_, "m")).ok());
    session_ = *client_->OpenSession();
  }

  // Performs one random operation; operations that must succeed are checked.
  void Operate() {
    const uint64_t kind = random_() % 16;
    if (sequences_.empty() || (kind < 3 && sequences_.size() < kOpen)) return Open();
    client::Sequence& one = sequences_[random_() % sequences_.size()];
    if (one.length() >= kMostRows || kind == 3) return Release(&one);
    if (kind == 4) return Fork(&one);
    if (kind == 5) {
      EXPECT_TRUE(one.Truncate(random_() % (one.length() + 1)).ok());
    } else if (kind == 6 && one.length() > 0) {
      Export(one);
    } else if (kind == 7 && one.length() > 0) {
      Checkpoint(&one);
    } else {
      Step(&one);
    }
  }
  // Adds the tiers from which rows returned to the pool, by the events that the server still keeps.
  void AddRestored(std::set<v1::CacheTier>* tiers) {
    EXPECT_TRUE(client_
                    ->WatchEvents(0,
                                  [tiers](const v1::WatchEventsReply& reply) {
                                    for (const v1::CacheEvent& event : reply.events()) {
                                      if (event.kind() != v1::CACHE_EVENT_KIND_RESTORED) continue;
                                      tiers->insert(event.tier());
                                    }
                                    return reply.events_size() >= 256;  // there may be more
                                  })
                    .ok());
  }
  uint64_t exported() const { return exported_; }
  uint64_t attended() const { return attended_; }
  uint64_t matched() const { return matched_; }
  void Clear() { sequences_.clear(); }

 private:
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }

  // All tenants name their rows alike.
  void Open() {
    v1::Prefix prefix;
    const uint32_t text = Below(3);
    for (uint32_t row = 0; row < kMostRows; ++row) prefix.add_token_ids(text * 1000 + row);
    prefix.set_max_rows(1 + Below(40));
    auto opened = client_->OpenSequence("m", "", prefix);
    ASSERT_TRUE(opened.ok()) << opened.status();
    matched_ += opened->length();
    sequences_.push_back(*std::move(opened));
  }
  void Release(client::Sequence* sequence) {
    EXPECT_TRUE(sequence->Release().ok());
    std::swap(*sequence, sequences_.back());
    sequences_.pop_back();
  }
  void Fork(client::Sequence* sequence) {
    if (sequences_.size() >= kOpen) return Release(sequence);
    auto fork = sequence->Fork(random_() % (sequence->length() + 1));
    ASSERT_TRUE(fork.ok()) << fork.status();
    sequences_.push_back(*std::move(fork));
  }

  void Step(client::Sequence* sequence) {
    const uint32_t rows = 1 + Below(9);
    auto step = session_->Begin("m", {{sequence, rows}});
    if (absl::IsResourceExhausted(step.status())) return Release(sequence);
    ASSERT_TRUE(step.ok()) << step.status();
    const uint32_t layers = Below(8) == 0 ? 1 : static_cast<uint32_t>(dims_.layers);
    for (uint32_t layer = 0; layer < layers; ++layer) Attend(step->get(), layer, rows);
    if (layers < static_cast<uint32_t>(dims_.layers) || Below(8) == 0) {
      EXPECT_TRUE((*step)->Abort().ok());
    } else {
      EXPECT_TRUE((*step)->End({Below(rows + 1)}).ok());
    }
  }

  // The average of equal values is that value, for any queries.
  void Attend(client::Step* step, uint32_t layer, uint32_t rows) {
    const auto heads = static_cast<size_t>(dims_.heads), lora = static_cast<size_t>(dims_.lora);
    const std::vector<uint16_t> kv(rows * static_cast<size_t>(dims_.row()), kWords[index_]);
    const std::vector<uint16_t> q =
        RandomBf16(rows * heads * static_cast<size_t>(dims_.row()), &random_);
    std::vector<float> o(rows * heads * lora);
    client::AttendCall call;
    call.layer = layer;
    call.row_count = rows;
    call.num_heads = static_cast<uint32_t>(heads);
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = kv.data();
    call.q = q.data();
    call.o = o.data();
    const auto times = step->Attend(call);
    ASSERT_TRUE(times.ok()) << times.status();
    const float own = FromBf16(kWords[index_]);
    for (const float value : o) {
      if (!(std::abs(value - own) <= 1e-4f * own)) {
        return findings_->Add(absl::StrCat("an output of ", own, " is ", value));
      }
    }
    attended_ += rows;
  }

  void Export(const client::Sequence& sequence) {
    v1::ExportRequest request;
    request.set_sequence_id(sequence.id());
    request.set_expected_epoch(sequence.epoch());
    std::vector<v1::PagesPart> parts;
    ASSERT_TRUE(client_
                    ->ExportPages(request,
                                  [&](const v1::PagesPart& part) {
                                    parts.push_back(part);
                                    return absl::OkStatus();
                                  })
                    .ok());
    for (const v1::PagesPart& part : parts) {
      const std::string& payload = part.chunk().payload();
      for (size_t at = 0; at + 1 < payload.size(); at += 2) {
        const auto word = static_cast<uint16_t>(static_cast<uint8_t>(payload[at]) |
                                                static_cast<uint8_t>(payload[at + 1]) << 8);
        if (OwnerOf(word) != index_) return findings_->Add("an export has another word");
        ++exported_;
      }
    }
    if (sequences_.size() >= kOpen) return;
    v1::ImportTarget target;
    target.set_model_id("m");
    size_t next = 0;
    auto imported =
        client_->ImportPages(target, [&]() -> absl::StatusOr<std::optional<v1::PagesPart>> {
          if (next == parts.size()) return std::nullopt;
          return parts[next++];
        });
    if (imported.ok()) sequences_.push_back(*std::move(imported));
  }

  // Writes the sequence, releases it and opens it again.
  void Checkpoint(client::Sequence* sequence) {
    const uint64_t id = sequence->id();
    const auto saved = client_->Checkpoint({id});
    ASSERT_TRUE(saved.ok()) << saved.status();
    Release(sequence);
    auto restored = client_->Restore({id});
    if (restored.ok()) sequences_.push_back(std::move(restored->front()));
    if (Below(4) != 0) {
      EXPECT_TRUE(client_->DropCheckpoints({id}).ok());
    }
  }

  const size_t index_;
  Findings* const findings_;
  const Dims dims_;
  std::mt19937_64 random_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
  std::vector<client::Sequence> sequences_;
  uint64_t exported_ = 0, attended_ = 0, matched_ = 0;
};

struct Scene {
  Findings findings;
  TempFolder folder;
  std::unique_ptr<TestServer> server;

  Scene(bool zeroes, bool tiers) {
    server = std::make_unique<TestServer>(
        [&](server::Config& config) {
          config.backend = "cpu";
          config.limits.kv_cache_bytes = 96 << 10;
          config.checkpoint.path = folder.File("saved");
          if (!tiers) return;
          config.limits.host_tier_bytes = 48 << 10;
          config.limits.file_tier_bytes = 4 << 20;
          config.tiers.file_path = folder.File("tier");
          config.limits.tier_file_hits = 0;
          config.limits.tier_low_percent = 30;
          config.limits.tier_high_percent = 50;
        },
        [this, zeroes]() -> std::unique_ptr<kernels::AttentionBackend> {
          kernels::BackendOptions options;
          options.threads = 2;
          options.pin_threads = false;
          auto cpu = kernels::CpuBackend::Create(options);
          WatchOptions watch;
          watch.zeroes = zeroes;
          watch.look = [this](std::span<const uint16_t> words) { findings.LookAtPage(words); };
          watch.clash = [this](const std::string& what) { findings.Add(what); };
          return std::make_unique<WatchingBackend>(*std::move(cpu), std::move(watch));
        });
    findings.Begin();
  }

  std::vector<std::unique_ptr<Tenant>> Run(int operations) {
    std::vector<std::unique_ptr<Tenant>> tenants;
    for (size_t i = 0; i < kTenants; ++i) {
      tenants.push_back(std::make_unique<Tenant>(i, *server, &findings));
    }
    std::mt19937_64 random(7);
    for (int i = 0; i < operations; ++i) {
      // For a while mostly one of them works, so that it gets the pages of the others.
      const size_t busy = static_cast<size_t>(i) / 50 % kTenants;
      tenants[random() % 4 == 0 ? random() % kTenants : busy]->Operate();
      if (i % 150 == 149) tenants[busy]->Clear();
      if (::testing::Test::HasFatalFailure()) break;
    }
    return tenants;
  }
};

// Expects that nothing was found, and that rows have moved.
void ExpectNothingFound(const Scene& scene, const std::vector<std::unique_ptr<Tenant>>& tenants,
                        int operations) {
  EXPECT_EQ(scene.findings.count(), 0u) << scene.findings.first();
  EXPECT_GT(scene.findings.pages(), static_cast<uint64_t>(operations));
  for (const auto& tenant : tenants) {
    EXPECT_GT(tenant->exported(), 0u);
    EXPECT_GT(tenant->attended(), 0u);
    EXPECT_GT(tenant->matched(), 0u);
  }
  // Pages have changed tenants.
  const auto stats = scene.server->Connect()->GetStats();
  EXPECT_GT(stats->page_groups_scrubbed(), static_cast<uint64_t>(operations) / 50);
}

TEST(TaintTest, NoWordOfATenantIsSeenByAnother) {
  Scene scene(/*zeroes=*/true, /*tiers=*/false);
  ExpectNothingFound(scene, scene.Run(Operations()), Operations());
  EXPECT_GT(scene.server->Connect()->GetStats()->page_groups_evicted(), 0u);
  size_t files = 0;
  for (const auto& at : fs::recursive_directory_iterator(scene.folder.File("saved"))) {
    if (at.path().extension() != ".ckpt") continue;
    std::ifstream in(at.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    size_t owners = 0;
    for (size_t i = 0; i < kTenants; ++i) owners += CountOf(i, bytes) > 0 ? 1 : 0;
    EXPECT_EQ(owners, 1u) << at.path();
    ++files;
  }
  EXPECT_GT(files, kTenants);
}

TEST(TaintTest, NorDoesAnyComeBackFromATier) {
  Scene scene(/*zeroes=*/true, /*tiers=*/true);
  std::set<v1::CacheTier> restored;
  const auto of_both = [&] {
    return restored.contains(v1::CACHE_TIER_HOST) && restored.contains(v1::CACHE_TIER_FILE);
  };
  // The writer of files decides when rows leave the host's tier for the file's, so one round may
  // find all of them in one tier.
  constexpr int kMostRounds = 6;
  for (int round = 0; round < kMostRounds && !of_both(); ++round) {
    const auto tenants = scene.Run(Operations());
    ExpectNothingFound(scene, tenants, Operations());
    for (const auto& tenant : tenants) tenant->AddRestored(&restored);
  }
  EXPECT_TRUE(of_both());
}

// The same, but pages are not zeroed when they change tenants.
TEST(TaintTest, PagesThatWereNotZeroedAreNoticed) {
  Scene scene(/*zeroes=*/false, /*tiers=*/false);
  scene.Run(600);
  EXPECT_GT(scene.findings.count(), 0u);
  EXPECT_EQ(scene.findings.first(), "a page has words of two tenants");
}

}  // namespace
}  // namespace mla::integration
