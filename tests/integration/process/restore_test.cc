// Checkpoints across restarts of a server process that is killed at any time. Every acknowledged
// checkpoint is there after the restart, with its contents.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/streams/errors.h"
#include "mla/v1/cache.grpc.pb.h"
#include "tests/integration/processes.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class RestoreTest : public ::testing::Test {
 protected:
  RestoreTest() { Start(); }

  void Start() {
    server_ = std::make_unique<ServerProcess>(
        std::vector<std::string>{absl::StrCat("--checkpoint-path=", folder_.File("saved"))});
    client_ = Connect();
    worker_ = std::make_unique<Worker>(client_.get(), Dims(), "m", 1);
  }
  void Kill() {
    worker_.reset();
    server_->Signal(SIGKILL);
    server_->Wait();
    client_.reset();
  }
  std::unique_ptr<client::Client> Connect() {
    auto client = client::Client::Connect(server_->target(), {});
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  Track MakeTrack(uint32_t rows) {
    Track track = *worker_->Open();
    const absl::Status status = worker_->Step({&track}, {rows}, v1::PROFILE_ABSORBED);
    EXPECT_TRUE(status.ok()) << status;
    return track;
  }
  // Returns the restored sequence as a track that can continue.
  absl::StatusOr<Track> Restore(uint64_t id, const DenseCache& cache) {
    auto sequences = client_->Restore({id});
    if (!sequences.ok()) return sequences.status();
    EXPECT_EQ(sequences->size(), 1u);
    return Track{std::move(sequences->front()), cache};
  }
  std::vector<fs::path> Files() {
    std::vector<fs::path> files;
    for (const auto& at : fs::recursive_directory_iterator(folder_.File("saved"))) {
      if (at.path().extension() == ".ckpt") files.push_back(at.path());
    }
    return files;
  }

  const TempFolder folder_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<Worker> worker_;
};

