// AVX-512 and AMX in plain C++, for tests of dispatch levels that the machine cannot run.
//
// A test target that has this folder in its include path compiles a level's source against these
// functions instead of the compiler's own: same names, same lanes, same roundings, baseline
// instructions. It has only the intrinsics that the level sources use; a new one must be added here
// before its level's emulated tests compile. The emulation is about 50 times slower than the
// instructions.
//
// Arithmetic follows the instruction's definition: vdpbf16ps and the tile product add the products
// of a pair one after the other in fp32 (odd element first, then even, as documented), take
// denormal operands as zero and flush denormal results; conversions to bf16 round to nearest even,
// take denormals as zero and keep NaN quiet.
#ifndef MLA_KERNELS_CPU_EMULATION_IMMINTRIN_H_
#define MLA_KERNELS_CPU_EMULATION_IMMINTRIN_H_

#include <stdint.h>
#include <string.h>

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef int64_t __m512i __attribute__((vector_size(64), may_alias));
typedef int16_t __m512bh __attribute__((vector_size(64), may_alias));
typedef int64_t __m256i __attribute__((vector_size(32), may_alias));
typedef int16_t __m256bh __attribute__((vector_size(32), may_alias));
typedef int64_t __m128i __attribute__((vector_size(16), may_alias));
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;
typedef uint64_t __mmask64;

enum {
  _MM_FROUND_TO_NEAREST_INT = 0,
  _MM_FROUND_TO_NEG_INF = 1,
  _MM_FROUND_NO_EXC = 8,
  _CMP_EQ_OQ = 0,
  _CMP_NEQ_UQ = 4,
};

