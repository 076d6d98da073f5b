// The self-test's projections of a single row, for which some architectures have kernels of their
// own. Internal to self_test.cc.
#ifndef MLA_KERNELS_HIP_SELF_TEST_ROW_H_
#define MLA_KERNELS_HIP_SELF_TEST_ROW_H_

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/self_test/data.h"
#include "kernels/launch_layout.h"

namespace mla::kernels::hip::self_test {

// One query row to absorb, and one latent row to project. Outputs are fp32.
struct RowData {
  explicit RowData(const Data& d)
      : geometry(d.geometry),
        q(d.q.begin(), d.q.begin() + kHeads * d.q_dim),
        latent(d.narrow),
        absorbed(size_t{kHeads} * kRowDim, NAN),
        projected(d.narrow_o.size(), NAN) {}

  const Geometry geometry;
  std::vector<Bf16> q;
  std::vector<float> latent;
  std::vector<float> absorbed, projected;
};

inline absl::Status ProjectRow(AttentionBackend& backend, RowData& d) {
  LaunchLayout layout(backend, 0);
  const auto bytes = [](const auto& v) { return int64_t(v.size() * sizeof(v[0])); };
  const auto q = layout.Input(d.q.data(), bytes(d.q));
  const auto latent = layout.Input(d.latent.data(), bytes(d.latent));
  const auto absorbed = layout.Output(d.absorbed.data(), bytes(d.absorbed));
  const auto projected = layout.Output(d.projected.data(), bytes(d.projected));
  for (const absl::Status& s :
       {q.status(), latent.status(), absorbed.status(), projected.status()}) {
    if (!s.ok()) return s;
  }
  const int32_t q_dim = d.geometry.expanded_q_dim(), o_dim = d.geometry.v_dim;
  const ProjectionRecord absorb{*q,      *absorbed, kHeads * q_dim, q_dim, kHeads * kRowDim,
                                kRowDim, 1,         kHeads,         0,     0};
  const ProjectionRecord project{*latent, *projected, 512,    0, kHeads * o_dim,
                                 o_dim,   1,          kHeads, 0, 0};
  Launch launch;
  launch.inputs = layout.inputs();
  launch.outputs = layout.outputs();
  launch.absorb = {d.geometry, DType::kBf16, DType::kF32, {&absorb, 1}, {}};
  launch.project = {d.geometry, DType::kF32, DType::kF32, {&project, 1}, {}};
  const absl::Status s = backend.Submit(0, launch);
  return s.ok() ? backend.Wait(0).status() : s;
}

// Returns the expected column `c` of a head's absorbed query.
inline double ExpectedAbsorbed(const RowData& d, const Weights& w, int32_t head, int32_t c) {
  const int32_t nope = d.geometry.nope_dim;
  const Bf16* q = &d.q[static_cast<size_t>(head) * d.geometry.expanded_q_dim()];
  if (c >= 512) return ToFloat(q[nope + c - 512]);
  double sum = 0.0;
  for (int32_t k = 0; k < nope; ++k) {
    sum += double{ToFloat(q[k])} * w.uk_floats[(static_cast<size_t>(head) * nope + k) * 512 + c];
  }
  return sum;
}

inline double ExpectedProjected(const Weights& w, int32_t head, int32_t c) {
  const int32_t o_dim = w.geometry.v_dim;
  const float* uv = &w.uv_floats[static_cast<size_t>(head) * 512 * o_dim];
  return double{kNarrow[0]} * uv[c] + double{kNarrow[1]} * uv[o_dim + c];
}

inline absl::Status CheckRow(AttentionBackend& backend, const Weights& w, const Data& data) {
  RowData d(data);
  MLA_RETURN_IF_ERROR(ProjectRow(backend, d));
  const auto compare = [](const char* what, int32_t head, int32_t c, float got, double want) {
    if (std::abs(got - want) < kNarrowOff) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("one row ", what, ", head ", head, ", column ", c,
                                            ": got ", got, ", want ", want));
  };
  for (int32_t head = 0; head < kHeads; ++head) {
    absl::Status s;
    for (int32_t c = 0; c < kRowDim && s.ok(); ++c) {
      s = compare("absorbed", head, c, d.absorbed[static_cast<size_t>(head) * kRowDim + c],
                  ExpectedAbsorbed(d, w, head, c));
    }
    for (int32_t c = 0; c < data.o_dim && s.ok(); ++c) {
      s = compare("projected", head, c, d.projected[static_cast<size_t>(head) * data.o_dim + c],
                  ExpectedProjected(w, head, c));
    }
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_ROW_H_
