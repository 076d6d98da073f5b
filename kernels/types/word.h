// Words of host memory by which devices, of this process and of others, tell each other how far
// they have come.
#ifndef MLA_KERNELS_TYPES_WORD_H_
#define MLA_KERNELS_TYPES_WORD_H_

#include <atomic>
#include <cstdint>

namespace mla::kernels {

// A counter word and a value of it; the counter wraps from 2^32 - 1 to 0. The word lies in memory
// under RegisterHost, aligned to 4 bytes.
struct WordValue {
  uint32_t* word = nullptr;  // null: none
  uint32_t value = 0;
  // The device address of the same word in shared device memory, or null if there is only `word`.
  // Devices poll it and store it before `word`.
  uint32_t* nearby = nullptr;

  // Returns true if the word is `value` or a later one. The caller then sees all writes made before
  // the word was stored. REQUIRES: word is not null.
  bool Reached() const {
    const uint32_t seen = std::atomic_ref<uint32_t>(*word).load(std::memory_order_acquire);
    return static_cast<int32_t>(seen - value) >= 0;
  }
  // REQUIRES: word is not null.
  void Store() const { std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release); }
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_WORD_H_
