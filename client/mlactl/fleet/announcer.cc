#include "client/mlactl/fleet/announcer.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "client/cpp/cluster/targets.h"
#include "client/mlactl/cli/interrupt.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/fleet/servers.h"

namespace mla::mlactl {
namespace {

// A server that does not answer within this time is taken out of the registry.
constexpr int64_t kAnswerMs = 2000;
// Turns between two questions for device, version and models, which seldom change.
constexpr uint64_t kSeldom = 10;
// The pause between two looks for an interrupt.
constexpr auto kPause = std::chrono::milliseconds(50);
constexpr char kUnix[] = "unix:";

constexpr char kNotes[] =
    "Runs until Ctrl-C or SIGTERM, and takes the server out of the registry then. Each second it\n"
    "asks the server and renews a lease of 4 s. One such process belongs next to each server.\n"
    "Says on standard output when the server is announced, and when it is not, and why.\n";

struct Options {
  std::string registry, address, node;
  client::EtcdFiles etcd;
};

std::string OwnHost() {
  char name[256] = "";
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

int Announce(const CommonOptions& common, const Options& options) {
  if (client::NamesCluster(common.target)) {
    return FailUsage(absl::InvalidArgumentError(absl::StrCat(
        "--target: got \"", common.target, "\", must be one server, as this host reaches it")));
  }
  if (!client::IsEtcdTarget(options.registry)) {
    return FailUsage(absl::InvalidArgumentError(absl::StrCat(
        "--registry: got \"", options.registry, "\", must be etcd://HOST:2379/PREFIX")));
  }
  if (absl::Status s = client::CheckMember(client::MemberAt(options.address)); !s.ok()) {
    return FailUsage(s);
  }
  const auto registry = client::RegistryOf(options.registry, options.etcd);
  if (!registry.ok()) return FailUsage(registry.status());
  Announcer announcer(common, registry->get(), options.address,
                      options.node.empty() ? OwnHost() : options.node);
  const std::atomic<bool>& stop = CatchInterrupts();
  std::string said;
  while (!stop) {
    const absl::Status status = announcer.Turn();
    const std::string now = status.ok() ? absl::StrCat("announced ", options.address)
                                        : absl::StrCat("not announced: ", status.message());
    if (now != said) Print(absl::StrCat(now, "\n"));
    said = now;
    const auto next = std::chrono::steady_clock::now() + std::chrono::milliseconds(kTurnMs);
    while (!stop && std::chrono::steady_clock::now() < next) std::this_thread::sleep_for(kPause);
  }
  announcer.Withdraw();
  return kOk;
}

}  // namespace

std::string ShownText(const std::string& text) {
  std::string shown;
  for (const char one : text) {
    if (one >= 0x20 && one < 0x7f && shown.size() < client::kMostText) shown += one;
  }
  return shown;
}

Announcer::Announcer(const CommonOptions& common, client::Registry* registry,
                     const std::string& address, const std::string& node)
    : common_(common), registry_(registry) {
  common_.client.call_timeout_ms = std::min(common_.client.call_timeout_ms, kAnswerMs);
  member_.set_address(address);
  member_.set_node(ShownText(node));
  if (absl::StartsWith(common.target, kUnix)) {
    member_.set_socket(std::string(absl::StripPrefix(common.target, kUnix)));
  }
}

absl::Status Announcer::Turn() {
  if (absl::Status asked = Ask(); !asked.ok()) {
    // Another process may be there at the next turn.
    client_.reset();
    Withdraw();
    return asked;
  }
  ++turn_;
  return registry_->Announce(member_, kLeaseSeconds);
}

absl::Status Announcer::AskSeldom() {
  MLA_ASSIGN_OR_RETURN(const auto models, client_->ListModels());
  std::set<std::string> digests;
  for (const v1::ModelInfo& one : models.models()) {
    if (one.model().weights_digest().empty()) continue;
    if (digests.size() == static_cast<size_t>(client::kMostDigests)) break;
    digests.insert(absl::BytesToHexString(one.model().weights_digest()));
  }
  member_.mutable_models()->Assign(digests.begin(), digests.end());
  const v1::Backend& backend = client_->info().backend();
  member_.set_device(ShownText(backend.device().empty() ? backend.name() : backend.device()));
  member_.set_version(ShownText(client_->info().server_version()));
  return absl::OkStatus();
}

absl::Status Announcer::Ask() {
  if (client_ == nullptr) {
    MLA_ASSIGN_OR_RETURN(client_, ConnectTo(common_, common_.target));
    turn_ = 0;
  }
  if (turn_ % kSeldom == 0) {
    MLA_RETURN_IF_ERROR(AskSeldom());
  }
  const auto probe = client_->Probe("");
  if (probe.ok()) {
    member_.set_boot_id(probe->boot_id());
    member_.set_draining(probe->draining());
    member_.set_bytes_free(probe->kv_bytes_free());
    member_.set_bytes_cached(probe->kv_bytes_cached());
    member_.set_bytes_total(probe->kv_bytes_total());
    member_.set_sequences(probe->sequences());
    return absl::OkStatus();
  }
  if (!absl::IsUnimplemented(probe.status())) return probe.status();
  // A release that cannot be probed; its counters say the same.
  MLA_ASSIGN_OR_RETURN(const auto stats, client_->GetStats());
  member_.set_boot_id(stats.boot_id());
  member_.set_bytes_total(stats.kv_bytes_total());
  member_.set_bytes_free(stats.kv_bytes_total() -
                         std::min(stats.kv_bytes_total(), stats.kv_bytes_used()));
  member_.set_sequences(stats.sequences());
  return absl::OkStatus();
}

void AddAnnounceCommand(Program* program) {
  const auto options = std::make_shared<Options>();
  Command command = program->Add(
      {.name = "announce",
       .group = "Clusters",
       .summary = "keep a server in the registry of a cluster",
       .examples = "mlactl announce --registry=etcd://etcd-0:2379/fleet \\\n"
                   "    --target=unix:/run/mla-server-0/mla.sock --address=node-1:50551\n",
       .notes = kNotes});
  command
      .Text({"registry", "TARGET", "etcd://HOST:2379/PREFIX, or etcds:// over TLS"},
            &options->registry)
      ->required();
  command.Text({"address", "HOST:PORT", "the server, as workers reach it"}, &options->address)
      ->required();
  command.Text({"node", "NAME", "of this host (default: its host name)"}, &options->node);
  command.Text({"etcd-ca", "FILE", "authorities of etcds:// (default: the system's)"},
               &options->etcd.ca);
  command.Text({"etcd-cert", "FILE", "this client's certificate for etcds://"},
               &options->etcd.cert);
  command.Text({"etcd-key", "FILE", "its key"}, &options->etcd.key);
  command.Run([options](const CommonOptions& common) { return Announce(common, *options); });
}

}  // namespace mla::mlactl
