#include "scheduler/steps/step_ends.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace mla::scheduler {

absl::Status StepEnds::End(Step* step, StreamRequest* request, bool* wait) {
  StepTable::Touch(step, request->engine.arrival_ns);
  if (step->end != nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     "the step's EndStep was sent before and waits for its requests",
                     {.field = "step_id",
                      .got = absl::StrCat(request->step_id),
                      .limit = "a step without an EndStep under way",
                      .reason = "step_ending"});
  }
  const auto sequences = static_cast<int64_t>(step->entries.size());
  if (sequences > request->end.lengths_max) {
    return RefuseField("end_step.lengths", absl::StrCat("room for ", request->end.lengths_max),
                       absl::StrCat("room for the lengths of ", sequences, " sequences"),
                       "reply_too_large");
  }
  const std::vector<int32_t>& committed = request->end.committed_rows;
  if (!committed.empty() && committed.size() != step->entries.size()) {
    return RefuseField("end_step.committed_rows", absl::StrCat(committed.size(), " entries"),
                       absl::StrCat("none or ", step->entries.size()), "out_of_range");
  }
  for (size_t i = 0; i < committed.size(); ++i) {
    if (committed[i] >= 0 && committed[i] <= step->entries[i].rows) continue;
    return RefuseField(absl::StrCat("end_step.committed_rows[", i, "]"), absl::StrCat(committed[i]),
                       absl::StrCat("0..", step->entries[i].rows), "out_of_range");
  }
  MLA_RETURN_IF_ERROR(CheckTails(*step, request->end.tails));
  if (!step->idle()) {
    step->end = request;
    request->engine.state.Enter(RequestState::kEnding);
    *wait = true;
    return absl::OkStatus();
  }
  return Commit(step, request);
}

absl::Status StepEnds::Commit(Step* step, StreamRequest* request) {
  const std::vector<int32_t>& committed = request->end.committed_rows;
  int32_t needed = 0;
  for (size_t i = 0; i < step->entries.size(); ++i) {
    const StepEntry& entry = step->entries[i];
    const int32_t rows = committed.empty() ? entry.rows : committed[i];
    if (rows > 0) needed = entry.offset + rows;
  }
  const std::string missing = MissingRows(*step, needed);
  if (!missing.empty()) {
    int32_t stored = needed;
    for (const LayerProgress& layer : step->layers) stored = std::min(stored, layer.stored);
    return MakeError(
        absl::StatusCode::kFailedPrecondition,
        absl::StrCat("step ", step->id, " cannot be committed, KV rows are missing: ", missing),
        {.field = "end_step",
         .got = missing,
         .limit = "every layer has the rows to be committed",
         .reason = "rows_missing",
         .last_good_position = CommittedAt(*step, stored)});
  }
  request->lengths.clear();
  for (size_t i = 0; i < step->entries.size(); ++i) {
    const StepEntry& entry = step->entries[i];
    if (entry.sequence->not_finite_from != Sequence::kNoRow) {
      // Rows that are not finite are not shared with other sequences.
      const int64_t from =
          std::min<int64_t>(entry.sequence->not_finite_from, limits_.max_sequence_rows);
      cache_->Undeclare(entry.sequence->slot, static_cast<int32_t>(from));
    }
    const int32_t rows = committed.empty() ? entry.rows : committed[i];
    cache_->Commit(entry.sequence->slot, rows);
    const int64_t length = cache_->length(entry.sequence->slot);
    entry.sequence->ForgetRowsFrom(length);
    request->lengths.push_back(length);
  }
  for (TailArgs& args : request->end.tails) {
    const auto place = static_cast<size_t>(args.sequence);
    // The request keeps the old tail, so it is freed outside the role: freeing takes a while.
    step->entries[place].sequence->SwapTail(request->lengths[place], &args.tail);
  }
  Close(step, "");
  return absl::OkStatus();
}

void StepEnds::Close(Step* step, const std::string& why_aborted) {
  for (const StepEntry& entry : step->entries) {
    entry.sequence->step = nullptr;
    sequences_->Renew(entry.sequence);
  }
  for (const StreamId stream : step->streams) streams_->at(stream).steps->Remove(step->id);
  steps_->Remove(step, why_aborted);
}

void StepEnds::Finish(Step* step) {
  StreamRequest* request = std::exchange(step->end, nullptr);
  const absl::Status status = Commit(step, request);
  answers_->Answer(request, status);
}

void StepEnds::Abort(Step* step, const absl::Status& answer, const std::string& why) {
  if (step->end != nullptr) {
    step->end->step_aborted = true;
    answers_->Answer(std::exchange(step->end, nullptr), answer);
  }
  for (const StepEntry& entry : step->entries) {
    cache_->Rollback(entry.sequence->slot);
    entry.sequence->ForgetRowsFrom(entry.start);
  }
  ++stats_->steps_aborted;
  Close(step, why);
}

}  // namespace mla::scheduler
