#include "server/pages/checkpoint_file.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace mla::server {
namespace {

constexpr absl::string_view kMagic = "MLACKPT\n";
constexpr uint32_t kVersion = 1;
constexpr size_t kBufferBytes = size_t{1} << 20;

std::string Beginning() {
  const uint32_t version = kVersion;
  return absl::StrCat(kMagic,
                      absl::string_view(reinterpret_cast<const char*>(&version), sizeof(version)));
}

absl::Status SystemError(const std::string& path, const char* what) {
  const int code = errno;
  return MakeError(
      absl::StatusCode::kUnavailable, absl::StrCat(path, ": ", what, ": ", std::strerror(code)),
      {.reason = code == ENOSPC || code == EDQUOT || code == EFBIG ? "disk_full" : "disk_failed"});
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string path, std::string aside, int file,
                                   const CheckpointKey& key)
    : path_(std::move(path)), aside_(std::move(aside)), file_(file), mac_(key, Beginning()) {
  buffer_.reserve(kBufferBytes);
}

absl::Status CheckpointWriter::Failed(const char* what) const { return SystemError(path_, what); }

absl::StatusOr<std::unique_ptr<CheckpointWriter>> CheckpointWriter::Create(
    const std::string& path, const std::string& aside, const CheckpointKey& key) {
  const int file = open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return SystemError(aside, "open");
  std::unique_ptr<CheckpointWriter> writer(new CheckpointWriter(path, aside, file, key));
  MLA_RETURN_IF_ERROR(writer->Write(Beginning()));
  return writer;
}

CheckpointWriter::~CheckpointWriter() {
  if (file_ >= 0) close(file_);
  if (!aside_.empty()) unlink(aside_.c_str());
}

absl::Status CheckpointWriter::Flush() {
  size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t some = write(file_, buffer_.data() + done, buffer_.size() - done);
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) return Failed("write");
    done += static_cast<size_t>(some);
  }
  buffer_.clear();
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Write(absl::string_view bytes) {
  buffer_.append(bytes.data(), bytes.size());
  bytes_ += static_cast<int64_t>(bytes.size());
  return buffer_.size() < kBufferBytes ? absl::OkStatus() : Flush();
}

absl::Status CheckpointWriter::Add(absl::string_view frame) {
  const auto size = static_cast<uint32_t>(frame.size());
  absl::Status status =
      Write(absl::string_view(reinterpret_cast<const char*>(&size), sizeof(size)));
  if (status.ok()) status = Write(frame);
  return status.ok() ? Write(mac_.Next(frame)) : status;
}

absl::Status CheckpointWriter::Sync() {
  MLA_RETURN_IF_ERROR(Flush());
  if (fsync(file_) != 0) return Failed("fsync");
  return close(std::exchange(file_, -1)) == 0 ? absl::OkStatus() : Failed("close");
}

absl::Status CheckpointWriter::Publish() {
  if (std::rename(aside_.c_str(), path_.c_str()) != 0) return Failed("rename");
  aside_.clear();
  const std::string folder = std::filesystem::path(path_).parent_path();
  const int entry = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (entry < 0) return SystemError(folder, "open");
  const bool flushed = fsync(entry) == 0;
  absl::Status status = flushed ? absl::OkStatus() : SystemError(folder, "fsync");
  close(entry);
  return status;
}

CheckpointReader::CheckpointReader(std::string path, int file, const CheckpointKey& key,
                                   const FrameBounds& bounds)
    : path_(std::move(path)), file_(file), bounds_(bounds), mac_(key, Beginning()) {}

CheckpointReader::~CheckpointReader() { close(file_); }

absl::Status CheckpointReader::Torn(const std::string& why) const {
  return MakeError(absl::StatusCode::kDataLoss, absl::StrCat(path_, ": ", why),
                   {.reason = "checkpoint_damaged"});
}

absl::StatusOr<size_t> CheckpointReader::Read(char* buffer, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t some = read(file_, buffer + done, bytes - done);
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) return SystemError(path_, "read");
    if (some == 0) break;
    done += static_cast<size_t>(some);
  }
  remaining_ -= static_cast<int64_t>(done);
  return done;
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(
    const std::string& path, const CheckpointKey& key, const FrameBounds& bounds) {
  // Without O_NONBLOCK, opening a FIFO of that name would wait for a writer.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) {
    if (errno != ENOENT) return SystemError(path, "open");
    return MakeError(absl::StatusCode::kNotFound, "the checkpoint does not exist",
                     {.reason = "checkpoint_not_found"});
  }
  std::unique_ptr<CheckpointReader> reader(new CheckpointReader(path, file, key, bounds));
  struct stat about;
  if (fstat(file, &about) != 0) return SystemError(path, "stat");
  if (!S_ISREG(about.st_mode)) return reader->Torn("it is not a regular file");
  reader->remaining_ = about.st_size;
  const std::string want = Beginning();
  std::string have(want.size(), '\0');
  MLA_ASSIGN_OR_RETURN(const size_t read, reader->Read(have.data(), have.size()));
  if (read < kMagic.size() || absl::string_view(have).substr(0, kMagic.size()) != kMagic) {
    return reader->Torn("it is not a checkpoint");
  }
  if (read < have.size() || have != want) {
    uint32_t version = 0;
    std::memcpy(&version, have.data() + kMagic.size(), sizeof(version));
    return reader->Torn(
        absl::StrCat("it is of version ", version, ", and this server reads ", kVersion));
  }
  return reader;
}

absl::StatusOr<bool> CheckpointReader::Next(std::string* frame) {
  uint32_t size = 0;
  absl::StatusOr<size_t> read = Read(reinterpret_cast<char*>(&size), sizeof(size));
  if (!read.ok()) return read.status();
  if (*read == 0) return false;
  if (*read < sizeof(size) || int64_t{size} + int64_t{FrameMac::kBytes} > remaining_) {
    return Torn("it ends inside a frame");
  }
  // The size is not authenticated yet, so the memory for it must be bounded.
  const int64_t most = std::exchange(first_, false) ? bounds_.first : bounds_.others;
  if (size > most) {
    return Torn(absl::StrCat("a frame has ", size, " bytes, and this server reads ", most,
                             ": it was damaged, or written under larger limits"));
  }
  frame->resize(size);
  std::string mac(FrameMac::kBytes, '\0');
  read = Read(frame->data(), size);
  if (read.ok() && *read == size) read = Read(mac.data(), mac.size());
  if (!read.ok()) return read.status();
  if (*read != mac.size()) return Torn("it ends inside a frame");
  const std::string want = mac_.Next(*frame);
  if (CRYPTO_memcmp(mac.data(), want.data(), mac.size()) != 0) {
    return Torn("it was damaged, or written under another key");
  }
  return true;
}

}  // namespace mla::server
