// Simulator: the checks of every answer and after every operation, and the end of a run.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/simulation/oracle/patterns.h"
#include "tests/simulation/simulator/simulator.h"

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

void Simulator::CheckAnswers() {
  for (auto& request : done_) {
    if (!failed()) CheckAnswer(request.get());
    Hash(static_cast<uint64_t>(request->status.code()));
    Hash(request->step_id);
    if (answered_.size() < kKept) {
      answered_.push_back(std::move(request));
    } else {
      answered_[next_answered_++ % kKept] = std::move(request);
    }
  }
  done_.clear();
}

void Simulator::FinishAborts() {
  for (auto it = oracle_->steps.begin(); it != oracle_->steps.end();) {
    OracleStep& step = (it++)->second;
    if (!step.aborting) continue;
    if (step.pending > 0 || step.ending) {
      Fail(absl::StrCat("a step ended with ", step.pending, " requests of it not answered"));
      return;
    }
    ++counts_.aborts;
    oracle_->ApplyAbort(step.key, Now());
  }
}

void Simulator::CheckAnswer(SimRequest* request) {
  using scheduler::RequestKind;
  if (!request->memory.empty()) CheckGuards(*request);
  if (request->immediate && request->step_aborted != (request->detail.reason == "step_aborted")) {
    Fail("an answer does not say whether the step was aborted");
  }
  if (request->kind == RequestKind::kBeginStep) {
    CheckBeginAnswer(request);
  } else if (request->kind == RequestKind::kAttend) {
    CheckAttendAnswer(request);
  } else if (request->kind == RequestKind::kEndStep) {
    CheckEndAnswer(request);
  } else {
    Foretold("AbortStep", request->status, request->expect);
  }
}

void Simulator::CheckBeginAnswer(SimRequest* request) {
  const OracleBegin& wanted = request->wanted;
  const bool in_doubt = !request->joins && request->expect.none() &&
                        request->detail.reason == "pages_exhausted" &&
                        oracle_->PagesInDoubt(wanted, pinned_);
  if (!request->status.ok() && in_doubt) {
    ++counts_.refusals;
    return;
  }
  if (!Foretold("BeginStep", request->status, request->expect)) return;
  OracleStep* step = oracle_->FindStep(wanted.tenant, wanted.id);
  if (step == nullptr) {
    request->step_key = oracle_->ApplyBegin(wanted, called_at_);
    step = oracle_->StepOf(request->step_key);
    NotePages(*step);
  } else if (std::count(step->streams.begin(), step->streams.end(), wanted.stream) == 0) {
    step->streams.push_back(wanted.stream);
  }
  // It was taken when the call began; launches may have been waited for since.
  step->touched = std::max(step->touched, called_at_);
  if (request->total_rows != step->total ||
      request->joined != static_cast<int>(step->streams.size()) ||
      request->lease_ms != step->lease_ns / 1'000'000) {
    Fail(absl::StrCat("BeginStep answers ", request->total_rows, " rows, ", request->joined,
                      " streams, lease ", request->lease_ms, " ms; foretold ", step->total, ", ",
                      step->streams.size(), ", ", step->lease_ns / 1'000'000));
  }
}

void Simulator::CheckAttendAnswer(SimRequest* request) {
  if (request->immediate) {
    Foretold("Attend", request->status, request->expect);
    return;
  }
  OracleStep* step = oracle_->StepOf(request->step_key);
  if (step == nullptr) {
    Fail("an answer for a step that has ended");
    return;
  }
  --step->pending;
  if (!request->status.ok()) {
    ++counts_.refusals;
    CheckAttendFailure(*request, step);
    return;
  }
  const scheduler::AttendArgs& args = request->attend;
  const int end = args.row_begin + args.row_count;
  if (request->differs) Fail("other KV bytes for rows that are stored were accepted");
  if (end > static_cast<int>(step->layers[args.layer].size())) {
    Fail("answered before its KV rows were sent");
  }
  if (!failed() && request->form != Form::kAppend) CheckOutput(*request, *step);
}

void Simulator::CheckAttendFailure(const SimRequest& request, OracleStep* step) {
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
    right = device_->lost() || (request.launch != 0 && request.launch >= first_failed_);
    step->aborting = step->failed = true;
  } else if (reason == "step_aborted") {
    right = step->aborting && request.step_aborted;
  } else if (reason == "deadline") {
    right = Now() >= request.deadline_ns && absl::IsDeadlineExceeded(request.status);
    if (writes) step->broken[layer] = true;
  } else if (reason == "kv_rows_missing") {
    right = waits && Now() - request.arrival_ns >= kv_wait_ms_ * 1'000'000;
  } else if (reason == "rows_out_of_order") {
    right = step->broken[layer] && args.has_kv;
  } else if (reason == "kv_rows_differ") {
    right = request.differs;
  }
  // The engine's timer then continues to the steps' leases, although this step is idle.
  gave_up_ |= reason == "deadline" || reason == "kv_rows_missing" || reason == "rows_out_of_order";
  if (right) return;
  Fail(absl::StrCat("Attend failed without cause: ", request.status.ToString(), " reason '", reason,
                    "' launch ", request.launch));
}

