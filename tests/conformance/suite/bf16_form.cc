#include "tests/conformance/suite/bf16_form.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace mla::conformance {
namespace {

using kernels::Bf16;
using kernels::Geometry;
using kernels::ToBf16;
using kernels::ToFloat;

float Rounded(double value) { return ToFloat(ToBf16(static_cast<float>(value))); }

// Keys [kv rows, nope + rope] and values [kv rows, v] of one head of the model.
struct HeadRows {
  std::vector<float> keys, values;
};

HeadRows UpProject(const Geometry& g, const Weights& weights, const RequestData& data, int64_t rows,
                   int64_t head) {
  const int64_t key_dim = g.nope_dim + g.rope_dim;
  HeadRows out;
  out.keys.resize(static_cast<size_t>(rows * key_dim));
  out.values.resize(static_cast<size_t>(rows * g.v_dim));
  const Bf16* const uk = weights.w_uk.data() + head * g.nope_dim * g.kv_lora_rank;
  const Bf16* const uv = weights.w_uv.data() + head * g.kv_lora_rank * g.v_dim;
  for (int64_t row = 0; row < rows; ++row) {
    const float* const latent = data.stored.data() + row * g.kv_row_dim();
    float* const key = out.keys.data() + row * key_dim;
    for (int32_t n = 0; n < g.nope_dim; ++n) {
      double sum = 0.0;
      for (int32_t i = 0; i < g.kv_lora_rank; ++i) {
        sum += double{latent[i]} * ToFloat(uk[int64_t{n} * g.kv_lora_rank + i]);
      }
      key[n] = Rounded(sum);
    }
    for (int32_t i = 0; i < g.rope_dim; ++i) {
      key[g.nope_dim + i] = latent[g.kv_lora_rank + i];
    }
    for (int32_t v = 0; v < g.v_dim; ++v) {
      double sum = 0.0;
      for (int32_t i = 0; i < g.kv_lora_rank; ++i) {
        sum += double{latent[i]} * ToFloat(uv[int64_t{i} * g.v_dim + v]);
      }
      out.values[static_cast<size_t>(row * g.v_dim + v)] = Rounded(sum);
    }
  }
  return out;
}

void AttendRow(const CaseSpec& spec, const HeadRows& head, const Bf16* q, int64_t visible, float* o,
               float* lse) {
  const Geometry& g = spec.geometry;
  const int64_t key_dim = g.nope_dim + g.rope_dim;
  std::vector<double> logits(static_cast<size_t>(visible));
  double top = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < visible; ++j) {
    double dot = 0.0;
    for (int64_t i = 0; i < key_dim; ++i) {
      dot += double{ToFloat(q[i])} * head.keys[static_cast<size_t>(j * key_dim + i)];
    }
    logits[static_cast<size_t>(j)] = dot * spec.softmax_scale;
    top = std::max(top, logits[static_cast<size_t>(j)]);
  }
  double total = 0.0;
  std::vector<double> sum(static_cast<size_t>(g.v_dim), 0.0);
  for (int64_t j = 0; j < visible; ++j) {
    const double p = std::exp(logits[static_cast<size_t>(j)] - top);
    total += p;
    for (int32_t v = 0; v < g.v_dim; ++v) {
      sum[static_cast<size_t>(v)] +=
          double{Rounded(p)} * head.values[static_cast<size_t>(j * g.v_dim + v)];
    }
  }
  for (int32_t v = 0; v < g.v_dim; ++v) {
    const double value = visible == 0 ? 0.0 : sum[static_cast<size_t>(v)] / total;
    o[v] = spec.o_dtype == kernels::DType::kF32 ? static_cast<float>(value) : Rounded(value);
  }
  *lse = visible == 0 ? -std::numeric_limits<float>::infinity()
                      : static_cast<float>(top + std::log(total));
}

}  // namespace

CaseOutput AttendInBf16(const Workload& workload) {
  const CaseSpec& spec = workload.spec;
  const Geometry& g = spec.geometry;
  CaseOutput output;
  for (size_t i = 0; i < spec.requests.size(); ++i) {
    const RequestSpec& r = spec.requests[i];
    const RequestData& data = workload.requests[i];
    const auto* const q = reinterpret_cast<const Bf16*>(data.q.data());
    const size_t first = output.lse.size();
    const size_t packed = static_cast<size_t>(r.q_rows) * static_cast<size_t>(r.num_heads);
    output.lse.resize(first + packed);
    output.o.resize((first + packed) * static_cast<size_t>(g.v_dim));
    for (int32_t head = 0; head < r.num_heads && r.q_rows > 0; ++head) {
      const HeadRows rows =
          UpProject(g, *workload.weights, data, r.kv_rows(), r.head_offset + head);
      for (int32_t row = 0; row < r.q_rows; ++row) {
        const size_t at =
            static_cast<size_t>(row) * static_cast<size_t>(r.num_heads) + static_cast<size_t>(head);
        const int64_t visible = r.causal ? r.cached_rows + row + 1 : r.kv_rows();
        AttendRow(spec, rows, q + at * static_cast<size_t>(spec.q_dim()), visible,
                  output.o.data() + (first + at) * static_cast<size_t>(g.v_dim),
                  output.lse.data() + first + at);
      }
    }
  }
  return output;
}

}  // namespace mla::conformance
