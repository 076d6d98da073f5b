#include "server/config/config_key.h"

namespace mla::server {

void AddGpuKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Int("gpu.device", 0, 1023, "Ordinal of the GPU.",
              "Counted as the driver counts the visible devices.",
              MLA_SLOT(backend_options.device)),
          Double("gpu.memory_fraction", 0.01, 1.0,
                 "Share of the memory that is free on the GPU at start which may be taken.",
                 "Near 1 leaves nothing for other processes; the start is refused when the cache, "
                 "the weights and the workspaces do not fit.",
                 MLA_SLOT(backend_options.gpu_memory_fraction)),
          Bytes("gpu.expanded_workspace_bytes", 1048576, kTiB,
                "Most of the GPU's memory for the up-projected keys and values of prompts; counted "
                "in gpu.memory_fraction.",
                "Prompts whose keys and values need more are computed in rounds, which costs time "
                "from a few hundred MiB down; where they would be more than 1024, in the slower "
                "absorbed form.",
                MLA_SLOT(backend_options.gpu_expanded_workspace_bytes)),
          Millis("gpu.watchdog_ms", 100, kDayMs,
                 "A launch that takes longer than this means that the GPU is lost.",
                 "Below the longest launch it takes a working GPU out of service until the server "
                 "is started again.",
                 MLA_SLOT(backend_options.gpu_watchdog_ms)),
          Text("gpu.runtime_library",
               "The GPU runtime's library, or the folder that it is in; empty: libamdhip64 or "
               "libcuda where the loader finds it, then in $ROCM_PATH/lib and /opt/rocm/lib.",
               "Needed where ROCm lies elsewhere; mlactl info says why it was not found in each "
               "place.",
               MLA_SLOT(backend_options.gpu_runtime_library)),
          Choice("gpu.graphs", "auto|on|off",
                 "Launch the kernels of repeated launches as one graph of the GPU's runtime; auto: "
                 "on NVIDIA GPUs.",
                 "HIP's graphs take device memory with every launch and may replay old arguments; "
                 "on: they are tested at start, and left off where the test fails.",
                 MLA_SLOT(backend_options.gpu_graphs)),
          Millis("gpu.self_test_ms", 1000, kDayMs,
                 "Longest known-answer test of a GPU's kernels, at start.",
                 "A GPU that has not passed it by then is not used; an emulated one takes minutes.",
                 MLA_SLOT(backend_options.gpu_self_test_ms)),
      });
}

}  // namespace mla::server
