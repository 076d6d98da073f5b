// A recovered sequence has the rows of its checkpoint, or rows that are fetched from a peer.
#include <dlfcn.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_join.h"
#include "tests/integration/cluster/fleet_worker.h"
#include "tests/integration/test_server.h"

namespace {

// False: this thread gets no threads of the C++ library, as in a process that is at its bound.
thread_local bool standard_threads = true;

bool IsStandard(void* (*start)(void*)) {
  Dl_info info{};
  return dladdr(reinterpret_cast<void*>(start), &info) != 0 &&
         strstr(info.dli_fname, "libstdc++") != nullptr;
}

}  // namespace

// Replaces the C library's function.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (!standard_threads && IsStandard(start)) return EAGAIN;
  return real(thread, attributes, start, argument);
}

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

// A server that is gone had a sequence. Of two others, one has the rows and no room, the other
// room.
class PeerTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kRows = 64;

  PeerTest() {
    FleetWorker other(holder_.unix_target(), {}, Home(holder_), 9);
    FleetTrack track = other.Open(prefix_);
    EXPECT_EQ(other.Step({&track}, {kRows}), absl::OkStatus());
    cached_ = track.cache;
    client::ClusterOptions options = Home(*lost_);
    // A row is dear, and a pool with rows in it is dearer.
    options.costs.prefill_row_s = 1;
    options.costs.full_s = 1e9;
    worker_ = std::make_unique<FleetWorker>(
        absl::StrJoin({lost_->unix_target(), holder_.unix_target(), empty_.unix_target()}, ","),
        client::ClientOptions(), options);
    track_ = std::make_unique<FleetTrack>(worker_->Open());
    EXPECT_EQ(track_->sequence.address(), lost_->unix_target());
    EXPECT_EQ(worker_->Step({track_.get()}, {5}), absl::OkStatus());
  }

  std::unique_ptr<TestServer> lost_ = std::make_unique<TestServer>();
  const TestServer holder_, empty_;
  const v1::Prefix prefix_ = PrefixOf(1, kRows);
  DenseCache cached_{0};
  std::unique_ptr<FleetWorker> worker_;
  std::unique_ptr<FleetTrack> track_;
};

TEST_F(PeerTest, RowsOfAPeerWithoutRoomAreFetched) {
  lost_.reset();
  const auto found = worker_->client().Recover(&track_->sequence, prefix_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "peer");
  EXPECT_EQ(found->address, empty_.unix_target());
  EXPECT_EQ(found->rows, kRows);
  track_->cache = cached_;
  EXPECT_EQ(worker_->Step({track_.get()}, {3}), absl::OkStatus());
  // The sequence that was opened at the holder to be read is gone, and what was fetched is shared.
  EXPECT_EQ(holder_.Connect()->GetStats()->sequences(), 0u);
  const auto probe = track_->sequence.server()->Probe(kModel, prefix_);
  ASSERT_TRUE(probe.ok()) << probe.status();
  EXPECT_EQ(probe->rows_in_pool(), kRows);
}

TEST_F(PeerTest, WithoutAThreadToFetchRowsTheyAreSentAgain) {
  // Connected now, because that takes threads, too.
  for (const TestServer* const server : {&holder_, &empty_}) {
    ASSERT_TRUE(worker_->client().ServerAt(server->unix_target()).ok());
  }
  lost_.reset();
  standard_threads = false;
  const auto found = worker_->client().Recover(&track_->sequence, prefix_);
  standard_threads = true;
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->how, "none");
  EXPECT_EQ(found->address, empty_.unix_target());
  EXPECT_EQ(found->lost, 5u);
  worker_->Settle({track_.get()});
  EXPECT_EQ(worker_->Step({track_.get()}, {3}), absl::OkStatus());
}

}  // namespace
}  // namespace mla::integration
