// Stores W_UK and W_UV in the form that the products read: B panels per head, in the level's
// operand type.
//
//   absorb   k = nope_dim,      columns = kv_lora_rank   q · W_UK
//   project  k = kv_lora_rank,  columns = v_dim          o · W_UV, and values up-projected
//
// The up-projection of keys needs W_UK with k = kv_lora_rank; TransposeUk makes it from the absorb
// panels of one head when it is needed, so that memory holds only one copy of the weights.
#ifndef MLA_KERNELS_CPU_ITEMS_WEIGHTS_H_
#define MLA_KERNELS_CPU_ITEMS_WEIGHTS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/types/attention_desc.h"

namespace mla::kernels::cpu {

struct WeightLayout {
  int64_t absorb_panel_bytes = 0, project_panel_bytes = 0;
  int32_t absorb_panels = 0, project_panels = 0;
  int64_t project_at = 0;  // within a head
  int64_t head_bytes = 0;
};

WeightLayout MakeWeightLayout(const KernelSet& kernels, const Geometry& geometry);

// `packed` holds heads * head_bytes zeroed bytes.
void PackWeights(const KernelSet& kernels, const Geometry& geometry, int32_t heads,
                 const Bf16* w_uk, const Bf16* w_uv, std::byte* packed);

// Makes W_UK of one head as B panels with k = kv_lora_rank and columns = nope_dim.
void TransposeUk(const KernelSet& kernels, const Geometry& geometry, const std::byte* head,
                 int64_t panel_bytes, std::byte* out);

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_WEIGHTS_H_
