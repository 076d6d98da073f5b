// Simulator: operations of the stepping protocol.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/simulation/simulator/simulator.h"

namespace mla::simulation {
namespace {

constexpr int64_t kMilli = 1'000'000;

}  // namespace

const Simulator::Stream* Simulator::AnyStream(int tenant) {
  std::vector<const Stream*> own;
  for (const Stream& stream : streams_) {
    if (stream.tenant == tenant) own.push_back(&stream);
  }
  return own[Pick(own.size())];
}

OracleStep* Simulator::AnyStep() {
  // The engine first ends steps whose lease has run out.
  if (oracle_->StepsOverdue(Now())) Poll();
  if (oracle_->steps.empty()) return nullptr;
  auto at = oracle_->steps.begin();
  std::advance(at, static_cast<long>(Pick(oracle_->steps.size())));
  return &at->second;
}

OracleBegin Simulator::DrawBegin(int tenant) {
  OracleBegin begin;
  begin.tenant = tenant;
  begin.model = AnyModel(tenant);
  begin.stream = AnyStream(tenant)->id;
  begin.id = next_step_id_++;
  const int wanted = 1 + static_cast<int>(Pick(oracle_limits_.max_step_sequences));
  int rows_left = oracle_limits_.max_step_rows;
  for (int i = 0; i < wanted && begin.model >= 0; ++i) {
    const OracleSequence* sequence = AnySequence(tenant, /*free=*/true);
    if (sequence == nullptr || sequence->model != begin.model) continue;
    const auto& named = begin.sequences;
    if (std::count(named.begin(), named.end(), sequence->id) > 0) continue;
    const int page = oracle_->models[begin.model].shape.page;
    const int room = std::min(oracle_limits_.max_sequence_rows, oracle_limits_.max_pages * page) -
                     sequence->length();
    const int most = std::min({room, rows_left, 9});
    if (most < 1) continue;
    const int rows = 1 + static_cast<int>(Pick(static_cast<uint64_t>(most)));
    begin.sequences.push_back(sequence->id);
    begin.epochs.push_back(sequence->epoch);
    begin.starts.push_back(sequence->length());
    begin.rows.push_back(rows);
    rows_left -= rows;
  }
  if (oracle_limits_.max_participants > 1 && Chance(35)) {
    begin.participants = 2 + static_cast<int>(Pick(oracle_limits_.max_participants - 1));
  }
  if (Chance(20)) begin.lease_ns = static_cast<int64_t>(5 + Pick(300)) * kMilli;
  return begin;
}

void Simulator::SpoilBegin(OracleBegin* begin) {
  const size_t index = Pick(begin->sequences.size());
  switch (Pick(9)) {
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
      begin->rows[index] = oracle_limits_.max_step_rows + 1;
      break;
    case 4:
      begin->sequences[index] = Pick(~uint64_t{0});
      break;
    case 5:
      begin->model = -1;
      break;
    case 6:
      begin->participants = oracle_limits_.max_participants + 1;
      break;
    case 7:
      begin->lease_ns = oracle_limits_.max_lease_ns + kMilli;
      break;
    default:
      // Any sequence: another tenant's, one in a step, one of another model, or one named twice.
      begin->sequences[index] = AnySequence(0, /*free=*/false)->id;
      break;
  }
}

bool Simulator::Begin() {
  OracleBegin begin = DrawBegin(1 + static_cast<int>(Pick(tenants_)));
  if (begin.sequences.empty()) return false;
  if (Chance(10)) SpoilBegin(&begin);
  SendBegin(begin, /*joins=*/false);
  // The other ranks usually follow.
  for (int i = 1; i < begin.participants && Chance(80) && !failed(); ++i) {
    if (oracle_->FindStep(begin.tenant, begin.id) == nullptr) break;
    begin.stream = AnyStream(begin.tenant)->id;
    SendBegin(begin, /*joins=*/true);
  }
  return true;
}

// Sends all rows of a step at every layer, without queries.
bool Simulator::SendRows(uint64_t step_id, int tenant) {
  bool any = false;
  for (size_t layer = 0;; ++layer) {
    OracleStep* step = oracle_->FindStep(tenant, step_id);
    if (step == nullptr || layer == step->layers.size() || failed()) return any;
    AttendSpec spec = DrawAttend(*step);
    spec.layer = static_cast<int>(layer);
    spec.row = static_cast<int>(step->layers[layer].size());
    spec.rows = step->total - spec.row;
    spec.form = Form::kAppend;
    spec.head = std::max(0, step->writer[layer]);
    spec.timeout_us = 0;
    if (spec.rows > 0 && !step->broken[layer]) any |= SendAttend(step, spec);
  }
}

// A fork that diverges from its parent inside a page, and steps of both at the same time. The first
// to write gets a copy of the page, and the other one the page itself.
bool Simulator::Branch() {
  const OracleSequence* parent = AnySequence(0, /*free=*/true);
  if (parent == nullptr || parent->length() < 2) return false;
  const int tenant = parent->tenant;
  const int64_t length = parent->length() - static_cast<int64_t>(Pick(2)) - 1;
  uint64_t ids[] = {parent->id, SendFork(tenant, *parent, parent->epoch, length)};
  if (ids[1] == 0) return true;
  if (Chance(50)) std::swap(ids[0], ids[1]);
  uint64_t steps[] = {0, 0};
  for (int i = 0; i < 2 && !failed(); ++i) {
    const OracleSequence* sequence = oracle_->Find(tenant, ids[i]);
    if (sequence == nullptr || sequence->step != 0) return true;
    OracleBegin begin;
    begin.tenant = tenant;
    begin.model = sequence->model;
    begin.stream = AnyStream(tenant)->id;
    begin.id = steps[i] = next_step_id_++;
    begin.sequences.push_back(sequence->id);
    begin.epochs.push_back(sequence->epoch);
    begin.starts.push_back(sequence->length());
    begin.rows.push_back(1 + static_cast<int>(Pick(3)));
    SendBegin(begin, /*joins=*/false);
  }
  SendRows(steps[1], tenant);
  if (Chance(50)) SendRows(steps[0], tenant);
  return true;
}

bool Simulator::Join() {
  const OracleStep* step = AnyStep();
  if (step == nullptr || (step->participants == 1 && Chance(80))) return false;
  OracleBegin begin;
  begin.tenant = step->tenant;
  begin.id = step->id;
  begin.model = step->model;
  begin.stream = AnyStream(step->tenant)->id;
  begin.participants = step->participants;
  begin.lease_ns = 0;
  for (const OracleMember& member : step->members) {
    begin.sequences.push_back(member.sequence);
    begin.epochs.push_back(oracle_->sequences.at(member.sequence).epoch);
    begin.starts.push_back(member.start);
    begin.rows.push_back(member.rows);
  }
  if (Chance(8)) begin.rows[0] = begin.rows[0] == 1 ? 2 : 1;  // a different step under the same id
  return SendBegin(begin, /*joins=*/true);
}

Simulator::AttendSpec Simulator::DrawAttend(const OracleStep& step) {
  const OracleModel& model = oracle_->models[step.model];
  AttendSpec spec;
  spec.stream = step.streams[Pick(step.streams.size())];
  spec.layer = static_cast<int>(Pick(static_cast<uint64_t>(model.shape.layers)));
  spec.row = static_cast<int>(step.layers[spec.layer].size());
  spec.rows = step.total - spec.row;
  if (spec.rows > 0) spec.rows = 1 + static_cast<int>(Pick(static_cast<uint64_t>(spec.rows)));
  spec.head = std::max(0, step.writer[spec.layer]);
  if (step.writer[spec.layer] < 0 && Chance(20)) {
    spec.head = static_cast<int>(Pick(static_cast<uint64_t>(model.shape.heads)));
  }
  spec.heads = model.shape.heads - spec.head;
  if (Chance(20)) spec.heads = 1 + static_cast<int>(Pick(static_cast<uint64_t>(spec.heads)));
  spec.kv = true;
  spec.form = oracle_->ContentsOf(step.model).weights && model.shape.nope > 0 && Chance(50)
                  ? Form::kExpanded
                  : Form::kAbsorbed;
  spec.f32 = Chance(25);
  spec.f32_out = Chance(50);
  spec.lse = Chance(60);
  // The shares of a flood are computed for dense attention.
  spec.sparse = !floods_ && Chance(25);
  if (Chance(4)) spec.timeout_us = 100 + static_cast<int64_t>(Pick(20'000));
  return spec;
}

bool Simulator::Attend() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  AttendSpec spec = DrawAttend(*step);
  if (spec.rows == 0 || step->broken[spec.layer]) return false;
  if (Chance(20)) spec.form = Form::kAppend;
  return SendAttend(step, spec);
}

// Queries without KV rows, for present rows or ahead of them.
bool Simulator::Query() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  AttendSpec spec = DrawAttend(*step);
  if (step->broken[spec.layer]) return false;
  const int row_limit =
      Chance(70) ? static_cast<int>(step->layers[spec.layer].size()) : step->total;
  if (row_limit == 0) return false;
  spec.kv = false;
  spec.row = static_cast<int>(Pick(static_cast<uint64_t>(row_limit)));
  spec.rows = 1 + static_cast<int>(Pick(static_cast<uint64_t>(row_limit - spec.row)));
  spec.head = static_cast<int>(Pick(oracle_->models[step->model].shape.heads));
  spec.heads = 1 + static_cast<int>(Pick(oracle_->models[step->model].shape.heads - spec.head));
  return SendAttend(step, spec);
}

// The next rows of a layer, with the heads cut among the streams of the step. One stream brings the
// KV rows, in any order, and sometimes one is missing.
bool Simulator::Ranks() {
  OracleStep* step = AnyStep();
  if (step == nullptr || step->streams.size() < 2) return false;
  AttendSpec spec = DrawAttend(*step);
  const int heads = oracle_->models[step->model].shape.heads;
  const int ranks = static_cast<int>(std::min<size_t>(step->streams.size(), heads));
  if (spec.rows == 0 || step->broken[spec.layer] || ranks < 2) return false;
  spec.timeout_us = 0;
  const auto head_of = [&](int rank) { return rank * heads / ranks; };
  int writer = static_cast<int>(Pick(static_cast<uint64_t>(ranks)));
  if (step->writer[spec.layer] >= 0) {
    writer = 0;
    while (writer < ranks && head_of(writer) != step->writer[spec.layer]) ++writer;
    if (writer == ranks) return false;
  }
  const int first = static_cast<int>(Pick(static_cast<uint64_t>(ranks)));
  const int missing = Chance(20) ? static_cast<int>(Pick(static_cast<uint64_t>(ranks))) : -1;
  const uint64_t key = step->key;
  bool any = false;
  for (int i = 0; i < ranks; ++i) {
    const int rank = (first + i) % ranks;
    if (rank == missing && rank != writer) continue;
    // A launch that failed in between ends the step.
    step = oracle_->StepOf(key);
    if (step == nullptr || step->broken[spec.layer]) break;
    spec.stream = step->streams[static_cast<size_t>(rank)];
    spec.head = head_of(rank);
    spec.heads = head_of(rank + 1) - spec.head;
    spec.kv = rank == writer;
    any |= SendAttend(step, spec);
  }
  return any;
}

// KV rows that were sent before. With the same bytes they get the same reply; with other bytes they
// are refused.
bool Simulator::Repeat() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  AttendSpec spec = DrawAttend(*step);
  const int accepted = static_cast<int>(step->layers[spec.layer].size());
  if (accepted == 0 || step->broken[spec.layer]) return false;
  spec.row = static_cast<int>(Pick(static_cast<uint64_t>(accepted)));
  spec.rows = 1 + static_cast<int>(Pick(static_cast<uint64_t>(accepted - spec.row)));
  spec.head = step->writer[spec.layer];
  spec.heads = oracle_->models[step->model].shape.heads - spec.head;
  spec.differs = Chance(30);
  return SendAttend(step, spec);
}

