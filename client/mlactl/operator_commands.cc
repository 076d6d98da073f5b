#include "client/mlactl/operator_commands.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/progress.h"
#include "client/mlactl/text/units.h"

namespace mla::mlactl {

std::vector<std::string> PeersOf(const std::string& list, const std::string& own) {
  std::vector<std::string> peers = absl::StrSplit(list, ',', absl::SkipEmpty());
  const auto self = std::find_if(peers.begin(), peers.end(), [&](const std::string& peer) {
    return !own.empty() && (absl::StartsWith(peer, own + ".") || absl::StartsWith(peer, own + ":"));
  });
  if (self == peers.end()) return peers;
  std::rotate(peers.begin(), self, peers.end());
  peers.erase(peers.begin());
  return peers;
}

namespace {

constexpr char kGroup[] = "Operation";

std::string OwnHost() {
  char name[256] = "";
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

constexpr char kQuotaNotes[] =
    "Changes are not persisted: a restarted server has the quotas of its configuration. A bound\n"
    "below what is in use takes nothing away; the tenant gets no more until it has released "
    "enough.\n";

struct QuotaColumns {
  bool all = false;     // else what a tenant does not use and was never refused is left out
  bool digits = false;  // else bytes have units
};

// Writes a number in the unit that the resource's `name` says.
std::string NumberText(const std::string& name, uint64_t number, bool digits) {
  if (number > uint64_t{INT64_MAX} - 1) return "none";
  return digits ? absl::StrCat(number) : FieldForPeople(name, number);
}

std::string UsageLines(absl::string_view tenant, const QuotaColumns& columns,
                       const google::protobuf::RepeatedPtrField<v1::QuotaUsage>& usages) {
  std::string text;
  for (const v1::QuotaUsage& usage : usages) {
    const bool set = usage.source() == v1::QUOTA_SOURCE_RUNTIME;
    if (!columns.all && usage.used() == 0 && usage.refused() == 0 && !set) continue;
    const std::string source = absl::AsciiStrToLower(
        absl::StripPrefix(v1::QuotaSource_Name(usage.source()), "QUOTA_SOURCE_"));
    absl::StrAppendFormat(&text, "%-24s %-16s %16s %16s %-10s %8d\n", tenant, usage.name(),
                          NumberText(usage.name(), usage.used(), columns.digits),
                          NumberText(usage.name(), usage.bound(), columns.digits), source,
                          usage.refused());
  }
  return text;
}

std::string QuotaText(const google::protobuf::RepeatedPtrField<v1::TenantQuota>& tenants,
                      const google::protobuf::RepeatedPtrField<v1::QuotaUsage>& server,
                      const QuotaColumns& columns) {
  std::string text = absl::StrFormat("%-24s %-16s %16s %16s %-10s %8s\n", "tenant", "resource",
                                     "used", "bound", "from", "refused");
  absl::StrAppend(&text, UsageLines("(server)", columns, server));
  for (const v1::TenantQuota& tenant : tenants) {
    absl::StrAppend(&text, UsageLines(tenant.tenant(), columns, tenant.resources()));
    absl::StrAppendFormat(&text, "%-24s %-16s %16d\n", tenant.tenant(), "weight", tenant.weight());
  }
  return text;
}

// Reads text like "kv_bytes=4GiB". False: no such resource or no number.
bool ReadBound(absl::string_view text, v1::QuotaBound* bound) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits('=', 1));
  v1::QuotaResource resource;
  if (!v1::QuotaResource_Parse("QUOTA_RESOURCE_" + absl::AsciiStrToUpper(parts.first), &resource)) {
    return false;
  }
  absl::string_view number = parts.second;
  int shift = 0;
  for (const auto& [suffix, bits] : {std::pair("KiB", 10), {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}) {
    if (absl::ConsumeSuffix(&number, suffix)) shift = bits;
  }
  uint64_t value = 0;
  if (!absl::SimpleAtoi(number, &value) || value > uint64_t{INT64_MAX} >> shift) return false;
  bound->set_resource(resource);
  bound->set_bound(value << shift);
  return true;
}

// ------------------------------------------------------------------------------------- Drain

constexpr char kDrainNotes[] =
    "If --to names several servers, each sequence goes to the one with the most free bytes that\n"
    "takes it. This host's own name is passed over, so all pods of a set can have the same list;\n"
    "of a longer one, the 16 after this host are asked. A server without the capability\n"
    "hand_over_many (0.1.0) knows the first of them alone.\n";

struct DrainOptions {
  uint32_t deadline_ms = 0;  // 0: the server's
  bool exit = false;
  std::string destinations;  // servers, separated by commas; empty: sequences stay
  uint32_t delay_ms = 0;     // before anything is done
  uint32_t linger_ms = 0;    // after rows have moved
};

// Sequences that did not move come first, because they need an action.
std::string HandOverText(const v1::DrainReply& reply) {
  std::string kept;
  int moved = 0;
  std::map<std::string, int> by_peer;
  for (const v1::HandedOver& one : reply.handed_over()) {
    if (one.outcome() == v1::HAND_OVER_OUTCOME_MOVED) {
      ++moved;
      ++by_peer[one.peer()];
      continue;
    }
    const std::string outcome = absl::AsciiStrToLower(
        absl::StripPrefix(v1::HandOverOutcome_Name(one.outcome()), "HAND_OVER_OUTCOME_"));
    absl::StrAppendFormat(&kept, "%016x  %-8s %-24s %10d rows  %s: %s\n", one.sequence_id(),
                          outcome, one.tenant(), one.rows(), one.reason(), one.message());
  }
  std::string peers;
  for (const v1::DrainPeer& peer : reply.peers()) {
    absl::StrAppendFormat(&peers, "%-32s %5d sequences%s%s\n", peer.address(),
                          by_peer[peer.address()], peer.message().empty() ? "" : "  ",
                          peer.message());
  }
  return absl::StrCat(kept, reply.peers_size() > 1 ? peers : "", moved, " of ",
                      reply.handed_over_size(), " sequences moved\n");
}

// A server of release 0.1.0 moves sequences without the weights of their models, and cannot say so.
std::string WeightsText(const v1::GetServerInfoReply& server) {
  const auto& known = server.capabilities();
  if (std::find(known.begin(), known.end(), "hand_over_weights") != known.end()) return "";
  return "this server sends no weights: workers upload them where their sequences are now\n";
}

bool Left(const v1::DrainReply& reply) {
  return std::any_of(reply.handed_over().begin(), reply.handed_over().end(),
                     [](const v1::HandedOver& one) {
                       return one.outcome() != v1::HAND_OVER_OUTCOME_MOVED && one.rows() > 0;
                     });
}

// While it lives, shows on a terminal how far the server's drain is.
class DrainWatch final {
 public:
  explicit DrainWatch(client::Client* client) {
    if (isatty(fileno(stderr)) == 0) return;
    watcher_ = std::thread([this, client] {
      // Ends with the server, too; the drain's own answer says why.
      client
          ->WatchStatus(kIntervalMs,
                        [this](const v1::StatusUpdate& update) {
                          if (ended_) return false;
                          progress_.Show("drain", update.percent() / 100.0,
                                         absl::StrCat(update.open_steps(), " open steps, ",
                                                      update.sequences(), " sequences"));
                          return true;
                        })
          .IgnoreError();
    });
  }
  ~DrainWatch() {
    ended_ = true;
    if (watcher_.joinable()) watcher_.join();
  }
  DrainWatch(const DrainWatch&) = delete;
  DrainWatch& operator=(const DrainWatch&) = delete;

