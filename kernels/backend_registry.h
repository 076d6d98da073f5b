// Backends are rows in a table: a further backend is a further row (server/backends.cc adds them),
// and nothing here changes.
//
// The best supported backend wins (highest rank whose probe succeeds); a name forces one. Every row
// that was passed over keeps its reason, so that start-up logs and GetServerInfo can show the
// candidates in the order tried.
#ifndef MLA_KERNELS_BACKEND_REGISTRY_H_
#define MLA_KERNELS_BACKEND_REGISTRY_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"

namespace mla::kernels {

struct BackendOptions {
  int32_t threads = 0;  // CPU workers; 0 = all usable cores
  bool pin_threads = true;
  bool deterministic = false;        // results independent of batch composition; costs balance
  int32_t device = 0;                // GPU ordinal
  double gpu_memory_fraction = 0.9;  // share of the memory free at start
  int64_t gpu_expanded_workspace_bytes = int64_t{640} << 20;  // for up-projected keys and values
  int64_t gpu_shared_bytes = 0;     // device memory left to AllocateShared
  int64_t gpu_watchdog_ms = 10000;  // longest launch
  // The path of a GPU runtime's library, or of its folder. Empty: the usual places.
  std::string gpu_runtime_library;
  std::string gpu_graphs = "auto";    // "auto", "on", "off": hip::GraphUse
  int64_t gpu_self_test_ms = 300000;  // longest test of a GPU's kernels
  // Called when a part of that test begins, with the time spent so far; may be empty.
  std::function<void(std::string_view part, std::chrono::milliseconds so_far)> on_self_test_part;
  // CPU dispatch level to use, or "" for the best: "amx", "avx512_bf16", "avx512", "avx2",
  // "portable".
  std::string cpu_isa;
  int32_t spin_us = 20;  // CPU workers poll this long for the next launch before they sleep
};

// This name asks for a GPU of either vendor: a backend whose row names hardware.
inline constexpr char kAnyGpu[] = "gpu";

struct BackendRow {
  std::string name;
  int32_t rank = 0;  // higher is preferred
  // Probes the machine and builds the backend. A failure is the reason shown to people; it must not
  // abort.
  std::function<absl::StatusOr<std::unique_ptr<AttentionBackend>>(const BackendOptions&)> create;
  // Names the hardware of this kind that the machine has; "" if it has none. May be empty. Asked if
  // the backend could not be made.
  std::function<std::string()> hardware = {};
};

struct BackendCandidate {  // one row as seen at selection
  std::string name;
  int32_t rank = 0;
  bool chosen = false;
  std::string reason;  // why it was not chosen; empty when it was
  // Names hardware that is present and was not used, although no other backend was forced.
  std::string unused_hardware = "";
};

struct BackendChoice {
  std::unique_ptr<AttentionBackend> backend;
  std::vector<BackendCandidate> candidates;  // in the order tried
};

class BackendRegistry {
 public:
  // ALREADY_EXISTS if the name is taken.
  absl::Status Add(BackendRow row);
  // `wanted` is "auto", kAnyGpu or a row's name. FAILED_PRECONDITION with every candidate's reason
  // when none can run, NOT_FOUND with the list of names when the name is unknown.
  absl::StatusOr<BackendChoice> Select(const std::string& wanted,
                                       const BackendOptions& options) const;
  std::vector<std::string> Names() const;

 private:
  std::vector<BackendRow> rows_;
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_BACKEND_REGISTRY_H_
