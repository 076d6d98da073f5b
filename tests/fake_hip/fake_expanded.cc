// The expanded form's kernels: up-projection into the workspace, attention on it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/hip/common/expanded_args.h"
#include "kernels/hip/common/kernel_args.h"
#include "tests/fake_hip/fake_kernels.h"

namespace mla::fake_hip {
namespace {

using kernels::Bf16;
using kernels::RequestRecord;
using kernels::ToBf16;
using kernels::ToFloat;

constexpr int kLora = gpu::kExpandedLora;
constexpr int kNope = gpu::kExpandedNope;
constexpr int kRope = gpu::kExpandedRope;
constexpr int kValue = gpu::kExpandedValue;

// Element (row, column) of a panel whose row 0 is at `panel`.
uint8_t* Element(uint8_t* panel, int row, int column) {
  const int chunk = (column / 8) ^ (row % 8);
  return panel + int64_t{row} * gpu::kPanelRowBytes + chunk * 16 + column % 8 * 2;
}

void Put(uint8_t* panel, int row, int column, Bf16 x) {
  std::memcpy(Element(panel, row, column), &x, sizeof(x));
}
float Get(const uint8_t* panel, int row, int column) {
  Bf16 x;
  std::memcpy(&x, Element(const_cast<uint8_t*>(panel), row, column), sizeof(x));
  return ToFloat(x);
}

int64_t PanelBytes(const gpu::ExpandSegment& s) {
  return int64_t{s.padded_rows} * gpu::kPanelRowBytes;
}
// Of the head's first panel; one past the last head: of the rotated part.
uint8_t* HeadAt(const gpu::ExpandArgs& a, const gpu::ExpandSegment& s, int head) {
  return a.workspace + s.base + head * (gpu::kPanelsPerHead * PanelBytes(s) + gpu::kRestBytes);
}

struct Pair {
  const gpu::ExpandSegment& segment;
  int tile, head;
};

void ExpandRow(const gpu::ExpandArgs& a, const Pair& pair, int row, const Bf16* cached) {
  const gpu::ExpandSegment& s = pair.segment;
  const RequestRecord& r = a.requests[s.request];
  const int64_t panel_bytes = PanelBytes(s);
  uint8_t* head = HeadAt(a, s, pair.head);
  const int64_t model_head = r.head_offset + s.head_begin + pair.head;
  const uint16_t* w_uk = a.w_uk[r.weights_slot] + model_head * kNope * kLora;
  const uint16_t* w_uv = a.w_uv[r.weights_slot] + model_head * kLora * kValue;
  std::vector<float> latent(kLora, 0.0f), value(kValue, 0.0f);
  for (int c = 0; c < kLora && cached != nullptr; ++c) {
    latent[c] = ToFloat(cached[c]);
    for (int v = 0; v < kValue; ++v) value[v] += latent[c] * ToFloat(w_uv[c * kValue + v]);
  }
  for (int n = 0; n < kNope; ++n) {
    constexpr int kLanes = 16;  // sums side by side, which the compiler can make a vector
    float sums[kLanes] = {};
    for (int c = 0; c < kLora && cached != nullptr; c += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        sums[i] += latent[c + i] * ToFloat(w_uk[n * kLora + c + i]);
      }
    }
    float key = 0.0f;
    for (const float sum : sums) key += sum;
    Put(head + n / 64 * panel_bytes, row, n % 64, ToBf16(key));
  }
  for (int v = 0; v < kValue; ++v) {
    const bool kept = cached != nullptr && std::isfinite(value[v]);
    const Bf16 rounded = kept ? ToBf16(value[v]) : Bf16{0};
    Put(head + (kNope + v) / 64 * panel_bytes, row, v % 64, rounded);
    if (s.kv_begin > 0 || pair.tile > 0) continue;
    Put(head + gpu::kPanelsPerHead * panel_bytes + v / 64 * gpu::kRestPanelBytes, row, v % 64,
        kept ? ToBf16(value[v] - ToFloat(rounded)) : Bf16{0});
  }
}

void ExpandPair(const gpu::ExpandArgs& a, const Pair& pair) {
  const gpu::ExpandSegment& s = pair.segment;
  const RequestRecord& r = a.requests[s.request];
  for (int i = 0; i < gpu::kExpandedRows; ++i) {
    const int row = pair.tile * gpu::kExpandedRows + i;
    const Bf16* cached = nullptr;  // past the segment: zeros
    if (row < s.rows) {
      const int position = s.kv_begin + row;
      const int64_t entry = a.page_tables[r.page_table + position / r.page_size];
      cached = reinterpret_cast<const Bf16*>(a.pool + entry * a.granule_bytes + r.layer_offset +
                                             position % r.page_size * r.row_stride);
    }
    ExpandRow(a, pair, row, cached);
    if (pair.head != 0) continue;
    uint8_t* rotated = HeadAt(a, s, s.heads);
    for (int c = 0; c < kRope; ++c) {
      Put(rotated, row, c, cached == nullptr ? Bf16{0} : cached[kLora + c]);
    }
  }
}

struct RowSums {
  std::vector<double> o = std::vector<double>(kValue, 0.0);
  double top = -INFINITY, sum = 0.0;
};

// As if one key of the carried log-sum-exp and value had been seen.
RowSums Carried(const gpu::ExpandedArgs& a, int64_t row) {
  RowSums sums;
  if (a.partial_lse[row] == -INFINITY) return sums;
  sums.top = a.partial_lse[row];
  sums.sum = 1.0;
  std::copy_n(a.partial_o + row * kValue, kValue, sums.o.begin());
  return sums;
}

void AttendRow(const gpu::ExpandedArgs& a, const gpu::ExpandedItem& e, int q, RowSums& sums) {
  const RequestRecord& r = a.requests[e.work.request];
  const int seen = r.causal ? r.kv_rows - r.q_rows + q + 1 : e.work.kv_end;
  const int rows = std::min(seen, e.work.kv_end) - e.work.kv_begin;
  const auto* query =
      static_cast<const Bf16*>(r.q) + q * r.q_row_stride + e.work.head_begin() * r.q_head_stride;
  const uint8_t* keys = a.workspace + e.keys;
  const uint8_t* rests = keys + gpu::kPanelsPerHead * e.panel_bytes;
  const int first_sees = r.causal ? r.kv_rows - r.q_rows + e.work.q_begin + 1 : e.work.kv_end;
  const bool few = e.work.kv_begin == 0 && std::min(first_sees, e.work.kv_end) <= gpu::kFewKeys;
  for (int j = 0; j < rows; ++j) {
    double dot = 0.0;
    for (int c = 0; c < kNope; ++c) {
      dot += double{ToFloat(query[c])} * Get(keys + c / 64 * e.panel_bytes, j, c % 64);
    }
    for (int c = 0; c < kRope; ++c) {
      dot += double{ToFloat(query[kNope + c])} * Get(a.workspace + e.rotated, j, c);
    }
    const double logit = dot * r.softmax_scale;
    const double top = logit > sums.top ? logit : sums.top;
    const double origin = top == -INFINITY ? 0.0 : top;
    const double factor = std::exp(sums.top - origin), p = std::exp(logit - origin);
    sums.top = top;
    sums.sum = sums.sum * factor + p;
    for (int v = 0; v < kValue; ++v) {
      double x = Get(keys + (kNope + v) / 64 * e.panel_bytes, j, v % 64);
      if (few && j < gpu::kFewKeys) x += Get(rests + v / 64 * gpu::kRestPanelBytes, j, v % 64);
      sums.o[v] = sums.o[v] * factor + p * x;
    }
  }
}

void StoreRow(const gpu::ExpandedArgs& a, const gpu::ExpandedItem& e, int q, const RowSums& sums) {
  const RequestRecord& r = a.requests[e.work.request];
  const bool empty = sums.sum == 0.0;
  const int64_t head = e.work.head_begin();
  const int64_t index = q * r.o_row_stride + head * r.o_head_stride;
  const auto lse = static_cast<float>(empty ? -INFINITY : sums.top + std::log(sums.sum));
  const int64_t partial = int64_t{e.work.partial_row} + q - e.work.q_begin;
  for (int v = 0; v < kValue; ++v) {
    const auto x = static_cast<float>(empty ? 0.0 : sums.o[v] / sums.sum);
    if (e.work.partial_row >= 0) {
      a.partial_o[partial * kValue + v] = x;
    } else if (a.o_is_f32 != 0) {
      static_cast<float*>(r.o)[index + v] = x;
    } else {
      static_cast<Bf16*>(r.o)[index + v] = ToBf16(x);
    }
  }
  if (e.work.partial_row >= 0) {
    a.partial_lse[partial] = lse;
  } else if (r.lse != nullptr) {
    r.lse[q * r.lse_row_stride + head * r.lse_head_stride] = lse;
  }
}

}  // namespace

