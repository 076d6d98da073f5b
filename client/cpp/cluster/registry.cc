#include "client/cpp/cluster/registry.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/cpp/channel.h"
#include "client/cpp/cluster/faults.h"
#include "client/cpp/cluster/targets.h"
#include "client/cpp/shared_memory/home.h"
#include "client/cpp/tls_files.h"
#include "etcd/rpc.grpc.pb.h"

namespace mla::client {
namespace {

// The longest time of a call to the registry.
constexpr auto kCallTime = std::chrono::seconds(2);
// Tombstones stay as long as the longest lease that a server grants.
constexpr int64_t kTombstoneSeconds = 3600;
// A reply holds all members' values, and what etcd adds to each.
constexpr int kMostReplyBytes = 1 << 28;

absl::Status Away(const std::string& message) {
  return WithReason(absl::StatusCode::kUnavailable, message, kRegistryAway);
}

class StaticRegistry final : public Registry {
 public:
  explicit StaticRegistry(const std::vector<std::string>& addresses) {
    for (const std::string& address : addresses) members_.push_back(MemberAt(address));
  }
  absl::StatusOr<std::vector<Member>> Read() override { return members_; }

 private:
  std::vector<Member> members_;
};

// Lists every address of a name as a member. In Kubernetes a headless service lists the pods that
// are ready. A pod that drains is not ready.
class DnsRegistry final : public Registry {
 public:
  explicit DnsRegistry(Endpoint name) : name_(std::move(name)) {}

  absl::StatusOr<std::vector<Member>> Read() override {
    addrinfo wanted{};
    wanted.ai_socktype = SOCK_STREAM;
    addrinfo* answers = nullptr;
    const int failed = getaddrinfo(name_.host.c_str(), nullptr, &wanted, &answers);
    if (failed != 0) return Away(absl::StrCat(name_.host, ": ", gai_strerror(failed)));
    std::set<std::string> addresses;
    for (const addrinfo* one = answers; one != nullptr; one = one->ai_next) {
      char host[NI_MAXHOST] = "";
      if (getnameinfo(one->ai_addr, one->ai_addrlen, host, sizeof(host), nullptr, 0,
                      NI_NUMERICHOST) == 0) {
        addresses.insert(Endpoint{host, name_.port}.ToString());
      }
    }
    freeaddrinfo(answers);
    std::vector<Member> members;
    for (const std::string& address : addresses) members.push_back(MemberAt(address));
    return members;
  }

 private:
  const Endpoint name_;
};

// Keys below a prefix: `servers/NAME` has a member's value under a lease, `moved/ID` the address of
// the server that has a sequence now.
class EtcdRegistry final : public Registry {
 public:
  // `files` is null without TLS.
  EtcdRegistry(EtcdTarget target, std::unique_ptr<TlsFiles> files)
      : target_(std::move(target)), files_(std::move(files)) {}

  absl::StatusOr<std::vector<Member>> Read() override {
    const std::string start = absl::StrCat(target_.prefix, "/servers/");
    etcdserverpb::RangeRequest request;
    request.set_key(start);
    request.set_range_end(absl::StrCat(start.substr(0, start.size() - 1), "0"));  // '0' follows '/'
    request.set_limit(kMostMembers + 1);
    MLA_ASSIGN_OR_RETURN(auto reply, Range(request));
    std::vector<Member> members;
    for (const etcdserverpb::KeyValue& one : reply.kvs()) {
      if (auto member = ParseMember(one.value()); member.ok()) {
        members.push_back(*std::move(member));
      }
    }
    return members;
  }

  absl::StatusOr<std::string> Moved(uint64_t sequence_id) override {
    etcdserverpb::RangeRequest request;
    request.set_key(MovedKey(sequence_id));
    MLA_ASSIGN_OR_RETURN(const auto reply, Range(request));
    if (reply.kvs_size() != 1) return std::string();
    const Member member = MemberAt(reply.kvs(0).value());
    MLA_RETURN_IF_ERROR(CheckMember(member));
    return member.address();
  }

