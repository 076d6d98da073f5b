#include "tests/simulation/simulator/transport.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "tests/simulation/oracle/patterns.h"
#include "tests/simulation/simulator/checks.h"
#include "tests/simulation/simulator/fairness.h"
#include "tests/simulation/simulator/operators.h"

namespace mla::simulation {
namespace {

constexpr std::byte kGuardByte{0xa5};

void Put(std::byte* base, bool f32, size_t index, uint16_t bits) {
  if (f32) {
    const float value = FromBits(bits);
    std::memcpy(base + index * 4, &value, sizeof(value));
  } else {
    std::memcpy(base + index * 2, &bits, sizeof(bits));
  }
}

}  // namespace

void SimRequest::Done(const absl::Status& answer) {
  ++answers;
  status = answer;
  if (!answer.ok()) detail = DetailOf(answer);
  transport_->OnDone(this);
}

void Transport::OnDone(SimRequest* request) {
  const auto request_it = std::find_if(w_.requests.begin(), w_.requests.end(),
                                       [&](const auto& other) { return other.get() == request; });
  if (request_it == w_.requests.end() || request->answers != 1) {
    w_.Fail("a request was answered twice");
    return;
  }
  if (!request->memory.empty()) {
    if (w_.device->Uses(request->memory.data(), static_cast<int64_t>(request->memory.size()))) {
      w_.Fail("a request was answered while a launch uses its memory");
    }
    // The transport may reuse the inputs.
    std::fill_n(request->memory.begin(), Room(request->kv_bytes) + request->q_bytes,
                std::byte{0xff});
    memory_.erase(request->memory.data());
  }
  w_.done.push_back(std::move(*request_it));
  w_.requests.erase(request_it);
}

int Transport::OnStaged(const void* host, int64_t bytes, uint64_t serial) {
  const auto* first = static_cast<const std::byte*>(host);
  auto after = memory_.upper_bound(first);
  if (after == memory_.begin()) {
    w_.Fail("a launch uses memory that belongs to no waiting request");
    return 0;
  }
  SimRequest* request = std::prev(after)->second;
  if (first + bytes > request->memory.data() + request->memory.size()) {
    w_.Fail("a launch uses memory beyond a request's");
    return 0;
  }
  if (w_.Now() >= request->deadline_ns) w_.Fail("a launch takes a request after its deadline");
  request->launch = serial;
  w_.fairness->NoteTaken(request, first - request->memory.data(), bytes);
  return request->owner;
}

void Transport::OnSubmitted(uint64_t serial) { w_.fairness->OnSubmitted(serial); }

void Transport::OnLaunchDone(uint64_t serial) {
  for (const auto& request : w_.requests) {
    if (request->launch != serial) continue;
    request->running = false;
    w_.fairness->WaitsFrom(request.get());
    if (OracleStep* step = w_.oracle->StepOf(request->step_key)) step->touched = w_.Now();
  }
}

void Transport::OnLaunchFailed(uint64_t serial) {
  w_.first_failed = std::min(w_.first_failed, serial);
  if (w_.device->lost()) w_.oracle->unhealthy = true;
}

void Transport::BeforeCall() {
  const int went = w_.oracle->PassTime(w_.Now());
  if (went > 0) w_.Hash(static_cast<uint64_t>(went));
  w_.late = false;
  w_.called_at = w_.Now();
  w_.oracle->freed_by_steps.clear();
}

void Transport::AfterCall() {
  w_.undrained = false;
  w_.checks->CheckAnswers();
  w_.checks->FinishAborts();
  w_.first_failed = ~uint64_t{0};
  if (w_.gave_up) w_.oracle->PassTime(w_.called_at);
  w_.gave_up = false;
  if (w_.Now() != w_.called_at) {
    w_.operators->TouchModels();
    RenewAfterSteps();
    // These calls make the engine check its timers again.
    w_.checks->CheckAnswers();
    w_.checks->FinishAborts();
    if (w_.gave_up) w_.oracle->PassTime(w_.Now());
    w_.gave_up = false;
  }
}

// Time passed during the call, so the end of each step is not known. Sequences of these steps get
// leases that begin now.
void Transport::RenewAfterSteps() {
  std::vector<std::pair<int, uint64_t>> freed_by_steps;
  freed_by_steps.swap(w_.oracle->freed_by_steps);
  for (const auto& [tenant, id] : freed_by_steps) {
    w_.oracle->PassTime(w_.Now());
    OracleSequence* sequence = w_.oracle->Find(tenant, id);
    if (sequence == nullptr || sequence->step != 0) continue;
    std::vector<scheduler::SequenceId> absent;
    w_.engine->RenewLeases({w_.TenantName(tenant), {id}, ""}, 0, &absent);
    w_.oracle->Renew(sequence, 0, w_.Now());
    if (!absent.empty()) w_.Fail("a sequence that its step has freed is gone");
  }
}

bool Transport::Poll() {
  BeforeCall();
  const int64_t launches = w_.device->launches();
  const int64_t next = w_.device->NextDone();
  w_.engine->Poll();
  const bool moved = w_.device->launches() != launches || w_.device->NextDone() != next;
  const bool answered = !w_.done.empty();
  AfterCall();
  return moved || answered;
}

bool Transport::Submit(std::unique_ptr<SimRequest> request) {
  int64_t queued = 0;
  for (const auto& other : w_.requests) queued += other->owner == request->owner;
  const auto quota = w_.oracle->quotas.find(request->owner);
  const bool full = static_cast<int>(w_.requests.size()) >= w_.queue_requests ||
                    (quota != w_.oracle->quotas.end() && queued >= quota->second.queued);
  SimRequest* raw = request.get();
  raw->arrival_ns = w_.Now();
  raw->flood = w_.flood;
  w_.fairness->WaitsFrom(raw);
  if (raw->deadline_ns == 0) {
    raw->deadline_ns = w_.Now() + w_.engine->limits().queue_ms * 1'000'000;
  }
  raw->tenant = w_.rows[static_cast<size_t>(raw->owner)].get();
  w_.requests.push_back(std::move(request));
  const absl::Status status = w_.engine->Submit(raw);
  if (status.ok() == full || (!status.ok() && DetailOf(status).reason != "queue_full")) {
    w_.Fail(absl::StrCat("Submit with ", w_.requests.size() - 1, " requests in the queue, limit ",
                         w_.queue_requests, ": ", status.ToString()));
  }
  if (status.ok()) {
    w_.undrained = true;
    if (!raw->memory.empty()) memory_[raw->memory.data()] = raw;
    return true;
  }
  ++w_.counts.refusals;
  w_.requests.pop_back();
  return false;
}

bool Transport::SendBegin(const OracleBegin& begin, bool joins) {
  // A step whose lease has run out counts until the engine checks its timers.
  while (w_.oracle->StepsOverdue(w_.Now()) && !w_.failed()) Poll();
  v1::BeginStep message;
  message.set_step_id(begin.id);
  message.set_model_id(begin.model < 0 ? "no-such-model" : w_.oracle->models[begin.model].name);
  for (size_t i = 0; i < begin.sequences.size(); ++i) {
    v1::StepSequence* sequence = message.add_sequences();
    sequence->set_sequence_id(begin.sequences[i]);
    sequence->set_epoch(begin.epochs[i]);
    sequence->set_start_position(static_cast<uint64_t>(begin.starts[i]));
    sequence->set_rows(static_cast<uint32_t>(begin.rows[i]));
  }
  message.set_participants(static_cast<uint32_t>(begin.participants));
  message.set_lease_ms(static_cast<uint32_t>(begin.lease_ns / 1'000'000));
  auto request = std::make_unique<SimRequest>(this);
  request->kind = scheduler::RequestKind::kBeginStep;
  request->stream = begin.stream;
  request->step_id = begin.id;
  request->owner = begin.tenant;
  request->wanted = begin;
  request->joins = joins;
  request->immediate = true;
  BeforeCall();
  const OracleStep* step = w_.oracle->FindStep(begin.tenant, begin.id);
  if (step == nullptr) {
    if (joins) return false;  // time has ended it
    request->expect = w_.oracle->CheckBegin(begin);
  } else {
    int64_t rows = 0;
    for (const int count : begin.rows) rows += count;
    request->expect.AddIf(rows > w_.oracle_limits.max_step_rows, "out_of_range");
    bool same = step->members.size() == begin.rows.size();
    for (size_t i = 0; same && i < begin.rows.size(); ++i) {
      same = step->members[i].rows == begin.rows[i];
    }
    const bool inside = std::count(step->streams.begin(), step->streams.end(), begin.stream) > 0;
    request->expect.AddIf(!same, "step_exists");
    request->expect.AddIf(!inside && static_cast<int>(step->streams.size()) >= step->participants,
                          "step_full");
  }
  w_.Trace(begin.id, begin.sequences.size(), joins);
  int32_t total = 0;
  const absl::Status parsed =
      server::ParseBeginStep(message, w_.engine->limits(), &request->begin, &total);
  if (!parsed.ok()) {
    w_.Foretold("ParseBeginStep", parsed, request->expect);
    return true;
  }
  if (Submit(std::move(request))) Poll();
  return true;
}

v1::Attend Transport::MessageOf(const OracleStep& step, const AttendSpec& spec) const {
  v1::Attend message;
  message.set_step_id(step.id);
  message.set_layer(static_cast<uint32_t>(spec.layer));
  message.set_row_begin(static_cast<uint32_t>(spec.row));
  message.set_row_count(static_cast<uint32_t>(spec.rows));
  message.set_head_offset(static_cast<uint32_t>(spec.head));
  message.set_num_heads(spec.form == Form::kAppend ? 0 : static_cast<uint32_t>(spec.heads));
  message.set_profile(spec.form == Form::kAbsorbed   ? v1::PROFILE_ABSORBED
                      : spec.form == Form::kExpanded ? v1::PROFILE_EXPANDED
                                                     : v1::PROFILE_APPEND_ONLY);
  message.set_has_kv(spec.kv);
  message.set_want_lse(spec.lse && spec.form != Form::kAppend);
  message.set_q_dtype(spec.f32 ? v1::DTYPE_F32 : v1::DTYPE_BF16);
  message.set_o_dtype(spec.f32_out ? v1::DTYPE_F32 : v1::DTYPE_BF16);
  message.set_timeout_us(static_cast<uint32_t>(spec.timeout_us));
  if (spec.lists()) message.set_lists(v1::INDEX_LISTS_RAGGED);
  return message;
}

Reasons Transport::CheckAttend(const OracleStep& step, const AttendSpec& spec, bool* repeat) const {
  Reasons reasons;
  const OracleModel& model = w_.oracle->models[step.model];
  const int accepted = static_cast<int>(step.layers[spec.layer].size());
  const int writer = step.writer[spec.layer];
  *repeat = spec.kv && spec.row + spec.rows <= accepted;
  reasons.AddIf(std::count(step.streams.begin(), step.streams.end(), spec.stream) == 0,
                "step_not_found");
  if (spec.form == Form::kExpanded) {
    reasons.AddIf(model.shape.nope == 0, "no_expanded_profile");
    reasons.AddIf(!w_.oracle->ContentsOf(step.model).weights, "weights_missing");
  }
  if (!spec.kv) return reasons;
  reasons.AddIf(writer >= 0 && writer != spec.head, "kv_writer_taken");
  reasons.AddIf(!*repeat && spec.row != accepted, "rows_out_of_order");
  return reasons;
}

// Returns the place where the list of each row begins, followed by the positions, highest first.
std::vector<int32_t> Transport::ListsOf(uint64_t key, const OracleStep& step,
                                        const AttendSpec& spec) {
  std::vector<int32_t> begins = {0}, positions;
  for (int row = spec.row; row < spec.row + spec.rows; ++row) {
    for (const OracleMember& member : step.members) {
      if (row < member.offset || row >= member.offset + member.rows) continue;
      for (int j = member.start + row - member.offset; j >= 0; --j) {
        if (IsListed(key, row, j)) positions.push_back(j);
      }
    }
    begins.push_back(static_cast<int32_t>(positions.size()));
  }
  begins.insert(begins.end(), positions.begin(), positions.end());
  return begins;
}

void Transport::FillLists(SimRequest* request, const OracleStep& step, const AttendSpec& spec,
                          std::byte* at) const {
  const std::vector<int32_t> lists = ListsOf(request->lists, step, spec);
  std::memcpy(at, lists.data(), request->list_bytes);
  scheduler::AttendArgs& args = request->attend;
  args.list_begin = reinterpret_cast<const int32_t*>(at);
  args.list = args.list_begin + spec.rows + 1;
  auto positions = std::make_shared<std::vector<scheduler::StepSequenceArgs>>();
  for (const OracleMember& member : step.members) {
    positions->push_back({member.sequence, 0, member.start, member.rows});
  }
  args.listed_for = std::move(positions);
}

void Transport::FillTensors(SimRequest* request, const OracleStep& step, const AttendSpec& spec) {
  const Shape& shape = w_.oracle->models[step.model].shape;
  scheduler::AttendArgs& args = request->attend;
  request->memory.assign(Room(request->kv_bytes) + Room(request->q_bytes) + Room(request->o_bytes) +
                             Room(request->lse_bytes) + Room(request->list_bytes),
                         kGuardByte);
  std::byte* address = request->memory.data();
  if (spec.kv) {
    args.kv = address;
    for (int row = 0; row < spec.rows; ++row) {
      const auto& keys = step.layers[spec.layer];
      const size_t number = static_cast<size_t>(spec.row + row);
      uint64_t key = number < keys.size() ? keys[number] : 0;  // 0: of a message that must be
                                                               // refused
      if (spec.differs && row == spec.rows - 1) key += uint64_t{1} << 40;
      for (int i = 0; i < shape.row_dim(); ++i) {
        const size_t index = static_cast<size_t>(row) * shape.row_dim() + i;
        Put(address, spec.f32, index, PatternBits(key, i, step.tenant));
      }
    }
  }
  address += Room(request->kv_bytes);
  if (spec.form == Form::kAppend) return;
  args.q = address;
  const int dim = QueryDim(shape, spec.form);
  for (int row = 0; row < spec.rows; ++row) {
    for (int head = 0; head < spec.heads; ++head) {
      const uint64_t key = request->q_key + static_cast<uint64_t>(row * 8 + head);
      for (int i = 0; i < dim; ++i) {
        const size_t index = (static_cast<size_t>(row) * spec.heads + head) * dim + i;
        Put(address, spec.f32, index, PatternBits(key, i, step.tenant));
      }
    }
  }
  address += Room(request->q_bytes);
  args.o = address;
  std::fill_n(address, request->o_bytes, std::byte{0xff});
  address += Room(request->o_bytes);
  if (spec.lists()) FillLists(request, step, spec, address + Room(request->lse_bytes));
  if (!spec.lse) return;
  args.lse = reinterpret_cast<float*>(address);
  std::fill_n(address, request->lse_bytes, std::byte{0xff});
}

absl::Status Transport::ParseRows(const scheduler::ModelSpec& known, const OracleStep& step,
                                  const AttendSpec& spec, SimRequest* request) {
  const Shape& shape = w_.oracle->models[step.model].shape;
  const size_t in = spec.f32 ? 4 : 2;
  const size_t packed = static_cast<size_t>(spec.rows) * spec.heads;
  if (spec.kv) request->kv_bytes = in * spec.rows * shape.row_dim();
  if (spec.form != Form::kAppend) {
    const int out_dim = spec.form == Form::kExpanded ? shape.v : shape.lora;
    request->q_bytes = in * packed * QueryDim(shape, spec.form);
    request->o_bytes = (spec.f32_out ? 4 : 2) * packed * out_dim;
    if (spec.lse) request->lse_bytes = 4 * packed;
  }
  v1::Attend message = MessageOf(step, spec);
  if (spec.lists()) {
    request->lists = w_.next_key + 1;
    request->list_bytes = ListsOf(request->lists, step, spec).size() * sizeof(int32_t);
    const size_t begins = static_cast<size_t>(spec.rows) + 1;
    message.set_list_entries(static_cast<uint32_t>(request->list_bytes / sizeof(int32_t) - begins));
  }
  server::AttendSizes sizes;
  const size_t payload = request->kv_bytes + request->q_bytes + request->list_bytes;
  return server::ParseAttend(message, known, step.total, static_cast<int64_t>(payload),
                             kMessageBytes, &request->attend, &sizes);
}

bool Transport::SendAttend(OracleStep* step, const AttendSpec& spec) {
  auto request = std::make_unique<SimRequest>(this);
  const OracleModel& model = w_.oracle->models[step->model];
  const auto known = w_.engine->FindModel(w_.TenantName(step->tenant), model.name);
  if (known == nullptr) {
    w_.Fail("a model of an open step is not found");
    return false;
  }
  request->expect = CheckAttend(*step, spec, &request->repeat);
  request->immediate = !request->expect.none();
  w_.Trace(step->id, static_cast<uint64_t>(spec.layer * 4096 + spec.row * 64 + spec.rows),
           static_cast<uint64_t>(spec.head * 64 + spec.heads * 4 + static_cast<int>(spec.form)));
  const absl::Status parsed = ParseRows(*known, *step, spec, request.get());
  if (!parsed.ok()) {
    w_.Foretold("ParseAttend", parsed, request->expect);
    return true;
  }
  request->kind = scheduler::RequestKind::kAttend;
  request->stream = spec.stream;
  request->step_id = step->id;
  request->step_key = step->key;
  request->owner = step->tenant;
  request->form = spec.form;
  request->differs = spec.differs && request->repeat;
  request->q_key = w_.next_key += 4096;
  request->bulk = w_.fairness->IsBulk(*step, spec);
  const bool appends = spec.kv && !request->repeat && request->expect.none();
  if (appends) {
    step->writer[spec.layer] = spec.head;
    for (int i = 0; i < spec.rows; ++i) step->layers[spec.layer].push_back(w_.next_key++);
  }
  FillTensors(request.get(), *step, spec);
  if (spec.timeout_us > 0) request->deadline_ns = w_.Now() + spec.timeout_us * 1000;
  const bool immediate = request->immediate;
  const bool inside = !request->expect.Has("step_not_found");
  if (!Submit(std::move(request))) {
    if (appends) {
      auto& keys = step->layers[spec.layer];
      keys.resize(keys.size() - static_cast<size_t>(spec.rows));
      if (keys.empty()) step->writer[spec.layer] = -1;
    }
    return true;
  }
  if (inside) step->touched = w_.Now();
  if (!immediate) ++step->pending;
  if (immediate || w_.Chance(40)) Poll();
  return true;
}

void Transport::CheckGuards(const SimRequest& request) {
  size_t offset = 0;
  for (const size_t bytes :
       {request.kv_bytes, request.q_bytes, request.o_bytes, request.lse_bytes}) {
    for (size_t i = offset + bytes; i < offset + Room(bytes); ++i) {
      // The inputs were returned, together with the first one's guard.
      const bool scribbled = i < Room(request.kv_bytes) + request.q_bytes;
      if (request.memory[i] == (scribbled ? std::byte{0xff} : kGuardByte)) continue;
      w_.Fail("a launch wrote beyond a tensor");
      return;
    }
    offset += Room(bytes);
  }
}

}  // namespace mla::simulation
