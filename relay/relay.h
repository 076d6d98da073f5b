// One end of a command ring that travels over UCX: takes requests from frames and puts them into
// the ring, and sends what the ring completes.
//
// Payloads are received into the ring's memory and sent from there. The client is not trusted: each
// frame's token, number and places are checked before its payload is received, and whatever breaks
// a rule ends the relay. The server checks the entries.
//
// Ownership: the memory outlives the relay. Threading: Open, Connect, Step and the destructor from
// one thread; Run starts a second thread and ends it. The second waits for the ring's completions
// while the first sleeps. The first takes them itself while it is awake, which saves the way from
// thread to thread where requests are short. `mutex_` holds the link and all that its frames need.
#ifndef MLA_RELAY_RELAY_H_
#define MLA_RELAY_RELAY_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/shared_memory/ring_memory.h"
#include "proto/wire/ucx/frames.h"
#include "proto/wire/ucx/ucx_link.h"
#include "relay/relay_channel.h"

namespace mla::relay {

struct RelayOptions {
  wire::UcxToken token{};
  wire::UcxLinkOptions link;
  std::optional<wire::UcxSecret> secret;  // frames are encrypted; not with link.puts
  bool batches = false;                   // the client takes frames that travel together
  bool device = false;  // the client may put tensors into the ring's device memory; with link.puts
  // Only transports between hosts are used: link.transports, which begins with '^', leaves out
  // those in memory of the host, and Open adds the one in memory of GPUs where the ring has some.
  bool between_hosts = false;
  std::chrono::microseconds spin{0};  // how long to poll before sleeping
  // Called by Run when the counts have changed, not more often than ten times a second, and at the
  // end. Empty: no reports.
  std::function<void(const RelayCounts&)> report;
};

class Relay final : private wire::UcxReceiver {
 public:
  // UNAVAILABLE as UcxLink::Open. With options.device also FAILED_PRECONDITION: UCX or the GPU
  // cannot do that; or why the ring has no device memory.
  static absl::StatusOr<std::unique_ptr<Relay>> Open(const wire::UcxApi& api, RelayOptions options,
                                                     client::RingMemory* memory);
  ~Relay() override;

  std::string address();
  bool handles_losses();  // as of wire::UcxLink
  // The arena, for puts of the client. UNAVAILABLE: UCX makes no key. REQUIRES: options.link.puts.
  absl::StatusOr<wire::UcxTarget> Offer();
  // As Offer, the part of the device memory that tensors may use. REQUIRES: options.device.
  absl::StatusOr<wire::UcxTarget> OfferDevice();
  absl::Status Connect(std::string_view client);

  // Runs one round of both directions, for tests. Returns true if something has moved.
  bool Step();
  // Works until `control` has something to read or its other end has been closed: OK. Otherwise
  // returns the reason for ending: the client is lost or has broken a rule, or the ring has ended.
  absl::Status Run(int control);
  absl::Status status();
  RelayCounts counts();
  uint64_t messages_sent();  // of UCX; each has a frame or more

 private:
  enum class SlotState : uint8_t { kFree, kArriving, kArrived };
  enum class KeyState : uint8_t { kNone, kArriving, kArrived, kUsed };
  struct Slot {
    SlotState state = SlotState::kFree;
    wire::UcxRequestFrame frame;
  };
  struct Outputs {
    uint64_t offset, bytes;
    bool on_device;
  };

  Relay(RelayOptions options, client::RingMemory* memory);
  absl::StatusOr<std::byte*> Place(std::span<const std::byte> header, size_t bytes) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnArrived(std::span<const std::byte> header) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnSent(uint64_t number) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<std::byte*> PlaceKey(std::span<const std::byte> header, size_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // To the mirror of the client, by a put if it has given a key.
  absl::Status SendOutputs(const wire::UcxCompletionFrame& frame,
                           std::span<const std::byte> payload, bool on_device)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckDevice() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Device memory that outputs and inputs of the client may use: what its arena is a mirror of.
  std::span<std::byte> device_tensors() const;
  wire::UcxMemoryKind device_kind() const;
  uint64_t arena_offset() const { return memory_->region().size() - memory_->arena_bytes(); }
  absl::Status CheckPlaces(const wire::UcxRequestFrame& frame, size_t payload_bytes) const;
  // Polls the ring and UCX once. Returns true if something has moved.
  bool Round();
  // Lets the second thread wait for what the ring has to answer, while this one sleeps.
  void HandOver();
  // Returns true if the second thread is to go on.
  bool AwaitTurn();
  bool Awaits() const { return handed_on_.load() != answered_.load(); }
  void LookAtRing();
  void SubmitArrived() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends `first`, if any, and what else the ring has completed, in as few messages as possible.
  // Returns true if there was something.
  bool CompleteAll(const wire::CompletionEntry* first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Complete(const wire::CompletionEntry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Fail(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Progress();
  void SendCompletions();
  bool MaySleep();
  void Report();
  void Wake() const;

  const RelayOptions options_;
  client::RingMemory* const memory_;
  const uint64_t mask_;             // of slots
  int wake_ = -1;                   // an eventfd that ends the sleep of Run
  std::atomic<int32_t> wanted_{0};  // threads that wait for the mutex while Run polls
  std::atomic<bool> stop_{false};
  // The second thread takes completions, and no other does. Set under turn_mutex_.
  std::atomic<bool> watching_{false};
  // Requests that the ring has got, and their completions.
  std::atomic<uint64_t> handed_on_{0}, answered_{0};
  Mutex turn_mutex_;
  CondVar turn_changed_;
  std::atomic<uint32_t> sending_{0};  // frames whose payload UCX still reads
  std::atomic<bool> may_complete_;    // outputs in device memory need the client's key

  Mutex mutex_;
  std::unique_ptr<wire::UcxLink> link_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);  // by number & mask_
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;        // number of the next request for the ring
  absl::flat_hash_map<uint64_t, Outputs> outputs_ ABSL_GUARDED_BY(mutex_);  // by tag, of attends
  uint64_t completed_ ABSL_GUARDED_BY(mutex_) = 0;                          // frames sent
  // The client's mirror, whose key comes with a frame.
  KeyState key_state_ ABSL_GUARDED_BY(mutex_) = KeyState::kNone;
  wire::UcxTarget client_ ABSL_GUARDED_BY(mutex_);
  RelayCounts counts_ ABSL_GUARDED_BY(mutex_);
  RelayCounts reported_;  // of the thread in Run
  // Copies of messages, by number, until they are sent: their places in the ring are free sooner.
  absl::flat_hash_map<uint64_t, std::unique_ptr<std::vector<std::byte>>> messages_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::relay

#endif  // MLA_RELAY_RELAY_H_
