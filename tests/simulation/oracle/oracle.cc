#include "tests/simulation/oracle/oracle.h"

#include <algorithm>
#include <cmath>

#include "tests/simulation/oracle/patterns.h"

namespace mla::simulation {

bool Reasons::Has(const std::string& word) const {
  return std::find(words_.begin(), words_.end(), word) != words_.end();
}

std::string Reasons::Join() const {
  std::string all;
  for (const std::string& word : words_) all += (all.empty() ? "" : " or ") + word;
  return all.empty() ? "granted" : all;
}

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

}  // namespace mla::simulation
