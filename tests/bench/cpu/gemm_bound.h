// The bound that attention on a CPU is judged by: oneDNN's time for the same two matrix products,
// without softmax, masking or paging. A benchmark-only dependency.
#ifndef MLA_TESTS_BENCH_CPU_GEMM_BOUND_H_
#define MLA_TESTS_BENCH_CPU_GEMM_BOUND_H_

#include <cstdint>
#include <memory>

namespace mla::bench {

// Must be called before any GemmBound is made: oneDNN's highest instruction set, by the name of a
// CPU dispatch level.
void SetGemmIsa(const char* level);

// The products of `rows` packed query rows with `kv_rows` KV rows: S = Q K^T, O = P V, with K of
// `key_dim` columns and V its first `value_dim`. bf16 operands and fp32 results where the level has
// bf16 products, else fp32 throughout. K and V lie row by row, as a cache holds them; of the two
// ways to write each product (A B and its transpose) the faster one is kept.
class GemmBound {
 public:
  GemmBound(int32_t rows, int32_t kv_rows, int32_t key_dim, int32_t value_dim, bool bf16);
  ~GemmBound();

  // Runs both products once, on as many threads as SetGemmThreads said.
  void Run();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

void SetGemmThreads(int32_t threads);

}  // namespace mla::bench

#endif  // MLA_TESTS_BENCH_CPU_GEMM_BOUND_H_
