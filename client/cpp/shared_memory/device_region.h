// Maps a ring's device memory in the client: the worker's kernels write and read tensors where the
// server's kernels read and write them.
//
// The vendor's runtime is opened at run time; nothing is linked. The process's primary context of
// its device is used, as CUDA's runtime API and PyTorch do. If the server's GPU is another one of
// this host, it must be visible to this process, and the two must be peers: events live on that
// GPU, and work of this process's streams reaches them through a stream of the region.
//
// Ownership: Allocate's memory lives as long as the region. Threading: any thread.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_REGION_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_REGION_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/shared_memory/block_list.h"
#include "client/cpp/shared_memory/device_copy.h"
#include "proto/wire/ring_layout.h"

namespace mla::client {

struct DeviceRegionOptions {
  int device = 0;                         // index in this process, in the runtime's order
  static constexpr int kTheServers = -1;  // as `device`: the one that has the memory
  std::string library;                    // of the runtime; empty: search for it (device_runtime.h)
};

class DeviceRegion final {
 public:
  // `part` is the region's device part: DeviceHeader and event handles. `descriptor` came with the
  // reply, or is -1; the caller keeps it. UNAVAILABLE names what this process lacks, UNIMPLEMENTED
  // the requirement that the part violates, INTERNAL a failed call of the runtime.
  static absl::StatusOr<std::unique_ptr<DeviceRegion>> Map(std::span<const std::byte> part,
                                                           int descriptor, uint32_t entries,
                                                           const DeviceRegionOptions& options);
  // Makes a region without memory of the server. It lets streams of this process's device wait for
  // words of its memory (MapWords). The vendor is the one whose runtime is found.
  static absl::StatusOr<std::unique_ptr<DeviceRegion>> WithoutMemory(
      const DeviceRegionOptions& options);
  ~DeviceRegion();

  std::span<std::byte> memory() const;  // device addresses; empty: there is none
  // Returns the part of memory() in front of the words of chains.
  std::span<std::byte> tensors() const;
  bool nvidia() const;
  bool chains() const;  // wire::DeviceHeader::chains
  // Returns a reason for slowness, in words for people, or empty: worker and server share one GPU,
  // and the driver gives it to one process at a time.
  const std::string& warning() const;

  // Returns memory aligned to 64 bytes; empty without a contiguous part of that size.
  std::span<std::byte> Allocate(uint64_t bytes);
  void Free(std::span<std::byte> block);
  bool Holds(const void* data, uint64_t bytes) const;
  uint64_t OffsetOf(const void* data) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(data) - memory().data());
  }

  // Makes the memory's device current in the calling thread until it ends, for libraries that
  // register the memory.
  absl::Status Bind() const;
  // Makes what devices of the host (network adapters) have written into the memory so far visible
  // to kernels that are launched afterwards; does nothing on GPUs that order such writes.
  // FAILED_PRECONDITION: the GPU neither orders them nor can be asked to.
  absl::Status ShowRemoteWrites() const;

  // Records the work that `stream` has been given so far in the event of ring slot `slot`. `stream`
  // is a CUstream or hipStream_t of the process's device; null is the default stream. Does not wait
  // for it.
  absl::Status Record(uint32_t slot, void* stream);
  // Lets streams wait for and store words of `memory`, of this process, and words of Nearby; call
  // it once. The memory stays mapped until this object is gone. UNIMPLEMENTED: the runtime lacks a
  // call for it.
  absl::Status MapWords(std::span<std::byte> memory);
  // Gives `stream` copies, in any order: no two may write the same bytes. Does not wait for them.
  absl::Status Copy(std::span<const DeviceCopy> copies, void* stream);
  struct Word {
    uint32_t* word = nullptr;
    uint32_t value = 0;
  };
  // Words that a stream stores, in this order, and the word for which it then waits.
  struct Turn {
    std::array<Word, 2> stores;  // the last one may have no word
    Word awaited;
  };
  // Stores the word once `stream` has finished its work so far. Does not wait itself.
  absl::Status StoreWord(uint32_t* word, uint32_t value, void* stream);
  // Makes work that `stream` gets from now on wait until the word is `value` or a later one, where
  // 0 follows 2^32 - 1. Does not wait itself.
  absl::Status AwaitWord(uint32_t* word, uint32_t value, void* stream);
  // As StoreWord of each of the turn's words and AwaitWord of the last, in one call if the driver
  // has one.
  absl::Status PassTurn(const Turn& turn, void* stream);
  // Captures a PassTurn in the graph that the stream captures. Returns the graph's node. The turn's
  // values are used by the graph's launches until SetTurn sets others. FAILED_PRECONDITION: nothing
  // is captured; UNIMPLEMENTED: the runtime lacks a call for it.
  absl::StatusOr<void*> CaptureTurn(const Turn& turn, void* stream);
  // Sets the turn of such a node in `exec`, an instance of its graph, for launches from now on.
  absl::Status SetTurn(const Turn& turn, void* exec, void* node);
  // Returns the device address of the word at `offset` of the words in device memory, for StoreWord
  // and AwaitWord; null without such words, or if MapWords was not called.
  uint32_t* Nearby(uint64_t offset) const;
  // Stores such words whatever the process's streams wait for, and waits for that. Takes a tenth of
  // a second: it makes a context.
  absl::Status ReleaseNearby(std::span<const Word> words);
  // Stores all words of a ring of `entries`, and waits for that. Does nothing if there are no
  // words.
  absl::Status SetNearby(uint32_t entries, uint32_t value);

 private:
  struct State;
  explicit DeviceRegion(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
  BlockList blocks_;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_DEVICE_REGION_H_
