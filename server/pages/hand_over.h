// Sequences of all tenants on their way to another server, while this one drains.
//
// One after another goes with the peer's Import, as its tenant's and under its id. The peer has it
// once it has answered; this server then forgets it, and says from then on where it is. Until then,
// and whatever ends the call earlier, it is here as it was. So no row is lost, and none is computed
// on in two places: while a server drains no step begins, and a sequence that was cut or has ended
// meanwhile has another epoch or length, and is taken back from the peer.
//
// The connection is mutual TLS with the files of this server: its certificate as the client's, and
// tls.client_ca as the authorities of the peer's. The peer must have this server's name among its
// operators. It is asked again before each sequence, as the name may lead to another server by
// then.
//
// Threading: a thread of its own between Start and Stop; the methods from one thread at a time.
#ifndef MLA_SERVER_PAGES_HAND_OVER_H_
#define MLA_SERVER_PAGES_HAND_OVER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "mla/v1/admin.grpc.pb.h"
#include "mla/v1/cache.grpc.pb.h"
#include "scheduler/engine.h"
#include "server/connections/tls_files.h"

namespace mla::server {

class HandOver final {
 public:
  // Connects. INVALID_ARGUMENT: no such address, or this server's own (`boot_id`); UNAVAILABLE: the
  // peer cannot be reached; PERMISSION_DENIED: it does not take this server for an operator;
  // UNIMPLEMENTED: it takes no sequences. All name the field "to". Borrows engine and tls.
  static absl::StatusOr<std::unique_ptr<HandOver>> Connect(scheduler::Engine* engine,
                                                           const TlsFiles& tls, uint64_t boot_id,
                                                           const std::string& address);
  ~HandOver();

  // REQUIRES: the engine drains.
  void Start();
  bool done() const { return done_; }
  // Interrupts the call that is under way, and returns when the thread has ended. Also twice.
  void Stop();
  // What became of each sequence, but for those that their clients have released. REQUIRES:
  // stopped.
  const std::vector<v1::HandedOver>& outcomes() const { return outcomes_; }
  const std::string& address() const { return address_; }

 private:
  HandOver(scheduler::Engine* engine, const TlsFiles& tls, std::string address);
  absl::Status CheckPeer(uint64_t boot_id);
  absl::Status Ask(v1::GetServerInfoReply* info);
  // Whether the server at the other end of the call's connection is the one that was asked first.
  absl::Status CheckServer(const grpc::ClientContext& context, uint64_t boot_id) const;
  absl::Status CheckAnswer(const scheduler::TenantSequence& sequence,
                           const grpc::ClientContext& context, const v1::ImportReply& reply) const;
  void Run();
  // Tries what has not been tried, and says whether anything was; *left: some may go later.
  bool Pass(bool* left);
  scheduler::SequenceList Find(const scheduler::TenantSequence& sequence);
  v1::HandedOver Move(const scheduler::TenantSequence& sequence);
  // *refused: by the peer, which has nothing of it; *uncertain: it may have all of it.
  absl::Status Send(const scheduler::TenantSequence& sequence, const scheduler::MovingPages& pages,
                    grpc::ClientContext* context, bool* refused, bool* uncertain);
  void EvictThere(const scheduler::TenantSequence& sequence);
  bool Stopping();
  // Stop cancels the call from Begin to End. False: it is too late to begin one.
  bool Begin(grpc::ClientContext* context);
  void End();

  scheduler::Engine* const engine_;
  const TlsFiles& tls_;
  const std::string address_;
  uint64_t peer_boot_id_ = 0;  // 0: not asked yet
  std::unique_ptr<v1::Admin::Stub> admin_;
  std::unique_ptr<v1::Cache::Stub> cache_;
  std::atomic<bool> done_{false};
  Mutex mutex_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* running_ ABSL_GUARDED_BY(mutex_) = nullptr;  // the call that is under way
  std::thread thread_;
  // The thread's, until it has ended.
  std::vector<v1::HandedOver> outcomes_;
  absl::flat_hash_set<scheduler::SequenceId> tried_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_PAGES_HAND_OVER_H_
