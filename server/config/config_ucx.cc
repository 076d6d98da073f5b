#include "absl/strings/str_cat.h"
#include "server/config/config_key.h"

namespace mla::server {

void AddUcxKeys(std::vector<ConfigKey>* keys) {
  keys->insert(
      keys->end(),
      {
          Bool("ucx.enabled", "Offer command rings over UCX to clients of other hosts.",
               "UCX encrypts nothing and knows no peers: on networks of trusted hosts only "
               "(docs/rdma.md). Needs shm.enabled and a unix socket.",
               MLA_SLOT(ucx.enabled)),
          Text("ucx.library", "The library libucp; empty: libucp.so.0 where the loader finds it.",
               "Without it the server logs the reason and offers no UCX.", MLA_SLOT(ucx.library)),
          Text("ucx.transports",
               "Transports that UCX may use, as of UCX_TLS; empty: of the environment, or those of "
               "the network.",
               "A list that the client's does not meet lets no connection come about. Shared "
               "memory (shm, posix, sysv, cma), also of GPUs (cuda_ipc, rocm_ipc), is used if it "
               "is named: a client that lies about its process then reaches memory of all "
               "processes of the server's user.",
               MLA_SLOT(ucx.transports)),
          Text("ucx.devices",
               "Network devices that UCX may use, as of UCX_NET_DEVICES; empty: of the "
               "environment, or all.",
               "Name the devices of the network between the hosts: its sockets listen on all that "
               "are used.",
               MLA_SLOT(ucx.devices)),
          Bool("ucx.puts", "Clients that want it put tensors into regions, and get outputs put.",
               "For RDMA: no core of the receiver takes part then. Over TCP UCX emulates it by "
               "copies, and a process that reaches a relay's port can read that relay's memory.",
               MLA_SLOT(ucx.puts)),
          Bool("ucx.device_memory",
               "Clients that want it put tensors into memory of the GPU, and get outputs put from "
               "there.",
               "Needs ucx.puts, and UCX with the modules of the GPU. The memory is a part of "
               "shm.device_bytes; each relay opens the GPU's runtime.",
               MLA_SLOT(ucx.device_memory)),
          Bool("ucx.encrypted", "Encrypt what rings over UCX carry.",
               "AES-256-GCM with keys that the client gets over TLS, so it needs tls.*. The hosts' "
               "cores do it, and no tensor is put: RDMA loses by it more than TCP.",
               MLA_SLOT(ucx.encrypted)),
          Int("ucx.sessions", 1, 1024, "Rings over UCX at a time, all tenants together.",
              "Each has a process, a region of shm.* and a control thread; one tenant may have "
              "half of them.",
              MLA_SLOT(ucx.sessions)),
          Millis("ucx.open_ms", 100, kDayMs, "How long opening a ring over UCX may take.",
                 "UCX looks at all devices of the host for that.", MLA_SLOT(ucx.open_ms)),
      });
}

void CheckUcx(const Config& config, std::vector<std::string>* faults) {
  if (config.ucx.enabled && !config.shm.enabled) {
    faults->push_back("ucx.enabled: got true, must be false without shm.enabled");
  }
  if (config.ucx.encrypted && config.ucx.puts) {
    faults->push_back("ucx.encrypted: got true, must be false with ucx.puts");
  }
  if (config.ucx.device_memory && !config.ucx.puts) {
    faults->push_back("ucx.device_memory: got true, must be false without ucx.puts");
  }
  if (config.ucx.device_memory && config.shm.device_bytes == 0) {
    faults->push_back("ucx.device_memory: got true, must be false without shm.device_bytes");
  }
  if (config.ucx.encrypted && config.tls.cert.empty()) {
    faults->push_back("ucx.encrypted: got true, must be false without tls.cert");
  }
  if (config.ucx.sessions >= config.wire.control_threads) {
    faults->push_back(absl::StrCat("ucx.sessions: got ", config.ucx.sessions,
                                   ", must be less than wire.control_threads (",
                                   config.wire.control_threads, ")"));
  }
}

}  // namespace mla::server
