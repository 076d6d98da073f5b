#include "tests/simulation/simulator/steps.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/simulation/simulator/control.h"
#include "tests/simulation/simulator/transport.h"

namespace mla::simulation {
namespace {

constexpr int64_t kMilli = 1'000'000;

}  // namespace

OracleStep* Steps::AnyStep() {
  // The engine first ends steps whose lease has run out.
  if (w_.oracle->StepsOverdue(w_.Now())) w_.transport->Poll();
  if (w_.oracle->steps.empty()) return nullptr;
  auto at = w_.oracle->steps.begin();
  std::advance(at, static_cast<long>(w_.Pick(w_.oracle->steps.size())));
  return &at->second;
}

OracleBegin Steps::DrawBegin(int tenant) {
  OracleBegin begin;
  begin.tenant = tenant;
  begin.model = w_.AnyModel(tenant);
  begin.stream = w_.AnyStream(tenant)->id;
  begin.id = w_.next_step_id++;
  const int wanted = 1 + static_cast<int>(w_.Pick(w_.oracle_limits.max_step_sequences));
  int rows_left = w_.oracle_limits.max_step_rows;
  for (int i = 0; i < wanted && begin.model >= 0; ++i) {
    const OracleSequence* sequence = w_.AnySequence(tenant, /*free=*/true);
    if (sequence == nullptr || sequence->model != begin.model) continue;
    const auto& named = begin.sequences;
    if (std::count(named.begin(), named.end(), sequence->id) > 0) continue;
    const int page = w_.oracle->models[begin.model].shape.page;
    const int room =
        std::min(w_.oracle_limits.max_sequence_rows, w_.oracle_limits.max_pages * page) -
        sequence->length();
    const int most = std::min({room, rows_left, 9});
    if (most < 1) continue;
    const int rows = 1 + static_cast<int>(w_.Pick(static_cast<uint64_t>(most)));
    begin.sequences.push_back(sequence->id);
    begin.epochs.push_back(sequence->epoch);
    begin.starts.push_back(sequence->length());
    begin.rows.push_back(rows);
    rows_left -= rows;
  }
  if (w_.oracle_limits.max_participants > 1 && w_.Chance(35)) {
    begin.participants = 2 + static_cast<int>(w_.Pick(w_.oracle_limits.max_participants - 1));
  }
  if (w_.Chance(20)) begin.lease_ns = static_cast<int64_t>(5 + w_.Pick(300)) * kMilli;
  return begin;
}

void Steps::SpoilBegin(OracleBegin* begin) {
  const size_t index = w_.Pick(begin->sequences.size());
  switch (w_.Pick(9)) {
    case 0:
      begin->epochs[index] += 1;
      break;
    case 1:
      begin->starts[index] += 1;
      break;
    case 2:
      begin->rows[index] = 0;
      break;
    case 3:
      begin->rows[index] = w_.oracle_limits.max_step_rows + 1;
      break;
    case 4:
      begin->sequences[index] = w_.Pick(~uint64_t{0});
      break;
    case 5:
      begin->model = -1;
      break;
    case 6:
      begin->participants = w_.oracle_limits.max_participants + 1;
      break;
    case 7:
      begin->lease_ns = w_.oracle_limits.max_lease_ns + kMilli;
      break;
    default:
      // Any sequence: another tenant's, one in a step, one of another model, or one named twice.
      begin->sequences[index] = w_.AnySequence(0, /*free=*/false)->id;
      break;
  }
}

bool Steps::Begin() {
  OracleBegin begin = DrawBegin(1 + static_cast<int>(w_.Pick(w_.tenants)));
  if (begin.sequences.empty()) return false;
  if (w_.Chance(10)) SpoilBegin(&begin);
  w_.transport->SendBegin(begin, /*joins=*/false);
  // The other ranks usually follow.
  for (int i = 1; i < begin.participants && w_.Chance(80) && !w_.failed(); ++i) {
    if (w_.oracle->FindStep(begin.tenant, begin.id) == nullptr) break;
    begin.stream = w_.AnyStream(begin.tenant)->id;
    w_.transport->SendBegin(begin, /*joins=*/true);
  }
  return true;
}

// Sends all rows of a step at every layer, without queries.
bool Steps::SendRows(uint64_t step_id, int tenant) {
  bool any = false;
  for (size_t layer = 0;; ++layer) {
    OracleStep* step = w_.oracle->FindStep(tenant, step_id);
    if (step == nullptr || layer == step->layers.size() || w_.failed()) return any;
    AttendSpec spec = DrawAttend(*step);
    spec.layer = static_cast<int>(layer);
    spec.row = static_cast<int>(step->layers[layer].size());
    spec.rows = step->total - spec.row;
    spec.form = Form::kAppend;
    spec.head = std::max(0, step->writer[layer]);
    spec.timeout_us = 0;
    if (spec.rows > 0 && !step->broken[layer]) any |= w_.transport->SendAttend(step, spec);
  }
}

// A fork that diverges from its parent inside a page, and steps of both at the same time. The first
// to write gets a copy of the page, and the other one the page itself.
bool Steps::Branch() {
  const OracleSequence* parent = w_.AnySequence(0, /*free=*/true);
  if (parent == nullptr || parent->length() < 2) return false;
  const int tenant = parent->tenant;
  const int64_t length = parent->length() - static_cast<int64_t>(w_.Pick(2)) - 1;
  uint64_t ids[] = {parent->id, w_.control->SendFork(tenant, *parent, parent->epoch, length)};
  if (ids[1] == 0) return true;
  if (w_.Chance(50)) std::swap(ids[0], ids[1]);
  uint64_t steps[] = {0, 0};
  for (int i = 0; i < 2 && !w_.failed(); ++i) {
    const OracleSequence* sequence = w_.oracle->Find(tenant, ids[i]);
    if (sequence == nullptr || sequence->step != 0) return true;
    OracleBegin begin;
    begin.tenant = tenant;
    begin.model = sequence->model;
    begin.stream = w_.AnyStream(tenant)->id;
    begin.id = steps[i] = w_.next_step_id++;
    begin.sequences.push_back(sequence->id);
    begin.epochs.push_back(sequence->epoch);
    begin.starts.push_back(sequence->length());
    begin.rows.push_back(1 + static_cast<int>(w_.Pick(3)));
    w_.transport->SendBegin(begin, /*joins=*/false);
  }
  SendRows(steps[1], tenant);
  if (w_.Chance(50)) SendRows(steps[0], tenant);
  return true;
}

bool Steps::Join() {
  const OracleStep* step = AnyStep();
  if (step == nullptr || (step->participants == 1 && w_.Chance(80))) return false;
  OracleBegin begin;
  begin.tenant = step->tenant;
  begin.id = step->id;
  begin.model = step->model;
  begin.stream = w_.AnyStream(step->tenant)->id;
  begin.participants = step->participants;
  begin.lease_ns = 0;
  for (const OracleMember& member : step->members) {
    begin.sequences.push_back(member.sequence);
    begin.epochs.push_back(w_.oracle->sequences.at(member.sequence).epoch);
    begin.starts.push_back(member.start);
    begin.rows.push_back(member.rows);
  }
  if (w_.Chance(8))
    begin.rows[0] = begin.rows[0] == 1 ? 2 : 1;  // a different step under the same id
  return w_.transport->SendBegin(begin, /*joins=*/true);
}

AttendSpec Steps::DrawAttend(const OracleStep& step) {
  const OracleModel& model = w_.oracle->models[step.model];
  AttendSpec spec;
  spec.stream = step.streams[w_.Pick(step.streams.size())];
  spec.layer = static_cast<int>(w_.Pick(static_cast<uint64_t>(model.shape.layers)));
  spec.row = static_cast<int>(step.layers[spec.layer].size());
  spec.rows = step.total - spec.row;
  if (spec.rows > 0) spec.rows = 1 + static_cast<int>(w_.Pick(static_cast<uint64_t>(spec.rows)));
  spec.head = std::max(0, step.writer[spec.layer]);
  if (step.writer[spec.layer] < 0 && w_.Chance(20)) {
    spec.head = static_cast<int>(w_.Pick(static_cast<uint64_t>(model.shape.heads)));
  }
  spec.heads = model.shape.heads - spec.head;
  if (w_.Chance(20)) spec.heads = 1 + static_cast<int>(w_.Pick(static_cast<uint64_t>(spec.heads)));
  spec.kv = true;
  spec.form = w_.oracle->ContentsOf(step.model).weights && model.shape.nope > 0 && w_.Chance(50)
                  ? Form::kExpanded
                  : Form::kAbsorbed;
  spec.f32 = w_.Chance(25);
  spec.f32_out = w_.Chance(50);
  spec.lse = w_.Chance(60);
  // The shares of a flood are computed for dense attention.
  spec.sparse = !w_.floods && w_.Chance(25);
  if (w_.Chance(4)) spec.timeout_us = 100 + static_cast<int64_t>(w_.Pick(20'000));
  return spec;
}

bool Steps::Attend() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  AttendSpec spec = DrawAttend(*step);
  if (spec.rows == 0 || step->broken[spec.layer]) return false;
  if (w_.Chance(20)) spec.form = Form::kAppend;
  return w_.transport->SendAttend(step, spec);
}

// Queries without KV rows, for present rows or ahead of them.
bool Steps::Query() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  AttendSpec spec = DrawAttend(*step);
  if (step->broken[spec.layer]) return false;
  const int row_limit =
      w_.Chance(70) ? static_cast<int>(step->layers[spec.layer].size()) : step->total;
  if (row_limit == 0) return false;
  spec.kv = false;
  spec.row = static_cast<int>(w_.Pick(static_cast<uint64_t>(row_limit)));
  spec.rows = 1 + static_cast<int>(w_.Pick(static_cast<uint64_t>(row_limit - spec.row)));
  spec.head = static_cast<int>(w_.Pick(w_.oracle->models[step->model].shape.heads));
  spec.heads =
      1 + static_cast<int>(w_.Pick(w_.oracle->models[step->model].shape.heads - spec.head));
  return w_.transport->SendAttend(step, spec);
}

// The next rows of a layer, with the heads cut among the streams of the step. One stream brings the
// KV rows, in any order, and sometimes one is missing.
bool Steps::Ranks() {
  OracleStep* step = AnyStep();
  if (step == nullptr || step->streams.size() < 2) return false;
  AttendSpec spec = DrawAttend(*step);
  const int heads = w_.oracle->models[step->model].shape.heads;
  const int ranks = static_cast<int>(std::min<size_t>(step->streams.size(), heads));
  if (spec.rows == 0 || step->broken[spec.layer] || ranks < 2) return false;
  spec.timeout_us = 0;
  const auto head_of = [&](int rank) { return rank * heads / ranks; };
  int writer = static_cast<int>(w_.Pick(static_cast<uint64_t>(ranks)));
  if (step->writer[spec.layer] >= 0) {
    writer = 0;
    while (writer < ranks && head_of(writer) != step->writer[spec.layer]) ++writer;
    if (writer == ranks) return false;
  }
  const int first = static_cast<int>(w_.Pick(static_cast<uint64_t>(ranks)));
  const int missing = w_.Chance(20) ? static_cast<int>(w_.Pick(static_cast<uint64_t>(ranks))) : -1;
  const uint64_t key = step->key;
  bool any = false;
  for (int i = 0; i < ranks; ++i) {
    const int rank = (first + i) % ranks;
    if (rank == missing && rank != writer) continue;
    // A launch that failed in between ends the step.
    step = w_.oracle->StepOf(key);
    if (step == nullptr || step->broken[spec.layer]) break;
    spec.stream = step->streams[static_cast<size_t>(rank)];
    spec.head = head_of(rank);
    spec.heads = head_of(rank + 1) - spec.head;
    spec.kv = rank == writer;
    any |= w_.transport->SendAttend(step, spec);
  }
  return any;
}

// KV rows that were sent before. With the same bytes they get the same reply; with other bytes they
// are refused.
bool Steps::Repeat() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  AttendSpec spec = DrawAttend(*step);
  const int accepted = static_cast<int>(step->layers[spec.layer].size());
  if (accepted == 0 || step->broken[spec.layer]) return false;
  spec.row = static_cast<int>(w_.Pick(static_cast<uint64_t>(accepted)));
  spec.rows = 1 + static_cast<int>(w_.Pick(static_cast<uint64_t>(accepted - spec.row)));
  spec.head = step->writer[spec.layer];
  spec.heads = w_.oracle->models[step->model].shape.heads - spec.head;
  spec.differs = w_.Chance(30);
  return w_.transport->SendAttend(step, spec);
}

