// Simulator: calls of the control plane, time and faults.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "mla/v1/model.pb.h"
#include "mla/v1/sequence.pb.h"
#include "tests/simulation/oracle/patterns.h"
#include "tests/simulation/simulator/simulator.h"

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

int Simulator::AnyModel(int tenant) {
  std::vector<int> open;
  for (size_t i = 0; i < oracle_->models.size(); ++i) {
    const OracleModel& model = oracle_->models[i];
    if (model.open && model.tenant == tenant) open.push_back(static_cast<int>(i));
  }
  return open.empty() ? -1 : open[Pick(open.size())];
}

OracleSequence* Simulator::AnySequence(int tenant, bool free) {
  std::vector<OracleSequence*> candidates;
  for (auto& [id, sequence] : oracle_->sequences) {
    if (tenant != 0 && sequence.tenant != tenant) continue;
    // Clients do not know the forks that hold rows of an export.
    if (!sequence.of_export && (!free || !sequence.busy())) candidates.push_back(&sequence);
  }
  return candidates.empty() ? nullptr : candidates[Pick(candidates.size())];
}

bool Simulator::Foretold(const char* call, const absl::Status& status, const Reasons& expect) {
  Hash(static_cast<uint64_t>(status.code()));
  if (status.ok() && expect.none()) return true;
  if (status.ok() || !expect.Has(DetailOf(status).reason)) {
    Fail(absl::StrCat(call, ": foretold ", expect.Join(), ", got ", status.ToString()));
  }
  ++counts_.refusals;
  return false;
}

bool Simulator::Register(int tenant) {
  const std::string name = absl::StrCat("model-", Pick(2));
  const Shape shape = shapes_[Pick(shapes_.size())];
  scheduler::ModelSpec spec;
  BeforeCall();
  const int64_t lease_ms = leases_models_ ? 50 + static_cast<int64_t>(Pick(500)) : 0;
  absl::Status status = server::ParseModelSpec(ModelMessage(name, shape), engine_->limits(), &spec);
  if (status.ok()) {
    status = engine_->RegisterModel(TenantName(tenant), spec, lease_ms).status();
  }
  AfterCall();
  Trace(static_cast<uint64_t>(tenant), name.back(), static_cast<uint64_t>(status.code()));
  const Reasons expect = oracle_->CheckRegister(tenant, name, shape);
  if (Foretold("Register", status, expect)) {
    oracle_->ApplyRegister(tenant, name, shape, next_key_++, lease_ms * kMilli, Now());
  }
  return true;
}  // namespace mla::simulation

bool Simulator::Unregister() {
  const int model = AnyModel(1 + static_cast<int>(Pick(tenants_)));
  if (model < 0) return false;
  OracleModel& known = oracle_->models[model];
  BeforeCall();
  const absl::Status status = engine_->UnregisterModel(TenantName(known.tenant), known.name);
  AfterCall();
  Trace(static_cast<uint64_t>(model), static_cast<uint64_t>(status.code()));
  if (Foretold("Unregister", status, oracle_->CheckUnregister(model))) {
    oracle_->ApplyUnregister(model);
  } else {
    oracle_->TouchModel(model, Now());
  }
  return true;
}

bool Simulator::LoadWeights() {
  BeforeCall();
  AfterCall();
  const int index = AnyModel(1 + static_cast<int>(Pick(tenants_)));
  if (index < 0 || oracle_->models[index].shape.nope == 0) return false;
  OracleContents& contents = oracle_->ContentsOf(index);
  if (contents.weights) return false;
  OracleModel& model = oracle_->models[index];
  const Shape& s = model.shape;
  const std::string tenant = TenantName(model.tenant);
  const scheduler::UploadId upload = engine_->NewUpload();
  const int layer_count = Chance(20) ? static_cast<int>(Pick(s.layers)) : s.layers;
  BeforeCall();
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
        engine_->LoadWeights(tenant, model.name, upload, layer, 0, s.heads,
                             std::as_bytes(std::span<const uint16_t>(bits)));
    if (!status.ok()) Fail(absl::StrCat("LoadWeights: ", status.ToString()));
  }
  const auto missing = engine_->CommitWeights(tenant, model.name, upload);
  AfterCall();
  if (!missing.ok() || missing->size() > static_cast<size_t>(s.layers - layer_count)) {
    Fail("CommitWeights: the missing layers are not the layers that were not sent");
    return true;
  }
  contents.weights = missing->empty();
  oracle_->TouchModel(index, Now());
  Trace(static_cast<uint64_t>(index), contents.weights);
  return true;
}