TEST_F(RestoreTest, RowsOutliveTheServer) {
  Track track = MakeTrack(11);
  const uint64_t id = track.sequence.id();
  const uint64_t epoch = track.sequence.epoch();
  ASSERT_TRUE(client_->Checkpoint({id}).ok());
  const DenseCache saved = track.cache;
  ASSERT_TRUE(worker_->Step({&track}, {3}, v1::PROFILE_ABSORBED).ok());  // not saved
  EXPECT_EQ(client_->Restore({id}).status().code(), absl::StatusCode::kAlreadyExists);
  track.sequence.Detach();
  Kill();
  Start();
  auto restored = Restore(id, saved);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->sequence.id(), id);
  EXPECT_NE(restored->sequence.epoch(), epoch);  // calls of the time before are refused
  EXPECT_EQ(restored->sequence.length(), 11u);
  const auto stats = client_->GetStats();
  EXPECT_EQ(stats->checkpoints(), 1u);
  EXPECT_EQ(stats->checkpoint_bytes(), fs::file_size(Files().at(0)));
  EXPECT_GT(stats->checkpoint_last_unix_ms(), 0u);  // by an earlier server
  EXPECT_EQ(stats->checkpoint_restores(), 1u);
  EXPECT_EQ(stats->checkpoint_saves(), 0u);
  for (const uint32_t rows : {1, 5}) {
    const absl::Status status = worker_->Step({&*restored}, {rows}, v1::PROFILE_ABSORBED);
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_F(RestoreTest, PrefixesAreFoundAgain) {
  v1::Prefix prefix;
  for (uint32_t token = 1; token <= 11; ++token) prefix.add_token_ids(token);
  prefix.set_salt("s");
  Track track = MakeTrack(11);
  ASSERT_TRUE(track.sequence.Match(prefix).ok());
  const uint64_t id = track.sequence.id();
  ASSERT_TRUE(client_->Checkpoint({id}).ok());
  track.sequence.Detach();
  Kill();
  Start();
  EXPECT_EQ(client_->OpenSequence("m", "", prefix)->length(), 0u);  // no sequence is restored yet
  auto restored = Restore(id, track.cache);
  ASSERT_TRUE(restored.ok()) << restored.status();
  auto shared = client_->OpenSequence("m", "", prefix);
  EXPECT_EQ(shared->length(), 8u);  // whole pages, while the sequence is open
  prefix.set_salt("another");
  EXPECT_EQ(client_->OpenSequence("m", "", prefix)->length(), 0u);
  Track other{*std::move(shared), track.cache};
  other.cache.Truncate(worker_->dims(), 8);
  EXPECT_TRUE(worker_->Step({&other}, {2}, v1::PROFILE_ABSORBED).ok());
}

TEST_F(RestoreTest, NothingThatWasAnsweredIsMissingAfterAKillUnderLoad) {
  for (int round = 0; round < 3; ++round) {
    Track track = MakeTrack(5);
    const uint64_t id = track.sequence.id();
    std::vector<DenseCache> history;  // caches at each checkpoint, by its number
    std::atomic<size_t> answered{0};
    history.reserve(1000);
    // Another client keeps the server busy.
    std::atomic<bool> stop{false};
    std::thread load([&] {
      const auto client = Connect();
      Worker worker(client.get(), Dims(), "m", 9);
      while (!stop) {
        auto other = worker.Open();
        if (!other.ok() || !worker.Step({&*other}, {7}, v1::PROFILE_ABSORBED).ok()) break;
      }
    });
    std::thread killer([&] {
      while (answered < 3 + static_cast<size_t>(round) * 2) std::this_thread::yield();
      server_->Signal(SIGKILL);
    });
    while (true) {
      history.push_back(track.cache);
      if (!client_->Checkpoint({id}).ok()) break;
      ++answered;
      if (!worker_->Step({&track}, {2}, v1::PROFILE_ABSORBED).ok()) break;
    }
    killer.join();
    stop = true;
    load.join();
    track.sequence.Detach();
    worker_.reset();
    server_->Wait();
    client_.reset();
    Start();
    auto listed = client_->ListCheckpoints();
    ASSERT_TRUE(listed.ok()) << listed.status();
    auto restored = Restore(id, DenseCache(Dims().layers));
    ASSERT_TRUE(restored.ok()) << restored.status();
    // The last acknowledged checkpoint, or one whose acknowledgement the kill prevented.
    const size_t least = history[answered - 1].layer[0].size();
    const size_t rows = restored->sequence.length() * static_cast<size_t>(Dims().row());
    ASSERT_GE(rows, least);
    for (const DenseCache& one : history) {
      if (one.layer[0].size() == rows) restored->cache = one;
    }
    ASSERT_EQ(restored->cache.layer[0].size(), rows);
    const absl::Status status = worker_->Step({&*restored}, {1}, v1::PROFILE_ABSORBED);
    EXPECT_TRUE(status.ok()) << status;
    ASSERT_TRUE(client_->DropCheckpoints({id}).ok());
  }
}

TEST_F(RestoreTest, DamagedFilesAreRefusedAndLeaveNothing) {
  Track track = MakeTrack(11);
  const uint64_t id = track.sequence.id();
  ASSERT_TRUE(client_->Checkpoint({id}).ok());
  track.sequence.Detach();
  Kill();
  const fs::path file = Files().at(0);
  std::ifstream in(file, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  Start();
  const auto refused = [&](const std::string& bytes) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
    const absl::Status status = client_->Restore({id}).status();
    // The log tells operators where the file is; tenants are not told.
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(folder_.path())));
    return status;
  };
  std::string changed = whole;
  changed[whole.size() - 200] ^= 1;
  EXPECT_EQ(refused(changed).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(refused(whole.substr(0, whole.size() / 2)).code(), absl::StatusCode::kDataLoss);
  // Torn at a border of frames: rows are missing.
  const absl::Status torn = refused(whole.substr(0, whole.size() - 4 - 38 - 16));
  EXPECT_EQ(torn.code(), absl::StatusCode::kDataLoss) << torn;
  EXPECT_THAT(std::string(torn.message()), HasSubstr("without a trailer"));
  changed = whole;
  changed[8] = 9;
  EXPECT_THAT(std::string(refused(changed).message()), HasSubstr("version 9"));
  EXPECT_EQ(client_->ListCheckpoints()->checkpoints(0).length(), 0u);
  const std::string log = server_->Log();
  EXPECT_THAT(log, HasSubstr("error checkpoint_restore_failed tenant=default"));
  EXPECT_THAT(log, HasSubstr(folder_.path()));
  EXPECT_EQ(client_->GetStats()->sequences(), 0u);
  EXPECT_EQ(client_->GetStats()->page_groups_used(), 0u);
  EXPECT_EQ(client_->GetStats()->checkpoint_restore_failures(), 4u);
  std::ofstream(file, std::ios::binary | std::ios::trunc) << whole;
  EXPECT_TRUE(Restore(id, track.cache).ok());
}