namespace mla::kernels::cpu {
namespace {

template <typename To, typename From>
inline To Cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Gives the lanes of a vector as an array.
template <typename T, int N>
struct Lanes {
  T at[N];
};
using F32 = Lanes<float, 16>;
using I32 = Lanes<int32_t, 16>;
using I16 = Lanes<uint16_t, 32>;
using I64 = Lanes<uint64_t, 8>;
using I8 = Lanes<uint8_t, 64>;

inline float WithoutDenormals(float value) {
  // The code compares no floats, so that the compiler works on several lanes at a time.
  const uint32_t bits = Cast<uint32_t>(value);
  return Cast<float>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

inline float Bf16Operand(uint16_t bits) {
  return WithoutDenormals(Cast<float>(static_cast<uint32_t>(bits) << 16));
}

inline uint16_t RoundToBf16(float value) {
  const uint32_t bits = Cast<uint32_t>(WithoutDenormals(value));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float DotPair(float sum, uint32_t a, uint32_t b) {
  sum = WithoutDenormals(sum + Bf16Operand(static_cast<uint16_t>(a >> 16)) *
                                   Bf16Operand(static_cast<uint16_t>(b >> 16)));
  return WithoutDenormals(sum + Bf16Operand(static_cast<uint16_t>(a)) *
                                    Bf16Operand(static_cast<uint16_t>(b)));
}

inline float Floor(float x) {
  if (!(x > -4194304.0f && x < 4194304.0f)) return x;
  const auto whole = static_cast<float>(static_cast<int32_t>(x));
  return whole > x ? whole - 1.0f : whole;
}

inline float NearestEven(float x) {
  if (!(x > -4194304.0f && x < 4194304.0f)) return x;
  const float big = 12582912.0f;
  volatile float shifted = x + big;
  return shifted - big;
}

}  // namespace
}  // namespace mla::kernels::cpu

#define MLA_EMULATED static inline __attribute__((unused))
#define MLA_NS mla::kernels::cpu

enum { _MM_HINT_T0 = 3, _MM_HINT_T1 = 2 };
#define _mm_prefetch(address, hint) __builtin_prefetch(address, 0, hint)

// --- Loads, stores, constants

MLA_EMULATED __m512 _mm512_loadu_ps(const void* from) {
  __m512 v;
  memcpy(&v, from, sizeof v);
  return v;
}
MLA_EMULATED __m512i _mm512_loadu_si512(const void* from) {
  __m512i v;
  memcpy(&v, from, sizeof v);
  return v;
}
MLA_EMULATED __m128i _mm_loadu_si128(const void* from) {
  __m128i v;
  memcpy(&v, from, sizeof v);
  return v;
}
MLA_EMULATED void _mm512_storeu_ps(void* to, __m512 v) { memcpy(to, &v, sizeof v); }
MLA_EMULATED void _mm512_storeu_si512(void* to, __m512i v) { memcpy(to, &v, sizeof v); }
MLA_EMULATED __m512 _mm512_setzero_ps() { return __m512{}; }
MLA_EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
MLA_EMULATED __m512 _mm512_set1_ps(float value) { return value - __m512{}; }
MLA_EMULATED __m512i _mm512_set1_epi32(int32_t value) {
  const uint64_t pair = static_cast<uint32_t>(value) * 0x100000001ull;
  return static_cast<int64_t>(pair) - __m512i{};
}
MLA_EMULATED __m512i _mm512_broadcast_i32x4(__m128i v) {
  return __m512i{v[0], v[1], v[0], v[1], v[0], v[1], v[0], v[1]};
}

template <typename Vector, typename Element>
static inline Vector EmulatedMaskedLoad(uint32_t mask, const void* from) {
  Element lanes[sizeof(Vector) / sizeof(Element)] = {};
  for (unsigned i = 0; i < sizeof lanes / sizeof lanes[0]; ++i) {
    if (mask >> i & 1u) lanes[i] = static_cast<const Element*>(from)[i];
  }
  return MLA_NS::Cast<Vector>(lanes);
}
template <typename Element, typename Vector>
static inline void EmulatedMaskedStore(void* to, uint32_t mask, const Vector& v) {
  const auto lanes = MLA_NS::Cast<MLA_NS::Lanes<Element, sizeof(Vector) / sizeof(Element)>>(v);
  for (unsigned i = 0; i < sizeof(Vector) / sizeof(Element); ++i) {
    if (mask >> i & 1u) static_cast<Element*>(to)[i] = lanes.at[i];
  }
}
MLA_EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
  return EmulatedMaskedLoad<__m512, float>(mask, from);
}
MLA_EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  return EmulatedMaskedLoad<__m512i, uint16_t>(mask, from);
}
MLA_EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* from) {
  return EmulatedMaskedLoad<__m256i, uint16_t>(mask, from);
}
MLA_EMULATED __m256i _mm256_maskz_loadu_epi8(__mmask32 mask, const void* from) {
  return EmulatedMaskedLoad<__m256i, uint8_t>(mask, from);
}
MLA_EMULATED __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* from) {
  uint8_t lanes[64] = {};
  for (int i = 0; i < 64; ++i) {
    if (mask >> i & 1u) lanes[i] = static_cast<const uint8_t*>(from)[i];
  }
  return MLA_NS::Cast<__m512i>(lanes);
}
MLA_EMULATED void _mm512_mask_storeu_epi16(void* to, __mmask32 mask, __m512i v) {
  EmulatedMaskedStore<uint16_t>(to, mask, v);
}
MLA_EMULATED void _mm512_mask_storeu_ps(void* to, __mmask16 mask, __m512 v) {
  EmulatedMaskedStore<float>(to, mask, v);
}
MLA_EMULATED void _mm256_mask_storeu_epi16(void* to, __mmask16 mask, __m256i v) {
  EmulatedMaskedStore<uint16_t>(to, mask, v);
}

// Arguments are ordered highest lane first, as in the vendors' headers.
template <typename... Rest>
static inline __m512i _mm512_set_epi64(Rest... lanes) {
  const int64_t listed[8] = {static_cast<int64_t>(lanes)...};
  __m512i v;
  for (int i = 0; i < 8; ++i) v[i] = listed[7 - i];
  return v;
}
template <typename... Rest>
static inline __m512i _mm512_set_epi16(Rest... lanes) {
  const int16_t listed[32] = {static_cast<int16_t>(lanes)...};
  int16_t v[32];
  for (int i = 0; i < 32; ++i) v[i] = listed[31 - i];
  return MLA_NS::Cast<__m512i>(v);
}

// --- fp32 arithmetic

