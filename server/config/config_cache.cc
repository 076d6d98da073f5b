// Declares the keys of storage outside the pool: checkpoints and slower tiers.
#include "server/config/config_key.h"

namespace mla::server {

void AddCacheKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Text("checkpoint.path",
               "Folder for checkpoints of sequences, which outlive the server; empty: none are "
               "kept.",
               "Holds the key that files are checked with; one server a folder.",
               MLA_SLOT(checkpoint.path)),
          Bytes("checkpoint.bytes", 1 << 20, int64_t{1} << 50, "Checkpoint files of all tenants.",
                "Checkpoint is RESOURCE_EXHAUSTED beyond it.", MLA_SLOT(checkpoint.bytes)),
          Bytes("checkpoint.tenant_bytes", 0, int64_t{1} << 50,
                "Checkpoint files of one tenant; 0: 7/8 of checkpoint.bytes.",
                "Checkpoint is RESOURCE_EXHAUSTED beyond it.", MLA_SLOT(checkpoint.tenant_bytes)),
          Int("checkpoint.tenant_files", 1, 8192, "Checkpoints of one tenant.",
              "Checkpoint is RESOURCE_EXHAUSTED beyond it.", MLA_SLOT(checkpoint.tenant_files)),
          Bytes("tiers.host_bytes", 0, kTiB,
                "Host memory for cached rows that leave the pool, taken at start, on a GPU pinned; "
                "0: they do not leave it, and are evicted.",
                "It must fit into memory in addition to the pool.",
                MLA_SLOT(limits.host_tier_bytes)),
          Text("tiers.file_path",
               "File for cached rows that leave host memory; empty: none. Needs tiers.host_bytes.",
               "Made empty at each start, removed at the end; it holds rows unencrypted.",
               MLA_SLOT(tiers.file_path)),
          Bytes("tiers.file_bytes", 0, kTiB, "Bytes of the disk that tiers.file_path takes.",
                "Taken at start; the server does not start if the disk has no room for them.",
                MLA_SLOT(limits.file_tier_bytes)),
          Int("tiers.file_hits", 0, 1 << 20,
              "Matches that must have taken a page group's rows before the file gets them.",
              "0: all that leave host memory, which wears disks and keeps much that is not read "
              "again.",
              MLA_SLOT(limits.tier_file_hits)),
          Int("tiers.low_percent", 0, 100,
              "Cached rows begin to leave the pool, and host memory, when less of it is free.",
              "Steps that need more at once evict what has not left yet.",
              MLA_SLOT(limits.tier_low_percent)),
          Int("tiers.high_percent", 0, 100, "Cached rows leave until this much is free.",
              "At least tiers.low_percent.", MLA_SLOT(limits.tier_high_percent)),
          Int("tiers.tenant_percent", 1, 100, "Part of a tier that one tenant's rows may take.",
              "A tenant at its part displaces its own rows alone.",
              MLA_SLOT(limits.tier_tenant_percent)),
          Millis("tiers.wait_ms", 0, 60'000,
                 "How long Open and Match wait for rows that slower tiers have.",
                 "Then they answer with the rows that are there, and `deferred`.",
                 MLA_SLOT(limits.tier_wait_ms)),
          Int("tiers.threads", 1, 256,
              "Threads that seal page groups for the file and check page groups from it.",
              "One does about 5 GB/s. As many more read and write the file where the kernel has "
              "no io_uring.",
              MLA_SLOT(tiers.threads)),
      });
}

}  // namespace mla::server
