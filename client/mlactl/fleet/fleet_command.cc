#include "client/mlactl/fleet/fleet_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/placement.h"
#include "client/cpp/cluster/registry.h"
#include "client/cpp/cluster/targets.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/fleet/fleet_top.h"
#include "client/mlactl/fleet/sequence_list.h"
#include "client/mlactl/fleet/servers.h"
#include "client/mlactl/text/units.h"

namespace mla::mlactl {
namespace {

constexpr char kDraining[] = "draining";

constexpr char kNotes[] =
    "--target names the cluster: etcd://HOST:2379/PREFIX, dns:///NAME:50551 or a:50551,b:50551.\n"
    "  status     one row a server: what it says when it is asked\n"
    "  sequences  the tenant's open sequences on all of them; with --all-tenants, for operators, "
    "those\n"
    "             of every tenant\n"
    "  top        rates of each server and of all, live, until Ctrl-C\n"
    "  drain      hands the sequences of SERVER to the others, each to the one with the most "
    "room,\n"
    "             and writes to etcd where they are now; for operators, over TLS\n"
    "  rebalance  says which servers get new sequences. Clients place by themselves and pass over\n"
    "             servers fuller than 1.25 times the mean, so a cluster evens out with each new\n"
    "             conversation. Nothing is moved: drain empties a server\n"
    "Exit code 4: a server is away or drains, sequences are left, or a server is above the "
    "bound.\n";

struct Options {
  std::string action, server;
  client::EtcdFiles etcd;
  TopOptions top;
  uint32_t deadline_ms = 0;
  bool exit = false;
  bool all_tenants = false;
};

void FillStatus(const CommonOptions& common, const client::Member& member,
                fleet::ServerStatus* status) {
  status->set_address(member.address());
  status->set_node(member.node());
  status->set_device(member.device());
  status->set_version(member.version());
  const auto client = ConnectTo(common, member.address());
  const auto probe =
      client.ok() ? (*client)->Probe("") : absl::StatusOr<v1::ProbeReply>(client.status());
  if (!probe.ok()) {
    status->set_state(kAway);
    status->set_why(std::string(probe.status().message()));
    return;
  }
  const v1::GetServerInfoReply& info = (*client)->info();
  for (const v1::Backend& backend : info.backends()) {
    if (backend.chosen() && status->device().empty()) {
      status->set_device(backend.device().empty() ? backend.name() : backend.device());
    }
  }
  if (status->version().empty()) status->set_version(info.server_version());
  status->set_state(probe->draining() ? kDraining : kServing);
  status->set_boot_id(absl::StrFormat("%016x", probe->boot_id()));
  status->set_bytes_free(probe->kv_bytes_free());
  status->set_bytes_total(probe->kv_bytes_total());
  status->set_kv_percent(static_cast<uint32_t>(std::lround(100 * client::FillOf(*probe))));
  status->set_sequences(probe->sequences());
  status->set_queued_requests(probe->queued_requests());
}

absl::StatusOr<fleet::FleetStatus> StatusOf(const CommonOptions& common, const Options& options) {
  MLA_ASSIGN_OR_RETURN(const auto members, ReadMembers(common, options.etcd));
  std::vector<fleet::ServerStatus> servers(members.size());
  ForEach(members.size(), [&](size_t i) { FillStatus(common, members[i], &servers[i]); });
  std::sort(servers.begin(), servers.end(),
            [](const auto& a, const auto& b) { return a.address() < b.address(); });
  fleet::FleetStatus status;
  for (fleet::ServerStatus& one : servers) *status.add_servers() = std::move(one);
  Judge(&status);
  return status;
}

std::string StatusText(const fleet::FleetStatus& given, bool wide) {
  const fleet::FleetStatus status = WithPlainTexts(given);
  std::string text = absl::StrFormat("%-28s %-9s %5s %14s %9s %6s  %-20s %-12s%s\n", "server",
                                     "state", "kv %", "free", "sequences", "queued", "device",
                                     "version", wide ? " boot             node" : "");
  for (const fleet::ServerStatus& one : status.servers()) {
    if (one.state() == kAway) {
      absl::StrAppendFormat(&text, "%-28s %-9s %s\n", one.address(), one.state(), one.why());
      continue;
    }
    absl::StrAppendFormat(&text, "%-28s %-9s %5d %14s %9d %6d  %-20s %-12s", one.address(),
                          one.state(), one.kv_percent(),
                          wide ? absl::StrCat(one.bytes_free())
                               : BytesForPeople(static_cast<double>(one.bytes_free())),
                          one.sequences(), one.queued_requests(), one.device(), one.version());
    if (wide) absl::StrAppendFormat(&text, " %s %s", one.boot_id(), one.node());
    text += "\n";
  }
  return text;
}

int ShowStatus(const CommonOptions& common, const Options& options) {
  const auto status = StatusOf(common, options);
  if (!status.ok()) return Fail(status.status());
  const int code = Emit(common, ToJson(*status), StatusText(*status, common.wide));
  if (code != kOk) return code;
  const bool good = status->servers_size() > 0 &&
                    std::all_of(status->servers().begin(), status->servers().end(),
                                [](const auto& one) { return one.state() == kServing; });
  return good ? kOk : kNotServing;
}

int ShowSequences(const CommonOptions& common, const Options& options) {
  const auto members = ReadMembers(common, options.etcd);
  if (!members.ok()) return Fail(members.status());
  std::vector<absl::StatusOr<v1::GetReply>> replies(members->size(), v1::GetReply());
  ForEach(members->size(), [&](size_t i) {
    const auto client = ConnectTo(common, (*members)[i].address());
    replies[i] = client.ok() ? OpenSequences(client->get(), options.all_tenants)
                             : absl::StatusOr<v1::GetReply>(client.status());
  });
  fleet::FleetSequences all;
  for (size_t i = 0; i < members->size(); ++i) {
    const std::string& address = (*members)[i].address();
    const absl::Status& status = replies[i].status();
    if (status.ok()) {
      AddSequences(*replies[i], address, &all);
    } else if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) {
      all.add_away(address);
    } else {
      fleet::RefusedServer* const refused = all.add_refused();
      refused->set_address(address);
      refused->set_why(std::string(status.message()));
    }
  }
  OrderSequences(&all);
  const fleet::FleetSequences plain = WithPlainTexts(all);
  std::string text = SequencesText(plain, common.wide);
  for (const std::string& one : plain.away()) {
    absl::StrAppend(&text, one, " does not answer\n");
  }
  for (const fleet::RefusedServer& one : plain.refused()) {
    absl::StrAppend(&text, one.address(), ": ", one.why(), "\n");
  }
  const int code = Emit(common, ToJson(all), text);
  if (code != kOk) return code;
  return all.refused_size() > 0 ? kRefused : all.away_size() > 0 ? kNotServing : kOk;
}

int Rebalance(const CommonOptions& common, const Options& options) {
  const auto status = StatusOf(common, options);
  if (!status.ok()) return Fail(status.status());
  std::string text = StatusText(*status, common.wide);
  absl::StrAppendFormat(&text, "\nmean %d %%; servers above %d %% get no new sequences:",
                        status->mean_percent(), status->bound_percent());
  int above = 0;
  const fleet::FleetStatus plain = WithPlainTexts(*status);
  for (const fleet::ServerStatus& one : plain.servers()) {
    if (one.state() != kServing || one.gets_new_sequences()) continue;
    absl::StrAppend(&text, " ", one.address());
    ++above;
  }
  absl::StrAppend(&text, above == 0 ? " none\n" : "\n",
                  "Open sequences stay where they are; new ones even the servers out.\n");
  const int code = Emit(common, ToJson(*status), text);
  return code != kOk || above == 0 ? code : kNotServing;
}

// Returns the number of sequences with rows that did not move.
uint32_t LeftIn(const v1::DrainReply& reply) {
  uint32_t count = 0;
  for (const v1::HandedOver& one : reply.handed_over()) {
    count += one.outcome() != v1::HAND_OVER_OUTCOME_MOVED && one.rows() > 0 ? 1 : 0;
  }
  return count;
}

// Writes down where sequences have gone, and returns what became of each peer. `first`: the peer of
// a server that does not say which one has a sequence, because it knows only one.
absl::Status WriteDown(const v1::DrainReply& reply, const std::string& first,
                       client::Registry* registry, fleet::FleetDrain* result) {
  std::map<std::string, std::vector<uint64_t>> moved;
  for (const v1::HandedOver& one : reply.handed_over()) {
    if (one.outcome() != v1::HAND_OVER_OUTCOME_MOVED) continue;
    moved[one.peer().empty() ? first : one.peer()].push_back(one.sequence_id());
  }
  for (const v1::DrainPeer& peer : reply.peers()) {
    fleet::PeerDrain* const one = result->add_peers();
    one->set_address(peer.address());
    one->set_error(peer.message());
    one->set_moved(static_cast<uint32_t>(moved[peer.address()].size()));
  }
  if (reply.peers_size() == 0) {
    fleet::PeerDrain* const one = result->add_peers();
    one->set_address(first);
    one->set_moved(static_cast<uint32_t>(moved[first].size()));
  }
  result->set_left(LeftIn(reply));
  for (const auto& [peer, ids] : moved) {
    const absl::Status written = registry->WriteMoved(ids, peer);
    if (!written.ok() && !absl::IsUnimplemented(written)) return written;
  }
  return absl::OkStatus();
}

int DrainServer(const CommonOptions& common, const Options& options) {
  const auto registry = client::RegistryOf(common.target, options.etcd);
  if (!registry.ok()) return Fail(registry.status());
  const auto status = StatusOf(common, options);
  if (!status.ok()) return Fail(status.status());
  const std::vector<std::string> peers = PeersFor(*status, options.server);
  if (peers.empty()) {
    return Fail(absl::FailedPreconditionError(
        absl::StrCat("drain: no other member takes what ", options.server, " has")));
  }
  const auto client = ConnectTo(common, options.server);
  if (!client.ok()) return Fail(client.status());
  const auto reply = (*client)->Drain(options.deadline_ms, options.exit, peers);
  if (!reply.ok()) return Fail(reply.status());
  fleet::FleetDrain result;
  result.set_server(options.server);
  const absl::Status written = WriteDown(*reply, peers.front(), registry->get(), &result);
  std::string text;
  const fleet::FleetDrain plain = WithPlainTexts(result);
  for (const fleet::PeerDrain& one : plain.peers()) {
    absl::StrAppend(
        &text, one.address(), ": ",
        one.error().empty() ? absl::StrCat(one.moved(), " sequences have moved") : one.error(),
        "\n");
  }
  absl::StrAppend(&text, result.left(), " sequences are left\n");
  const int code = Emit(common, ToJson(result), text);
  if (!written.ok()) return Fail(written);
  return code != kOk || result.left() == 0 ? code : kNotServing;
}

int Run(const CommonOptions& common, const Options& options) {
  const bool drains = options.action == "drain";
  if (options.all_tenants && options.action != "sequences") {
    return FailUsage(absl::InvalidArgumentError(
        absl::StrCat("--all-tenants: got with \"", options.action, "\", must be with sequences")));
  }
  if (drains != !options.server.empty()) {
    return FailUsage(absl::InvalidArgumentError(
        drains ? "cluster drain: got no SERVER, must be HOST:PORT of a member"
               : absl::StrCat("cluster: got \"", options.server, "\", must be a word of drain")));
  }
  if (options.action == "status") return ShowStatus(common, options);
  if (options.action == "sequences") return ShowSequences(common, options);
  if (options.action == "top") return ShowFleetTop(common, options.etcd, options.top);
  if (options.action == "rebalance") return Rebalance(common, options);
  if (drains) return DrainServer(common, options);
  return FailUsage(absl::InvalidArgumentError(
      absl::StrCat("cluster: got \"", options.action,
                   "\", must be status, sequences, top, drain or rebalance")));
}

}  // namespace