MLA_EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
MLA_EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
MLA_EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
MLA_EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  __m512 v;
  for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(static_cast<double>(a[i]) * b[i] + c[i]);
  return v;
}
MLA_EMULATED __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) {
  return _mm512_fmadd_ps(a, b, -c);
}
// Returns the second operand if one is NaN.
MLA_EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
MLA_EMULATED __m512 _mm512_maskz_sub_ps(__mmask16 mask, __m512 a, __m512 b) {
  __m512 v = a - b;
  for (int i = 0; i < 16; ++i) v[i] = mask >> i & 1 ? v[i] : 0.0f;
  return v;
}
MLA_EMULATED __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  for (int i = 0; i < 16; ++i) a[i] = mask >> i & 1 ? b[i] : a[i];
  return a;
}
MLA_EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  uint32_t equal = 0;
  for (int i = 0; i < 16; ++i) equal |= static_cast<uint32_t>(a[i] == b[i]) << i;
  return static_cast<__mmask16>(how == _CMP_EQ_OQ ? equal : ~equal);
}
MLA_EMULATED __m512 _mm512_roundscale_ps(__m512 x, int) {
  for (int i = 0; i < 16; ++i) x[i] = MLA_NS::NearestEven(x[i]);
  return x;
}
// Returns x - floor(x), the only form in use: -0 for 0 and whole numbers, +0 for infinities.
MLA_EMULATED __m512 _mm512_reduce_ps(__m512 x, int) {
  for (int i = 0; i < 16; ++i) {
    const float down = MLA_NS::Floor(x[i]);
    if (x[i] - x[i] != 0.0f && x[i] == x[i]) {
      x[i] = 0.0f;
    } else {
      x[i] = x[i] == down ? -0.0f : x[i] - down;
    }
  }
  return x;
}
// x 2^floor(n); n = -inf gives 0, and NaN in either operand gives NaN.
MLA_EMULATED __m512 _mm512_scalef_ps(__m512 x, __m512 n) {
  for (int i = 0; i < 16; ++i) {
    if (n[i] != n[i]) {
      x[i] = n[i];
    } else if (n[i] < -300.0f) {
      x[i] *= 0.0f;
    } else if (n[i] > 300.0f) {
      x[i] *= __builtin_inff();
    } else {
      x[i] = __builtin_ldexpf(x[i], static_cast<int>(MLA_NS::Floor(n[i])));
    }
  }
  return x;
}

// --- Integers and permutations

