#include "server/pages/checkpoint_file.h"

#include <gtest/gtest.h>
#include <openssl/sha.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "server/pages/checkpoint_store.h"

namespace {
std::set<ino_t> flushed;  // files and folders that fsync was called for
}  // namespace

// Takes the place of the C library's function, and notes what was flushed.
extern "C" int fsync(int file) {
  struct stat about;
  if (fstat(file, &about) == 0) flushed.insert(about.st_ino);
  return static_cast<int>(syscall(SYS_fsync, file));
}

namespace mla::server {
namespace {

namespace fs = std::filesystem;

class CheckpointFileTest : public ::testing::Test {
 protected:
  CheckpointFileTest() : folder_(fs::path(testing::TempDir()) / "checkpoint_file_test") {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    key_.fill(7);
  }
  ~CheckpointFileTest() override { fs::remove_all(folder_); }

  std::string File(const std::string& name = "a.ckpt") const { return folder_ / name; }
  void Write(const std::vector<std::string>& frames, const std::string& name = "a.ckpt") {
    auto file = CheckpointWriter::Create(File(name), File(name + ".part"), key_);
    ASSERT_TRUE(file.ok()) << file.status();
    for (const std::string& frame : frames) ASSERT_TRUE((*file)->Add(frame).ok());
    ASSERT_TRUE((*file)->Sync().ok());
    ASSERT_TRUE((*file)->Publish().ok());
    EXPECT_EQ((*file)->bytes(), static_cast<int64_t>(fs::file_size(File(name))));
  }
  // The frames, until one is refused.
  absl::Status Read(std::vector<std::string>* frames, const std::string& name = "a.ckpt") {
    frames->clear();
    MLA_ASSIGN_OR_RETURN(const auto file, CheckpointReader::Open(File(name), key_, {5000, 4000}));
    for (std::string frame;;) {
      MLA_ASSIGN_OR_RETURN(const bool next, file->Next(&frame));
      if (!next) return absl::OkStatus();
      frames->push_back(frame);
    }
  }
  std::string Bytes() const {
    std::ifstream in(File(), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void Put(const std::string& bytes) const {
    std::ofstream(File(), std::ios::binary | std::ios::trunc) << bytes;
  }

  const fs::path folder_;
  CheckpointKey key_;
  const std::vector<std::string> frames_ = {"head", std::string(3000, 'x'), "", "last"};
};

TEST_F(CheckpointFileTest, FramesComeBack) {
  Write(frames_);
  std::vector<std::string> read;
  EXPECT_TRUE(Read(&read).ok());
  EXPECT_EQ(read, frames_);
  EXPECT_FALSE(fs::exists(File() + ".part"));
  EXPECT_EQ(fs::status(File()).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

// The bytes of the format, made by another program.
TEST_F(CheckpointFileTest, TheFormatStays) {
  Write({"one", ""});
  EXPECT_EQ(absl::BytesToHexString(Bytes()),
            "4d4c41434b50540a01000000030000006f6e6552c6ee9f74c283d8bf1806b7f4cc772d00"
            "000000cf3aba1431a03c32fefb9d786edc7ad4");
}

TEST_F(CheckpointFileTest, EveryByteCounts) {
  Write(frames_);
  const std::string whole = Bytes();
  std::vector<std::string> read;
  for (size_t offset = 0; offset < whole.size(); offset += offset < 60 ? 1 : 37) {
    std::string changed = whole;
    changed[offset] ^= 0x20;
    Put(changed);
    const absl::Status status = Read(&read);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << offset << ": " << status;
    EXPECT_EQ(DetailOf(status).reason, "checkpoint_damaged");
    // Frames read before the damage must equal the written ones.
    ASSERT_LE(read.size(), frames_.size());
    for (size_t i = 0; i < read.size(); ++i) EXPECT_EQ(read[i], frames_[i]) << offset;
  }
}

TEST_F(CheckpointFileTest, TornFilesAreRefusedOrShort) {
  Write(frames_);
  const std::string whole = Bytes();
  std::vector<std::string> read;
  for (size_t bytes = 0; bytes < whole.size(); bytes += bytes < 60 ? 1 : 41) {
    Put(whole.substr(0, bytes));
    // If the file ends between two frames, only the reader of the rows misses the rest.
    if (Read(&read).ok()) {
      EXPECT_LT(read.size(), frames_.size()) << bytes;
    }
  }
}

TEST_F(CheckpointFileTest, FramesOfOtherPlacesAndFilesAreRefused) {
  Write({"one", "two", "two"});
  const std::string whole = Bytes();
  constexpr size_t kHead = 12, kFrame = 4 + 3 + FrameMac::kBytes;
  std::vector<std::string> read;
  const std::string first = whole.substr(kHead, kFrame),
                    second = whole.substr(kHead + kFrame, kFrame);
  Put(whole.substr(0, kHead) + second);
  EXPECT_FALSE(Read(&read).ok());
  Put(whole.substr(0, kHead) + first + second + second);  // equal frames have MACs of their own
  EXPECT_FALSE(Read(&read).ok());
  Put(whole);
  key_[31] ^= 1;
  EXPECT_EQ(Read(&read).code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(read.empty());
}

TEST_F(CheckpointFileTest, ForeignAndOlderFilesAreRefusedWithTheReason) {
  Write(frames_);
  std::string older = Bytes();
  older[8] = 0;
  Put(older);
  std::vector<std::string> read;
  EXPECT_NE(Read(&read).message().find("version 0"), std::string::npos);
  Put("MLAPAGES and so on");
  EXPECT_NE(Read(&read).message().find("not a checkpoint"), std::string::npos);
  EXPECT_EQ(Read(&read, "absent").code(), absl::StatusCode::kNotFound);
}

// Bytes of the peak of this process's memory.
size_t PeakBytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("VmPeak:", 0) == 0) return std::stoull(line.substr(7)) * 1024;
  }
  return 0;
}

TEST_F(CheckpointFileTest, NoMemoryIsTakenForALengthThatNothingVouchesFor) {
  constexpr uint32_t kLength = (1u << 30) - 1;
  Write({});
  std::string bytes = Bytes();
  bytes.append(reinterpret_cast<const char*>(&kLength), sizeof(kLength));
  Put(bytes);
  fs::resize_file(File(), uintmax_t{1} << 31);  // which takes no room on the disk
  const size_t before = PeakBytes();
  std::vector<std::string> read;
  const absl::Status refused = Read(&read);
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
  EXPECT_NE(refused.message().find("1073741823 bytes"), std::string::npos) << refused;
  EXPECT_LT(PeakBytes() - before, size_t{64} << 20);
}

TEST_F(CheckpointFileTest, FramesAreBounded) {
  std::vector<std::string> read;
  Write({std::string(5000, 'h'), std::string(4000, 'x')});
  EXPECT_TRUE(Read(&read).ok());
  Write({std::string(5001, 'h')});
  EXPECT_EQ(Read(&read).code(), absl::StatusCode::kDataLoss);
  Write({"head", std::string(4001, 'x')});
  EXPECT_EQ(Read(&read).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(read, std::vector<std::string>{"head"});
}

// An ordinary open would wait for a writer.
TEST_F(CheckpointFileTest, AFifoIsNoCheckpointAndNoKey) {
  ASSERT_EQ(mkfifo(File().c_str(), 0600), 0);
  std::vector<std::string> read;
  EXPECT_EQ(Read(&read).code(), absl::StatusCode::kDataLoss);
  CheckpointCounters counters;
  CheckpointStoreOptions options;
  options.counters = &counters;
  options.path = File("store");
  {
    const auto store = CheckpointStore::Open(options);
    ASSERT_TRUE(store.ok()) << store.status();
    unsigned char hash[SHA256_DIGEST_LENGTH];
    SHA256(reinterpret_cast<const unsigned char*>("t"), 1, hash);
    const std::string tenant = absl::BytesToHexString({reinterpret_cast<const char*>(hash), 16});
    fs::create_directories(File("store") + "/" + tenant);
    ASSERT_EQ(mkfifo((File("store") + "/" + tenant + "/000000000000000a.ckpt").c_str(), 0600), 0);
    const std::vector<CheckpointInfo> list = (*store)->List("t");
    ASSERT_EQ(list.size(), 1u);
    EXPECT_EQ(list[0].id, 10u);
    EXPECT_EQ(list[0].rows, 0);
  }
  EXPECT_TRUE(CheckpointStore::Open(options).ok());
  EXPECT_EQ(counters.files, 0);
  fs::remove(File("store") + "/key");
  ASSERT_EQ(mkfifo((File("store") + "/key").c_str(), 0600), 0);
  EXPECT_EQ(CheckpointStore::Open(options).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(CheckpointFileTest, AnUnfinishedOrFailedFileLeavesTheOneBefore) {
  Write({"before"});
  {
    auto file = CheckpointWriter::Create(File(), File("x.part"), key_);
    ASSERT_TRUE((*file)->Add("after").ok());
    ASSERT_TRUE((*file)->Sync().ok());
  }
  EXPECT_FALSE(fs::exists(File("x.part")));
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 1000;
  setrlimit(RLIMIT_FSIZE, &small);
  {
    auto file = CheckpointWriter::Create(File(), File("x.part"), key_);
    absl::Status status = (*file)->Add(std::string(5000, 'y'));
    if (status.ok()) status = (*file)->Sync();
    EXPECT_EQ(DetailOf(status).reason, "disk_full") << status;
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_FALSE(fs::exists(File("x.part")));
  std::vector<std::string> read;
  EXPECT_TRUE(Read(&read).ok());
  EXPECT_EQ(read, std::vector<std::string>{"before"});
}

// A machine that loses power finds the folder and the key again.
TEST_F(CheckpointFileTest, ANewStoreIsFlushedWithTheEntryOfItsFolder) {
  CheckpointCounters counters;
  CheckpointStoreOptions options;
  options.counters = &counters;
  options.path = File("new");
  flushed.clear();
  ASSERT_TRUE(CheckpointStore::Open(options).ok());
  for (const std::string& path : {folder_.string(), File("new"), File("new") + "/key"}) {
    struct stat about;
    ASSERT_EQ(stat(path.c_str(), &about), 0) << path;
    EXPECT_EQ(flushed.count(about.st_ino), 1u) << path;
  }
}

TEST_F(CheckpointFileTest, AStoreKeepsItsKeyAndItsFolder) {
  CheckpointCounters counters;
  CheckpointStoreOptions options;
  options.counters = &counters;
  options.path = File("store");
  options.bytes = options.tenant_bytes = 1 << 20;
  kvcache::PrefixSecret secret;
  const mode_t before = umask(0117);  // as a service may have it
  {
    const auto store = CheckpointStore::Open(options);
    ASSERT_TRUE(store.ok()) << store.status();
    secret = (*store)->prefix_secret();
    EXPECT_FALSE(CheckpointStore::Open(options).ok());  // one server a folder
    EXPECT_TRUE((*store)->List("t").empty());
    EXPECT_FALSE((*store)->Drop("t", 1));
  }
  umask(before);
  EXPECT_EQ(fs::status(File("store")).permissions(), fs::perms::owner_all);
  fs::create_directories(File("store") + "/tenant");
  std::ofstream(File("store") + "/tenant/1.ckpt.3.part") << "unfinished";
  std::ofstream(File("store") + "/tenant/2.ckpt") << "whole";
  EXPECT_EQ((*CheckpointStore::Open(options))->prefix_secret(), secret);
  EXPECT_EQ(counters.files, 1);
  EXPECT_EQ(counters.bytes, 5);
  EXPECT_GT(counters.last_unix_ms, 0);
  EXPECT_FALSE(fs::exists(File("store") + "/tenant/1.ckpt.3.part"));
  const std::string key = File("store") + "/key";
  chmod(key.c_str(), 0640);
  EXPECT_FALSE(CheckpointStore::Open(options).ok());
  chmod(key.c_str(), 0600);
  fs::resize_file(key, 31);
  EXPECT_FALSE(CheckpointStore::Open(options).ok());
}

}  // namespace
}  // namespace mla::server
