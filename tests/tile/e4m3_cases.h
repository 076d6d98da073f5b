// What probe_e4m3 of sm_90 is given, and what must come out: where operands lie, and how many bits
// of a sum the matrix unit keeps (docs/benchmarks/gpu.md).
#ifndef MLA_TESTS_TILE_E4M3_CASES_H_
#define MLA_TESTS_TILE_E4M3_CASES_H_

#include <string>
#include <vector>

#include "kernels/formats/dtype.h"

namespace mla::tile_test {

struct E4m3Case {
  std::string what;
  std::vector<kernels::Bf16> a, b;  // of numbers that codes hold
  std::vector<float> wanted;        // as probe_args.h has them
};

std::vector<E4m3Case> E4m3Cases();

}  // namespace mla::tile_test

#endif  // MLA_TESTS_TILE_E4M3_CASES_H_
