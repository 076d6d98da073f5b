#include "tests/bench/cpu/gemm_bound.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"

// From the OpenMP runtime that oneDNN is built with.
extern "C" void omp_set_num_threads(int);

namespace mla::bench {
namespace {

using dnnl::memory;
using Dims = memory::dims;

// One product, as a primitive with its memories.
struct Product {
  dnnl::matmul primitive;
  std::unordered_map<int, memory> arguments;
};

double Seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

struct GemmBound::State {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::vector<memory> tensors;
  std::vector<Product> products;

  memory Tensor(const Dims& dims, const Dims& strides, memory::data_type type) {
    memory tensor({dims, type, strides}, engine);
    // Small numbers: bit patterns that are valid in both types.
    std::memset(tensor.get_data_handle(), 0x3c, tensor.get_desc().get_size());
    tensors.push_back(tensor);
    return tensor;
  }

  Product Make(const memory& a, const memory& b, const memory& c) {
    const dnnl::matmul::primitive_desc description({a.get_desc(), b.get_desc(), c.get_desc()},
                                                   engine);
    return {dnnl::matmul(description),
            {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}}};
  }

  void Execute(const Product& product) {
    product.primitive.execute(stream, product.arguments);
    stream.wait();
  }

  // Keeps the faster of two ways to write a product.
  void AddFaster(const Product& straight, const Product& turned) {
    double best[2] = {1e30, 1e30};
    for (int repeat = 0; repeat < 3; ++repeat) {
      best[0] = std::min(best[0], Seconds([&] { Execute(straight); }));
      best[1] = std::min(best[1], Seconds([&] { Execute(turned); }));
    }
    products.push_back(best[0] <= best[1] ? straight : turned);
  }
};

void SetGemmIsa(const char* level) {
  const std::string name = level;
  const char* isa = name == "amx"           ? "AVX512_CORE_AMX"
                    : name == "avx512_bf16" ? "AVX512_CORE_BF16"
                    : name == "avx512"      ? "AVX512_CORE"
                    : name == "avx2"        ? "AVX2"
                                            : "SSE41";
  setenv("ONEDNN_MAX_CPU_ISA", isa, 1);
  setenv("DNNL_MAX_CPU_ISA", isa, 1);
}

void SetGemmThreads(int32_t threads) { omp_set_num_threads(threads); }

GemmBound::GemmBound(int32_t rows, int32_t kv_rows, int32_t key_dim, int32_t value_dim, bool bf16)
    : state_(std::make_unique<State>()) {
  const auto in = bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  const auto out = memory::data_type::f32;
  const int64_t m = rows, n = kv_rows, k = key_dim, v = value_dim;
  State& s = *state_;
  const memory q = s.Tensor({m, k}, {k, 1}, in);
  const memory kv = s.Tensor({n, k}, {k, 1}, in);
  const memory p = s.Tensor({m, n}, {n, 1}, in);
  const auto view = [&](const memory& of, const Dims& dims, const Dims& strides) {
    return memory({dims, in, strides}, s.engine, of.get_data_handle());
  };
  const memory logits = s.Tensor({m, n}, {n, 1}, out), logits_t = s.Tensor({n, m}, {m, 1}, out);
  const memory o = s.Tensor({m, v}, {v, 1}, out), o_t = s.Tensor({v, m}, {m, 1}, out);
  s.AddFaster(s.Make(q, view(kv, {k, n}, {1, k}), logits),
              s.Make(kv, view(q, {k, m}, {1, k}), logits_t));
  s.AddFaster(s.Make(p, view(kv, {n, v}, {k, 1}), o),
              s.Make(view(kv, {v, n}, {1, k}), view(p, {n, m}, {1, n}), o_t));
}

GemmBound::~GemmBound() = default;

void GemmBound::Run() {
  for (const Product& product : state_->products) state_->Execute(product);
}

}  // namespace mla::bench
