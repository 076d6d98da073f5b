// The part of cluster_step.h that begins steps and keeps a stream to each server.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/cluster/cluster_step.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {

absl::StatusOr<std::shared_ptr<OwnerSession>> ClusterSession::SessionOn(
    const std::shared_ptr<Connection>& connection) {
  {
    const MutexLock lock(mutex_);
    std::erase_if(sessions_, [](const auto& one) { return one.second->connection->dropped(); });
    const auto known = sessions_.find(connection.get());
    if (known != sessions_.end() && !known->second->broken) return known->second;
  }
  MLA_ASSIGN_OR_RETURN(auto session, connection->OpenSession());
  const MutexLock lock(mutex_);
  sessions_[connection.get()] = session;
  return session;
}

std::vector<ClusterStep::Part> ClusterSession::PartsOf(const std::vector<ClusterRows>& rows) const {
  std::vector<ClusterStep::Part> parts;
  uint32_t row = 0;
  for (size_t place = 0; place < rows.size(); ++place) {
    ClusterSequence* const sequence = rows[place].sequence;
    auto part = std::find_if(parts.begin(), parts.end(), [&](const ClusterStep::Part& one) {
      return one.connection == sequence->connection_;
    });
    if (part == parts.end()) {
      part = parts.emplace(parts.end());
      part->connection = sequence->connection_;
    }
    part->places.push_back(place);
    part->sequences.push_back({sequence->sequence_.get(), rows[place].rows});
    for (uint32_t i = 0; i < rows[place].rows; ++i) part->rows.push_back(row++);
  }
  return parts;
}

// Gives each part the rotations of its rows.
absl::Status ClusterSession::DivideRotations(const v1::ModelSpec& model,
                                             std::span<const float> rotations,
                                             std::vector<ClusterStep::Part>* parts) {
  const uint64_t rope_dim = model.geometry().rope_dim();
  uint64_t rows = 0;
  for (const ClusterStep::Part& part : *parts) rows += part.rows.size();
  if (rotations.size() != rows * rope_dim) {
    return RefuseValue("step.rotations", absl::StrCat(rotations.size(), " numbers"),
                       absl::StrCat(rows * rope_dim, ", rope_dim for each row"));
  }
  for (ClusterStep::Part& part : *parts) {
    for (const uint32_t row : part.rows) {
      const auto own = rotations.subspan(row * rope_dim, rope_dim);
      part.rotations.insert(part.rotations.end(), own.begin(), own.end());
    }
  }
  return absl::OkStatus();
}

void ClusterSession::BeginPart(const std::string& model_id, BeginOptions options,
                               ClusterStep::Part* part) {
  if (!part->rotations.empty()) options.rotations = part->rotations;
  // If the stream turns out to be broken, the second turn goes over a new one.
  for (int turn = 0; turn < 2; ++turn) {
    auto session = SessionOn(part->connection);
    part->error = session.status();
    if (!session.ok()) return;
    part->session = *session;
    auto step = part->session->session->Begin(model_id, part->sequences, options);
    part->error = step.status();
    if (step.ok()) {
      part->step = *std::move(step);
      part->step_id = part->step->id();  // as chosen by its client
      return;
    }
    if (!BreaksSession(part->error)) return;
    part->session->broken = true;
    if (!absl::IsUnavailable(part->error)) return;
  }
}

bool ClusterSession::FollowMoved(const std::vector<ClusterRows>& rows,
                                 const ClusterStep::Part& part) {
  bool moved = false;
  if (ReasonOf(part.error) != "moved") return false;
  for (const size_t place : part.places) {
    ClusterSequence* const sequence = rows[place].sequence;
    sequence->Refresh().IgnoreError();  // it follows; one that is still there stays
    moved = moved || sequence->connection_ != part.connection;
  }
  return moved;
}

