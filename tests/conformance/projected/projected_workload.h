// Launches with products of rows with W_UQ or W_O (Launch::queries, Launch::hiddens), compared with
// sums in fp64.
//
// The cosine distance of a row must be below 1e-5 for bf16 results and 1e-9 for fp32 ones. No
// element may be off by more than half a unit in the last place of bf16, or 2^-15 for fp32, of the
// launch's largest.
#ifndef MLA_TESTS_CONFORMANCE_PROJECTED_PROJECTED_WORKLOAD_H_
#define MLA_TESTS_CONFORMANCE_PROJECTED_PROJECTED_WORKLOAD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "kernels/formats/dtype.h"
#include "kernels/launch_layout.h"
#include "kernels/projected_weights.h"
#include "kernels/types/launch.h"

namespace mla::conformance {

// Rows of one client.
struct ProjectedRows {
  int32_t rows;
  int32_t weights_slot;  // below kProjectedSlots; ascending
};
inline constexpr int32_t kProjectedSlots = 2;

struct ProjectedCase {
  kernels::Geometry geometry;
  kernels::ProjectedShape shape;
  std::vector<ProjectedRows> clients;
  kernels::ProjectedPart part = kernels::ProjectedPart::kQueries;
  kernels::RopeLayout rope = kernels::RopeLayout::kInterleaved;  // of queries
  kernels::DType dtype = kernels::DType::kBf16;
  // Elements between rows. Inputs of other than 16-byte alignment need another path of some
  // backends.
  int32_t in_gap = 0, out_gap = 0;
  // Tensors lie in the backend's shared device memory, if it has such memory. Gaps of outputs must
  // then stay as they were.
  bool shared = false;
};

std::string ToString(const ProjectedCase& c);
// Odd and common shapes, of at most some 10^8 products each: 1 to 128 heads, 1 to 200 rows of one
// or several clients, no rotated part, depths that are no multiple of a tile.
std::vector<ProjectedCase> ProjectedCases();
// Such shapes with weights of e4m3, for backends that hold them. Heads begin inside blocks, and
// have other scales than their neighbours in the blocks that they share.
std::vector<ProjectedCase> ProjectedCodeCases();
// Both, and DeepSeek-V3's and DeepSeek-V2-Lite's shapes with weights of both types.
std::vector<ProjectedCase> ProjectedModelCases();
// Limits of a backend that runs all cases of a list.
kernels::BackendLimits ProjectedLimits(std::span<const ProjectedCase> cases);

// Configures the backend and runs the cases; prints the ones that failed, and returns their number.
absl::StatusOr<int64_t> RunProjected(kernels::AttentionBackend& backend,
                                     std::span<const ProjectedCase> cases);

// One thread.
class ProjectedWorkload {
 public:
  explicit ProjectedWorkload(const ProjectedCase& c);

  // Frees all slots, and loads the weights of the slots that have clients; if `widened`, weights of
  // e4m3 as bf16.
  absl::Status LoadWeights(kernels::AttentionBackend& backend, bool widened = false) const;
  // Runs the launch and compares the results. INTERNAL names the first wrong row. REQUIRES: the
  // weights are loaded.
  absl::Status Check(kernels::AttentionBackend& backend);
  // Runs it alone.
  absl::Status Run(kernels::AttentionBackend& backend);
  // Returns the bytes of the results, with the gaps between rows.
  std::span<const std::byte> out() const { return out_; }

 private:
  bool queries() const { return c_.part == kernels::ProjectedPart::kQueries; }
  int32_t query_dim() const { return c_.geometry.expanded_q_dim(); }
  int32_t depth_of_head() const { return queries() ? c_.shape.q_lora_rank : c_.geometry.v_dim; }
  int32_t columns_of_head() const { return queries() ? query_dim() : c_.shape.hidden_size; }
  int32_t depth() const { return queries() ? depth_of_head() : heads() * depth_of_head(); }
  int32_t columns() const { return queries() ? heads() * query_dim() : c_.shape.hidden_size; }
  int32_t heads() const { return c_.geometry.num_heads; }
  int64_t in_pitch() const { return depth() + c_.in_gap; }
  int64_t out_pitch() const { return columns() + c_.out_gap; }
  int64_t size() const { return static_cast<int64_t>(kernels::ElementSize(c_.dtype)); }

  absl::Status Launch(kernels::AttentionBackend& backend);
  absl::Status LaunchShared(kernels::AttentionBackend& backend, std::byte* memory);
  absl::Status Submit(kernels::AttentionBackend& backend, kernels::LaunchLayout& layout,
                      const void* in, void* out, const void* rotations);
  absl::Status Compare() const;
  absl::Status CheckGaps() const;
  // Returns the number of the first of a column's weights; the others of the column follow it.
  uint64_t FirstWeight(int32_t slot, int32_t head, int32_t column) const;
  kernels::WeightWindow WindowOf(int32_t head) const {
    return kernels::WindowOf(c_.geometry, c_.shape, c_.part, head, 1);
  }
  // Returns the weight in row `column` and column `k` of a head's window.
  float Weight(int32_t slot, int32_t head, int32_t column, int32_t k) const;
  // Returns the bytes of a head's weights.
  std::vector<std::byte> HeadBytes(int32_t slot, int32_t head, bool widened) const;
  // Returns the sum of a row's inputs times a column's weights, before the rotation.
  double Sum(int32_t row, int32_t slot, int32_t column) const;
  double Expected(int32_t row, int32_t slot, int32_t column) const;
  double Result(int32_t row, int32_t column) const;
  const float* rotation(int32_t row) const {
    return rotations_.data() + static_cast<size_t>(row) * c_.geometry.rope_dim;
  }

  const ProjectedCase c_;
  int32_t rows_ = 0;
  std::vector<float> wide_in_;  // [rows, depth]
  std::vector<std::byte> in_, out_;
  std::vector<float> rotations_;
};

}  // namespace mla::conformance

#endif  // MLA_TESTS_CONFORMANCE_PROJECTED_PROJECTED_WORKLOAD_H_
