// Lays out weights in device memory if the up-projection needs them ready for shared memory. A
// matrix [rows, columns] is a list of panels of 64 columns, 128 bytes a row, and the 16-byte chunk
// c of row r lies at position c ^ (r & 7). A piece of a panel is one contiguous copy.
#ifndef MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_PANELS_H_
#define MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_PANELS_H_

#include <cstdint>
#include <cstring>

#include "kernels/formats/dtype.h"

namespace mla::kernels::hip {

inline constexpr int32_t kWeightPanelColumns = 64;

// `destination` and `from` hold rows x columns elements each; columns is a multiple of 64.
inline void PackPanels(const Bf16* from, Bf16* destination, int32_t rows, int32_t columns) {
  constexpr int32_t kChunk = 8, kChunks = kWeightPanelColumns / kChunk;
  for (int32_t panel = 0; panel < columns / kWeightPanelColumns; ++panel) {
    for (int32_t row = 0; row < rows; ++row) {
      const Bf16* const source = from + int64_t{row} * columns + panel * kWeightPanelColumns;
      for (int32_t c = 0; c < kChunks; ++c) {
        std::memcpy(destination + (c ^ (row & 7)) * kChunk, source + c * kChunk,
                    kChunk * sizeof(*destination));
      }
      destination += kWeightPanelColumns;
    }
  }
}

// Undoes PackPanels.
inline void UnpackPanels(const Bf16* from, Bf16* destination, int32_t rows, int32_t columns) {
  constexpr int32_t kChunk = 8, kChunks = kWeightPanelColumns / kChunk;
  for (int32_t panel = 0; panel < columns / kWeightPanelColumns; ++panel) {
    for (int32_t row = 0; row < rows; ++row) {
      Bf16* const target = destination + int64_t{row} * columns + panel * kWeightPanelColumns;
      for (int32_t c = 0; c < kChunks; ++c) {
        std::memcpy(target + c * kChunk, from + (c ^ (row & 7)) * kChunk,
                    kChunk * sizeof(*destination));
      }
      from += kWeightPanelColumns;
    }
  }
}

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_STATE_WEIGHT_PANELS_H_
