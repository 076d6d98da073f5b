// Defines the device language for AMD GPUs: clang in HIP mode with -nogpuinc -nogpulib, everything
// from compiler builtins. See device/target/vendor.h.
#ifndef MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_AMD_H_
#define MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_AMD_H_

#include <stdint.h>

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
// A CU has four SIMDs: blocks of 256 threads have one wave on each.
#define MLA_LAUNCH_BOUNDS(threads)                              \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), \
                 amdgpu_waves_per_eu((threads) / 256, (threads) / 256)))
// Half the registers, so that two blocks fit a CU.
#define MLA_LAUNCH_BOUNDS_OF_TWO(threads) \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(2, 2)))
// A quarter of the registers, so that four blocks fit a CU.
#define MLA_LAUNCH_BOUNDS_OF_FOUR(threads) \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(4, 4)))
#define MLA_DEVICE __device__ __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#define MLA_KERNEL_ARGUMENT
// To the compiler, addresses from records in memory are generic. These are known to be in global
// memory, which has cheaper instructions.
#define MLA_GLOBAL __attribute__((address_space(1)))
#define MLA_LDS __attribute__((address_space(3)))
// Records that no kernel writes. Fields that are the same in every lane are loaded into scalar
// registers.
#define MLA_RECORD __attribute__((address_space(4)))
#define MLA_VECTOR(type, count, name) typedef type name __attribute__((ext_vector_type(count)))

namespace mla::kernels::hip {

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
// Returns a value that is the same in every lane of a wave, kept in a scalar register.
MLA_DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
// Waits for all loads from memory, visibly to the compiler. Otherwise the compiler waits at their
// first use, and there also for copies that were started since and that it does not count.
MLA_DEVICE void wait_for_loads() { __builtin_amdgcn_s_waitcnt(0x0f70); }             // vmcnt(0)
MLA_DEVICE uint64_t realtime_ns() { return 10 * __builtin_amdgcn_s_memrealtime(); }  // 100 MHz
MLA_DEVICE uint32_t load_host_word(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
MLA_DEVICE void store_host_word(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
MLA_DEVICE void wait_for_previous_kernel() {}
MLA_DEVICE void let_next_kernel_start() {}

MLA_DEVICE uint32_t bit_as_mask(uint32_t word, int at) {
  return static_cast<uint32_t>(__builtin_amdgcn_sbfe(static_cast<int>(word), at, 1));
}
MLA_DEVICE int leading_zeros(int x) { return __builtin_clz(static_cast<unsigned>(x)); }

MLA_DEVICE void schedule_fence() { __builtin_amdgcn_sched_barrier(0); }
MLA_DEVICE void exclude_from_report_begin() { asm volatile("; rare path begins"); }
MLA_DEVICE void exclude_from_report_end() { asm volatile("; rare path ends"); }

MLA_DEVICE float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
MLA_DEVICE uint32_t float_to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
MLA_DEVICE uint32_t pack_bf16(float lo, float hi) {
  typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
  bf16x2 v;
  v[0] = static_cast<__bf16>(lo);
  v[1] = static_cast<__bf16>(hi);
  return __builtin_bit_cast(uint32_t, v);
}

template <class T>
MLA_DEVICE MLA_GLOBAL T* as_global(const void* p) {
  return (MLA_GLOBAL T*)reinterpret_cast<uintptr_t>(p);
}

template <class T>
MLA_DEVICE MLA_RECORD const T* as_record(const T* p) {
  return (MLA_RECORD const T*)reinterpret_cast<uintptr_t>(p);
}
// T is a struct of kWords words.
template <class T, int kWords = sizeof(T) / 4>
MLA_DEVICE T read_record(const T* p) {
  typedef uint32_t Words __attribute__((ext_vector_type(kWords)));
  return __builtin_bit_cast(T, *(MLA_RECORD const Words*)reinterpret_cast<uintptr_t>(p));
}

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
MLA_DEVICE void store_words(void* target, const uint32_t (&in)[kWords]) {
  typedef typename WordVector<kWords>::Type Type;
  Type v;
  for (int i = 0; i < kWords; ++i) v[i] = in[i];
  *as_global<Type>(target) = v;
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_TARGET_VENDOR_AMD_H_
