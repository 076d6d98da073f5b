// A checkpoint file (docs/cache/checkpoints.md): frames, each with a keyed MAC over it and all
// before.
//
//   "MLACKPT\n", version (uint32), then for each frame its bytes (uint32), itself, its MAC (16
//   bytes)
//
// Little endian. MACs are made by proto/wire/frame_mac.h; a frame is not read before its MAC is
// verified.
//
// A file is written aside, flushed to the disk and renamed, and so is its folder's entry.
//
// Not thread-safe: one object a file.
#ifndef MLA_SERVER_PAGES_CHECKPOINT_FILE_H_
#define MLA_SERVER_PAGES_CHECKPOINT_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/wire/frame_mac.h"

namespace mla::server {

using CheckpointKey = wire::MacKey;
using wire::DeriveKey;
using wire::FrameMac;

class CheckpointWriter final {
 public:
  // UNAVAILABLE names the file and the system's error.
  static absl::StatusOr<std::unique_ptr<CheckpointWriter>> Create(const std::string& path,
                                                                  const std::string& aside,
                                                                  const CheckpointKey& key);
  // Without Publish the file is removed.
  ~CheckpointWriter();

  absl::Status Add(absl::string_view frame);
  // All frames are on the disk, in the file aside. No more frames may be added.
  absl::Status Sync();
  // Gives the file its name, and its folder's entry is on the disk. REQUIRES: Sync succeeded.
  absl::Status Publish();
  int64_t bytes() const { return bytes_; }

 private:
  CheckpointWriter(std::string path, std::string aside, int file, const CheckpointKey& key);
  absl::Status Write(absl::string_view bytes);
  absl::Status Flush();
  absl::Status Failed(const char* what) const;

  const std::string path_;
  std::string aside_;  // empty once it has its name
  int file_;
  FrameMac mac_;
  std::string buffer_;
  int64_t bytes_ = 0;
};

// Bytes of the largest frames that a reader takes.
struct FrameBounds {
  int64_t first = 0;
  int64_t others = 0;
};

class CheckpointReader final {
 public:
  // NOT_FOUND; UNAVAILABLE if the system fails; DATA_LOSS, with the reason, if the file is not a
  // checkpoint or has another version.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const std::string& path,
                                                                const CheckpointKey& key,
                                                                const FrameBounds& bounds);
  ~CheckpointReader();

  // The next frame; false at the end of the file. DATA_LOSS: it is torn or too large, or its MAC is
  // not right.
  absl::StatusOr<bool> Next(std::string* frame);

 private:
  CheckpointReader(std::string path, int file, const CheckpointKey& key, const FrameBounds& bounds);
  // Bytes that were read; fewer than wanted at the end.
  absl::StatusOr<size_t> Read(char* to, size_t bytes);
  absl::Status Torn(const std::string& why) const;

  const std::string path_;
  const int file_;
  const FrameBounds bounds_;
  bool first_ = true;  // the next frame is the first
  FrameMac mac_;
  int64_t left_ = 0;  // bytes of the file that are not read
};

}  // namespace mla::server

#endif  // MLA_SERVER_PAGES_CHECKPOINT_FILE_H_
