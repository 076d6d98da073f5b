// Moves the sequences of all tenants to another server while this one drains.
//
// One after another goes with the peer's Import, as its tenant's and under its id. The peer has the
// sequence once it has answered; this server then forgets it, and names the peer from then on.
// Until then, and if the call ends earlier for any reason, the sequence stays here unchanged. No
// row is lost or used by both servers: no step begins while a server drains. A sequence that was
// truncated or closed during its move has another epoch or length, and is recalled from the peer.
//
// If the answer is lost, the peer is told to forget the try (ImportTarget.attempt): it removes rows
// that the import has left there, and ignores an import that is still on its way. A peer that
// cannot be reached is told later, before the next sequence and at the end. If it is never told,
// the lease ends its copy, and no client was told of it.
//
// This server's name must be among the peer's operators. The peer is asked again before each
// sequence, because the address may lead to another server by then.
//
// Threading: a thread of its own runs between Start and Stop; call the methods from one thread at a
// time.
#ifndef MLA_SERVER_HAND_OVER_HAND_OVER_H_
#define MLA_SERVER_HAND_OVER_HAND_OVER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/cache.pb.h"
#include "scheduler/engine.h"
#include "server/hand_over/peer.h"
#include "server/metrics/stats_table.h"
#include "server/pages/page_digest.h"

namespace mla::server {

struct HandOverOptions {
  scheduler::Engine* engine = nullptr;   // outlives the hand-over
  HandOverCounters* counters = nullptr;  // outlives the hand-over too
  uint64_t boot_id = 0;                  // this server's
  std::string address;                   // HOST:PORT of the peer, as told to clients
};

class HandOver final {
 public:
  // Asks the peer whether it can take sequences. INVALID_ARGUMENT: the peer is this server itself;
  // UNAVAILABLE: it cannot be reached; PERMISSION_DENIED: it does not accept this server as an
  // operator; UNIMPLEMENTED: it does not take sequences. All errors name the field "to".
  static absl::StatusOr<std::unique_ptr<HandOver>> Connect(HandOverOptions options,
                                                           std::unique_ptr<HandOverPeer> peer);
  ~HandOver();

  // REQUIRES: the engine drains.
  void Start();
  bool done() const { return done_; }
  // Interrupts the running call and returns when the thread has ended. May be called twice.
  void Stop();
  // Outcome for each sequence, except for sequences that their clients have released. REQUIRES:
  // stopped.
  const std::vector<v1::HandedOver>& outcomes() const { return outcomes_; }
  const std::string& address() const { return options_.address; }

  // The work of the thread, for tests without one.
  void Run();
  // The first part of Stop, before it waits for the thread. From any thread, also from calls of the
  // peer.
  void Interrupt();

 private:
  HandOver(HandOverOptions options, std::unique_ptr<HandOverPeer> peer)
      : options_(std::move(options)), engine_(options_.engine), peer_(std::move(peer)) {}
  absl::Status CheckPeer();
  absl::Status Ask(v1::GetServerInfoReply* info);
  // Checks that the server that has answered is the one asked first.
  absl::Status CheckBootId(uint64_t boot_id) const;
  absl::Status CheckAnswer(const scheduler::TenantSequence& sequence,
                           const v1::ImportReply& reply) const;
  // Tries the untried sequences that may move now; returns true if it tried any.
  bool Pass();
  // Updates the remaining sequences and removes closed ones; one call of the engine for each
  // tenant.
  void RefreshLeft();
  std::vector<scheduler::SequenceInfo> Find(const std::string& tenant,
                                            std::vector<scheduler::SequenceId> ids);
  v1::HandedOver Move(const scheduler::TenantSequence& sequence);
  absl::Status Import(const scheduler::TenantSequence& sequence,
                      const scheduler::MovingPages& pages, bool* refused);
  v1::HandedOver Outcome(const scheduler::TenantSequence& sequence, v1::HandOverOutcome outcome,
                         const absl::Status& why = absl::OkStatus());
  // Tells the peer, if it can be reached, to drop what failed imports may have left there.
  void Recall();
  bool Stopping();

  const HandOverOptions options_;
  scheduler::Engine* const engine_;
  const std::unique_ptr<HandOverPeer> peer_;
  std::optional<uint64_t> peer_boot_id_;      // absent: not asked yet
  DigestKind digests_ = DigestKind::kSha256;  // what the peer takes
  std::atomic<bool> done_{false};
  Mutex mutex_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
  // Used only by the thread until it has ended.
  std::vector<v1::HandedOver> outcomes_;
  std::vector<scheduler::TenantSequence> left_;  // not tried yet, by tenant and id
  // Failed attempts of which the peer has not been told.
  std::vector<v1::EvictSequencesRequest> abandoned_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_HAND_OVER_H_
