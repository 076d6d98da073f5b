#include "client/cpp/cluster/recovery.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {
namespace {

// Rows of a peer come over the network: seconds for each row, and seconds for each attempt.
constexpr double kFetchRowSeconds = 30e-6;
constexpr double kFetchSeconds = 0.05;
// At most this number of servers is asked for a checkpoint.
constexpr size_t kMostRestores = 4;
// Parts of an export that wait for the import.
constexpr size_t kMostParts = 4;
constexpr char kCheckpoints[] = "checkpoints";

uint64_t RowsAt(const Choice& choice) { return choice.probe ? RowsOf(*choice.probe) : 0; }

bool CanRestore(const Client& client) {
  const auto& capabilities = client.info().capabilities();
  return std::find(capabilities.begin(), capabilities.end(), kCheckpoints) != capabilities.end();
}

// Hands parts from a thread that exports to one that imports. Either may end first.
class PartsQueue final {
 public:
  // False: the reader has ended.
  bool Put(const v1::PagesPart& part) {
    MutexLock lock(mutex_);
    changed_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return parts_.size() < kMostParts || closed_;
    });
    if (closed_) return false;
    parts_.push_back(part);
    changed_.NotifyAll();
    return true;
  }
  // nullopt: after the last part; the writer's error if it failed.
  absl::StatusOr<std::optional<v1::PagesPart>> Take() {
    MutexLock lock(mutex_);
    changed_.Wait(
        lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !parts_.empty() || ended_; });
    if (parts_.empty()) {
      if (!status_.ok()) return status_;
      return std::optional<v1::PagesPart>();
    }
    std::optional<v1::PagesPart> part = std::move(parts_.front());
    parts_.pop_front();
    changed_.NotifyAll();
    return part;
  }
  void End(const absl::Status& status) {
    const MutexLock lock(mutex_);
    ended_ = true;
    status_ = status;
    changed_.NotifyAll();
  }
  void Close() {
    const MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<v1::PagesPart> parts_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false, closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<Recovery> SequenceRecovery::Run() {
  const uint64_t before = sequence_->length();
  const std::string was = sequence_->address();
  Recovery recovery;
  if (Alive()) {
    recovery.how = sequence_->address() == was ? "alive" : "moved";
  } else if (Moved()) {
    recovery.how = "moved";
  } else if (Checkpoint()) {
    recovery.how = "checkpoint";
  } else {
    Forget();
    MLA_RETURN_IF_ERROR(OpenAgain());
    recovery.how = sequence_->length() > 0 ? "peer" : "none";
  }
  recovery.address = sequence_->address();
  recovery.rows = sequence_->length();
  recovery.lost = before > recovery.rows ? before - recovery.rows : 0;
  return recovery;
}

bool SequenceRecovery::Alive() {
  const auto owner = cluster_->owners_->At(sequence_->address());
  // A server to which calls have just failed is asked as well: the network may be back.
  if (sequence_->lost() || owner->connected() != sequence_->connection_) return false;
  const bool answered =
      cluster_->owners_->Probe({owner->address()}, sequence_->model_id(), {}, kGoneSeconds)[0]
          .probe.has_value();
  silent_ = !answered && !sequence_->lost();  // another process has answered if it is lost now
  if (!answered) return false;
  const absl::Status status = sequence_->Refresh();  // it follows where its server says
  if (!status.ok()) cluster_->owners_->At(sequence_->address())->Failed(status);
  return status.ok();
}

bool SequenceRecovery::Moved() {
  const auto address = cluster_->registry_->Moved(sequence_->id());
  if (!address.ok() || address->empty()) return false;  // other ways are left
  auto there = cluster_->AttachFrom(*address, model_, sequence_->id());
  if (!there.ok()) return false;
  sequence_->Become(*std::move(there));
  return true;
}

bool SequenceRecovery::Restore(const std::string& address) {
  const auto connection = cluster_->WithModel(address, model_);
  if (!connection.ok() || !CanRestore(*(*connection)->client())) return false;
  auto restored = (*connection)->client()->Restore({sequence_->id()});
  if (!restored.ok()) {
    cluster_->owners_->At(address)->Failed(restored.status());
    return false;
  }
  if (restored->size() != 1) return false;
  sequence_->Become(
      ClusterSequence(cluster_, *connection, std::move((*restored)[0]), sequence_->model_id()));
  return true;
}

bool SequenceRecovery::Checkpoint() {
  // A server that was started again has its checkpoints, though calls to it have just failed.
  const std::string was = sequence_->address();
  const auto members = cluster_->members_->All();
  const bool listed =
      members.ok() && std::any_of(members->begin(), members->end(), [&](const Member& member) {
        return member.address() == was && !member.draining();
      });
  const bool answers =
      listed && !silent_ && cluster_->owners_->Probe({was}, "", {}, kGoneSeconds)[0].probe;
  if (answers && Restore(was)) return true;
  const auto turn = cluster_->Begin(model_, {}, "");
  if (!turn.ok()) return false;
  std::vector<Choice> choices = cluster_->Choices(*turn, {});
  if (cluster_->GoesHome(*turn)) choices.insert(choices.begin(), Choice{turn->home, 0.0, {}});
  if (answers) std::erase_if(choices, [&](const Choice& one) { return one.address == was; });
  if (choices.size() > kMostRestores) choices.resize(kMostRestores);
  return std::any_of(choices.begin(), choices.end(),
                     [this](const Choice& one) { return Restore(one.address); });
}

void SequenceRecovery::Forget() {
  if (sequence_->lost() || !cluster_->owners_->At(sequence_->address())->well()) return;
  sequence_->server()->ReleaseSequences({sequence_->id()}).status().IgnoreError();
}

absl::Status SequenceRecovery::OpenAgain() {
  // The server that had it last, if it is there again or still, may have its rows in its cache.
  MLA_ASSIGN_OR_RETURN(const auto turn, cluster_->Begin(model_, prefix_, sequence_->address()));
  if (turn.key) {
    const std::vector<Choice> choices = cluster_->Choices(turn, prefix_);
    const auto holder =
        std::max_element(choices.begin(), choices.end(),
                         [](const Choice& a, const Choice& b) { return RowsAt(a) < RowsAt(b); });
    if (!choices.empty() && choices[0].cost_s < kImpossible) {
      const auto more =
          static_cast<double>(RowsAt(*holder)) - static_cast<double>(RowsAt(choices[0]));
      const double saves =
          more * (cluster_->cluster_.costs.prefill_row_s - kFetchRowSeconds) - kFetchSeconds;
      if (saves > 0 && Fetch(holder->address, choices[0].address)) return absl::OkStatus();
    }
  }
  MLA_ASSIGN_OR_RETURN(auto opened, cluster_->OpenSequence(sequence_->model_id(), prefix_));
  sequence_->Become(std::move(opened));
  return absl::OkStatus();
}

bool SequenceRecovery::Fetch(const std::string& holder, const std::string& destination) {
  const auto here = cluster_->WithModel(destination, model_);
  auto source = cluster_->OpenAt(holder, model_, prefix_, nullptr);
  if (!here.ok() || !source.ok() || source->length() == 0) return false;
  v1::ExportRequest request;
  request.set_sequence_id(source->id());
  request.set_expected_epoch(source->epoch());
  request.set_end_row(source->length());
  PartsQueue parts;
  Client* const from = source->server();
  absl::Status exported;
  std::thread exporter;
  try {
    exporter = std::thread([&parts, &request, &exported, from] {
      exported = from->ExportPages(request, [&parts](const v1::PagesPart& part) {
        return parts.Put(part) ? absl::OkStatus() : absl::CancelledError("the import has ended");
      });
      parts.End(exported);
    });
  } catch (const std::system_error&) {
    return false;  // the process has no more threads; the rows can be sent again
  }
  v1::ImportTarget target;
  target.set_model_id(sequence_->model_id());
  auto imported = (*here)->client()->ImportPages(target, [&parts] { return parts.Take(); });
  parts.Close();
  exporter.join();
  if (!imported.ok()) {
    const bool here_failed = exported.ok() || absl::IsCancelled(exported);
    cluster_->owners_->At(here_failed ? destination : holder)
        ->Failed(here_failed ? imported.status() : exported);
    return false;
  }
  // Without a match nothing is shared with others; the rows are right all the same.
  imported->Match(prefix_).status().IgnoreError();
  sequence_->Become(ClusterSequence(cluster_, *here, *std::move(imported), sequence_->model_id()));
  return true;
}

}  // namespace mla::client
