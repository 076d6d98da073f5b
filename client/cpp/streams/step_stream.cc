#include "client/cpp/streams/step_stream.h"

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"

namespace mla::client {

absl::Status CheckAnswer(v1::AttendStreamRequest::BodyCase asked,
                         v1::AttendStreamReply::BodyCase answer) {
  using Request = v1::AttendStreamRequest;
  using Reply = v1::AttendStreamReply;
  bool answers = false;
  switch (asked) {
    case Request::kBeginStep:
      answers = answer == Reply::kBeginStep;
      break;
    case Request::kAttend:
      answers = answer == Reply::kAttend;
      break;
    case Request::kEndStep:
      answers = answer == Reply::kEndStep;
      break;
    case Request::kAbortStep:
      answers = answer == Reply::kAbortStep;
      break;
    case Request::BODY_NOT_SET:
      break;
  }
  if (answers || answer == Reply::kError) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("a request of kind ", static_cast<int>(asked),
                                          " was answered with kind ", static_cast<int>(answer)));
}

void StepStream::Refuse(PendingReply* pending) const {
  pending->status = ForkedError(home_.pid());
  pending->done = true;
}

absl::Status StepStream::WaitElsewhere(PendingReply* pending) const {
  if (!pending->done) Refuse(pending);
  return pending->status;
}

}  // namespace mla::client
