// Device-language glue: one spelling for both compilers, with no vendor header.
//
// AMD: clang in HIP mode with -nogpuinc -nogpulib, everything from compiler builtins. NVIDIA: nvcc.
// Kernels include this header and the tile.h of their architecture folder, nothing else.
#ifndef MLA_KERNELS_HIP_COMMON_VENDOR_H_
#define MLA_KERNELS_HIP_COMMON_VENDOR_H_

#include <stdint.h>

#if defined(__HIP__)
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define MLA_LAUNCH_BOUNDS(threads) \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(1, 1)))
// Half the registers, so that two blocks fit a CU.
#define MLA_LAUNCH_BOUNDS_OF_TWO(threads) \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(2, 2)))
// A quarter of them.
#define MLA_LAUNCH_BOUNDS_OF_FOUR(threads) \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(4, 4)))
#else
#define MLA_LAUNCH_BOUNDS(threads) __launch_bounds__(threads, 1)
#define MLA_LAUNCH_BOUNDS_OF_TWO(threads) __launch_bounds__(threads, 2)
#define MLA_LAUNCH_BOUNDS_OF_FOUR(threads) __launch_bounds__(threads, 4)
#endif
#define MLA_DEVICE __device__ __forceinline__
#if defined(__HIP__)
#define __forceinline__ inline __attribute__((always_inline))
#endif

namespace mla::gpu {

#if defined(__HIP__)
MLA_DEVICE int thread_index() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
MLA_DEVICE int block_index() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
MLA_DEVICE int block_index_y() { return static_cast<int>(__builtin_amdgcn_workgroup_id_y()); }
MLA_DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
MLA_DEVICE float log2_fast(float x) { return __builtin_amdgcn_logf(x); }  // v_log_f32: base 2
MLA_DEVICE float max_f(float a, float b) { return __builtin_fmaxf(a, b); }
MLA_DEVICE float fma_f(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MLA_DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// A value that is the same in every lane of a wave, kept in a scalar register.
MLA_DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
// Waits for all loads from memory, and tells the compiler so: it would otherwise wait where they
// are used, and there for copies too that have been started since and that it does not count.
MLA_DEVICE void wait_for_loads() { __builtin_amdgcn_s_waitcnt(0x0f70); }  // vmcnt(0)
MLA_DEVICE void wait_for_previous_kernel() {}
MLA_DEVICE void let_next_kernel_start() {}
#else
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
// Programmatic dependent launch: a kernel may be resident before its predecessor has ended and
// waits here before it reads what that one wrote. A no-op in an ordinary launch.
MLA_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
MLA_DEVICE void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#endif

// Bit `at` of a word for all bits of the result.
MLA_DEVICE uint32_t bit_as_mask(uint32_t word, int at) {
#if defined(__HIP__)
  return static_cast<uint32_t>(__builtin_amdgcn_sbfe(static_cast<int>(word), at, 1));
#else
  return 0u - (word >> at & 1u);
#endif
}

// Addresses that come out of records in memory are generic to the compiler; these are known to be
// in global memory, for which there are cheaper instructions.
#if defined(__HIP__)
#define MLA_GLOBAL __attribute__((address_space(1)))
#else
#define MLA_GLOBAL
#endif
template <class T>
MLA_DEVICE MLA_GLOBAL T* as_global(const void* p) {
  return (MLA_GLOBAL T*)reinterpret_cast<uintptr_t>(p);
}

// Keeps the compiler from moving work over this point: long unrolled loops otherwise start all
// their loads at once and run out of registers.
MLA_DEVICE void schedule_fence() {
#if defined(__HIP__)
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// Uses operands 0 .. kCount - 1, each read kAhead uses before, in an order that the compiler keeps:
// read(x, n) fills x, use(x, n) uses it. For waves that have their SIMD to themselves, or nearly
// so, where nobody else works while one waits for shared memory.
template <class Operand, int kCount, int kAhead, class Read, class Use>
MLA_DEVICE void read_ahead(const Read& read, const Use& use) {
  Operand x[kAhead];
#pragma unroll
  for (int n = 0; n < kAhead; ++n) {
    read(x[n], n);
    schedule_fence();
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    schedule_fence();
    use(x[n % kAhead], n);
    if (n + kAhead < kCount) read(x[n % kAhead], n + kAhead);
  }
  schedule_fence();
}

// Marks code for report.py to leave out of its counts: what few turns of a loop run, and the
// division by page sizes that are no powers of two, which those models run in every turn.
MLA_DEVICE void rare_path_begins() {
#if defined(__HIP__)
  asm volatile("; rare path begins");
#endif
}
MLA_DEVICE void rare_path_ends() {
#if defined(__HIP__)
  asm volatile("; rare path ends");
#endif
}

MLA_DEVICE float bits_to_float(uint32_t bits) {
#if defined(__HIP__)
  return __builtin_bit_cast(float, bits);
#else
  return __uint_as_float(bits);
#endif
}
MLA_DEVICE uint32_t float_to_bits(float x) {
#if defined(__HIP__)
  return __builtin_bit_cast(uint32_t, x);
#else
  return __float_as_uint(x);
#endif
}

MLA_DEVICE float bf16_to_float(uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }

// Two floats to packed bf16, round to nearest even; `lo` lands in the low half.
MLA_DEVICE uint32_t pack_bf16(float lo, float hi) {
#if defined(__HIP__)
  typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
  bf16x2 v;
  v[0] = static_cast<__bf16>(lo);
  v[1] = static_cast<__bf16>(hi);
  return __builtin_bit_cast(uint32_t, v);
#else
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
  return v;
#endif
}
MLA_DEVICE uint16_t to_bf16(float x) { return static_cast<uint16_t>(pack_bf16(x, 0.0f)); }

struct alignas(16) Chunk {  // 8 bf16 elements: the unit of every copy
  uint32_t w[4];
};

// kWords (1, 2 or 4) words at once; the address is a multiple of their size.
#if defined(__HIP__)
template <int kWords>
struct WordVector {
  typedef uint32_t Type __attribute__((ext_vector_type(kWords)));
};
template <int kWords>
MLA_DEVICE void load_words(uint32_t (&out)[kWords], const void* from) {
  typedef typename WordVector<kWords>::Type Type;
  const Type v = *as_global<const Type>(from);
  for (int i = 0; i < kWords; ++i) out[i] = v[i];
}
template <int kWords>
MLA_DEVICE void store_words(void* to, const uint32_t (&in)[kWords]) {
  typedef typename WordVector<kWords>::Type Type;
  Type v;
  for (int i = 0; i < kWords; ++i) v[i] = in[i];
  *as_global<Type>(to) = v;
}
#else
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
MLA_DEVICE void store_words(void* to, const uint32_t (&in)[kWords]) {
  WordVector<kWords> v;
#pragma unroll
  for (int i = 0; i < kWords; ++i) v.w[i] = in[i];
  *static_cast<WordVector<kWords>*>(to) = v;
}
#endif

MLA_DEVICE float negative_infinity() { return bits_to_float(0xff800000u); }
inline constexpr float kLog2e = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_COMMON_VENDOR_H_
