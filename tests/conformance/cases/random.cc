#include "tests/conformance/cases/random.h"

#include <algorithm>
#include <cmath>

namespace mla::conformance {
namespace {

constexpr int64_t kTableSize = 1 << 16;

std::vector<float> MakeNormals() {
  Random random(20240607);
  std::vector<float> table(kTableSize);
  for (int64_t i = 0; i < kTableSize; i += 2) {
    const double u = (static_cast<double>(random.Next() >> 11) + 1.0) * 0x1.0p-53;
    const double angle = 2.0 * M_PI * static_cast<double>(random.Next() >> 11) * 0x1.0p-53;
    const double radius = std::sqrt(-2.0 * std::log(u));
    table[i] = static_cast<float>(radius * std::cos(angle));
    table[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  return table;
}

}  // namespace

void FillNormal(Random& random, float deviation, float* out, int64_t count) {
  static const std::vector<float>& table = *new std::vector<float>(MakeNormals());
  constexpr int64_t kSlice = 61;  // shorter than any row, so that rows are unlike each other
  for (int64_t done = 0; done < count;) {
    const int64_t take = std::min<int64_t>(kSlice, count - done);
    const int64_t from = random.Below(kTableSize - kSlice);
    const float sign = random.OneIn(2) ? deviation : -deviation;
    for (int64_t i = 0; i < take; ++i) out[done + i] = sign * table[from + i];
    done += take;
  }
}

}  // namespace mla::conformance
