// Shared memory with a server of the same host: a region, and the command ring at its front.
//
//   auto channel = SharedMemory::Connect(shm_path, {.tenant = "", .bytes = 64 << 20});
//   std::span<std::byte> q = (*channel)->Allocate(q_bytes);     // tensors live here
//   (*channel)->Submit(entry);                                  // filled as in
//   proto/wire/ring_layout.h wire::CompletionEntry done;
//   (*channel)->Wait(&done, timeout);
//
// Everything is void when the connection ends: the server unmaps the region and aborts the ring's
// steps. The same holds in a process forked from this one, where the object must not be used
// (home.h). Most users want Session (session.h), which uses this class itself.
//
// Ownership: spans from Allocate live as long as the object. Threading: Allocate and Free from any
// thread; Submit from one at a time, Poll and Wait from one at a time.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_SHARED_MEMORY_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_SHARED_MEMORY_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/shared_memory/block_list.h"
#include "client/cpp/shared_memory/device_region.h"
#include "client/cpp/shared_memory/home.h"
#include "proto/wire/ring_layout.h"

namespace mla::client {

struct SharedMemoryOptions {
  std::string tenant;           // empty: the server's default tenant
  bool ring = true;             // false: a region for tensors of gRPC messages only
  uint64_t bytes = 64u << 20;   // for tensors
  uint32_t server_spin_us = 0;  // how long the server's thread should spin; it may grant less
  uint32_t spin_us = 0;         // how long Wait spins before it sleeps
  int32_t connect_timeout_ms = 10000;  // for the connection and the server's connect_reply together
  int64_t server_uid = -1;             // a further user whose sockets are trusted (socket_owner.h)
  uint32_t device_mib = 0;             // device memory in addition to a ring, in MiB; 0: none
  DeviceRegionOptions device;          // device to map it on
  // Registers the region with the driver of `device`, so that its streams copy from and to the
  // arena without a thread that waits, and calls whose tensors lie there can be chained.
  bool pins = false;
  uint64_t words_last = wire::kChainWordsLast;  // tests have less
};

class SharedMemory final {
 public:
  // `shm_path` is the server's shm.path. UNAVAILABLE if the server does not exist, or does not
  // accept and reply within connect_timeout_ms. UNIMPLEMENTED if the memory is not sealed, sized
  // and laid out as proto/wire/ring_layout.h requires. PERMISSION_DENIED for a socket of another
  // user (socket_owner.h). Otherwise the status with which the server refused.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Connect(const std::string& shm_path,
                                                               const SharedMemoryOptions& options);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  uint64_t boot_id() const { return connect_reply_.boot_id; }
  std::string_view handle() const {
    return {reinterpret_cast<const char*>(connect_reply_.handle), wire::kHandleBytes};
  }
  std::span<std::byte> region() const { return region_; }
  uint64_t arena_bytes() const { return region_.size() - connect_reply_.arena_offset; }
  uint32_t ring_entries() const { return connect_reply_.ring_entries; }
  // Null if none was requested, or device_status() has the reason. Without device memory of its own
  // if the region was to be pinned and none was requested.
  DeviceRegion* device() const { return device_.get(); }
  bool has_device_memory() const { return device_ != nullptr && !device_->memory().empty(); }
  // OK if calls with tensors in the arena can be chained, else the reason why not.
  const absl::Status& pinned() const { return pinned_; }
  const absl::Status& device_status() const { return device_status_; }

