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
#include <cstring>

#include "kernels/cpu/simd/kernel_set.h"
#include "kernels/formats/dtype.h"
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

// Copies the weights of one head, which begin at `packed`, back: bit for bit as PackWeights got
// them.
void UnpackWeights(const KernelSet& kernels, const Geometry& geometry, const std::byte* packed,
                   Bf16* w_uk, Bf16* w_uv);

// Store an element of B panels in the level's operand type, and read it.
inline void StoreWeight(const KernelSet& kernels, Bf16 value, std::byte* target) {
  if (kernels.bf16_operands) {
    std::memcpy(target, &value, sizeof value);
  } else {
    const float wide = ToFloat(value);
    std::memcpy(target, &wide, sizeof wide);
  }
}
inline Bf16 ReadWeight(const KernelSet& kernels, const std::byte* source) {
  Bf16 value = 0;
  if (kernels.bf16_operands) {
    std::memcpy(&value, source, sizeof value);
  } else {
    uint32_t wide = 0;  // a bf16 and 16 zeros
    std::memcpy(&wide, source, sizeof wide);
    value = static_cast<Bf16>(wide >> 16);
  }
  return value;
}

// Makes W_UK of one head as B panels with k = kv_lora_rank and columns = nope_dim.
void TransposeUk(const KernelSet& kernels, const Geometry& geometry, const std::byte* head,
                 int64_t panel_bytes, std::byte* out);

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_WEIGHTS_H_