TEST_F(RestoreTest, CallsThatTheDiskFailsAreCounted) {
  Track track = MakeTrack(11);
  const uint64_t id = track.sequence.id();
  ASSERT_TRUE(client_->Checkpoint({id}).ok());
  const auto before = client_->GetStats();
  EXPECT_EQ(before->checkpoint_saves(), 1u);
  fs::remove_all(folder_.File("saved"));
  const absl::Status failed = client_->Checkpoint({id}).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(failed.message()), Not(HasSubstr(folder_.path())));
  EXPECT_THAT(server_->Log(), HasSubstr("error checkpoint_save_failed tenant=default"));
  EXPECT_EQ(client_->Checkpoint({id + 1}).status().code(), absl::StatusCode::kNotFound);
  const auto after = client_->GetStats();
  EXPECT_EQ(after->checkpoint_saves(), 1u);
  EXPECT_EQ(after->checkpoint_save_failures(), 1u);
  EXPECT_EQ(after->checkpoint_last_unix_ms(), before->checkpoint_last_unix_ms());
}

TEST_F(RestoreTest, AFullDiskIsSaidToTheCallerAndInTheLog) {
  Track track = MakeTrack(300);
  ASSERT_TRUE(server_->LimitFiles(8192));  // the log takes less than this, and the checkpoint more
  const absl::Status full = client_->Checkpoint({track.sequence.id()}).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kUnavailable) << full;
  EXPECT_EQ(client::DetailOf(full)->reason(), "disk_full");
  EXPECT_THAT(std::string(full.message()), Not(HasSubstr(folder_.path())));
  const std::string log = server_->Log();
  EXPECT_THAT(log, HasSubstr("error checkpoint_save_failed tenant=default"));
  EXPECT_THAT(log, HasSubstr(folder_.path()));
}

