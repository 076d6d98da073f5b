// The bound that attention on a CPU is judged by: oneDNN's time for the same two matrix products,
// without softmax, masking or paging. A benchmark-only dependency.
#ifndef MLA_TESTS_BENCH_CPU_GEMM_BOUND_H_
#define MLA_TESTS_BENCH_CPU_GEMM_BOUND_H_

#include <cstdint>
#include <memory>

namespace mla::bench {

// Sets oneDNN's highest instruction set, by the name of a CPU dispatch level. Must be called before
// any GemmBound is made.
void SetGemmIsa(const char* level);

// The products of `rows` packed query rows with `kv_rows` KV rows: S = Q K^T, O = P V, with K of
// `key_dim` columns and V its first `value_dim`. Operands are bf16 and results fp32 if the level
// has bf16 products; otherwise all is fp32. K and V lie row by row, as in a cache. Each product can
// be written in two ways (A B or its transpose); the faster one is kept.
class GemmBound {
 public:
  GemmBound(int32_t rows, int32_t kv_rows, int32_t key_dim, int32_t value_dim, bool bf16);
  ~GemmBound();

  // Runs both products once, on the number of threads set by SetGemmThreads.
  void Run();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

void SetGemmThreads(int32_t threads);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_CPU_GEMM_BOUND_H_
