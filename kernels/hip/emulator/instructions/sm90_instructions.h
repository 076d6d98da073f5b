// Emulates the instructions of kernels/hip/device/sm90/instructions.h on the host. Addresses of
// shared memory are offsets from the beginning of the block's shared memory.
#ifndef MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_INSTRUCTIONS_H_
#define MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_INSTRUCTIONS_H_

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "kernels/formats/fp8.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device/target/vendor.h"
#include "kernels/hip/emulator/block/block.h"
#include "kernels/hip/emulator/block/products.h"

namespace mla::kernels::hip {

inline void wait_for_loads() {}

}  // namespace mla::kernels::hip

namespace mla::kernels::hip::tile {

using lds_t = uint32_t;

inline char* shared_bytes() {
  return host::the_block->shared.Base(host::the_block->grid.shared_bytes);
}
template <int kBytes>
lds_t shared_base() {
  if (kBytes > host::the_block->grid.shared_bytes)
    host::Fault("the launch gave less shared memory");
  shared_bytes();
  return 0;
}
inline uint8_t* shared_pointer(int offset) {
  return reinterpret_cast<uint8_t*>(shared_bytes()) + offset;
}
template <class T>
T shared_load(lds_t at) {
  char* const from = shared_bytes() + at;
  host::the_block->shared.Read(from, sizeof(T), host::the_lane->wave->index);
  T x;
  std::memcpy(&x, from, sizeof(T));
  return x;
}
template <class T>
void shared_store(lds_t at, const T& x) {
  char* const to = shared_bytes() + at;
  host::the_block->shared.Write(to, sizeof(T), host::the_lane->wave->index);
  std::memcpy(to, &x, sizeof(T));
}

// --- Between lanes of a warp.
struct Exchange {
  uint32_t x;
  int from;
  uint32_t result;
};
inline uint32_t from_lane(uint32_t x, int from) {
  Exchange slot{x, from, 0};
  host::Meet(
      [](host::Wave& wave) {
        for (int i = 0; i < 32; ++i) {
          auto& to = wave.slot<Exchange>(i);
          to.result = wave.slot<Exchange>(to.from & 31).x;
        }
      },
      &slot);
  return slot.result;
}
inline void sync_warp() {
  int nothing = 0;
  host::Meet([](host::Wave&) {}, &nothing);
}
inline bool any(bool x) {
  Exchange slot{x, 0, 0};
  host::Meet(
      [](host::Wave& wave) {
        uint32_t some = 0;
        for (int i = 0; i < 32; ++i) some |= wave.slot<Exchange>(i).x;
        for (int i = 0; i < 32; ++i) wave.slot<Exchange>(i).result = some;
      },
      &slot);
  return slot.result != 0;
}
inline uint32_t ballot(bool x) {
  Exchange slot{x, 0, 0};
  host::Meet(
      [](host::Wave& wave) {
        uint32_t bits = 0;
        for (int i = 0; i < 32; ++i) bits |= wave.slot<Exchange>(i).x << i;
        for (int i = 0; i < 32; ++i) wave.slot<Exchange>(i).result = bits;
      },
      &slot);
  return slot.result;
}
inline uint32_t bits_set(uint32_t x) { return static_cast<uint32_t>(__builtin_popcount(x)); }
template <int kStep>
uint32_t exchange_word(uint32_t x) {
  return from_lane(x, (thread_index() & 31) ^ kStep);
}
inline uint32_t greater_halves(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff0000u, b & 0xffff0000u) | std::max(a & 0xffffu, b & 0xffffu);
}
inline uint32_t sum_of_warp(uint32_t x) {
  x += exchange_word<1>(x);
  x += exchange_word<2>(x);
  x += exchange_word<4>(x);
  x += exchange_word<8>(x);
  return x + exchange_word<16>(x);
}
template <int kStep>
float exchange(float x) {
  return bits_to_float(exchange_word<kStep>(float_to_bits(x)));
}
inline float broadcast(float x, int from) {
  return bits_to_float(from_lane(float_to_bits(x), host::Uniform(from)));
}