// The rest of a step's rows at every layer, as a prefill sends them.
bool Steps::FillStep() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  const uint64_t key = step->key;
  const int layers = static_cast<int>(step->layers.size());
  bool any = false;
  for (int layer = 0; layer < layers; ++layer) {
    step = w_.oracle->StepOf(key);
    if (step == nullptr || step->broken[layer]) break;
    AttendSpec spec = DrawAttend(*step);
    spec.layer = layer;
    spec.row = static_cast<int>(step->layers[layer].size());
    spec.rows = step->total - spec.row;
    spec.head = std::max(0, step->writer[layer]);
    spec.heads = w_.oracle->models[step->model].shape.heads - spec.head;
    spec.timeout_us = 0;
    if (w_.Chance(60)) spec.form = Form::kAppend;
    if (spec.rows > 0) any |= w_.transport->SendAttend(step, spec);
  }
  return any;
}

// Messages that the engine refuses because of its state.
bool Steps::Refusable() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  AttendSpec spec = DrawAttend(*step);
  if (step->broken[spec.layer]) return false;
  const Shape& shape = w_.oracle->models[step->model].shape;
  const int accepted = static_cast<int>(step->layers[spec.layer].size());
  switch (w_.Pick(4)) {
    case 0:  // rows past the next one
      if (accepted + 1 >= step->total) return false;
      spec.row = accepted + 1;
      spec.rows = 1;
      break;
    case 1:  // another slice brings the KV rows
      if (spec.rows == 0 || step->writer[spec.layer] < 0 || shape.heads < 2) return false;
      spec.head = (step->writer[spec.layer] + 1) % shape.heads;
      spec.heads = 1;
      break;
    case 2:  // a stream that takes no part, of any tenant
      spec.stream = w_.streams[w_.Pick(w_.streams.size())].id;
      if (spec.rows == 0) return false;
      break;
    default:  // EXPANDED without weights
      if (spec.rows == 0 || shape.nope == 0) return false;
      spec.form = Form::kExpanded;
      break;
  }
  return w_.transport->SendAttend(step, spec);
}