MLA_EMULATED __m512 _mm512_castsi512_ps(__m512i v) { return MLA_NS::Cast<__m512>(v); }
MLA_EMULATED __m512i _mm512_castps_si512(__m512 v) { return MLA_NS::Cast<__m512i>(v); }
MLA_EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
MLA_EMULATED __m512i _mm512_slli_epi32(__m512i v, int count) {
  auto lanes = MLA_NS::Cast<MLA_NS::I32>(v);
  for (int32_t& lane : lanes.at) lane = static_cast<int32_t>(static_cast<uint32_t>(lane) << count);
  return MLA_NS::Cast<__m512i>(lanes);
}
MLA_EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
MLA_EMULATED __m512i _mm512_set1_epi16(int16_t value) {
  MLA_NS::I16 lanes;
  for (uint16_t& lane : lanes.at) lane = static_cast<uint16_t>(value);
  return MLA_NS::Cast<__m512i>(lanes);
}
MLA_EMULATED __m512i _mm512_set1_epi8(char value) {
  MLA_NS::I8 lanes;
  for (uint8_t& lane : lanes.at) lane = static_cast<uint8_t>(value);
  return MLA_NS::Cast<__m512i>(lanes);
}
MLA_EMULATED __m512i _mm512_add_epi8(__m512i a, __m512i b) {
  auto x = MLA_NS::Cast<MLA_NS::I8>(a);
  const auto y = MLA_NS::Cast<MLA_NS::I8>(b);
  for (int i = 0; i < 64; ++i) x.at[i] = static_cast<uint8_t>(x.at[i] + y.at[i]);
  return MLA_NS::Cast<__m512i>(x);
}
// Selects bytes of two concatenated tables by the low 7 bits of the index.
MLA_EMULATED __m512i _mm512_permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
  const auto x = MLA_NS::Cast<MLA_NS::I8>(a), y = MLA_NS::Cast<MLA_NS::I8>(b);
  auto at = MLA_NS::Cast<MLA_NS::I8>(index);
  for (uint8_t& lane : at.at) lane = (lane & 64u) != 0 ? y.at[lane & 63u] : x.at[lane & 63u];
  return MLA_NS::Cast<__m512i>(at);
}
MLA_EMULATED __m512i _mm512_slli_epi16(__m512i v, int count) {
  auto lanes = MLA_NS::Cast<MLA_NS::I16>(v);
  for (uint16_t& lane : lanes.at) lane = static_cast<uint16_t>(lane << count);
  return MLA_NS::Cast<__m512i>(lanes);
}
MLA_EMULATED __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  auto x = MLA_NS::Cast<MLA_NS::I16>(a);
  const auto y = MLA_NS::Cast<MLA_NS::I16>(b);
  for (int i = 0; i < 32; ++i) x.at[i] = static_cast<uint16_t>(x.at[i] + y.at[i]);
  return MLA_NS::Cast<__m512i>(x);
}
MLA_EMULATED __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i a, __m512i b) {
  auto x = MLA_NS::Cast<MLA_NS::I16>(a);
  const auto y = MLA_NS::Cast<MLA_NS::I16>(b);
  for (int i = 0; i < 32; ++i) x.at[i] = mask >> i & 1u ? y.at[i] : x.at[i];
  return MLA_NS::Cast<__m512i>(x);
}
MLA_EMULATED __m512i _mm512_mask_add_epi16(__m512i from, __mmask32 mask, __m512i a, __m512i b) {
  return _mm512_mask_blend_epi16(mask, from, _mm512_add_epi16(a, b));
}
MLA_EMULATED __mmask32 _mm512_cmpneq_epi16_mask(__m512i a, __m512i b) {
  const auto x = MLA_NS::Cast<MLA_NS::I16>(a), y = MLA_NS::Cast<MLA_NS::I16>(b);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(x.at[i] != y.at[i]) << i;
  return mask;
}
MLA_EMULATED __mmask32 _mm512_mask_test_epi16_mask(__mmask32 mask, __m512i a, __m512i b) {
  return mask & _mm512_cmpneq_epi16_mask(a & b, __m512i{});
}
MLA_EMULATED __mmask32 _mm512_testn_epi16_mask(__m512i a, __m512i b) {
  return ~_mm512_cmpneq_epi16_mask(a & b, __m512i{});
}
MLA_EMULATED __mmask16 _mm512_cmpgt_epi32_mask(__m512i a, __m512i b) {
  const auto x = MLA_NS::Cast<MLA_NS::I32>(a), y = MLA_NS::Cast<MLA_NS::I32>(b);
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(x.at[i] > y.at[i]) << i;
  return static_cast<__mmask16>(mask);
}
MLA_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i v) {
  const auto from = MLA_NS::Cast<MLA_NS::Lanes<uint16_t, 16>>(v);
  MLA_NS::I32 to;
  for (int i = 0; i < 16; ++i) to.at[i] = from.at[i];
  return MLA_NS::Cast<__m512i>(to);
}
MLA_EMULATED __m512i _mm512_permutexvar_epi16(__m512i index, __m512i v) {
  const auto at = MLA_NS::Cast<MLA_NS::I16>(index), from = MLA_NS::Cast<MLA_NS::I16>(v);
  MLA_NS::I16 to;
  for (int i = 0; i < 32; ++i) to.at[i] = from.at[at.at[i] & 31];
  return MLA_NS::Cast<__m512i>(to);
}
MLA_EMULATED __m512i _mm512_mask_permutexvar_epi16(__m512i from, __mmask32 mask, __m512i index,
                                                   __m512i v) {
  return _mm512_mask_blend_epi16(mask, from, _mm512_permutexvar_epi16(index, v));
}
MLA_EMULATED __m512i _mm512_cvtepu8_epi16(__m256i v) {
  const auto from = MLA_NS::Cast<MLA_NS::Lanes<uint8_t, 32>>(v);
  MLA_NS::I16 to;
  for (int i = 0; i < 32; ++i) to.at[i] = from.at[i];
  return MLA_NS::Cast<__m512i>(to);
}
MLA_EMULATED __m512i _mm512_permutexvar_epi64(__m512i index, __m512i v) {
  __m512i to;
  for (int i = 0; i < 8; ++i) to[i] = v[index[i] & 7];
  return to;
}