bool Simulator::Open(int tenant) {
  int model = AnyModel(tenant);
  if (model < 0) return Register(tenant);
  // Another tenant's model is not found, unless the caller has one of that name.
  v1::OpenRequest message;
  message.set_model_id(Chance(95) ? oracle_->models[model].name : "no-such-model");
  if (message.model_id() == "no-such-model") model = -1;
  message.set_client_id(absl::StrCat("client-", tenant));
  const int64_t lease_ms = Chance(80) ? 0 : 20 + static_cast<int64_t>(Pick(500));
  message.set_lease_ms(static_cast<uint32_t>(lease_ms));
  DrawnPrefix drawn;
  if (model >= 0 && Chance(50)) drawn = DrawPrefix(model);
  FillPrefix(drawn, message.mutable_prefix());
  if (model >= 0 && drawn.pages.size() > MostPages(model)) {
    drawn = DrawnPrefix();
    message.clear_prefix();
  }
  if (drawn.pages.empty()) message.set_request_id(NewRequestId());
  if (!drawn.pages.empty() && tier_groups_ > 0 && Chance(60)) {
    // A worker does the same, so that the sequence begins with restored rows.
    SendHint(scheduler::HintKind::kPrefetch, model, drawn);
    if (failed()) return true;
  }
  scheduler::OpenArgs args;
  args.tenant = TenantName(tenant);
  BeforeCall();
  absl::Status status = server::ParseOpen(message, engine_->limits(), &args);
  absl::StatusOr<scheduler::SequenceInfo> info = NotSent(status);
  if (status.ok()) info = engine_->OpenSequence(args);
  AfterCall();
  if (Foretold("Open", info.status(), oracle_->CheckOpen(tenant, model))) {
    if (info->epoch != 1) Fail("Open: a new sequence has another epoch");
    if (oracle_->sequences.contains(info->id)) Fail("Open: an id was given twice");
    oracle_->ApplyOpen(info->id, model, lease_ms * kMilli, Now());
    RenameFrom(info->id, CheckFound(*info, drawn), drawn);
    OracleOrigin& origin = oracle_->sequences.at(info->id).origin;
    origin.request_id = message.request_id();
    origin.model = message.model_id();
    origin.client = message.client_id();
  } else if (model >= 0 && !oracle_->draining) {
    oracle_->TouchModel(model, Now());
  }
  Trace(static_cast<uint64_t>(tenant), static_cast<uint64_t>(info.status().code()));
  return true;
}

bool Simulator::Fork() {
  OracleSequence* parent = AnySequence(0, /*free=*/Chance(85));
  if (parent == nullptr) return false;
  // Sometimes as another tenant, which must not find it.
  const int tenant = Chance(95) ? parent->tenant : 1 + static_cast<int>(Pick(tenants_));
  const uint64_t epoch = parent->epoch + (Chance(95) ? 0 : 1);
  const int64_t length = static_cast<int64_t>(Pick(parent->length() + (Chance(95) ? 1 : 3)));
  SendFork(tenant, *parent, epoch, length);
  return true;
}