absl::StatusOr<std::unique_ptr<ClusterStep>> ClusterSession::Begin(
    const std::string& model_id, const std::vector<ClusterRows>& rows,
    const ClusterBeginOptions& options) {
  if (options.failed != nullptr) options.failed->clear();
  if (rows.empty()) return RefuseValue("step.sequences", "none", "at least one");
  MLA_ASSIGN_OR_RETURN(const auto model, client_->FindModel(model_id));
  std::unique_ptr<ClusterStep> step(new ClusterStep());
  step->session_ = this;
  step->model_ = model->spec;
  step->rows_ = rows;
  step->partial_ = options.partial;
  for (int turn = 0; turn <= kMostMoves; ++turn) {
    step->parts_ = PartsOf(rows);
    BeginOptions own = options.step;
    if (!own.rotations.empty() && step->parts_.size() > 1) {
      absl::Status divided = DivideRotations(step->model_, own.rotations, &step->parts_);
      if (!divided.ok()) return divided;
    }
    if (own.step_id == 0 && step->parts_.size() > 1) {
      const MutexLock lock(client_->mutex_);
      own.step_id = client_->random_() >> 1 | 1;
    }
    ForEachAtOnce(step->parts_.size(),
                  [&](size_t i) { BeginPart(model_id, own, &step->parts_[i]); });
    bool moved = false;
    for (const ClusterStep::Part& part : step->parts_) moved = FollowMoved(rows, part) || moved;
    if (!moved) break;
  }
  for (const ClusterRows& one : rows) step->total_rows_ += one.rows;
  size_t failed = 0;
  for (ClusterStep::Part& part : step->parts_) {
    if (part.error.ok()) {
      step->joined_ = std::max(step->joined_, part.step->joined());
      continue;
    }
    // The call itself is wrong, for every owner.
    if (absl::IsInvalidArgument(part.error)) return part.error;
    ++failed;
    if (step->parts_.size() == 1) return part.error;
    client_->owners_->At(part.connection->address())->Failed(part.error);
  }
  if (options.failed != nullptr) *options.failed = step->failed();
  if (failed == step->parts_.size() || (failed > 0 && !options.partial)) {
    return step->FailedStatus();
  }
  return step;
}

std::shared_ptr<OwnerSession> ClusterSession::HomeSession() {
  {
    const MutexLock lock(mutex_);
    if (home_ != nullptr) return home_;
  }
  auto home = client_->Home();  // also tells the owners how to connect
  if (!home_address_.empty()) home = home_address_;
  if (!home.ok()) return nullptr;
  const auto connection = client_->owners_->At(*home)->connection();
  if (!connection.ok()) return nullptr;
  const auto session = SessionOn(*connection);
  if (!session.ok()) return nullptr;
  const MutexLock lock(mutex_);
  if (home_ == nullptr) home_ = *session;
  return home_;
}

std::string_view ClusterSession::transport() {
  const auto home = HomeSession();
  return home == nullptr ? "inline" : home->session->transport();
}

std::span<std::byte> ClusterSession::Allocate(uint64_t bytes) {
  const auto home = HomeSession();
  return home == nullptr ? std::span<std::byte>() : home->session->Allocate(bytes);
}

void ClusterSession::Free(std::span<std::byte> block) {
  if (const auto home = HomeSession(); home != nullptr) home->session->Free(block);
}

std::span<std::byte> ClusterSession::AllocateOnDevice(uint64_t bytes) {
  const auto home = HomeSession();
  if (home == nullptr) return {};
  const std::span<std::byte> block = home->session->AllocateOnDevice(bytes);
  const MutexLock lock(mutex_);
  if (!block.empty()) device_blocks_.push_back(block);
  return block;
}

void ClusterSession::FreeOnDevice(std::span<std::byte> block) {
  const auto home = HomeSession();
  if (home != nullptr) home->session->FreeOnDevice(block);
  const MutexLock lock(mutex_);
  std::erase_if(device_blocks_, [&](const auto& one) { return one.data() == block.data(); });
}

bool ClusterSession::IsOnDevice(const void* tensor) {
  const MutexLock lock(mutex_);
  return std::any_of(device_blocks_.begin(), device_blocks_.end(), [&](const auto& block) {
    return tensor >= block.data() && tensor < block.data() + block.size();
  });
}

absl::Status ClusterSession::Close() {
  std::map<const Connection*, std::shared_ptr<OwnerSession>> sessions;
  {
    const MutexLock lock(mutex_);
    sessions.swap(sessions_);
    home_.reset();
  }
  absl::Status status;
  for (const auto& [connection, one] : sessions) {
    const absl::Status closed = one->session->Close();
    if (status.ok()) status = closed;
  }
  return status;
}

}  // namespace mla::client
