// Moves the sequences of all tenants to other servers while this one drains, after the weights of
// their models.
//
// Each sequence goes to the peer with the most free bytes. If that one refuses it, fails, or is
// another server by then, the next one is asked, so sequences that no peer can hold together are
// divided among them. A peer that had no room or did not answer is asked last from then on.
//
// Models whose weights are complete send them first, to the peer with the most free bytes. Another
// peer gets the weights of a model before it is offered the first sequence of it. A peer without
// the capability "hand_over_weights" gets none. They stay here, too. A model whose weights a peer
// does not get is logged and counted, and its sequences move all the same: their workers upload the
// weights. The sinks of models with a window go in the same way ("hand_over_sinks").
//
// The weights of one model go over all streams that are free, in calls that share its heads, if the
// peer takes parts ("hand_over_weight_parts"). A stream that cannot begin its part leaves the heads
// to the others. Once a part has begun, its failure is that of the transfer: the call that has
// begun the transfer breaks off, and the peer keeps nothing.
//
// Each sequence goes with the peer's Import, as its tenant's and under its id; several threads,
// each with a stream of its own to the peer, take sequences in turn. The peer has the sequence once
// it has answered; this server then forgets it, and names the peer from then on. Until then, and if
// the call ends earlier for any reason, the sequence stays here unchanged. No row is lost or used
// by two servers: no step begins while a server drains. A sequence that was truncated or closed
// during its move has another epoch or length, and is recalled from the peer.
//
// If the answer is lost, the peer is told to forget the try (ImportTarget.attempt): it removes rows
// that the import has left there, and ignores an import that is still on its way. A peer that
// cannot be reached is told later, before a next sequence and at the end; what it may have is
// offered to no other peer. If it is never told, the lease ends its copy, and no client was told of
// it.
//
// This server's name must be among a peer's operators. The peer is asked again before each
// sequence, because the address may lead to another server by then.
//
// Threading: a thread of its own runs between Start and Stop, and has helpers, one for each further
// stream; call the methods from one thread at a time.
#ifndef MLA_SERVER_HAND_OVER_HAND_OVER_H_
#define MLA_SERVER_HAND_OVER_HAND_OVER_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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
#include "server/hand_over/peer_server.h"
#include "server/metrics/stats_table.h"
#include "server/pages/page_transfer.h"

namespace mla::server {

// Bound of the servers that a drain is given.
inline constexpr size_t kMostDrainPeers = 16;

struct HandOverOptions {
  scheduler::Engine* engine = nullptr;   // outlives the hand-over
  HandOverCounters* counters = nullptr;  // outlives the hand-over too
  uint64_t boot_id = 0;                  // this server's
};

// A server that may get sequences.
struct HandOverTarget {
  std::string address;                                 // HOST:PORT, as told to clients
  std::vector<std::unique_ptr<HandOverPeer>> streams;  // at least one; all lead to this server
};

// Returns the path of the field of DrainRequest that names the target at this place.
std::string DrainPeerField(size_t place);

class HandOver final {
 public:
  // Asks each target if it can take sequences (PeerServer::Check), and leaves out the others, also
  // a target that is the same server as one before. With one stream a target, the thread makes
  // all calls itself. If none can, returns the error of the first one, with all reasons. REQUIRES:
  // at least one target.
  static absl::StatusOr<std::unique_ptr<HandOver>> Connect(HandOverOptions options,
                                                           std::vector<HandOverTarget> targets);
  ~HandOver();

  // Makes the thread, which waits for Start. UNAVAILABLE if the machine has none left. Called
  // before the engine drains, so that the server then serves on.
  absl::Status MakeThread();
  // REQUIRES: the engine drains; MakeThread has succeeded.
  void Start();
  bool done() const { return done_; }
  // Interrupts the running call and returns when the thread has ended. May be called twice.
  void Stop();
  // Returns an outcome for each sequence, except for sequences that their clients have released.
  // REQUIRES: stopped.
  const std::vector<v1::HandedOver>& outcomes() const { return outcomes_; }
  // Returns every target, in the order given, as it was when it was asked.
  const std::vector<v1::DrainPeer>& asked() const { return asked_; }
  // Address of the peer that had the most free bytes.
  const std::string& address() const { return address_; }

