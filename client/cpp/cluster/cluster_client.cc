#include "client/cpp/cluster/cluster_client.h"

#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "client/cpp/cluster/cluster_step.h"
#include "client/cpp/cluster/faults.h"
#include "client/cpp/cluster/recovery.h"
#include "client/cpp/cluster/targets.h"

namespace mla::client {
namespace {

constexpr char kUnix[] = "unix:";
constexpr int64_t kAskMs = 2000;

std::string HostName() {
  char name[256] = "";
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

std::vector<std::string> AddressesOf(const std::vector<Member>& members) {
  std::vector<std::string> addresses;
  for (const Member& member : members) addresses.push_back(member.address());
  return addresses;
}

bool Has(const std::vector<std::string>& addresses, const std::string& address) {
  return std::find(addresses.begin(), addresses.end(), address) != addresses.end();
}

// A socket of this host has no TLS.
ClientOptions WithoutTls(ClientOptions options) {
  options.tls_ca = options.tls_cert = options.tls_key = options.tls_server_name = "";
  return options;
}

// Asks a server for its boot id, within a short time.
absl::StatusOr<uint64_t> BootIdOf(const std::string& address, ClientOptions options) {
  options.transport = ClientOptions::Transport::kInline;
  options.device_bytes = 0;
  options.call_timeout_ms = std::min(options.call_timeout_ms, kAskMs);
  MLA_ASSIGN_OR_RETURN(const auto client, Client::Connect(address, options));
  return client->info().boot_id();
}

bool SameSpec(const v1::ModelSpec& a, const v1::ModelSpec& b) {
  return a.SerializeAsString() == b.SerializeAsString();
}

// Returns the terms after a repeat of a registration: servers keep what the repeat does not set.
ModelRecord::Terms Merged(ModelRecord::Terms before, const ModelRecord::Terms& repeat) {
  if (repeat.lease_ms > 0) before.lease_ms = repeat.lease_ms;
  if (!repeat.kv_scales.empty()) before.kv_scales = repeat.kv_scales;
  if (!repeat.sinks.empty()) before.sinks = repeat.sinks;
  return before;
}

// Returns the number of rows of whole pages that a prefix is about.
uint64_t RowsOfPrefix(const v1::RegisterReply& model, const v1::Prefix& prefix) {
  const uint64_t page = std::max<uint64_t>(1, model.model().page_size());
  uint64_t rows = prefix.page_keys_size() > 0
                      ? static_cast<uint64_t>(prefix.page_keys_size()) * page
                      : static_cast<uint64_t>(prefix.token_ids_size()) / page * page;
  if (prefix.max_rows() > 0) rows = std::min(rows, prefix.max_rows() / page * page);
  return rows;
}

// Returns the bytes that so many rows take in a pool.
uint64_t BytesOfRows(const v1::RegisterReply& model, uint64_t rows) {
  const uint64_t page = std::max<uint64_t>(1, model.model().page_size());
  return (rows + page - 1) / page * model.page_group_bytes();
}

}  // namespace

// ------------------------------------------------------------------------------------- Servers

ClusterClient::ClusterClient(ClientOptions options, ClusterOptions cluster,
                             std::unique_ptr<Registry> registry)
    : options_(std::move(options)),
      cluster_(std::move(cluster)),
      registry_(std::move(registry)),
      random_(RandomNumber()),
      owners_(std::make_unique<Owners>([this](const Member& member) { return ConnectTo(member); },
                                       SteadySeconds)) {
  if (options_.client_id.empty()) options_.client_id = absl::StrFormat("cpp-%016x", random_());
  same_host_ = std::make_unique<SameHost>(cluster_.sockets, [this](const std::string& path) {
    return BootIdOf(kUnix + path, WithoutTls(options_));
  });
  members_ = std::make_unique<MemberList>(
      [this] { return registry_->Read(); },
      [this](const std::vector<std::string>& addresses) { Gone(addresses); },
      MemberListOptions{.refresh_s = cluster_.refresh_s, .keep_s = cluster_.keep_s});
}

absl::StatusOr<std::unique_ptr<ClusterClient>> ClusterClient::Connect(
    const std::string& target, const ClientOptions& given, const ClusterOptions& cluster) {
  if (!(cluster.refresh_s > 0)) {
    return RefuseValue("refresh_s", absl::StrCat(cluster.refresh_s), "above 0");
  }
  MLA_ASSIGN_OR_RETURN(auto registry, RegistryOf(target, cluster.etcd));
  ClientOptions options = given;
  if (IsDnsTarget(target) && !options.tls_ca.empty() && options.tls_server_name.empty()) {
    // Certificates have the name, not the addresses that the name has.
    options.tls_server_name = ParseDnsTarget(target)->host;
  }
  std::unique_ptr<ClusterClient> client(
      new ClusterClient(std::move(options), cluster, std::move(registry)));
  MLA_RETURN_IF_ERROR(client->members_->Refresh());
  MLA_RETURN_IF_ERROR(client->members_->Start());
  return client;
}

ClusterClient::~ClusterClient() {
  if (process_.left()) {
    // The threads and perhaps the locks belong to another process.
    static_cast<void>(members_.release());
    static_cast<void>(owners_.release());
    return;
  }
  members_->Close();
  owners_.reset();
}

absl::StatusOr<std::unique_ptr<Client>> ClusterClient::ConnectTo(const Member& member) const {
  const bool here = cluster_.same_host && options_.tls_ca.empty() && !member.socket().empty() &&
                    member.node() == HostName() && access(member.socket().c_str(), F_OK) == 0;
  const std::string address = here ? kUnix + member.socket() : member.address();
  if (!same_host_->looks()) return Client::Connect(address, options_);
  MLA_ASSIGN_OR_RETURN(const auto boot_id, BootIdOf(address, options_));
  const std::string path = same_host_->PathOf(boot_id);
  return path.empty() ? Client::Connect(address, options_)
                      : Client::Connect(kUnix + path, WithoutTls(options_));
}

// Members have left the registry, or have restarted. Each is asked itself; one that does not answer
// is given up, so that steps that wait for it end at once.
void ClusterClient::Gone(const std::vector<std::string>& addresses) {
  const auto members = members_->All();
  for (const std::string& address : addresses) {
    const auto connection = owners_->At(address)->connected();
    if (connection == nullptr) continue;
    const auto now = members.ok()
                         ? std::find_if(members->begin(), members->end(),
                                        [&](const Member& one) { return one.address() == address; })
                         : std::vector<Member>::const_iterator();
    // A server that restarted can be connected again before the registry lists its new boot.
    if (members.ok() && now != members->end() &&
        now->boot_id() == connection->client()->info().boot_id()) {
      continue;
    }
    if (!owners_->Probe({address}, "", {}, kGoneSeconds)[0].probe) owners_->At(address)->Drop();
  }
}

absl::StatusOr<std::vector<Member>> ClusterClient::Usable() {
  MLA_ASSIGN_OR_RETURN(auto members, members_->All());
  owners_->Know(members);
  std::vector<Member> taking, well;
  for (const Member& one : members) {
    if (one.draining()) continue;
    taking.push_back(one);
    if (owners_->At(one.address())->well()) well.push_back(one);
  }
  if (taking.empty()) {
    return WithReason(absl::StatusCode::kUnavailable,
                      absl::StrCat("the cluster has no server that takes sequences: ",
                                   members.size(), " members, all of which drain"),
                      kNoServers);
  }
  return well.empty() ? taking : well;
}

std::string ClusterClient::HomeAmong(const std::vector<std::string>& addresses) const {
  if (Has(addresses, cluster_.home)) return cluster_.home;
  return SubsetOf(options_.client_id, addresses, 1)[0];
}

absl::StatusOr<std::string> ClusterClient::Home() {
  MLA_ASSIGN_OR_RETURN(const auto usable, Usable());
  return HomeAmong(AddressesOf(usable));
}

absl::StatusOr<std::shared_ptr<Client>> ClusterClient::ServerAt(const std::string& address) {
  Usable().status().IgnoreError();  // so that the owner knows how to connect
  MLA_ASSIGN_OR_RETURN(const auto connection, owners_->At(address)->connection());
  return std::shared_ptr<Client>(connection, connection->client());
}

absl::Status ClusterClient::AtHome(const std::function<absl::Status(Client* home)>& act) {
  absl::Status status;
  // The home may have restarted, or have gone, so that another server is the home now.
  for (int tries = 0; tries < 2; ++tries) {
    MLA_ASSIGN_OR_RETURN(const auto home, Home());
    const auto server = ServerAt(home);
    status = server.ok() ? act(server->get()) : server.status();
    if (status.ok()) break;
    owners_->At(home)->Failed(status);
    if (!IsAway(status) && !IsReplaced(status)) break;
  }
  return status;
}

absl::StatusOr<v1::ProbeReply> ClusterClient::ProbeHome(const std::string& model_id,
                                                        const v1::Prefix& prefix) {
  absl::StatusOr<v1::ProbeReply> reply;
  const absl::Status status = AtHome([&](Client* home) {
    reply = home->Probe(model_id, prefix);
    return reply.status();
  });
  if (!status.ok()) return status;
  return reply;
}

absl::StatusOr<v1::GetServerInfoReply> ClusterClient::HomeInfo() {
  v1::GetServerInfoReply info;
  const absl::Status status = AtHome([&info](Client* home) {
    const absl::Status runs = home->Probe("").status();
    info = home->info();
    // Whatever else a server answers, it is there.
    return IsAway(runs) || IsReplaced(runs) ? runs : absl::OkStatus();
  });
  if (!status.ok()) return status;
  return info;
}

// ------------------------------------------------------------------------------------- Models

absl::StatusOr<std::shared_ptr<ModelRecord>> ClusterClient::FindModel(const std::string& id) const {
  const MutexLock lock(mutex_);
  const auto found = models_.find(id);
  if (found != models_.end()) return found->second;
  return WithReason(absl::StatusCode::kNotFound,
                    absl::StrCat("model ", id, " was not registered with this client"),
                    "model_not_found");
}

absl::Status ClusterClient::OnPeer(Client* server, const ModelRecord& model) const {
  return cluster_.on_peer ? cluster_.on_peer(server, model.spec) : absl::OkStatus();
}

absl::Status ClusterClient::Ensure(Connection* connection, ModelRecord* model) {
  return connection->EnsureModel(model,
                                 [this, model](Client* server) { return OnPeer(server, *model); });
}

absl::StatusOr<std::shared_ptr<Connection>> ClusterClient::WithModel(const std::string& address,
                                                                     ModelRecord* model) {
  return Reach(address,
               [this, model](Connection* connection) { return Ensure(connection, model); });
}

absl::StatusOr<std::shared_ptr<Connection>> ClusterClient::Reach(
    const std::string& address, const std::function<absl::Status(Connection*)>& act) {
  const auto owner = owners_->At(address);
  absl::Status status;
  for (int turn = 0; turn < 2; ++turn) {
    const auto connection = owner->connection();
    status = connection.status();
    if (status.ok()) status = act(connection->get());
    if (status.ok()) {
      if (turn > 0) owner->Reached();
      return *connection;
    }
    owner->Failed(status);
    if (!IsReplaced(status)) break;  // else the next connection is to the new process
  }
  return status;
}

absl::StatusOr<v1::RegisterReply> ClusterClient::RepeatAt(const std::string& address,
                                                          const Repeat& repeat,
                                                          ModelRecord* model) {
  absl::StatusOr<v1::RegisterReply> reply;
  const auto there = Reach(address, [&](Connection* connection) {
    reply =
        connection->RepeatModel(model, repeat.set, repeat.newest,
                                [this, model](Client* server) { return OnPeer(server, *model); });
    return reply.status();
  });
  return there.ok() ? reply : there.status();
}

absl::Status ClusterClient::RepeatElsewhere(const std::string& done, const Repeat& repeat,
                                            ModelRecord* model) {
  absl::Status first;
  for (const auto& connection : owners_->Connected()) {
    if (connection->address() == done || !connection->HasModel(model)) continue;
    const absl::Status status = RepeatAt(connection->address(), repeat, model).status();
    if (status.ok()) continue;
    if (IsAway(status) || IsReplaced(status)) {
      connection->ForgetModel(model->spec.model_id());  // it gets all of it when it is used again
    } else {
      first.Update(status);
    }
  }
  return first;
}

absl::StatusOr<v1::RegisterReply> ClusterClient::RegisterAt(const std::string& address,
                                                            ModelRecord* model) {
  MLA_RETURN_IF_ERROR(WithModel(address, model).status());
  const MutexLock lock(model->mutex);
  return model->reply;
}

absl::StatusOr<v1::RegisterReply> ClusterClient::RegisterModel(const v1::ModelSpec& model,
                                                               uint32_t lease_ms,
                                                               std::span<const float> kv_scales,
                                                               std::span<const float> sinks) {
  MLA_ASSIGN_OR_RETURN(const auto usable, Usable());
  const ModelRecord::Terms set{.lease_ms = lease_ms,
                               .kv_scales = {kv_scales.begin(), kv_scales.end()},
                               .sinks = {sinks.begin(), sinks.end()}};
  ModelRecord::Terms newest = set;
  const auto known = FindModel(model.model_id());
  const bool repeat = known.ok() && SameSpec((*known)->spec, model);
  const auto record = repeat ? *known : std::make_shared<ModelRecord>();
  {
    const MutexLock lock(record->mutex);
    if (repeat) {
      newest = Merged(record->terms, set);
    } else {
      record->spec = model;
      record->terms = set;
    }
  }
  std::vector<std::string> addresses = AddressesOf(usable);
  addresses = SubsetOf(options_.client_id, addresses, kMostTried);
  const std::string home = HomeAmong(AddressesOf(usable));
  std::erase(addresses, home);
  addresses.insert(addresses.begin(), home);
  const Repeat terms{set, newest};
  absl::Status last;
  for (const std::string& address : addresses) {
    const auto reply =
        repeat ? RepeatAt(address, terms, record.get()) : RegisterAt(address, record.get());
    if (reply.ok()) {
      Keep(record, terms, *reply);
      last = repeat ? RepeatElsewhere(address, terms, record.get()) : absl::OkStatus();
      if (!last.ok()) return last;
      return reply;
    }
    last = reply.status();
    if (!IsAway(last) && !IsReplaced(last)) break;
  }
  return last;
}

void ClusterClient::Keep(const std::shared_ptr<ModelRecord>& record, const Repeat& terms,
                         const v1::RegisterReply& reply) {
  {
    const MutexLock lock(record->mutex);
    record->terms = terms.newest;
    if (!terms.set.kv_scales.empty()) record->uploads.erase(kScales);
    record->reply = reply;
  }
  const MutexLock lock(mutex_);
  auto& known = models_[record->spec.model_id()];
  if (known != nullptr && known != record) old_models_.push_back(known);
  known = record;
}

absl::StatusOr<v1::ModelSpec> ClusterClient::RegisteredModel(const std::string& model_id) const {
  MLA_ASSIGN_OR_RETURN(const auto model, FindModel(model_id));
  return model->spec;
}

absl::Status ClusterClient::Upload(const std::string& model_id, const std::string& about,
                                   std::function<absl::Status(Client* server)> upload) {
  MLA_ASSIGN_OR_RETURN(const auto model, FindModel(model_id));
  std::function<absl::Status(Client*)> before;
  {
    // Before the servers are looked at, so that none that gets the model meanwhile is left out.
    const MutexLock lock(model->mutex);
    before = std::exchange(model->uploads[about], upload);
  }
  absl::Status last =
      WithReason(absl::StatusCode::kUnavailable, "no server has the model", kNoServers);
  int done = 0;
  for (const auto& connection : owners_->Connected()) {
    const auto took = connection->IfModel(model_id, upload);
    if (took.ok()) {
      done += *took ? 1 : 0;
      continue;
    }
    last = took.status();
    const auto owner = owners_->At(connection->address());
    owner->Failed(last);
    if (!IsAway(last) && !IsReplaced(last)) break;
    owner->Drop();  // with the next connection it gets all of them
  }
  if (done > 0 && (IsAway(last) || IsReplaced(last))) return absl::OkStatus();
  const MutexLock lock(model->mutex);
  if (before) {
    model->uploads[about] = before;
  } else {
    model->uploads.erase(about);
  }
  return last;
}

absl::Status ClusterClient::UnregisterModel(const std::string& model_id) {
  {
    const MutexLock lock(mutex_);
    const auto known = models_.find(model_id);
    if (known != models_.end()) {
      old_models_.push_back(known->second);
      models_.erase(known);
    }
  }
  absl::Status refused;
  for (const auto& connection : owners_->Connected()) {
    connection->ForgetModel(model_id);
    const absl::Status status = connection->client()->UnregisterModel(model_id);
    // The others need not keep it for one that refuses.
    if (!status.ok() && !absl::IsNotFound(status)) refused = status;
  }
  return refused;
}

// ------------------------------------------------------------------------------------- Placement

absl::StatusOr<ClusterClient::Turn> ClusterClient::Begin(ModelRecord* model,
                                                         const v1::Prefix& prefix,
                                                         const std::string& last) {
  MLA_ASSIGN_OR_RETURN(const auto members, Usable());
  Turn turn;
  turn.model = model;
  turn.everyone = AddressesOf(members);
  turn.fills = owners_->FillsOf(members);
  turn.addresses = SubsetOf(options_.client_id, turn.everyone, cluster_.subset);
  turn.home = HomeAmong(turn.everyone);
  if (Has(turn.everyone, last)) turn.last = last;
  const std::string& id = model->spec.model_id();
  if (prefix.token_ids_size() > 0 || prefix.page_keys_size() > 0) {
    turn.key = KeyOfPrefix(id, prefix);
    if (turn.last.empty()) turn.last = marks_.Recall(id, prefix);
  }
  return turn;
}

// There is nothing to ask.
bool ClusterClient::GoesHome(const Turn& turn) const {
  return !turn.key && turn.last.empty() && Has(Bounded(turn.addresses, turn.fills), turn.home);
}

// The servers that were asked and can take the sequence come first, the cheapest at the front.
// Others follow in the order of the prefix's hash. Servers without room a moment ago come last.
std::vector<Choice> ClusterClient::Choices(const Turn& turn, const v1::Prefix& prefix) {
  std::vector<std::string> addresses = turn.addresses;
  if (GoesHome(turn)) std::erase(addresses, turn.home);  // it was tried
  if (Has(turn.everyone, turn.last) && !Has(addresses, turn.last)) addresses.push_back(turn.last);
  std::vector<std::string> wanted;
  {
    const MutexLock lock(mutex_);
    wanted = Candidates(turn.key, addresses, turn.fills, &random_, turn.last, turn.home);
    counts_.asked += wanted.size();
  }
  std::vector<Answer> answers = owners_->Probe(wanted, turn.model->spec.model_id(), prefix);
  v1::RegisterReply model;
  {
    const MutexLock lock(turn.model->mutex);
    model = turn.model->reply;
  }
  const uint64_t rows = RowsOfPrefix(model, prefix);
  std::set<std::string> known;
  for (Answer& one : answers) {
    const uint64_t found = one.probe ? RowsOf(*one.probe) : 0;
    one.bytes_wanted = BytesOfRows(model, rows > found ? rows - found : 0);
    known.insert(one.address);
  }
  const std::vector<Choice> ranked = Ranked(answers, rows, cluster_.costs, turn.home);
  std::vector<Choice> choices, bad;
  for (const Choice& one : ranked) (one.cost_s < kImpossible ? choices : bad).push_back(one);
  for (const std::vector<std::string>& some : {addresses, turn.everyone}) {
    for (const std::string& address : ByHash(turn.key.value_or(""), some)) {
      if (known.insert(address).second) choices.push_back({address, kImpossible, {}});
    }
  }
  choices.insert(choices.end(), bad.begin(), bad.end());
  return choices;
}

absl::StatusOr<ClusterSequence> ClusterClient::OpenAt(const std::string& address,
                                                      ModelRecord* model, const v1::Prefix& prefix,
                                                      v1::PrefixMatch* match) {
  const auto owner = owners_->At(address);
  absl::Status status;
  for (int turn = 0; turn < 2; ++turn) {
    MLA_ASSIGN_OR_RETURN(auto connection, WithModel(address, model));
    auto opened = connection->client()->OpenSequence(model->spec.model_id(), "", prefix, match);
    // A repeat of the registration may have found meanwhile that the server has made it again.
    status = opened.ok() ? Ensure(connection.get(), model) : opened.status();
    if (status.ok()) {
      if (turn > 0) owner->Reached();
      return ClusterSequence(this, connection, *std::move(opened), model->spec.model_id());
    }
    // Its lease there has ended: it is registered again.
    const bool forgotten = ReasonOf(status) == "model_not_found";
    if (forgotten) connection->ForgetModel(model->spec.model_id());
    owner->Failed(status);
    if (!forgotten && !IsReplaced(status)) break;
  }
  return status;
}

absl::StatusOr<ClusterSequence> ClusterClient::OpenSequence(const std::string& model_id,
                                                            const v1::Prefix& prefix,
                                                            v1::PrefixMatch* match,
                                                            const std::string& last) {
  MLA_ASSIGN_OR_RETURN(const auto model, FindModel(model_id));
  MLA_ASSIGN_OR_RETURN(const auto turn, Begin(model.get(), prefix, last));
  absl::Status error = WithReason(absl::StatusCode::kUnavailable,
                                  "no server of the cluster was found to try", kNoServers);
  size_t tried = 0;
  std::vector<Choice> choices;
  if (GoesHome(turn)) choices.push_back({turn.home, 0.0, {}});
  for (bool asked = false; tried < kMostTried;) {
    if (tried == choices.size()) {
      if (asked) break;
      asked = true;
      for (Choice& one : Choices(turn, prefix)) choices.push_back(std::move(one));
      continue;
    }
    const std::string& address = choices[tried++].address;
    auto opened = OpenAt(address, model.get(), prefix, match);
    if (opened.ok()) {
      if (turn.key) marks_.Remember(model_id, prefix, address);
      const MutexLock lock(mutex_);
      ++counts_.opened;
      counts_.spilled += tried > 1 ? 1 : 0;
      return opened;
    }
    error = opened.status();
    if (!IsAway(error) && !IsReplaced(error) && !absl::IsResourceExhausted(error) &&
        !absl::IsNotFound(error)) {
      break;
    }
  }
  return error;
}

// ------------------------------------------------------------------------------------- Open ones

absl::StatusOr<ClusterSequence> ClusterClient::AttachAt(const std::string& address,
                                                        ModelRecord* model, uint64_t id) {
  const auto owner = owners_->At(address);
  const auto connection = owner->connection();
  auto attached = connection.ok() ? (*connection)->client()->Attach(id) : connection.status();
  if (!attached.ok()) {
    owner->Failed(attached.status());
    return attached.status();
  }
  // Only now, because a server that has handed it on may drain, and registers nothing.
  const auto with_model = WithModel(address, model);
  if (with_model.ok() && *with_model == *connection) {
    return ClusterSequence(this, *connection, *std::move(attached), model->spec.model_id());
  }
  attached->Detach();
  return with_model.ok() ? absl::UnavailableError(absl::StrCat(address, " was restarted"))
                         : with_model.status();
}

absl::StatusOr<ClusterSequence> ClusterClient::AttachFrom(std::string address, ModelRecord* model,
                                                          uint64_t id) {
  for (int moves = 0;; ++moves) {
    auto found = AttachAt(address, model, id);
    const auto detail = DetailOf(found.status());
    if (!detail || detail->reason() != kMoved || moves == kMostMoves) return found;
    address = detail->peer();
  }
}

bool ClusterClient::Follow(ClusterSequence* sequence) {
  if (sequence->lost()) return false;
  const auto model = FindModel(sequence->model_id());
  const auto reply = sequence->server()->GetSequences({sequence->id()}, false);
  if (!model.ok() || !reply.ok() || reply->moved_size() != 1) return false;
  auto there = AttachFrom(reply->moved(0).peer(), model->get(), sequence->id());
  if (!there.ok()) return false;
  sequence->Become(*std::move(there));
  return true;
}

absl::StatusOr<ClusterSequence> ClusterClient::Attach(const std::string& model_id, uint64_t id) {
  MLA_ASSIGN_OR_RETURN(const auto model, FindModel(model_id));
  MLA_ASSIGN_OR_RETURN(const auto members, members_->All());
  owners_->Know(members);
  absl::Status last = WithReason(absl::StatusCode::kNotFound,
                                 "no server of the cluster has the sequence", "sequence_not_found");
  for (const Member& member : members) {
    if (!owners_->At(member.address())->well()) continue;
    auto attached = AttachFrom(member.address(), model.get(), id);
    if (attached.ok()) return attached;
    if (!IsAway(attached.status()) && !absl::IsNotFound(attached.status())) {
      return attached.status();
    }
    if (absl::IsNotFound(attached.status())) last = attached.status();
  }
  return last;
}

absl::StatusOr<Recovery> ClusterClient::Recover(ClusterSequence* sequence,
                                                const v1::Prefix& prefix) {
  MLA_ASSIGN_OR_RETURN(const auto model, FindModel(sequence->model_id()));
  auto recovery = SequenceRecovery(this, model.get(), prefix, sequence).Run();
  const MutexLock lock(mutex_);
  counts_.recovered += recovery.ok() ? 1 : 0;
  return recovery;
}

absl::StatusOr<uint64_t> ClusterClient::RenewLeases() {
  const auto connections = owners_->Connected();
  std::vector<absl::StatusOr<v1::RenewLeaseReply>> replies(connections.size());
  // At once: a server that is away must not use up the leases on the others.
  ForEachAtOnce(connections.size(),
                [&](size_t i) { replies[i] = connections[i]->client()->RenewLeases(); });
  uint64_t renewed = 0;
  absl::Status first;
  for (const auto& reply : replies) {
    first.Update(reply.status());
    if (reply.ok()) renewed += reply->renewed();
  }
  if (!first.ok()) return first;
  return renewed;
}

std::unique_ptr<ClusterSession> ClusterClient::OpenSession(const std::string& home) {
  return std::make_unique<ClusterSession>(this, home);
}

ClusterClient::Counts ClusterClient::counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

}  // namespace mla::client
