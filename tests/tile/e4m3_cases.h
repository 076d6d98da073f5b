// Inputs of sm_90's probe_e4m3, and the expected results: the layout of operands, and how many bits
// of a sum the matrix unit keeps (docs/benchmarks/gpu/rows_of_8_bits.md).
#ifndef MLA_TESTS_TILE_E4M3_CASES_H_
#define MLA_TESTS_TILE_E4M3_CASES_H_

#include <string>
#include <vector>

#include "kernels/formats/dtype.h"

namespace mla::tile_test {

struct E4m3Case {
  std::string what;
  std::vector<kernels::Bf16> a, b;  // numbers that codes hold exactly
  std::vector<float> wanted;        // in the order of probe_args.h
};

std::vector<E4m3Case> E4m3Cases();

}  // namespace mla::tile_test

#endif  // MLA_TESTS_TILE_E4M3_CASES_H_
