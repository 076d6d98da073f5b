// Chooses the backend that the server computes with, and reports the choice.
#ifndef MLA_SERVER_BACKEND_CHOICE_H_
#define MLA_SERVER_BACKEND_CHOICE_H_

#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend_registry.h"
#include "server/config/config.h"

namespace mla::server {

// As the configuration says, of `registry`, or of AllBackends() where that is null. Logs the parts
// of a GPU's self-test. Errors: as BackendRegistry::Select.
absl::StatusOr<kernels::BackendChoice> ChooseBackend(const Config& config,
                                                     const kernels::BackendRegistry* registry);

// Each with its reason, and a warning for hardware that is there and not used.
void LogSelection(std::span<const kernels::BackendCandidate> candidates);
// Tells of the backend in use: its notes, and the products of models over 8-bit rows.
void LogBackend(const kernels::BackendInfo& backend);

// A line for each backend whose hardware is present but not used.
std::string UnusedGpus(std::span<const kernels::BackendCandidate> candidates);

}  // namespace mla::server

#endif  // MLA_SERVER_BACKEND_CHOICE_H_
