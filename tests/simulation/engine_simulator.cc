#include "tests/simulation/engine_simulator.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::simulation {
namespace {

using scheduler::Fault;
using scheduler::SequenceInfo;
using scheduler::StepSequenceArgs;
using scheduler::testing::HarnessOptions;
using scheduler::testing::MakeRow;
using scheduler::testing::TinyLimits;
using scheduler::testing::TinyModel;

constexpr int kRowDim = 12;
constexpr size_t kSequencesMost = 10;
constexpr size_t kStreamsMost = 5;
constexpr size_t kWaitingMost = 40;

HarnessOptions Options(int heads) {
  HarnessOptions options{TinyLimits(), TinyModel(), nullptr, nullptr};
  options.model.geometry.num_heads = heads;
  return options;
}

}  // namespace

EngineSimulator::EngineSimulator(uint64_t seed) : random_(seed), harness_(Options(kHeads)) {
  streams_.push_back(harness_.core().OpenStream(harness_.tenant()));
}

const Row& EngineSimulator::RowOf(uint64_t key) {
  auto [it, fresh] = row_cache_.try_emplace(key);
  if (fresh) it->second = MakeRow(key, kRowDim);
  return it->second;
}

EngineSimulator::ModelSequence* EngineSimulator::AnySequence(bool free) {
  std::vector<ModelSequence*> candidates;
  for (ModelSequence& sequence : sequences_) {
    if (!free || sequence.step == 0) candidates.push_back(&sequence);
  }
  return candidates.empty() ? nullptr : candidates[Pick(candidates.size())];
}

std::map<StepId, EngineSimulator::ModelStep>::iterator EngineSimulator::AnyStep() {
  if (steps_.empty()) return steps_.end();
  return std::next(steps_.begin(), static_cast<long>(Pick(steps_.size())));
}

std::string EngineSimulator::Refused(const TestRequest& request, const std::string& reason) {
  ++stats_.refusals;
  Trace(static_cast<uint64_t>(request.status.code()));
  if (request.answers == 1 && !request.status.ok() && request.fault.reason == reason) return "";
  return absl::StrCat("wanted a refusal with reason ", reason, ", got ", request.status.ToString(),
                      " reason ", request.fault.reason);
}

std::string EngineSimulator::OpenSequence() {
  if (sequences_.size() >= kSequencesMost) return "";
  ModelSequence sequence;
  sequence.id = harness_.Open("", 3'000'000).id;
  sequences_.push_back(sequence);
  return "";
}

std::string EngineSimulator::ForkSequence() {
  ModelSequence* parent = AnySequence(/*free=*/false);
  if (parent == nullptr || sequences_.size() >= kSequencesMost) return "";
  scheduler::ForkArgs args;
  args.tenant = harness_.tenant();
  args.parent = parent->id;
  args.expected_epoch = parent->epoch;
  args.lease_ms = 3'000'000;
  const size_t length = Pick(parent->rows[0].size() + 1);
  args.length = static_cast<int64_t>(length);
  Fault fault;
  const auto child = harness_.core().ForkSequence(args, &fault);
  if (parent->step != 0) {
    return fault.reason == "in_step" ? "" : "fork of a sequence in a step was not refused";
  }
  if (!child.ok()) return absl::StrCat("fork: ", child.status().ToString());
  ModelSequence sequence;
  sequence.id = child->id;
  for (int layer = 0; layer < kLayers; ++layer) {
    sequence.rows[layer].assign(parent->rows[layer].begin(),
                                parent->rows[layer].begin() + static_cast<long>(length));
  }
  sequences_.push_back(std::move(sequence));
  return "";
}

std::string EngineSimulator::TruncateSequence() {
  ModelSequence* sequence = AnySequence(/*free=*/false);
  if (sequence == nullptr) return "";
  const size_t length = Pick(sequence->rows[0].size() + 1);
  Fault fault;
  const auto cut = harness_.core().TruncateSequence(
      harness_.tenant(), sequence->id, static_cast<int64_t>(length), sequence->epoch, &fault);
  if (sequence->step != 0) {
    return fault.reason == "in_step" ? "" : "truncate of a sequence in a step was not refused";
  }
  if (!cut.ok()) return absl::StrCat("truncate: ", cut.status().ToString());
  ++sequence->epoch;
  for (auto& rows : sequence->rows) rows.resize(length);
  return cut->epoch == sequence->epoch ? "" : "truncate gave another epoch";
}

