// One definition of "equal enough" for attention outputs.
//
// NaN, +Inf and -Inf must match position by position. Every finite element must be within `abs` or
// within `rel` of the expected element. Over all finite elements the cosine difference 1 -
// 2<g,w>/(<g,g> + <w,w>), which is |g - w|^2 / (|g|^2 + |w|^2), must stay under `cosine`. A failure
// names the worst element by its coordinates.
#ifndef MLA_TESTS_CONFORMANCE_CASES_COMPARE_H_
#define MLA_TESTS_CONFORMANCE_CASES_COMPARE_H_

#include <cstdint>
#include <span>
#include <string>

namespace mla::conformance {

struct Tolerance {
  double abs = 0.0;     // in the unit of the values
  double rel = 0.0;     // as a share of the expected magnitude
  double cosine = 1.0;  // 1 disables the check
  // g|^2 + |w|^2 counts as at least this in the cosine difference. For outputs of so few dims that
  // all of them may be near zero by chance.
  double least_norms = 0.0;
};

struct Comparison {
  bool equal = true;
  double worst_abs = 0.0;    // largest |got - want| over the finite elements
  double cosine_diff = 0.0;  // as defined above; 0 when both are all zero
  std::string message;       // empty when equal
};

// `got` and `want` are row-major [rows, columns]; sizes must agree.
Comparison Compare(std::span<const float> got, std::span<const float> want, int64_t columns,
                   const Tolerance& tolerance);

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_CASES_COMPARE_H_
