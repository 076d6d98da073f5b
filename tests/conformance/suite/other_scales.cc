#include "tests/conformance/suite/other_scales.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "kernels/formats/kv_format.h"
#include "kernels/types/launch.h"

namespace mla::conformance {
namespace {

using kernels::Launch;
using kernels::PageTransfer;

constexpr size_t kTransfers = 16;  // a launch; every backend's limits allow as many

absl::Status Run(kernels::AttentionBackend& backend, int32_t slot,
                 std::vector<PageTransfer>& transfers,
                 std::span<const PageTransfer> Launch::*list) {
  for (size_t done = 0; done < transfers.size(); done += kTransfers) {
    Launch launch;
    launch.*list =
        std::span(transfers).subspan(done, std::min(kTransfers, transfers.size() - done));
    absl::Status status = backend.Submit(slot, launch);
    if (status.ok()) status = backend.Wait(slot).status();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

float Factor(int32_t position, int32_t group) {
  if (position % 11 == 5 && group == position % 4) return 0.0f;
  if (position % 5 == 1) return 1.0f;
  const int32_t of_group = position % 3 == 0 ? 0 : group;
  return 1.0f + static_cast<float>((position * 7 + of_group * 3) % 16) / 16.0f;
}

// A number that is not a valid scale, of one kind or another.
float Invalid(int32_t kind) {
  constexpr float kInvalid[] = {std::numeric_limits<float>::quiet_NaN(),
                                std::numeric_limits<float>::infinity(), -1.0f, -0x1p-140f};
  return kInvalid[static_cast<size_t>(kind) % std::size(kInvalid)];
}

}  // namespace

absl::Status ChangeScales(kernels::AttentionBackend& backend, int32_t slot,
                          std::span<const uint32_t> page_tables, const kernels::AppendRecord& where,
                          bool last_invalid) {
  const kernels::KvRowLayout layout =
      kernels::MakeKvRowLayout(where.format, where.row_dim - where.rope_dim, where.rope_dim);
  std::vector<std::byte> bytes(static_cast<size_t>(where.rows * where.row_stride));
  std::vector<PageTransfer> transfers;
  for (int32_t row = 0; row < where.rows;) {
    const int32_t position = where.first_position + row;
    const int32_t in_page = position % where.page_size;
    const int32_t rows = std::min(where.rows - row, where.page_size - in_page);
    const int64_t granule =
        page_tables[static_cast<size_t>(where.page_table + position / where.page_size)];
    transfers.push_back(
        {granule * kernels::kPageGranuleBytes + where.layer_offset + in_page * where.row_stride,
         rows * where.row_stride, bytes.data() + row * where.row_stride});
    row += rows;
  }
  if (absl::Status read = Run(backend, slot, transfers, &Launch::page_reads); !read.ok()) {
    return read;
  }
  for (int32_t row = 0; row < where.rows; ++row) {
    for (int32_t group = 0; group < layout.groups; ++group) {
      std::byte* const at = bytes.data() + row * where.row_stride + layout.scales_at + group * 4;
      float scale;
      std::memcpy(&scale, at, sizeof(scale));
      scale *= Factor(where.first_position + row, group);
      if (last_invalid && row == where.rows - 1 && group == 0) scale = Invalid(where.rows);
      std::memcpy(at, &scale, sizeof(scale));
    }
  }
  return Run(backend, slot, transfers, &Launch::page_writes);
}

}  // namespace mla::conformance