uint64_t Simulator::SendFork(int tenant, const OracleSequence& parent, uint64_t epoch,
                             int64_t length) {
  const uint64_t id = parent.id;
  v1::ForkRequest message;
  message.set_sequence_id(id);
  message.set_expected_epoch(epoch);
  if (length < parent.length() || Chance(50)) message.set_length(static_cast<uint64_t>(length));
  const int64_t fork_length = message.has_length() ? length : parent.length();
  message.set_request_id(NewRequestId());
  scheduler::ForkArgs args;
  args.tenant = TenantName(tenant);
  absl::Status status = server::ParseFork(message, engine_->limits(), &args);
  BeforeCall();
  const Reasons expect = oracle_->CheckFork(tenant, id, epoch, fork_length);
  absl::StatusOr<scheduler::SequenceInfo> info = NotSent(status);
  if (status.ok()) info = engine_->ForkSequence(args);
  const bool granted = Foretold("Fork", info.status(), expect);
  if (granted) {
    if (info->length != fork_length) Fail("Fork: the child has another length");
    oracle_->ApplyFork(info->id, id, fork_length, 0, Now());
    OracleOrigin& origin = oracle_->sequences.at(info->id).origin;
    origin.request_id = message.request_id();
    origin.fork = true;
    origin.parent = id;
    origin.epoch = epoch;
    if (message.has_length()) origin.length = length;
  }
  AfterCall();
  Trace(id, static_cast<uint64_t>(fork_length), static_cast<uint64_t>(info.status().code()));
  return granted ? info->id : 0;
}

bool Simulator::Truncate() {
  OracleSequence* sequence = AnySequence(0, /*free=*/Chance(85));
  if (sequence == nullptr) return false;
  const int tenant = Chance(95) ? sequence->tenant : 1 + static_cast<int>(Pick(tenants_));
  const uint64_t id = sequence->id;
  const uint64_t epoch = sequence->epoch + (Chance(95) ? 0 : 1);
  v1::TruncateRequest message;
  message.set_length(Pick(sequence->length() + (Chance(95) ? 1 : 3)));
  int64_t length = 0;
  absl::Status status = server::ParseTruncate(message, &length);
  BeforeCall();
  const Reasons expect = oracle_->CheckTruncate(tenant, id, epoch, length);
  absl::StatusOr<scheduler::SequenceInfo> info = NotSent(status);
  if (status.ok()) {
    info = engine_->TruncateSequence(TenantName(tenant), id, length, epoch);
  }
  if (Foretold("Truncate", info.status(), expect)) {
    oracle_->ApplyTruncate(id, length, Now());
    if (info->epoch != epoch + 1 || info->length != length) Fail("Truncate: another epoch");
  }
  AfterCall();
  Trace(id, static_cast<uint64_t>(length), static_cast<uint64_t>(info.status().code()));
  return true;
}

bool Simulator::Release() {
  OracleSequence* first = AnySequence(0, /*free=*/false);
  if (first == nullptr || Chance(30)) return false;
  const int tenant = first->tenant;
  v1::ReleaseRequest message;
  message.add_sequence_ids(first->id);
  if (Chance(20)) message.add_sequence_ids(AnySequence(0, false)->id);
  if (Chance(10)) message.add_sequence_ids(Pick(~uint64_t{0}));
  std::vector<scheduler::SequenceId> ids, absent;
  if (!server::ParseRelease(message, engine_->limits(), &ids).ok()) Fail("ParseRelease");
  BeforeCall();
  std::vector<uint64_t> known;
  for (const uint64_t id : ids) {
    OracleSequence* sequence = oracle_->Find(tenant, id);
    if (sequence == nullptr || std::count(known.begin(), known.end(), id) > 0) continue;
    known.push_back(id);
    if (OracleStep* step = oracle_->StepOf(sequence->step)) step->aborting = true;
  }
  const int released = engine_->ReleaseSequences(TenantName(tenant), ids, &absent);
  CheckAnswers();
  FinishAborts();
  for (const uint64_t id : known) oracle_->ApplyRelease(id, Now());
  AfterCall();
  if (released != static_cast<int>(known.size()) || absent.size() != ids.size() - known.size()) {
    Fail(absl::StrCat("Release: ", released, " of ", known.size(), " sequences were released"));
  }
  Trace(ids.size(), known.size());
  return true;
}

