#include "tests/fuzz/harness/target.h"

#include <cstdio>
#include <cstdlib>

namespace mla::fuzz {

void Require(const std::string& violation) {
  if (violation.empty()) return;
  std::fprintf(stderr, "fuzz: %s\n", violation.c_str());
  std::abort();
}

}  // namespace mla::fuzz
