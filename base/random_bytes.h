// The system's random numbers, which cannot be guessed: for keys, tokens and identities that must
// differ between processes. Threading: any thread.
#ifndef MLA_BASE_RANDOM_BYTES_H_
#define MLA_BASE_RANDOM_BYTES_H_

#include <cstdint>
#include <span>

namespace mla {

// Fills the bytes. Returns false, with errno set, if the system refuses.
[[nodiscard]] bool FillRandom(std::span<std::byte> bytes);

// Fills any array of plain values.
template <typename Array>
[[nodiscard]] bool FillRandom(Array* array) {
  return FillRandom(std::as_writable_bytes(std::span(*array)));
}

// Returns a random number other than 0. Ends the process if the system refuses.
uint64_t RandomNumber();

}  // namespace mla

#endif  // MLA_BASE_RANDOM_BYTES_H_
