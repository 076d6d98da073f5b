#include "tests/fuzz/harness/mutator.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace mla::fuzz {

Mutator::Mutator(uint64_t random_seed, std::vector<std::string> seeds, size_t bytes_max)
    : random_(random_seed), seeds_(std::move(seeds)), bytes_max_(bytes_max) {}

const std::string& Mutator::Pick() { return seeds_[random_() % seeds_.size()]; }

size_t Mutator::Place(const std::string& input) {
  return input.empty() ? 0 : random_() % (input.size() + 1);
}

std::string Mutator::Next() {
  std::string input = Pick();
  for (uint64_t n = 1 + random_() % 4; n > 0; --n) Mutate(&input);
  if (input.size() > bytes_max_) input.resize(bytes_max_);
  return input;
}

void Mutator::Mutate(std::string* input) {
  // Lengths, counts and texts that are difficult for parsers.
  static const std::string kTokens[] = {{'\0'},
                                        "\xff",
                                        "\x7f",
                                        "\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
                                        "\xff\xff\xff\xff\x0f",
                                        "\xfa\x7f",
                                        "\x0b",
                                        "\"",
                                        "{",
                                        "}",
                                        "[",
                                        "]",
                                        ": ",
                                        "\n",
                                        "-1",
                                        "1e309",
                                        "\xc3\x28",
                                        "&a *a",
                                        "99999999999999999999",
                                        "GiB"};
  const size_t place = Place(*input);
  const size_t rest = input->size() - place;
  switch (random_() % 8) {
    case 0:
      if (rest > 0) (*input)[place] = static_cast<char>((*input)[place] ^ (1 << random_() % 8));
      break;
    case 1:
      if (rest > 0) (*input)[place] = static_cast<char>(random_());
      break;
    case 2:
      input->insert(place, kTokens[random_() % std::size(kTokens)]);
      break;
    case 3:
      input->erase(place, 1 + random_() % 8);
      break;
    case 4:
      input->insert(place, input->substr(place, 1 + random_() % 32));
      break;
    case 5: {
      const std::string& other = Pick();
      input->replace(place, random_() % (rest + 1), other.substr(Place(other)));
      break;
    }
    case 6:
      input->resize(place);
      break;
    default: {
      const std::string& token = kTokens[random_() % std::size(kTokens)];
      input->replace(place, std::min(rest, token.size()), token);
    }
  }
}

}  // namespace mla::fuzz
