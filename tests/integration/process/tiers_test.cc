// Slower tiers of a server process: rows leave the pool at once, and a worker that opens a sequence
// with them computes on the restored rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/integration/processes.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

namespace fs = std::filesystem;

constexpr uint32_t kRows = 11;

class TiersTest : public ::testing::TestWithParam<bool> {
 protected:
  TiersTest() {
    std::vector<std::string> flags = {"--tiers-host-bytes=4MiB", "--tiers-low-percent=100",
                                      "--tiers-high-percent=100", "--tiers-wait-ms=20000"};
    if (GetParam()) {
      flags.push_back(absl::StrCat("--tiers-file-path=", file()));
      flags.push_back("--tiers-file-bytes=4MiB");
      flags.push_back("--tiers-file-hits=0");
    }
    server_ = std::make_unique<ServerProcess>(flags);
    client_ = *client::Client::Connect(server_->target(), {});
    worker_ = std::make_unique<Worker>(client_.get(), Dims(), "m", 1);
    for (uint32_t token = 1; token <= kRows; ++token) prefix_.add_token_ids(token);
  }

  std::string file() const { return folder_.File("tier"); }
  v1::CacheTier tier() const { return GetParam() ? v1::CACHE_TIER_FILE : v1::CACHE_TIER_HOST; }
  // Computes rows, leaves them in the cache and returns them.
  DenseCache Leave() {
    Track track = *worker_->Open();
    EXPECT_TRUE(track.sequence.Match(prefix_).ok());
    EXPECT_TRUE(worker_->Step({&track}, {kRows}, v1::PROFILE_ABSORBED).ok());
    DenseCache cache = track.cache;
    EXPECT_TRUE(client_->ReleaseSequences({track.sequence.id()}).ok());
    track.sequence.Detach();
    return cache;
  }
  int Count(v1::CacheEventKind kind, v1::CacheTier at) {
    int count = 0;
    const absl::Status status =
        client_->WatchEvents(uint64_t{0}, [&](const v1::WatchEventsReply& reply) {
          for (const v1::CacheEvent& event : reply.events()) {
            count += event.kind() == kind && event.tier() == at;
          }
          return false;
        });
    EXPECT_TRUE(status.ok()) << status;
    return count;
  }
  void AwaitDemotions(int count) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (Count(v1::CACHE_EVENT_KIND_DEMOTED, v1::CACHE_TIER_POOL) < count) {
      ASSERT_LT(absl::Now(), end);
      absl::SleepFor(absl::Milliseconds(5));
    }
  }

  // Waits until the last of `groups` groups is in the file; the earlier ones are written before it.
  void AwaitFile(int groups) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    std::string group(64, '\0');
    while (group == std::string(64, '\0')) {
      ASSERT_LT(absl::Now(), end);
      absl::SleepFor(absl::Milliseconds(50));
      std::ifstream(file(), std::ios::binary).seekg(4096 * groups).read(group.data(), 64);
    }
    absl::SleepFor(absl::Milliseconds(50));
  }

  const TempFolder folder_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<Worker> worker_;
  v1::Prefix prefix_;
};

// Only the file tier.
class FileTierTest : public TiersTest {};

TEST_P(TiersTest, OpenWaitsForRowsAndComputesOnThem) {
  DenseCache cache = Leave();
  AwaitDemotions(3);
  auto sequence = client_->OpenSequence("m", "", prefix_);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ASSERT_EQ(sequence->length(), kRows);
  Track track{*std::move(sequence), cache};
  const absl::Status status = worker_->Step({&track}, {2}, v1::PROFILE_ABSORBED);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_GE(Count(v1::CACHE_EVENT_KIND_RESTORED, v1::CACHE_TIER_HOST) +
                Count(v1::CACHE_EVENT_KIND_RESTORED, v1::CACHE_TIER_FILE),
            3);
  EXPECT_EQ(fs::exists(file()), GetParam());
}

TEST_P(FileTierTest, AFileThatWasChangedBehindTheServersBackIsNotUsed) {
  Leave();
  AwaitDemotions(3);
  AwaitFile(3);
  std::fstream file_now(file(), std::ios::in | std::ios::out | std::ios::binary);
  const auto size = static_cast<int64_t>(fs::file_size(file()));
  for (int64_t at = 4096 + 7; at < size; at += 4096) file_now.seekp(at).put('!');
  file_now.close();
  const auto sequence = client_->OpenSequence("m", "", prefix_);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_EQ(sequence->length(), 0u);
  EXPECT_EQ(Count(v1::CACHE_EVENT_KIND_DAMAGED, v1::CACHE_TIER_FILE), 3);
}

TEST_P(FileTierTest, AFileThatWasCutIsNotUsed) {
  Leave();
  AwaitDemotions(3);
  AwaitFile(3);
  fs::resize_file(file(), 4096);
  const auto sequence = client_->OpenSequence("m", "", prefix_);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_EQ(sequence->length(), 0u);
  EXPECT_EQ(Count(v1::CACHE_EVENT_KIND_DAMAGED, v1::CACHE_TIER_FILE), 3);
}

TEST_P(FileTierTest, ADiskThatTakesNoMoreLosesCopiesAndNothingElse) {
  ASSERT_TRUE(server_->LimitFiles(4096 + 4096));  // the first group
  const DenseCache cache = Leave();
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (Count(v1::CACHE_EVENT_KIND_EVICTED, v1::CACHE_TIER_HOST) < 2) {
    ASSERT_LT(absl::Now(), end);
    absl::SleepFor(absl::Milliseconds(5));
  }
  auto sequence = client_->OpenSequence("m", "", prefix_);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_LT(sequence->length(), kRows);
  Track again = *worker_->Open();
  EXPECT_TRUE(worker_->Step({&again}, {kRows}, v1::PROFILE_ABSORBED).ok());
}

INSTANTIATE_TEST_SUITE_P(File, FileTierTest, ::testing::Values(true));
INSTANTIATE_TEST_SUITE_P(Kinds, TiersTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "File" : "Host"; });

}  // namespace
}  // namespace mla::integration
