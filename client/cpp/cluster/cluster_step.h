// Steps over sequences of one server or of several.
//
// A step of one server is that server's own Step. A step of k servers is k sub-steps, which begin
// and end at the same time and know nothing of each other: sequences are independent, so there is
// nothing to agree on. If an owner fails, its rows fail and no others.
//
// Tensors are as session.h says, for all rows of the step. Rows of one owner that lie together are
// sent from where they are, and outputs are written in place; others are copied. So sequences of
// one server should stand next to each other in a step. Memory of a session (Allocate) is its
// home's: other servers get what lies there by message. Tensors in memory of a GPU belong to one
// server.
//
// Ownership and threading: as session.h says. A ClusterSession must outlive its steps.
#ifndef MLA_CLIENT_CPP_CLUSTER_CLUSTER_STEP_H_
#define MLA_CLIENT_CPP_CLUSTER_CLUSTER_STEP_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/cluster/cluster_client.h"
#include "client/cpp/cluster/owners.h"
#include "client/cpp/session.h"

namespace mla::client {

class ClusterStep;

struct ClusterRows {
  ClusterSequence* sequence = nullptr;
  uint32_t rows = 0;  // rows that the step adds to it
};

// An owner of some of a step's sequences that has failed, with the reason.
struct FailedOwner {
  std::string address;
  absl::Status status;
  std::vector<size_t> sequences;  // their places in the step
};

struct ClusterBeginOptions {
  BeginOptions step;
  // With several owners: calls do not fail if some owners fail and others do not.
  // ClusterStep::failed says whose rows are NaN and stay uncommitted. Without it such calls are
  // ABORTED with the reason "owners_failed".
  bool partial = false;
  // Set by Begin, also if it fails: the owners that have failed.
  std::vector<FailedOwner>* failed = nullptr;
};

// An Attend that is under way. Call Wait at most once. The destructor waits too, because the
// tensors are in use until then.
class PendingClusterAttend final {
 public:
  PendingClusterAttend(PendingClusterAttend&&) noexcept;
  PendingClusterAttend& operator=(PendingClusterAttend&&) noexcept;
  ~PendingClusterAttend();
  // With several owners the times are of the slowest message, and `messages` are all of them.
  absl::StatusOr<AttendTimes> Wait();
  // These are the calls of PendingAttend, for all owners.
  bool Ready();

 private:
  friend class ClusterStep;
  struct Whole;
  PendingClusterAttend();
  absl::StatusOr<AttendTimes> WaitWhole();

  ClusterStep* step_ = nullptr;
  std::optional<PendingAttend> one_;  // of a step with one owner
  std::unique_ptr<Whole> whole_;
};

class ClusterStep final {
 public:
  ~ClusterStep();
  uint64_t id() const { return parts_[0].step_id; }
  uint32_t total_rows() const { return total_rows_; }
  uint32_t joined() const { return joined_; }
  size_t owners() const { return parts_.size(); }
  // Returns the owners that have failed. Empty for a step with one owner, whose errors are its
  // calls' own.
  std::vector<FailedOwner> failed() const;

  // Returns the number of entries that rows [begin, end) of the step complete at a layer; for
  // models with a window.
  uint64_t EntriesOf(uint32_t layer, uint64_t begin, uint64_t end) const;
  PendingClusterAttend AttendAsync(const AttendCall& call);
  absl::StatusOr<AttendTimes> Attend(const AttendCall& call) { return AttendAsync(call).Wait(); }
  // Commits all rows. Updates the lengths of the sequences and returns them; with `partial`, those
  // of a failed owner's sequences are as before the step.
  absl::StatusOr<std::vector<uint64_t>> End(std::span<const SequenceTail> tails = {});
  // Ends the step, with the first committed_rows[i] rows of each sequence.
  absl::StatusOr<std::vector<uint64_t>> End(const std::vector<uint32_t>& committed_rows,
                                            std::span<const SequenceTail> tails = {});
  absl::Status Abort();