inline void store_chunk(lds_t at, const Chunk& c) { shared_store(at, c); }
inline Chunk load_chunk_shared(lds_t at) { return shared_load<Chunk>(at); }
inline void store_float(lds_t at, float x) { shared_store(at, x); }
inline float load_float(lds_t at) { return shared_load<float>(at); }
inline void store_word(lds_t at, uint32_t x) { shared_store(at, x); }
inline void add_word_shared(lds_t at, uint32_t x) {
  char* const target = shared_bytes() + at;
  host::the_block->shared.Update(target, sizeof(x), host::the_lane->wave->index);
  uint32_t sum;
  std::memcpy(&sum, target, sizeof(sum));
  sum += x;
  std::memcpy(target, &sum, sizeof(sum));
}
inline void add_word(uint32_t* at, uint32_t x) { *at += x; }
// Blocks run one after the other, so the last block does all of the shared work.
struct BlockTurn {
  int first, step;
};
inline void release_writes() {}
inline BlockTurn meet_blocks(uint32_t* at, int, int count) {
  constexpr int kNothing = 1 << 20;  // larger than all shared work
  if (++*at < static_cast<uint32_t>(count)) return {kNothing, 1};
  *at = 0;
  return {0, 1};
}
inline float load_fresh(const float* from) { return *from; }
inline void load_fresh(uint32_t (&x)[4], const float* from) { std::memcpy(x, from, sizeof(x)); }

inline uint32_t unknown(uint32_t x) { return x; }

// Blocks run one after the other; blocks that push outputs come last.
inline void count_finished(uint32_t* at, int apart) {
  for (int i = 0; i < kPushBlocks; ++i) ++at[i * apart];
}
inline void await_finished(const uint32_t* at, uint32_t count) {
  if (*at != count)
    host::Fault("a block waits for work that the blocks before it have not finished");
}
inline bool has_come(const Chunk& c) {
  return std::find(std::begin(c.w), std::end(c.w), kToCome) == std::end(c.w);
}
inline Chunk load_arriving(const void* from) {
  Chunk c;
  for (size_t i = 0; i < std::size(c.w); ++i) {
    c.w[i] = __atomic_load_n(static_cast<const uint32_t*>(from) + i, __ATOMIC_RELAXED);
  }
  return c;
}
// Copies are made by other threads if the runtime has any, otherwise before the kernel.
inline bool await_queries(const void* chunk, const StreamArgs& args, lds_t begun) {
  const auto since = float_to_bits(load_float(begun));
  while (!has_come(load_arriving(chunk)) && load_host_word(args.arrived) != args.ticket) {
    if (static_cast<uint32_t>(realtime_ns()) - since >= args.patience_ns) return false;
    sched_yield();
  }
  return true;
}
inline Chunk await_chunk(const void* from, const StreamArgs& args) {
  constexpr uint64_t kMostNs = 10'000'000'000;
  const uint64_t begin = realtime_ns();
  while (!has_come(load_arriving(from)) && load_host_word(args.arrived) != args.ticket) {
    if (realtime_ns() - begin > kMostNs) host::Fault("a block waits for queries that never come");
    sched_yield();
  }
  return load_arriving(from);
}

inline void store_half_word(lds_t at, uint32_t x) { shared_store(at, static_cast<uint16_t>(x)); }

inline float positive(float x) { return x < 0.0f ? 0.0f : x; }

// --- 8-bit floats.
inline uint32_t bf16_of_codes(uint32_t codes) {
  constexpr auto kKind = Fp8Kind::kE4m3Fn;
  return pack_bf16(DecodeFp8(static_cast<uint8_t>(codes), kKind),
                   DecodeFp8(static_cast<uint8_t>(codes >> 8), kKind));
}
// --- Asynchronous copies.
inline void copy_bytes(lds_t at, const void* source, int bytes) {
  host::Lane& lane = *host::the_lane;
  char* const to = shared_bytes() + at;
  host::the_block->shared.StartCopy(lane.copies, to, source, bytes, lane.wave->index);
}
inline void copy_chunk(lds_t at, const void* source) { copy_bytes(at, source, 16); }
inline void copy_weights_chunk(lds_t at, const void* source) { copy_chunk(at, source); }
using CachePolicy = uint64_t;
inline CachePolicy cache_policy(bool) { return 0; }
inline void copy_chunk(lds_t at, const void* source, CachePolicy) { copy_chunk(at, source); }
inline void copy_word(lds_t at, const void* source) { copy_bytes(at, source, 4); }
inline void close_copies() { host::the_lane->copies.CloseGroup(); }
template <int kYounger>
void wait_for_copies() {
  host::Lane& lane = *host::the_lane;
  const uint64_t open = lane.copies.open_group();
  if (open < kYounger) return;
  host::the_block->shared.LandBefore(lane.copies, open - kYounger, lane.wave->index);
}
inline void prefetch(const void*) {}

