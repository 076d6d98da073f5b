// A tier's file changes without the server's knowledge. Page groups must come back unchanged or be
// refused, and a foreign file must be left alone.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "scheduler/kvcache/tiers/tier_store.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

using kvcache::TierJob;

constexpr int64_t kGroup = 300;
constexpr size_t kGroups = 3;
constexpr int64_t kFileBytes = kGroups * kvcache::kTierBlock;

std::string Path(const char* name) {
  const char* const base = getenv("TEST_TMPDIR");
  return absl::StrCat(base == nullptr ? "/tmp" : base, "/", name, ".", getpid());
}

// A store with groups in its file.
class Tier {
 public:
  Tier() : memory_((2 * kGroups + 1) * kvcache::kTierBlock), path_(Path("tier_fuzz")) {
    unlink(path_.c_str());
    kvcache::TierStoreOptions options;
    options.memory = memory_;
    options.host_bytes = 2 * kFileBytes;
    options.file_path = path_;
    options.file_bytes = kFileBytes;
    auto opened = kvcache::TierStore::Open(options);
    Require(opened.ok() ? "" : std::string(opened.status().message()));
    store_ = *std::move(opened);
    file_ = open(path_.c_str(), O_RDWR | O_CLOEXEC);
    for (size_t i = 0; i < kGroups; ++i) {
      TierJob& job = jobs_[i];
      job.host = store_->host_bytes(store_->host().Take(kGroup), kGroup);
      job.bytes = kGroup;
      std::memset(job.host.data(), static_cast<int>(i + 1), job.host.size());
      job.at = store_->file_offset(store_->file()->Take(kGroup));
      job.digest = kvcache::DigestOf(job.host.first(job.bytes));
      back_[i] = job;
      back_[i].host = store_->host_bytes(store_->host().Take(kGroup), kGroup);
    }
  }
  ~Tier() { close(file_); }

  // Every three bytes of the input change one byte of the file. The rest of the input, if any,
  // gives the file's new end.
  std::string Try(const std::string& input) {
    for (size_t i = 0; i < kGroups; ++i) {
      Require(Run(&jobs_[i], TierJob::Kind::kWrite));
      back_[i].seal = jobs_[i].seal;
    }
    const int64_t size = kvcache::TierFile::kHeaderBytes + kFileBytes;
    for (size_t i = 0; i + 3 <= input.size(); i += 3) {
      const int64_t at =
          (static_cast<uint8_t>(input[i]) * 256 + static_cast<uint8_t>(input[i + 1])) % size;
      Require(pwrite(file_, &input[i + 2], 1, at) == 1 ? "" : "pwrite");
    }
    const bool cut = input.size() % 3 != 0;
    if (cut) Require(ftruncate(file_, static_cast<uint8_t>(input.back()) * 64) == 0 ? "" : "cut");
    for (size_t i = 0; i < kGroups; ++i) {
      std::array<std::byte, kGroup> now = {};
      const bool there = pread(file_, now.data(), now.size(), jobs_[i].at) == kGroup;
      const bool same = there && std::equal(now.begin(), now.end(), jobs_[i].host.begin());
      const std::string refused = Run(&back_[i], TierJob::Kind::kRead);
      if (refused.empty() && !same) return "a changed group was given out";
      if (!refused.empty() && same && !cut) return "a group that nothing changed was refused";
    }
    return "";
  }

 private:
  std::string Run(TierJob* job, TierJob::Kind kind) {
    job->kind = kind;
    store_->Start(job);
    if (store_->Collect() != std::vector{job}) return "a job was lost";
    if (job->status.ok()) return "";
    return job->status.message().empty() ? "a refusal without words"
                                         : std::string(job->status.message());
  }

  std::vector<std::byte> memory_;
  const std::string path_;
  std::unique_ptr<kvcache::TierStore> store_;
  int file_ = -1;
  std::array<TierJob, kGroups> jobs_, back_;
};

// Opens a store over an existing file that has the input as its contents.
std::string TakeOver(const std::string& input) {
  const std::string path = Path("tier_fuzz_other");
  std::ofstream(path, std::ios::binary | std::ios::trunc) << input;
  auto opened = kvcache::TierFile::Open(path, kvcache::kTierBlock);
  const bool accepted = opened.ok();
  if (accepted) opened->reset();
  struct stat about;
  const bool exists = stat(path.c_str(), &about) == 0;
  unlink(path.c_str());
  if (accepted && exists) return "an own file was not removed";
  if (accepted && !input.empty() && !absl::StartsWith(input, "MLATIER\n")) {
    return "a file of another kind was accepted";
  }
  if (!accepted && (!exists || about.st_size != static_cast<off_t>(input.size()))) {
    return "a file that was refused was changed";
  }
  return "";
}

Tier& TheTier() {
  static Tier tier;
  return tier;
}

}  // namespace

FuzzTarget TargetUnderTest() {
  FuzzTarget target;
  target.executions = 1000;
  Require(TheTier().Try(""));
  // Changes one byte of the first group.
  Require(TheTier().Try(std::string("\x10\x05!", 3)));
  target.seeds = {std::string("\x10\x05!\x20\x01?", 6), std::string("\x10\x05!\x40", 4),
                  "MLATIER\n" + std::string(5000, '\0')};
  target.input_bytes_max = 8192;
  return target;
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  mla::fuzz::Require(mla::fuzz::TheTier().Try(input));
  mla::fuzz::Require(mla::fuzz::TakeOver(input));
  return 0;
}