void EngineSimulator::DropStep(StepId id) {
  for (ModelSequence& sequence : sequences_) {
    if (sequence.step == id) sequence.step = 0;
  }
  steps_.erase(id);
  ++stats_.aborts;
}

std::string EngineSimulator::ReleaseSequence() {
  ModelSequence* sequence = AnySequence(/*free=*/false);
  if (sequence == nullptr || Pick(3) != 0) return "";
  const SequenceId id = sequence->id;
  const StepId step = sequence->step;
  std::vector<SequenceId> absent;
  if (harness_.core().ReleaseSequences(harness_.tenant(), std::vector<SequenceId>{id}, &absent) !=
      1) {
    return "release did not find the sequence";
  }
  if (step != 0) DropStep(step);
  sequences_.remove_if([id](const ModelSequence& s) { return s.id == id; });
  return "";
}

std::string EngineSimulator::OpenStream() {
  if (streams_.size() < kStreamsMost) {
    streams_.push_back(harness_.core().OpenStream(harness_.tenant()));
  }
  return "";
}

std::string EngineSimulator::CloseStream() {
  if (streams_.size() < 2 || Pick(4) != 0) return "";
  const size_t index = Pick(streams_.size());
  const StreamId stream = streams_[index];
  streams_.erase(streams_.begin() + static_cast<long>(index));
  harness_.core().CloseStream(stream);
  std::vector<StepId> lost;
  for (const auto& [id, step] : steps_) {
    if (std::find(step.streams.begin(), step.streams.end(), stream) != step.streams.end()) {
      lost.push_back(id);
    }
  }
  for (const StepId id : lost) DropStep(id);
  return "";
}

std::string EngineSimulator::BeginStep() {
  if (steps_.size() >= 6) return "";
  ModelStep step;
  const StepId id = next_step_++;
  const int wanted = 1 + static_cast<int>(Pick(3));
  for (int i = 0; i < wanted; ++i) {
    ModelSequence* sequence = AnySequence(/*free=*/true);
    if (sequence == nullptr) break;
    const int length = static_cast<int>(sequence->rows[0].size());
    const int room = std::min(8, 96 - length);
    if (room < 1) continue;
    const int rows = 1 + static_cast<int>(Pick(static_cast<uint64_t>(room)));
    sequence->step = id;
    step.members.push_back({sequence->id, length, rows, step.total});
    step.args.push_back({sequence->id, sequence->epoch, length, rows});
    step.total += rows;
  }
  if (step.members.empty()) return "";
  step.participants = Pick(3) == 0 ? 2 + static_cast<int>(Pick(2)) : 1;
  step.streams.push_back(streams_[Pick(streams_.size())]);
  const auto request = harness_.Begin(step.streams[0], id, step.args, step.participants);
  if (!request->status.ok() || request->total_rows != step.total) {
    return absl::StrCat("begin: ", request->status.ToString());
  }
  steps_.emplace(id, std::move(step));
  return "";
}

std::string EngineSimulator::JoinStep() {
  const auto it = AnyStep();
  if (it == steps_.end()) return "";
  ModelStep& step = it->second;
  const StreamId stream = streams_[Pick(streams_.size())];
  const bool inside =
      std::find(step.streams.begin(), step.streams.end(), stream) != step.streams.end();
  const bool full = static_cast<int>(step.streams.size()) >= step.participants;
  const auto request = harness_.Begin(stream, it->first, step.args, step.participants);
  if (!inside && full) return Refused(*request, "step_full");
  if (!inside) step.streams.push_back(stream);
  if (!request->status.ok()) return absl::StrCat("join: ", request->status.ToString());
  return request->joined == static_cast<int>(step.streams.size()) ? "" : "join count is wrong";
}

std::vector<uint64_t> EngineSimulator::Visible(const ModelStep& step, int layer, int row) const {
  for (const Member& member : step.members) {
    if (row < member.offset || row >= member.offset + member.rows) continue;
    std::vector<uint64_t> keys;
    for (const ModelSequence& sequence : sequences_) {
      if (sequence.id == member.id) keys = sequence.rows[layer];
    }
    const auto& own = step.rows[layer];
    keys.insert(keys.end(), own.begin() + member.offset, own.begin() + row + 1);
    return keys;
  }
  return {};
}

