// Tests that each weight is moved to the place in its B panel that PanelOffset gives.
#include "kernels/cpu/items/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace mla::kernels::cpu {
namespace {

std::vector<Bf16> RandomBits(int64_t count) {
  static std::mt19937 random(7);
  std::vector<Bf16> bits(static_cast<size_t>(count));
  for (Bf16& value : bits) value = static_cast<Bf16>(random());
  return bits;
}

// The level's layout; its products are not called.
KernelSet LayoutOf(int32_t k_group) {
  KernelSet kernels = kPortableKernels;
  kernels.bf16_operands = k_group > 1;
  kernels.k_group = k_group;
  kernels.k_align = k_group > 1 ? 32 : 1;
  return kernels;
}

// Compares element (k, n) of a matrix with the one at its place in B panels.
void ExpectPlaces(const KernelSet& kernels, const Bf16* matrix, int32_t k, int32_t columns,
                  const std::byte* panels, int64_t panel_bytes) {
  for (int32_t i = 0; i < k; ++i) {
    for (int32_t n = 0; n < columns; ++n) {
      const std::byte* const place =
          panels + n / kPanel * panel_bytes + PanelOffset(kernels, i, n % kPanel);
      ASSERT_EQ(ReadWeight(kernels, place), matrix[i * columns + n]) << i << ", " << n;
    }
  }
}

TEST(WeightsTest, EveryElementLiesAtItsPlaceAndComesBack) {
  // Whole groups of rows and whole panels; some rows and columns that are left over; no panel.
  constexpr Geometry kGeometries[] = {
      {.num_heads = 2, .kv_lora_rank = 64, .rope_dim = 16, .nope_dim = 32, .v_dim = 48},
      {.num_heads = 2, .kv_lora_rank = 43, .rope_dim = 16, .nope_dim = 21, .v_dim = 37},
      {.num_heads = 2, .kv_lora_rank = 9, .rope_dim = 16, .nope_dim = 8, .v_dim = 5}};
  for (const int32_t k_group : {1, 2, 8}) {
    const KernelSet kernels = LayoutOf(k_group);
    for (const Geometry& g : kGeometries) {
      SCOPED_TRACE(testing::Message() << "k_group " << k_group << ", rank " << g.kv_lora_rank);
      const int64_t uk = int64_t{g.nope_dim} * g.kv_lora_rank;
      const int64_t uv = int64_t{g.kv_lora_rank} * g.v_dim;
      const std::vector<Bf16> w_uk = RandomBits(g.num_heads * uk);
      const std::vector<Bf16> w_uv = RandomBits(g.num_heads * uv);
      const WeightLayout layout = MakeWeightLayout(kernels, g);
      std::vector<std::byte> packed(static_cast<size_t>(g.num_heads * layout.head_bytes));
      PackWeights(kernels, g, g.num_heads, w_uk.data(), w_uv.data(), packed.data());
      for (int32_t head = 0; head < g.num_heads; ++head) {
        const std::byte* const packed_head = packed.data() + head * layout.head_bytes;
        ExpectPlaces(kernels, w_uk.data() + head * uk, g.nope_dim, g.kv_lora_rank, packed_head,
                     layout.absorb_panel_bytes);
        ExpectPlaces(kernels, w_uv.data() + head * uv, g.kv_lora_rank, g.v_dim,
                     packed_head + layout.project_at, layout.project_panel_bytes);
        std::vector<Bf16> got_uk(static_cast<size_t>(uk)), got_uv(static_cast<size_t>(uv));
        UnpackWeights(kernels, g, packed_head, got_uk.data(), got_uv.data());
        EXPECT_TRUE(std::equal(got_uk.begin(), got_uk.end(), w_uk.begin() + head * uk));
        EXPECT_TRUE(std::equal(got_uv.begin(), got_uv.end(), w_uv.begin() + head * uv));
      }
    }
  }
}

}  // namespace
}  // namespace mla::kernels::cpu