  // Does the work of the thread, for tests without one.
  void Run();
  // Does the first part of Stop, before Stop waits for the thread. Any thread may call it, also
  // from calls of the peer.
  void Interrupt();

 private:
  // The result of a try to move a sequence.
  struct Try {
    absl::Status status;   // OK: it has moved
    bool refused = false;  // the peer has refused it
    bool settled = false;  // no other peer may get it: it is gone, or this one may have it
  };

  explicit HandOver(HandOverOptions options);
  // Asks the targets, and keeps the fit ones.
  absl::Status Choose(std::vector<HandOverTarget> targets);
  // The peers, those with the most free bytes first.
  std::vector<PeerServer*> ByRoom() const;
  // Calls work(i) for each i below `count`, on all threads. An i is left out if the drain is
  // ending.
  void OnThreads(size_t count, const std::function<void(size_t)>& work);
  // Sends the weights of a model there, unless that was done.
  void EnsureWeights(PeerServer& peer, const scheduler::HeldWeights& model);
  absl::Status SendWeightsTo(PeerServer& peer, const scheduler::HeldWeights& model, bool* refused);
  absl::Status UploadWeights(PeerServer& peer, HandOverPeer& stream,
                             const scheduler::HeldWeights& model, bool* refused);
  // The results of the parts of a transfer.
  struct Parts {
    uint32_t ended = 0;   // parts that the peer has answered with OK
    uint64_t bytes = 0;   // that they brought
    absl::Status failed;  // OK: none has failed after it had begun
    bool refused = false;
  };
  // Sends the messages of the call that begins a transfer, with its parts on the other streams.
  absl::Status SendTransfer(PeerServer& peer, OutgoingWeights& weights, const WeightsSink& sink,
                            const HandOverPeer::Accepted& accepted, uint64_t* bytes, Parts* parts);
  void SendPart(PeerServer& peer, PeerServer::Use& stream, OutgoingWeights& weights, Parts* parts);
  // Tries the untried sequences that may move now; returns true if it tried any.
  bool Pass();
  // Tries one. Returns false if it stays untried, because it is in a step.
  bool TryOne(const scheduler::SequenceInfo& listed);
  // Updates the remaining sequences and removes closed ones; one call of the engine for each
  // tenant.
  void RefreshRemaining();
  std::vector<scheduler::SequenceInfo> Find(const std::string& tenant,
                                            std::vector<scheduler::SequenceId> ids);
  // Offers it to one peer after another. Returns the outcome.
  v1::HandedOver Offer(scheduler::SequenceInfo sequence);
  // Offers it to one peer, on one stream after another as long as streams end. Updates `sequence`,
  // as it may have waited for the stream.
  Try MoveTo(PeerServer& peer, scheduler::SequenceInfo* sequence);
  Try MoveOver(PeerServer& peer, PeerServer::Use* stream, scheduler::SequenceInfo* sequence,
               bool* ended);
  Try Import(PeerServer& peer, HandOverPeer& stream, const scheduler::SequenceInfo& sequence,
             const scheduler::MovingPages& pages);
  v1::HandedOver Outcome(const scheduler::SequenceInfo& sequence, v1::HandOverOutcome outcome,
                         const absl::Status& why, const std::string& peer = "");
  bool Stopping();

  const HandOverOptions options_;
  scheduler::Engine* const engine_;
  std::vector<std::unique_ptr<PeerServer>> peers_;  // not empty after Connect
  std::vector<v1::DrainPeer> asked_;
  std::string address_;
  size_t threads_ = 1;
  std::vector<scheduler::HeldWeights> models_;  // set before there are other threads
  std::atomic<bool> done_{false};
  Mutex mutex_;
  CondVar changed_;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
  std::vector<scheduler::SequenceInfo> remaining_;  // the thread's: not tried yet, by tenant and id
  // Filled by all threads under mutex_; the caller reads it once they have ended.
  std::vector<v1::HandedOver> outcomes_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_HAND_OVER_H_
