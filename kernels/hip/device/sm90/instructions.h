// The instructions of sm_90 that tile primitives are made of, one function each. On the host
// kernels/hip/emulator/instructions/sm90_instructions.h supplies the same functions.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_INSTRUCTIONS_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_INSTRUCTIONS_H_

#include "kernels/hip/device/target/vendor.h"
#if MLA_ON_HOST
#include "kernels/hip/emulator/instructions/sm90_instructions.h"
#else

#include "kernels/hip/args/kernel_args.h"

namespace mla::kernels::hip::tile {

using lds_t = uint32_t;  // address in the shared window

extern __shared__ __align__(1024) uint8_t dynamic_shared[];  // the swizzle assumes a multiple of 1
                                                             // KiB

template <int kBytes>
MLA_DEVICE lds_t shared_base() {
  return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared));
}
// Returns the address of a byte of the block's shared memory, for ordinary reads and writes.
MLA_DEVICE uint8_t* shared_pointer(int offset) { return dynamic_shared + offset; }

MLA_DEVICE void sync_warp() { __syncwarp(); }
MLA_DEVICE bool any(bool x) { return __any_sync(0xffffffffu, x) != 0; }
// Returns x of lane l in bit l.
MLA_DEVICE uint32_t ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
template <int kStep>
MLA_DEVICE float exchange(float x) {
  return __shfl_xor_sync(0xffffffffu, x, kStep);
}
template <int kStep>
MLA_DEVICE uint32_t exchange_word(uint32_t x) {
  return __shfl_xor_sync(0xffffffffu, x, kStep);
}

MLA_DEVICE uint32_t bits_set(uint32_t x) { return static_cast<uint32_t>(__popc(x)); }

// Returns the sum over the lanes of a warp.
MLA_DEVICE uint32_t sum_of_warp(uint32_t x) { return __reduce_add_sync(0xffffffffu, x); }

// Returns the greater of each pair of 16-bit halves, as unsigned numbers.
MLA_DEVICE uint32_t greater_halves(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Returns x of lane `from`, which may differ between lanes.
MLA_DEVICE uint32_t from_lane(uint32_t x, int from) { return __shfl_sync(0xffffffffu, x, from); }
// Returns x of lane `from`, which is the same in every lane.
MLA_DEVICE float broadcast(float x, int from) { return __shfl_sync(0xffffffffu, x, from); }

MLA_DEVICE void store_chunk(lds_t at, const Chunk& c) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(c.w[0]), "r"(c.w[1]),
               "r"(c.w[2]), "r"(c.w[3])
               : "memory");
}
MLA_DEVICE Chunk load_chunk_shared(lds_t address) {
  Chunk c;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.w[0]), "=r"(c.w[1]), "=r"(c.w[2]), "=r"(c.w[3])
               : "r"(address)
               : "memory");
  return c;
}
MLA_DEVICE void store_float(lds_t at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
MLA_DEVICE float load_float(lds_t at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
MLA_DEVICE void store_word(lds_t at, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

// Atomic additions, to shared and to global memory.
MLA_DEVICE void add_word_shared(lds_t at, uint32_t x) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
MLA_DEVICE void add_word(uint32_t* at, uint32_t x) {
  asm volatile("red.global.add.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// Lets blocks of a grid meet at `counter`, a word that is zero before the first meeting. All blocks
// must run at the same time. Every thread calls release_writes. After a barrier of its block, one
// thread of each block calls meet_blocks, as number `index` of `count`. After another barrier,
// load_fresh sees what all blocks had written. The blocks then share some work: each does items
// first, first + step, ...
struct BlockTurn {
  int first, step;
};
MLA_DEVICE void release_writes() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
MLA_DEVICE BlockTurn meet_blocks(uint32_t* counter, int index, int count) {
  // The other blocks add one each, so the last arrival flips the highest bit and leaves the rest
  // zero.
  const uint32_t add = index == 0 ? 0x80000000u - static_cast<uint32_t>(count - 1) : 1u;
  uint32_t before, now;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(add)
               : "memory");
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (((now ^ before) >> 31) == 0);
  return {index, count};
}
MLA_DEVICE float load_fresh(const float* from) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}
MLA_DEVICE void load_fresh(uint32_t (&x)[4], const float* from) {
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(from)
               : "memory");
}

// Returns x, hidden from the compiler. Values derived from it are computed here, not before a loop,
// where they would occupy registers for the whole loop.
MLA_DEVICE uint32_t unknown(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// count_finished adds one to kPushBlocks counters that lie `apart` words from each other, after
// this thread's writes and, after a barrier, its block's writes. await_finished returns once a
// counter has reached `count`; loads then see what the counted blocks wrote. All blocks must run at
// the same time.
MLA_DEVICE void count_finished(uint32_t* counters, int apart) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kPushBlocks; ++i) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counters + i * apart) : "memory");
  }
}
MLA_DEVICE void await_finished(const uint32_t* at, uint32_t count) {
  uint32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
  } while (now != count);
}

