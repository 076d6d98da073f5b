#include "client/cpp/cluster/cluster_sequence.h"

#include <utility>

#include "base/status_macros.h"
#include "client/cpp/cluster/cluster_client.h"
#include "client/cpp/cluster/faults.h"

namespace mla::client {
namespace {

const absl::Status& StatusOf(const absl::Status& result) { return result; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace

ClusterSequence::ClusterSequence(ClusterClient* client, std::shared_ptr<Connection> connection,
                                 Sequence sequence, std::string model_id)
    : client_(client),
      connection_(std::move(connection)),
      sequence_(std::make_unique<Sequence>(std::move(sequence))),
      model_id_(std::move(model_id)) {}

ClusterSequence::~ClusterSequence() {
  if (sequence_ == nullptr) return;
  if (lost()) sequence_->Detach();
  sequence_.reset();  // before its connection
}

ClusterSequence& ClusterSequence::operator=(ClusterSequence&& other) noexcept {
  if (this == &other) return *this;
  if (sequence_ != nullptr && lost()) sequence_->Detach();
  sequence_ = std::move(other.sequence_);
  connection_ = std::move(other.connection_);
  client_ = other.client_;
  model_id_ = std::move(other.model_id_);
  held_ = other.held_;
  return *this;
}

void ClusterSequence::Become(ClusterSequence other) {
  sequence_->Detach();
  *sequence_ = std::move(*other.sequence_);  // steps know this place
  connection_ = std::move(other.connection_);
  other.sequence_.reset();
}

template <typename Result, typename Call>
Result ClusterSequence::WhereItIs(Call call) {
  for (int moves = 0;; ++moves) {
    Result result = call(sequence_.get());
    // A server that refuses a moved sequence has changed nothing, so the call may be made again.
    if (moves == kMostMoves || ReasonOf(StatusOf(result)) != kMoved || !client_->Follow(this)) {
      return result;
    }
  }
}

absl::StatusOr<ClusterSequence> ClusterSequence::Fork(std::optional<uint64_t> length) {
  MLA_ASSIGN_OR_RETURN(auto child,
                       WhereItIs<absl::StatusOr<Sequence>>(
                           [length](Sequence* sequence) { return sequence->Fork(length); }));
  return ClusterSequence(client_, connection_, std::move(child), model_id_);
}

absl::StatusOr<v1::PrefixMatch> ClusterSequence::Match(const v1::Prefix& prefix,
                                                       uint64_t first_row) {
  return WhereItIs<absl::StatusOr<v1::PrefixMatch>>(
      [&](Sequence* sequence) { return sequence->Match(prefix, first_row); });
}

absl::Status ClusterSequence::Truncate(uint64_t length) {
  return WhereItIs<absl::Status>(
      [length](Sequence* sequence) { return sequence->Truncate(length); });
}

absl::StatusOr<Sequence::Tail> ClusterSequence::ReadTail() {
  return WhereItIs<absl::StatusOr<Sequence::Tail>>(
      [](Sequence* sequence) { return sequence->ReadTail(); });
}

absl::Status ClusterSequence::Refresh() {
  return WhereItIs<absl::Status>([](Sequence* sequence) { return sequence->Refresh(); });
}

absl::Status ClusterSequence::Release() {
  absl::Status status;
  for (int moves = 0; held_ && !lost(); ++moves) {
    const auto reply = server()->ReleaseSequences({id()});
    status = reply.status();
    // A server that does not have the sequence any more succeeds.
    const bool gone = reply.ok() && reply->not_found_size() > 0;
    if (!gone || moves == kMostMoves || !client_->Follow(this)) break;
  }
  Detach();
  return status;
}

void ClusterSequence::Detach() {
  sequence_->Detach();
  held_ = false;
}

}  // namespace mla::client
