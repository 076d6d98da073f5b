#include "tests/tile/e4m3_cases.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>

#include "tests/tile/probe_args.h"

namespace mla::tile_test {
namespace {

// The unit keeps a product of e4m3 if it is at least this power of two below the largest in its
// sum.
constexpr int kKeptBits = 13;
constexpr int kNarrowDepth = 64;

class Operand {
 public:
  explicit Operand(int rows) : values(static_cast<size_t>(rows) * kE4m3Depth, 0) {}
  void Set(int row, int k, float value) { values[Index(row, k)] = kernels::ToBf16(value); }
  float Get(int row, int k) const { return kernels::ToFloat(values[Index(row, k)]); }

  std::vector<kernels::Bf16> values;

 private:
  static size_t Index(int row, int k) { return static_cast<size_t>(row) * kE4m3Depth + k; }
};

Operand OneHot(int rows, int depth) {
  Operand operand(rows);
  for (int row = 0; row < rows; ++row) operand.Set(row, (row * 29 + 7) % depth, 1.0f);
  return operand;
}

Operand Whole(int rows, int most, uint32_t seed) {
  Operand operand(rows);
  std::mt19937 random(seed);
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < kE4m3Depth; ++k) {
      operand.Set(row, k, static_cast<float>(static_cast<int>(random() % (2 * most + 1)) - most));
    }
  }
  return operand;
}

// Every row has a 1, and 2^-(row mod 8) at `k`.
Operand Falling(int rows, int k) {
  Operand operand(rows);
  for (int row = 0; row < rows; ++row) {
    operand.Set(row, 0, 1.0f);
    operand.Set(row, k, std::ldexp(1.0f, -(row % 8)));
  }
  return operand;
}

// The results of(row, column, depth) of each of the probe's products, one product after the other.
template <typename Of>
std::vector<float> Wanted(const Of& of) {
  std::vector<float> expected;
  const struct {
    int cols, depth;
  } products[] = {{kKvRows, kE4m3Depth},
                  {kE4m3Cols, kE4m3Depth},
                  {kKvRows, kE4m3Depth},
                  {8, kE4m3Depth},
                  {kKvRows, kNarrowDepth}};
  for (const auto& product : products) {
    for (int row = 0; row < kGroupRows; ++row) {
      for (int col = 0; col < product.cols; ++col) expected.push_back(of(row, col, product.depth));
    }
  }
  return expected;
}

E4m3Case Layout(const std::string& what, const Operand& a, const Operand& b) {
  return {what, a.values, b.values, Wanted([&](int row, int col, int depth) {
            float sum = 0.0f;  // sums stay exact
            for (int k = 0; k < depth; ++k) sum += a.Get(row, k) * b.Get(col, k);
            return sum;
          })};
}

}  // namespace

std::vector<E4m3Case> E4m3Cases() {
  std::vector<E4m3Case> cases;
  for (const int depth : {kNarrowDepth, kE4m3Depth}) {
    cases.push_back(Layout("rows of a", Whole(kGroupRows, 8, 21), OneHot(kE4m3Cols, depth)));
    cases.push_back(Layout("rows of b", OneHot(kGroupRows, depth), Whole(kE4m3Cols, 8, 22)));
  }
  cases.push_back(Layout("whole numbers", Whole(kGroupRows, 4, 23), Whole(kE4m3Cols, 4, 24)));
  // Added to a 1 of the same instruction, and to a 1 of an earlier instruction.
  for (const int k : {5, 37}) {
    cases.push_back({k < 32 ? "bits kept of a product" : "bits kept beside the accumulator",
                     Falling(kGroupRows, k).values, Falling(kE4m3Cols, k).values,
                     Wanted([](int row, int col, int) {
                       const int below = row % 8 + col % 8;
                       return below > kKeptBits ? 1.0f : 1.0f + std::ldexp(1.0f, -below);
                     })});
  }
  return cases;
}

}  // namespace mla::tile_test
