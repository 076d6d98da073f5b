#include "kernels/backend_registry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace mla::kernels {

absl::Status BackendRegistry::Add(BackendRow row) {
  for (const BackendRow& existing : rows_) {
    if (existing.name == row.name)
      return absl::AlreadyExistsError(absl::StrCat("backend ", row.name));
  }
  rows_.push_back(std::move(row));
  std::stable_sort(rows_.begin(), rows_.end(),
                   [](const BackendRow& a, const BackendRow& b) { return a.rank > b.rank; });
  return absl::OkStatus();
}

std::vector<std::string> BackendRegistry::Names() const {
  std::vector<std::string> names;
  names.reserve(rows_.size());
  for (const BackendRow& row : rows_) names.push_back(row.name);
  return names;
}

absl::StatusOr<BackendChoice> BackendRegistry::Select(const std::string& wanted,
                                                      const BackendOptions& options) const {
  const bool any = wanted.empty() || wanted == "auto", gpu = wanted == kAnyGpu;
  BackendChoice choice;
  bool known = any || gpu;
  for (const BackendRow& row : rows_) {
    BackendCandidate candidate{row.name, row.rank, false, ""};
    if (!any && row.name != wanted && !(gpu && row.hardware)) {
      candidate.reason = absl::StrCat("--backend=", wanted, " forces another");
    } else if (choice.backend != nullptr) {
      candidate.reason = "a backend of higher rank was chosen";
    } else {
      known = true;
      auto backend = row.create(options);
      candidate.chosen = backend.ok();
      if (backend.ok()) {
        choice.backend = *std::move(backend);
      } else {
        candidate.reason = std::string(backend.status().message());
        if (row.hardware) candidate.unused_hardware = row.hardware();
      }
    }
    choice.candidates.push_back(std::move(candidate));
  }
  if (!known) {
    return absl::NotFoundError(absl::StrCat("no backend named ", wanted, "; there are auto, ",
                                            kAnyGpu, ", ", absl::StrJoin(Names(), ", ")));
  }
  if (choice.backend == nullptr) {
    std::string reasons;
    for (const BackendCandidate& candidate : choice.candidates) {
      absl::StrAppend(&reasons, "; ", candidate.name, ": ", candidate.reason);
      if (candidate.unused_hardware.empty()) continue;
      absl::StrAppend(&reasons, " (this machine has ", candidate.unused_hardware, ")");
    }
    return absl::FailedPreconditionError(
        absl::StrCat("no backend can run here (wanted ", wanted, ")", reasons));
  }
  return choice;
}

}  // namespace mla::kernels
