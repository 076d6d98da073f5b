// Decides whether a server's attention outputs agree with the expected ones, and keeps the worst
// errors of all compared outputs.
//
// An element of o agrees within `abs_of_v` times the largest |V| among the rows that its row
// attends to, or within `rel` of the expected element. Each row's head agrees when 1 - 2<g,w> /
// (<g,g> + <w,w>) stays below `cosine`, and its lse within `lse`. NaN, +inf and -inf must be at the
// same places. Threading: not thread-safe.
#ifndef MLA_CLIENT_MLACTL_TENSORS_OUTPUT_COMPARISON_H_
#define MLA_CLIENT_MLACTL_TENSORS_OUTPUT_COMPARISON_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace mla::mlactl {

struct OutputRule {
  double abs_of_v = 2e-3;
  double rel = 1.6e-2;
  double cosine = 1e-5;
  double lse = 1e-3;
};

// The largest error of a kind, with its place.
struct WorstError {
  double value = 0;
  std::string where;  // empty: nothing was compared
};

class OutputComparison final {
 public:
  explicit OutputComparison(const OutputRule& rule) : rule_(rule) {}

  // Compares one head of one row: `got` with `want`. `max_v`: the largest |V| that the row attends
  // to. `where` names it, e.g. "record 17: row 3, head 0".
  void AddRow(std::span<const float> got, std::span<const float> want, double max_v,
              const std::string& where);
  void AddLse(float got, float want, const std::string& where);

  bool agrees() const { return outside() == 0; }
  const OutputRule& rule() const { return rule_; }
  uint64_t elements() const { return elements_; }
  uint64_t rows() const { return rows_; }  // row heads
  // Returns how much does not agree: elements, row heads by their cosine, and log-sum-exps.
  uint64_t outside() const { return outside_elements_ + outside_cosines_ + outside_lse_; }
  uint64_t outside_elements() const { return outside_elements_; }
  uint64_t outside_cosines() const { return outside_cosines_; }
  uint64_t outside_lse() const { return outside_lse_; }
  const std::string& first_outside() const { return first_outside_; }

  // The worst |got - want|: of_allowed as a part of the allowed error (1 is just inside), abs as a
  // number.
  const WorstError& of_allowed() const { return of_allowed_; }
  const WorstError& abs() const { return abs_; }
  const WorstError& abs_of_v() const { return abs_of_v_; }  // as a part of the largest |V|
  const WorstError& cosine() const { return cosine_; }
  const WorstError& lse() const { return lse_; }

 private:
  void Outside(uint64_t* count, const std::string& what, const std::string& where);
  static void Keep(WorstError* worst, double value, const std::string& where);

  const OutputRule rule_;
  uint64_t elements_ = 0, rows_ = 0;
  uint64_t outside_elements_ = 0, outside_cosines_ = 0, outside_lse_ = 0;
  std::string first_outside_;
  WorstError of_allowed_, abs_, abs_of_v_, cosine_, lse_;
};

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_TENSORS_OUTPUT_COMPARISON_H_
