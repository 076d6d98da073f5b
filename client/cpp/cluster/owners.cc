#include "client/cpp/cluster/owners.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/cluster/faults.h"
#include "client/cpp/probes.h"

namespace mla::client {
namespace {

constexpr int kMostFailures = 16;
constexpr char kModelNotFound[] = "model_not_found";
// Free bytes of a healthy server that cannot be probed.
constexpr uint64_t kRoomForAll = uint64_t{1} << 62;

// Returns the answer to assume for a healthy server that cannot be probed, because its release is
// older or it does not have the model yet. Absent: the server is not healthy.
MaybeProbe WithoutProbe(const absl::Status& status) {
  if (IsReplaced(status) || !(absl::IsUnimplemented(status) || absl::IsNotFound(status))) return {};
  v1::ProbeReply reply;
  reply.set_kv_bytes_free(kRoomForAll);
  reply.set_kv_bytes_total(kRoomForAll);
  return reply;
}

// Returns the answer of the server of `owner`, or an assumed one. Notes it with the owner.
MaybeProbe Take(Owner* owner, absl::StatusOr<v1::ProbeReply> reply) {
  if (reply.ok()) {
    owner->Answered(*reply);
    return *std::move(reply);
  }
  owner->Failed(reply.status());
  return WithoutProbe(reply.status());
}

MaybeProbe ConnectAndAsk(Owner* owner, const std::string& model_id, const v1::Prefix& prefix,
                         int64_t timeout_ms) {
  const auto connection = owner->connection();
  return Take(owner, connection.ok() ? (*connection)->client()->Probe(model_id, prefix, timeout_ms)
                                     : connection.status());
}

// Answers that come from some threads, in the order of the addresses.
class Asked final {
 public:
  explicit Asked(const std::vector<std::string>& addresses) : remaining_(addresses.size()) {
    for (const std::string& address : addresses) answers_.push_back({address, {}, 0});
  }
  void Take(size_t place, MaybeProbe probe) {
    const MutexLock lock(mutex_);
    answers_[place].probe = std::move(probe);
    --remaining_;
    changed_.NotifyAll();
  }
  // Waits until all answers have come, but not beyond `end`. Answers that come later are absent
  // from the result.
  std::vector<Answer> Wait(std::chrono::steady_clock::time_point end) {
    MutexLock lock(mutex_);
    changed_.WaitUntil(lock, end,
                       [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return remaining_ == 0; });
    return answers_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  size_t remaining_ ABSL_GUARDED_BY(mutex_);
  std::vector<Answer> answers_ ABSL_GUARDED_BY(mutex_);
};

constexpr std::string_view kKeyOfMarks = "mla marks";

// Returns the prefix in parts, each of which ends with a mark.
std::vector<std::string> PartsOf(const v1::Prefix& prefix) {
  std::vector<std::string> parts;
  if (prefix.page_keys_size() > 0) {
    const auto count = static_cast<size_t>(prefix.page_keys_size());
    const size_t whole = count / kMarkNames * kMarkNames;
    for (size_t i = 0; i < (whole > 0 ? whole : count); ++i) {
      if (i % kMarkNames == 0) parts.emplace_back();
      parts.back() += prefix.page_keys(static_cast<int>(i));
    }
    return parts;
  }
  const auto count = static_cast<size_t>(prefix.token_ids_size());
  const size_t whole = count / kMarkRows * kMarkRows;
  // Rows after the last whole mark change with the next turn.
  for (size_t begin = 0; begin < (whole > 0 ? whole : count); begin += kMarkRows) {
    const size_t rows = std::min(kMarkRows, count - begin);
    parts.emplace_back(reinterpret_cast<const char*>(prefix.token_ids().data() + begin),
                       rows * sizeof(uint32_t));
  }
  return parts;
}

}  // namespace

absl::Status Connection::GivenUp() const {
  return absl::UnavailableError(
      absl::StrCat("the connection to ", address_, " was given up: the server does not answer"));
}

absl::StatusOr<std::shared_ptr<OwnerSession>> Connection::OpenSession() {
  if (dropped()) return GivenUp();
  MLA_ASSIGN_OR_RETURN(auto session, client_->OpenSession());
  auto owner_session = std::make_shared<OwnerSession>();
  owner_session->connection = shared_from_this();
  owner_session->session = std::move(session);
  {
    const MutexLock lock(sessions_mutex_);
    std::erase_if(sessions_, [](const auto& one) { return one.expired(); });
    sessions_.push_back(owner_session);
  }
  if (dropped()) owner_session->session->Cancel(GivenUp());  // meanwhile
  return owner_session;
}

void Connection::Drop() {
  dropped_.store(true);
  std::vector<std::weak_ptr<OwnerSession>> sessions;
  {
    const MutexLock lock(sessions_mutex_);
    sessions.swap(sessions_);
  }
  for (const auto& one : sessions) {
    if (const auto session = one.lock(); session != nullptr) session->session->Cancel(GivenUp());
  }
}

void Connection::AwaitArrival(const std::string& id, MutexLock& lock) {
  models_changed_.Wait(lock, [this, &id]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(models_mutex_) {
    return !arriving_.contains(id);
  });
}

const Connection::Held* Connection::Find(const ModelRecord* model) const {
  const auto known = models_.find(model->spec.model_id());
  return known != models_.end() && known->second.record == model ? &known->second : nullptr;
}

absl::StatusOr<v1::RegisterReply> Connection::BringModel(
    const ModelRecord::Terms& terms, const std::function<absl::Status(Client*)>& on_peer,
    ModelRecord* model) {
  const std::string& id = model->spec.model_id();
  const absl::Cleanup arrived = [this, &id] {
    const MutexLock lock(models_mutex_);
    arriving_.erase(id);
    models_changed_.NotifyAll();
  };
  MLA_ASSIGN_OR_RETURN(auto reply, client_->RegisterModel(model->spec, terms.lease_ms,
                                                          terms.kv_scales, terms.sinks));
  std::map<std::string, std::function<absl::Status(Client*)>> uploads;
  {
    const MutexLock uploads_lock(model->mutex);
    if (model->reply.page_group_bytes() == 0) model->reply = reply;
    uploads = model->uploads;
  }
  for (const auto& [about, upload] : uploads) {
    MLA_RETURN_IF_ERROR(upload(client_.get()));
  }
  if (on_peer) {
    MLA_RETURN_IF_ERROR(on_peer(client_.get()));
  }
  const MutexLock lock(models_mutex_);
  models_[id] = {model, reply.instance()};
  return reply;
}

absl::Status Connection::EnsureModel(ModelRecord* model,
                                     const std::function<absl::Status(Client*)>& on_peer) {
  {
    MutexLock lock(models_mutex_);
    AwaitArrival(model->spec.model_id(), lock);
    if (Find(model) != nullptr) return absl::OkStatus();
    models_.erase(model->spec.model_id());
    arriving_.insert(model->spec.model_id());
  }
  ModelRecord::Terms terms;
  {
    const MutexLock terms_lock(model->mutex);
    terms = model->terms;
  }
  return BringModel(terms, on_peer, model).status();
}

absl::StatusOr<v1::RegisterReply> Connection::RepeatModel(
    ModelRecord* model, const ModelRecord::Terms& set, const ModelRecord::Terms& newest,
    const std::function<absl::Status(Client*)>& on_peer) {
  const std::string& id = model->spec.model_id();
  std::optional<Held> held;
  {
    MutexLock lock(models_mutex_);
    models_changed_.Wait(lock, [this, &id]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(models_mutex_) {
      return !repeating_.contains(id);
    });
    repeating_.insert(id);
    AwaitArrival(id, lock);
    if (const Held* const known = Find(model); known != nullptr) held = *known;
  }
  const absl::Cleanup repeated = [this, &id] {
    const MutexLock lock(models_mutex_);
    repeating_.erase(id);
    models_changed_.NotifyAll();
  };
  if (held && held->instance == 0) {
    // An older release does not tell a model that it has just made, which is empty, from one that
    // was there. So it is asked first; a lease that ends between the two calls goes unnoticed.
    const absl::Status there = client_->Probe(id).status();
    if (ReasonOf(there) == kModelNotFound) {
      held.reset();
    } else if (!there.ok() && !absl::IsUnimplemented(there)) {
      return there;
    }
  }
  absl::StatusOr<v1::RegisterReply> reply;
  if (held) {
    reply = client_->RegisterModel(model->spec, set.lease_ms, set.kv_scales, set.sinks);
    if (!reply.ok()) {
      // Without an answer the server may have made it again, empty.
      if (IsAway(reply.status()) && BreaksSession(reply.status())) ForgetModel(id);
      return reply;
    }
  }
  {
    MutexLock lock(models_mutex_);
    AwaitArrival(id, lock);
    const Held* const now = Find(model);  // another thread may have brought it since
    if (held && now != nullptr && now->instance == reply->instance()) return reply;
    models_.erase(id);
    arriving_.insert(id);
  }
  return BringModel(newest, on_peer, model);
}

bool Connection::HasModel(const ModelRecord* model) {
  MutexLock lock(models_mutex_);
  AwaitArrival(model->spec.model_id(), lock);
  return Find(model) != nullptr;
}

absl::StatusOr<bool> Connection::IfModel(const std::string& id,
                                         const std::function<absl::Status(Client*)>& act) {
  {
    MutexLock lock(models_mutex_);
    AwaitArrival(id, lock);
    if (!models_.contains(id)) return false;
  }
  MLA_RETURN_IF_ERROR(act(client_.get()));
  return true;
}

void Connection::ForgetModel(const std::string& id) {
  MutexLock lock(models_mutex_);
  AwaitArrival(id, lock);
  models_.erase(id);
}

absl::StatusOr<std::shared_ptr<Connection>> Owner::connection() {
  if (auto known = connected(); known != nullptr) return known;
  const MutexLock connect_lock(connect_mutex_);
  if (auto known = connected(); known != nullptr) return known;
  connecting_ = true;
  auto client = connect_();
  connecting_ = false;
  if (!client.ok()) return client.status();
  auto new_connection = std::make_shared<Connection>(address_, *std::move(client));
  const MutexLock lock(mutex_);
  connection_ = new_connection;
  return new_connection;
}

std::shared_ptr<Connection> Owner::connected() const {
  const MutexLock lock(mutex_);
  return connection_;
}

bool Owner::well() const {
  const MutexLock lock(mutex_);
  return now_() >= until_;
}

void Owner::Failed(const absl::Status& status) {
  const bool replaced = IsReplaced(status);
  if (replaced || IsAway(status)) {
    const MutexLock lock(mutex_);
    until_ = now_() + std::min(kLongestPause, std::ldexp(kFirstPause, failures_));
    failures_ = std::min(failures_ + 1, kMostFailures);
    probe_.reset();
  }
  if (replaced) Drop();
}

void Owner::Reached() {
  const MutexLock lock(mutex_);
  failures_ = 0;
  until_ = 0;
}

void Owner::Answered(const v1::ProbeReply& reply) {
  Reached();
  const MutexLock lock(mutex_);
  probe_ = reply;
  probed_at_ = now_();
}

MaybeProbe Owner::fresh_probe() const {
  const MutexLock lock(mutex_);
  return probe_ && now_() - probed_at_ < kFreshSeconds ? probe_ : std::nullopt;
}

void Owner::Drop() {
  std::shared_ptr<Connection> dropped;
  {
    const MutexLock lock(mutex_);
    dropped.swap(connection_);
  }
  if (dropped != nullptr) dropped->Drop();
}

Owners::Owners(ConnectMember connect, Seconds now)
    : connect_(std::move(connect)), now_(std::move(now)) {}

Owners::~Owners() {
  MutexLock lock(mutex_);
  ended_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return connecting_ == 0; });
}

