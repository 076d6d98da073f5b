// Keeps the servers that a cluster's client uses: their connections and models, their last answers,
// and which server had a conversation.
//
// A connection lives as long as anything uses it: sequences, sessions and steps hold it. It is
// dropped when its server is given up: what waits for the server then ends at once, and a later use
// of the owner makes another connection. Threading: any thread.
#ifndef MLA_CLIENT_CPP_CLUSTER_OWNERS_H_
#define MLA_CLIENT_CPP_CLUSTER_OWNERS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/client.h"
#include "client/cpp/cluster/members.h"
#include "client/cpp/cluster/placement.h"
#include "client/cpp/session.h"

namespace mla::client {

// An answer to a probe that takes longer decides nothing: another server is as good.
inline constexpr double kProbeSeconds = 0.25;
// The first connection to a server, for a probe.
inline constexpr double kConnectSeconds = 2.0;
// Seconds until a server that has failed is asked again: the first pause, and the longest; each
// pause is twice the one before.
inline constexpr double kFirstPause = 0.5, kLongestPause = 10.0;
// Free memory that a probe reported is used for this long.
inline constexpr double kFreshSeconds = 5.0;
// At most this number of threads connects at the same time.
inline constexpr int kMostConnecting = 64;

// A model as it was registered with the cluster, and what brings its weights to a server.
struct ModelRecord {
  struct Terms {  // what a repeat of the registration may change
    uint32_t lease_ms = 0;
    std::vector<float> kv_scales, sinks;
  };

  v1::ModelSpec spec;

  mutable Mutex mutex;
  Terms terms ABSL_GUARDED_BY(mutex);
  v1::RegisterReply reply ABSL_GUARDED_BY(mutex);  // of the server that was asked first
  // By what they are about: a repeat takes the place of the one before.
  std::map<std::string, std::function<absl::Status(Client*)>> uploads ABSL_GUARDED_BY(mutex);
};

inline constexpr size_t kMostMarks = size_t{1} << 17;
inline constexpr size_t kMarkRows = 1024;             // rows between two marks
inline constexpr size_t kMarkNames = kMarkRows / 64;  // of pages that are named

// Marks of the first kMarkRows rows, of twice as many, and so on; of a shorter prefix one of all.
std::vector<std::string> MarksOf(std::string_view model_id, const v1::Prefix& prefix);

// Remembers the server that had a conversation last, by what its rows stand for. Bounded: the
// conversations that were remembered longest ago go first.
class Marks final {
 public:
  explicit Marks(size_t limit = kMostMarks) : limit_(limit) {}

  // Rows that begin so are at `address` now.
  void Remember(std::string_view model_id, const v1::Prefix& prefix, const std::string& address);
  // Returns the server that had the longest beginning; "": none is known.
  std::string Recall(std::string_view model_id, const v1::Prefix& prefix);

 private:
  using Order = std::list<std::pair<std::string, std::string>>;  // mark and address, oldest first

