// Chooses the backend that the server computes with, and reports the choice.
#ifndef MLA_SERVER_BACKEND_CHOICE_H_
#define MLA_SERVER_BACKEND_CHOICE_H_

#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend_registry.h"
#include "server/config/config.h"

namespace mla::server {

// Chooses the backend that the configuration asks for, from `registry` or, if that is null, from
// AllBackends(). Logs the parts of a GPU's self-test. Returns the errors of
// BackendRegistry::Select.
absl::StatusOr<kernels::BackendChoice> ChooseBackend(const Config& config,
                                                     const kernels::BackendRegistry* registry);

// Logs each candidate with its reason, and warns of hardware that is present but not used.
void LogSelection(std::span<const kernels::BackendCandidate> candidates);
// Logs the backend in use, with its notes and the products that it uses for models over 8-bit rows.
void LogBackend(const kernels::BackendInfo& backend);

// Returns a line of text for each backend whose hardware is present but not used.
std::string UnusedGpus(std::span<const kernels::BackendCandidate> candidates);

}  // namespace mla::server

#endif  // MLA_SERVER_BACKEND_CHOICE_H_
