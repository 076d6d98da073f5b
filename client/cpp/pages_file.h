// Writes and reads a file with the rows of a sequence: the parts of an export as they came
// (docs/cache/page_groups.md).
//
//   "MLAPAGES", version (uint32), then for each part its bytes (uint32), itself, serialized, and
//   in files with a key (version 2) its MAC (16 bytes, proto/wire/frame_mac.h); little endian
//
// Only holders of the key can have written a file with a key; no part of it is read before its MAC
// is verified.
//
// Threading: one thread.
#ifndef MLA_CLIENT_CPP_PAGES_FILE_H_
#define MLA_CLIENT_CPP_PAGES_FILE_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mla/v1/cache.pb.h"
#include "proto/wire/frame_mac.h"

namespace mla::client {

inline constexpr char kPagesFileMagic[] = "MLAPAGES";
inline constexpr uint32_t kPagesFileVersion = 1;
inline constexpr uint32_t kKeyedPagesFileVersion = 2;
// Size limit of one part; servers do not take larger parts.
inline constexpr uint32_t kMostPagesPartBytes = 1u << 30;

// Writes a file under another name, and renames it when everything is on the disk. Reads a key from
// a file of 32 bytes. INVALID_ARGUMENT if it has another size or if others than its owner may read
// it; NOT_FOUND if it does not exist.
absl::StatusOr<wire::MacKey> ReadPagesKey(const std::string& path);

class PagesFileWriter final {
 public:
  static absl::StatusOr<std::unique_ptr<PagesFileWriter>> Create(
      const std::string& path, const std::optional<wire::MacKey>& key = std::nullopt);
  // Removes what was written unless Finish has succeeded.
  ~PagesFileWriter();

  // UNAVAILABLE if the disk is full or fails.
  absl::Status Add(const v1::PagesPart& part);
  absl::Status Finish();

 private:
  PagesFileWriter(std::string path, std::FILE* file, std::optional<wire::FrameMac> mac);
  absl::Status Write(const void* bytes, size_t size);
  absl::Status Failed(const char* what) const;

  const std::string path_, aside_;
  std::FILE* file_;
  bool finished_ = false;
  std::optional<wire::FrameMac> mac_;
};

class PagesFileReader final {
 public:
  // NOT_FOUND, or DATA_LOSS with the reason why it is not such a file: also if a file with a key is
  // read without one, or the other way round.
  static absl::StatusOr<std::unique_ptr<PagesFileReader>> Open(
      const std::string& path, const std::optional<wire::MacKey>& key = std::nullopt);
  ~PagesFileReader();

  // Returns the next part, or nullopt after the trailer. DATA_LOSS if the file ends before the
  // trailer, or continues after it.
  absl::StatusOr<std::optional<v1::PagesPart>> Next();

 private:
  PagesFileReader(std::string path, std::FILE* file, std::optional<wire::FrameMac> mac)
      : path_(std::move(path)), file_(file), mac_(std::move(mac)) {}
  absl::Status Torn(const std::string& why) const;

  const std::string path_;
  std::FILE* const file_;
  std::optional<wire::FrameMac> mac_;
  bool ended_ = false;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_PAGES_FILE_H_