void Owners::Know(const std::vector<Member>& members) {
  const MutexLock lock(mutex_);
  for (const Member& member : members) members_.insert_or_assign(member.address(), member);
}

std::shared_ptr<Owner> Owners::At(const std::string& address) {
  const MutexLock lock(mutex_);
  auto& owner = owners_[address];
  if (owner == nullptr) {
    owner = std::make_shared<Owner>(
        address,
        [this, address] {
          Member member = MemberAt(address);
          {
            const MutexLock members_lock(mutex_);
            const auto known = members_.find(address);
            if (known != members_.end()) member = known->second;
          }
          return connect_(member);
        },
        now_);
  }
  return owner;
}

std::vector<std::shared_ptr<Owner>> Owners::All() const {
  const MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Owner>> all;
  for (const auto& [address, owner] : owners_) all.push_back(owner);
  return all;
}

std::vector<std::shared_ptr<Connection>> Owners::Connected() const {
  std::vector<std::shared_ptr<Connection>> connections;
  for (const auto& owner : All()) {
    if (auto one = owner->connected(); one != nullptr) connections.push_back(std::move(one));
  }
  return connections;
}

bool Owners::InThread(std::function<void()> act) {
  {
    const MutexLock lock(mutex_);
    if (connecting_ >= kMostConnecting) return false;
    ++connecting_;
  }
  const auto end = [this] {
    const MutexLock lock(mutex_);
    --connecting_;
    ended_.NotifyAll();
  };
  try {
    std::thread([act = std::move(act), end]() mutable {
      act();
      act = nullptr;  // it may hold the last reference to an owner, and so to a connection
      end();
    }).detach();
  } catch (const std::system_error&) {
    end();
    return false;
  }
  return true;
}

