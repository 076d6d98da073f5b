// Simulator: calls that are sent again, as by a client whose reply was lost. The same call gets the
// same reply and changes nothing. The same request id with other contents is refused. A call that
// names an ended step is told how it ended.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "mla/v1/sequence.pb.h"
#include "tests/simulation/simulator/simulator.h"

namespace mla::simulation {
namespace {}  // namespace

std::string Simulator::NewRequestId() {
  if (Chance(50)) return "";
  return absl::StrCat("request-", next_key_++);
}

bool Simulator::Resend() {
  switch (Pick(3)) {
    case 0:
      return ResendCreation();
    case 1:
      return ResendTruncate();
    default:
      return ResendToClosedStep();
  }
}

// Repeats Open or Fork of an existing sequence, by its tenant or by another one.
bool Simulator::ResendCreation() {
  BeforeCall();
  std::vector<const OracleSequence*> named;
  for (const auto& [id, sequence] : oracle_->sequences) {
    if (!sequence.origin.request_id.empty()) named.push_back(&sequence);
  }
  if (named.empty()) return false;
  const OracleSequence& known = *named[Pick(named.size())];
  const int tenant = Chance(85) ? known.tenant : 1 + static_cast<int>(Pick(tenants_));
  const bool changed = Chance(30);
  ++counts_.resent;
  return known.origin.fork && !(changed && Chance(50)) ? ResendFork(tenant, known, changed)
                                                       : ResendOpen(tenant, known, changed);
}

bool Simulator::ResendOpen(int tenant, const OracleSequence& known, bool changed) {
  const bool own = tenant == known.tenant;
  const int model = own ? known.model : AnyModel(tenant);
  if (model < 0) return false;
  OracleOrigin origin;
  origin.request_id = known.origin.request_id;
  origin.model = oracle_->models[model].name;
  origin.client = absl::StrCat("client-", tenant, own && changed ? "-changed" : "");
  v1::OpenRequest message;
  message.set_model_id(origin.model);
  message.set_request_id(origin.request_id);
  message.set_client_id(origin.client);
  scheduler::OpenArgs args;
  args.tenant = TenantName(tenant);
  const absl::Status parsed = server::ParseOpen(message, engine_->limits(), &args);
  if (!parsed.ok()) Fail(absl::StrCat("ParseOpen: ", parsed.ToString()));
  const OracleSequence* repeats = oracle_->OpenedBy(tenant, origin.request_id);
  Reasons expect;
  if (repeats == nullptr) {
    expect = oracle_->CheckOpen(tenant, model);
  } else {
    expect.AddIf(oracle_->draining, "draining");
    expect.AddIf(!(repeats->origin == origin), "request_id_reused");
  }
  const auto info = engine_->OpenSequence(args);
  const bool granted = Foretold("Open, again", info.status(), expect);
  if (granted) CheckRepeated(*info, repeats);
  if (granted && repeats == nullptr) {
    oracle_->ApplyOpen(info->id, model, 0, Now());
    oracle_->sequences.at(info->id).origin = origin;
  } else if (!oracle_->draining) {
    oracle_->TouchModel(model, Now());
  }
  AfterCall();
  Trace(static_cast<uint64_t>(tenant), changed, static_cast<uint64_t>(info.status().code()));
  return true;
}

bool Simulator::ResendFork(int tenant, const OracleSequence& known, bool changed) {
  OracleOrigin origin = known.origin;
  if (changed) ++origin.epoch;
  v1::ForkRequest message;
  message.set_sequence_id(origin.parent);
  message.set_expected_epoch(origin.epoch);
  if (origin.length >= 0) message.set_length(static_cast<uint64_t>(origin.length));
  message.set_request_id(origin.request_id);
  scheduler::ForkArgs args;
  args.tenant = TenantName(tenant);
  const absl::Status parsed = server::ParseFork(message, engine_->limits(), &args);
  if (!parsed.ok()) Fail(absl::StrCat("ParseFork: ", parsed.ToString()));
  const OracleSequence* repeats = oracle_->OpenedBy(tenant, origin.request_id);
  Reasons expect;
  expect.AddIf(oracle_->draining, "draining");
  if (repeats == nullptr) {
    expect.Add("sequence_not_found");  // the parent is another tenant's
  } else {
    expect.AddIf(!(repeats->origin == origin), "request_id_reused");
  }
  const auto info = engine_->ForkSequence(args);
  if (Foretold("Fork, again", info.status(), expect)) CheckRepeated(*info, repeats);
  AfterCall();
  Trace(static_cast<uint64_t>(tenant), changed, static_cast<uint64_t>(info.status().code()));
  return true;
}

void Simulator::CheckRepeated(const scheduler::SequenceInfo& info, const OracleSequence* repeats) {
  if (repeats == nullptr) {
    if (info.length != 0 || oracle_->sequences.contains(info.id)) Fail("Open: not a new sequence");
    return;
  }
  if (info.id == repeats->id && info.epoch == repeats->epoch && info.length == repeats->length()) {
    return;
  }
  Fail(absl::StrCat("a call sent again answers sequence ", info.id, " epoch ", info.epoch,
                    " length ", info.length, "; foretold ", repeats->id, " ", repeats->epoch, " ",
                    repeats->length()));
}

bool Simulator::ResendTruncate() {
  BeforeCall();
  std::vector<const OracleSequence*> truncated;
  for (const auto& [id, sequence] : oracle_->sequences) {
    if (sequence.truncated_from != 0) truncated.push_back(&sequence);
  }
  if (truncated.empty()) return false;
  const OracleSequence& known = *truncated[Pick(truncated.size())];
  const int64_t length = known.truncated_length + (Chance(30) ? 1 : 0);
  const uint64_t epoch = known.truncated_from;
  const Reasons expect = oracle_->CheckTruncate(known.tenant, known.id, epoch, length);
  const auto info = engine_->TruncateSequence(TenantName(known.tenant), known.id, length, epoch);
  ++counts_.resent;
  if (Foretold("Truncate, again", info.status(), expect)) CheckRepeated(*info, &known);
  Trace(known.id, static_cast<uint64_t>(length), static_cast<uint64_t>(info.status().code()));
  AfterCall();
  return true;
}

// Sends Attend, EndStep or AbortStep of a step that was committed or aborted.
bool Simulator::ResendToClosedStep() {
  if (oracle_->closed.empty()) return false;
  const OracleClosed& closed = oracle_->closed[Pick(oracle_->closed.size())];
  const OracleStep& step = closed.step;
  const OracleModel& model = oracle_->models[step.model];
  auto request = std::make_unique<SimRequest>(this);
  request->stream = AnyStream(step.tenant)->id;
  request->step_id = step.id;
  request->step_key = step.key;
  request->owner = step.tenant;
  request->immediate = true;
  request->expect.Add(closed.aborted ? "step_aborted" : "step_not_found");
  const uint64_t kind = Pick(3);
  if (kind == 0) {
    const auto known = engine_->FindModel(TenantName(step.tenant), model.name);
    if (known == nullptr || known->layers != model.shape.layers) return false;
    AttendSpec spec = DrawAttend(step);
    spec.form = Form::kAbsorbed;
    spec.row = 0;
    spec.rows = 1;
    if (!ParseRows(*known, step, spec, request.get()).ok()) return false;
    FillTensors(request.get(), step, spec);
    request->kind = scheduler::RequestKind::kAttend;
  } else {
    request->kind =
        kind == 1 ? scheduler::RequestKind::kEndStep : scheduler::RequestKind::kAbortStep;
    v1::EndStep message;
    message.set_step_id(step.id);
    const absl::Status parsed = server::ParseEndStep(message, engine_->limits(), &request->end);
    if (!parsed.ok()) Fail(absl::StrCat("ParseEndStep: ", parsed.ToString()));
  }
  ++counts_.resent;
  Trace(step.id, kind, closed.aborted);
  if (Submit(std::move(request))) Poll();
  return true;
}

}  // namespace mla::simulation