void Simulator::CheckOutput(const SimRequest& request, const OracleStep& step) {
  ++counts_.answers_checked;
  counts_.lists_checked += request.lists != 0 ? 1 : 0;
  const scheduler::AttendArgs& args = request.attend;
  const Shape& shape = oracle_->models[step.model].shape;
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
          oracle_->Attend(step, args.layer, args.row_begin + row, request.form,
                          args.head_offset + head, query.data(), request.lists, &want);
      const size_t packed = static_cast<size_t>(row) * args.num_heads + head;
      for (size_t i = 0; i < want.size(); ++i) {
        const double got = At(o, f32, packed * want.size() + i);
        const double most = 1e-4 * (1 + std::abs(want[i])) + (f32 ? 0 : std::abs(want[i]) / 200);
        if (std::abs(got - want[i]) <= most) continue;
        Fail(absl::StrCat("step ", step.id, " layer ", args.layer, " row ", args.row_begin + row,
                          " head ", args.head_offset + head, " element ", i, ": got ", got,
                          ", the dense answer is ", want[i]));
        return;
      }
      const double got_sum = args.want_lse ? At(lse, true, packed) : sum;
      if (got_sum != sum && !(std::abs(got_sum - sum) <= 1e-4 * (1 + std::abs(sum)))) {
        Fail(absl::StrCat("log-sum-exp: got ", At(lse, true, packed), ", want ", sum));
        return;
      }
      Hash(static_cast<uint64_t>(static_cast<int64_t>(want[0] * 1e6)));
    }
  }
}

void Simulator::CheckEndAnswer(SimRequest* request) {
  if (request->immediate) {
    Foretold("EndStep", request->status, request->expect);
    return;
  }
  OracleStep* step = oracle_->StepOf(request->step_key);
  if (step == nullptr) {
    Fail("EndStep of a step that has ended was not refused at once");
    return;
  }
  step->ending = false;
  if (request->detail.reason == "step_aborted" && step->aborting) {
    ++counts_.refusals;
    return;
  }
  if (step->failed) Fail(absl::StrCat("a step whose launch failed: ", request->status.ToString()));
  if (step->pending > 0) Fail("EndStep was answered before requests of its step");
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
    ++counts_.refusals;
    return;
  }
  if (!Foretold("EndStep", request->status, expect)) return;
  ++counts_.commits;
  for (size_t i = 0; i < step->members.size(); ++i) {
    const int64_t length = step->members[i].start + rows[i];
    if (request->lengths.size() != step->members.size() || request->lengths[i] != length) {
      Fail("EndStep answers other lengths");
    }
    Hash(static_cast<uint64_t>(length));
  }
  oracle_->ApplyEnd(step, rows, Now());
}

void Simulator::CheckBooks() {
  BeforeCall();
  const scheduler::EngineStats stats = engine_->Stats();
  AfterCall();
  CountPinned(stats);
  bytes_cached_ = stats.kv_bytes_cached;
  counts_.pages_evicted = static_cast<int64_t>(stats.prefix.evicted);
  const struct {
    const char* what;
    int64_t got, want;
  } books[] = {
      {"sequences", stats.sequences, static_cast<int64_t>(oracle_->sequences.size())},
      {"open steps", stats.open_steps, static_cast<int64_t>(oracle_->steps.size())},
      {"models", stats.models, oracle_->models_open()},
      {"models expired", static_cast<int64_t>(stats.models_expired), oracle_->models_expired()},
      {"streams", stats.streams, static_cast<int64_t>(streams_.size())},
      {"page groups in use", stats.page_groups_used, oracle_->groups_used()},
      {"bytes in use", stats.kv_bytes_used, oracle_->bytes_used()},
      {"leases expired", static_cast<int64_t>(stats.leases_expired), oracle_->expired()},
      {"page groups taken less given back", PagesOnTheBooks(stats), oracle_->groups_used()},
      {"requests", stats.requests_waiting + stats.requests_running, OpenAttends()},
  };
  for (const auto& book : books) {
    if (book.got == book.want) continue;
    Fail(absl::StrCat(book.what, ": ", book.got, ", foretold ", book.want));
  }
  CheckQuotas();
  if (Chance(10)) {
    if (const std::string wrong = engine_->CheckInvariants(); !wrong.empty()) Fail(wrong);
  }
}

