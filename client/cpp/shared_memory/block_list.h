// Blocks of a stretch of memory by offset: first fit, neighbours joined when they are given back.
// Offsets and sizes are multiples of 64 bytes. Threading: any thread.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_BLOCK_LIST_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_BLOCK_LIST_H_

#include <cstdint>
#include <map>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::client {

class BlockList final {
 public:
  // Gives the list its memory: `bytes` from `offset` on. To be called once, before any other call.
  void Add(uint64_t offset, uint64_t bytes);
  // Takes a block of at least this size and returns its offset; empty without a contiguous part of
  // that size.
  std::optional<uint64_t> Take(uint64_t bytes);
  // Ignores values that are not the offset of a block.
  void Return(uint64_t offset);

 private:
  Mutex mutex_;
  std::map<uint64_t, uint64_t> free_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes
  std::map<uint64_t, uint64_t> used_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_BLOCK_LIST_H_