  absl::Status WriteMoved(const std::vector<uint64_t>& sequence_ids,
                          const std::string& address) override {
    if (sequence_ids.empty()) return absl::OkStatus();
    MLA_ASSIGN_OR_RETURN(const auto lease, Grant(kTombstoneSeconds));
    for (const uint64_t id : sequence_ids) {
      MLA_RETURN_IF_ERROR(Put(MovedKey(id), address, lease));
    }
    return absl::OkStatus();
  }

  absl::Status Announce(const Member& member, int64_t lease_seconds) override {
    const std::string json = MemberJson(member);
    absl::Status status = KeepAlive();
    if (status.ok() && lease_ == 0) {
      const auto lease = Grant(lease_seconds);
      status = lease.status();
      if (lease.ok()) lease_ = *lease;
    }
    if (status.ok() && json != said_) {
      status =
          Put(absl::StrCat(target_.prefix, "/servers/", KeyOf(member.address())), json, lease_);
      said_ = json;
    }
    // The entry may be there or not, so it is written again, under another lease.
    if (!status.ok()) Forget();
    return status;
  }

  absl::Status Withdraw() override {
    etcdserverpb::LeaseRevokeRequest request;
    request.set_id(lease_);
    Forget();
    if (request.id() == 0) return absl::OkStatus();
    return Call<etcdserverpb::LeaseRevokeResponse>(
               [&](const auto& channel, auto* context, auto* reply) {
                 return etcdserverpb::Lease::NewStub(channel)->LeaseRevoke(context, request, reply);
               })
        .status();
  }

 private:
  // Returns a key for an address: characters that some tools refuse in keys become '_'.
  static std::string KeyOf(std::string address) {
    for (char& one : address) {
      if (!absl::ascii_isalnum(static_cast<unsigned char>(one)) &&
          std::string_view("_.-").find(one) == std::string_view::npos) {
        one = '_';
      }
    }
    return address;
  }

  void Forget() {
    lease_ = 0;
    said_.clear();
  }

  absl::StatusOr<int64_t> Grant(int64_t seconds) {
    etcdserverpb::LeaseGrantRequest request;
    request.set_ttl(seconds);
    const auto granted = Call<etcdserverpb::LeaseGrantResponse>(
        [&](const auto& channel, auto* context, auto* reply) {
          return etcdserverpb::Lease::NewStub(channel)->LeaseGrant(context, request, reply);
        });
    if (!granted.ok()) return granted.status();
    return granted->id();
  }

  absl::Status Put(const std::string& key, const std::string& value, int64_t lease) {
    etcdserverpb::PutRequest request;
    request.set_key(key);
    request.set_value(value);
    request.set_lease(lease);
    return Call<etcdserverpb::PutResponse>([&](const auto& channel, auto* context, auto* reply) {
             return etcdserverpb::KV::NewStub(channel)->Put(context, request, reply);
           })
        .status();
  }

  // Renews the announcement's lease, once. One that has ended is forgotten.
  absl::Status KeepAlive() {
    if (lease_ == 0) return absl::OkStatus();
    etcdserverpb::LeaseKeepAliveRequest request;
    request.set_id(lease_);
    const auto kept = Call<etcdserverpb::LeaseKeepAliveResponse>(
        [&](const auto& channel, auto* context, auto* reply) {
          const auto stream = etcdserverpb::Lease::NewStub(channel)->LeaseKeepAlive(context);
          const bool answered = stream->Write(request) && stream->Read(reply);
          if (!answered) return stream->Finish();
          context->TryCancel();
          stream->Finish();  // as cancelled
          return grpc::Status::OK;
        });
    if (kept.ok() && kept->ttl() <= 0) Forget();
    return kept.status();
  }

