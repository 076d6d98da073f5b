#include "scheduler/kvcache/tiers/tier_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

constexpr absl::string_view kMagic = "MLATIER\n";
constexpr uint32_t kVersion = 1;
// Bytes of each write when a file's room is taken by writing zeros.
constexpr int64_t kZeroBytes = int64_t{1} << 20;

// A block of memory with the size and alignment that direct reads and writes need.
class Block {
 public:
  Block() : data_(static_cast<std::byte*>(std::aligned_alloc(kTierBlock, kTierBlock))) {
    Require(data_ != nullptr, "no memory for a block");
    std::memset(data_, 0, kTierBlock);
  }
  ~Block() { std::free(data_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::span<std::byte> bytes() { return {data_, static_cast<size_t>(kTierBlock)}; }

 private:
  std::byte* const data_;
};

}  // namespace

absl::Status TierFile::Failed(const char* what, int code) const {
  const bool full = code == ENOSPC || code == EDQUOT || code == EFBIG;
  return MakeError(absl::StatusCode::kUnavailable,
                   absl::StrCat("tiers.file_path: ", path_, ": ", what, ": ", std::strerror(code)),
                   {.reason = full ? "disk_full" : "disk_failed"});
}

absl::StatusOr<std::unique_ptr<TierFile>> TierFile::Open(const std::string& path, int64_t bytes) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
  int file = open(path.c_str(), kFlags | O_DIRECT, 0600);
  const bool direct = file >= 0;
  if (file < 0 && errno == EINVAL) file = open(path.c_str(), kFlags, 0600);
  const int code = errno;
  std::unique_ptr<TierFile> opened(new TierFile(path, file, direct));
  if (file < 0) return opened->Failed("open", code);
  MLA_RETURN_IF_ERROR(opened->Prepare(bytes));
  return opened;
}

absl::Status TierFile::Prepare(int64_t bytes) {
  const auto unfit = [this](const char* why) {
    return absl::FailedPreconditionError(absl::StrCat("tiers.file_path: ", path_, ": ", why));
  };
  struct stat about;
  if (fstat(file_, &about) != 0) return Failed("stat", errno);
  if (!S_ISREG(about.st_mode)) return unfit("it is not a regular file");
  // Otherwise other users could read the server's data, or make it overwrite their files.
  if (about.st_uid != geteuid()) return unfit("it belongs to another user");
  if (about.st_nlink != 1) return unfit("it has other names, too");
  if (flock(file_, LOCK_EX | LOCK_NB) != 0) return unfit("another server uses it");
  Block block;
  if (about.st_size > 0) {
    const absl::Status read = Read(0, block.bytes());
    if (!read.ok() || std::memcmp(block.bytes().data(), kMagic.data(), kMagic.size()) != 0) {
      return unfit("it holds something else");
    }
  }
  if (fchmod(file_, S_IRUSR | S_IWUSR) != 0) return Failed("chmod", errno);
  ours_ = true;
  if (ftruncate(file_, 0) != 0) return Failed("truncate", errno);
  MLA_RETURN_IF_ERROR(Allocate(kHeaderBytes + bytes));
  std::memset(block.bytes().data(), 0, block.bytes().size());
  std::memcpy(block.bytes().data(), kMagic.data(), kMagic.size());
  std::memcpy(block.bytes().data() + kMagic.size(), &kVersion, sizeof(kVersion));
  return Write(0, block.bytes());
}

absl::Status TierFile::Allocate(int64_t bytes) {
  int code = 0;
  do {
    code = fallocate(file_, 0, 0, bytes) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code == 0) return absl::OkStatus();
  if (code != EOPNOTSUPP && code != ENOSYS) return Failed("allocate", code);
  // The file system does not support fallocate (ext3, FAT, many in user space). posix_fallocate
  // would then write single bytes, which O_DIRECT refuses, so zeros are written here.
  std::vector<std::byte> memory(static_cast<size_t>(kZeroBytes + kTierBlock));
  const std::span<std::byte> zeros = FromBlock(memory);
  for (int64_t done = 0; done < bytes;) {
    const int64_t some = std::min(bytes - done, kZeroBytes);
    MLA_RETURN_IF_ERROR(Write(done, zeros.first(static_cast<size_t>(some))));
    done += some;
  }
  return absl::OkStatus();
}

TierFile::~TierFile() {
  if (ours_) unlink(path_.c_str());
  if (file_ >= 0) close(file_);
}

absl::Status TierFile::Write(int64_t offset, std::span<const std::byte> from) {
  for (size_t done = 0; done < from.size();) {
    const ssize_t some =
        pwrite(file_, from.data() + done, from.size() - done, offset + static_cast<off_t>(done));
    if (some < 0 && errno == EINTR) continue;
    if (some <= 0) return Failed("write", some < 0 ? errno : ENOSPC);
    done += static_cast<size_t>(some);
  }
  return absl::OkStatus();
}

absl::Status TierFile::Read(int64_t offset, std::span<std::byte> buffer) {
  for (size_t done = 0; done < buffer.size();) {
    const ssize_t some =
        pread(file_, buffer.data() + done, buffer.size() - done, offset + static_cast<off_t>(done));
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) return Failed("read", errno);
    if (some == 0) {
      return MakeError(absl::StatusCode::kDataLoss,
                       absl::StrCat("tiers.file_path: ", path_, ": it ends at ",
                                    offset + static_cast<int64_t>(done), ", inside a page group"),
                       {.reason = "disk_failed"});
    }
    done += static_cast<size_t>(some);
  }
  return absl::OkStatus();
}

absl::Status TierFile::SelfTest() {
  Block wrote, read;
  for (size_t i = 0; i < wrote.bytes().size(); ++i) {
    wrote.bytes()[i] = static_cast<std::byte>(i * 31 + 7);
  }
  absl::Status status = Write(kHeaderBytes, wrote.bytes());
  if (status.ok() && fdatasync(file_) != 0) status = Failed("fdatasync", errno);
  if (status.ok()) status = Read(kHeaderBytes, read.bytes());
  if (!status.ok()) return status;
  if (std::memcmp(wrote.bytes().data(), read.bytes().data(), read.bytes().size()) == 0) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kDataLoss,
                   absl::StrCat("tiers.file_path: ", path_, ": it gives back other bytes"),
                   {.reason = "disk_failed"});
}

}  // namespace mla::kvcache