std::string EngineSimulator::Keep(std::unique_ptr<TestRequest> request, StepId id, uint64_t q_key,
                                  bool computes) {
  const ModelStep& step = steps_.at(id);
  Waiting waiting;
  waiting.step = id;
  waiting.q_key = q_key;
  waiting.computes = computes;
  const scheduler::AttendArgs& args = request->attend;
  const int accepted = static_cast<int>(step.rows[args.layer].size());
  waiting.waits_for_rows = args.row_begin + args.row_count > accepted;
  for (int i = 0; computes && !waiting.waits_for_rows && i < args.row_count; ++i) {
    waiting.visible.push_back(Visible(step, args.layer, args.row_begin + i));
  }
  waiting.request = std::move(request);
  waiting_.push_back(std::move(waiting));
  return "";
}

std::string EngineSimulator::AttendNext() {
  const auto it = AnyStep();
  if (it == steps_.end() || waiting_.size() >= kWaitingMost) return "";
  ModelStep& step = it->second;
  const int layer = static_cast<int>(Pick(kLayers));
  auto& accepted = step.rows[layer];
  const int left = step.total - static_cast<int>(accepted.size());
  if (left == 0) return "";
  const int first = static_cast<int>(accepted.size());
  const int count = 1 + static_cast<int>(Pick(static_cast<uint64_t>(left)));
  if (step.has_writer[layer] && step.writer_head[layer] != 0) return "";
  const std::vector<Row> rows = AcceptRows(it->first, layer, count);
  step.has_writer[layer] = true;
  const uint64_t q_key = next_key_ += 4096;
  const bool append_only = Pick(4) == 0;
  auto request = append_only
                     ? harness_.AppendOnly(step.streams[0], it->first, layer, first, rows)
                     : harness_.Attend(step.streams[0], it->first, layer, first, rows, q_key);
  ShowRows(it->first, layer);
  return Keep(std::move(request), it->first, q_key, !append_only);
}

std::vector<Row> EngineSimulator::AcceptRows(StepId id, int layer, int count) {
  std::vector<Row> rows;
  for (int i = 0; i < count; ++i) {
    steps_.at(id).rows[layer].push_back(next_key_);
    rows.push_back(RowOf(next_key_++));
  }
  return rows;
}

void EngineSimulator::ShowRows(StepId id, int layer) {
  const ModelStep& step = steps_.at(id);
  for (Waiting& waiting : waiting_) {
    const scheduler::AttendArgs& args = waiting.request->attend;
    if (waiting.step != id || args.layer != layer || !waiting.waits_for_rows) continue;
    if (args.row_begin + args.row_count > static_cast<int>(step.rows[layer].size())) continue;
    waiting.waits_for_rows = false;
    for (int i = 0; waiting.computes && i < args.row_count; ++i) {
      waiting.visible.push_back(Visible(step, layer, args.row_begin + i));
    }
  }
}