  std::string MovedKey(uint64_t id) const {
    return absl::StrFormat("%s/moved/%016x", target_.prefix, id);
  }

  absl::StatusOr<etcdserverpb::RangeResponse> Range(const etcdserverpb::RangeRequest& request) {
    return Call<etcdserverpb::RangeResponse>([&](const auto& channel, auto* context, auto* reply) {
      return etcdserverpb::KV::NewStub(channel)->Range(context, request, reply);
    });
  }

  // Asks each endpoint once, beginning with the one that has answered last.
  template <typename Reply, typename Act>
  absl::StatusOr<Reply> Call(Act act) {
    std::string last;
    const std::vector<std::shared_ptr<grpc::Channel>> channels = Channels();
    for (size_t turn = 0; turn < channels.size(); ++turn) {
      const size_t place = (first_ + turn) % channels.size();
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + kCallTime);
      Reply reply;
      const grpc::Status status = act(channels[place], &context, &reply);
      if (status.ok()) {
        first_ = place;
        return reply;
      }
      last = status.error_message();
    }
    return Away(absl::StrCat(
        "etcd at ",
        absl::StrJoin(target_.endpoints, ", ",
                      [](std::string* out, const Endpoint& one) { *out += one.ToString(); }),
        ": ", last));
  }

  // Returns a channel for each endpoint. They are made again after a change of the PEM files; calls
  // that have begun before end on the channels that they have.
  std::vector<std::shared_ptr<grpc::Channel>> Channels() {
    const MutexLock lock(mutex_);
    const std::shared_ptr<grpc::ChannelCredentials> credentials =
        files_ == nullptr ? insecure_ : files_->Current();
    if (credentials == credentials_) return channels_;
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMostReplyBytes);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kLeastBackoffMs);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kLongestBackoffMs);
    channels_.clear();
    for (const Endpoint& one : target_.endpoints) {
      channels_.push_back(grpc::CreateCustomChannel(one.ToString(), credentials, arguments));
    }
    credentials_ = credentials;
    return channels_;
  }

  const EtcdTarget target_;
  int64_t lease_ = 0;             // of the announcement; 0: there is none
  std::string said_;              // what is announced
  std::atomic<size_t> first_{0};  // the endpoint that has answered last
  Mutex mutex_;
  const std::unique_ptr<TlsFiles> files_ ABSL_PT_GUARDED_BY(mutex_);
  const std::shared_ptr<grpc::ChannelCredentials> insecure_ = grpc::InsecureChannelCredentials();
  std::shared_ptr<grpc::ChannelCredentials> credentials_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<grpc::Channel>> channels_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::unique_ptr<Registry>> MakeEtcd(const std::string& target,
                                                   const EtcdFiles& files) {
  MLA_ASSIGN_OR_RETURN(auto parsed, ParseEtcdTarget(target));
  if (GrpcIsBroken()) {
    return WithReason(absl::StatusCode::kFailedPrecondition,
                      "this process was forked from one that had connected: connect after the "
                      "fork only, or start a program",
                      "forked");
  }
  UseGrpc();
  std::unique_ptr<TlsFiles> pem;
  if (parsed.tls) {
    MLA_ASSIGN_OR_RETURN(pem, TlsFiles::Open({files.ca, files.cert, files.key}, "etcd_"));
  }
  return std::make_unique<EtcdRegistry>(std::move(parsed), std::move(pem));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Registry>> RegistryOf(const std::string& target,
                                                     const EtcdFiles& files) {
  if (IsEtcdTarget(target)) return MakeEtcd(target, files);
  if (IsDnsTarget(target)) {
    MLA_ASSIGN_OR_RETURN(auto name, ParseDnsTarget(target));
    return std::make_unique<DnsRegistry>(std::move(name));
  }
  MLA_ASSIGN_OR_RETURN(const auto addresses, ParseStaticTarget(target));
  return std::make_unique<StaticRegistry>(addresses);
}

}  // namespace mla::client