// The rest of a step's rows at every layer, as a prefill sends them.
bool Simulator::FillStep() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  const uint64_t key = step->key;
  const int layers = static_cast<int>(step->layers.size());
  bool any = false;
  for (int layer = 0; layer < layers; ++layer) {
    step = oracle_->StepOf(key);
    if (step == nullptr || step->broken[layer]) break;
    AttendSpec spec = DrawAttend(*step);
    spec.layer = layer;
    spec.row = static_cast<int>(step->layers[layer].size());
    spec.rows = step->total - spec.row;
    spec.head = std::max(0, step->writer[layer]);
    spec.heads = oracle_->models[step->model].shape.heads - spec.head;
    spec.timeout_us = 0;
    if (Chance(60)) spec.form = Form::kAppend;
    if (spec.rows > 0) any |= SendAttend(step, spec);
  }
  return any;
}

// Messages that the engine refuses because of its state.
bool Simulator::Refusable() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  AttendSpec spec = DrawAttend(*step);
  if (step->broken[spec.layer]) return false;
  const Shape& shape = oracle_->models[step->model].shape;
  const int accepted = static_cast<int>(step->layers[spec.layer].size());
  switch (Pick(4)) {
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
      spec.stream = streams_[Pick(streams_.size())].id;
      if (spec.rows == 0) return false;
      break;
    default:  // EXPANDED without weights
      if (spec.rows == 0 || shape.nope == 0) return false;
      spec.form = Form::kExpanded;
      break;
  }
  return SendAttend(step, spec);
}

