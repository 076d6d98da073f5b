// What --check-config finds out on the machine at hand, beyond the rules of the configuration
// itself (CheckConfig): whether a server with this configuration would start here.
//
// Nothing is bound, written or kept: it may run beside a server that uses the same addresses.
#ifndef MLA_SERVER_PREFLIGHT_H_
#define MLA_SERVER_PREFLIGHT_H_

#include <string>
#include <vector>

#include "kernels/attention_backend.h"
#include "server/config/config.h"

namespace mla::server {

// Every fault, each "key: what is wrong": the backend, the PEM files, the folders and the group of
// the sockets, the memory.
std::vector<std::string> Preflight(const Config& config);

// Fills in the sizes that the configuration leaves open: limits.weights_bytes and, of what is left,
// limits.kv_cache_bytes.
void ChooseSizes(const kernels::AttentionBackend& backend, Config* config);

// limits.weights_bytes of a server with so much memory: room for the 61 layers of DeepSeek-V3 where
// that is no more than an eighth.
int64_t DefaultWeightsBytes(int64_t memory_bytes);

// OK if the buffers of a server with this configuration fit into the memory of the host; else
// RESOURCE_EXHAUSTED that lists them. REQUIRES: ChooseSizes.
absl::Status CheckHostMemory(const Config& config, const kernels::AttentionBackend& backend);

}  // namespace mla::server

#endif  // MLA_SERVER_PREFLIGHT_H_
