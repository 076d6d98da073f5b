#include "tests/simulation/simulator/checks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/simulation/oracle/patterns.h"
#include "tests/simulation/simulator/fairness.h"
#include "tests/simulation/simulator/prefixes.h"
#include "tests/simulation/simulator/transport.h"

namespace mla::simulation {
namespace {

constexpr size_t kKept = 64;
constexpr int kSettleRounds = 4000;
double At(const std::byte* base, bool f32, size_t index) {
  if (f32) {
    float value;
    std::memcpy(&value, base + index * 4, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, base + index * 2, sizeof(bits));
  return FromBits(bits);
}

}  // namespace

void Checks::CheckAnswers() {
  for (auto& request : w_.done) {
    if (!w_.failed()) CheckAnswer(request.get());
    w_.Hash(static_cast<uint64_t>(request->status.code()));
    w_.Hash(request->step_id);
    if (answered_.size() < kKept) {
      answered_.push_back(std::move(request));
    } else {
      answered_[next_answered_++ % kKept] = std::move(request);
    }
  }
  w_.done.clear();
}

void Checks::FinishAborts() {
  for (auto it = w_.oracle->steps.begin(); it != w_.oracle->steps.end();) {
    OracleStep& step = (it++)->second;
    if (!step.aborting) continue;
    if (step.pending > 0 || step.ending) {
      w_.Fail(absl::StrCat("a step ended with ", step.pending, " requests of it not answered"));
      return;
    }
    ++w_.counts.aborts;
    w_.oracle->ApplyAbort(step.key, w_.Now());
  }
}

void Checks::CheckAnswer(SimRequest* request) {
  using scheduler::RequestKind;
  if (!request->memory.empty()) w_.transport->CheckGuards(*request);
  if (request->immediate && request->step_aborted != (request->detail.reason == "step_aborted")) {
    w_.Fail("an answer does not say whether the step was aborted");
  }
  if (request->kind == RequestKind::kBeginStep) {
    CheckBeginAnswer(request);
  } else if (request->kind == RequestKind::kAttend) {
    CheckAttendAnswer(request);
  } else if (request->kind == RequestKind::kEndStep) {
    CheckEndAnswer(request);
  } else {
    w_.Foretold("AbortStep", request->status, request->expect);
  }
}

void Checks::CheckBeginAnswer(SimRequest* request) {
  const OracleBegin& wanted = request->wanted;
  const bool in_doubt = !request->joins && request->expect.none() &&
                        request->detail.reason == "pages_exhausted" &&
                        w_.oracle->PagesInDoubt(wanted, w_.pinned);
  if (!request->status.ok() && in_doubt) {
    ++w_.counts.refusals;
    return;
  }
  if (!w_.Foretold("BeginStep", request->status, request->expect)) return;
  OracleStep* step = w_.oracle->FindStep(wanted.tenant, wanted.id);
  if (step == nullptr) {
    request->step_key = w_.oracle->ApplyBegin(wanted, w_.called_at);
    step = w_.oracle->StepOf(request->step_key);
    w_.fairness->NotePages(*step);
  } else if (std::count(step->streams.begin(), step->streams.end(), wanted.stream) == 0) {
    step->streams.push_back(wanted.stream);
  }
  // It was taken when the call began; launches may have been waited for since.
  step->touched = std::max(step->touched, w_.called_at);
  if (request->total_rows != step->total ||
      request->joined != static_cast<int>(step->streams.size()) ||
      request->lease_ms != step->lease_ns / 1'000'000) {
    w_.Fail(absl::StrCat("BeginStep answers ", request->total_rows, " rows, ", request->joined,
                         " streams, lease ", request->lease_ms, " ms; foretold ", step->total, ", ",
                         step->streams.size(), ", ", step->lease_ns / 1'000'000));
  }
}

void Checks::CheckAttendAnswer(SimRequest* request) {
  if (request->immediate) {
    w_.Foretold("Attend", request->status, request->expect);
    return;
  }
  OracleStep* step = w_.oracle->StepOf(request->step_key);
  if (step == nullptr) {
    w_.Fail("an answer for a step that has ended");
    return;
  }
  --step->pending;
  if (!request->status.ok()) {
    ++w_.counts.refusals;
    CheckAttendFailure(*request, step);
    return;
  }
  const scheduler::AttendArgs& args = request->attend;
  const int end = args.row_begin + args.row_count;
  if (request->differs) w_.Fail("other KV bytes for rows that are stored were accepted");
  if (end > static_cast<int>(step->layers[args.layer].size())) {
    w_.Fail("answered before its KV rows were sent");
  }
  if (!w_.failed() && request->form != Form::kAppend) CheckOutput(*request, *step);
}

void Checks::CheckAttendFailure(const SimRequest& request, OracleStep* step) {
  const std::string& reason = request.detail.reason;
  const scheduler::AttendArgs& args = request.attend;
  const auto layer = static_cast<size_t>(args.layer);
  const bool writes = args.has_kv && !request.repeat;
  const int end = args.row_begin + args.row_count;
  const bool waits =
      !args.has_kv && (end > static_cast<int>(step->layers[layer].size()) || step->broken[layer]);
  bool right = false;
  if (reason == "launch_failed") {
    // Launches after the failed one fail with it, older ones do not. If the device is lost, all
    // fail.
    right = w_.device->lost() || (request.launch != 0 && request.launch >= w_.first_failed);
    step->aborting = step->failed = true;
  } else if (reason == "step_aborted") {
    right = step->aborting && request.step_aborted;
  } else if (reason == "deadline") {
    right = w_.Now() >= request.deadline_ns && absl::IsDeadlineExceeded(request.status);
    if (writes) step->broken[layer] = true;
  } else if (reason == "kv_rows_missing") {
    right = waits && w_.Now() - request.arrival_ns >= w_.kv_wait_ms * 1'000'000;
  } else if (reason == "rows_out_of_order") {
    right = step->broken[layer] && args.has_kv;
  } else if (reason == "kv_rows_differ") {
    right = request.differs;
  }
  // The engine's timer then continues to the steps' leases, although this step is idle.
  w_.gave_up |=
      reason == "deadline" || reason == "kv_rows_missing" || reason == "rows_out_of_order";
  if (right) return;
  w_.Fail(absl::StrCat("Attend failed without cause: ", request.status.ToString(), " reason '",
                       reason, "' launch ", request.launch));
}

void Checks::CheckOutput(const SimRequest& request, const OracleStep& step) {
  ++w_.counts.answers_checked;
  w_.counts.lists_checked += request.lists != 0 ? 1 : 0;
  const scheduler::AttendArgs& args = request.attend;
  const Shape& shape = w_.oracle->models[step.model].shape;
  const std::byte* q = request.memory.data() + Room(request.kv_bytes);
  const std::byte* o = q + Room(request.q_bytes);
  const std::byte* lse = o + Room(request.o_bytes);
  const bool f32 = args.o_dtype == kernels::DType::kF32;
  const bool expanded = request.form == Form::kExpanded;
  const int dim = expanded ? shape.nope + shape.rope : shape.row_dim();
  std::vector<float> query(static_cast<size_t>(dim));
  std::vector<double> want;
  for (int row = 0; row < args.row_count; ++row) {
    for (int head = 0; head < args.num_heads; ++head) {
      const uint64_t key = request.q_key + static_cast<uint64_t>(row * 8 + head);
      for (int i = 0; i < dim; ++i) query[i] = FromBits(PatternBits(key, i, step.tenant));
      const double sum =
          w_.oracle->Attend(step, args.layer, args.row_begin + row, request.form,
                            args.head_offset + head, query.data(), request.lists, &want);
      const size_t packed = static_cast<size_t>(row) * args.num_heads + head;
      for (size_t i = 0; i < want.size(); ++i) {
        const double got = At(o, f32, packed * want.size() + i);
        const double most = 1e-4 * (1 + std::abs(want[i])) + (f32 ? 0 : std::abs(want[i]) / 200);
        if (std::abs(got - want[i]) <= most) continue;
        w_.Fail(absl::StrCat("step ", step.id, " layer ", args.layer, " row ", args.row_begin + row,
                             " head ", args.head_offset + head, " element ", i, ": got ", got,
                             ", the dense answer is ", want[i]));
        return;
      }
      const double got_sum = args.want_lse ? At(lse, true, packed) : sum;
      if (got_sum != sum && !(std::abs(got_sum - sum) <= 1e-4 * (1 + std::abs(sum)))) {
        w_.Fail(absl::StrCat("log-sum-exp: got ", At(lse, true, packed), ", want ", sum));
        return;
      }
      w_.Hash(static_cast<uint64_t>(static_cast<int64_t>(want[0] * 1e6)));
    }
  }
}

void Checks::CheckEndAnswer(SimRequest* request) {
  if (request->immediate) {
    w_.Foretold("EndStep", request->status, request->expect);
    return;
  }
  OracleStep* step = w_.oracle->StepOf(request->step_key);
  if (step == nullptr) {
    w_.Fail("EndStep of a step that has ended was not refused at once");
    return;
  }
  step->ending = false;
  if (request->detail.reason == "step_aborted" && step->aborting) {
    ++w_.counts.refusals;
    return;
  }
  if (step->failed)
    w_.Fail(absl::StrCat("a step whose launch failed: ", request->status.ToString()));
  if (step->pending > 0) w_.Fail("EndStep was answered before requests of its step");
  std::vector<int> rows(request->end.committed_rows.begin(), request->end.committed_rows.end());
  int needed = 0;
  for (size_t i = 0; i < step->members.size(); ++i) {
    if (rows.size() <= i) rows.push_back(step->members[i].rows);
    if (rows[i] > 0) needed = step->members[i].offset + rows[i];
  }
  Reasons expect;
  bool in_doubt = false;
  for (size_t layer = 0; layer < step->layers.size(); ++layer) {
    expect.AddIf(static_cast<int>(step->layers[layer].size()) < needed, "rows_missing");
    in_doubt |= step->broken[layer];
  }
  if (expect.none() && in_doubt && request->detail.reason == "rows_missing") {
    ++w_.counts.refusals;
    return;
  }
  if (!w_.Foretold("EndStep", request->status, expect)) return;
  ++w_.counts.commits;
  for (size_t i = 0; i < step->members.size(); ++i) {
    const int64_t length = step->members[i].start + rows[i];
    if (request->lengths.size() != step->members.size() || request->lengths[i] != length) {
      w_.Fail("EndStep answers other lengths");
    }
    w_.Hash(static_cast<uint64_t>(length));
  }
  w_.oracle->ApplyEnd(step, rows, w_.Now());
}

void Checks::CheckBooks() {
  w_.transport->BeforeCall();
  const scheduler::EngineStats stats = w_.engine->Stats();
  w_.transport->AfterCall();
  w_.prefixes->CountPinned(stats);
  bytes_cached_ = stats.kv_bytes_cached;
  w_.counts.pages_evicted = static_cast<int64_t>(stats.prefix.evicted);
  const struct {
    const char* what;
    int64_t got, want;
  } books[] = {
      {"sequences", stats.sequences, static_cast<int64_t>(w_.oracle->sequences.size())},
      {"open steps", stats.open_steps, static_cast<int64_t>(w_.oracle->steps.size())},
      {"models", stats.models, w_.oracle->models_open()},
      {"models expired", static_cast<int64_t>(stats.models_expired), w_.oracle->models_expired()},
      {"streams", stats.streams, static_cast<int64_t>(w_.streams.size())},
      {"page groups in use", stats.page_groups_used, w_.oracle->groups_used()},
      {"bytes in use", stats.kv_bytes_used, w_.oracle->bytes_used()},
      {"leases expired", static_cast<int64_t>(stats.leases_expired), w_.oracle->expired()},
      {"page groups taken less given back", PagesOnTheBooks(stats), w_.oracle->groups_used()},
      {"requests", stats.requests_waiting + stats.requests_running, OpenAttends()},
  };
  for (const auto& book : books) {
    if (book.got == book.want) continue;
    w_.Fail(absl::StrCat(book.what, ": ", book.got, ", foretold ", book.want));
  }
  CheckQuotas();
  if (w_.Chance(10)) {
    if (const std::string wrong = w_.engine->CheckInvariants(); !wrong.empty()) w_.Fail(wrong);
  }
}

// Checks the product's figures of what each tenant uses and may use.
void Checks::CheckQuotas() {
  using scheduler::Resource;
  const int tenant = 1 + static_cast<int>(w_.Pick(static_cast<uint64_t>(w_.Tenants())));
  const scheduler::TenantUsage usage = w_.engine->tenants()->Usage(w_.TenantName(tenant));
  int64_t queued = 0;
  for (const auto& request : w_.requests) queued += request->owner == tenant;
  const struct {
    Resource resource;
    int64_t used;
  } uses[] = {
      {Resource::kSequences, w_.oracle->SequencesOf(tenant)},
      {Resource::kModels, w_.oracle->ModelsOf(tenant)},
      {Resource::kOpenSteps, w_.oracle->StepsOf(tenant)},
      {Resource::kQueuedRequests, queued},
  };
  // Page groups that page work or the prefix cache keeps in addition count for the tenant, too.
  const int64_t bytes = usage.used[Resource::kKvBytes], least = w_.oracle->KvBytesOf(tenant);
  if (w_.pinned == 0 && (bytes < least || bytes > least + bytes_cached_)) {
    w_.Fail(absl::StrCat("tenant ", tenant, " uses ", bytes, " bytes, foretold ", least, " to ",
                         least + bytes_cached_));
  }
  for (const auto& use : uses) {
    if (usage.used[use.resource] == use.used) continue;
    w_.Fail(absl::StrCat("tenant ", tenant, " uses ", usage.used[use.resource], " ",
                         scheduler::RowOf(use.resource).name, ", foretold ", use.used));
  }
}

int64_t Checks::PagesOnTheBooks(const scheduler::EngineStats& stats) {
  return static_cast<int64_t>(stats.page_groups_taken - stats.page_groups_released -
                              stats.page_groups_expired - stats.page_groups_truncated -
                              stats.page_groups_uncommitted - stats.page_groups_evicted) -
         stats.page_groups_cached;
}

int64_t Checks::OpenAttends() const {
  return std::count_if(w_.requests.begin(), w_.requests.end(), [](const auto& request) {
    return request->kind == scheduler::RequestKind::kAttend;
  });
}

// Returns true if a request that is unanswered although the engine is idle waits for its client.
bool Checks::MayWait(const SimRequest& request) {
  const OracleStep* step = w_.oracle->StepOf(request.step_key);
  if (step == nullptr) return false;
  if (request.kind == scheduler::RequestKind::kEndStep) return step->pending > 0;
  const scheduler::AttendArgs& args = request.attend;
  const auto layer = static_cast<size_t>(args.layer);
  if (step->broken[layer]) return true;
  return !args.has_kv &&
         args.row_begin + args.row_count > static_cast<int>(step->layers[layer].size());
}

// Lets everything that can run be computed. Time passes only as launches and waits for head slices
// need it.
void Checks::Settle() {
  bool waited = false;
  for (int round = 0; round < kSettleRounds && !w_.failed(); ++round) {
    const int64_t done_at = w_.device->NextDone();
    if (done_at > w_.Now()) w_.clock.Advance(done_at - w_.Now());
    if (w_.transport->Poll() || w_.device->NextDone() >= 0) {
      waited = false;
      continue;
    }
    if (waited) break;
    waited = true;
    w_.clock.Advance(w_.slice_wait_us * 1000);
  }
  if (w_.device->NextDone() >= 0) w_.Fail("work does not end after faults have ended");
  for (const auto& request : w_.requests) {
    if (!MayWait(*request)) w_.Fail("a request that could run is not answered");
  }
}

bool Checks::Launch() {
  const int times = 1 + static_cast<int>(w_.Pick(3));
  bool any = false;
  for (int i = 0; i < times && !w_.failed(); ++i) any |= w_.transport->Poll();
  if (w_.Chance(3)) Settle();
  if (any) w_.Trace(static_cast<uint64_t>(w_.device->launches()), w_.requests.size());
  return any;
}

void Checks::ReleaseAll(int tenant) {
  std::vector<scheduler::SequenceId> ids, absent;
  w_.transport->BeforeCall();
  for (const auto& [id, sequence] : w_.oracle->sequences) {
    if (sequence.tenant != tenant) continue;
    ids.push_back(id);
    if (OracleStep* step = w_.oracle->StepOf(sequence.step)) step->aborting = true;
  }
  w_.engine->ReleaseSequences(w_.TenantName(tenant), ids, &absent);
  CheckAnswers();
  FinishAborts();
  for (const uint64_t id : ids) w_.oracle->ApplyRelease(id, w_.Now());
  w_.transport->AfterCall();
  if (!absent.empty()) w_.Fail("a sequence is gone that should be there");
}

void Checks::Finish() {
  w_.op = Op::kCount;
  if (!w_.device->lost()) w_.device->Arm(DeviceFault::kNone);
  w_.transport->Poll();
  Settle();
  w_.clock.Advance(w_.kv_wait_ms * 1'000'000);
  if (!w_.failed()) Settle();
  if (!w_.failed() && !w_.requests.empty()) w_.Fail("a request is not answered at the end");
  if (w_.failed()) return;
  for (int tenant = 1; tenant <= w_.Tenants() && !w_.failed(); ++tenant) ReleaseAll(tenant);
  if (w_.failed()) return;
  CheckBooks();
  if (w_.oracle->groups_used() != 0 || !w_.oracle->steps.empty()) w_.Fail("something is left over");
  if (const std::string wrong = w_.engine->CheckInvariants(); !wrong.empty()) w_.Fail(wrong);
  std::string violation;
  w_.calls->Finish(&violation);
  if (!violation.empty()) w_.Fail(violation);
}

}  // namespace mla::simulation
