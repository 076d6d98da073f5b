#include "tests/simulation/simulator/repeats.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "mla/v1/sequence.pb.h"
#include "tests/simulation/simulator/steps.h"
#include "tests/simulation/simulator/transport.h"

namespace mla::simulation {

bool Repeats::Resend() {
  switch (w_.Pick(3)) {
    case 0:
      return ResendCreation();
    case 1:
      return ResendTruncate();
    default:
      return ResendToClosedStep();
  }
}

// Repeats Open or Fork of an existing sequence, by its tenant or by another one.
bool Repeats::ResendCreation() {
  w_.transport->BeforeCall();
  std::vector<const OracleSequence*> named;
  for (const auto& [id, sequence] : w_.oracle->sequences) {
    if (!sequence.origin.request_id.empty()) named.push_back(&sequence);
  }
  if (named.empty()) return false;
  const OracleSequence& known = *named[w_.Pick(named.size())];
  const int tenant = w_.Chance(85) ? known.tenant : 1 + static_cast<int>(w_.Pick(w_.tenants));
  const bool changed = w_.Chance(30);
  ++w_.counts.resent;
  return known.origin.fork && !(changed && w_.Chance(50)) ? ResendFork(tenant, known, changed)
                                                          : ResendOpen(tenant, known, changed);
}

bool Repeats::ResendOpen(int tenant, const OracleSequence& known, bool changed) {
  const bool own = tenant == known.tenant;
  const int model = own ? known.model : w_.AnyModel(tenant);
  if (model < 0) return false;
  OracleOrigin origin;
  origin.request_id = known.origin.request_id;
  origin.model = w_.oracle->models[model].name;
  origin.client = absl::StrCat("client-", tenant, own && changed ? "-changed" : "");
  v1::OpenRequest message;
  message.set_model_id(origin.model);
  message.set_request_id(origin.request_id);
  message.set_client_id(origin.client);
  scheduler::OpenArgs args;
  args.tenant = w_.TenantName(tenant);
  const absl::Status parsed = server::ParseOpen(message, w_.engine->limits(), &args);
  if (!parsed.ok()) w_.Fail(absl::StrCat("ParseOpen: ", parsed.ToString()));
  const OracleSequence* repeats = w_.oracle->OpenedBy(tenant, origin.request_id);
  Reasons expect;
  if (repeats == nullptr) {
    expect = w_.oracle->CheckOpen(tenant, model);
  } else {
    expect.AddIf(w_.oracle->draining, "draining");
    expect.AddIf(!(repeats->origin == origin), "request_id_reused");
  }
  const auto info = w_.engine->OpenSequence(args);
  const bool granted = w_.Foretold("Open, again", info.status(), expect);
  if (granted) CheckRepeated(*info, repeats);
  if (granted && repeats == nullptr) {
    w_.oracle->ApplyOpen(info->id, model, 0, w_.Now());
    w_.oracle->sequences.at(info->id).origin = origin;
  } else if (!w_.oracle->draining) {
    w_.oracle->TouchModel(model, w_.Now());
  }
  w_.transport->AfterCall();
  w_.Trace(static_cast<uint64_t>(tenant), changed, static_cast<uint64_t>(info.status().code()));
  return true;
}

bool Repeats::ResendFork(int tenant, const OracleSequence& known, bool changed) {
  OracleOrigin origin = known.origin;
  if (changed) ++origin.epoch;
  v1::ForkRequest message;
  message.set_sequence_id(origin.parent);
  message.set_expected_epoch(origin.epoch);
  if (origin.length >= 0) message.set_length(static_cast<uint64_t>(origin.length));
  message.set_request_id(origin.request_id);
  scheduler::ForkArgs args;
  args.tenant = w_.TenantName(tenant);
  const absl::Status parsed = server::ParseFork(message, w_.engine->limits(), &args);
  if (!parsed.ok()) w_.Fail(absl::StrCat("ParseFork: ", parsed.ToString()));
  const OracleSequence* repeats = w_.oracle->OpenedBy(tenant, origin.request_id);
  Reasons expect;
  expect.AddIf(w_.oracle->draining, "draining");
  if (repeats == nullptr) {
    expect.Add("sequence_not_found");  // the parent is another tenant's
  } else {
    expect.AddIf(!(repeats->origin == origin), "request_id_reused");
  }
  const auto info = w_.engine->ForkSequence(args);
  if (w_.Foretold("Fork, again", info.status(), expect)) CheckRepeated(*info, repeats);
  w_.transport->AfterCall();
  w_.Trace(static_cast<uint64_t>(tenant), changed, static_cast<uint64_t>(info.status().code()));
  return true;
}

void Repeats::CheckRepeated(const scheduler::SequenceInfo& info, const OracleSequence* repeats) {
  if (repeats == nullptr) {
    if (info.length != 0 || w_.oracle->sequences.contains(info.id))
      w_.Fail("Open: not a new sequence");
    return;
  }
  if (info.id == repeats->id && info.epoch == repeats->epoch && info.length == repeats->length()) {
    return;
  }
  w_.Fail(absl::StrCat("a call sent again answers sequence ", info.id, " epoch ", info.epoch,
                       " length ", info.length, "; foretold ", repeats->id, " ", repeats->epoch,
                       " ", repeats->length()));
}

bool Repeats::ResendTruncate() {
  w_.transport->BeforeCall();
  std::vector<const OracleSequence*> truncated;
  for (const auto& [id, sequence] : w_.oracle->sequences) {
    if (sequence.truncated_from != 0) truncated.push_back(&sequence);
  }
  if (truncated.empty()) return false;
  const OracleSequence& known = *truncated[w_.Pick(truncated.size())];
  const int64_t length = known.truncated_length + (w_.Chance(30) ? 1 : 0);
  const uint64_t epoch = known.truncated_from;
  const Reasons expect = w_.oracle->CheckTruncate(known.tenant, known.id, epoch, length);
  const auto info =
      w_.engine->TruncateSequence(w_.TenantName(known.tenant), known.id, length, epoch);
  ++w_.counts.resent;
  if (w_.Foretold("Truncate, again", info.status(), expect)) CheckRepeated(*info, &known);
  w_.Trace(known.id, static_cast<uint64_t>(length), static_cast<uint64_t>(info.status().code()));
  w_.transport->AfterCall();
  return true;
}

// Sends Attend, EndStep or AbortStep of a step that was committed or aborted.
bool Repeats::ResendToClosedStep() {
  if (w_.oracle->closed.empty()) return false;
  const OracleClosed& closed = w_.oracle->closed[w_.Pick(w_.oracle->closed.size())];
  const OracleStep& step = closed.step;
  const OracleModel& model = w_.oracle->models[step.model];
  auto request = std::make_unique<SimRequest>(w_.transport);
  request->stream = w_.AnyStream(step.tenant)->id;
  request->step_id = step.id;
  request->step_key = step.key;
  request->owner = step.tenant;
  request->immediate = true;
  request->expect.Add(closed.aborted ? "step_aborted" : "step_not_found");
  const uint64_t kind = w_.Pick(3);
  if (kind == 0) {
    const auto known = w_.engine->FindModel(w_.TenantName(step.tenant), model.name);
    if (known == nullptr || known->layers != model.shape.layers) return false;
    AttendSpec spec = w_.steps->DrawAttend(step);
    spec.form = Form::kAbsorbed;
    spec.row = 0;
    spec.rows = 1;
    if (!w_.transport->ParseRows(*known, step, spec, request.get()).ok()) return false;
    w_.transport->FillTensors(request.get(), step, spec);
    request->kind = scheduler::RequestKind::kAttend;
  } else {
    request->kind =
        kind == 1 ? scheduler::RequestKind::kEndStep : scheduler::RequestKind::kAbortStep;
    v1::EndStep message;
    message.set_step_id(step.id);
    const absl::Status parsed = server::ParseEndStep(message, w_.engine->limits(), &request->end);
    if (!parsed.ok()) w_.Fail(absl::StrCat("ParseEndStep: ", parsed.ToString()));
  }
  ++w_.counts.resent;
  w_.Trace(step.id, kind, closed.aborted);
  if (w_.transport->Submit(std::move(request))) w_.transport->Poll();
  return true;
}

}  // namespace mla::simulation
