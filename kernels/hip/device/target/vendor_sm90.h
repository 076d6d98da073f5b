// Defines the device language for NVIDIA GPUs: nvcc. See device/target/vendor.h.
#ifndef MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_SM90_H_
#define MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_SM90_H_

#include <stdint.h>

#define MLA_LAUNCH_BOUNDS(threads) __launch_bounds__(threads, 1)
#define MLA_LAUNCH_BOUNDS_OF_TWO(threads) __launch_bounds__(threads, 2)
#define MLA_LAUNCH_BOUNDS_OF_FOUR(threads) __launch_bounds__(threads, 4)
#define MLA_DEVICE __device__ __forceinline__
#define MLA_KERNEL_ARGUMENT __grid_constant__
#define MLA_GLOBAL
#define MLA_RECORD

namespace mla::kernels::hip {

MLA_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
MLA_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
MLA_DEVICE int block_index_y() { return static_cast<int>(blockIdx.y); }
MLA_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MLA_DEVICE float max_f(float a, float b) { return fmaxf(a, b); }
MLA_DEVICE float fma_f(float a, float b, float c) { return fmaf(a, b, c); }
MLA_DEVICE void block_barrier() { __syncthreads(); }
MLA_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
MLA_DEVICE void wait_for_loads() {}
// Programmatic dependent launch: a kernel may be resident before its predecessor has ended. It
// waits here before it reads the predecessor's results. In an ordinary launch this does nothing.
MLA_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
MLA_DEVICE void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

MLA_DEVICE uint64_t realtime_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
MLA_DEVICE uint32_t load_host_word(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
MLA_DEVICE void store_host_word(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

MLA_DEVICE uint32_t bit_as_mask(uint32_t word, int at) { return 0u - (word >> at & 1u); }
MLA_DEVICE int leading_zeros(int x) { return __clz(x); }

MLA_DEVICE void schedule_fence() {}
MLA_DEVICE void exclude_from_report_begin() {}
MLA_DEVICE void exclude_from_report_end() {}

MLA_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
MLA_DEVICE uint32_t float_to_bits(float x) { return __float_as_uint(x); }
MLA_DEVICE uint32_t pack_bf16(float lo, float hi) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
  return v;
}

template <class T>
MLA_DEVICE T* as_global(const void* p) {
  return (T*)reinterpret_cast<uintptr_t>(p);
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
#pragma unroll
  for (int i = 0; i < kWords; ++i) out[i] = v.w[i];
}
template <int kWords>
MLA_DEVICE void store_words(void* target, const uint32_t (&in)[kWords]) {
  WordVector<kWords> v;
#pragma unroll
  for (int i = 0; i < kWords; ++i) v.w[i] = in[i];
  *static_cast<WordVector<kWords>*>(target) = v;
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_SM90_H_
