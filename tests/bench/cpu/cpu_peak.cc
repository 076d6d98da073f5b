#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cpu/dispatch.h"
#include "tests/bench/cpu/cpu_bench.h"

namespace mla::bench {
namespace {

constexpr int64_t kIterations = 4'000'000;

// Twelve independent chains; the empty asm keeps operands opaque, so that nothing is hoisted.
#define MLA_CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

__attribute__((target("avx512f,avx512bw,avx512bf16"))) float Bf16Chains() {
  __m512 sum[12];
  for (__m512& s : sum) s = _mm512_set1_ps(0.0f);
  __m512i a = _mm512_set1_epi16(0x3f80), b = _mm512_set1_epi16(0x3c00);
  for (int64_t i = 0; i < kIterations; ++i) {
#define MLA_STEP(k) \
  sum[k] = _mm512_dpbf16_ps(sum[k], reinterpret_cast<__m512bh&>(a), reinterpret_cast<__m512bh&>(b));
    MLA_CHAINS(MLA_STEP)
#undef MLA_STEP
    asm volatile("" : "+v"(a), "+v"(b));
  }
  for (int k = 1; k < 12; ++k) sum[0] += sum[k];
  return sum[0][0];
}

__attribute__((target("avx512f"))) float Fma512Chains() {
  __m512 sum[12];
  for (__m512& s : sum) s = _mm512_set1_ps(0.0f);
  __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(1e-6f);
  for (int64_t i = 0; i < kIterations; ++i) {
#define MLA_STEP(k) sum[k] = _mm512_fmadd_ps(a, b, sum[k]);
    MLA_CHAINS(MLA_STEP)
#undef MLA_STEP
    asm volatile("" : "+v"(a), "+v"(b));
  }
  for (int k = 1; k < 12; ++k) sum[0] += sum[k];
  return sum[0][0];
}

__attribute__((target("avx2,fma"))) float Fma256Chains() {
  __m256 sum[12];
  for (__m256& s : sum) s = _mm256_set1_ps(0.0f);
  __m256 a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(1e-6f);
  for (int64_t i = 0; i < kIterations; ++i) {
#define MLA_STEP(k) sum[k] = _mm256_fmadd_ps(a, b, sum[k]);
    MLA_CHAINS(MLA_STEP)
#undef MLA_STEP
    asm volatile("" : "+x"(a), "+x"(b));
  }
  for (int k = 1; k < 12; ++k) sum[0] += sum[k];
  return sum[0][0];
}

constexpr int64_t kTileIterations = kIterations / 4;

// Tile registers 0 to 5 accumulate, 6 and 7 hold the operands; all have 16 rows of 64 bytes. A
// product takes longer to finish than to start, which six chains hide. Its operands stay in
// registers, so that no cache limits it.
__attribute__((target("avx512f,amx-tile,amx-bf16"))) float TileChains() {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static const Config config;
  alignas(64) uint16_t ones[16 * 32];
  alignas(64) float result[16 * 16];
  std::fill_n(ones, 16 * 32, uint16_t{0x3f80});
  asm volatile("" : : "r"(&config), "r"(ones) : "memory");
  _tile_loadconfig(&config);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t i = 0; i < kTileIterations; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_stored(0, result, 64);
  _tile_release();
  asm volatile("" : : "r"(result) : "memory");
  return result[0];
}

volatile float sink;

// Returns GFLOP/s of `chains`, which executes `flop` FLOP on each thread: the best of three runs.
double Rate(float (*chains)(), double flop, int32_t threads) {
  double best = 0.0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int32_t i = 1; i < threads; ++i) others.emplace_back([chains] { sink = chains(); });
    sink = chains();
    for (std::thread& other : others) other.join();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, flop * threads / seconds * 1e-9);
  }
  return best;
}

const char* PeakKind(const kernels::cpu::KernelSet& set) {
  if (std::string_view(set.name) == "amx") return "bf16 tile products";
  return set.bf16_operands ? "bf16 dot products" : "fp32 FMA";
}

}  // namespace

double MeasurePeak(const std::string& level, int32_t threads) {
  constexpr double kChained = 12.0 * kIterations;          // instructions of a vector loop
  constexpr double kTileProducts = 6.0 * kTileIterations;  // of the tile loop
  constexpr double kFlopATileProduct = 2.0 * 16.0 * 16.0 * 32.0;
  if (level == "amx") return Rate(TileChains, kTileProducts * kFlopATileProduct, threads);
  if (level == "avx512_bf16") return Rate(Bf16Chains, kChained * 64, threads);
  if (level == "avx512") return Rate(Fma512Chains, kChained * 32, threads);
  if (level == "avx2") return Rate(Fma256Chains, kChained * 16, threads);
  return 0.0;
}

double PeakOf(const std::string& level, int32_t threads) {
  static std::map<std::pair<std::string, int32_t>, double>& peaks =
      *new std::map<std::pair<std::string, int32_t>, double>;
  const auto [at, added] = peaks.try_emplace({level, threads}, 0.0);
  if (added) at->second = MeasurePeak(level, threads);
  return at->second;
}

const kernels::cpu::KernelSet& UseLevel(const BenchFlags& flags) {
  const auto level = kernels::cpu::SelectLevel(flags.isa, /*exact=*/true);
  if (!level.ok()) {
    std::fprintf(stderr, "%s\n", level.status().ToString().c_str());
    std::exit(1);
  }
  const kernels::cpu::KernelSet& set = **level;
  for (const int32_t threads : flags.threads) {
    std::printf("level %s, measured peak of %d threads %.0f GFLOP/s (%s)\n", set.name, threads,
                PeakOf(set.name, threads), PeakKind(set));
  }
  return set;
}

}  // namespace mla::bench
