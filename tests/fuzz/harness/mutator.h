// A sequence of inputs mutated from seeds: changed bits, bytes, numbers and texts that are
// difficult for parsers, repeats, and parts of other seeds. The same arguments give the same
// sequence. Threading: none.
#ifndef MLA_TESTS_FUZZ_HARNESS_MUTATOR_H_
#define MLA_TESTS_FUZZ_HARNESS_MUTATOR_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace mla::fuzz {

class Mutator final {
 public:
  // REQUIRES: there is a seed. No input is longer than `bytes_max`.
  Mutator(uint64_t random_seed, std::vector<std::string> seeds, size_t bytes_max);

  std::string Next();

 private:
  const std::string& Pick();
  size_t Place(const std::string& input);
  void Mutate(std::string* input);

  std::mt19937_64 random_;
  const std::vector<std::string> seeds_;
  const size_t bytes_max_;
};

}  // namespace mla::fuzz

#endif  // MLA_TESTS_FUZZ_HARNESS_MUTATOR_H_