void Judge(fleet::FleetStatus* status) {
  std::vector<std::string> addresses;
  client::Fills fills;
  double sum = 0;
  for (const fleet::ServerStatus& one : status->servers()) {
    if (one.state() != kServing) continue;
    addresses.push_back(one.address());
    fills[one.address()] = one.kv_percent() / 100.0;
    sum += fills[one.address()];
  }
  if (addresses.empty()) return;
  const double mean = sum / static_cast<double>(addresses.size());
  status->set_mean_percent(static_cast<uint32_t>(std::lround(100 * mean)));
  status->set_bound_percent(static_cast<uint32_t>(
      std::lround(100 * std::max(client::kBound * mean, mean + client::kSlack))));
  const std::vector<std::string> good = client::Bounded(addresses, fills);
  for (fleet::ServerStatus& one : *status->mutable_servers()) {
    one.set_gets_new_sequences(std::find(good.begin(), good.end(), one.address()) != good.end());
  }
}

std::vector<std::string> PeersFor(const fleet::FleetStatus& status, const std::string& server) {
  std::vector<const fleet::ServerStatus*> others;
  for (const fleet::ServerStatus& one : status.servers()) {
    if (one.address() != server && one.state() == kServing) others.push_back(&one);
  }
  std::stable_sort(others.begin(), others.end(),
                   [](const auto* a, const auto* b) { return a->bytes_free() > b->bytes_free(); });
  std::vector<std::string> peers;
  for (const auto* one : others) {
    if (peers.size() < client::kMostDrainPeers) peers.push_back(one->address());
  }
  return peers;
}

