// A recovered sequence has the rows of its checkpoint, or rows that are fetched from a peer.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_join.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

namespace fs = std::filesystem;

// A folder of checkpoints with a given key, as operators make it for servers that may restore each
// other's checkpoints.
class CheckpointFolder final {
 public:
  CheckpointFolder() {
    std::ofstream(folder_.File("key"), std::ios::binary) << std::string(32, 'k');
    fs::permissions(folder_.File("key"), fs::perms::owner_read | fs::perms::owner_write);
  }
  const std::string& path() const { return folder_.path(); }
  // Copies the checkpoints of another folder, as replicated storage does.
  void CopyFrom(const CheckpointFolder& other) const {
    for (const auto& entry : fs::directory_iterator(other.path())) {
      if (!entry.is_directory()) continue;
      fs::copy(entry.path(), fs::path(path()) / entry.path().filename(),
               fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    }
  }

 private:
  const TempFolder folder_;
};

std::unique_ptr<TestServer> Serve(const std::string& checkpoints) {
  return std::make_unique<TestServer>(
      [&](server::Config& config) { config.checkpoint.path = checkpoints; });
}

client::ClusterOptions Home(const TestServer& server) {
  client::ClusterOptions options;
  options.home = server.unix_target();
  return options;
}

TEST(RecoveryTest, ARestartedServerRestoresTheCheckpoint) {
  const CheckpointFolder folder;
  const auto a = Serve(folder.path());
  const TestServer b;
  FleetWorker worker(absl::StrCat(b.unix_target(), ",", a->unix_target()), {}, Home(*a));
  FleetTrack track = worker.Open();
  ASSERT_EQ(worker.Step({&track}, {11}), absl::OkStatus());
  const uint64_t id = track.sequence.id();
  const auto saved = track.sequence.server()->Checkpoint({id});
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_EQ(worker.Step({&track}, {3}), absl::OkStatus());
  a->Restart();
  EXPECT_FALSE(worker.Step({&track}, {1}).ok());
  const auto found = worker.client().Recover(&track.sequence);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "checkpoint");
  EXPECT_EQ(found->address, a->unix_target());
  EXPECT_EQ(found->rows, 11u);
  EXPECT_EQ(found->lost, 3u);
  EXPECT_EQ(track.sequence.id(), id);
  worker.Settle({&track});
  EXPECT_EQ(worker.Step({&track}, {4}), absl::OkStatus());
}

TEST(RecoveryTest, APeerRestoresACopyOfTheCheckpoint) {
  const CheckpointFolder of_a, of_b;
  auto a = Serve(of_a.path());
  const auto b = Serve(of_b.path());
  FleetWorker worker(absl::StrCat(a->unix_target(), ",", b->unix_target()), {}, Home(*a));
  FleetTrack track = worker.Open(), unsaved = worker.Open();
  ASSERT_EQ(worker.Step({&track, &unsaved}, {9, 5}), absl::OkStatus());
  ASSERT_TRUE(track.sequence.server()->Checkpoint({track.sequence.id()}).ok());
  of_b.CopyFrom(of_a);
  a.reset();
  const auto found = worker.client().Recover(&track.sequence);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "checkpoint");
  EXPECT_EQ(found->address, b->unix_target());
  EXPECT_EQ(found->rows, 9u);
  EXPECT_EQ(found->lost, 0u);
  const auto other = worker.client().Recover(&unsaved.sequence);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->how, "none");
  EXPECT_EQ(other->lost, 5u);
  worker.Settle({&track, &unsaved});
  EXPECT_EQ(worker.Step({&track, &unsaved}, {2, 3}), absl::OkStatus());
}

TEST(RecoveryTest, RowsOfAPeerWithoutRoomAreFetched) {
  auto lost = std::make_unique<TestServer>();
  const TestServer holder, empty;
  constexpr uint32_t kRows = 64;
  const v1::Prefix prefix = PrefixOf(1, kRows);
  DenseCache cached(0);
  {
    FleetWorker other(holder.unix_target(), {}, Home(holder), 9);
    FleetTrack track = other.Open(prefix);
    ASSERT_EQ(other.Step({&track}, {kRows}), absl::OkStatus());
    cached = track.cache;
  }
  client::ClusterOptions options = Home(*lost);
  // A row is dear, and a pool with rows in it is dearer.
  options.costs.prefill_row_s = 1;
  options.costs.full_s = 1e9;
  FleetWorker worker(
      absl::StrJoin({lost->unix_target(), holder.unix_target(), empty.unix_target()}, ","), {},
      options);
  FleetTrack track = worker.Open();
  ASSERT_EQ(track.sequence.address(), lost->unix_target());
  ASSERT_EQ(worker.Step({&track}, {5}), absl::OkStatus());
  lost.reset();
  const auto found = worker.client().Recover(&track.sequence, prefix);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "peer");
  EXPECT_EQ(found->address, empty.unix_target());
  EXPECT_EQ(found->rows, kRows);
  track.cache = cached;
  EXPECT_EQ(worker.Step({&track}, {3}), absl::OkStatus());
  // The sequence that was opened at the holder to be read is gone, and what was fetched is shared.
  EXPECT_EQ(holder.Connect()->GetStats()->sequences(), 0u);
  const auto probe = track.sequence.server()->Probe(kModel, prefix);
  ASSERT_TRUE(probe.ok()) << probe.status();
  EXPECT_EQ(probe->rows_in_pool(), kRows);
}

}  // namespace
}  // namespace mla::integration
