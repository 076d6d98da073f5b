// Gives both compilers' device languages one spelling, with no vendor header.
//
// Kernels include this header and the tile.h of their architecture folder, nothing else. The first
// include below defines, for one compiler:
//   MLA_DEVICE, __global__, MLA_LAUNCH_BOUNDS and _OF_TWO, _OF_FOUR: limits for two or four blocks
//   thread_index, block_index, block_index_y, block_barrier
//   uniform            a value that is the same in every lane of a wave, kept in a scalar register
//   exp2_fast, log2_fast, max_f, fma_f, leading_zeros, bits_to_float, float_to_bits
//   bit_as_mask        a word all of whose bits are bit `at` of the given word
//   pack_bf16          two floats to packed bf16, round to nearest even; `lo` lands in the low half
//   load_words, store_words   kWords (1, 2 or 4) words at once, at a multiple of their size
//   as_global          addresses that are known to be in global memory
//   MLA_RECORD, as_record, read_record   records that no kernel writes, the same for every lane;
//                      AMD reads them into scalar registers
//   schedule_fence     keeps the compiler from moving work over this point; without it, long
//                      unrolled loops start all their loads at once and run out of registers
//   exclude_from_report_begin, exclude_from_report_end
//                      mark code that report.py leaves out of its counts: code that few iterations
//                      of a loop run, and the division by page sizes that are not powers of two,
//                      which models with such pages run in every iteration
//   wait_for_loads     waits for all loads from memory, visibly to the compiler
//   realtime_ns        a clock of the device in nanoseconds
//   load_host_word, store_host_word   access words of host memory that other processors read or
//                      write: loads acquire, stores release the writes of earlier kernels
//   wait_for_previous_kernel, let_next_kernel_start   overlap of dependent launches
#ifndef MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_H_
#define MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_H_

#include <stdint.h>

#include <type_traits>
#include <utility>

#include "kernels/hip/device/target/target.h"
#if MLA_ON_HOST
#include "kernels/hip/device/target/vendor_emulated.h"
#elif MLA_AMD
#include "kernels/hip/device/target/vendor_amd.h"
#else
#include "kernels/hip/device/target/vendor_sm90.h"
#endif

namespace mla::kernels::hip {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;
template <class Body, int... kValues>
MLA_DEVICE void for_constants(const Body& body, std::integer_sequence<int, kValues...>) {
  (body(Constant<kValues>()), ...);
}
// Calls body(Constant<0>()) to body(Constant<kCount - 1>()).
template <int kCount, class Body>
MLA_DEVICE void for_constants(const Body& body) {
  for_constants(body, std::make_integer_sequence<int, kCount>());
}

// Uses operands 0 .. kCount - 1, each read kAhead uses before, in an order that the compiler keeps:
// read(x, n) fills x, use(x, n) uses it; n is a Constant. It is for waves that have their SIMD
// nearly to themselves, where no other wave works during a wait for shared memory. Called in two
// steps, the first reads and then the rest, or as one.
template <int kCount, class Operand, int kAhead, class Read>
MLA_DEVICE void read_first(Operand (&x)[kAhead], const Read& read) {
  for_constants<(kAhead < kCount ? kAhead : kCount)>([&](auto n) {
    read(x[n], n);
    schedule_fence();
  });
}
template <int kCount, class Operand, int kAhead, class Read, class Use>
MLA_DEVICE void read_on(Operand (&x)[kAhead], const Read& read, const Use& use) {
  for_constants<kCount>([&](auto n) {
    constexpr int kNext = n + kAhead;
    schedule_fence();
    use(x[n % kAhead], n);
    if constexpr (kNext < kCount) read(x[n % kAhead], Constant<kNext>());
  });
  schedule_fence();
}
template <class Operand, int kCount, int kAhead, class Read, class Use>
MLA_DEVICE void read_ahead(const Read& read, const Use& use) {
  Operand x[kAhead];
  read_first<kCount>(x, read);
  read_on<kCount>(x, read, use);
}

MLA_DEVICE float bf16_to_float(uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
MLA_DEVICE uint16_t to_bf16(float x) { return static_cast<uint16_t>(pack_bf16(x, 0.0f)); }

struct alignas(16) Chunk {  // 8 bf16 elements: the unit of every copy
  uint32_t w[4];
};

MLA_DEVICE float negative_infinity() { return bits_to_float(0xff800000u); }
inline constexpr float kLog2e = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_H_