std::vector<Answer> Owners::Probe(const std::vector<std::string>& addresses,
                                  const std::string& model_id, const v1::Prefix& prefix,
                                  double timeout_s) {
  const auto began = std::chrono::steady_clock::now();
  const auto timeout_ms = static_cast<int64_t>(std::ceil(timeout_s * 1000));
  const auto asked = std::make_shared<Asked>(addresses);
  std::vector<size_t> connected;
  std::vector<std::shared_ptr<Connection>> connections;
  std::shared_ptr<const v1::Prefix> shared_prefix;
  for (size_t i = 0; i < addresses.size(); ++i) {
    const std::shared_ptr<Owner> owner = At(addresses[i]);
    if (auto connection = owner->connected(); connection != nullptr) {
      connected.push_back(i);
      connections.push_back(std::move(connection));
      continue;
    }
    if (shared_prefix == nullptr) shared_prefix = std::make_shared<const v1::Prefix>(prefix);
    // To connect takes longer than to ask, once for each server: in a thread of its own.
    if (owner->connecting() || !InThread([owner, asked, shared_prefix, i, model_id, timeout_ms] {
          asked->Take(i, ConnectAndAsk(owner.get(), model_id, *shared_prefix, timeout_ms));
        })) {
      asked->Take(i, {});
    }
  }
  std::vector<Client*> clients;
  for (const auto& connection : connections) clients.push_back(connection->client());
  std::vector<absl::StatusOr<v1::ProbeReply>> replies =
      Probes::Ask(clients, model_id, prefix, timeout_ms);
  for (size_t i = 0; i < replies.size(); ++i) {
    const size_t place = connected[i];
    asked->Take(place, Take(At(addresses[place]).get(), std::move(replies[i])));
  }
  const double wait_s =
      connected.size() < addresses.size() ? std::max(timeout_s, kConnectSeconds) : timeout_s;
  return asked->Wait(began + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                 std::chrono::duration<double>(wait_s)));
}

