// Tests the page work. Internal to self_test.cc.
#ifndef MLA_KERNELS_HIP_SELF_TEST_PAGES_H_
#define MLA_KERNELS_HIP_SELF_TEST_PAGES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/self_test/data.h"
#include "kernels/hip/self_test/plan.h"
#include "kernels/launch_layout.h"
#include "kernels/read_rows.h"

namespace mla::kernels::hip::self_test {

// Checks page work without attention: rows that move and pages that are zeroed, also at unaligned
// places. The rows are then compared with the result.
inline absl::Status CheckPages(AttentionBackend& backend) {
  constexpr int64_t kPage = 14 * kPageGranuleBytes;
  const std::vector<Bf16> kv = Pattern(size_t{3} * kRowDim, 5);
  int32_t differs[3] = {};
  const uint32_t pages[] = {0};
  const TableRange table{0, 1};
  LaunchLayout layout(backend, 0);
  auto rows = layout.Input(kv.data(), static_cast<int64_t>(kv.size() * sizeof(Bf16)));
  auto flags = layout.Output(differs, sizeof(differs));
  if (!rows.ok() || !flags.ok()) return rows.ok() ? flags.status() : rows.status();
  AppendRecord record{*rows, DType::kBf16, kRowDim, 0, 0, kRowBytes, 3, 0, 3, kRowDim};
  Launch launch;
  launch.inputs = layout.inputs();
  launch.page_tables = pages;
  launch.table_changes = {&table, 1};
  launch.appends = {&record, 1};
  MLA_RETURN_IF_ERROR(Run(backend, launch));

  AppendRecord compared = record;
  compared.differs = static_cast<int32_t*>(*flags);
  const PageRange ranges[] = {
      {kPage, 40 * kPage}, {2 * kPage, kPage, 0}, {0, kPage}, {0, 3 * kRowBytes - 2, 2 * kPage}};
  launch.outputs = layout.outputs();
  launch.pages = ranges;
  launch.table_changes = {};
  launch.appends = {&compared, 1};
  MLA_RETURN_IF_ERROR(Run(backend, launch));
  std::vector<Bf16> got(kv.size());
  MLA_RETURN_IF_ERROR(ReadRows(backend, 0, pages, record, got.data()));
  for (size_t i = 0; i < kv.size(); ++i) {
    const Bf16 want = i + 1 < kv.size() ? kv[i] : Bf16{0};
    if (got[i] != want) return Wrong("page work", ToFloat(got[i]), ToFloat(want));
  }
  // The last element was zeroed, so only the last row differs.
  const int32_t found = differs[0] * 4 + differs[1] * 2 + differs[2];
  return found == 1 ? absl::OkStatus() : Wrong("rows sent again, as bits", found, 1);
}

// Checks that the bf16 rows of a launch lie at their layer's place.
inline absl::Status CheckStored(AttentionBackend& backend, const Data& d,
                                std::span<const uint32_t> pages, int64_t layer_offset) {
  AppendRecord stored = {};
  stored.kv_row_stride = stored.row_dim = kRowDim;
  stored.layer_offset = layer_offset;
  stored.row_stride = d.row.row_bytes;
  stored.page_size = d.shape.page_size;
  stored.rows = d.shape.kv_rows;
  std::vector<Bf16> got(d.kv.size());
  absl::Status s = ReadRows(backend, 0, pages, stored, got.data());
  for (size_t i = 0; i < got.size() && s.ok(); ++i) {
    if (got[i] == d.kv[i]) continue;
    s = Wrong(absl::StrCat("stored row ", i / kRowDim), ToFloat(got[i]), ToFloat(d.kv[i]));
  }
  return s;
}

}  // namespace mla::kernels::hip::self_test

#endif  // MLA_KERNELS_HIP_SELF_TEST_PAGES_H_
