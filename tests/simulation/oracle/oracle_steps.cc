// Oracle: steps, and their changes by time.
#include <algorithm>
#include <utility>

#include "tests/simulation/oracle/oracle.h"

namespace mla::simulation {
namespace {

// A slab is about this part of the pool.
constexpr int64_t kSlabs = 32;

}  // namespace

OracleStep* Oracle::FindStep(int tenant, uint64_t id) {
  for (auto& [key, step] : steps) {
    if (step.tenant == tenant && step.id == id) return &step;
  }
  return nullptr;
}

const OracleStep* Oracle::FindStep(int tenant, uint64_t id) const {
  return const_cast<Oracle*>(this)->FindStep(tenant, id);
}

OracleStep* Oracle::StepOf(uint64_t key) {
  const auto found = steps.find(key);
  return found == steps.end() ? nullptr : &found->second;
}

Reasons Oracle::CheckBegin(const OracleBegin& begin) const {
  Reasons reasons;
  reasons.AddIf(draining, "draining");
  reasons.AddIf(unhealthy, "backend_unhealthy");
  reasons.AddIf(begin.model < 0 || !models[begin.model].open, "model_not_found");
  reasons.AddIf(static_cast<int>(steps.size()) >= limits_.max_open_steps ||
                    StepsOf(begin.tenant) >= QuotaOf(begin.tenant).open_steps,
                "steps_exhausted");
  const int members = static_cast<int>(begin.sequences.size());
  int64_t rows = 0;
  for (const int count : begin.rows) rows += count;
  reasons.AddIf(members < 1 || members > limits_.max_step_sequences ||
                    rows > limits_.max_step_rows || begin.participants < 1 ||
                    begin.participants > limits_.max_participants ||
                    begin.lease_ns > limits_.max_lease_ns,
                "out_of_range");
  for (size_t i = 0; i < begin.sequences.size(); ++i) CheckMember(begin, i, &reasons);
  if (reasons.none()) CheckPages(begin, &reasons);
  return reasons;
}

bool Oracle::PagesInDoubt(const OracleBegin& begin, int64_t groups_pinned) const {
  // Groups that page work still uses are not free, whatever model they belong to.
  if (groups_pinned > 0) return true;
  // A group of another model keeps at most one slab from this one, or as many as it covers.
  const OracleContents& model = ContentsOf(begin.model);
  // A page whose rows a copy still reads is copied again.
  const int64_t groups = GroupsWanted(begin) + static_cast<int64_t>(begin.sequences.size());
  const int64_t quota = QuotaOf(begin.tenant).kv_bytes;
  if (groups * model.shape.group_bytes() > quota - KvBytesOf(begin.tenant)) return true;
  const int64_t slab = limits_.pool_bytes / kSlabs;
  int64_t kept = 0;
  for (const OracleContents& other : contents) {
    if (&other == &model) continue;
    kept += other.groups * (slab + 2 * std::max(other.shape.group_bytes(), slab));
  }
  const int64_t sure = limits_.pool_bytes - kept - model.groups * model.shape.group_bytes();
  // The pool need not be a whole number of slabs, nor a slab a whole number of another layout's
  // groups.
  const int64_t bytes = groups * model.shape.group_bytes();
  return contents.size() > 1 ? bytes > sure / 2 : bytes > sure;
}

// A published page may be cached, and is then copied, too. The same holds for a page whose row an
// open step copies.
bool Oracle::CopiesLastPage(const OracleSequence& sequence, int row) const {
  const int group = sequence.groups.back();
  const auto copied = copied_groups_.find(group);
  return holders_[group] > 1 || published_groups_.contains(group) ||
         (copied != copied_groups_.end() && row < copied->second.rows);
}

uint64_t Oracle::ApplyBegin(const OracleBegin& begin, int64_t now) {
  OracleStep step;
  step.key = next_step_++;
  step.id = begin.id;
  step.tenant = begin.tenant;
  step.model = begin.model;
  step.streams.push_back(begin.stream);
  step.participants = begin.participants;
  const Shape& shape = models[begin.model].shape;
  for (size_t i = 0; i < begin.sequences.size(); ++i) {
    OracleSequence& sequence = sequences.at(begin.sequences[i]);
    sequence.step = step.key;
    step.members.push_back({sequence.id, begin.starts[i], begin.rows[i], step.total});
    step.total += begin.rows[i];
    const int row = sequence.length() % shape.page;
    if (row != 0 && CopiesLastPage(sequence, row)) {
      const int group = sequence.groups.back();
      step.members.back().shared = group;
      Copied& copied = copied_groups_[group];
      ++copied.steps;
      copied.rows = std::max(copied.rows, row);
      DropGroup(&sequence);
      TakeGroup(&sequence);
    }
    const int pages = PagesOf(sequence, int64_t{sequence.length()} + begin.rows[i]);
    while (static_cast<int>(sequence.groups.size()) < pages) TakeGroup(&sequence);
  }
  step.layers.resize(shape.layers);
  step.writer.assign(shape.layers, -1);
  step.broken.assign(shape.layers, false);
  step.lease_ns = begin.lease_ns > 0 ? begin.lease_ns : limits_.step_lease_ns;
  step.touched = now;
  const uint64_t key = step.key;
  steps.emplace(key, std::move(step));
  return key;
}

void Oracle::ApplyEnd(OracleStep* step, const std::vector<int>& rows, int64_t now) {
  for (size_t i = 0; i < step->members.size(); ++i) {
    const OracleMember& member = step->members[i];
    OracleSequence& sequence = sequences.at(member.sequence);
    for (size_t layer = 0; layer < step->layers.size(); ++layer) {
      const auto first = step->layers[layer].begin() + member.offset;
      if (rows[i] == 0) continue;
      sequence.layers[layer].insert(sequence.layers[layer].end(), first, first + rows[i]);
    }
    ShrinkTo(&sequence, sequence.length());
    EndCopy(member, rows[i] > 0);
    Publish(sequence);
    sequence.step = 0;
    freed_by_steps.emplace_back(sequence.tenant, sequence.id);
    Renew(&sequence, 0, now);
  }
  Close(step->key, /*aborted=*/false);
}

void Oracle::ApplyAbort(uint64_t key, int64_t now) {
  OracleStep& step = steps.at(key);
  for (const OracleMember& member : step.members) {
    OracleSequence& sequence = sequences.at(member.sequence);
    ShrinkTo(&sequence, sequence.length());
    EndCopy(member, /*kept_rows=*/false);
    sequence.step = 0;
    freed_by_steps.emplace_back(sequence.tenant, sequence.id);
    Renew(&sequence, 0, now);
  }
  Close(key, /*aborted=*/true);
}

void Oracle::Close(uint64_t key, bool aborted) {
  const auto at = steps.find(key);
  if (closed.size() == kClosedKept) closed.pop_front();
  closed.push_back({std::move(at->second), aborted});
  steps.erase(at);
}

bool Oracle::StepsOverdue(int64_t now) const {
  return std::any_of(steps.begin(), steps.end(), [now](const auto& entry) {
    const OracleStep& step = entry.second;
    return step.pending == 0 && !step.ending && now >= step.touched + step.lease_ns;
  });
}

int Oracle::PassTime(int64_t now) {
  std::vector<uint64_t> gone;
  for (const auto& [key, step] : steps) {
    if (step.pending == 0 && !step.ending && now >= step.touched + step.lease_ns) {
      gone.push_back(key);
    }
  }
  for (const uint64_t key : gone) ApplyAbort(key, now);
  std::vector<uint64_t> expired;
  for (auto& [id, sequence] : sequences) {
    if (now < sequence.deadline) continue;
    if (sequence.step == 0) {
      expired.push_back(id);
    } else {
      Renew(&sequence, 0, now);  // the step's own lease keeps it
    }
  }
  for (const uint64_t id : expired) ApplyRelease(id, now);
  expired_ += static_cast<int64_t>(expired.size());
  for (OracleModel& model : models) {
    if (!model.open || model.lease_ns == 0 || model.sequences > 0 || now < model.deadline) continue;
    model.open = false;
    ++models_expired_;
  }
  return static_cast<int>(gone.size() + expired.size());
}

}  // namespace mla::simulation
