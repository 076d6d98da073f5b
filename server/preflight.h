// Checks of --check-config on the present machine, beyond the rules of the configuration itself
// (CheckConfig): they tell whether a server with this configuration would start here.
//
// The checks bind, write and keep nothing, so they may run while a server uses the same addresses.
#ifndef MLA_SERVER_PREFLIGHT_H_
#define MLA_SERVER_PREFLIGHT_H_

#include <string>
#include <vector>

#include "kernels/attention_backend.h"
#include "server/config/config.h"

namespace mla::server {

// Returns every fault, each as "key: the fault", in the backend, the PEM files, the folders and the
// group of the sockets, and the memory.
std::vector<std::string> Preflight(const Config& config);

// Returns lines of text on the GPU runtimes of this machine and the architectures that this binary
// can drive with them. Returns none if the configuration names a backend without a GPU.
std::vector<std::string> DescribeGpus(const Config& config);

// Fills in the sizes that the configuration leaves open: limits.weights_bytes, and
// limits.kv_cache_bytes from the remaining memory.
void ChooseSizes(const kernels::AttentionBackend& backend, Config* config);

// Returns limits.weights_bytes for a server with this much memory: room for the 61 layers of
// DeepSeek-V3 if that is at most an eighth of it.
int64_t DefaultWeightsBytes(int64_t memory_bytes);

// Returns OK if the buffers of a server with this configuration fit into the host's memory; else
// RESOURCE_EXHAUSTED, listing them. REQUIRES: ChooseSizes was called.
absl::Status CheckHostMemory(const Config& config, const kernels::AttentionBackend& backend);

}  // namespace mla::server

#endif  // MLA_SERVER_PREFLIGHT_H_