// The next rows of a layer, heads cut among the streams of the step; one of the ranks brings the KV
// rows, any order, and now and then one is late.
std::string EngineSimulator::AttendByRanks() {
  const auto it = AnyStep();
  if (it == steps_.end() || waiting_.size() + 3 >= kWaitingMost) return "";
  const StepId id = it->first;
  ModelStep& step = it->second;
  const int layer = static_cast<int>(Pick(kLayers));
  const int first = static_cast<int>(step.rows[layer].size());
  if (first == step.total) return "";
  const int count = 1 + static_cast<int>(Pick(static_cast<uint64_t>(step.total - first)));
  const int ranks = static_cast<int>(step.streams.size());
  const auto head_of = [ranks](int rank) { return rank * kHeads / ranks; };
  int writer = static_cast<int>(Pick(static_cast<uint64_t>(ranks)));
  // A layer's rows all come with the same heads.
  for (int rank = 0; step.has_writer[layer] && rank < ranks; ++rank) {
    if (head_of(rank) == step.writer_head[layer]) writer = rank;
  }
  if (step.has_writer[layer] && head_of(writer) != step.writer_head[layer]) return "";
  step.has_writer[layer] = true;
  step.writer_head[layer] = head_of(writer);
  const int late = Pick(2) == 0 ? static_cast<int>(Pick(static_cast<uint64_t>(ranks))) : -1;
  const uint64_t q_key = next_key_ += 4096;
  const int turn = static_cast<int>(Pick(static_cast<uint64_t>(ranks)));
  for (int i = 0; i < ranks; ++i) {
    const int rank = (i + turn) % ranks;
    if (rank == late && rank != writer) continue;
    const bool writes = rank == writer;
    const std::vector<Row> rows = writes ? AcceptRows(id, layer, count) : std::vector<Row>();
    auto request = harness_.Slice(step.streams[static_cast<size_t>(rank)], id, layer, first, count,
                                  rows, head_of(rank), head_of(rank + 1) - head_of(rank), q_key);
    if (writes) ShowRows(id, layer);
    if (std::string wrong = Keep(std::move(request), id, q_key, true); !wrong.empty()) return wrong;
    if (Pick(3) == 0) harness_.AdvanceMicros(static_cast<int64_t>(Pick(120)));
    if (Pick(4) == 0) Launch();
  }
  ++(late >= 0 && late != writer ? stats_.ranks_late : stats_.ranks_complete);
  return "";
}

std::string EngineSimulator::AttendOutOfOrder() {
  const auto it = AnyStep();
  if (it == steps_.end()) return "";
  const ModelStep& step = it->second;
  const int layer = static_cast<int>(Pick(kLayers));
  const int accepted = static_cast<int>(step.rows[layer].size());
  if (accepted + 1 >= step.total || step.writer_head[layer] != 0) return "";
  const auto request = harness_.Attend(step.streams[0], it->first, layer, accepted + 1,
                                       {RowOf(next_key_)}, next_key_);
  return Refused(*request, "rows_out_of_order");
}

std::string EngineSimulator::AttendRepeat() {
  const auto it = AnyStep();
  if (it == steps_.end() || waiting_.size() >= kWaitingMost) return "";
  ModelStep& step = it->second;
  const int layer = static_cast<int>(Pick(kLayers));
  const auto& accepted = step.rows[layer];
  if (accepted.empty()) return "";
  const int first = static_cast<int>(Pick(accepted.size()));
  const int count = 1 + static_cast<int>(Pick(accepted.size() - static_cast<size_t>(first)));
  const bool differ = Pick(3) == 0;
  std::vector<Row> rows;
  for (int i = 0; i < count; ++i) rows.push_back(RowOf(accepted[static_cast<size_t>(first + i)]));
  if (differ) rows.back()[Pick(kRowDim)] += 8;
  const uint64_t q_key = next_key_ += 4096;
  if (step.writer_head[layer] != 0) return "";  // its heads are another slice's
  auto request = harness_.Attend(step.streams[0], it->first, layer, first, rows, q_key);
  const std::string kept = Keep(std::move(request), it->first, q_key, true);
  waiting_.back().must_differ = differ;
  return kept;
}

std::string EngineSimulator::QuerySlice() {
  const auto it = AnyStep();
  if (it == steps_.end() || waiting_.size() >= kWaitingMost) return "";
  ModelStep& step = it->second;
  const int layer = static_cast<int>(Pick(kLayers));
  const int first = static_cast<int>(Pick(static_cast<uint64_t>(step.total)));
  const int count = 1 + static_cast<int>(Pick(static_cast<uint64_t>(step.total - first)));
  const int head = static_cast<int>(Pick(kHeads));
  const int heads = 1 + static_cast<int>(Pick(static_cast<uint64_t>(kHeads - head)));
  const uint64_t q_key = next_key_ += 4096;
  const StreamId stream = step.streams[Pick(step.streams.size())];
  auto request = harness_.Query(stream, it->first, layer, first, count, head, heads, q_key);
  return Keep(std::move(request), it->first, q_key, true);
}

