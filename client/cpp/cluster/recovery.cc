// The part of ClusterClient that finds a sequence, and goes on with one whose server has failed.
#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "client/cpp/cluster/cluster_client.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {
namespace {

// Rows of a peer come over the network: seconds for each row, and seconds for each attempt.
constexpr double kFetchRowSeconds = 30e-6;
constexpr double kFetchSeconds = 0.05;
// Servers that are asked for a checkpoint: with shared storage the first one has it.
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

absl::StatusOr<ClusterSequence> ClusterClient::AttachAt(const std::string& address,
                                                        ModelRecord* model, uint64_t id) {
  auto connection = WithModel(address, model);
  if (!connection.ok()) return connection.status();
  auto attached = (*connection)->client()->Attach(id);
  if (!attached.ok()) {
    owners_->At(address)->Failed(attached.status());
    return attached.status();
  }
  return ClusterSequence(*connection, *std::move(attached), model->spec.model_id());
}

absl::StatusOr<ClusterSequence> ClusterClient::Attach(const std::string& model_id, uint64_t id) {
  const auto model = FindModel(model_id);
  if (!model.ok()) return model.status();
  const auto members = members_->All();
  if (!members.ok()) return members.status();
  owners_->Know(*members);
  absl::Status last = WithReason(absl::StatusCode::kNotFound,
                                 "no server of the cluster has the sequence", "sequence_not_found");
  for (const Member& member : *members) {
    if (!owners_->At(member.address())->well()) continue;
    auto found = AttachAt(member.address(), model->get(), id);
    if (found.ok()) return found;
    const auto detail = DetailOf(found.status());
    if (detail && detail->reason() == "moved") {
      found = AttachAt(detail->peer(), model->get(), id);
      if (found.ok()) return found;
    }
    if (!IsAway(found.status()) && !absl::IsNotFound(found.status())) return found.status();
    if (absl::IsNotFound(found.status())) last = found.status();
  }
  return last;
}

absl::StatusOr<Recovery> ClusterClient::Recover(ClusterSequence* sequence,
                                                const v1::Prefix& prefix) {
  const auto model = FindModel(sequence->model_id());
  if (!model.ok()) return model.status();
  const uint64_t before = sequence->length();
  Recovery found;
  const std::string was = sequence->address();
  if (RecoverAlive(sequence)) {
    found.how = sequence->address() == was ? "alive" : "moved";
  } else if (RecoverMoved(sequence, model->get())) {
    found.how = "moved";
  } else if (RecoverCheckpoint(sequence, model->get())) {
    found.how = "checkpoint";
  } else {
    // The server, if it is there after all, need not keep it until the lease ends.
    if (!sequence->lost() && owners_->At(was)->well()) {
      sequence->server()->ReleaseSequences({sequence->id()}).status().IgnoreError();
    }
    if (absl::Status status = OpenAgain(sequence, model->get(), prefix); !status.ok()) {
      return status;
    }
    found.how = sequence->length() > 0 ? "peer" : "none";
  }
  found.address = sequence->address();
  found.rows = sequence->length();
  found.lost = before > found.rows ? before - found.rows : 0;
  const MutexLock lock(mutex_);
  ++counts_.recovered;
  return found;
}

bool ClusterClient::RecoverAlive(ClusterSequence* sequence) {
  const auto owner = owners_->At(sequence->address());
  if (sequence->lost() || owner->connected() != sequence->connection_ || !owner->well()) {
    return false;
  }
  if (!owners_->Probe({owner->address()}, sequence->model_id(), {}, kGoneSeconds)[0].probe) {
    return false;
  }
  const absl::Status status = sequence->Refresh();
  if (status.ok()) return true;
  if (absl::IsNotFound(status)) return Follow(sequence);
  owner->Failed(status);
  return false;
}

bool ClusterClient::Follow(ClusterSequence* sequence) {
  if (sequence->lost()) return false;
  const auto model = FindModel(sequence->model_id());
  const auto reply = sequence->server()->GetSequences({sequence->id()}, false);
  if (!model.ok() || !reply.ok() || reply->moved_size() != 1) return false;
  auto there = AttachAt(reply->moved(0).peer(), model->get(), sequence->id());
  if (!there.ok()) return false;
  sequence->Become(*std::move(there));
  return true;
}

bool ClusterClient::RecoverMoved(ClusterSequence* sequence, ModelRecord* model) {
  const auto address = registry_->Moved(sequence->id());
  if (!address.ok() || address->empty()) return false;  // other ways are left
  auto there = AttachAt(*address, model, sequence->id());
  if (!there.ok()) return false;
  sequence->Become(*std::move(there));
  return true;
}

bool ClusterClient::RecoverCheckpoint(ClusterSequence* sequence, ModelRecord* model) {
  const auto turn = Begin(model, {}, "");
  if (!turn.ok()) return false;
  std::vector<Choice> choices = Choices(*turn, {});
  if (GoesHome(*turn)) choices.insert(choices.begin(), Choice{turn->home, 0.0, {}});
  if (choices.size() > kMostRestores) choices.resize(kMostRestores);
  for (const Choice& choice : choices) {
    const auto connection = WithModel(choice.address, model);
    if (!connection.ok() || !CanRestore(*(*connection)->client())) continue;
    auto restored = (*connection)->client()->Restore({sequence->id()});
    if (!restored.ok()) {
      owners_->At(choice.address)->Failed(restored.status());
      continue;
    }
    if (restored->size() != 1) continue;
    sequence->Become(ClusterSequence(*connection, std::move((*restored)[0]), sequence->model_id()));
    return true;
  }
  return false;
}

// From rows of a peer, or from nothing.
absl::Status ClusterClient::OpenAgain(ClusterSequence* sequence, ModelRecord* model,
                                      const v1::Prefix& prefix) {
  const auto turn = Begin(model, prefix, "");
  if (!turn.ok()) return turn.status();
  if (turn->key) {
    const std::vector<Choice> choices = Choices(*turn, prefix);
    const auto holder =
        std::max_element(choices.begin(), choices.end(),
                         [](const Choice& a, const Choice& b) { return RowsAt(a) < RowsAt(b); });
    if (!choices.empty() && choices[0].cost_s < kImpossible) {
      const auto more =
          static_cast<double>(RowsAt(*holder)) - static_cast<double>(RowsAt(choices[0]));
      const double saves = more * (cluster_.costs.prefill_row_s - kFetchRowSeconds) - kFetchSeconds;
      if (saves > 0 && Fetch(sequence, model, prefix, holder->address, choices[0].address)) {
        return absl::OkStatus();
      }
    }
  }
  auto opened = OpenSequence(sequence->model_id(), prefix);
  if (!opened.ok()) return opened.status();
  sequence->Become(*std::move(opened));
  return absl::OkStatus();
}

// Brings the rows that `holder` has of a prefix to another server. False if it did not work.
bool ClusterClient::Fetch(ClusterSequence* sequence, ModelRecord* model, const v1::Prefix& prefix,
                          const std::string& holder, const std::string& to) {
  const auto here = WithModel(to, model);
  auto source = OpenAt(holder, model, prefix, nullptr);
  if (!here.ok() || !source.ok() || source->length() == 0) return false;
  v1::ExportRequest request;
  request.set_sequence_id(source->id());
  request.set_expected_epoch(source->epoch());
  request.set_end_row(source->length());
  PartsQueue parts;
  Client* const from = source->server();
  std::thread exporter([&parts, &request, from] {
    parts.End(from->ExportPages(request, [&parts](const v1::PagesPart& part) {
      return parts.Put(part) ? absl::OkStatus() : absl::CancelledError("the import has ended");
    }));
  });
  v1::ImportTarget target;
  target.set_model_id(sequence->model_id());
  auto made = (*here)->client()->ImportPages(target, [&parts] { return parts.Take(); });
  parts.Close();
  exporter.join();
  if (!made.ok()) {
    owners_->At(holder)->Failed(made.status());
    return false;
  }
  // Without a match nothing is shared with others; the rows are right all the same.
  made->Match(prefix).status().IgnoreError();
  sequence->Become(ClusterSequence(*here, *std::move(made), sequence->model_id()));
  return true;
}

}  // namespace mla::client
