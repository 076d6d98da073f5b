// Tests the products of whole rows with W_UQ and W_O. Internal to self_test.cc.
#ifndef MLA_KERNELS_HIP_SELF_TEST_PROJECTED_H_
#define MLA_KERNELS_HIP_SELF_TEST_PROJECTED_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention_backend.h"
#include "kernels/formats/fp8.h"
#include "kernels/hip/args/row_args.h"
#include "kernels/hip/self_test/data.h"
#include "kernels/hip/self_test/plan.h"
#include "kernels/launch_layout.h"
#include "kernels/projected_weights.h"

namespace mla::kernels::hip::self_test {

// The product with W_UQ has too few steps to be split, and its tiles have whole pairs, so that its
// blocks finish it where they can; that with W_O is split, and runs every loop more than once.
// Queries must be packed and hidden states need not be. W_O does not have whole tiles of columns.
inline constexpr Geometry kProjectedGeometry{3, 512, 64, 128, 512};
inline constexpr ProjectedShape kProjectedShape{200, 200};
inline constexpr int32_t kProjectedRows = kRowProductMany / 2 + 1;  // most rows of a launch
// The bytes of these weights in device memory, padding included.
inline constexpr int64_t kProjectedBytes =
    (int64_t{3 * 192} * 256 + 200 * 1536) * int64_t{sizeof(Bf16)};
// Errors relative to the largest sum of the first row, with room for larger sums: half a unit in
// the last place of bf16, and what two bf16 operands keep of an fp32 row.
inline constexpr double kProjectedOff = 0x1p-7, kProjectedWideOff = 0x1p-14;

// The rows of one product, their weights and their results, of dtype `dtype`.
struct RowProductData {
  RowProductData(ProjectedPart of_part, DType of_rows, DType of_weights, int32_t count)
      : part(of_part), dtype(of_rows), rows(count) {
    shape.weights = of_weights;
    MakeWeights();
    for (const Bf16 x : Pattern(size_t(rows) * size_t(depth), 21)) {
      // No bf16 holds the fp32 rows.
      in_floats.push_back(dtype == DType::kF32 ? ToFloat(x) * 1.0009766f : ToFloat(x));
    }
    in = Store(in_floats);
    out = Store(std::vector<float>(size_t(rows) * size_t(columns), NAN));
    for (size_t i = 0; queries() && i < size_t(rows) * size_t(kProjectedGeometry.rope_dim); ++i) {
      rotations.push_back(static_cast<float>(i % 11) / 8.0f - 0.5f);
    }
  }
  // Makes the weights, and the bytes to load for each head.
  void MakeWeights() {
    weights = Pattern(size_t(columns) * size_t(depth), queries() ? 22 : 23);
    for (int32_t head = 0; head < kProjectedGeometry.num_heads; ++head) {
      const WeightWindow window = WindowOf(kProjectedGeometry, shape, part, head, 1);
      std::vector<std::byte> bytes(size_t(window.Bytes(shape.weights)));
      if (shape.codes()) MakeScales(window, bytes);
      for (int64_t r = 0; r < window.rows; ++r) {
        for (int64_t k = 0; k < window.columns; ++k) {
          const auto index = size_t(r * window.columns + k);
          Bf16& weight = weights[size_t((window.row + r) * depth + window.column + k)];
          if (shape.codes()) {
            const uint8_t code = Code(index, size_t(head + r));
            bytes[index] = std::byte{code};
            weight = WidenedWeight(code, ScaleOf(window, bytes.data(), window.BlockOf(r, k)));
          } else {
            std::copy_n(reinterpret_cast<const std::byte*>(&weight), sizeof(weight),
                        &bytes[index * sizeof(weight)]);
          }
        }
      }
      loaded.push_back(std::move(bytes));
    }
  }
  static void MakeScales(const WeightWindow& window, std::vector<std::byte>& bytes) {
    std::byte* const scales = &bytes[size_t(window.elements())];
    for (int64_t block = 0; block < window.blocks(); ++block) {
      const float scale = 0.0007f * static_cast<float>(3 + block % 7);
      std::copy_n(reinterpret_cast<const std::byte*>(&scale), sizeof(scale),
                  scales + size_t(block) * sizeof(scale));
    }
  }
  // Returns any code except -0 and NaN.
  static uint8_t Code(size_t at, size_t row) {
    const auto number = static_cast<uint8_t>((at * 61 + row * 7) % 253);
    return number <= kFp8LargestCode ? number : static_cast<uint8_t>(number + 2);
  }
  bool queries() const { return part == ProjectedPart::kQueries; }
  size_t size() const { return ElementSize(dtype); }
  std::vector<std::byte> Store(const std::vector<float>& values) const {
    std::vector<std::byte> bytes(values.size() * size());
    for (size_t i = 0; i < values.size(); ++i) {
      const Bf16 narrow = ToBf16(values[i]);
      const void* from = dtype == DType::kF32 ? static_cast<const void*>(&values[i]) : &narrow;
      std::copy_n(static_cast<const std::byte*>(from), size(), &bytes[i * size()]);
    }
    return bytes;
  }
  float Result(int32_t row, int32_t column) const {
    const std::byte* const element =
        &out[(size_t(row) * size_t(columns) + size_t(column)) * size()];
    float wide = 0.0f;
    Bf16 narrow = 0;
    if (dtype == DType::kF32) {
      std::copy_n(element, sizeof(wide), reinterpret_cast<std::byte*>(&wide));
      return wide;
    }
    std::copy_n(element, sizeof(narrow), reinterpret_cast<std::byte*>(&narrow));
    return ToFloat(narrow);
  }

