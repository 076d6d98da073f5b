#include "tests/simulation/oracle/oracle.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/simulation/oracle/patterns.h"

namespace mla::simulation {
namespace {

// A slab is about this part of the pool.
constexpr int64_t kSlabs = 32;

}  // namespace

float Oracle::Row(uint64_t key, int index, int tenant) const {
  return FromBits(PatternBits(key, index, tenant));
}

uint16_t Oracle::Weight(const OracleContents& contents, int layer, int head, bool value,
                        int index) {
  const uint64_t key =
      contents.weights_key * 4096 + static_cast<uint64_t>(layer * 64 + head * 2 + (value ? 1 : 0));
  return PatternBits(key, index, contents.tenant);
}

double Oracle::Attend(const OracleStep& step, int layer, int row, Form form, int head,
                      const float* query, uint64_t lists, std::vector<double>* output) {
  const OracleContents& model = ContentsOf(step.model);
  const Shape& s = model.shape;
  const OracleMember* member = nullptr;
  for (const OracleMember& m : step.members) {
    if (row >= m.offset && row < m.offset + m.rows) member = &m;
  }
  latent_query_.assign(s.row_dim(), 0.0);
  if (form == Form::kAbsorbed) {
    for (int i = 0; i < s.row_dim(); ++i) latent_query_[i] = query[i];
  } else {
    for (int i = 0; i < s.lora; ++i) {
      for (int n = 0; n < s.nope; ++n) {
        const double weight = FromBits(Weight(model, layer, head, false, n * s.lora + i));
        latent_query_[i] += query[n] * weight;
      }
    }
    for (int i = 0; i < s.rope; ++i) latent_query_[s.lora + i] = query[s.nope + i];
  }
  const std::vector<uint64_t>& cached = sequences.at(member->sequence).layers[layer];
  const std::vector<uint64_t>& fresh = step.layers[layer];
  const int visible = member->start + row - member->offset + 1;
  const auto key_of = [&](int j) {
    return j < member->start ? cached[j] : fresh[member->offset + j - member->start];
  };
  logits_.assign(visible, -INFINITY);
  double maximum = -INFINITY;
  for (int j = 0; j < visible; ++j) {
    if (lists != 0 && !IsListed(lists, row, j)) continue;
    double dot = 0;
    for (int i = 0; i < s.row_dim(); ++i) dot += latent_query_[i] * Row(key_of(j), i, step.tenant);
    logits_[j] = dot * s.scale;
    maximum = std::max(maximum, logits_[j]);
  }
  double sum = 0;
  latent_.assign(s.lora, 0.0);
  for (int j = 0; j < visible; ++j) {
    if (logits_[j] == -INFINITY) continue;
    const double weight = std::exp(logits_[j] - maximum);
    sum += weight;
    for (int i = 0; i < s.lora; ++i) latent_[i] += weight * Row(key_of(j), i, step.tenant);
  }
  for (double& value : latent_) value = sum > 0 ? value / sum : 0;
  if (form == Form::kAbsorbed) {
    *output = latent_;
  } else {
    output->assign(s.v, 0.0);
    for (int i = 0; i < s.lora; ++i) {
      for (int n = 0; n < s.v; ++n) {
        (*output)[n] += latent_[i] * FromBits(Weight(model, layer, head, true, i * s.v + n));
      }
    }
  }
  return maximum + std::log(sum);
}

const OracleQuota& Oracle::QuotaOf(int tenant) const {
  static const OracleQuota none;
  const auto found = quotas.find(tenant);
  return found == quotas.end() ? none : found->second;
}

int64_t Oracle::KvBytesOf(int tenant) const {
  int64_t bytes = 0;
  for (const OracleContents& of : contents) {
    if (of.tenant == tenant) bytes += of.groups * of.shape.group_bytes();
  }
  return bytes;
}

int64_t Oracle::SequencesOf(int tenant) const {
  return std::count_if(sequences.begin(), sequences.end(),
                       [tenant](const auto& entry) { return entry.second.tenant == tenant; });
}

int64_t Oracle::ModelsOf(int tenant) const {
  return std::count_if(models.begin(), models.end(), [tenant](const OracleModel& model) {
    return model.open && model.tenant == tenant;
  });
}

int64_t Oracle::StepsOf(int tenant) const {
  return std::count_if(steps.begin(), steps.end(),
                       [tenant](const auto& entry) { return entry.second.tenant == tenant; });
}

int Oracle::models_open() const {
  return static_cast<int>(
      std::count_if(models.begin(), models.end(), [](const OracleModel& m) { return m.open; }));
}

Reasons Oracle::CheckRegister(int tenant, const std::string& name, const Shape& shape) const {
  Reasons reasons;
  for (const OracleModel& model : models) {
    if (!model.open || model.tenant != tenant || model.name != name) continue;
    reasons.AddIf(model.shape != shape, "model_exists");
    return reasons;
  }
  reasons.AddIf(models_open() >= limits_.max_models || ModelsOf(tenant) >= QuotaOf(tenant).models,
                "models_exhausted");
  reasons.AddIf(shape.group_bytes() > limits_.pool_bytes, "page_group_too_large");
  return reasons;
}

int Oracle::ApplyRegister(int tenant, const std::string& name, const Shape& shape,
                          uint64_t weights_key, int64_t lease_ns, int64_t now) {
  for (size_t i = 0; i < models.size(); ++i) {
    OracleModel& model = models[i];
    if (!model.open || model.tenant != tenant || model.name != name) continue;
    if (lease_ns > 0) model.lease_ns = lease_ns;
    TouchModel(static_cast<int>(i), now);
    return static_cast<int>(i);
  }
  const auto equal = std::find_if(models.begin(), models.end(), [&](const OracleModel& other) {
    return other.open && other.tenant == tenant && other.shape == shape && shape.digest != 0;
  });
  OracleModel model;
  model.contents = equal == models.end() ? contents.size() : equal->contents;
  if (equal == models.end()) contents.push_back({tenant, shape, false, weights_key});
  model.tenant = tenant;
  model.name = name;
  model.shape = shape;
  model.open = true;
  model.lease_ns = lease_ns;
  model.deadline = now + lease_ns;
  models.push_back(model);
  return static_cast<int>(models.size()) - 1;
}

Reasons Oracle::CheckUnregister(int model) const {
  Reasons reasons;
  reasons.AddIf(!models[model].open, "model_not_found");
  reasons.AddIf(models[model].sequences > 0, "model_in_use");
  return reasons;
}

OracleSequence* Oracle::Find(int tenant, uint64_t id) {
  const auto found = sequences.find(id);
  return found == sequences.end() || found->second.tenant != tenant ? nullptr : &found->second;
}

const OracleSequence* Oracle::Find(int tenant, uint64_t id) const {
  return const_cast<Oracle*>(this)->Find(tenant, id);
}

Reasons Oracle::CheckOpen(int tenant, int model) const {
  Reasons reasons;
  reasons.AddIf(draining, "draining");
  reasons.AddIf(model < 0 || !models[model].open, "model_not_found");
  reasons.AddIf(static_cast<int>(sequences.size()) >= limits_.max_sequences ||
                    SequencesOf(tenant) >= QuotaOf(tenant).sequences,
                "sequences_exhausted");
  return reasons;
}

Reasons Oracle::CheckFork(int tenant, uint64_t parent, uint64_t epoch, int64_t length) const {
  Reasons reasons;
  reasons.AddIf(draining, "draining");
  const OracleSequence* from = Find(tenant, parent);
  if (from == nullptr) {
    reasons.Add("sequence_not_found");
    return reasons;
  }
  reasons.AddIf(from->epoch != epoch, "epoch_mismatch");
  reasons.AddIf(from->busy(), "in_step");
  reasons.AddIf(length < 0 || length > from->length(), "out_of_range");
  reasons.AddIf(static_cast<int>(sequences.size()) >= limits_.max_sequences ||
                    SequencesOf(tenant) >= QuotaOf(tenant).sequences,
                "sequences_exhausted");
  return reasons;
}

Reasons Oracle::CheckTruncate(int tenant, uint64_t id, uint64_t epoch, int64_t length) const {
  Reasons reasons;
  const OracleSequence* sequence = Find(tenant, id);
  if (sequence == nullptr) {
    reasons.Add("sequence_not_found");
    return reasons;
  }
  if (IsRepeat(*sequence, epoch, length)) return reasons;
  reasons.AddIf(sequence->epoch != epoch, "epoch_mismatch");
  reasons.AddIf(sequence->busy(), "in_step");
  reasons.AddIf(length < 0 || length > sequence->length(), "out_of_range");
  return reasons;
}

bool Oracle::IsRepeat(const OracleSequence& sequence, uint64_t epoch, int64_t length) {
  return sequence.truncated_from == epoch && sequence.epoch == epoch + 1 &&
         sequence.truncated_length == length && sequence.length() == length;
}

const OracleSequence* Oracle::OpenedBy(int tenant, const std::string& request_id) const {
  for (const auto& [id, sequence] : sequences) {
    if (sequence.tenant == tenant && sequence.origin.request_id == request_id) return &sequence;
  }
  return nullptr;
}

void Oracle::Renew(OracleSequence* sequence, int64_t lease_ns, int64_t now) {
  if (lease_ns > 0) sequence->lease_ns = std::min(lease_ns, limits_.max_lease_ns);
  sequence->deadline = now + sequence->lease_ns;
}

void Oracle::ApplyOpen(uint64_t id, int model, int64_t lease_ns, int64_t now) {
  OracleSequence sequence;
  sequence.id = id;
  sequence.tenant = models[model].tenant;
  sequence.model = model;
  sequence.layers.resize(models[model].shape.layers);
  sequence.lease_ns = limits_.sequence_lease_ns;
  Renew(&sequence, lease_ns, now);
  ++models[model].sequences;
  sequences.emplace(id, std::move(sequence));
}

void Oracle::ApplyFork(uint64_t id, uint64_t parent, int64_t length, int64_t lease_ns,
                       int64_t now) {
  OracleSequence& from = sequences.at(parent);
  Renew(&from, 0, now);
  OracleSequence child = from;
  child.id = id;
  child.epoch = 1;
  child.origin = OracleOrigin();
  child.truncated_from = 0;
  child.lease_ns = limits_.sequence_lease_ns;
  for (auto& layer : child.layers) layer.resize(length);
  child.pages.resize(
      std::min(child.pages.size(), static_cast<size_t>(length / models[child.model].shape.page)));
  child.groups.resize(PagesOf(from, length));
  for (const int group : child.groups) ++holders_[group];
  Renew(&child, lease_ns, now);
  ++models[child.model].sequences;
  sequences.emplace(id, std::move(child));
}

void Oracle::ApplyTruncate(uint64_t id, int64_t length, int64_t now) {
  OracleSequence& sequence = sequences.at(id);
  sequence.truncated_from = sequence.epoch++;
  sequence.truncated_length = length;
  for (auto& layer : sequence.layers) layer.resize(length);
  sequence.pages.resize(std::min(sequence.pages.size(),
                                 static_cast<size_t>(length / models[sequence.model].shape.page)));
  ShrinkTo(&sequence, static_cast<int>(length));
  Renew(&sequence, 0, now);
}

void Oracle::ApplyRelease(uint64_t id, int64_t now) {
  OracleSequence& sequence = sequences.at(id);
  ShrinkTo(&sequence, 0);
  --models[sequence.model].sequences;
  TouchModel(sequence.model, now);
  sequences.erase(id);
}

int Oracle::PagesOf(const OracleSequence& sequence, int64_t rows) const {
  const int page = models[sequence.model].shape.page;
  return static_cast<int>((rows + page - 1) / page);
}

void Oracle::TakeGroup(OracleSequence* sequence) {
  if (free_groups_.empty()) {
    free_groups_.push_back(static_cast<int>(holders_.size()));
    holders_.push_back(0);
  }
  const int group = free_groups_.back();
  free_groups_.pop_back();
  holders_[group] = 1;
  sequence->groups.push_back(group);
  ++groups_used_;
  ++ContentsOf(sequence->model).groups;
  bytes_used_ += models[sequence->model].shape.group_bytes();
}

void Oracle::DropGroup(OracleSequence* sequence) {
  const int group = sequence->groups.back();
  sequence->groups.pop_back();
  if (--holders_[group] > 0) return;
  if (!published_groups_.contains(group) && !copied_groups_.contains(group)) {
    free_groups_.push_back(group);
  }
  --groups_used_;
  --ContentsOf(sequence->model).groups;
  bytes_used_ -= models[sequence->model].shape.group_bytes();
}

void Oracle::ShareGroup(OracleSequence* sequence, int group) {
  sequence->groups.push_back(group);
  if (++holders_[group] > 1) return;
  ++groups_used_;
  ++ContentsOf(sequence->model).groups;
  bytes_used_ += models[sequence->model].shape.group_bytes();
}

// A sequence that keeps no row of a step gets back the page that it had before.
void Oracle::EndCopy(const OracleMember& member, bool kept_rows) {
  if (member.shared < 0) return;
  if (!kept_rows) {
    OracleSequence& sequence = sequences.at(member.sequence);
    DropGroup(&sequence);
    ShareGroup(&sequence, member.shared);
  }
  if (--copied_groups_.at(member.shared).steps > 0) return;
  copied_groups_.erase(member.shared);
  if (holders_[member.shared] == 0 && !published_groups_.contains(member.shared)) {
    free_groups_.push_back(member.shared);
  }
}

void Oracle::ShrinkTo(OracleSequence* sequence, int rows) {
  while (static_cast<int>(sequence->groups.size()) > PagesOf(*sequence, rows)) DropGroup(sequence);
}

int64_t Oracle::GroupsWanted(const OracleBegin& begin) const {
  int64_t groups = 0;
  std::map<int, int> copied;  // holders that changed to copies of their own
  for (size_t i = 0; i < begin.sequences.size(); ++i) {
    const OracleSequence& sequence = *Find(begin.tenant, begin.sequences[i]);
    const int page = models[sequence.model].shape.page;
    groups +=
        PagesOf(sequence, sequence.length() + begin.rows[i]) - PagesOf(sequence, sequence.length());
    if (sequence.length() % page == 0) continue;
    const int last = sequence.groups.back();
    if (holders_[last] - copied[last] <= 1) continue;
    ++copied[last];
    ++groups;
  }
  return groups;
}

void Oracle::CheckPages(const OracleBegin& begin, Reasons* reasons) const {
  const int64_t bytes = models[begin.model].shape.group_bytes();
  const int64_t available = std::min(limits_.pool_bytes - bytes_used_,
                                     QuotaOf(begin.tenant).kv_bytes - KvBytesOf(begin.tenant));
  // A bound may have been set below the current use; a step that needs no more pages is not
  // refused. A tenant that holds nothing gets one group of any size, unless its bound is 0.
  const int64_t groups = GroupsWanted(begin);
  const bool first = groups == 1 && KvBytesOf(begin.tenant) == 0 &&
                     QuotaOf(begin.tenant).kv_bytes > 0 &&
                     bytes <= limits_.pool_bytes - bytes_used_;
  reasons->AddIf(groups > 0 && groups * bytes > available && !first, "pages_exhausted");
}

void Oracle::CheckMember(const OracleBegin& begin, size_t index, Reasons* reasons) const {
  reasons->AddIf(begin.rows[index] < 1, "out_of_range");
  const OracleSequence* sequence = Find(begin.tenant, begin.sequences[index]);
  if (sequence == nullptr) {
    reasons->Add("sequence_not_found");
    return;
  }
  const Shape& shape = models[sequence->model].shape;
  const bool twice = std::count(begin.sequences.begin(), begin.sequences.end(), sequence->id) > 1;
  const int64_t limit =
      std::min<int64_t>(limits_.max_sequence_rows, int64_t{limits_.max_pages} * shape.page);
  reasons->AddIf(sequence->model != begin.model, "wrong_model");
  reasons->AddIf(sequence->epoch != begin.epochs[index], "epoch_mismatch");
  reasons->AddIf(sequence->busy() || twice, "in_step");
  reasons->AddIf(sequence->length() != begin.starts[index], "position_mismatch");
  reasons->AddIf(begin.rows[index] + sequence->length() > limit, "out_of_range");
}

// --------------------------------------------------------------------- Named pages, export, import

size_t Oracle::MostFound(int model, const std::string& salt,
                         const std::vector<uint64_t>& pages) const {
  size_t count = 0;
  for (; count < pages.size(); ++count) {
    const auto page = published_.find(pages[count]);
    if (page == published_.end() || page->second.contents != models[model].contents ||
        page->second.salt != salt || page->second.index != count) {
      break;
    }
  }
  return count;
}

int Oracle::OfEquals(int model, const std::vector<uint64_t>& pages) const {
  return static_cast<int>(std::count_if(pages.begin(), pages.end(), [&](uint64_t page) {
    const auto found = published_.find(page);
    return found != published_.end() && found->second.model != model &&
           found->second.contents == models[model].contents;
  }));
}

Reasons Oracle::CheckMatch(int tenant, uint64_t id, uint64_t epoch) const {
  Reasons reasons;
  const OracleSequence* sequence = Find(tenant, id);
  if (sequence == nullptr) {
    reasons.Add("sequence_not_found");
    return reasons;
  }
  reasons.AddIf(sequence->epoch != epoch, "epoch_mismatch");
  reasons.AddIf(sequence->busy(), "in_step");
  return reasons;
}

void Oracle::ApplyMatch(uint64_t id, const std::vector<uint64_t>& pages, const std::string& salt,
                        size_t found) {
  OracleSequence& sequence = sequences.at(id);
  sequence.pages = pages;
  sequence.salt = salt;
  for (; found > 0; --found) {
    const Published& page = published_.at(pages[sequence.groups.size()]);
    for (size_t layer = 0; layer < sequence.layers.size(); ++layer) {
      auto& rows = sequence.layers[layer];
      rows.insert(rows.end(), page.layers[layer].begin(), page.layers[layer].end());
    }
    ShareGroup(&sequence, page.group);
  }
  Publish(sequence);
}

void Oracle::Publish(const OracleSequence& sequence) {
  const auto page = static_cast<size_t>(models[sequence.model].shape.page);
  const size_t whole =
      std::min(sequence.pages.size(), static_cast<size_t>(sequence.length()) / page);
  for (size_t i = 0; i < whole; ++i) {
    if (published_.contains(sequence.pages[i])) continue;
    Published page_record{
        sequence.model, models[sequence.model].contents, sequence.salt, i, sequence.groups[i], {}};
    for (const auto& rows : sequence.layers) {
      const auto first = rows.begin() + static_cast<int64_t>(i * page);
      page_record.layers.emplace_back(first, first + static_cast<int64_t>(page));
    }
    published_groups_.insert(page_record.group);
    published_.emplace(sequence.pages[i], std::move(page_record));
  }
}

Reasons Oracle::CheckExport(int tenant, uint64_t id, uint64_t epoch, int64_t first,
                            int64_t end) const {
  Reasons reasons = CheckMatch(tenant, id, epoch);
  const OracleSequence* sequence = Find(tenant, id);
  if (sequence == nullptr) return reasons;
  const int page = models[sequence->model].shape.page;
  reasons.AddIf(end > sequence->length() || first > end || first % page != 0, "out_of_range");
  reasons.AddIf(static_cast<int>(sequences.size()) >= limits_.max_sequences ||
                    SequencesOf(tenant) >= QuotaOf(tenant).sequences,
                "sequences_exhausted");
  return reasons;
}

Reasons Oracle::CheckImport(int tenant, int model, const Shape& shape, uint64_t behind,
                            uint64_t epoch, int64_t first, int64_t rows) const {
  Reasons reasons = behind == 0 ? CheckOpen(tenant, model) : CheckMatch(tenant, behind, epoch);
  reasons.AddIf(draining, "draining");
  reasons.AddIf(!models[model].open, "model_not_found");
  if (!reasons.none()) return reasons;
  Shape other = shape;  // a model may have another scale and the same rows
  other.scale = models[model].shape.scale;
  reasons.AddIf(other != models[model].shape, "import_differs");
  const OracleSequence* sequence = behind == 0 ? nullptr : Find(tenant, behind);
  reasons.AddIf(sequence != nullptr && sequence->model != model, "wrong_model");
  const int64_t length = sequence == nullptr ? 0 : sequence->length();
  reasons.AddIf(first != length || length % shape.page != 0, "position_mismatch");
  const int64_t most =
      std::min<int64_t>(limits_.max_sequence_rows, int64_t{limits_.max_pages} * shape.page);
  reasons.AddIf(rows < 1 || rows > most - length, "out_of_range");
  return reasons;
}

void Oracle::ApplyImport(uint64_t id, int64_t rows, int64_t now) {
  OracleSequence& sequence = sequences.at(id);
  sequence.imports = true;
  const int pages = PagesOf(sequence, sequence.length() + rows);
  while (static_cast<int>(sequence.groups.size()) < pages) TakeGroup(&sequence);
  Renew(&sequence, 0, now);
}

void Oracle::EndImport(uint64_t id, const std::vector<std::vector<uint64_t>>& rows, int64_t now) {
  OracleSequence& sequence = sequences.at(id);
  sequence.imports = false;
  for (size_t layer = 0; layer < rows.size(); ++layer) {
    auto& to = sequence.layers[layer];
    to.insert(to.end(), rows[layer].begin(), rows[layer].end());
  }
  Publish(sequence);
  Renew(&sequence, 0, now);
}

void Oracle::AbortImport(uint64_t id) {
  OracleSequence& sequence = sequences.at(id);
  sequence.imports = false;
  ShrinkTo(&sequence, sequence.length());
}

// ------------------------------------------------------------------------------------------- Steps

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
