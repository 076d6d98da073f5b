#include "kernels/read_rows.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/status_macros.h"
#include "kernels/formats/kv_format.h"
#include "kernels/types/launch.h"

namespace mla::kernels {
namespace {

constexpr size_t kTransfers = 16;  // a launch; every backend's limits allow as many

absl::Status Run(AttentionBackend& backend, int32_t slot,
                 std::span<const PageTransfer> page_reads) {
  Launch launch;
  launch.page_reads = page_reads;
  absl::Status status = backend.Submit(slot, launch);
  return status.ok() ? backend.Wait(slot).status() : status;
}

}  // namespace

absl::Status ReadRows(AttentionBackend& backend, int32_t slot,
                      std::span<const uint32_t> page_tables, const AppendRecord& where, Bf16* out) {
  const KvRowLayout layout =
      MakeKvRowLayout(where.format, where.row_dim - where.rope_dim, where.rope_dim);
  const int64_t scale_bytes = layout.page_scales_bytes;
  // One transfer a page reads all requested rows, and one more their scales if the page keeps
  // scales apart.
  std::vector<std::byte> bytes(static_cast<size_t>(where.rows * where.row_stride));
  std::vector<std::byte> scales(static_cast<size_t>(where.rows * scale_bytes));
  std::vector<PageTransfer> transfers;
  for (int32_t row = 0; row < where.rows;) {
    const int32_t position = where.first_position + row;
    const int32_t in_page = position % where.page_size;
    const int32_t rows = std::min(where.rows - row, where.page_size - in_page);
    const int64_t granule =
        page_tables[static_cast<size_t>(where.page_table + position / where.page_size)];
    const int64_t page = granule * kPageGranuleBytes + where.layer_offset;
    transfers.push_back({page + in_page * where.row_stride, rows * where.row_stride,
                         bytes.data() + row * where.row_stride});
    if (scale_bytes > 0) {
      transfers.push_back({page + where.page_size * where.row_stride + in_page * scale_bytes,
                           rows * scale_bytes, scales.data() + row * scale_bytes});
    }
    row += rows;
  }
  for (size_t done = 0; done < transfers.size(); done += kTransfers) {
    const auto some =
        std::span(transfers).subspan(done, std::min(kTransfers, transfers.size() - done));
    MLA_RETURN_IF_ERROR(Run(backend, slot, some));
  }
  const Fp8Kind kind = backend.Info().fp8;
  const bool scaled = TraitsOf(where.format).scales == KvScales::kLayer;
  const float scale = !scaled                    ? 1.0f
                      : kind == Fp8Kind::kE4m3Fn ? where.kv_scale
                                                 : ScaleToKind(where.kv_scale, kind);
  std::vector<float> values(static_cast<size_t>(where.row_dim));
  for (int32_t row = 0; row < where.rows; ++row, out += where.row_dim) {
    const std::byte* const from = bytes.data() + row * where.row_stride;
    const std::byte* const beside =
        scale_bytes > 0 ? scales.data() + row * scale_bytes : from + layout.scales_at;
    DecodeKvRow(layout, kind, scale, {from, beside}, values.data());
    std::transform(values.begin(), values.end(), out, ToBf16);
  }
  return absl::OkStatus();
}

}  // namespace mla::kernels