  const ProjectedPart part;
  const DType dtype;
  const int32_t rows;
  const int32_t depth = queries() ? kProjectedShape.q_lora_rank
                                  : kProjectedGeometry.num_heads * kProjectedGeometry.v_dim;
  const int32_t columns = queries()
                              ? kProjectedGeometry.num_heads * kProjectedGeometry.expanded_q_dim()
                              : kProjectedShape.hidden_size;
  ProjectedShape shape = kProjectedShape;
  std::vector<std::vector<std::byte>> loaded;  // of each head
  std::vector<Bf16> weights;
  std::vector<float> in_floats, rotations;
  std::vector<std::byte> in, out;
};

inline double ExpectedSum(const RowProductData& d, int32_t row, int32_t column) {
  double sum = 0.0;
  for (int32_t k = 0; k < d.depth; ++k) {
    sum += double{d.in_floats[size_t(row) * size_t(d.depth) + size_t(k)]} *
           ToFloat(d.weights[size_t(column) * size_t(d.depth) + size_t(k)]);
  }
  return sum;
}

// Returns the expected value of a pair's first element, or of its second.
inline double ExpectedRotated(const RowProductData& d, int32_t row, int32_t column, bool halves) {
  const int32_t place = column % kProjectedGeometry.expanded_q_dim() - kProjectedGeometry.nope_dim;
  const double x = ExpectedSum(d, row, column);
  if (!d.queries() || place < 0) return x;
  const int32_t pairs = kProjectedGeometry.rope_dim / 2, apart = halves ? pairs : 1;
  const int32_t pair = halves ? place % pairs : place / 2;
  const bool second = halves ? place >= pairs : place % 2 == 1;
  const double y = ExpectedSum(d, row, second ? column - apart : column + apart);
  const float* const rotation = &d.rotations[size_t(row) * size_t(2 * pairs)];
  const double cosine = rotation[pair], sine = rotation[pairs + pair];
  return second ? y * sine + x * cosine : x * cosine - y * sine;
}

inline absl::Status MultiplyRows(AttentionBackend& backend, RowProductData& d, RopeLayout rope) {
  for (int32_t head = 0; head < kProjectedGeometry.num_heads; ++head) {
    MLA_RETURN_IF_ERROR(backend.LoadProjected(0, kProjectedGeometry, d.shape, d.part, head,
                                              d.loaded[size_t(head)].data()));
  }
  LaunchLayout layout(backend, 0);
  const auto in = layout.Input(d.in.data(), int64_t(d.in.size()));
  const auto out = layout.Output(d.out.data(), int64_t(d.out.size()));
  absl::StatusOr<const void*> rotations = nullptr;
  if (d.queries()) {
    rotations = layout.Input(d.rotations.data(), int64_t(d.rotations.size() * sizeof(float)));
  }
  for (const absl::Status& placed : {in.status(), out.status(), rotations.status()}) {
    if (!placed.ok()) return placed;
  }
  const RowProjectionRecord record{
      *in, *out, d.depth, d.columns, d.rows, 0, static_cast<const float*>(*rotations)};
  Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  (d.queries() ? launch.queries : launch.hiddens) = {
      kProjectedGeometry, rope, d.dtype, d.dtype, {&record, 1}};
  return Run(backend, launch);
}

inline absl::Status CheckRowProduct(AttentionBackend& backend, ProjectedPart part, DType dtype,
                                    DType weights, int32_t rows, RopeLayout rope) {
  RowProductData d(part, dtype, weights, rows);
  MLA_RETURN_IF_ERROR(MultiplyRows(backend, d, rope));
  double largest = 0.0;
  for (int32_t c = 0; c < d.columns; ++c) {
    largest = std::max(largest, std::abs(ExpectedSum(d, 0, c)));
  }
  const double off = largest * (dtype == DType::kF32 ? kProjectedWideOff : kProjectedOff);
  for (int32_t row = 0; row < rows; ++row) {
    for (int32_t c = row % 3; c < d.columns; c += 3) {
      const double want = ExpectedRotated(d, row, c, rope == RopeLayout::kHalves);
      const float got = d.Result(row, c);
      // Not `>`: the result may be NaN.
      if (std::abs(got - want) <= off) continue;
      return Wrong(absl::StrCat(d.queries() ? "projected queries" : "hidden states",
                                d.shape.codes() ? " of weights in e4m3, " : ", ", rows,
                                " rows, row ", row, ", column ", c),
                   got, want);
    }
  }
  return absl::OkStatus();
}

// Few rows are fp32 and packed with their remainders, many are bf16. Weights are of both types.
inline absl::Status CheckProjected(AttentionBackend& backend) {
  using enum RopeLayout;
  for (const DType weights : {DType::kBf16, DType::kFp8E4m3}) {
    MLA_RETURN_IF_ERROR(backend.FreeWeights(0));
    const auto check = [&](ProjectedPart part, RopeLayout rope) {
      absl::Status s = CheckRowProduct(backend, part, DType::kF32, weights, 3, rope);
      return s.ok() ? CheckRowProduct(backend, part, DType::kBf16, weights, kProjectedRows, rope)
                    : s;
    };
    absl::Status s = check(ProjectedPart::kQueries, kHalves);
    if (s.ok()) s = check(ProjectedPart::kQueries, kInterleaved);
    if (s.ok()) s = check(ProjectedPart::kOutputs, kInterleaved);
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_PROJECTED_H_