bool Steps::End() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  v1::EndStep message;
  message.set_step_id(step->id);
  std::vector<int> rows;
  if (w_.Chance(40)) {
    for (const OracleMember& member : step->members) {
      rows.push_back(static_cast<int>(w_.Pick(static_cast<uint64_t>(member.rows) + 1)));
    }
  }
  for (const int count : rows) message.add_committed_rows(static_cast<uint32_t>(count));
  // A step that cannot be committed yet is usually left alone.
  const auto short_of = [&](const auto& layer) {
    return static_cast<int>(layer.size()) < step->total;
  };
  if (rows.empty() && std::any_of(step->layers.begin(), step->layers.end(), short_of) &&
      w_.Chance(90)) {
    return false;
  }
  auto request = std::make_unique<SimRequest>(w_.transport);
  request->kind = scheduler::RequestKind::kEndStep;
  const absl::Status parsed = server::ParseEndStep(message, w_.engine->limits(), &request->end);
  if (!parsed.ok()) w_.Fail(absl::StrCat("ParseEndStep: ", parsed.ToString()));
  request->stream = step->streams[w_.Chance(95) ? 0 : w_.Pick(step->streams.size())];
  request->step_id = step->id;
  request->step_key = step->key;
  request->owner = step->tenant;
  const bool leads = request->stream == step->streams[0];
  request->expect.AddIf(!leads, "not_the_leader");
  request->expect.AddIf(step->ending, "step_ending");
  request->immediate = !request->expect.none();
  w_.Trace(step->id, rows.size(), leads);
  const bool decided = request->immediate;
  if (!w_.transport->Submit(std::move(request))) return true;
  if (leads) step->touched = w_.Now();
  if (!decided) step->ending = true;
  w_.transport->Poll();
  return true;
}