  // Memory for tensors, aligned to 64 bytes; empty without a contiguous part of that size.
  std::span<std::byte> Allocate(uint64_t bytes);
  void Free(std::span<std::byte> block);
  // True if [data, data + bytes) is arena memory.
  bool Holds(const void* data, uint64_t bytes) const;
  uint64_t OffsetOf(const void* data) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(data) - region_.data());
  }

  // Gives the connection up and returns once the server has ended its side (the ring's steps are
  // aborted then), or after `timeout`.
  void Close(std::chrono::milliseconds timeout);
  // Gives the connection up at once.
  void Disconnect();

  // --- The ring. REQUIRES: ring_entries() > 0. Publishes an entry (its sequence is set here) and
  // wakes the server if it sleeps. Returns false if the ring is full: as many requests as it has
  // entries wait for their completions to be taken. With kEntryOnDevice the server waits for the
  // work that `stream` has been given so far (DeviceRegion::Record). `chained`: later work of
  // `stream` waits for the outputs of this entry; REQUIRES kEntryOnDevice or pinned().
  bool Submit(wire::SubmissionEntry entry, void* stream = nullptr, bool chained = false);
  // A chained call in a graph: an entry, and the node in which the graph's stream waits for it.
  struct GraphEntry {
    wire::SubmissionEntry entry{};
    void* node = nullptr;
  };
  // Captures the words of a chained entry in the graph of `stream`; returns the node. Errors: as
  // DeviceRegion::CaptureTurn.
  absl::StatusOr<void*> CaptureTurn(void* stream);
  // Publishes entries for the next launch of `exec`, an instance of the graph that has their nodes.
  // The caller launches it on `stream` afterwards, once. REQUIRES: the ring has room for all of
  // them. Nothing was published if it fails; `exec` must not be launched then.
  absl::Status SubmitGraph(std::span<const GraphEntry> entries, void* exec, void* stream);
  // Releases streams that wait for completions which will not come any more; call it once. Nothing
  // may be submitted afterwards.
  void ReleaseStreams();
  // Takes the next completion if there is one. For kEntryMessage, Message must be read before the
  // next call of Poll or Wait, which gives its slot back.
  bool Poll(wire::CompletionEntry* entry);
  std::string_view Message(const wire::CompletionEntry& entry) const;
  // Poll that spins, then sleeps. DEADLINE_EXCEEDED; UNAVAILABLE when the connection has ended.
  absl::Status Wait(wire::CompletionEntry* entry, std::chrono::nanoseconds timeout);
  // False once either side has given the connection up.
  bool Connected() const;
  // Requests whose completions have not been given back; of the submitting thread.
  uint64_t in_flight() const { return submitted_ - returned_.load(std::memory_order_acquire); }

 private:
  struct Descriptors {
    int region = -1, device = -1;
    void Close();
  };
  explicit SharedMemory(const SharedMemoryOptions& options) : options_(options) {}
  absl::Status Handshake(const std::string& shm_path);
  absl::Status Exchange(const std::string& path, std::chrono::steady_clock::time_point deadline,
                        Descriptors* descriptors, bool* closed);
  bool has_device() const { return (connect_reply_.flags & wire::kHasDevice) != 0; }
  absl::Status CheckRegion(int descriptor) const;
  absl::Status CheckRing() const;
  absl::Status Map(int descriptor);
  void MapDevice(int descriptor);
  void Pin();
  bool Ready() const;
  void GiveBack();
  DeviceRegion::Turn TurnOf(uint64_t index) const;
  absl::Status BeginChain(uint64_t index, void* stream);
  void Publish(const wire::SubmissionEntry& entry);
  absl::Status RecordEvent(uint64_t index, void* stream, bool chained);
  absl::Status MapWords(std::span<std::byte> memory);
  absl::Status ForgetWords(uint32_t value);

  const SharedMemoryOptions options_;
  int socket_ = -1;
  wire::ConnectReply connect_reply_{};
  std::span<std::byte> region_;
  wire::RingHeader* header_ = nullptr;
  wire::SubmissionEntry* submissions_ = nullptr;
  wire::CompletionEntry* completions_ = nullptr;
  uint64_t submitted_ = 0, taken_ = 0;
  std::atomic<uint64_t> returned_{0};  // as the server has been told
  bool held_ = false;                  // the last completion's slot has not been given back
  BlockList blocks_;                   // blocks of the arena
  std::unique_ptr<DeviceRegion> device_;
  bool words_mapped_ = false;  // there have been chained entries
  uint64_t chain_end_ = 0;     // number after the last chained entry
  bool released_ = false;      // streams that waited are
  absl::Status device_status_;
  absl::Status pinned_ = absl::UnavailableError("shared memory: it was not to be pinned");
  std::optional<ForkGuard> guard_;  // for the socket and the region
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_SHARED_MEMORY_H_
