// A server that may get sequences of a drain: the streams to it, what it has said of itself, and
// what is to be done there. HandOver chooses among several.
//
// A stream is a connection, used by one thread at a time. A stream that reaches the server no more,
// or whose call the server does not admit next to the others, ends, as long as another one is left.
//
// Thread-safe, except that Check comes before all else.
#ifndef MLA_SERVER_HAND_OVER_PEER_SERVER_H_
#define MLA_SERVER_HAND_OVER_PEER_SERVER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "mla/v1/admin.pb.h"
#include "mla/v1/cache.pb.h"
#include "scheduler/engine_types.h"
#include "server/hand_over/peer.h"
#include "server/metrics/stats_table.h"
#include "server/pages/page_transfer.h"

namespace mla::server {

// Bounds of a chunk of rows. Each chunk wakes threads on both sides, so larger ones cost less;
// above this size they leave the caches of a core. No server takes less than the other bound.
inline constexpr uint64_t kLeastPeerChunkBytes = uint64_t{64} << 10;
inline constexpr uint64_t kMostPeerChunkBytes = uint64_t{2} << 20;
// Returns the size of chunks for a peer with this information, which may say anything.
int64_t PeerChunkBytes(const v1::GetServerInfoReply& info);

class PeerServer final {
 public:
  // Keeps a stream in use. It is free again when this object ends.
  class Use final {
   public:
    // `waits`: until a stream is free.
    explicit Use(PeerServer* server, bool waits = true)
        : server_(*server), stream_(server->Take(waits)) {}
    ~Use() { server_.Return(stream_); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    // Null if the drain has ended, or if it does not wait and no stream is free.
    HandOverPeer* get() const { return stream_; }
    // Ends the stream. Returns false, and changes nothing, if it is the last one.
    bool End();

   private:
    PeerServer& server_;
    HandOverPeer* stream_;
  };

  // `address` is HOST:PORT, as told to clients. `field`: the path of the request's field that names
  // it. `streams`: at least one; all lead to the same server.
  PeerServer(std::string address, std::string field,
             std::vector<std::unique_ptr<HandOverPeer>> streams);

  // Asks whether it can take sequences of the server with this boot id. INVALID_ARGUMENT: it is
  // that server itself; UNAVAILABLE: it cannot be reached; PERMISSION_DENIED: it does not accept
  // this server as an operator; UNIMPLEMENTED: it takes no sequences. All errors name the field.
  absl::Status Check(uint64_t own_boot_id);

  const std::string& address() const { return address_; }
  uint64_t boot_id() const { return boot_id_; }
  size_t streams() const { return streams_.size(); }
  bool takes_weights() const { return takes_weights_; }
  bool takes_parts() const { return takes_parts_; }  // of weights
  bool takes_sinks() const { return takes_sinks_; }
  const SendOptions& send() const { return send_; }
  absl::Status Refuse(absl::StatusCode code, const std::string& why, const std::string& limit,
                      const std::string& reason) const;

  // Returns OK if the server that was checked still answers on this stream.
  absl::Status Ask(HandOverPeer& stream) const;
  absl::Status CheckBootId(uint64_t boot_id) const;
  absl::Status CheckAnswer(const scheduler::SequenceInfo& sequence,
                           const v1::ImportReply& reply) const;
  // Ends the calls of all streams, and the waits for a free stream.
  void Cancel();

  // Returns how many bytes of KV cache are free on the peer, as far as this server knows: the
  // number that the peer sent last, less the bytes that Promise has counted since.
  int64_t free_bytes() const;
  // Counts bytes as taken, or as free again if they are negative.
  void Promise(int64_t bytes);
  // It has had no room, or has not answered: the others are asked before it from now on.
  void SetFull();

  // Returns true if the caller must send these weights there and then call EndWeights: it has not
  // been done, and the drain has not ended. Waits while another thread sends them.
  bool BeginWeights(const scheduler::HeldWeights& model);
  void EndWeights(const scheduler::HeldWeights& model);

  // Remembers an import which may have left a sequence there.
  void GiveUp(v1::EvictSequencesRequest request);
  // Tells the server, if it can be reached, to drop what such imports have left. Returns true if
  // none is left to be told of.
  bool Recall(HandOverPeer& stream, HandOverCounters* counters);
  // Does the same on a stream that no thread uses. REQUIRES: no thread uses a stream.
  void RecallAtLast(HandOverCounters* counters);

 private:
  enum class Weights { kSending, kSent };

  // Judges an answer to GetInfo.
  absl::Status Answered(const absl::Status& status, const v1::GetServerInfoReply& info) const;
  HandOverPeer* Take(bool waits);
  void Return(HandOverPeer* stream);

  const std::string address_, field_;
  const std::vector<std::unique_ptr<HandOverPeer>> streams_;
  uint64_t boot_id_ = 0;  // 0: not asked yet
  // It has the capability.
  bool takes_weights_ = false, takes_parts_ = false, takes_sinks_ = false;
  SendOptions send_;  // what it takes
  mutable Mutex mutex_;
  CondVar changed_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<HandOverPeer*> free_ ABSL_GUARDED_BY(mutex_);  // streams in no use
  size_t streams_left_ ABSL_GUARDED_BY(mutex_) = 0;          // that have not ended
  int64_t free_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::pair<std::string, std::string>, Weights> weights_
      ABSL_GUARDED_BY(mutex_);  // by tenant and model
  std::vector<v1::EvictSequencesRequest> abandoned_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_PEER_SERVER_H_
