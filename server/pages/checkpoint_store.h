// Keeps checkpoints of sequences in a folder: one file each, named by tenant and sequence. Once
// Save has answered, the checkpoint is on the disk; an unfinished file has no name.
//
//   PATH/key                        32 bytes, made at the first start; only its owner may read it
//   PATH/TENANT/SEQUENCE.ckpt       TENANT: the first 16 bytes of the name's SHA-256; hexadecimal
//
// Threading: any thread. A folder is locked, so that only one server uses it.
#ifndef MLA_SERVER_PAGES_CHECKPOINT_STORE_H_
#define MLA_SERVER_PAGES_CHECKPOINT_STORE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "mla/v1/checkpoint.pb.h"
#include "scheduler/engine.h"
#include "server/logging/log_limiter.h"
#include "server/metrics/stats_table.h"
#include "server/pages/checkpoint_file.h"

namespace mla::server {

struct CheckpointInfo {
  scheduler::SequenceId id = 0;
  uint64_t epoch = 0;
  int64_t rows = 0;
  int64_t bytes = 0;  // of the file
  std::string model_id;
  int64_t saved_unix_ms = 0;
};

struct CheckpointStoreOptions {
  std::string path;
  int64_t bytes = 0;                       // of all files
  int64_t tenant_bytes = 0;                // of one tenant's files
  int32_t tenant_files = 0;                // per tenant
  int64_t chunk_bytes = 0;                 // the most in one part
  int64_t sequence_rows = 0;               // of the longest sequence
  CheckpointCounters* counters = nullptr;  // outlives the store
};

class CheckpointStore final {
 public:
  // Makes the folder and its key if they do not exist, and removes unfinished files.
  // FAILED_PRECONDITION: another server uses the folder, or its key file is not a key or others may
  // read it. UNAVAILABLE: the system fails.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(
      const CheckpointStoreOptions& options);
  ~CheckpointStore();

  // Returns the secret for the engine's prefix keys, which is the same after every start.
  kvcache::PrefixSecret prefix_secret() const;

  // Writes the committed rows of a sequence, and replaces an earlier checkpoint of it. `epoch`: the
  // epoch that the caller knows. FAILED_PRECONDITION without rows, RESOURCE_EXHAUSTED beyond a
  // bound, UNAVAILABLE if the disk is full or fails. The earlier checkpoint stays then. Failures
  // here and in Restore are logged with file names; callers do not see file names.
  absl::StatusOr<CheckpointInfo> Save(scheduler::Engine* engine, const std::string& tenant,
                                      scheduler::SequenceId id, uint64_t epoch);
  // Opens the sequence again, under its id and with another epoch. NOT_FOUND without a checkpoint,
  // DATA_LOSS if it is damaged, ALREADY_EXISTS while the sequence is open; otherwise as for an
  // import.
  absl::StatusOr<scheduler::SequenceInfo> Restore(scheduler::Engine* engine,
                                                  const std::string& tenant,
                                                  scheduler::SequenceId id,
                                                  const std::string& client_id, int64_t lease_ms);
  // Returns the checkpoints of the tenant, by id; damaged ones have 0 rows.
  std::vector<CheckpointInfo> List(const std::string& tenant);
  // Returns false if there was no checkpoint.
  bool Drop(const std::string& tenant, scheduler::SequenceId id);

 private:
  explicit CheckpointStore(const CheckpointStoreOptions& options) : options_(options) {}
  absl::Status Prepare();
  absl::Status ReadKey();
  // Flushes the folder's own entry, which is new if the key is new.
  absl::Status FlushOwnEntry();
  absl::Status Scan();
  absl::StatusOr<CheckpointInfo> SaveFile(scheduler::Engine* engine, const std::string& tenant,
                                          scheduler::SequenceId id, uint64_t epoch);
  absl::StatusOr<scheduler::SequenceInfo> RestoreFile(scheduler::Engine* engine,
                                                      const std::string& tenant,
                                                      scheduler::SequenceId id,
                                                      const std::string& client_id,
                                                      int64_t lease_ms);
  std::string FolderOf(const std::string& tenant) const;
  std::string FileOf(const std::string& tenant, scheduler::SequenceId id) const;
  absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenFile(const std::string& path) const;
  absl::StatusOr<v1::CheckpointHeader> ReadHeader(CheckpointReader* file, const std::string& tenant,
                                                  scheduler::SequenceId id) const;
  void LogFailure(const char* event, const std::string& tenant, scheduler::SequenceId id,
                  const absl::Status& status);
  // Counts a call, logs a failure of the disk or of a file, and returns the status for the caller.
  absl::Status Ended(const char* event, const std::string& tenant, scheduler::SequenceId id,
                     const absl::Status& status, std::atomic<uint64_t>* done,
                     std::atomic<uint64_t>* failed);
  struct Room {
    int64_t bytes = 0;
    int64_t files = 0;
  };
  // Returns room of an existing file; zero if the file does not exist.
  static Room RoomOf(const std::string& path);
  // Takes the additional room of a tenant, or refuses.
  absl::Status TakeRoom(const std::string& folder, const Room& more);
  // Takes the room even if that exceeds the bounds.
  void AddRoom(const std::string& folder, const Room& more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReturnRoom(const std::string& folder, const Room& less);
  // Writes the sequence's state to the file aside; returns the header.
  absl::StatusOr<v1::CheckpointHeader> Write(scheduler::Engine* engine, const std::string& tenant,
                                             const scheduler::MovingPages& pages,
                                             CheckpointWriter* file);

  const CheckpointStoreOptions options_;
  int lock_ = -1;
  CheckpointKey key_ = {};
  Mutex names_;  // held while files get or lose their names, so that room is counted exactly
  Mutex mutex_ ABSL_ACQUIRED_AFTER(names_);
  std::map<std::string, Room> used_ ABSL_GUARDED_BY(mutex_);  // by tenant's folder
  int64_t used_by_all_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> next_aside_ = 1;
  LogLimiter failures_;  // callers can cause failures as often as they like
};

}  // namespace mla::server

#endif  // MLA_SERVER_PAGES_CHECKPOINT_STORE_H_