// Returns true if no word of a chunk is kToCome.
MLA_DEVICE bool has_come(const Chunk& c) {
  return c.w[0] != kToCome && c.w[1] != kToCome && c.w[2] != kToCome && c.w[3] != kToCome;
}
// Loads a chunk that a copy of another processor may still be writing.
MLA_DEVICE Chunk load_arriving(const void* from) {
  Chunk c;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.w[0]), "=r"(c.w[1]), "=r"(c.w[2]), "=r"(c.w[3])
               : "l"(from)
               : "memory");
  return c;
}
// Waits for a chunk of queries that is being copied to the device: until no word of it is kToCome,
// or all queries have arrived. Returns false if neither happens within args.patience_ns after
// `begun`, the low half of realtime_ns at the block's start, in shared memory.
MLA_DEVICE bool await_queries(const void* chunk, const StreamArgs& args, lds_t begun) {
  constexpr uint32_t kLooks = 16;  // looks at the chunk for each look at the other word and the
                                   // clock
  for (uint32_t i = 1;; ++i) {
    if (has_come(load_arriving(chunk))) return true;
    if (i % kLooks == 0) {
      if (load_host_word(args.arrived) == args.ticket) return true;
      uint32_t since;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(since) : "r"(begun) : "memory");
      if (static_cast<uint32_t>(realtime_ns()) - since >= args.patience_ns) return false;
    }
    __nanosleep(100);
  }
}
// Waits for a chunk of queries whose copy must be in progress, because a later chunk has arrived.
MLA_DEVICE Chunk await_chunk(const void* from, const StreamArgs& args) {
  while (true) {
    const Chunk c = load_arriving(from);
    if (has_come(c)) return c;
    if (load_host_word(args.arrived) == args.ticket) return load_arriving(from);
    __nanosleep(100);
  }
}

MLA_DEVICE void store_half_word(lds_t at, uint32_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(static_cast<uint16_t>(x)) : "memory");
}

// --- 8-bit floats, OCP e4m3fn.
// Two codes as packed bf16.
MLA_DEVICE uint32_t bf16_of_codes(uint32_t codes) {
  uint32_t bf16;
  asm("{\n\t.reg .b16 pair, low, high;\n\t.reg .b32 halves;\n\t.reg .f32 x, y;\n\t"
      "cvt.u16.u32 pair, %1;\n\tcvt.rn.f16x2.e4m3x2 halves, pair;\n\t"
      "mov.b32 {low, high}, halves;\n\tcvt.f32.f16 x, low;\n\tcvt.f32.f16 y, high;\n\t"
      "cvt.rn.bf16x2.f32 %0, y, x;\n\t}"
      : "=r"(bf16)
      : "r"(codes));
  return bf16;
}
// Starts the copy of one chunk; it is complete with the stage that is closed next. The L2 gets the
// line of 128 bytes around it: KV rows are copied whole, so the neighbour of a line comes anyway,
// and bringing it early disturbs the order in which memory is read.
MLA_DEVICE void copy_chunk(lds_t at, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(source)
               : "memory");
}
// As copy_chunk, but the L2 gets two lines, which is faster for weights that are read in order.
MLA_DEVICE void copy_weights_chunk(lds_t at, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(at), "l"(source)
               : "memory");
}
// As copy_chunk, with a policy: the copied data leaves the L2 before other data, or stays longer.
using CachePolicy = uint64_t;
MLA_DEVICE CachePolicy cache_policy(bool keep) {
  CachePolicy first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return keep ? normal : first;
}
MLA_DEVICE void copy_chunk(lds_t at, const void* source, CachePolicy policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(at),
               "l"(source), "l"(policy)
               : "memory");
}
// As copy_chunk, for four bytes.
MLA_DEVICE void copy_word(lds_t at, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(source) : "memory");
}
// close_copies makes the copies since the last call a group. wait_for_copies waits until at most
// kYounger groups are in flight.
MLA_DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kYounger>
MLA_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kYounger) : "memory");
}
MLA_DEVICE void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

MLA_DEVICE void load_matrices(uint32_t (&r)[4], lds_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
MLA_DEVICE void load_matrices_transposed(uint32_t (&r)[4], lds_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
// The inverse of load_matrices.
MLA_DEVICE void store_matrices(lds_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
// Returns the larger of x and zero; NaN stays NaN.
MLA_DEVICE float positive(float x) {
  float out;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(x));
  return out;
}
MLA_DEVICE void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace mla::kernels::hip::tile

#endif  // MLA_ON_HOST

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_INSTRUCTIONS_H_
