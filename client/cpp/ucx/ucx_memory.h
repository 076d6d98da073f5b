// A mirror of a command ring's region: its entries and tensors travel over UCX (docs/rdma.md).
//
//   auto memory = UcxMemory::Open(options);
//   ... Transports.OpenUcx with (*memory)->address(), over gRPC ...
//   (*memory)->Connect(ring);      // from the reply
//   (*memory)->SetEnded(status);   // when that call has ended
//
// Tensors that lie in the mirror are sent from there, and outputs are received there. UCX moves
// large ones only while someone calls it: a thread in Wait does, and a thread of this object when
// none does.
//
// Ownership and threading: as RingMemory. SetEnded from any thread.
#ifndef MLA_CLIENT_CPP_UCX_UCX_MEMORY_H_
#define MLA_CLIENT_CPP_UCX_UCX_MEMORY_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/shared_memory/ring_memory.h"
#include "client/cpp/ucx/ucx_chains.h"
#include "proto/wire/ucx/frames.h"
#include "proto/wire/ucx/ucx_link.h"

namespace mla::client {

struct UcxMemoryOptions {
  std::string library;        // of UCX; empty: libucp.so.0 where the loader finds it
  wire::UcxLinkOptions link;  // transports and devices; whether to put
  // Tensors are put into memory of the server's GPU where they may lie there (MayLieOnDevice), and
  // are not small. With link.puts.
  bool device_memory = false;
  std::chrono::microseconds spin{0};  // how long Wait polls before it sleeps
  // Registers the mirror with the driver of `device`, so that its streams copy from and to the
  // arena, and calls can be chained.
  bool pins = false;
  DeviceRegionOptions device;
  // The thread that sends and takes frames while no call does stays awake this long without work.
  std::chrono::milliseconds pump_rest{100};
};

// A ring in the words of the server's reply.
struct UcxRing {
  std::string_view worker_address;
  std::string_view token;
  uint64_t region_bytes = 0, arena_offset = 0;
  uint32_t entries = 0;
  uint64_t arena_bytes = 0;  // as wanted
  // Key and address of the arena in the server's memory, for puts. An empty key allows no puts.
  std::string_view arena_key;
  uint64_t arena_address = 0;
  // The same for memory of the server's GPU, of which the arena is the mirror.
  std::string_view device_key;
  uint64_t device_address = 0, device_bytes = 0;
  std::string_view secret;  // empty: frames travel in clear
  bool batches = false;     // the server takes frames that travel together
};

class UcxMemory final : public RingMemory, private wire::UcxReceiver {
 public:
  // UNAVAILABLE: UCX cannot be opened or started, with its reason.
  static absl::StatusOr<std::unique_ptr<UcxMemory>> Open(const UcxMemoryOptions& options);
  // Opens the memory with these entry points of UCX.
  static absl::StatusOr<std::unique_ptr<UcxMemory>> Open(const wire::UcxApi& api,
                                                         const UcxMemoryOptions& options);
  ~UcxMemory() override;

  // Returns the address of this side's worker. Does not change.
  const std::string& address() const { return address_; }
  bool handles_losses() const { return handles_losses_; }  // as of wire::UcxLink
  bool wants_puts() const { return options_.link.puts; }
  bool wants_device_memory() const { return options_.device_memory; }
  // Makes the mirror and connects. UNIMPLEMENTED if the ring is not laid out as this protocol says,
  // or has no device memory although it is wanted.
  absl::Status Connect(const UcxRing& ring);
  // Called by Close, Disconnect and the destructor, once: asks the server to end the ring, which
  // SetEnded tells. Destroyed by the destructor; after that SetEnded must not be called.
  void OnGivenUp(std::function<void()> give_up) { give_up_ = std::move(give_up); }
  // The ring has ended at the server.
  void SetEnded(const absl::Status& why);

