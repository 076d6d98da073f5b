// Memory that is shared with a server of the same host: a region, and the command ring at its
// front.
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
#include "client/cpp/shared_memory/device_region.h"
#include "client/cpp/shared_memory/home.h"
#include "client/cpp/shared_memory/ring_memory.h"
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

class SharedMemory final : public RingMemory {
 public:
  // `shm_path` is the server's shm.path. UNAVAILABLE if the server does not exist, or does not
  // accept and reply within connect_timeout_ms. UNIMPLEMENTED if the memory is not sealed, sized
  // and laid out as proto/wire/ring_layout.h requires. PERMISSION_DENIED for a socket of another
  // user (socket_owner.h). Otherwise returns the status with which the server refused.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Connect(const std::string& shm_path,
                                                               const SharedMemoryOptions& options);
  // Like Connect, for a socket that is connected to the server's listener already. Takes the socket
  // over, also if it fails.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Attach(int socket,
                                                              const SharedMemoryOptions& options);
  ~SharedMemory() override;

  uint64_t boot_id() const { return connect_reply_.boot_id; }
  std::string_view handle() const {
    return {reinterpret_cast<const char*>(connect_reply_.handle), wire::kHandleBytes};
  }
  uint32_t server_spin_us() const { return connect_reply_.spin_us; }  // as granted
  uint64_t arena_offset() const { return connect_reply_.arena_offset; }
  std::string_view transport() const override { return "ring"; }
  uint32_t ring_entries() const override { return connect_reply_.ring_entries; }
  DeviceRegion* device() const override { return device_.get(); }
  absl::Status pinned() const override { return pinned_; }
  absl::Status device_status() const override { return device_status_; }

  void Close(std::chrono::milliseconds timeout) override;
  void Disconnect() override;

  // --- The ring. REQUIRES: ring_entries() > 0.
  bool Submit(wire::SubmissionEntry entry, void* stream = nullptr, bool chained = false);
  absl::StatusOr<void*> CaptureTurn(void* stream) override;
  absl::Status SubmitGraph(std::span<const GraphEntry> entries, void* exec, void* stream) override;
  bool Submit(wire::SubmissionEntry entry, const RingPlaces&, void* stream, bool chained) override {
    return Submit(entry, stream, chained);
  }
  void ReleaseStreams() override;
  bool Poll(wire::CompletionEntry* entry) override;
  absl::Status Wait(wire::CompletionEntry* entry, std::chrono::nanoseconds timeout) override;
  bool Connected() const override;
  uint64_t in_flight() const override {
    return submitted_ - returned_.load(std::memory_order_acquire);
  }

 private:
  struct Descriptors {
    int region = -1, device = -1;
    void Close();
  };
  explicit SharedMemory(const SharedMemoryOptions& options) : options_(options) {}
  absl::Status Handshake(const std::string& shm_path);
  absl::Status Dial(const std::string& path, std::chrono::steady_clock::time_point deadline);
  absl::Status Exchange(const std::string& path, std::chrono::steady_clock::time_point deadline,
                        Descriptors* descriptors, bool* closed);
  absl::Status TakeReply(Descriptors* descriptors);
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
  wire::RingHeader* header_ = nullptr;
  wire::SubmissionEntry* submissions_ = nullptr;
  wire::CompletionEntry* completions_ = nullptr;
  uint64_t submitted_ = 0, taken_ = 0;
  std::atomic<uint64_t> returned_{0};  // as the server has been told
  bool held_ = false;                  // the last completion's slot has not been given back
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
