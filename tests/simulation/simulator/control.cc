#include "tests/simulation/simulator/control.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "mla/v1/model.pb.h"
#include "mla/v1/sequence.pb.h"
#include "tests/simulation/oracle/patterns.h"
#include "tests/simulation/simulator/checks.h"
#include "tests/simulation/simulator/prefixes.h"
#include "tests/simulation/simulator/transport.h"

namespace mla::simulation {
namespace {

constexpr int64_t kMicro = 1'000;
constexpr int64_t kMilli = 1'000'000;

// The reply to a refused call; for a call that goes on to the engine, a placeholder.
absl::Status NotSent(const absl::Status& parsed) {
  return parsed.ok() ? absl::UnknownError("not sent yet") : parsed;
}

v1::ModelSpec ModelMessage(const std::string& name, const Shape& shape) {
  v1::ModelSpec message;
  message.set_model_id(name);
  v1::Geometry* geometry = message.mutable_geometry();
  geometry->set_num_heads(static_cast<uint32_t>(shape.heads));
  geometry->set_kv_lora_rank(static_cast<uint32_t>(shape.lora));
  geometry->set_rope_dim(static_cast<uint32_t>(shape.rope));
  geometry->set_nope_dim(static_cast<uint32_t>(shape.nope));
  geometry->set_v_dim(static_cast<uint32_t>(shape.v));
  message.set_layers(static_cast<uint32_t>(shape.layers));
  message.set_page_size(static_cast<uint32_t>(shape.page));
  message.set_softmax_scale(shape.scale);
  message.set_rope_owner(v1::ROPE_OWNER_WORKER);
  message.set_attention(v1::ATTENTION_KIND_SPARSE_V32);
  message.set_top_k(kMostListed);
  if (shape.digest != 0)
    message.set_weights_digest(std::string(32, static_cast<char>(shape.digest)));
  return message;
}

}  // namespace

bool Control::Register(int tenant) {
  const std::string name = absl::StrCat("model-", w_.Pick(2));
  const Shape shape = w_.shapes[w_.Pick(w_.shapes.size())];
  scheduler::ModelSpec spec;
  w_.transport->BeforeCall();
  const int64_t lease_ms = w_.leases_models ? 50 + static_cast<int64_t>(w_.Pick(500)) : 0;
  absl::Status status =
      server::ParseModelSpec(ModelMessage(name, shape), w_.engine->limits(), &spec);
  if (status.ok()) {
    status = w_.engine->RegisterModel(w_.TenantName(tenant), spec, lease_ms).status();
  }
  w_.transport->AfterCall();
  w_.Trace(static_cast<uint64_t>(tenant), name.back(), static_cast<uint64_t>(status.code()));
  const Reasons expect = w_.oracle->CheckRegister(tenant, name, shape);
  if (w_.Foretold("Register", status, expect)) {
    w_.oracle->ApplyRegister(tenant, name, shape, w_.next_key++, lease_ms * kMilli, w_.Now());
  }
  return true;
}

bool Control::Unregister() {
  const int model = w_.AnyModel(1 + static_cast<int>(w_.Pick(w_.tenants)));
  if (model < 0) return false;
  OracleModel& known = w_.oracle->models[model];
  w_.transport->BeforeCall();
  const absl::Status status = w_.engine->UnregisterModel(w_.TenantName(known.tenant), known.name);
  w_.transport->AfterCall();
  w_.Trace(static_cast<uint64_t>(model), static_cast<uint64_t>(status.code()));
  if (w_.Foretold("Unregister", status, w_.oracle->CheckUnregister(model))) {
    w_.oracle->ApplyUnregister(model);
  } else {
    w_.oracle->TouchModel(model, w_.Now());
  }
  return true;
}

bool Control::LoadWeights() {
  w_.transport->BeforeCall();
  w_.transport->AfterCall();
  const int index = w_.AnyModel(1 + static_cast<int>(w_.Pick(w_.tenants)));
  if (index < 0 || w_.oracle->models[index].shape.nope == 0) return false;
  OracleContents& contents = w_.oracle->ContentsOf(index);
  if (contents.weights) return false;
  OracleModel& model = w_.oracle->models[index];
  const Shape& s = model.shape;
  const std::string tenant = w_.TenantName(model.tenant);
  const scheduler::UploadId upload = w_.engine->NewUpload();
  const int layer_count = w_.Chance(20) ? static_cast<int>(w_.Pick(s.layers)) : s.layers;
  w_.transport->BeforeCall();
  for (int layer = 0; layer < layer_count; ++layer) {
    std::vector<uint16_t> bits;
    for (const bool value : {false, true}) {
      for (int head = 0; head < s.heads; ++head) {
        for (int i = 0; i < s.lora * (value ? s.v : s.nope); ++i) {
          bits.push_back(Oracle::Weight(contents, layer, head, value, i));
        }
      }
    }
    const absl::Status status =
        w_.engine->LoadWeights(tenant, model.name, upload, layer, 0, s.heads,
                               std::as_bytes(std::span<const uint16_t>(bits)));
    if (!status.ok()) w_.Fail(absl::StrCat("LoadWeights: ", status.ToString()));
  }
  const auto missing = w_.engine->CommitWeights(tenant, model.name, upload);
  w_.transport->AfterCall();
  if (!missing.ok() || missing->size() > static_cast<size_t>(s.layers - layer_count)) {
    w_.Fail("CommitWeights: the missing layers are not the layers that were not sent");
    return true;
  }
  contents.weights = missing->empty();
  w_.oracle->TouchModel(index, w_.Now());
  w_.Trace(static_cast<uint64_t>(index), contents.weights);
  return true;
}

bool Control::Open(int tenant) {
  int model = w_.AnyModel(tenant);
  if (model < 0) return Register(tenant);
  // Another tenant's model is not found, unless the caller has one of that name.
  v1::OpenRequest message;
  message.set_model_id(w_.Chance(95) ? w_.oracle->models[model].name : "no-such-model");
  if (message.model_id() == "no-such-model") model = -1;
  message.set_client_id(absl::StrCat("client-", tenant));
  const int64_t lease_ms = w_.Chance(80) ? 0 : 20 + static_cast<int64_t>(w_.Pick(500));
  message.set_lease_ms(static_cast<uint32_t>(lease_ms));
  DrawnPrefix drawn;
  if (model >= 0 && w_.Chance(50)) drawn = w_.prefixes->DrawPrefix(model);
  w_.prefixes->FillPrefix(drawn, message.mutable_prefix());
  if (model >= 0 && drawn.pages.size() > w_.prefixes->MostPages(model)) {
    drawn = DrawnPrefix();
    message.clear_prefix();
  }
  if (drawn.pages.empty()) message.set_request_id(w_.NewRequestId());
  if (!drawn.pages.empty() && w_.tier_groups > 0 && w_.Chance(60)) {
    // A worker does the same, so that the sequence begins with restored rows.
    w_.prefixes->SendHint(scheduler::HintKind::kPrefetch, model, drawn);
    if (w_.failed()) return true;
  }
  scheduler::OpenArgs args;
  args.tenant = w_.TenantName(tenant);
  w_.transport->BeforeCall();
  absl::Status status = server::ParseOpen(message, w_.engine->limits(), &args);
  absl::StatusOr<scheduler::SequenceInfo> info = NotSent(status);
  if (status.ok()) info = w_.engine->OpenSequence(args);
  w_.transport->AfterCall();
  if (w_.Foretold("Open", info.status(), w_.oracle->CheckOpen(tenant, model))) {
    if (info->epoch != 1) w_.Fail("Open: a new sequence has another epoch");
    if (w_.oracle->sequences.contains(info->id)) w_.Fail("Open: an id was given twice");
    w_.oracle->ApplyOpen(info->id, model, lease_ms * kMilli, w_.Now());
    w_.prefixes->RenameFrom(info->id, w_.prefixes->CheckFound(*info, drawn), drawn);
    OracleOrigin& origin = w_.oracle->sequences.at(info->id).origin;
    origin.request_id = message.request_id();
    origin.model = message.model_id();
    origin.client = message.client_id();
  } else if (model >= 0 && !w_.oracle->draining) {
    w_.oracle->TouchModel(model, w_.Now());
  }
  w_.Trace(static_cast<uint64_t>(tenant), static_cast<uint64_t>(info.status().code()));
  return true;
}

bool Control::Fork() {
  OracleSequence* parent = w_.AnySequence(0, /*free=*/w_.Chance(85));
  if (parent == nullptr) return false;
  // Sometimes as another tenant, which must not find it.
  const int tenant = w_.Chance(95) ? parent->tenant : 1 + static_cast<int>(w_.Pick(w_.tenants));
  const uint64_t epoch = parent->epoch + (w_.Chance(95) ? 0 : 1);
  const int64_t length = static_cast<int64_t>(w_.Pick(parent->length() + (w_.Chance(95) ? 1 : 3)));
  SendFork(tenant, *parent, epoch, length);
  return true;
}

uint64_t Control::SendFork(int tenant, const OracleSequence& parent, uint64_t epoch,
                           int64_t length) {
  const uint64_t id = parent.id;
  v1::ForkRequest message;
  message.set_sequence_id(id);
  message.set_expected_epoch(epoch);
  if (length < parent.length() || w_.Chance(50)) message.set_length(static_cast<uint64_t>(length));
  const int64_t fork_length = message.has_length() ? length : parent.length();
  message.set_request_id(w_.NewRequestId());
  scheduler::ForkArgs args;
  args.tenant = w_.TenantName(tenant);
  absl::Status status = server::ParseFork(message, w_.engine->limits(), &args);
  w_.transport->BeforeCall();
  const Reasons expect = w_.oracle->CheckFork(tenant, id, epoch, fork_length);
  absl::StatusOr<scheduler::SequenceInfo> info = NotSent(status);
  if (status.ok()) info = w_.engine->ForkSequence(args);
  const bool granted = w_.Foretold("Fork", info.status(), expect);
  if (granted) {
    if (info->length != fork_length) w_.Fail("Fork: the child has another length");
    w_.oracle->ApplyFork(info->id, id, fork_length, 0, w_.Now());
    OracleOrigin& origin = w_.oracle->sequences.at(info->id).origin;
    origin.request_id = message.request_id();
    origin.fork = true;
    origin.parent = id;
    origin.epoch = epoch;
    if (message.has_length()) origin.length = length;
  }
  w_.transport->AfterCall();
  w_.Trace(id, static_cast<uint64_t>(fork_length), static_cast<uint64_t>(info.status().code()));
  return granted ? info->id : 0;
}

bool Control::Truncate() {
  OracleSequence* sequence = w_.AnySequence(0, /*free=*/w_.Chance(85));
  if (sequence == nullptr) return false;
  const int tenant = w_.Chance(95) ? sequence->tenant : 1 + static_cast<int>(w_.Pick(w_.tenants));
  const uint64_t id = sequence->id;
  const uint64_t epoch = sequence->epoch + (w_.Chance(95) ? 0 : 1);
  v1::TruncateRequest message;
  message.set_length(w_.Pick(sequence->length() + (w_.Chance(95) ? 1 : 3)));
  int64_t length = 0;
  absl::Status status = server::ParseTruncate(message, &length);
  w_.transport->BeforeCall();
  const Reasons expect = w_.oracle->CheckTruncate(tenant, id, epoch, length);
  absl::StatusOr<scheduler::SequenceInfo> info = NotSent(status);
  if (status.ok()) {
    info = w_.engine->TruncateSequence(w_.TenantName(tenant), id, length, epoch);
  }
  if (w_.Foretold("Truncate", info.status(), expect)) {
    w_.oracle->ApplyTruncate(id, length, w_.Now());
    if (info->epoch != epoch + 1 || info->length != length) w_.Fail("Truncate: another epoch");
  }
  w_.transport->AfterCall();
  w_.Trace(id, static_cast<uint64_t>(length), static_cast<uint64_t>(info.status().code()));
  return true;
}

bool Control::Release() {
  OracleSequence* first = w_.AnySequence(0, /*free=*/false);
  if (first == nullptr || w_.Chance(30)) return false;
  const int tenant = first->tenant;
  v1::ReleaseRequest message;
  message.add_sequence_ids(first->id);
  if (w_.Chance(20)) message.add_sequence_ids(w_.AnySequence(0, false)->id);
  if (w_.Chance(10)) message.add_sequence_ids(w_.Pick(~uint64_t{0}));
  std::vector<scheduler::SequenceId> ids, absent;
  if (!server::ParseRelease(message, w_.engine->limits(), &ids).ok()) w_.Fail("ParseRelease");
  w_.transport->BeforeCall();
  std::vector<uint64_t> known;
  for (const uint64_t id : ids) {
    OracleSequence* sequence = w_.oracle->Find(tenant, id);
    if (sequence == nullptr || std::count(known.begin(), known.end(), id) > 0) continue;
    known.push_back(id);
    if (OracleStep* step = w_.oracle->StepOf(sequence->step)) step->aborting = true;
  }
  const int released = w_.engine->ReleaseSequences(w_.TenantName(tenant), ids, &absent);
  w_.checks->CheckAnswers();
  w_.checks->FinishAborts();
  for (const uint64_t id : known) w_.oracle->ApplyRelease(id, w_.Now());
  w_.transport->AfterCall();
  if (released != static_cast<int>(known.size()) || absent.size() != ids.size() - known.size()) {
    w_.Fail(absl::StrCat("Release: ", released, " of ", known.size(), " sequences were released"));
  }
  w_.Trace(ids.size(), known.size());
  return true;
}

bool Control::Renew() {
  OracleSequence* first = w_.AnySequence(0, /*free=*/false);
  if (first == nullptr) return false;
  const int tenant = first->tenant;
  v1::RenewLeaseRequest message;
  const bool by_client = w_.Chance(30);
  if (by_client) {
    message.set_client_id(absl::StrCat("client-", tenant));
  } else {
    message.add_sequence_ids(first->id);
    if (w_.Chance(20)) message.add_sequence_ids(w_.AnySequence(0, false)->id);
  }
  const int64_t wanted_ms = w_.Chance(60) ? 0 : 20 + static_cast<int64_t>(w_.Pick(800));
  message.set_lease_ms(static_cast<uint32_t>(wanted_ms));
  scheduler::SequenceSelection selection;
  selection.tenant = w_.TenantName(tenant);
  int64_t lease_ms = 0;
  const absl::Status status =
      server::ParseRenew(message, w_.engine->limits(), &selection, &lease_ms);
  if (!status.ok()) w_.Fail(absl::StrCat("ParseRenew: ", status.ToString()));
  w_.transport->BeforeCall();
  std::vector<scheduler::SequenceId> absent;
  const int renewed = w_.engine->RenewLeases(selection, lease_ms, &absent);
  int expected = 0;
  for (auto& [id, sequence] : w_.oracle->sequences) {
    const auto& ids = selection.ids;
    const int named = by_client ? static_cast<int>(!sequence.of_export)
                                : static_cast<int>(std::count(ids.begin(), ids.end(), id));
    if (sequence.tenant != tenant || named == 0) continue;
    w_.oracle->Renew(&sequence, wanted_ms * kMilli, w_.Now());
    expected += named;
  }
  w_.transport->AfterCall();
  if (renewed != expected) w_.Fail(absl::StrCat("Renew: ", renewed, " of ", expected));
  w_.Trace(static_cast<uint64_t>(tenant), static_cast<uint64_t>(renewed));
  return true;
}

bool Control::Get() {
  const int tenant = 1 + static_cast<int>(w_.Pick(w_.tenants));
  w_.transport->BeforeCall();
  const auto list = w_.engine->GetSequences({w_.TenantName(tenant), {}, ""});
  CheckLists(tenant);
  w_.transport->AfterCall();
  size_t owned = 0;
  for (const auto& [id, sequence] : w_.oracle->sequences) owned += sequence.tenant == tenant;
  if (list.sequences.size() != owned) {
    w_.Fail(absl::StrCat("Get: tenant ", tenant, " has ", list.sequences.size(), " sequences, not ",
                         owned));
  }
  for (const scheduler::SequenceInfo& info : list.sequences) {
    const OracleSequence* sequence = w_.oracle->Find(tenant, info.id);
    if (sequence == nullptr) {
      w_.Fail("Get: a sequence that is not the tenant's");
      continue;
    }
    if (info.length != sequence->length() || info.epoch != sequence->epoch ||
        info.in_step != sequence->busy() ||
        info.page_groups != static_cast<int64_t>(sequence->groups.size()) ||
        info.lease_left_ms != std::max<int64_t>(0, sequence->deadline - w_.Now()) / kMilli) {
      w_.Fail(absl::StrCat("Get: length ", info.length, " epoch ", info.epoch, " in step ",
                           info.in_step, " groups ", info.page_groups, " lease ",
                           info.lease_left_ms, " ms; foretold ", sequence->length(), " ",
                           sequence->epoch, " ", sequence->step != 0, " ", sequence->groups.size(),
                           " ", (sequence->deadline - w_.Now()) / kMilli));
    }
  }
  w_.Trace(static_cast<uint64_t>(tenant), owned);
  return owned > 0;
}

// Checks the replies to a tenant that names its sequences and models, and other tenants' of those
// names.
void Control::CheckLists(int tenant) {
  const std::string name = w_.TenantName(tenant);
  size_t owned = 0, of_own_client = 0;
  scheduler::SequenceSelection by_id{name, {}, ""};
  for (const auto& [id, sequence] : w_.oracle->sequences) {
    by_id.ids.push_back(id);
    owned += sequence.tenant == tenant;
    of_own_client += sequence.tenant == tenant && !sequence.of_export;
  }
  const auto named = w_.engine->GetSequences(by_id);
  if (!by_id.ids.empty() && (named.sequences.size() != owned ||
                             named.not_found.size() != w_.oracle->sequences.size() - owned)) {
    w_.Fail(
        absl::StrCat("Get by id: tenant ", tenant, " has ", named.sequences.size(), " of ", owned));
  }
  const auto of_client = [&](int client) {
    return w_.engine->GetSequences({name, {}, absl::StrCat("client-", client)}).sequences.size();
  };
  if (of_client(tenant) != of_own_client || of_client(tenant + 1) != 0) {
    w_.Fail(absl::StrCat("Get by client: tenant ", tenant, " has not ", of_own_client));
  }
  size_t models = 0, in_models = 0, open = 0;
  for (const scheduler::ModelInfo& info : w_.engine->ListModels(name)) {
    ++models;
    in_models += static_cast<size_t>(info.sequences);
  }
  for (const OracleModel& model : w_.oracle->models) open += model.open && model.tenant == tenant;
  if (models != open || in_models != owned) {
    w_.Fail(absl::StrCat("List: tenant ", tenant, " has ", models, " models with ", in_models,
                         " sequences, not ", open, " with ", owned));
  }
}

bool Control::OpenStream() {
  if (w_.streams.size() >= 10) return false;
  const int tenant = 1 + static_cast<int>(w_.Pick(w_.tenants));
  w_.transport->BeforeCall();
  w_.streams.push_back({w_.engine->OpenStream(w_.TenantName(tenant)), tenant});
  w_.transport->AfterCall();
  w_.Trace(w_.streams.back().id);
  return true;
}

bool Control::CloseStream() {
  if (w_.streams.size() <= static_cast<size_t>(w_.tenants)) return false;
  const size_t index = w_.Pick(w_.streams.size());
  const Stream stream = w_.streams[index];
  const auto same = [&](const Stream& other) { return other.tenant == stream.tenant; };
  if (std::count_if(w_.streams.begin(), w_.streams.end(), same) < 2) return false;
  w_.streams.erase(w_.streams.begin() + static_cast<long>(index));
  w_.transport->BeforeCall();
  for (auto& [key, step] : w_.oracle->steps) {
    step.aborting |= std::count(step.streams.begin(), step.streams.end(), stream.id) > 0;
  }
  w_.engine->CloseStream(stream.id);
  w_.transport->AfterCall();
  for (const auto& request : w_.requests) {
    if (request->stream == stream.id)
      w_.Fail("CloseStream left a request of the stream unanswered");
  }
  w_.Trace(stream.id);
  return true;
}

bool Control::Time() {
  w_.transport->Poll();
  int64_t nanos = 0;
  switch (w_.Pick(8)) {
    case 0:
      nanos = kMicro * static_cast<int64_t>(1 + w_.Pick(300));
      break;
    case 1:
      nanos = kMicro * std::max<int64_t>(1, w_.slice_wait_us);
      break;
    case 2:
      nanos = kMilli * static_cast<int64_t>(1 + w_.Pick(10));
      break;
    case 3:
      nanos = kMilli * w_.kv_wait_ms + static_cast<int64_t>(w_.Pick(3)) - 1;
      break;
    case 4:
      nanos = w_.oracle_limits.step_lease_ns - 1 + static_cast<int64_t>(w_.Pick(3));
      break;
    case 5:
      if (w_.Chance(70)) return false;
      nanos = w_.oracle_limits.sequence_lease_ns - 1 + static_cast<int64_t>(w_.Pick(3));
      break;
    default:
      nanos = w_.device->NextDone() - w_.Now();
      break;
  }
  if (nanos <= 0) return false;
  w_.clock.Advance(nanos);
  // Sometimes leaves the timers to the next call, as if the engine were late.
  w_.late = w_.Chance(30);
  w_.Trace(static_cast<uint64_t>(nanos), w_.late);
  if (!w_.late) w_.transport->Poll();
  return true;
}

bool Control::ArmFault() {
  if (w_.fault_percent == 0 || !w_.Chance(w_.fault_percent)) return false;
  constexpr DeviceFault kFaults[] = {DeviceFault::kSubmit, DeviceFault::kWaitAllRan,
                                     DeviceFault::kWaitSomeRan, DeviceFault::kWaitNoneRan};
  const uint64_t fault = w_.Pick(std::size(kFaults));
  w_.device->Arm(kFaults[fault]);
  w_.Trace(fault);
  return true;
}

}  // namespace mla::simulation