bool Simulator::Renew() {
  OracleSequence* first = AnySequence(0, /*free=*/false);
  if (first == nullptr) return false;
  const int tenant = first->tenant;
  v1::RenewLeaseRequest message;
  const bool by_client = Chance(30);
  if (by_client) {
    message.set_client_id(absl::StrCat("client-", tenant));
  } else {
    message.add_sequence_ids(first->id);
    if (Chance(20)) message.add_sequence_ids(AnySequence(0, false)->id);
  }
  const int64_t wanted_ms = Chance(60) ? 0 : 20 + static_cast<int64_t>(Pick(800));
  message.set_lease_ms(static_cast<uint32_t>(wanted_ms));
  scheduler::SequenceSelection selection;
  selection.tenant = TenantName(tenant);
  int64_t lease_ms = 0;
  const absl::Status status = server::ParseRenew(message, engine_->limits(), &selection, &lease_ms);
  if (!status.ok()) Fail(absl::StrCat("ParseRenew: ", status.ToString()));
  BeforeCall();
  std::vector<scheduler::SequenceId> absent;
  const int renewed = engine_->RenewLeases(selection, lease_ms, &absent);
  int expected = 0;
  for (auto& [id, sequence] : oracle_->sequences) {
    const auto& ids = selection.ids;
    const int named = by_client ? static_cast<int>(!sequence.of_export)
                                : static_cast<int>(std::count(ids.begin(), ids.end(), id));
    if (sequence.tenant != tenant || named == 0) continue;
    oracle_->Renew(&sequence, wanted_ms * kMilli, Now());
    expected += named;
  }
  AfterCall();
  if (renewed != expected) Fail(absl::StrCat("Renew: ", renewed, " of ", expected));
  Trace(static_cast<uint64_t>(tenant), static_cast<uint64_t>(renewed));
  return true;
}

bool Simulator::Get() {
  const int tenant = 1 + static_cast<int>(Pick(tenants_));
  BeforeCall();
  const auto list = engine_->GetSequences({TenantName(tenant), {}, ""});
  CheckLists(tenant);
  AfterCall();
  size_t owned = 0;
  for (const auto& [id, sequence] : oracle_->sequences) owned += sequence.tenant == tenant;
  if (list.sequences.size() != owned) {
    Fail(absl::StrCat("Get: tenant ", tenant, " has ", list.sequences.size(), " sequences, not ",
                      owned));
  }
  for (const scheduler::SequenceInfo& info : list.sequences) {
    const OracleSequence* sequence = oracle_->Find(tenant, info.id);
    if (sequence == nullptr) {
      Fail("Get: a sequence that is not the tenant's");
      continue;
    }
    if (info.length != sequence->length() || info.epoch != sequence->epoch ||
        info.in_step != sequence->busy() ||
        info.page_groups != static_cast<int64_t>(sequence->groups.size()) ||
        info.lease_left_ms != std::max<int64_t>(0, sequence->deadline - Now()) / kMilli) {
      Fail(absl::StrCat("Get: length ", info.length, " epoch ", info.epoch, " in step ",
                        info.in_step, " groups ", info.page_groups, " lease ", info.lease_left_ms,
                        " ms; foretold ", sequence->length(), " ", sequence->epoch, " ",
                        sequence->step != 0, " ", sequence->groups.size(), " ",
                        (sequence->deadline - Now()) / kMilli));
    }
  }
  Trace(static_cast<uint64_t>(tenant), owned);
  return owned > 0;
}

