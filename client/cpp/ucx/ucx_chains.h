// Chained calls over UCX: a stream of this process's GPU says by a word of the mirror that the
// tensors of an entry lie in the arena, and waits for another word until its outputs do. So the
// layers of a step follow each other without a thread of the worker in between.
//
// The words are those of proto/wire/ring_layout.h, in the mirror, and do not travel: UcxMemory
// sends an entry once Ready says so, and calls Complete when its outputs have arrived.
//
// Ownership: `region` outlives the object, which is destroyed before UCX gives the region up.
// Threading: PassTurn by the thread that submits, which it may hold up; the others by one thread at
// a time, also during PassTurn.
#ifndef MLA_CLIENT_CPP_UCX_UCX_CHAINS_H_
#define MLA_CLIENT_CPP_UCX_UCX_CHAINS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/shared_memory/device_region.h"
#include "proto/wire/ring_layout.h"

namespace mla::client {

class UcxChains final {
 public:
  // Registers `region`, the mirror of a ring of `entries`, with the driver of the device.
  // UNAVAILABLE or UNIMPLEMENTED name what this process lacks; INTERNAL, a call that failed.
  static absl::StatusOr<std::unique_ptr<UcxChains>> Open(std::span<std::byte> region,
                                                         uint32_t entries,
                                                         const DeviceRegionOptions& options);

  DeviceRegion* device() const { return device_.get(); }
  // Gives `stream` the words of entry `index`. `returned` is the number of entries whose
  // completions were taken: a chain begins when all of the last one were.
  absl::Status PassTurn(uint64_t index, uint64_t returned, void* stream);
  // The entry will be sent; its completion will have this tag.
  void Expect(uint64_t index, uint64_t tag) { waiting_[tag] = index; }
  // True once the stream has come to this entry: its tensors are in the arena.
  bool Ready(uint64_t index) const;
  // The outputs of the entry with this tag are in the arena, or will not come. Does nothing for
  // entries that are not chained.
  void Complete(uint64_t tag);
  // Completes all entries, as Complete does with one.
  void Release();

 private:
  UcxChains(std::span<std::byte> region, uint32_t entries, std::unique_ptr<DeviceRegion> device);
  uint32_t* DoneOf(uint64_t index) const;

  wire::RingHeader* const header_;
  wire::CompletionEntry* const completions_;
  const uint32_t entries_;
  const std::unique_ptr<DeviceRegion> device_;
  uint64_t chain_end_ = 0;  // number after the last chained entry, of PassTurn
  absl::flat_hash_map<uint64_t, uint64_t> waiting_;  // entries that streams wait for, by tag
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_UCX_UCX_CHAINS_H_
