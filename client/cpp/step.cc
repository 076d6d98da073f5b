// Step: its end.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/session.h"
#include "client/cpp/streams/errors.h"
#include "client/cpp/streams/step_stream.h"

namespace mla::client {

absl::StatusOr<std::vector<uint64_t>> Step::End(std::span<const SequenceTail> tails) {
  return EndWith(nullptr, tails);
}

absl::StatusOr<std::vector<uint64_t>> Step::End(const std::vector<uint32_t>& committed_rows,
                                                std::span<const SequenceTail> tails) {
  if (committed_rows.size() != rows_.size()) {
    v1::ErrorDetail detail;
    detail.set_field("end_step.committed_rows");
    detail.set_got(absl::StrCat(committed_rows.size(), " entries"));
    detail.set_limit(absl::StrCat(rows_.size()));
    return MakeStatus(static_cast<int32_t>(absl::StatusCode::kInvalidArgument),
                      absl::StrCat(detail.field(), ": got ", detail.got(), ", must be ",
                                   detail.limit(), ", one for each sequence"),
                      detail);
  }
  return EndWith(&committed_rows, tails);
}

absl::StatusOr<std::vector<uint64_t>> Step::EndWith(const std::vector<uint32_t>* committed_rows,
                                                    std::span<const SequenceTail> tails) {
  v1::AttendStreamRequest request;
  request.mutable_end_step()->set_step_id(id_);
  if (committed_rows != nullptr) {
    request.mutable_end_step()->mutable_committed_rows()->Add(committed_rows->begin(),
                                                              committed_rows->end());
  }
  auto result = std::make_shared<PendingReply>();
  for (const SequenceTail& tail : tails) {
    if (tail.bytes.size() != model_.tail_bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tails: got ", tail.bytes.size(), " bytes, must be ", model_.tail_bytes()));
    }
    request.mutable_end_step()->add_tails(tail.sequence);
    result->kv.insert(result->kv.end(), tail.bytes.begin(), tail.bytes.end());
  }
  stream_->Send(&request, {.kv = result->kv, .q = {}, .lists = {}}, result);
  MLA_RETURN_IF_ERROR(stream_->Wait(result.get()));
  open_ = false;
  const auto& lengths = result->reply.end_step().lengths();
  if (static_cast<size_t>(lengths.size()) != rows_.size()) {
    return absl::DataLossError(absl::StrCat("the step has ", rows_.size(), " sequences, and ",
                                            lengths.size(), " lengths have come"));
  }
  for (size_t i = 0; i < rows_.size(); ++i) {
    const uint32_t kept = committed_rows != nullptr ? (*committed_rows)[i] : rows_[i].rows;
    const uint64_t length = rows_[i].sequence->length_ + kept;
    if (lengths[static_cast<int>(i)] != length) {
      return absl::DataLossError(absl::StrCat("sequence ", i, " of the step has length ", length,
                                              ", and ", lengths[static_cast<int>(i)], " has come"));
    }
  }
  for (size_t i = 0; i < rows_.size(); ++i) {
    rows_[i].sequence->length_ = lengths[static_cast<int>(i)];
  }
  return std::vector<uint64_t>(lengths.begin(), lengths.end());
}

absl::Status Step::Abort() {
  v1::AttendStreamRequest request;
  request.mutable_abort_step()->set_step_id(id_);
  open_ = false;
  PendingReply result;
  return stream_->Call(&request, &result);
}

Step::~Step() {
  if (open_) Abort().IgnoreError();
}

}  // namespace mla::client