void AddFleetCommand(Program* program) {
  const auto options = std::make_shared<Options>();
  Command command = program->Add(
      {.name = "cluster",
       .group = "Clusters",
       .summary = "show or change the servers of a cluster",
       .examples = "mlactl cluster status --target=etcd://etcd-0:2379/fleet\n"
                   "mlactl cluster sequences --target=a:50551,b:50551 --all-tenants\n"
                   "mlactl cluster top --target=a:50551,b:50551 --interval-ms=500\n"
                   "mlactl cluster drain a:50551 --target=etcd://etcd-0:2379/fleet --exit\n"
                   "mlactl cluster rebalance --target=dns:///mla:50551\n",
       .notes = kNotes});
  command.Word("ACTION", "status, sequences, top, drain or rebalance", &options->action);
  command.Word("SERVER", "with drain: the member to empty", &options->server)->required(false);
  command.Number(
      {"deadline-ms", "N", "with drain: abort open steps after this time (default: the server's)"},
      0, 86400000, &options->deadline_ms);
  command.Flag("exit", "with drain: stop the process if all rows have moved", &options->exit);
  command.Flag("all-tenants", "with sequences: those of all tenants, for operators",
               &options->all_tenants);
  command.Number({"interval-ms", "N", "with top: time between two readings (default 2000)"},
                 kLeastIntervalMs, kMostIntervalMs, &options->top.interval_ms);
  command.Number({"count", "N", "with top: end after N readings"}, 1, UINT64_MAX,
                 &options->top.count);
  command.Text({"etcd-ca", "FILE", "authorities of etcds:// (default: the system's)"},
               &options->etcd.ca);
  command.Text({"etcd-cert", "FILE", "this client's certificate for etcds://"},
               &options->etcd.cert);
  command.Text({"etcd-key", "FILE", "its key"}, &options->etcd.key);
  command.Run([options](const CommonOptions& common) { return Run(common, *options); });
}

}  // namespace mla::mlactl
