// Moves the sequences of all tenants to another server while this one drains, after the weights of
// their models.
//
// If the peer takes weights (the capability "hand_over_weights"), each model whose weights are
// complete sends them first. They stay here, too. A model whose weights the peer does not get is
// logged and counted, and its sequences move all the same: their workers upload the weights.
//
// Each sequence goes with the peer's Import, as its tenant's and under its id; several streams,
// each with a connection of its own, take sequences in turn. The peer has the sequence once it has
// answered; this server then forgets it, and names the peer from then on. Until then, and if the
// call ends earlier for any reason, the sequence stays here unchanged. No row is lost or used by
// both servers: no step begins while a server drains. A sequence that was truncated or closed
// during its move has another epoch or length, and is recalled from the peer.
//
// If the answer is lost, the peer is told to forget the try (ImportTarget.attempt): it removes rows
// that the import has left there, and ignores an import that is still on its way. A peer that
// cannot be reached is told later, before a next sequence and at the end. If it is never told,
// the lease ends its copy, and no client was told of it.
//
// This server's name must be among the peer's operators. The peer is asked again before each
// sequence, because the address may lead to another server by then.
//
// A peer that admits fewer calls than there are streams gets fewer: a stream whose call it refuses
// for this reason ends, and its sequence goes with another one. The same holds for a stream that
// reaches the peer no more.
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
#include "server/pages/page_transfer.h"

namespace mla::server {

struct HandOverOptions {
  scheduler::Engine* engine = nullptr;   // outlives the hand-over
  HandOverCounters* counters = nullptr;  // outlives the hand-over too
  uint64_t boot_id = 0;                  // this server's
  std::string address;                   // HOST:PORT of the peer, as told to clients
};

// Bounds of a chunk of rows. Each chunk wakes threads on both sides, so larger ones cost less;
// above this size they leave the caches of a core. No server takes less than the other bound.
inline constexpr uint64_t kLeastPeerChunkBytes = uint64_t{64} << 10;
inline constexpr uint64_t kMostPeerChunkBytes = uint64_t{2} << 20;
// Returns the size of chunks for a peer with this information, which may say anything.
int64_t PeerChunkBytes(const v1::GetServerInfoReply& info);

class HandOver final {
 public:
  // Asks the peer whether it can take sequences. `streams`: at least one; all lead to the same
  // server. With one, the thread makes all calls itself. INVALID_ARGUMENT: the peer is this server
  // itself; UNAVAILABLE: it cannot be reached; PERMISSION_DENIED: it does not accept this server as
  // an operator; UNIMPLEMENTED: it does not take sequences. All errors name the field "to".
  static absl::StatusOr<std::unique_ptr<HandOver>> Connect(
      HandOverOptions options, std::vector<std::unique_ptr<HandOverPeer>> streams);
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
  // A way to the peer. Used by one thread at a time, except that any thread may cancel its calls.
  struct Stream {
    std::unique_ptr<HandOverPeer> peer;
    bool ended = false;  // it reaches the peer no more, or not next to the others
  };

  HandOver(HandOverOptions options, std::vector<std::unique_ptr<HandOverPeer>> streams);
  absl::Status CheckPeer();
  absl::Status Ask(HandOverPeer& peer, v1::GetServerInfoReply* info);
  // Checks that the server that has answered is the one asked first.
  absl::Status CheckBootId(uint64_t boot_id) const;
  absl::Status CheckAnswer(const scheduler::TenantSequence& sequence,
                           const v1::ImportReply& reply) const;
  // Calls work(stream, i) for each i below `count`, on all streams that have not ended. An i is
  // left out if all have, or if the drain is ending.
  void OnStreams(size_t count, const std::function<void(Stream&, size_t)>& work);
  // Sends the weights of all models.
  void MoveWeights();
  // Sends the weights of one model. Returns false if another stream must do it, because this one
  // has ended.
  bool TryWeights(Stream& stream, const scheduler::HeldWeights& model);
  absl::Status UploadWeights(HandOverPeer& peer, const scheduler::HeldWeights& model,
                             bool* refused);
  // Tries the untried sequences that may move now; returns true if it tried any.
  bool Pass();
  // Tries one. Returns false if it stays untried, because it is in a step or the stream has ended.
  bool Try(Stream& stream, const scheduler::TenantSequence& listed, std::atomic<bool>* any);
  // Updates the remaining sequences and removes closed ones; one call of the engine for each
  // tenant.
  void RefreshLeft();
  std::vector<scheduler::SequenceInfo> Find(const std::string& tenant,
                                            std::vector<scheduler::SequenceId> ids);
  // Ends the stream if others are left. Returns false if it is the last one.
  bool EndStream(Stream& stream);
  // Returns nothing if the stream has ended instead.
  std::optional<v1::HandedOver> Move(Stream& stream, const scheduler::TenantSequence& sequence);
  absl::Status Import(HandOverPeer& peer, const scheduler::TenantSequence& sequence,
                      const scheduler::MovingPages& pages, bool* refused);
  v1::HandedOver Outcome(const scheduler::TenantSequence& sequence, v1::HandOverOutcome outcome,
                         const absl::Status& why = absl::OkStatus());
  // Tells the peer, if it can be reached, to drop what failed imports may have left there.
  void Recall(HandOverPeer& peer);
  bool Stopping();

  const HandOverOptions options_;
  scheduler::Engine* const engine_;
  std::vector<Stream> streams_;
  size_t streams_left_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<uint64_t> peer_boot_id_;  // absent: not asked yet
  SendOptions send_;                      // what the peer takes
  bool takes_weights_ = false;            // the peer does
  std::atomic<bool> done_{false};
  Mutex mutex_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
  std::vector<scheduler::TenantSequence> left_;  // the thread's: not tried yet, by tenant and id
  // Filled by all streams under mutex_; the caller reads it once they have ended.
  std::vector<v1::HandedOver> outcomes_;
  // Failed attempts of which the peer has not been told.
  std::vector<v1::EvictSequencesRequest> abandoned_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_HAND_OVER_H_