bool Steps::Abort() {
  OracleStep* step = AnyStep();
  if (step == nullptr || w_.Chance(50)) return false;
  auto request = std::make_unique<SimRequest>(w_.transport);
  request->kind = scheduler::RequestKind::kAbortStep;
  request->stream = step->streams[w_.Chance(90) ? 0 : w_.Pick(step->streams.size())];
  request->step_id = step->id;
  request->step_key = step->key;
  request->owner = step->tenant;
  const bool leads = request->stream == step->streams[0];
  request->expect.AddIf(!leads, "not_the_leader");
  request->immediate = true;
  w_.Trace(step->id, leads);
  if (!w_.transport->Submit(std::move(request))) return true;
  step->aborting = leads;
  w_.transport->Poll();
  return true;
}

// Messages that the validator must refuse, whatever the engine's state.
bool Steps::Malformed() {
  const OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  const OracleModel& model = w_.oracle->models[step->model];
  AttendSpec spec = DrawAttend(*step);
  spec.sparse = false;
  spec.row = 0;
  spec.rows = 1;
  v1::Attend message = w_.transport->MessageOf(*step, spec);
  const size_t in = spec.f32 ? 4 : 2;
  int64_t payload = static_cast<int64_t>(
      in * (model.shape.row_dim() + spec.heads * QueryDim(model.shape, spec.form)));
  int64_t reply_bytes = kMessageBytes;
  const uint64_t kind = w_.Pick(12);
  switch (kind) {
    case 0:
      message.set_layer(static_cast<uint32_t>(model.shape.layers));
      break;
    case 1:
      message.set_row_begin(static_cast<uint32_t>(step->total));
      break;
    case 2:
      message.set_row_count(0);
      break;
    case 3:
      message.set_row_count(static_cast<uint32_t>(step->total) + 1);
      break;
    case 4:
      message.set_num_heads(static_cast<uint32_t>(spec.heads) + 1);
      break;
    case 5:
      message.set_head_offset(static_cast<uint32_t>(model.shape.heads));
      break;
    case 6:
      message.set_profile(v1::PROFILE_UNSPECIFIED);
      break;
    case 7:
      message.set_q_dtype(static_cast<v1::DType>(77));
      break;
    case 8:
      message.set_row_count(~uint32_t{0});
      break;
    case 9:
      payload += w_.Chance(50) ? 1 : -1;
      break;
    case 10:
      reply_bytes = server::kReplyHeaderBytes;
      break;
    default:
      message.set_profile(v1::PROFILE_APPEND_ONLY);
      message.set_has_kv(false);
      break;
  }
  const auto known = w_.engine->FindModel(w_.TenantName(step->tenant), model.name);
  scheduler::AttendArgs args;
  server::AttendSizes sizes;
  const absl::Status status =
      server::ParseAttend(message, *known, step->total, payload, reply_bytes, &args, &sizes);
  w_.Trace(step->id, kind);
  ++w_.counts.refusals;
  const ErrorDetail detail = DetailOf(status);
  if (status.ok() || detail.field.empty() || detail.limit.empty() || detail.got.empty()) {
    w_.Fail(absl::StrCat("ParseAttend of malformed message ", kind, ": ", status.ToString()));
  }
  return true;
}

}  // namespace mla::simulation
