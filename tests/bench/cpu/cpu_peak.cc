#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
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

volatile float sink;

double Rate(float (*chains)(), double flop_an_instruction, int32_t threads) {
  double best = 0.0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int32_t i = 1; i < threads; ++i) others.emplace_back([chains] { sink = chains(); });
    sink = chains();
    for (std::thread& other : others) other.join();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, 12.0 * kIterations * threads * flop_an_instruction / seconds * 1e-9);
  }
  return best;
}

}  // namespace

double MeasurePeak(const std::string& level, int32_t threads) {
  if (level == "avx512_bf16" || level == "amx") return Rate(Bf16Chains, 64, threads);
  if (level == "avx512") return Rate(Fma512Chains, 32, threads);
  if (level == "avx2") return Rate(Fma256Chains, 16, threads);
  return 0.0;
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
                MeasurePeak(set.name, threads),
                set.bf16_operands ? "bf16 dot products" : "fp32 FMA");
  }
  return set;
}

}  // namespace mla::bench
