// Inputs that are read and made number by number, for targets whose input is a list of actions.
// Plain data: any thread.
#ifndef MLA_TESTS_FUZZ_HARNESS_INPUT_H_
#define MLA_TESTS_FUZZ_HARNESS_INPUT_H_

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

namespace mla::fuzz {

// Takes `size` bytes off the front, or fewer at the end.
inline std::string_view Take(std::string_view* input, size_t size) {
  const std::string_view taken = input->substr(0, size);
  input->remove_prefix(taken.size());
  return taken;
}

// As above, as a number; missing bytes are zero.
template <typename T>
T Number(std::string_view* input) {
  T value{};
  const std::string_view bytes = Take(input, sizeof(T));
  std::memcpy(&value, bytes.data(), bytes.size());
  return value;
}

// Returns the bytes that Number reads.
template <typename... Numbers>
std::string Packed(Numbers... numbers) {
  std::string bytes;
  (bytes.append(reinterpret_cast<const char*>(&numbers), sizeof(numbers)), ...);
  return bytes;
}

}  // namespace mla::fuzz

#endif  // MLA_TESTS_FUZZ_HARNESS_INPUT_H_
