// Defines the device language of an architecture whose code is compiled for the host. See
// kernels/hip/device/target/vendor.h.
#ifndef MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_EMULATED_H_
#define MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_EMULATED_H_

#include <stdint.h>
#include <time.h>

#include <cmath>

#include "kernels/hip/emulator/block/block.h"

#define __global__
#define MLA_LAUNCH_BOUNDS(threads)
#define MLA_LAUNCH_BOUNDS_OF_TWO(threads)
#define MLA_LAUNCH_BOUNDS_OF_FOUR(threads)
#define MLA_DEVICE inline
#define MLA_KERNEL_ARGUMENT
#define MLA_GLOBAL
#define MLA_RECORD
#define MLA_VECTOR(type, count, name) \
  typedef type name __attribute__((vector_size((count) * sizeof(type))))

namespace mla::kernels::hip {

MLA_DEVICE int thread_index() { return host::the_lane->index; }
MLA_DEVICE int block_index() { return static_cast<int>(host::the_block->x); }
MLA_DEVICE int block_index_y() { return static_cast<int>(host::the_block->y); }
MLA_DEVICE float exp2_fast(float x) { return std::exp2(x); }
MLA_DEVICE float log2_fast(float x) { return std::log2(x); }
// Returns the other one if one is NaN.
MLA_DEVICE float max_f(float a, float b) { return a > b || b != b ? a : b; }
MLA_DEVICE float fma_f(float a, float b, float c) { return a * b + c; }
MLA_DEVICE void block_barrier() { host::BlockBarrier(); }
MLA_DEVICE int uniform(int x) { return host::Uniform(x); }
MLA_DEVICE void wait_for_previous_kernel() { host::WaitForPrevious(); }
MLA_DEVICE void let_next_kernel_start() {}
MLA_DEVICE uint64_t realtime_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}
MLA_DEVICE uint32_t load_host_word(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
MLA_DEVICE void store_host_word(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
// Waits for copies, too.
void wait_for_loads();

// The bit number is taken modulo 32, as AMD's instruction does.
MLA_DEVICE uint32_t bit_as_mask(uint32_t word, int at) { return 0u - (word >> (at & 31) & 1u); }
MLA_DEVICE int leading_zeros(int x) { return __builtin_clz(static_cast<unsigned>(x)); }

MLA_DEVICE void schedule_fence() {}
MLA_DEVICE void exclude_from_report_begin() {}
MLA_DEVICE void exclude_from_report_end() {}

MLA_DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
MLA_DEVICE uint32_t float_to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
MLA_DEVICE uint32_t rounded_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
MLA_DEVICE uint32_t pack_bf16(float lo, float hi) {
  return rounded_bf16(lo) | rounded_bf16(hi) << 16;
}

template <class T>
MLA_DEVICE T* as_global(const void* p) {
  return static_cast<T*>(const_cast<void*>(p));
}

template <class T>
MLA_DEVICE const T* as_record(const T* p) {
  return p;
}
template <class T>
MLA_DEVICE const T& read_record(const T* p) {
  return *p;
}

template <int kWords>
struct alignas(4 * kWords) WordVector {
  uint32_t w[kWords];
};
template <int kWords>
MLA_DEVICE void load_words(uint32_t (&out)[kWords], const void* from) {
  const WordVector<kWords> v = *static_cast<const WordVector<kWords>*>(from);
  for (int i = 0; i < kWords; ++i) out[i] = v.w[i];
}
template <int kWords>
MLA_DEVICE void store_words(void* to, const uint32_t (&in)[kWords]) {
  WordVector<kWords> v;
  for (int i = 0; i < kWords; ++i) v.w[i] = in[i];
  *static_cast<WordVector<kWords>*>(to) = v;
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_EMULATED_H_
