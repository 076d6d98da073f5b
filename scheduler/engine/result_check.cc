#include "scheduler/engine/result_check.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace mla::scheduler {
namespace {

using kernels::DType;
using kernels::ElementSize;

constexpr int64_t kBlock = 512;    // elements looked at as a whole
constexpr int64_t kUnrolled = 64;  // of a loop whose length compilers know, and make a vector of

// Whether one of `count` elements of `Bits` has all bits of the exponent `mask`.
template <typename Bits>
bool AnyAllOnes(const std::byte* at, int64_t count, Bits mask) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
  // Added to an exponent of ones it carries into the sign, to any other it does not.
  const auto one = static_cast<Bits>(mask & (~mask + 1));
  const auto sign = static_cast<Bits>(~(mask | (one - 1)));
  Bits carried = 0;
  const auto look = [&](const std::byte* element) {
    Bits bits;
    std::memcpy(&bits, element, sizeof(Bits));
    carried |= static_cast<Bits>((bits & mask) + one);
  };
  int64_t i = 0;
  for (; i + kUnrolled <= count; i += kUnrolled) {
    const std::byte* const first = at + i * kSize;
    for (int64_t k = 0; k < kUnrolled; ++k) look(first + k * kSize);
  }
  for (; i < count; ++i) look(at + i * kSize);
  return (carried & sign) != 0;
}

bool BlockHoldsNotFinite(const std::byte* at, DType dtype, int64_t count) {
  return dtype == DType::kF32 ? AnyAllOnes<uint32_t>(at, count, 0x7f800000u)
                              : AnyAllOnes<uint16_t>(at, count, uint16_t{0x7f80});
}

}  // namespace

bool HoldsNotFinite(const std::byte* elements, DType dtype, int64_t count) {
  const auto size = static_cast<int64_t>(ElementSize(dtype));
  for (int64_t at = 0; at < count; at += kBlock) {
    if (BlockHoldsNotFinite(elements + at * size, dtype, std::min(kBlock, count - at))) return true;
  }
  return false;
}

int64_t FirstNotFinite(const float* values, int64_t count) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(values);
  constexpr auto kSize = static_cast<int64_t>(sizeof(float));
  int64_t at = 0;
  while (at < count &&
         !BlockHoldsNotFinite(bytes + at * kSize, DType::kF32, std::min(kBlock, count - at))) {
    at += kBlock;
  }
  while (at < count && !BlockHoldsNotFinite(bytes + at * kSize, DType::kF32, 1)) ++at;
  return std::min(at, count);
}

bool QueryHoldsNotFinite(const AttendArgs& args, int64_t row, int64_t head, int64_t dim) {
  const auto size = static_cast<int64_t>(ElementSize(args.q_dtype));
  const int64_t begin = (row * args.num_heads + head) * dim * size;
  if (args.q_fragments.empty()) return HoldsNotFinite(args.q + begin, args.q_dtype, dim);
  // Elements may be cut in two, so the row is brought together first.
  std::vector<std::byte> whole(static_cast<size_t>(dim * size));
  const int64_t first = args.q_fragments_offset + begin;
  for (size_t i = 0; i < args.q_fragments.size(); ++i) {
    const kernels::InputFragment& piece = args.q_fragments[i];
    const int64_t piece_end = i + 1 < args.q_fragments.size() ? args.q_fragments[i + 1].begin
                                                              : std::numeric_limits<int64_t>::max();
    const int64_t from = std::max(first, piece.begin);
    const int64_t to = std::min(first + dim * size, piece_end);
    if (from >= to) continue;
    std::memcpy(whole.data() + (from - first), piece.data + (from - piece.begin),
                static_cast<size_t>(to - from));
  }
  return HoldsNotFinite(whole.data(), args.q_dtype, dim);
}

void MarkNotANumber(const AttendArgs& args, int64_t row, int64_t head, int64_t dim) {
  const int64_t at = row * args.num_heads + head;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = at * dim; i < (at + 1) * dim; ++i) {
    if (args.o_dtype == DType::kF32) {
      std::memcpy(args.o + i * int64_t{sizeof(float)}, &kNaN, sizeof(kNaN));
    } else {
      const kernels::Bf16 nan = kernels::ToBf16(kNaN);
      std::memcpy(args.o + i * int64_t{sizeof(nan)}, &nan, sizeof(nan));
    }
  }
  if (args.want_lse) args.lse[at] = kNaN;
}

}  // namespace mla::scheduler
