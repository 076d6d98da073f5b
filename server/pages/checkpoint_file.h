// A checkpoint file (docs/cache/checkpoints.md) consists of frames, each with a keyed MAC over
// itself and everything before it.
//
//   "MLACKPT\n", version (uint32), then for each frame its size (uint32), its bytes, its MAC (16
//   bytes)
//
// Little endian. MACs are made by proto/wire/frame_mac.h; a frame is not read before its MAC is
// verified.
//
// A file is written under another name, flushed to the disk and renamed; then its folder's entry is
// flushed.
//
// Not thread-safe: one object for each file.
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
  // Creates the file. UNAVAILABLE names it and the system's error.
  static absl::StatusOr<std::unique_ptr<CheckpointWriter>> Create(const std::string& path,
                                                                  const std::string& aside,
                                                                  const CheckpointKey& key);
  // Removes the file unless Publish was called.
  ~CheckpointWriter();

  absl::Status Add(absl::string_view frame);
  // Writes all frames to the disk, in the file aside. No more frames may be added.
  absl::Status Sync();
  // Gives the file its name and flushes the folder's entry to the disk. REQUIRES: Sync has
  // succeeded.
  absl::Status Publish();
  int64_t bytes() const { return bytes_; }

 private:
  CheckpointWriter(std::string path, std::string aside, int file, const CheckpointKey& key);
  absl::Status Write(absl::string_view bytes);
  absl::Status Flush();
  absl::Status Failed(const char* what) const;

  const std::string path_;
  std::string aside_;  // temporary name; empty once the file has its own
  int file_;
  FrameMac mac_;
  std::string buffer_;
  int64_t bytes_ = 0;
};

// The bytes of the largest frames that a reader accepts.
struct FrameBounds {
  int64_t first = 0;
  int64_t others = 0;
};

class CheckpointReader final {
 public:
  // Opens a checkpoint. NOT_FOUND; UNAVAILABLE if the system fails; DATA_LOSS, with the reason, if
  // the file is not a checkpoint or has another version.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const std::string& path,
                                                                const CheckpointKey& key,
                                                                const FrameBounds& bounds);
  ~CheckpointReader();

  // Reads the next frame; returns false at the end of the file. DATA_LOSS: the frame is torn or too
  // large, or its MAC does not match.
  absl::StatusOr<bool> Next(std::string* frame);

 private:
  CheckpointReader(std::string path, int file, const CheckpointKey& key, const FrameBounds& bounds);
  // Returns the number of bytes read, which is smaller than wanted only at the end of the file.
  absl::StatusOr<size_t> Read(char* buffer, size_t bytes);
  absl::Status Torn(const std::string& why) const;

  const std::string path_;
  const int file_;
  const FrameBounds bounds_;
  bool first_ = true;  // the next frame is the first
  FrameMac mac_;
  int64_t remaining_ = 0;  // bytes of the file not read yet
};

}  // namespace mla::server

#endif  // MLA_SERVER_PAGES_CHECKPOINT_FILE_H_