  const size_t limit_;
  Mutex mutex_;
  Order order_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Order::iterator> places_ ABSL_GUARDED_BY(mutex_);
};

// Calls `act` for each number below `count` at the same time: the servers are independent.
template <typename Act>
void ForEachAtOnce(size_t count, const Act& act) {
  std::vector<std::future<void>> others;
  for (size_t i = 1; i < count; ++i) {
    try {
      others.push_back(std::async(std::launch::async, [&act, i] { act(i); }));
    } catch (const std::system_error&) {
      act(i);  // the process has no more threads
    }
  }
  if (count > 0) act(0);
  for (std::future<void>& one : others) one.wait();
}

class Connection;

// A session on one server. It keeps its connection.
struct OwnerSession {
  std::shared_ptr<Connection> connection;
  std::unique_ptr<Session> session;
  std::atomic<bool> broken{false};  // another one is opened for the next step
};

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::string address, std::unique_ptr<Client> client)
      : address_(std::move(address)), client_(std::move(client)) {}

  const std::string& address() const { return address_; }
  Client* client() const { return client_.get(); }
  bool dropped() const { return dropped_.load(std::memory_order_relaxed); }
  absl::StatusOr<std::shared_ptr<OwnerSession>> OpenSession();
  // Ends the sessions: what waits on them fails with UNAVAILABLE.
  void Drop();

  // --- Models. A model arrives while it is registered and its uploads are sent. Calls about it
  // wait for that; calls about other models do not. Only another repeat waits for a repeat: so a
  // call can use a model that the server has just made again, which has no weights until the answer
  // to the repeat has come and the uploads are sent. Registers the model here and uploads what
  // belongs to it, unless that was done.
  absl::Status EnsureModel(ModelRecord* model, const std::function<absl::Status(Client*)>& on_peer);
  // Registers the model again, which renews its lease, with the terms that the call has set. A
  // server that had unregistered it gets the `newest` terms, and uploads of what belongs to it.
  absl::StatusOr<v1::RegisterReply> RepeatModel(
      ModelRecord* model, const ModelRecord::Terms& set, const ModelRecord::Terms& newest,
      const std::function<absl::Status(Client*)>& on_peer);
  bool HasModel(const ModelRecord* model);
  // Calls `act` if the model is registered here; true then.
  absl::StatusOr<bool> IfModel(const std::string& id,
                               const std::function<absl::Status(Client*)>& act);
  void ForgetModel(const std::string& id);

 private:
  // A model that the server has.
  struct Held {
    const ModelRecord* record = nullptr;
    uint64_t instance = 0;  // RegisterReply.instance
  };

  absl::Status GivenUp() const;
  void AwaitArrival(const std::string& id, MutexLock& lock)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(models_mutex_);
  // Returns what is held of exactly this record, or null.
  const Held* Find(const ModelRecord* model) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(models_mutex_);
  // Registers the model, then uploads what belongs to it. REQUIRES: arriving_ has the model's id.
  // Removes the id.
  absl::StatusOr<v1::RegisterReply> BringModel(const ModelRecord::Terms& terms,
                                               const std::function<absl::Status(Client*)>& on_peer,
                                               ModelRecord* model)
      ABSL_LOCKS_EXCLUDED(models_mutex_);

  const std::string address_;
  const std::unique_ptr<Client> client_;
  std::atomic<bool> dropped_{false};
  Mutex sessions_mutex_;
  std::vector<std::weak_ptr<OwnerSession>> sessions_ ABSL_GUARDED_BY(sessions_mutex_);
  Mutex models_mutex_;  // no call to the server is made under it
  CondVar models_changed_;
  std::map<std::string, Held> models_ ABSL_GUARDED_BY(models_mutex_);
  // Models on their way to the server, and models whose registration is repeated.
  std::set<std::string> arriving_ ABSL_GUARDED_BY(models_mutex_);
  std::set<std::string> repeating_ ABSL_GUARDED_BY(models_mutex_);
};

// One server of the cluster, connected or not.
class Owner final {
 public:
  using Connect = std::function<absl::StatusOr<std::unique_ptr<Client>>()>;
  Owner(std::string address, Connect connect, Seconds now)
      : address_(std::move(address)), connect_(std::move(connect)), now_(std::move(now)) {}

  const std::string& address() const { return address_; }
  // Returns the connection, made if there is none.
  absl::StatusOr<std::shared_ptr<Connection>> connection();
  std::shared_ptr<Connection> connected() const;  // null: none; waits for nothing
  bool connecting() const { return connecting_; }
  bool well() const;  // false for a while after a failure
  // A call has failed. The connection ends if the error says that another process answers.
  void Failed(const absl::Status& status);
  void Answered(const v1::ProbeReply& reply);
  // The server answers. After the next failure the pauses begin with the first one again.
  void Reached();
  // Returns the latest answer, if it is fresh.
  MaybeProbe fresh_probe() const;
  void Drop();

 private:
  const std::string address_;
  const Connect connect_;
  const Seconds now_;
  std::atomic<bool> connecting_{false};
  Mutex connect_mutex_;  // one thread connects, others wait for it
  mutable Mutex mutex_;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mutex_);
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;
  double until_ ABSL_GUARDED_BY(mutex_) = 0;
  MaybeProbe probe_ ABSL_GUARDED_BY(mutex_);
  double probed_at_ ABSL_GUARDED_BY(mutex_) = 0;
};

class Owners final {
 public:
  using ConnectMember = std::function<absl::StatusOr<std::unique_ptr<Client>>(const Member&)>;
  Owners(ConnectMember connect, Seconds now);
  // Waits for the threads that connect.
  ~Owners();

  // Remembers how to reach these members, for connections that are made from now on.
  void Know(const std::vector<Member>& members);
  // Returns the owner of the address, which need not be a member. Makes it at the first call.
  std::shared_ptr<Owner> At(const std::string& address);
  // Returns all owners that At has made.
  std::vector<std::shared_ptr<Owner>> All() const;
  std::vector<std::shared_ptr<Connection>> Connected() const;
  // Asks all of them at the same time, over the connections that there are; only a server without
  // one costs a thread. Answers are in the order of the addresses; one that did not come in time is
  // absent.
  std::vector<Answer> Probe(const std::vector<std::string>& addresses, const std::string& model_id,
                            const v1::Prefix& prefix, double timeout_s = kProbeSeconds);
  // Returns how full members are, by a fresh probe or else by what they have announced.
  Fills FillsOf(const std::vector<Member>& members);

 private:
  // Runs `act` in a thread; false if there are too many of them.
  bool InThread(std::function<void()> act);

  const ConnectMember connect_;
  const Seconds now_;
  mutable Mutex mutex_;
  CondVar ended_;
  int connecting_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::shared_ptr<Owner>> owners_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Member> members_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_CLUSTER_OWNERS_H_