std::string EngineSimulator::EndStep() {
  const auto it = AnyStep();
  if (it == steps_.end()) return "";
  // Everything sent before is answered first, so that the answer can be foretold.
  if (std::string wrong = Settle(); !wrong.empty()) return wrong;
  for (const Waiting& waiting : waiting_) {
    if (waiting.step == it->first) return "";  // it waits for rows
  }
  ModelStep& step = it->second;
  std::vector<int32_t> keep;
  size_t needed = 0;
  for (const Member& member : step.members) {
    keep.push_back(static_cast<int32_t>(Pick(static_cast<uint64_t>(member.rows) + 1)));
    if (keep.back() > 0) needed = static_cast<size_t>(member.offset + keep.back());
  }
  const auto request = harness_.End(step.streams[0], it->first, keep);
  for (const auto& rows : step.rows) {
    if (rows.size() < needed) return Refused(*request, "rows_missing");
  }
  if (!request->status.ok()) return absl::StrCat("end: ", request->status.ToString());
  for (size_t i = 0; i < step.members.size(); ++i) {
    const Member& member = step.members[i];
    for (ModelSequence& sequence : sequences_) {
      if (sequence.id != member.id) continue;
      sequence.step = 0;
      for (int layer = 0; layer < kLayers; ++layer) {
        const auto first = step.rows[layer].begin() + member.offset;
        if (keep[i] == 0) continue;
        sequence.rows[layer].insert(sequence.rows[layer].end(), first, first + keep[i]);
      }
      if (request->lengths[i] != static_cast<int64_t>(sequence.rows[0].size())) {
        return "end reported another length";
      }
    }
  }
  ++stats_.commits;
  steps_.erase(it);
  return "";
}

std::string EngineSimulator::AbortStep() {
  const auto it = AnyStep();
  if (it == steps_.end() || Pick(3) != 0) return "";
  const auto request = harness_.Abort(it->second.streams[0], it->first);
  if (!request->status.ok()) return absl::StrCat("abort: ", request->status.ToString());
  DropStep(it->first);
  return "";
}

std::string EngineSimulator::LetTimePass() {
  // Short enough for every lease; KV waits of 500 ms may end. Launch first, so that only those do.
  if (std::string wrong = Settle(); !wrong.empty()) return wrong;
  harness_.Advance(static_cast<int64_t>(Pick(700)));
  for (const auto& [id, step] : steps_) {
    // A sign of life from every step: a repeated BeginStep.
    const auto request = harness_.Begin(step.streams[0], id, step.args, step.participants);
    if (!request->status.ok()) return absl::StrCat("touch: ", request->status.ToString());
  }
  return "";
}

std::string EngineSimulator::Launch() {
  harness_.core().StartLaunch();
  if (Pick(2) == 0) harness_.core().CompleteLaunch(/*wait=*/true);
  return "";
}

std::string EngineSimulator::Step() {
  using Operation = std::string (EngineSimulator::*)();
  static constexpr Operation kOperations[] = {
      &EngineSimulator::OpenSequence,     &EngineSimulator::ForkSequence,
      &EngineSimulator::TruncateSequence, &EngineSimulator::ReleaseSequence,
      &EngineSimulator::OpenStream,       &EngineSimulator::CloseStream,
      &EngineSimulator::BeginStep,        &EngineSimulator::BeginStep,
      &EngineSimulator::JoinStep,         &EngineSimulator::AttendNext,
      &EngineSimulator::AttendNext,       &EngineSimulator::AttendNext,
      &EngineSimulator::AttendNext,       &EngineSimulator::AttendOutOfOrder,
      &EngineSimulator::AttendRepeat,     &EngineSimulator::QuerySlice,
      &EngineSimulator::JoinStep,         &EngineSimulator::JoinStep,
      &EngineSimulator::AttendByRanks,    &EngineSimulator::AttendByRanks,
      &EngineSimulator::EndStep,          &EngineSimulator::EndStep,
      &EngineSimulator::AbortStep,        &EngineSimulator::LetTimePass,
      &EngineSimulator::Launch,           &EngineSimulator::Launch,
  };
  ++stats_.operations;
  std::string wrong = (this->*kOperations[Pick(std::size(kOperations))])();
  if (wrong.empty()) wrong = CheckAnswers();
  if (wrong.empty() && stats_.operations % 16 == 0) wrong = CheckSequences();
  return wrong;
}

}  // namespace mla::simulation
