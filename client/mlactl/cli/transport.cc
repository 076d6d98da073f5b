#include "client/mlactl/cli/transport.h"

namespace mla::mlactl {

const std::vector<std::string>& TransportNames() {
  static const auto* const kNames =
      new std::vector<std::string>{"inline", "shm", "ring-futex", "ring-spin"};
  return *kNames;
}

void AddTransport(Command* command, std::string* name) {
  std::vector<std::string> names = TransportNames();
  names.insert(names.begin(), "auto");
  names.emplace_back(kUcx);
  names.emplace_back(kUcxPuts);
  names.emplace_back(kUcxDevice);
  command->Choice({"transport", "NAME",
                   "inline, shm, ring-futex, ring-spin, ucx[-puts|-device], or auto (default)"},
                  names, name);
}

void AddSpin(Command* command, uint32_t* spin_us) {
  command->Number({"spin-us", "N",
                   "time that each side of ring-spin and ucx spins before it sleeps (default 100)"},
                  1, 10'000'000, spin_us);
}

void SetTransport(const std::string& name, uint32_t spin_us, client::ClientOptions* options) {
  using Transport = client::ClientOptions::Transport;
  options->spin_us = 0;
  if (name == "inline") options->transport = Transport::kInline;
  if (name == "shm") options->transport = Transport::kShm;
  if (name == "ring-futex") options->transport = Transport::kRing;
  if (name == "ring-spin") options->transport = Transport::kRing;
  if (name == kUcx) options->transport = Transport::kUcx;
  if (name == kUcxPuts) options->transport = Transport::kUcxPuts;
  if (name == kUcxDevice) options->transport = Transport::kUcxDevice;
  if (name == "ring-spin" || name.starts_with(kUcx)) options->spin_us = spin_us;
}

}  // namespace mla::mlactl
