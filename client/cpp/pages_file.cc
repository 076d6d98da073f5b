#include "client/cpp/pages_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::client {
namespace {

constexpr size_t kMagicBytes = sizeof(kPagesFileMagic) - 1;

}  // namespace

PagesFileWriter::PagesFileWriter(std::string path, std::FILE* file)
    : path_(std::move(path)), aside_(absl::StrCat(path_, ".part")), file_(file) {}

absl::Status PagesFileWriter::Failed(const char* what) const {
  return absl::UnavailableError(absl::StrCat(path_, ": ", what, ": ", std::strerror(errno)));
}

absl::StatusOr<std::unique_ptr<PagesFileWriter>> PagesFileWriter::Create(const std::string& path) {
  std::FILE* const file = std::fopen(absl::StrCat(path, ".part").c_str(), "wb");
  if (file == nullptr) {
    return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  std::unique_ptr<PagesFileWriter> writer(new PagesFileWriter(path, file));
  absl::Status status = writer->Write(kPagesFileMagic, kMagicBytes);
  const uint32_t version = kPagesFileVersion;
  if (status.ok()) status = writer->Write(&version, sizeof(version));
  if (!status.ok()) return status;
  return writer;
}

PagesFileWriter::~PagesFileWriter() {
  if (file_ == nullptr) return;
  std::fclose(file_);
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
  return status.ok() ? Write(bytes.data(), bytes.size()) : status;
}

absl::Status PagesFileWriter::Finish() {
  if (std::fflush(file_) != 0 || fsync(fileno(file_)) != 0) return Failed("write");
  if (std::fclose(std::exchange(file_, nullptr)) != 0) return Failed("close");
  if (std::rename(aside_.c_str(), path_.c_str()) != 0) return Failed("rename");
  return absl::OkStatus();
}

PagesFileReader::~PagesFileReader() { std::fclose(file_); }

absl::Status PagesFileReader::Torn(const std::string& why) const {
  return absl::DataLossError(absl::StrCat(path_, ": ", why));
}

absl::StatusOr<std::unique_ptr<PagesFileReader>> PagesFileReader::Open(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::unique_ptr<PagesFileReader> reader(new PagesFileReader(path, file));
  char magic[kMagicBytes];
  uint32_t version = 0;
  if (std::fread(magic, 1, sizeof(magic), file) != sizeof(magic) ||
      std::memcmp(magic, kPagesFileMagic, kMagicBytes) != 0) {
    return reader->Torn("it is no file of rows: it does not begin with MLAPAGES");
  }
  if (std::fread(&version, sizeof(version), 1, file) != 1 || version != kPagesFileVersion) {
    return reader->Torn(
        absl::StrCat("version ", version, ", and this reads version ", kPagesFileVersion));
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
  v1::PagesPart part;
  if (!part.ParseFromString(bytes)) return Torn("a part is no message");
  ended_ = part.has_trailer();
  if (ended_ && std::fgetc(file_) != EOF) return Torn("it goes on behind the trailer");
  return part;
}

}  // namespace mla::client
