// EngineSimulator: what is checked, and when nothing may be left over.
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/simulation/engine_simulator.h"

namespace mla::simulation {
namespace {

using scheduler::SequenceInfo;

constexpr double kTolerance = 2e-5;

}  // namespace

std::string EngineSimulator::Settle() {
  harness_.AdvanceMicros(harness_.core().limits().slice_wait_us);
  harness_.Run();
  if (std::string wrong = CheckAnswers(); !wrong.empty()) return wrong;
  for (const Waiting& waiting : waiting_) {
    if (!waiting.waits_for_rows) return "a request that could run was not answered";
  }
  return "";
}

std::string EngineSimulator::CheckOutput(const Waiting& waiting) {
  ++stats_.answers_checked;
  TestRequest one;
  const TestRequest& all = *waiting.request;
  const size_t heads = static_cast<size_t>(all.attend.num_heads);
  for (size_t i = 0; i < waiting.visible.size(); ++i) {
    std::vector<const Row*> rows;
    for (const uint64_t key : waiting.visible[i]) rows.push_back(&RowOf(key));
    one.attend = all.attend;
    one.attend.row_begin += static_cast<int>(i);
    one.attend.row_count = 1;
    const auto out = all.output.begin() + static_cast<long>(i * heads * 8);
    one.output.assign(out, out + static_cast<long>(heads * 8));
    const auto lse = all.lse.begin() + static_cast<long>(i * heads);
    one.lse.assign(lse, lse + static_cast<long>(heads));
    const double error = harness_.Error(one, rows, {static_cast<int>(rows.size())}, waiting.q_key);
    if (!(error < kTolerance)) {
      return absl::StrCat("row ", i, " of layer ", all.attend.layer, " is off by ", error);
    }
    Trace(static_cast<uint64_t>(one.output[0] * 1e6));
  }
  return "";
}

std::string EngineSimulator::CheckAnswer(const Waiting& waiting) {
  const TestRequest& request = *waiting.request;
  if (request.answers != 1) return absl::StrCat(request.answers, " answers to one request");
  const bool step_open = steps_.contains(waiting.step);
  Trace(static_cast<uint64_t>(request.status.code()));
  if (request.status.ok()) {
    if (waiting.must_differ) return "a repeat with other bytes was accepted";
    if (waiting.waits_for_rows) return "answered before its KV rows arrived";
    return waiting.computes ? CheckOutput(waiting) : "";
  }
  const std::string& reason = request.fault.reason;
  if (waiting.must_differ && reason == "kv_rows_differ") return "";
  if (waiting.waits_for_rows && reason == "kv_rows_missing") return "";
  if (!step_open && reason == "step_aborted" && request.step_aborted) return "";
  return absl::StrCat("failed without cause: ", request.status.ToString());
}

std::string EngineSimulator::CheckAnswers() {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (!it->request->answered()) {
      ++it;
      continue;
    }
    if (std::string wrong = CheckAnswer(*it); !wrong.empty()) return wrong;
    it = waiting_.erase(it);
  }
  return "";
}

std::string EngineSimulator::CheckSequences() {
  const auto list = harness_.core().GetSequences({harness_.tenant(), {}, ""});
  if (list.sequences.size() != sequences_.size()) return "another number of sequences is open";
  for (const ModelSequence& sequence : sequences_) {
    const SequenceInfo info = harness_.Get(sequence.id);
    if (info.length != static_cast<int64_t>(sequence.rows[0].size()) ||
        info.epoch != sequence.epoch || info.in_step != (sequence.step != 0)) {
      return absl::StrCat("sequence ", sequence.id, " is in another state than foretold");
    }
  }
  return harness_.core().cache().CheckInvariants();
}

std::string EngineSimulator::Finish() {
  if (std::string wrong = Settle(); !wrong.empty()) return wrong;
  while (!steps_.empty()) {
    const auto request = harness_.Abort(steps_.begin()->second.streams[0], steps_.begin()->first);
    if (!request->status.ok()) return absl::StrCat("abort: ", request->status.ToString());
    DropStep(steps_.begin()->first);
  }
  if (std::string wrong = CheckAnswers(); !wrong.empty()) return wrong;
  if (!waiting_.empty()) return "a request of an aborted step was not answered";
  if (harness_.core().owned() != 0) return "the engine still counts requests as its own";
  if (std::string wrong = CheckSequences(); !wrong.empty()) return wrong;
  std::vector<SequenceId> ids;
  std::vector<SequenceId> absent;
  for (const ModelSequence& sequence : sequences_) ids.push_back(sequence.id);
  harness_.core().ReleaseSequences(harness_.tenant(), ids, &absent);
  const scheduler::EngineStats stats = harness_.core().Stats();
  stats_.slices_fused = static_cast<int64_t>(stats.slices_fused);
  stats_.slice_waits_expired = static_cast<int64_t>(stats.slice_waits_expired);
  stats_.slice_waits_skipped = static_cast<int64_t>(stats.slice_waits_skipped);
  return harness_.core().Stats().page_groups_used == 0 ? "" : "pages are left over";
}

}  // namespace mla::simulation