// Interleaves the low or high halves of each 128-bit lane.
template <typename Element, bool kHigh>
static inline __m512i EmulatedUnpack(__m512i a, __m512i b) {
  constexpr int kCount = 16 / sizeof(Element);
  using All = MLA_NS::Lanes<Element, 4 * kCount>;
  const auto x = MLA_NS::Cast<All>(a), y = MLA_NS::Cast<All>(b);
  All result;
  for (int lane = 0; lane < 4 * kCount; lane += kCount) {
    for (int i = 0; i < kCount / 2; ++i) {
      const int from = lane + i + (kHigh ? kCount / 2 : 0);
      result.at[lane + 2 * i] = x.at[from];
      result.at[lane + 2 * i + 1] = y.at[from];
    }
  }
  return MLA_NS::Cast<__m512i>(result);
}
#define MLA_UNPACK(bits)                                                 \
  MLA_EMULATED __m512i _mm512_unpacklo_epi##bits(__m512i a, __m512i b) { \
    return EmulatedUnpack<uint##bits##_t, false>(a, b);                  \
  }                                                                      \
  MLA_EMULATED __m512i _mm512_unpackhi_epi##bits(__m512i a, __m512i b) { \
    return EmulatedUnpack<uint##bits##_t, true>(a, b);                   \
  }
MLA_UNPACK(8)
MLA_UNPACK(16)
MLA_UNPACK(32)
MLA_UNPACK(64)
#undef MLA_UNPACK

template <int kOrder>
static inline __m512i EmulatedShuffle128(__m512i a, __m512i b) {
  __m512i result;
  for (int lane = 0; lane < 4; ++lane) {
    const int from = kOrder >> (2 * lane) & 3;
    const __m512i& source = lane < 2 ? a : b;
    result[2 * lane] = source[2 * from];
    result[2 * lane + 1] = source[2 * from + 1];
  }
  return result;
}
#define _mm512_shuffle_i32x4(a, b, order) EmulatedShuffle128<order>(a, b)

// --- bf16

MLA_EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  MLA_NS::I16 result;
  for (int i = 0; i < 16; ++i) {
    result.at[i] = MLA_NS::RoundToBf16(low[i]);
    result.at[16 + i] = MLA_NS::RoundToBf16(high[i]);
  }
  return MLA_NS::Cast<__m512bh>(result);
}
MLA_EMULATED __m256bh _mm512_cvtneps_pbh(__m512 v) {
  MLA_NS::Lanes<uint16_t, 16> to;
  for (int i = 0; i < 16; ++i) to.at[i] = MLA_NS::RoundToBf16(v[i]);
  return MLA_NS::Cast<__m256bh>(to);
}
__attribute__((noinline)) MLA_EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const auto x = MLA_NS::Cast<MLA_NS::I32>(a), y = MLA_NS::Cast<MLA_NS::I32>(b);
  auto sums = MLA_NS::Cast<MLA_NS::F32>(sum);
  for (int i = 0; i < 16; ++i) {
    sums.at[i] =
        MLA_NS::DotPair(sums.at[i], static_cast<uint32_t>(x.at[i]), static_cast<uint32_t>(y.at[i]));
  }
  return MLA_NS::Cast<__m512>(sums);
}

// --- Tiles: 8 registers of 16 rows of 64 bytes, always used at full size

static thread_local uint32_t emulated_tiles[8][16][16];

MLA_EMULATED void _tile_loadconfig(const void*) {}
MLA_EMULATED void _tile_release() {}
MLA_EMULATED void _tile_zero(int tile) {
  memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
}
MLA_EMULATED void _tile_loadd(int tile, const void* from, int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    memcpy(emulated_tiles[tile][r], static_cast<const char*>(from) + r * stride, 64);
  }
}
MLA_EMULATED void _tile_stream_loadd(int tile, const void* from, int64_t stride) {
  _tile_loadd(tile, from, stride);
}
MLA_EMULATED void _tile_stored(int tile, void* to, int64_t stride) {
  for (int r = 0; r < 16; ++r) {
    memcpy(static_cast<char*>(to) + r * stride, emulated_tiles[tile][r], 64);
  }
}
MLA_EMULATED void _tile_dpbf16ps(int c, int a, int b) {
  for (int m = 0; m < 16; ++m) {
    auto sums = MLA_NS::Cast<MLA_NS::F32>(emulated_tiles[c][m]);
    for (int k = 0; k < 16; ++k) {
      const uint32_t pair = emulated_tiles[a][m][k];
      for (int n = 0; n < 16; ++n) {
        sums.at[n] = MLA_NS::DotPair(sums.at[n], pair, emulated_tiles[b][k][n]);
      }
    }
    memcpy(emulated_tiles[c][m], &sums, sizeof sums);
  }
}

#undef MLA_EMULATED
#undef MLA_NS

#endif  // MLA_KERNELS_CPU_EMULATION_IMMINTRIN_H_