Fills Owners::FillsOf(const std::vector<Member>& members) {
  Fills fills;
  for (const Member& member : members) {
    if (const MaybeProbe probe = At(member.address())->fresh_probe()) {
      fills[member.address()] = FillOf(*probe);
    } else if (member.bytes_total() > 0) {
      fills[member.address()] = FillOf(
          static_cast<double>(member.bytes_free()) - static_cast<double>(member.bytes_cached()),
          static_cast<double>(member.bytes_total()));
    }
  }
  return fills;
}

std::vector<std::string> MarksOf(std::string_view model_id, const v1::Prefix& prefix) {
  std::string state = ShortHash(
      kKeyOfMarks, absl::StrCat(model_id.size(), ":", std::string(model_id), ":", prefix.salt()));
  std::vector<std::string> marks;
  for (const std::string& part : PartsOf(prefix)) {
    state = ShortHash(state, part);
    marks.push_back(state);
  }
  return marks;
}

void Marks::Remember(std::string_view model_id, const v1::Prefix& prefix,
                     const std::string& address) {
  const std::vector<std::string> marks = MarksOf(model_id, prefix);
  const MutexLock lock(mutex_);
  for (const std::string& mark : marks) {
    if (const auto known = places_.find(mark); known != places_.end()) {
      order_.erase(known->second);
      places_.erase(known);
    }
    order_.emplace_back(mark, address);
    places_.emplace(mark, std::prev(order_.end()));
  }
  while (places_.size() > limit_) {
    places_.erase(order_.front().first);
    order_.pop_front();
  }
}

std::string Marks::Recall(std::string_view model_id, const v1::Prefix& prefix) {
  const std::vector<std::string> marks = MarksOf(model_id, prefix);
  const MutexLock lock(mutex_);
  for (auto mark = marks.rbegin(); mark != marks.rend(); ++mark) {
    if (const auto known = places_.find(*mark); known != places_.end()) {
      return known->second->second;
    }
  }
  return "";
}

}  // namespace mla::client
