// Rows that Cache.Import and Cache.Restore bring in are unchanged, whatever is imported, restored
// and computed at the same time.
//
// Four clients of a tenant import and restore during its steps, into page groups that another
// tenant has just used, so every group is zeroed before rows arrive. All rows of each import are
// read back. After each round the other tenant has its turn.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
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

constexpr size_t kTenants = 2;
constexpr size_t kImporters = 4;
constexpr size_t kTexts = 6;  // imported texts of a tenant
constexpr uint32_t kLeastRows = 3, kMostRows = 10;
// moves of one importer in a round; about as many rows as the pool holds
constexpr int kRoundMoves = 14;
constexpr int kMovesPerRestore = 4;  // one of this many moves is a restore
constexpr int64_t kPoolBytes = 96 << 10;
constexpr std::chrono::microseconds kLaunchTakesMost{300};
// No lease ends while the machine is too busy to renew it.
constexpr int64_t kLeaseMs = 3'600'000;

#if defined(MLA_SANITIZED)
constexpr int64_t kMoves = 600;
#else
constexpr int64_t kMoves = 3'000;
#endif

int64_t Moves() { return IsLongRun() ? 100'000 : kMoves; }

// Collects faults. Any thread.
class Faults {
 public:
  void Add(const std::string& what) {
    const MutexLock lock(mutex_);
    ++count_;
    if (first_.empty()) first_ = what;
  }
  int64_t count() const {
    const MutexLock lock(mutex_);
    return count_;
  }
  std::string first() const {
    const MutexLock lock(mutex_);
    return first_;
  }

 private:
  mutable Mutex mutex_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string first_ ABSL_GUARDED_BY(mutex_);
};

struct Counts {
  std::atomic<int64_t> imports{0}, restores{0}, steps{0};
};

// The parts of an export of a sequence, and its payloads, concatenated.
struct Text {
  std::vector<v1::PagesPart> parts;
  std::string payload;
};

class Worker {
 public:
  Worker(const TestServer& server, const std::string& tenant, uint64_t seed, Faults* faults,
         Counts* counts)
      : random_(seed), faults_(faults), counts_(counts) {
    client::ClientOptions options;
    options.tenant = tenant;
    options.transport = client::ClientOptions::Transport::kInline;
    options.sequence_lease_ms = kLeaseMs;
    client_ = server.Connect(options);
  }

  // Computes texts of the tenant. REQUIRES: it is the tenant's first worker.
  std::vector<Text> MakeTexts() {
    EXPECT_TRUE(client_->RegisterModel(SpecOf(dims_, "m")).ok());
    std::vector<Text> texts;
    for (size_t i = 0; i < kTexts; ++i) {
      auto sequence = Opened();
      const uint32_t rows = kLeastRows + Below(kMostRows - kLeastRows + 1);
      std::vector<uint16_t> kv = RandomBf16(rows * static_cast<size_t>(dims_.row()), &random_);
      for (uint16_t& word : kv) word |= 1;  // no word is zero
      Step(&*sequence, rows, kv);
      texts.push_back(Export(*sequence));
      EXPECT_GT(texts.back().payload.size(), 0u);
    }
    return texts;
  }

  // Moves rows of some texts into new sequences, and keeps these.
  void MoveRows(const std::vector<Text>& texts) {
    for (int i = 0; i < kRoundMoves; ++i) {
      const Text& text = texts[Below(kTexts)];
      if (!Import(text)) {
        sequences_.erase(sequences_.begin() + static_cast<ptrdiff_t>(sequences_.size() / 2),
                         sequences_.end());  // the pool is full
        continue;
      }
      if (i % kMovesPerRestore == kMovesPerRestore - 1) Restore(text);
    }
  }
  // Runs short sequences until the others have ended.
  void RunSteps(const std::atomic<int>& others) {
    while (others.load() > 0) {
      auto sequence = Opened();
      for (int i = 0; i < 4 && others.load() > 0; ++i) {
        const uint32_t rows = 1 + Below(6);
        const size_t words = rows * static_cast<size_t>(dims_.row());
        if (!Step(&*sequence, rows, std::vector<uint16_t>(words, kOne))) break;
      }
    }
  }
  void Clear() { sequences_.clear(); }

 private:
  static constexpr uint16_t kOne = 0x3f80;  // 1.0 as bf16

  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }

  std::optional<client::Sequence> Opened() {
    auto sequence = client_->OpenSequence("m");
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    if (!sequence.ok()) return std::nullopt;
    return *std::move(sequence);
  }

  // Returns false if the pool has no room for it.
  bool Step(client::Sequence* sequence, uint32_t rows, const std::vector<uint16_t>& kv) {
    if (session_ == nullptr) session_ = *client_->OpenSession();
    auto step = session_->Begin("m", {{sequence, rows}});
    if (absl::IsResourceExhausted(step.status())) return false;
    EXPECT_TRUE(step.ok()) << step.status();
    const auto heads = static_cast<size_t>(dims_.heads), lora = static_cast<size_t>(dims_.lora);
    std::vector<float> o(rows * heads * lora);
    const std::vector<uint16_t> q =
        RandomBf16(rows * heads * static_cast<size_t>(dims_.row()), &random_);
    for (int layer = 0; step.ok() && layer < dims_.layers; ++layer) {
      client::AttendCall call;
      call.layer = static_cast<uint32_t>(layer);
      call.row_count = rows;
      call.num_heads = static_cast<uint32_t>(heads);
      call.profile = v1::PROFILE_ABSORBED;
      call.o_dtype = v1::DTYPE_F32;
      call.kv = kv.data();
      call.q = q.data();
      call.o = o.data();
      const auto attended = (*step)->Attend(call);
      EXPECT_TRUE(attended.ok()) << attended.status();
      // The average of equal values is that value, for any queries.
      if (kv[0] != kOne || kv.back() != kOne) continue;
      const bool good = std::all_of(o.begin(), o.end(),
                                    [](float value) { return std::abs(value - 1.0f) <= 1e-4f; });
      if (!good) faults_->Add("a step has another output");
    }
    if (step.ok()) {
      EXPECT_TRUE((*step)->End().ok());
    }
    ++counts_->steps;
    return true;
  }

  Text Export(const client::Sequence& sequence) {
    v1::ExportRequest request;
    request.set_sequence_id(sequence.id());
    request.set_expected_epoch(sequence.epoch());
    Text text;
    const absl::Status status = client_->ExportPages(request, [&](const v1::PagesPart& part) {
      text.parts.push_back(part);
      text.payload += part.chunk().payload();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return text;
  }

  void Check(const char* call, const client::Sequence& sequence, const Text& text) {
    const Text exported = Export(sequence);
    if (exported.payload == text.payload) return;
    const auto zeros = std::count(exported.payload.begin(), exported.payload.end(), '\0');
    faults_->Add(absl::StrCat("rows of ", call, " are others: ", zeros, " of ",
                              exported.payload.size(), " bytes are zero, ",
                              std::count(text.payload.begin(), text.payload.end(), '\0'),
                              " should be"));
  }

  bool Import(const Text& text) {
    v1::ImportTarget target;
    target.set_model_id("m");
    size_t next = 0;
    auto imported =
        client_->ImportPages(target, [&]() -> absl::StatusOr<std::optional<v1::PagesPart>> {
          if (next == text.parts.size()) return std::nullopt;
          return text.parts[next++];
        });
    if (absl::IsResourceExhausted(imported.status())) return false;
    EXPECT_TRUE(imported.ok()) << imported.status();
    if (!imported.ok()) return false;
    Check("Import", *imported, text);
    sequences_.push_back(*std::move(imported));
    ++counts_->imports;
    return true;
  }

  // Writes the latest sequence to a file, releases it and restores it.
  void Restore(const Text& text) {
    const uint64_t id = sequences_.back().id();
    const auto saved = client_->Checkpoint({id});
    ASSERT_TRUE(saved.ok()) << saved.status();
    sequences_.pop_back();
    auto restored = client_->Restore({id});
    if (restored.ok()) {
      Check("Restore", restored->front(), text);
      sequences_.push_back(std::move(restored->front()));
      ++counts_->restores;
    } else {
      EXPECT_TRUE(absl::IsResourceExhausted(restored.status())) << restored.status();
    }
    EXPECT_TRUE(client_->DropCheckpoints({id}).ok());
  }

  const Dims dims_;
  std::mt19937_64 random_;
  Faults* const faults_;
  Counts* const counts_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::Session> session_;
  std::vector<client::Sequence> sequences_;
};

struct Tenant {
  std::vector<std::unique_ptr<Worker>> importers;
  std::unique_ptr<Worker> stepper;
  std::vector<Text> texts;

  void Round() {
    std::atomic<int> importing{static_cast<int>(kImporters)};
    std::vector<std::thread> threads;
    for (const auto& importer : importers) {
      threads.emplace_back([&] {
        importer->MoveRows(texts);
        --importing;
      });
    }
    threads.emplace_back([&] { stepper->RunSteps(importing); });
    for (std::thread& thread : threads) thread.join();
    for (const auto& importer : importers) importer->Clear();
  }
};

TEST(MovedRowsTest, AreWhatTheyWereNextToOtherMovesAndSteps) {
  Faults faults;
  Counts counts;
  TempFolder folder;
  TestServer server(
      [&](server::Config& config) {
        config.backend = "cpu";
        config.limits.kv_cache_bytes = kPoolBytes;
        config.limits.max_sequences = 256;
        config.checkpoint.path = folder.File("saved");
      },
      [&faults]() -> std::unique_ptr<kernels::AttentionBackend> {
        kernels::BackendOptions options;
        options.threads = 1;
        options.pin_threads = false;
        auto cpu = kernels::CpuBackend::Create(options);
        WatchOptions watch;
        watch.look = [](std::span<const uint16_t>) {};
        watch.clash = [&faults](const std::string& what) { faults.Add(what); };
        watch.takes_most = kLaunchTakesMost;
        return std::make_unique<WatchingBackend>(*std::move(cpu), std::move(watch));
      });
  std::array<Tenant, kTenants> tenants;
  for (size_t i = 0; i < kTenants; ++i) {
    const auto worker = [&](size_t seed) {
      return std::make_unique<Worker>(server, absl::StrCat("tenant", i), 100 * i + seed, &faults,
                                      &counts);
    };
    for (size_t j = 0; j < kImporters; ++j) tenants[i].importers.push_back(worker(j));
    tenants[i].stepper = worker(kImporters);
    tenants[i].texts = tenants[i].stepper->MakeTexts();
  }
  const auto moves = [&] { return counts.imports + counts.restores; };
  for (size_t round = 0; moves() < Moves() && !HasFailure(); ++round) {
    tenants[round % kTenants].Round();
  }
  EXPECT_EQ(faults.count(), 0) << faults.first();
  EXPECT_GT(counts.restores, Moves() / 10);
  EXPECT_GT(counts.steps, Moves() / 10);
  // Every move, and more, used a group of another tenant.
  const auto stats = server.Connect()->GetStats();
  EXPECT_GT(stats->page_groups_scrubbed(), static_cast<uint64_t>(Moves()));
  RecordProperty("imports", std::to_string(counts.imports));
  RecordProperty("restores", std::to_string(counts.restores));
  RecordProperty("steps", std::to_string(counts.steps));
}

}  // namespace
}  // namespace mla::integration
