// Oracle: pages that have names, and may be found by them.
#include <algorithm>

#include "tests/simulation/oracle/oracle.h"

namespace mla::simulation {

size_t Oracle::MostFound(int model, const std::string& salt,
                         const std::vector<uint64_t>& pages) const {
  size_t found = 0;
  for (; found < pages.size(); ++found) {
    const auto page = published_.find(pages[found]);
    if (page == published_.end() || page->second.model != model || page->second.salt != salt ||
        page->second.index != found) {
      break;
    }
  }
  return found;
}

Reasons Oracle::CheckMatch(int tenant, uint64_t id, uint64_t epoch) const {
  Reasons reasons;
  const OracleSequence* sequence = Find(tenant, id);
  if (sequence == nullptr) {
    reasons.Add("sequence_not_found");
    return reasons;
  }
  reasons.AddIf(sequence->epoch != epoch, "epoch_mismatch");
  reasons.AddIf(sequence->step != 0, "in_step");
  return reasons;
}

void Oracle::ApplyMatch(uint64_t id, const std::vector<uint64_t>& pages, const std::string& salt,
                        size_t found) {
  OracleSequence& sequence = sequences.at(id);
  sequence.pages = pages;
  sequence.salt = salt;
  const int64_t bytes = models[sequence.model].shape.group_bytes();
  for (; found > 0; --found) {
    const Published& page = published_.at(pages[sequence.groups.size()]);
    for (size_t layer = 0; layer < sequence.layers.size(); ++layer) {
      auto& rows = sequence.layers[layer];
      rows.insert(rows.end(), page.layers[layer].begin(), page.layers[layer].end());
    }
    sequence.groups.push_back(page.group);
    if (++holders_[page.group] > 1) continue;
    ++groups_used_;
    ++models[sequence.model].groups;
    bytes_used_ += bytes;
  }
  Publish(sequence);
}

void Oracle::Publish(const OracleSequence& sequence) {
  const auto page = static_cast<size_t>(models[sequence.model].shape.page);
  const size_t whole =
      std::min(sequence.pages.size(), static_cast<size_t>(sequence.length()) / page);
  for (size_t i = 0; i < whole; ++i) {
    if (published_.contains(sequence.pages[i])) continue;
    Published made{sequence.model, sequence.salt, i, sequence.groups[i], {}};
    for (const auto& rows : sequence.layers) {
      const auto first = rows.begin() + static_cast<int64_t>(i * page);
      made.layers.emplace_back(first, first + static_cast<int64_t>(page));
    }
    published_groups_.insert(made.group);
    published_.emplace(sequence.pages[i], std::move(made));
  }
}

}  // namespace mla::simulation