// Checks the product's figures of what each tenant uses and may use.
void Simulator::CheckQuotas() {
  using scheduler::Resource;
  const int tenant = 1 + static_cast<int>(Pick(static_cast<uint64_t>(Tenants())));
  const scheduler::TenantUsage usage = engine_->tenants()->Usage(TenantName(tenant));
  int64_t queued = 0;
  for (const auto& request : requests_) queued += request->owner == tenant;
  const struct {
    Resource resource;
    int64_t used;
  } uses[] = {
      {Resource::kSequences, oracle_->SequencesOf(tenant)},
      {Resource::kModels, oracle_->ModelsOf(tenant)},
      {Resource::kOpenSteps, oracle_->StepsOf(tenant)},
      {Resource::kQueuedRequests, queued},
  };
  // Page groups that page work or the prefix cache keeps in addition count for the tenant, too.
  const int64_t bytes = usage.used[Resource::kKvBytes], least = oracle_->KvBytesOf(tenant);
  if (pinned_ == 0 && (bytes < least || bytes > least + bytes_cached_)) {
    Fail(absl::StrCat("tenant ", tenant, " uses ", bytes, " bytes, foretold ", least, " to ",
                      least + bytes_cached_));
  }
  for (const auto& use : uses) {
    if (usage.used[use.resource] == use.used) continue;
    Fail(absl::StrCat("tenant ", tenant, " uses ", usage.used[use.resource], " ",
                      scheduler::RowOf(use.resource).name, ", foretold ", use.used));
  }
}

int64_t Simulator::PagesOnTheBooks(const scheduler::EngineStats& stats) {
  return static_cast<int64_t>(stats.page_groups_taken - stats.page_groups_released -
                              stats.page_groups_expired - stats.page_groups_truncated -
                              stats.page_groups_uncommitted - stats.page_groups_evicted) -
         stats.page_groups_cached;
}

int64_t Simulator::OpenAttends() const {
  return std::count_if(requests_.begin(), requests_.end(), [](const auto& request) {
    return request->kind == scheduler::RequestKind::kAttend;
  });
}

// Returns true if a request that is unanswered although the engine is idle waits for its client.
bool Simulator::MayWait(const SimRequest& request) {
  const OracleStep* step = oracle_->StepOf(request.step_key);
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
void Simulator::Settle() {
  bool waited = false;
  for (int round = 0; round < kSettleRounds && !failed(); ++round) {
    const int64_t done_at = device_->NextDone();
    if (done_at > Now()) clock_.Advance(done_at - Now());
    if (Poll() || device_->NextDone() >= 0) {
      waited = false;
      continue;
    }
    if (waited) break;
    waited = true;
    clock_.Advance(slice_wait_us_ * 1000);
  }
  if (device_->NextDone() >= 0) Fail("work does not end after faults have ended");
  for (const auto& request : requests_) {
    if (!MayWait(*request)) Fail("a request that could run is not answered");
  }
}

bool Simulator::Launch() {
  const int times = 1 + static_cast<int>(Pick(3));
  bool any = false;
  for (int i = 0; i < times && !failed(); ++i) any |= Poll();
  if (Chance(3)) Settle();
  if (any) Trace(static_cast<uint64_t>(device_->launches()), requests_.size());
  return any;
}

void Simulator::ReleaseAll(int tenant) {
  std::vector<scheduler::SequenceId> ids, absent;
  BeforeCall();
  for (const auto& [id, sequence] : oracle_->sequences) {
    if (sequence.tenant != tenant) continue;
    ids.push_back(id);
    if (OracleStep* step = oracle_->StepOf(sequence.step)) step->aborting = true;
  }
  engine_->ReleaseSequences(TenantName(tenant), ids, &absent);
  CheckAnswers();
  FinishAborts();
  for (const uint64_t id : ids) oracle_->ApplyRelease(id, Now());
  AfterCall();
  if (!absent.empty()) Fail("a sequence is gone that should be there");
}

void Simulator::Finish() {
  op_ = Op::kCount;
  if (!device_->lost()) device_->Arm(DeviceFault::kNone);
  Poll();
  Settle();
  clock_.Advance(kv_wait_ms_ * 1'000'000);
  if (!failed()) Settle();
  if (!failed() && !requests_.empty()) Fail("a request is not answered at the end");
  if (failed()) return;
  for (int tenant = 1; tenant <= Tenants() && !failed(); ++tenant) ReleaseAll(tenant);
  if (failed()) return;
  CheckBooks();
  if (oracle_->groups_used() != 0 || !oracle_->steps.empty()) Fail("something is left over");
  if (const std::string wrong = engine_->CheckInvariants(); !wrong.empty()) Fail(wrong);
  std::string violation;
  calls_->Finish(&violation);
  if (!violation.empty()) Fail(violation);
}

}  // namespace mla::simulation