bool Simulator::End() {
  OracleStep* step = AnyStep();
  if (step == nullptr) return false;
  v1::EndStep message;
  message.set_step_id(step->id);
  std::vector<int> rows;
  if (Chance(40)) {
    for (const OracleMember& member : step->members) {
      rows.push_back(static_cast<int>(Pick(static_cast<uint64_t>(member.rows) + 1)));
    }
  }
  for (const int count : rows) message.add_committed_rows(static_cast<uint32_t>(count));
  // A step that cannot be committed yet is usually left alone.
  const auto short_of = [&](const auto& layer) {
    return static_cast<int>(layer.size()) < step->total;
  };
  if (rows.empty() && std::any_of(step->layers.begin(), step->layers.end(), short_of) &&
      Chance(90)) {
    return false;
  }
  auto request = std::make_unique<SimRequest>(this);
  request->kind = scheduler::RequestKind::kEndStep;
  const absl::Status parsed = server::ParseEndStep(message, engine_->limits(), &request->end);
  if (!parsed.ok()) Fail(absl::StrCat("ParseEndStep: ", parsed.ToString()));
  request->stream = step->streams[Chance(95) ? 0 : Pick(step->streams.size())];
  request->step_id = step->id;
  request->step_key = step->key;
  request->owner = step->tenant;
  const bool leads = request->stream == step->streams[0];
  request->expect.AddIf(!leads, "not_the_leader");
  request->expect.AddIf(step->ending, "step_ending");
  request->immediate = !request->expect.none();
  Trace(step->id, rows.size(), leads);
  const bool decided = request->immediate;
  if (!Submit(std::move(request))) return true;
  if (leads) step->touched = Now();
  if (!decided) step->ending = true;
  Poll();
  return true;
}

bool Simulator::Abort() {
  OracleStep* step = AnyStep();
  if (step == nullptr || Chance(50)) return false;
  auto request = std::make_unique<SimRequest>(this);
  request->kind = scheduler::RequestKind::kAbortStep;
  request->stream = step->streams[Chance(90) ? 0 : Pick(step->streams.size())];
  request->step_id = step->id;
  request->step_key = step->key;
  request->owner = step->tenant;
  const bool leads = request->stream == step->streams[0];
  request->expect.AddIf(!leads, "not_the_leader");
  request->immediate = true;
  Trace(step->id, leads);
  if (!Submit(std::move(request))) return true;
  step->aborting = leads;
  Poll();
  return true;
}

}  // namespace mla::simulation