void RunExpand(const gpu::ExpandArgs& a, uint32_t blocks) {
  for (uint32_t block = 0; block < blocks; ++block) {
    const auto first = static_cast<int>(int64_t{a.pairs} * block / a.blocks);
    const auto last = static_cast<int>(int64_t{a.pairs} * (block + 1) / a.blocks);
    for (int pair = first; pair < last; ++pair) {
      int index = 0;
      while (index + 1 < a.segment_count && a.segments[index + 1].first_pair <= pair) ++index;
      const gpu::ExpandSegment& s = a.segments[index];
      const int inside = pair - s.first_pair;
      ExpandPair(a, {s, inside / s.heads, inside % s.heads});
    }
  }
}

void RunAttendExpanded(const gpu::ExpandedArgs& a, uint32_t blocks, Flaw flaw) {
  for (uint32_t block = 0; block < blocks; ++block) {
    RowSums before;
    for (int i = a.unit_indptr[block]; i < a.unit_indptr[block + 1]; ++i) {
      const gpu::ExpandedItem& e = a.items[i];
      if (flaw == Flaw::kThirdItem && i >= a.unit_indptr[block] + 2) continue;
      for (int q = e.work.q_begin; q < e.work.q_end; ++q) {
        RowSums sums;
        if (e.carried_row >= 0) sums = Carried(a, int64_t{e.carried_row} + q - e.work.q_begin);
        if (flaw == Flaw::kCarriedWrong && i > a.unit_indptr[block]) sums = before;
        AttendRow(a, e, flaw == Flaw::kSecondTile && q >= 128 ? q - 128 : q, sums);
        StoreRow(a, e, q, sums);
        before = sums;
      }
    }
  }
}

}  // namespace mla::fake_hip
