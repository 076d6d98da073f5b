// Measures how fast page groups move between the pool, host memory and a file, compared with the
// speed of the parts.
//
//   tiers_benchmark [--json FILE]
//
// An engine with the best backend of this machine keeps kGroups page groups of a model of 61 layers
// in its pool, as one cached prefix. Hints move them to host memory and back. The second part does
// the same with a file, which gets nearly all of them. Rates are of the whole way: copies by
// launches, seals and checks on the tiers' threads, reads and writes of the disk.
//
// They are compared with memcpy of as many groups by one thread, or, if the pool is a device's,
// with one copy of all of them each way; with seals by as many threads as the tiers have; and with
// writes and reads of the same file system in the same way (O_DIRECT, whole groups, the same
// queue). MLA_BENCH_DISK names the folder; the default is the folder of temporary files. Exits 1 if
// a host move is slower than kLeast of the copy, or a file move is slower than kLeast of the slower
// of disk and seals.
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fstream>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/kvcache/pool/group_pieces.h"
#include "scheduler/kvcache/tiers/disk_queue.h"
#include "scheduler/kvcache/tiers/group_checks.h"
#include "scheduler/kvcache/tiers/tier_store.h"
#include "scheduler/launching/launch_sizes.h"
#include "server/backends.h"
#include "tests/bench/json_flag.h"

