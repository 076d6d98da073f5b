#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/client.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/streams/errors.h"

namespace mla::client {
namespace {

constexpr int kTailTurns = 4;  // attempts to read a tail in parts from its beginning

}  // namespace

Sequence::Sequence(Client* client, const v1::SequenceInfo& info)
    : client_(client), id_(info.sequence_id()), epoch_(info.epoch()), length_(info.length()) {}

Sequence::Sequence(Sequence&& other) noexcept { *this = std::move(other); }

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  if (this == &other) return *this;
  Release().IgnoreError();
  client_ = std::exchange(other.client_, nullptr);
  id_ = other.id_;
  epoch_ = other.epoch_;
  length_ = other.length_;
  return *this;
}

Sequence::~Sequence() { Release().IgnoreError(); }

absl::StatusOr<Sequence> Sequence::Fork(std::optional<uint64_t> length) {
  MLA_ASSIGN_OR_RETURN(const auto reply, client_->ForkSequence(id_, epoch_, length));
  if (length) {
    MLA_RETURN_IF_ERROR(CheckSame("length", reply.sequence().length(), *length));
  }
  return Sequence(client_, reply.sequence());
}

absl::StatusOr<v1::PrefixMatch> Sequence::Match(const v1::Prefix& prefix, uint64_t first_row) {
  v1::MatchRequest request;
  request.set_sequence_id(id_);
  request.set_expected_epoch(epoch_);
  request.set_first_row(first_row);
  *request.mutable_prefix() = prefix;
  MLA_ASSIGN_OR_RETURN(const auto reply, client_->MatchSequence(request));
  MLA_RETURN_IF_ERROR(CheckSame("sequence_id", reply.sequence().sequence_id(), id_));
  length_ = reply.sequence().length();
  return reply.match();
}

absl::Status Sequence::Truncate(uint64_t length) {
  MLA_ASSIGN_OR_RETURN(const auto reply, client_->TruncateSequence(id_, epoch_, length));
  MLA_RETURN_IF_ERROR(CheckSame("length", reply.length(), length));
  epoch_ = reply.epoch();
  length_ = length;
  return absl::OkStatus();
}

absl::StatusOr<Sequence::Tail> Sequence::ReadTail() {
  for (int turn = 0; turn < kTailTurns; ++turn) {
    Tail tail;
    uint64_t serial = 0;
    for (size_t bytes = 1; tail.bytes.size() < bytes;) {
      MLA_ASSIGN_OR_RETURN(auto part, client_->ReadTail(id_, epoch_, tail.bytes.size()));
      if (tail.bytes.empty()) serial = part.serial();
      if (part.serial() != serial) break;  // part of another tail
      tail.position = part.position();
      bytes = part.tail_bytes();
      tail.bytes += part.tail();
      if (tail.bytes.size() == bytes) return tail;
      // Each part must bring the tail closer to a valid end.
      if (part.tail().empty() || tail.bytes.size() > bytes ||
          bytes > client_->info().limits().max_tail_bytes()) {
        return absl::DataLossError(absl::StrCat("a tail of ", bytes, " bytes, of which ",
                                                tail.bytes.size(), " have come"));
      }
    }
  }
  return absl::AbortedError("steps have left other tails while this one was read");
}

absl::Status Sequence::Refresh() {
  MLA_ASSIGN_OR_RETURN(const auto reply, client_->GetSequences({id_}, false));
  if (reply.sequences_size() != 1) return NotOpen(reply);
  MLA_RETURN_IF_ERROR(CheckSame("sequence_id", reply.sequences(0).sequence_id(), id_));
  epoch_ = reply.sequences(0).epoch();
  length_ = reply.sequences(0).length();
  return absl::OkStatus();
}

absl::Status Sequence::Release() {
  if (client_ == nullptr) return absl::OkStatus();
  return std::exchange(client_, nullptr)->ReleaseSequences({id_}).status();
}

}  // namespace mla::client
