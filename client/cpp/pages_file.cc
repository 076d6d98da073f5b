#include "client/cpp/pages_file.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace mla::client {
namespace {

constexpr size_t kMagicBytes = sizeof(kPagesFileMagic) - 1;
constexpr char kPurpose[] = "mla page files";

std::string Beginning(bool keyed) {
  const uint32_t version = keyed ? kKeyedPagesFileVersion : kPagesFileVersion;
  return absl::StrCat(kPagesFileMagic,
                      absl::string_view(reinterpret_cast<const char*>(&version), sizeof(version)));
}

std::optional<wire::FrameMac> MacOf(const std::optional<wire::MacKey>& key) {
  if (!key) return std::nullopt;
  return wire::FrameMac(wire::DeriveKey(*key, kPurpose), Beginning(true));
}

}  // namespace

absl::StatusOr<wire::MacKey> ReadPagesKey(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  const absl::Cleanup closes = [file] { close(file); };
  struct stat about;
  if (fstat(file, &about) != 0 || (about.st_mode & 077) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": others than its owner may read the key"));
  }
  wire::MacKey key;
  if (about.st_size != static_cast<off_t>(key.size()) ||
      read(file, key.data(), key.size()) != static_cast<ssize_t>(key.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a key has ", key.size(), " bytes, this file ", about.st_size));
  }
  return key;
}

PagesFileWriter::PagesFileWriter(std::string path, std::FILE* file,
                                 std::optional<wire::FrameMac> mac)
    : path_(std::move(path)),
      aside_(absl::StrCat(path_, ".part")),
      file_(file),
      mac_(std::move(mac)) {}

absl::Status PagesFileWriter::Failed(const char* what) const {
  return absl::UnavailableError(absl::StrCat(path_, ": ", what, ": ", std::strerror(errno)));
}

absl::StatusOr<std::unique_ptr<PagesFileWriter>> PagesFileWriter::Create(
    const std::string& path, const std::optional<wire::MacKey>& key) {
  std::FILE* const file = std::fopen(absl::StrCat(path, ".part").c_str(), "wb");
  if (file == nullptr) {
    return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  std::unique_ptr<PagesFileWriter> writer(new PagesFileWriter(path, file, MacOf(key)));
  const std::string beginning = Beginning(key.has_value());
  MLA_RETURN_IF_ERROR(writer->Write(beginning.data(), beginning.size()));
  return writer;
}

PagesFileWriter::~PagesFileWriter() {
  if (finished_) return;
  if (file_ != nullptr) std::fclose(file_);
  std::error_code ignored;
  std::filesystem::remove(aside_, ignored);
}

absl::Status PagesFileWriter::Write(const void* bytes, size_t size) {
  return std::fwrite(bytes, 1, size, file_) == size ? absl::OkStatus() : Failed("write");
}

absl::Status PagesFileWriter::Add(const v1::PagesPart& part) {
  const std::string bytes = part.SerializeAsString();
  const auto size = static_cast<uint32_t>(bytes.size());
  absl::Status status = Write(&size, sizeof(size));
  if (status.ok()) status = Write(bytes.data(), bytes.size());
  if (!status.ok() || !mac_) return status;
  const std::string mac = mac_->Next(bytes);
  return Write(mac.data(), mac.size());
}

absl::Status PagesFileWriter::Finish() {
  if (std::fflush(file_) != 0 || fsync(fileno(file_)) != 0) return Failed("write");
  if (std::fclose(std::exchange(file_, nullptr)) != 0) return Failed("close");
  if (std::rename(aside_.c_str(), path_.c_str()) != 0) return Failed("rename");
  finished_ = true;
  return absl::OkStatus();
}

PagesFileReader::~PagesFileReader() { std::fclose(file_); }

absl::Status PagesFileReader::Torn(const std::string& why) const {
  return absl::DataLossError(absl::StrCat(path_, ": ", why));
}

absl::StatusOr<std::unique_ptr<PagesFileReader>> PagesFileReader::Open(
    const std::string& path, const std::optional<wire::MacKey>& key) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::unique_ptr<PagesFileReader> reader(new PagesFileReader(path, file, MacOf(key)));
  char magic[kMagicBytes];
  uint32_t version = 0;
  if (std::fread(magic, 1, sizeof(magic), file) != sizeof(magic) ||
      std::memcmp(magic, kPagesFileMagic, kMagicBytes) != 0) {
    return reader->Torn("it is not a file of rows: it does not begin with MLAPAGES");
  }
  if (std::fread(&version, sizeof(version), 1, file) != 1 ||
      (version != kPagesFileVersion && version != kKeyedPagesFileVersion)) {
    return reader->Torn(absl::StrCat("version ", version, ", and this reads versions ",
                                     kPagesFileVersion, " and ", kKeyedPagesFileVersion));
  }
  if (key.has_value() != (version == kKeyedPagesFileVersion)) {
    return reader->Torn(key.has_value() ? "it was written without a key"
                                        : "it was written with a key, which reading it needs");
  }
  return reader;
}

absl::StatusOr<std::optional<v1::PagesPart>> PagesFileReader::Next() {
  if (ended_) return std::nullopt;
  uint32_t size = 0;
  const size_t read = std::fread(&size, 1, sizeof(size), file_);
  if (read != sizeof(size)) return Torn("it ends before its trailer");
  if (size > kMostPagesPartBytes) return Torn(absl::StrCat("a part of ", size, " bytes"));
  std::error_code failed;
  const auto whole = static_cast<int64_t>(std::filesystem::file_size(path_, failed));
  if (!failed && size > whole - std::ftell(file_)) return Torn("it ends inside a part");
  std::string bytes(size, '\0');
  if (std::fread(bytes.data(), 1, size, file_) != size) return Torn("it ends inside a part");
  if (mac_) {
    std::string mac(wire::FrameMac::kBytes, '\0');
    if (std::fread(mac.data(), 1, mac.size(), file_) != mac.size()) {
      return Torn("it ends inside a part");
    }
    const std::string want = mac_->Next(bytes);
    if (CRYPTO_memcmp(mac.data(), want.data(), mac.size()) != 0) {
      return Torn("it was changed, or written under another key");
    }
  }
  v1::PagesPart part;
  if (!part.ParseFromString(bytes)) return Torn("a part is not a message");
  ended_ = part.has_trailer();
  if (ended_ && std::fgetc(file_) != EOF) return Torn("it continues after the trailer");
  return part;
}

}  // namespace mla::client