// Checks the replies to a tenant that names its sequences and models, and other tenants' of those
// names.
void Simulator::CheckLists(int tenant) {
  const std::string name = TenantName(tenant);
  size_t owned = 0, of_own_client = 0;
  scheduler::SequenceSelection by_id{name, {}, ""};
  for (const auto& [id, sequence] : oracle_->sequences) {
    by_id.ids.push_back(id);
    owned += sequence.tenant == tenant;
    of_own_client += sequence.tenant == tenant && !sequence.of_export;
  }
  const auto named = engine_->GetSequences(by_id);
  if (!by_id.ids.empty() && (named.sequences.size() != owned ||
                             named.not_found.size() != oracle_->sequences.size() - owned)) {
    Fail(
        absl::StrCat("Get by id: tenant ", tenant, " has ", named.sequences.size(), " of ", owned));
  }
  const auto of_client = [&](int client) {
    return engine_->GetSequences({name, {}, absl::StrCat("client-", client)}).sequences.size();
  };
  if (of_client(tenant) != of_own_client || of_client(tenant + 1) != 0) {
    Fail(absl::StrCat("Get by client: tenant ", tenant, " has not ", of_own_client));
  }
  size_t models = 0, in_models = 0, open = 0;
  for (const scheduler::ModelInfo& info : engine_->ListModels(name)) {
    ++models;
    in_models += static_cast<size_t>(info.sequences);
  }
  for (const OracleModel& model : oracle_->models) open += model.open && model.tenant == tenant;
  if (models != open || in_models != owned) {
    Fail(absl::StrCat("List: tenant ", tenant, " has ", models, " models with ", in_models,
                      " sequences, not ", open, " with ", owned));
  }
}

bool Simulator::OpenStream() {
  if (streams_.size() >= 10) return false;
  const int tenant = 1 + static_cast<int>(Pick(tenants_));
  BeforeCall();
  streams_.push_back({engine_->OpenStream(TenantName(tenant)), tenant});
  AfterCall();
  Trace(streams_.back().id);
  return true;
}

bool Simulator::CloseStream() {
  if (streams_.size() <= static_cast<size_t>(tenants_)) return false;
  const size_t index = Pick(streams_.size());
  const Stream stream = streams_[index];
  const auto same = [&](const Stream& other) { return other.tenant == stream.tenant; };
  if (std::count_if(streams_.begin(), streams_.end(), same) < 2) return false;
  streams_.erase(streams_.begin() + static_cast<long>(index));
  BeforeCall();
  for (auto& [key, step] : oracle_->steps) {
    step.aborting |= std::count(step.streams.begin(), step.streams.end(), stream.id) > 0;
  }
  engine_->CloseStream(stream.id);
  AfterCall();
  for (const auto& request : requests_) {
    if (request->stream == stream.id) Fail("CloseStream left a request of the stream unanswered");
  }
  Trace(stream.id);
  return true;
}

bool Simulator::Time() {
  Poll();
  int64_t nanos = 0;
  switch (Pick(8)) {
    case 0:
      nanos = kMicro * static_cast<int64_t>(1 + Pick(300));
      break;
    case 1:
      nanos = kMicro * std::max<int64_t>(1, slice_wait_us_);
      break;
    case 2:
      nanos = kMilli * static_cast<int64_t>(1 + Pick(10));
      break;
    case 3:
      nanos = kMilli * kv_wait_ms_ + static_cast<int64_t>(Pick(3)) - 1;
      break;
    case 4:
      nanos = oracle_limits_.step_lease_ns - 1 + static_cast<int64_t>(Pick(3));
      break;
    case 5:
      if (Chance(70)) return false;
      nanos = oracle_limits_.sequence_lease_ns - 1 + static_cast<int64_t>(Pick(3));
      break;
    default:
      nanos = device_->NextDone() - Now();
      break;
  }
  if (nanos <= 0) return false;
  clock_.Advance(nanos);
  // Sometimes leaves the timers to the next call, as if the engine were late.
  late_ = Chance(30);
  Trace(static_cast<uint64_t>(nanos), late_);
  if (!late_) Poll();
  return true;
}

bool Simulator::ArmFault() {
  if (fault_percent_ == 0 || !Chance(fault_percent_)) return false;
  constexpr DeviceFault kFaults[] = {DeviceFault::kSubmit, DeviceFault::kWaitAllRan,
                                     DeviceFault::kWaitSomeRan, DeviceFault::kWaitNoneRan};
  const uint64_t fault = Pick(std::size(kFaults));
  device_->Arm(kFaults[fault]);
  Trace(fault);
  return true;
}

}  // namespace mla::simulation
