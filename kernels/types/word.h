// Words of host memory by which devices, of this process and of others, tell each other how far
// they are.
#ifndef MLA_KERNELS_TYPES_WORD_H_
#define MLA_KERNELS_TYPES_WORD_H_

#include <atomic>
#include <cstdint>

namespace mla::kernels {

// A word that counts up, from 2^32 - 1 to 0, and a value of it. In memory under RegisterHost,
// aligned to 4 bytes.
struct WordValue {
  uint32_t* word = nullptr;  // null: there is none
  uint32_t value = 0;
  // The device's address of the same word in shared device memory, where devices look at it and
  // store it first; null: there is only `word`.
  uint32_t* nearby = nullptr;

  // Whether the word is `value` or comes after it; what was written before it was stored is seen.
  // REQUIRES: word is not null.
  bool Reached() const {
    const uint32_t seen = std::atomic_ref<uint32_t>(*word).load(std::memory_order_acquire);
    return static_cast<int32_t>(seen - value) >= 0;
  }
  // REQUIRES: word is not null.
  void Store() const { std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release); }
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_WORD_H_