  std::string_view transport() const override { return "ucx"; }
  uint32_t ring_entries() const override { return entries_; }
  // Chained entries leave one after the other, when their stream has come to them. Messages leave
  // after the entries before them, and attends that follow a chain when that was answered.
  bool Submit(wire::SubmissionEntry entry, const RingPlaces& places, void* stream,
              bool chained) override;
  void Hold() override;
  void SendHeld() override;
  // Messages of UCX that this side has sent; each has a frame or more.
  uint64_t messages_sent() const;
  // Returns true while the thread that moves frames in place of calls sleeps: nothing is under way,
  // and what is held stays until a call sends it.
  bool pump_rests() const;
  DeviceRegion* device() const override { return device_; }
  absl::Status pinned() const override { return pinned_; }
  absl::Status device_status() const override;
  void ReleaseStreams() override;
  bool Poll(wire::CompletionEntry* entry) override;
  absl::Status Wait(wire::CompletionEntry* entry, std::chrono::nanoseconds timeout) override;
  bool Connected() const override { return !ended_.load(std::memory_order_acquire); }
  uint64_t in_flight() const override {
    return submitted_ - returned_.load(std::memory_order_acquire);
  }
  // Returns when the call has ended. The server aborts the ring's steps soon after that.
  void Close(std::chrono::milliseconds timeout) override;
  void Disconnect() override;

 private:
  enum class SlotState : uint8_t { kFree, kArriving, kArrived };
  struct Slot {
    std::atomic<SlotState> state{SlotState::kFree};
    wire::CompletionEntry entry;
  };

  // An entry that was submitted and has not left.
  struct Queued {
    wire::UcxRequestFrame frame;
    RingPlaces places;
    bool chained;
  };

  explicit UcxMemory(const UcxMemoryOptions& options);
  absl::StatusOr<std::byte*> Place(std::span<const std::byte> header, size_t bytes) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnArrived(std::span<const std::byte> header) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnSent(uint64_t number) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets both sides put, if the server does.
  absl::Status ExchangeKeys(const UcxRing& ring) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns true if the tensors of the entry go to memory of the server's GPU.
  bool GoesToDevice(const wire::SubmissionEntry& entry, const RingPlaces& places) const;
  absl::Status SendRequest(const wire::UcxRequestFrame& frame, const RingPlaces& places)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends what may leave now. Returns true if something has left.
  bool SendReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteFailure(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Ready() const;
  void GiveBack();
  bool Progress();
  void Sleep(std::chrono::nanoseconds longest);
  void GiveUp();
  absl::Status EndStatus();
  void Pump();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return sending_ > 0 || !queue_.empty() || submitted_ != arrived_;
  }

  const UcxMemoryOptions options_;
  std::string address_;
  bool handles_losses_ = false;
  wire::UcxToken token_{};
  uint32_t entries_ = 0;
  uint64_t device_bytes_ = 0;  // of the server's GPU, that tensors are put into
  std::vector<Slot> slots_;    // completions, by number % entries
  std::function<void()> give_up_;
  std::atomic<bool> gave_up_{false};
  int event_ = -1;  // UCX's descriptor; -1: none
  int wake_ = -1;   // an eventfd that ends sleeps

  uint64_t taken_ = 0;                 // completions, by the thread in Poll or Wait
  bool held_ = false;                  // the last completion's places are in use
  std::atomic<uint64_t> returned_{0};  // completions whose places may be used again
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> entries_given_{0};  // entries that were given to UCX, in their order
  std::atomic<bool> ended_{false};
  std::atomic<int32_t> waiting_{0};  // threads in Wait

  std::unique_ptr<UcxChains> chains_;  // since Connect; but for PassTurn, used under the mutex
  DeviceRegion* device_ = nullptr;     // of chains_
  absl::Status pinned_ = absl::UnavailableError("UCX ring: it was not to be pinned");

  mutable Mutex mutex_;
  CondVar changed_;
  absl::Status chain_status_ ABSL_GUARDED_BY(mutex_);
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t chain_end_ ABSL_GUARDED_BY(mutex_) = 0;  // number after the last chained entry
  std::unique_ptr<wire::UcxLink> link_ ABSL_GUARDED_BY(mutex_);
  absl::Status why_ended_ ABSL_GUARDED_BY(mutex_);
  bool ended_there_ ABSL_GUARDED_BY(mutex_) = false;  // SetEnded was called
  uint64_t sending_ ABSL_GUARDED_BY(mutex_) = 0;      // frames whose payload UCX still reads
  uint64_t arrived_ ABSL_GUARDED_BY(mutex_) = 0;      // completions, in any order
  std::string key_ ABSL_GUARDED_BY(mutex_);           // of this side's arena, while it is sent
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool holds_ ABSL_GUARDED_BY(mutex_) = false;   // since Hold
  bool parked_ ABSL_GUARDED_BY(mutex_) = false;  // the pump sleeps until this is false
  std::thread pump_;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_UCX_UCX_MEMORY_H_