namespace mla::bench {
namespace {

using scheduler::Engine;
using SteadyClock = std::chrono::steady_clock;

constexpr int64_t kGroups = 160;
constexpr int32_t kPageSize = 64, kLayers = 61;
constexpr int kRounds = 5;
constexpr double kLeast = 0.8;
constexpr char kTenant[] = "bench";
constexpr int64_t kRowBytes = 1152;

// Threads of the tiers: half of the processors, as many as one engine can use.
int32_t Threads() {
  return std::clamp(static_cast<int32_t>(std::thread::hardware_concurrency()) / 2, 2, 8);
}

int64_t GroupBytes() {
  return kvcache::MakeLayout({.row_bytes = kRowBytes, .page_size = kPageSize, .layers = kLayers})
      .group_bytes();
}

struct Rate {
  std::string shape;
  double gb_per_s = 0;
  double bound = 0;  // 0: this row is a bound
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "tiers_benchmark: %s\n", what.c_str());
  std::exit(2);
}

void Check(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

double SecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

// The best of several rounds, because others use the machine, too.
template <typename Fn>
double BestRate(int64_t bytes, Fn&& fn) {
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = SteadyClock::now();
    fn();
    best = std::max(best, static_cast<double>(bytes) / SecondsSince(start) / 1e9);
  }
  return best;
}

// Calls fn(i) for i below `count` on the tiers' number of threads.
template <typename Fn>
void InThreads(int64_t count, Fn fn) {
  std::atomic<int64_t> next = 0;
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < Threads(); ++t) {
    threads.emplace_back([&] {
      for (int64_t i = next++; i < count; i = next++) fn(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::string DiskFile(const char* name) {
  const char* const folder = std::getenv("MLA_BENCH_DISK");
  const char* const temporary = std::getenv("TMPDIR");
  const std::string base = folder != nullptr ? folder : temporary != nullptr ? temporary : "/tmp";
  return base + "/" + name + "." + std::to_string(getpid());
}

scheduler::ModelSpec Model() {
  scheduler::ModelSpec model;
  model.id = "model";
  model.geometry = {16, 512, 64, 128, 128};
  model.layers = kLayers;
  model.page_size = kPageSize;
  model.softmax_scale = 0.1;
  return model;
}

std::unique_ptr<kernels::AttentionBackend> MakeBackend() {
  auto choice = server::AllBackends().Select("auto", {});
  if (!choice.ok()) Die(choice.status().ToString());
  return std::move(choice->backend);
}

scheduler::Limits SmallLimits() {
  scheduler::Limits limits;
  limits.kv_cache_bytes = (kGroups + 24) * GroupBytes();
  limits.max_sequence_rows = static_cast<int32_t>(kGroups * kPageSize);
  limits.max_pages_per_sequence = static_cast<int32_t>(kGroups);
  limits.max_sequences = limits.max_step_sequences = 8;
  limits.max_heads = 16;
  limits.weights_bytes = 16 << 20;
  limits.launch_rows = 256;
  limits.prefill_rows = 128;
  limits.launch_packed_rows = 4096;
  return limits;
}

// An engine whose pool has one prefix of kGroups groups, cached and idle.
class Bench {
 public:
  Bench(int64_t host_groups, int64_t file_groups) {
    scheduler::EngineOptions options;
    options.limits = SmallLimits();
    scheduler::Limits& limits = options.limits;
    limits.host_tier_bytes = host_groups * kvcache::TierRooms::Rounded(GroupBytes());
    limits.file_tier_bytes = file_groups * kvcache::TierRooms::Rounded(GroupBytes());
    limits.tier_file_hits = 0;
    limits.tier_tenant_percent = 100;
    // Without a file, only hinted groups move; with a file, everything cached moves.
    limits.tier_low_percent = file_groups > 0 ? 60 : 0;
    limits.tier_high_percent = file_groups > 0 ? 80 : 0;
    if (file_groups > 0) options.tier_path = DiskFile("mla-tier");
    options.tier_threads = Threads();
    auto engine = Engine::Create(options, MakeBackend(), &clock_);
    if (!engine.ok()) Die(engine.status().ToString());
    engine_ = *std::move(engine);
    const auto model = engine_->RegisterModel(kTenant, Model());
    if (!model.ok()) Die(model.status().ToString());
    Fill();
  }

  // Rates of moves out of the pool and back, the best round of each.
  void Move(Rate* out, Rate* back, bool file) {
    for (int round = 0; round < kRounds; ++round) {
      const auto figures = [&] {
        const scheduler::TierStats tiers = engine_->Stats().tiers;
        return file ? tiers.file : tiers.host;
      };
      scheduler::TierFigures before = stats_;
      auto start = released_;
      if (!file) {
        before = figures();
        start = SteadyClock::now();
        Hint(scheduler::HintKind::kDemote);
      }
      auto end = Await();
      out->gb_per_s =
          std::max(out->gb_per_s, RateOf(figures().bytes_in - before.bytes_in, start, end));
      before = figures();
      start = SteadyClock::now();
      Hint(scheduler::HintKind::kPrefetch);
      end = Await();
      back->gb_per_s =
          std::max(back->gb_per_s, RateOf(figures().bytes_out - before.bytes_out, start, end));
      Renew();
    }
  }

 private:
  static double RateOf(uint64_t bytes, SteadyClock::time_point start, SteadyClock::time_point end) {
    return static_cast<double>(bytes) / std::chrono::duration<double>(end - start).count() / 1e9;
  }

  std::vector<uint32_t> Tokens() const {
    std::vector<uint32_t> tokens(static_cast<size_t>(kGroups * kPageSize));
    std::iota(tokens.begin(), tokens.end(), first_token_);
    return tokens;
  }

  void Fill() {
    scheduler::OpenArgs open;
    open.tenant = kTenant;
    open.model_id = "model";
    const auto source = engine_->OpenSequence(open);
    if (!source.ok()) Die(source.status().ToString());
    const auto empty = engine_->BeginExport({kTenant, source->id, 1, 0, {}});
    if (!empty.ok()) Die(empty.status().ToString());
    scheduler::ImportArgs args;
    args.tenant = kTenant;
    args.model_id = "model";
    args.tags = empty->tags;
    args.tags.rows = kGroups * kPageSize;
    const auto pages = engine_->BeginImport(args);
    if (!pages.ok()) Die(pages.status().ToString());
    const auto pieces = kvcache::GroupPieces(pages->layout, kPageSize);
    std::vector<std::byte> payload(static_cast<size_t>(kvcache::PayloadBytes(pieces)));
    for (int64_t group = 0; group < kGroups; ++group) {
      std::memset(payload.data(), static_cast<int>(group % 64), payload.size());
      scheduler::PageMove move;
      move.tenant = kTenant;
      move.id = pages->id;
      move.in = true;
      move.page = group;
      move.rows = kPageSize;
      move.bytes = payload;
      Check(engine_->MovePart(&move));
    }
    const auto ended = engine_->EndImport(kTenant, pages->id, Engine::kAllFinite);
    if (!ended.ok()) Die(ended.status().ToString());
    scheduler::MatchArgs match;
    match.tenant = kTenant;
    match.id = ended->id;
    match.expected_epoch = ended->epoch;
    match.prefix.token_ids = Tokens();
    const auto matched = engine_->MatchSequence(match);
    if (!matched.ok()) Die(matched.status().ToString());
    std::vector<scheduler::SequenceId> absent;
    stats_ = engine_->Stats().tiers.file;
    released_ = SteadyClock::now();
    engine_->ReleaseSequences(kTenant, std::vector{ended->id, source->id, empty->id}, &absent);
  }

  // Replaces the cached rows by new ones, so that no group has a copy.
  void Renew() {
    first_token_ += static_cast<uint32_t>(kGroups * kPageSize);
    const absl::Status gone = engine_->UnregisterModel(kTenant, "model");
    Check(gone);
    const auto model = engine_->RegisterModel(kTenant, Model());
    if (!model.ok()) Die(model.status().ToString());
    Fill();
  }

  void Hint(scheduler::HintKind kind) {
    scheduler::HintArgs args;
    args.tenant = kTenant;
    args.kind = kind;
    args.model_id = "model";
    args.prefix.token_ids = Tokens();
    const auto answer = engine_->Hint(args);
    if (!answer.ok()) Die(answer.status().ToString());
  }

  // Waits until nothing has moved for a moment. Returns when that moment began.
  SteadyClock::time_point Await() {
    constexpr int kStill = 5;
    SteadyClock::time_point end = SteadyClock::now();
    for (int still = 0; still < kStill; ++still) {
      if (engine_->Stats().tiers.moving > 0) {
        still = -1;
      } else if (still == 0) {
        end = SteadyClock::now();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return end;
  }

  scheduler::RealClock clock_;
  std::unique_ptr<Engine> engine_;
  uint32_t first_token_ = 1;
  scheduler::TierFigures stats_;      // figures of the file when rows were last released
  SteadyClock::time_point released_;  // the time of that
};

class Memory {
 public:
  explicit Memory(int64_t groups, int64_t group_bytes)
      : bytes_(static_cast<size_t>(groups * group_bytes), std::byte{1}),
        group_(static_cast<size_t>(group_bytes)) {}
  std::span<std::byte> group(int64_t i) {
    return std::span(bytes_).subspan(static_cast<size_t>(i) * group_, group_);
  }

 private:
  std::vector<std::byte> bytes_;
  const size_t group_;
};

// Rates at which one thread copies a group, or at which the device copies it out of its memory and
// back.
struct CopyRates {
  const char* name;
  double out = 0, back = 0;
};

CopyRates DeviceCopyRates(kernels::AttentionBackend& backend) {
  const scheduler::Limits limits = SmallLimits();
  Check(backend.Configure(scheduler::BackendLimitsOf(limits, backend)));
  const int64_t bytes = kGroups * GroupBytes();
  auto memory = backend.AllocateHost(static_cast<size_t>(bytes));
  if (!memory.ok()) Die(memory.status().ToString());
  const kernels::PageTransfer all{0, bytes, (*memory)->bytes().data()};
  const auto run = [&](const kernels::Launch& launch) {
    Check(backend.Submit(0, launch));
    Check(backend.Wait(0).status());
  };
  kernels::Launch read, write;
  read.page_reads = write.page_writes = {&all, 1};
  CopyRates rates{"copies by the device"};
  rates.out = BestRate(bytes, [&] { run(read); });
  rates.back = BestRate(bytes, [&] { run(write); });
  return rates;
}

double MemcpyRate(int64_t group_bytes) {
  Memory from(kGroups, group_bytes), to(kGroups, group_bytes);
  return BestRate(kGroups * group_bytes, [&] {
    for (int64_t i = 0; i < kGroups; ++i) {
      std::memcpy(to.group(i).data(), from.group(i).data(), static_cast<size_t>(group_bytes));
    }
  });
}

double SealRate(int64_t group_bytes) {
  Memory memory(kGroups, group_bytes);
  kvcache::GroupMac mac;
  return BestRate(kGroups * group_bytes,
                  [&] { InThreads(kGroups, [&](int64_t i) { mac.Seal(memory.group(i)); }); });
}

// Rates for groups that are not contiguous, as in host memory, through the queue that the tiers
// use.
void DiskRates(int64_t group_bytes, double* write, double* read) {
  const int64_t room = kvcache::TierRooms::Rounded(group_bytes);
  auto file = kvcache::TierFile::Open(DiskFile("mla-disk"), kGroups * room);
  if (!file.ok()) Die(file.status().ToString());
  std::vector<std::byte> memory(static_cast<size_t>(kGroups * room + kvcache::kTierBlock));
  const std::span<std::byte> blocks = kvcache::FromBlock(memory);
  std::atomic<int64_t> done = 0;
  std::vector<kvcache::DiskMove> moves(static_cast<size_t>(kGroups));
  for (size_t i = 0; i < moves.size(); ++i) {
    const size_t at = i * static_cast<size_t>(room);
    moves[i].bytes = blocks.subspan(at, static_cast<size_t>(room));
    moves[i].at = kvcache::TierFile::kHeaderBytes + static_cast<int64_t>(at);
    moves[i].done = [&done] {
      ++done;
      done.notify_one();
    };
  }
  kvcache::DiskQueue queue(file->get(), Threads());
  const auto all = [&](bool writes) {
    done = 0;
    for (kvcache::DiskMove& move : moves) {
      move.write = writes;
      queue.Start(&move);
    }
    for (int64_t now = done; now < kGroups; now = done) done.wait(now);
    for (const kvcache::DiskMove& move : moves) Check(move.status);
  };
  *write = BestRate(kGroups * room, [&] { all(true); });
  *read = BestRate(kGroups * room, [&] { all(false); });
}

CopyRates MeasureCopies() {
  const auto backend = MakeBackend();
  if (!backend->Info().unified_memory) return DeviceCopyRates(*backend);
  const double rate = MemcpyRate(GroupBytes());
  return {"memcpy by one thread", rate, rate};
}

std::vector<Rate> Measure() {
  Rate out{"host: out of the pool"}, back{"host: back into the pool"};
  Bench(kGroups + 8, 0).Move(&out, &back, false);
  const CopyRates copies = MeasureCopies();
  const double sealed = SealRate(GroupBytes());
  double written = 0, read = 0;
  DiskRates(GroupBytes(), &written, &read);
  Rate stored{"file: out of the pool"}, loaded{"file: back into the pool"};
  Bench(kGroups / 4, kGroups + 8).Move(&stored, &loaded, true);
  out.bound = copies.out;
  back.bound = copies.back;
  stored.bound = std::min(written, sealed);
  loaded.bound = std::min(read, sealed);
  const std::string name = copies.name;
  return {out,
          back,
          stored,
          loaded,
          {name + ", out", copies.out},
          {name + ", back", copies.back},
          {"seals", sealed},
          {"disk writes", written},
          {"disk reads", read}};
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) {
  const auto json = mla::bench::ReadJsonFlag(argc, argv, "tiers_benchmark");
  if (!json) return 2;
  const auto rates = mla::bench::Measure();
  std::printf("%d threads of the tiers\n", mla::bench::Threads());
  bool good = true;
  std::ofstream file;
  if (!json->empty()) file.open(*json);
  const char* separator = "[\n";
  for (const auto& rate : rates) {
    const double part = rate.bound > 0 ? rate.gb_per_s / rate.bound : 0;
    good &= rate.bound == 0 || part >= mla::bench::kLeast;
    std::printf("%-32s %7.2f GB/s", rate.shape.c_str(), rate.gb_per_s);
    if (rate.bound > 0) std::printf("   %.2f of %.2f", part, rate.bound);
    std::printf("\n");
    if (file.is_open()) {
      file << separator << R"(  {"bench": "tiers", "shape": ")" << rate.shape
           << R"(", "gb_per_s": )" << rate.gb_per_s << R"(, "of_bound": )" << part << "}";
      separator = ",\n";
    }
  }
  if (file.is_open()) file << "\n]\n";
  return good ? 0 : 1;
}