 private:
  static constexpr uint32_t kIntervalMs = 200;

  Progress progress_{stderr, false};
  std::atomic<bool> ended_{false};
  std::thread watcher_;
};

int Drain(const CommonOptions& common, const DrainOptions& options) {
  std::this_thread::sleep_for(std::chrono::milliseconds(options.delay_ms));
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  std::optional<DrainWatch> watch(std::in_place, client->get());
  std::vector<std::string> peers = PeersOf(options.destinations, OwnHost());
  if (peers.size() > client::kMostDrainPeers) peers.resize(client::kMostDrainPeers);
  const auto reply = (*client)->Drain(options.deadline_ms, options.exit, peers);
  watch.reset();
  if (!reply.ok()) return Fail(reply.status());
  const v1::DrainReply plain = WithPlainTexts(*reply);
  const bool moved =
      std::any_of(plain.handed_over().begin(), plain.handed_over().end(),
                  [](const auto& one) { return one.outcome() == v1::HAND_OVER_OUTCOME_MOVED; });
  const int code =
      Emit(common, ToJson(*reply),
           absl::StrCat(options.destinations.empty() ? "" : HandOverText(plain),
                        moved ? WeightsText((*client)->info()) : "",
                        plain.drained() ? "drained: " : "not drained: ", plain.message(), "\n"));
  if (code != kOk) return code;
  // The server tells its clients where their sequences are for as long as it runs.
  if (reply->handed_over_size() > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(options.linger_ms));
  }
  return reply->drained() && !Left(*reply) ? kOk : kNotServing;
}

void AddDrain(Program* program) {
  const auto options = std::make_shared<DrainOptions>();
  Command command = program->Add({.name = "drain",
                                  .group = kGroup,
                                  .summary = "refuse new work and wait for open steps",
                                  .examples = "mlactl drain --deadline-ms=60000 --exit\n"
                                              "mlactl drain --to=server-b:50551\n"
                                              "mlactl drain --to=mla-0.mla:50551,mla-1.mla:50551\n",
                                  .notes = kDrainNotes});
  command.Number(
      {"deadline-ms", "N", "abort what is still open after this time (default 0: the server's)"}, 0,
      86400000, &options->deadline_ms);
  command.Flag("exit", "stop the process when drained; with --to, only if all rows have moved",
               &options->exit);
  command.Text(
      {"to", "LIST", "HOST:PORT of servers that get the sequences, over TLS (default: they stay)"},
      &options->destinations);
  command.Number({"delay-ms", "N", "wait so long first, as for clients to hear of it (default 0)"},
                 0, 600000, &options->delay_ms);
  command.Number({"linger-ms", "N", "wait so long once rows have moved, for clients to be told"}, 0,
                 600000, &options->linger_ms);
  command.Run([options](const CommonOptions& common) { return Drain(common, *options); });

  program
      ->Add({.name = "cancel-drain",
             .group = kGroup,
             .summary = "accept new work again, or end a running drain",
             .examples = "mlactl cancel-drain\n"})
      .Run([](const CommonOptions& common) {
        return CallAndPrint(
            common, [](client::Client* client) { return client->CancelDrain(); },
            [](const v1::CancelDrainReply&) { return "the server takes new work\n"; });
      });
}

// ------------------------------------------------------------------------------------- Quotas

int ShowQuota(const CommonOptions& common, const v1::GetQuotaRequest& request) {
  return CallAndPrint(
      common, [&](client::Client* client) { return client->GetQuota(request); },
      [&](const v1::GetQuotaReply& reply) {
        // The table of a single tenant has every resource.
        return request.all() ? QuotaText(reply.tenants(), reply.server(),
                                         {.all = common.wide, .digits = common.wide})
                             : QuotaText(reply.tenants(), {}, {.all = true, .digits = common.wide});
      });
}

int SetQuota(const CommonOptions& common, const v1::SetQuotaRequest& request) {
  if (request.bounds_size() == 0 && request.weight() == 0 && !request.reset()) {
    return FailUsage(absl::InvalidArgumentError(
        "--bounds: got \"nothing\", must be given, or --weight, or --reset"));
  }
  return CallAndPrint(
      common, [&](client::Client* client) { return client->SetQuota(request); },
      [&](const v1::SetQuotaReply& reply) {
        google::protobuf::RepeatedPtrField<v1::TenantQuota> one;
        *one.Add() = reply.quota();
        return QuotaText(one, {}, {.all = true, .digits = common.wide});
      });
}

void AddSetQuota(Program* program) {
  struct Options {
    v1::SetQuotaRequest request;
    uint32_t weight = 0;
    bool reset = false;
  };
  const auto options = std::make_shared<Options>();
  Command command =
      program->Add({.name = "set-quota",
                    .group = kGroup,
                    .summary = "set the bounds of one tenant, until the server ends",
                    .examples = "mlactl set-quota research --bounds=kv_bytes=4GiB,sequences=64\n"
                                "mlactl set-quota research --reset\n",
                    .notes = kQuotaNotes});
  command.Word("TENANT", "the tenant", options->request.mutable_tenant());
  command.Parts(
      {"bounds", "LIST", "RESOURCE=NUMBER, separated by commas; sizes take KiB, MiB, GiB"},
      "RESOURCE=NUMBER, RESOURCE as quotas shows it", [options](const std::string& part) {
        return ReadBound(part, options->request.add_bounds());
      });
  command.Number({"weight", "N", "its share in what the scheduler divides, 1 to 1000"}, 1, 1000,
                 &options->weight);
  command.Flag("reset", "first undo all earlier set-quota of this tenant", &options->reset);
  command.Run([options](const CommonOptions& common) {
    options->request.set_weight(options->weight);
    options->request.set_reset(options->reset);
    return SetQuota(common, options->request);
  });
}

void AddQuotas(Program* program) {
  program
      ->Add({.name = "quotas",
             .group = kGroup,
             .summary = "show what each tenant uses and may use",
             .examples = "mlactl quotas --json\n"})
      .Run([](const CommonOptions& common) {
        v1::GetQuotaRequest request;
        request.set_all(true);
        return ShowQuota(common, request);
      });
  const auto request = std::make_shared<v1::GetQuotaRequest>();
  Command command = program->Add({.name = "quota",
                                  .group = kGroup,
                                  .summary = "show what one tenant uses and may use",
                                  .examples = "mlactl quota research\n"});
  command.Word("TENANT", "the tenant", request->mutable_tenant());
  command.Run([request](const CommonOptions& common) { return ShowQuota(common, *request); });
  AddSetQuota(program);
}

// ------------------------------------------------------------------------------------- Eviction

int EvictSequences(const CommonOptions& common, const v1::EvictSequencesRequest& request) {
  if ((request.sequence_ids_size() > 0) + !request.client_id().empty() + request.all() != 1) {
    return FailUsage(absl::InvalidArgumentError(
        "--ids: got \"none or several\", must be one of --ids, --client and --all"));
  }
  return CallAndPrint(
      common, [&](client::Client* client) { return client->EvictSequences(request); },
      [](const v1::EvictSequencesReply& reply) {
        return absl::StrCat(reply.evicted(), " sequences evicted, ", reply.not_found_size(),
                            " not found\n");
      });
}

void AddEvictSequences(Program* program) {
  struct Options {
    v1::EvictSequencesRequest request;
    bool all = false;
  };
  const auto options = std::make_shared<Options>();
  Command command =
      program->Add({.name = "evict-sequences",
                    .group = kGroup,
                    .summary = "release sequences of any tenant",
                    .examples = "mlactl evict-sequences research --client=worker-7\n"});
  command.Word("TENANT", "the owner of the sequences", options->request.mutable_tenant());
  command.Parts({"ids", "LIST", "these, as sequences shows them"},
                "ids as sequences shows them, separated by commas",
                [options](const std::string& part) {
                  uint64_t id = 0;
                  if (!absl::SimpleHexAtoi(part, &id)) return false;
                  options->request.add_sequence_ids(id);
                  return true;
                });
  command.Text({"client", "ID", "all of one client"}, options->request.mutable_client_id());
  command.Flag("all", "all of the tenant", &options->all);
  command.Run([options](const CommonOptions& common) {
    options->request.set_all(options->all);
    return EvictSequences(common, options->request);
  });
}

void AddEvictModel(Program* program) {
  struct Words {
    std::string tenant, model;
  };
  const auto words = std::make_shared<Words>();
  Command command = program->Add({.name = "evict-model",
                                  .group = kGroup,
                                  .summary = "release a model's sequences and unregister it",
                                  .examples = "mlactl evict-model research deepseek-v3\n"});
  command.Word("TENANT", "the owner of the model", &words->tenant);
  command.Word("MODEL", "its name", &words->model);
  command.Run([words](const CommonOptions& common) {
    return CallAndPrint(
        common,
        [&](client::Client* client) { return client->EvictModel(words->tenant, words->model); },
        [](const v1::EvictModelReply& reply) {
          return absl::StrCat("model evicted, and ", reply.evicted_sequences(), " sequences\n");
        });
  });
}

}  // namespace

void AddOperatorCommands(Program* program) {
  AddDrain(program);
  AddQuotas(program);
  AddEvictSequences(program);
  AddEvictModel(program);
}

}  // namespace mla::mlactl
