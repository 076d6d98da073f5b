// Oracle: pages that have names and may be found by them; export and import of rows.
#include <algorithm>

#include "tests/simulation/oracle/oracle.h"

namespace mla::simulation {

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

}  // namespace mla::simulation