TEST_F(RestoreTest, CheckpointsAreTheTenantsOwnAndNeedTheirModel) {
  Track track = MakeTrack(6);
  const uint64_t id = track.sequence.id();
  ASSERT_TRUE(client_->Checkpoint({id}).ok());
  client::ClientOptions other;
  other.tenant = "other";
  const auto stranger = *client::Client::Connect(server_->target(), other);
  EXPECT_EQ(stranger->ListCheckpoints()->checkpoints_size(), 0);
  EXPECT_EQ(stranger->Restore({id}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(stranger->DropCheckpoints({id})->not_found_size(), 1);
  EXPECT_EQ(stranger->Checkpoint({id}).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(track.sequence.Release().ok());
  ASSERT_TRUE(client_->UnregisterModel("m").ok());
  EXPECT_EQ(client_->Restore({id}).status().code(), absl::StatusCode::kNotFound);
  Dims dims;
  dims.layers = 3;
  ASSERT_TRUE(client_->RegisterModel(SpecOf(dims, "m")).ok());
  EXPECT_EQ(client_->Restore({id}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(client_->DropCheckpoints({id})->dropped(), 1u);
  EXPECT_EQ(client_->ListCheckpoints()->checkpoints_size(), 0);
}

TEST_F(RestoreTest, CheckpointsOfATenantAreBounded) {
  const ServerProcess small(
      {absl::StrCat("--checkpoint-path=", folder_.File("small")), "--checkpoint-tenant-files=2"});
  const auto client = *client::Client::Connect(small.target(), {});
  Worker worker(client.get(), Dims(), "m", 1);
  std::vector<Track> tracks;
  for (int i = 0; i < 3; ++i) {
    tracks.push_back(*worker.Open());
    ASSERT_TRUE(worker.Step({&tracks.back()}, {3}, v1::PROFILE_ABSORBED).ok());
  }
  const auto save = [&](size_t i) {
    return client->Checkpoint({tracks[i].sequence.id()}).status();
  };
  EXPECT_TRUE(save(0).ok());
  EXPECT_TRUE(save(1).ok());
  const absl::Status refused = save(2);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(client::DetailOf(refused)->reason(), "checkpoints_exhausted");
  EXPECT_EQ(client::DetailOf(refused)->limit(), "2 checkpoints, 2 in use");
  EXPECT_TRUE(save(0).ok());  // replaces the previous one
  EXPECT_EQ(client->ListCheckpoints()->checkpoints_size(), 2);
  EXPECT_EQ(client->GetStats()->checkpoints(), 2u);
  EXPECT_EQ(client->DropCheckpoints({tracks[1].sequence.id()})->dropped(), 1u);
  EXPECT_TRUE(save(2).ok());
  EXPECT_EQ(client->GetStats()->checkpoints(), 2u);
  EXPECT_FALSE(save(1).ok());
}

TEST_F(RestoreTest, BytesOfCheckpointsAreBounded) {
  const ServerProcess small({absl::StrCat("--checkpoint-path=", folder_.File("small")),
                             "--checkpoint-tenant-bytes=256KiB"});
  const auto client = *client::Client::Connect(small.target(), {});
  Worker worker(client.get(), Dims(), "m", 1);
  std::vector<Track> tracks;
  absl::Status saved;
  while (saved.ok() && tracks.size() < 100) {
    tracks.push_back(*worker.Open());
    ASSERT_TRUE(worker.Step({&tracks.back()}, {64}, v1::PROFILE_ABSORBED).ok());
    saved = client->Checkpoint({tracks.back().sequence.id()}).status();
  }
  EXPECT_EQ(client::DetailOf(saved)->reason(), "checkpoints_exhausted") << saved;
  EXPECT_EQ(client::DetailOf(saved)->bound(), 256u << 10);
  const auto stats = client->GetStats();
  EXPECT_EQ(stats->checkpoints(), tracks.size() - 1);
  EXPECT_GT(stats->checkpoints(), 1u);
  EXPECT_LE(stats->checkpoint_bytes(), 256u << 10);
  // Replacing a checkpoint needs room for both; on failure the previous one stays.
  EXPECT_FALSE(client->Checkpoint({tracks[0].sequence.id()}).ok());
  EXPECT_EQ(client->GetStats()->checkpoints(), tracks.size() - 1);
}

TEST_F(RestoreTest, AListCountsAsAnUpload) {
  const ServerProcess small(
      {absl::StrCat("--checkpoint-path=", folder_.File("other")), "--wire-max-uploads=1"});
  const auto client = *client::Client::Connect(small.target(), {});
  const auto stub =
      v1::Cache::NewStub(grpc::CreateChannel(small.target(), grpc::InsecureChannelCredentials()));
  const auto list_becomes = [&](absl::StatusCode code) {
    for (int i = 0; i < 100; ++i) {
      if (client->ListCheckpoints().status().code() == code) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  };
  // The server refuses an import that arrives while a list has the only place, so a refused import
  // is sent again.
  bool exhausted = false;
  for (int attempt = 0; attempt < 10 && !exhausted; ++attempt) {
    grpc::ClientContext context;
    v1::ImportReply reply;
    const auto import = stub->Import(&context, &reply);  // it waits for its first message
    exhausted = list_becomes(absl::StatusCode::kResourceExhausted);
    context.TryCancel();
    EXPECT_FALSE(import->Finish().ok());
  }
  EXPECT_TRUE(exhausted);
  EXPECT_TRUE(list_becomes(absl::StatusCode::kOk));
}

TEST_F(RestoreTest, AServerWithoutAFolderSaysSo) {
  const ServerProcess plain({});
  const auto client = *client::Client::Connect(plain.target(), {});
  EXPECT_EQ(client->Checkpoint({1}).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(Shell(plain.Mlactl("checkpoints")).code, 3);
  const Result listed = Shell(server_->Mlactl("checkpoints"));
  EXPECT_EQ(listed.code, 0) << listed.output;
}

}  // namespace
}  // namespace mla::integration