// --- Matrices of 8 x 8. In word m, lane l holds row l / 4, columns 2 (l % 4) and the next, of
// matrix m. It supplies the address of row l % 8 of matrix l / 8.
struct Matrices {
  uint16_t row[8];   // at the address that the lane supplied
  uint32_t word[4];  // words that the lane holds
};
template <bool kTransposed>
void load_matrices_of(uint32_t (&r)[4], lds_t at) {
  Matrices slot;
  const Chunk c = load_chunk_shared(at);
  std::memcpy(slot.row, c.w, sizeof(slot.row));
  host::Meet(
      [](host::Wave& wave) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int m = 0; m < 4; ++m) {
            const auto element = [&](int e) -> uint32_t {
              const int row = lane / 4, col = 2 * (lane % 4) + e;
              return kTransposed ? wave.slot<Matrices>(m * 8 + col).row[row]
                                 : wave.slot<Matrices>(m * 8 + row).row[col];
            };
            wave.slot<Matrices>(lane).word[m] = element(0) | element(1) << 16;
          }
        }
      },
      &slot);
  std::memcpy(r, slot.word, sizeof(r));
}
inline void load_matrices(uint32_t (&r)[4], lds_t at) { load_matrices_of<false>(r, at); }
inline void load_matrices_transposed(uint32_t (&r)[4], lds_t at) { load_matrices_of<true>(r, at); }
inline void store_matrices(lds_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  Matrices slot{{}, {r0, r1, r2, r3}};
  host::Meet(
      [](host::Wave& wave) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int col = 0; col < 8; ++col) {
            const uint32_t word = wave.slot<Matrices>(lane % 8 * 4 + col / 2).word[lane / 8];
            wave.slot<Matrices>(lane).row[col] = static_cast<uint16_t>(word >> col % 2 * 16);
          }
        }
      },
      &slot);
  Chunk c;
  std::memcpy(c.w, slot.row, sizeof(c.w));
  store_chunk(address, c);
}

// Computes c [16 x 8] += a [16 x 16] b [16 x 8]. Word i of a holds row l / 4 + 8 (i % 2), depth 2
// (l % 4) + 8 (i / 2); word i of b holds column l / 4 at the same depths; c[2 h + e] is row l / 4 +
// 8 h, column 2 (l % 4) + e.
struct SmallProduct {
  float c[4];
  uint32_t a[4], b[2];
};
inline void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  SmallProduct slot{{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  host::Meet(
      [](host::Wave& wave) {
        alignas(32) float left[16 * 16], right[16 * 8], sums[16 * 8];
        for (int lane = 0; lane < 32; ++lane) {
          const auto& from = wave.slot<SmallProduct>(lane);
          const int row = lane / 4, pair = 2 * (lane % 4);
          for (int e = 0; e < 2; ++e) {
            for (int i = 0; i < 4; ++i) {
              left[(row + 8 * (i % 2)) * 16 + pair + 8 * (i / 2) + e] =
                  host::WideBf16(static_cast<uint16_t>(from.a[i] >> 16 * e));
            }
            for (int i = 0; i < 2; ++i) {
              right[(pair + 8 * i + e) * 8 + row] =
                  host::WideBf16(static_cast<uint16_t>(from.b[i] >> 16 * e));
              sums[(row + 8 * i) * 8 + pair + e] = from.c[2 * i + e];
            }
          }
        }
        host::MultiplyAdd(sums, left, right, 16, 8, 16);
        for (int lane = 0; lane < 32; ++lane) {
          for (int i = 0; i < 4; ++i) {
            wave.slot<SmallProduct>(lane).c[i] =
                sums[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2];
          }
        }
      },
      &slot);
  std::memcpy(c, slot.c, sizeof(c));
}

}  // namespace mla::kernels::hip::tile

#endif  // MLA_KERNELS_HIP_EMULATOR_INSTRUCTIONS_SM90_INSTRUCTIONS_H_