 private:
  friend class ClusterSession;
  friend class PendingClusterAttend;

  // The part of the step that one owner computes.
  struct Part {
    std::shared_ptr<Connection> connection;
    std::shared_ptr<OwnerSession> session;
    std::vector<size_t> places;  // of its sequences in the whole step
    std::vector<uint32_t> rows;  // of the whole step, ascending
    std::vector<StepRows> sequences;
    std::vector<float> rotations;  // of its rows, if it is not the only owner
    uint64_t step_id = 0;
    std::unique_ptr<Step> step;  // null once it has failed or ended
    absl::Status error;
  };

  ClusterStep() = default;
  absl::StatusOr<std::vector<uint64_t>> EndWith(const std::vector<uint32_t>* committed_rows,
                                                std::span<const SequenceTail> tails);
  absl::StatusOr<std::vector<uint64_t>> EndPart(Part* part,
                                                const std::vector<uint32_t>* committed_rows,
                                                std::span<const SequenceTail> tails);
  absl::Status CheckCall(const AttendCall& call) const;
  void Send(const AttendCall& call, size_t part, PendingClusterAttend::Whole* whole);
  // Marks the part as failed: its rows no longer count.
  void Fail(Part* part, const absl::Status& status);
  // Returns OK, or ABORTED about failures that the caller was not told of.
  absl::Status Told();
  absl::Status FailedStatus() const;
  std::vector<std::vector<uint64_t>> EntryPlaces(uint32_t layer) const;

  ClusterSession* session_ = nullptr;
  v1::ModelSpec model_;
  std::vector<ClusterRows> rows_;
  std::vector<Part> parts_;
  uint32_t total_rows_ = 0, joined_ = 0;
  bool partial_ = false;
  size_t told_ = 0;  // failed owners that the caller was told of
};

class ClusterSession final {
 public:
  // Use ClusterClient::OpenSession.
  ClusterSession(ClusterClient* client, std::string home)
      : client_(client), home_address_(std::move(home)) {}

  // Begins a step; all sequences are of `model_id`. Sequences that their server says a drain has
  // moved are looked for at their new server.
  absl::StatusOr<std::unique_ptr<ClusterStep>> Begin(const std::string& model_id,
                                                     const std::vector<ClusterRows>& rows,
                                                     const ClusterBeginOptions& options = {});
  // These are the calls of Session, for the session with the worker's home. They open that session
  // if needed, and have no memory to give where the home does not answer.
  std::string_view transport();
  std::span<std::byte> Allocate(uint64_t bytes);
  void Free(std::span<std::byte> block);
  std::span<std::byte> AllocateOnDevice(uint64_t bytes);
  void FreeOnDevice(std::span<std::byte> block);
  // Ends all streams.
  absl::Status Close();

 private:
  friend class ClusterStep;
  absl::StatusOr<std::shared_ptr<OwnerSession>> SessionOn(
      const std::shared_ptr<Connection>& connection);
  std::shared_ptr<OwnerSession> HomeSession();
  bool IsOnDevice(const void* tensor);
  std::vector<ClusterStep::Part> PartsOf(const std::vector<ClusterRows>& rows) const;
  static absl::Status DivideRotations(const v1::ModelSpec& model, std::span<const float> rotations,
                                      std::vector<ClusterStep::Part>* parts);
  void BeginPart(const std::string& model_id, BeginOptions options, ClusterStep::Part* part);
  // Returns true if any of the part's sequences is at another server now.
  bool FollowMoved(const std::vector<ClusterRows>& rows, const ClusterStep::Part& part);

  ClusterClient* const client_;
  const std::string home_address_;  // empty: the client's home
  Mutex mutex_;
  std::map<const Connection*, std::shared_ptr<OwnerSession>> sessions_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<OwnerSession> home_ ABSL_GUARDED_BY(mutex_);  // whose memory is used
  std::vector<std::span<std::byte>> device_blocks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_CLUSTER_STEP_H_
