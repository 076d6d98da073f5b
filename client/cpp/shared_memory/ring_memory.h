// The memory of a command ring as its client has it, and the ring. The memory is shared with a
// server of the same host (shared_memory.h), or is a mirror whose contents travel
// (client/cpp/ucx/ucx_memory.h).
//
// Ownership: spans from Allocate live as long as the object. Threading: Allocate and Free from any
// thread; Submit from one at a time, Poll and Wait from one at a time.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_RING_MEMORY_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_RING_MEMORY_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/shared_memory/block_list.h"
#include "client/cpp/shared_memory/device_region.h"
#include "proto/wire/ring_layout.h"

namespace mla::client {

// The bytes that an entry uses: its input tensors, or its message with the tails in front of it;
// and the outputs of an attend at entry.out_offset.
struct RingPlaces {
  uint64_t in_offset = 0, in_bytes = 0, out_bytes = 0;
};

class RingMemory {
 public:
  virtual ~RingMemory() = default;
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  std::span<std::byte> region() const { return region_; }
  uint64_t arena_bytes() const { return region_.size() - arena_offset_; }
  // Returns memory for tensors, aligned to 64 bytes; empty without a contiguous part of that size.
  std::span<std::byte> Allocate(uint64_t bytes);
  void Free(std::span<std::byte> block);
  // Returns true if [data, data + bytes) is arena memory.
  bool Holds(const void* data, uint64_t bytes) const;
  uint64_t OffsetOf(const void* data) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(data) - region_.data());
  }

  // Returns the name of the transport: "ring" or "ucx".
  virtual std::string_view transport() const = 0;
  virtual uint32_t ring_entries() const = 0;
  // Null if none was requested, or device_status() has the reason. Without device memory of its own
  // if the region was to be pinned and none was requested.
  virtual DeviceRegion* device() const { return nullptr; }
  bool has_device_memory() const { return device() != nullptr && !device()->memory().empty(); }
  virtual absl::Status device_status() const;
  // Returns OK if calls with tensors in the arena can be chained, else the reason why not.
  virtual absl::Status pinned() const;

  // Publishes an entry, whose sequence is set here. Returns false if the ring is full: as many
  // requests as it has entries wait for their completions to be taken. With kEntryOnDevice the
  // server waits for the work that `stream` has been given so far (DeviceRegion::Record).
  // `chained`: later work of `stream` waits for the outputs of this entry; REQUIRES kEntryOnDevice
  // or pinned().
  virtual bool Submit(wire::SubmissionEntry entry, const RingPlaces& places, void* stream,
                      bool chained) = 0;
  // Entries that are submitted from here on may be kept, to travel together, until SendHeld, which
  // must be called soon; Wait and Poll send them, too. Does nothing where entries do not travel.
  virtual void Hold() {}
  virtual void SendHeld() {}
  // A chained call in a graph: its entry, and the node in which the graph's stream waits for the
  // call.
  struct GraphEntry {
    wire::SubmissionEntry entry{};
    void* node = nullptr;
  };
  // Captures the words of a chained entry in the graph of `stream`; returns the node. Errors: as
  // DeviceRegion::CaptureTurn; UNIMPLEMENTED for memory without device().
  virtual absl::StatusOr<void*> CaptureTurn(void* stream);
  // Publishes entries for the next launch of `exec`, an instance of the graph that has their nodes.
  // The caller launches it on `stream` afterwards, once. REQUIRES: the ring has room for all of
  // them. Nothing was published if it fails; `exec` must not be launched then.
  virtual absl::Status SubmitGraph(std::span<const GraphEntry> entries, void* exec, void* stream);
  // Releases streams that wait for completions which will not come any more; call it once. Nothing
  // may be submitted afterwards.
  virtual void ReleaseStreams() {}
  // Takes the next completion if there is one. For kEntryMessage, Message must be read before the
  // next call of Poll or Wait, which gives its slot back.
  virtual bool Poll(wire::CompletionEntry* entry) = 0;
  std::string_view Message(const wire::CompletionEntry& entry) const;
  // As Poll, but spins and then sleeps until an entry comes. DEADLINE_EXCEEDED; UNAVAILABLE when
  // the connection has ended.
  virtual absl::Status Wait(wire::CompletionEntry* entry, std::chrono::nanoseconds timeout) = 0;
  // Returns false once either side has given the connection up.
  virtual bool Connected() const = 0;
  // Returns the number of requests whose completions have not been given back. Only the submitting
  // thread may call it.
  virtual uint64_t in_flight() const = 0;

  // Gives the connection up and returns once the server has ended its side (the ring's steps are
  // aborted then), or after `timeout`.
  virtual void Close(std::chrono::milliseconds timeout) = 0;
  // Gives the connection up at once.
  virtual void Disconnect() = 0;

 protected:
  RingMemory() = default;
  // Once.
  void SetRegion(std::span<std::byte> region, uint64_t arena_offset);

 private:
  std::span<std::byte> region_;
  uint64_t arena_offset_ = 0;
  BlockList blocks_;  // blocks of the arena
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_RING_MEMORY_H_
