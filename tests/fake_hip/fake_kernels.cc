#include "tests/fake_hip/fake_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/hip/arch_traits.h"
#include "kernels/hip/common/kernel_args.h"

namespace mla::fake_hip {
namespace {

using kernels::Bf16;
using kernels::DType;
using kernels::ToBf16;
using kernels::ToFloat;

constexpr double kNever = -std::numeric_limits<double>::infinity();

float Load(const void* base, int64_t index, bool is_f32) {
  return is_f32 ? static_cast<const float*>(base)[index]
                : ToFloat(static_cast<const Bf16*>(base)[index]);
}

void Store(void* base, int64_t index, bool is_f32, float x) {
  if (is_f32) {
    static_cast<float*>(base)[index] = x;
  } else {
    static_cast<Bf16*>(base)[index] = ToBf16(x);
  }
}

// Address of a row of a sequence, as the kernels find it.
template <class Record>
uint8_t* RowAt(const uint8_t* pool, const uint32_t* tables, const Record& r, int position,
               int64_t granule) {
  const int64_t entry = tables[r.page_table + position / r.page_size];
  return const_cast<uint8_t*>(pool) + entry * granule + r.layer_offset +
         (position % r.page_size) * r.row_stride;
}

// Last range first: the device may take them in any order.
void Move(const gpu::MoveArgs& a) {
  for (int i = a.count - 1; i >= 0; --i) {
    const gpu::MoveRange& r = a.ranges[i];
    const int64_t chunks = a.first_chunk[i + 1] - a.first_chunk[i];
    const auto bytes = static_cast<size_t>(std::min(r.bytes, chunks * gpu::kMoveChunkBytes));
    if (r.from == nullptr) {
      std::memset(r.to, 0, bytes);
    } else {
      std::memcpy(r.to, r.from, bytes);
    }
  }
}

void Append(const gpu::AppendArgs& a) {
  for (int i = 0; i < a.count; ++i) {
    const kernels::AppendRecord& r = a.records[i];
    if (r.first_position < 0) continue;
    for (int row = 0; row < a.first_row[i + 1] - a.first_row[i]; ++row) {
      uint8_t* target =
          RowAt(a.pool, a.page_tables, r, r.first_position + row, kernels::kPageGranuleBytes);
      for (int c = 0; c < r.row_dim; ++c) {
        const int64_t index = row * r.kv_row_stride + c;
        const Bf16 stored = kernels::Stored(r.dtype == DType::kBf16
                                                ? static_cast<const Bf16*>(r.kv)[index]
                                                : ToBf16(static_cast<const float*>(r.kv)[index]));
        std::memcpy(target + c * 2, &stored, 2);
      }
    }
  }
}

constexpr int kLora = 512;
constexpr int kDim = 576;

// One packed row of a work item over its KV range: normalised output and log-sum-exp.
struct RowResult {
  std::vector<double> o = std::vector<double>(kLora, 0.0);
  double lse = kNever;
};

RowResult AttendRow(const gpu::AttendArgs& a, const kernels::WorkInfo& w, int q, int h, Flaw flaw) {
  kernels::RequestRecord r = a.requests[w.request];
  if (flaw == Flaw::kOddPages && r.page_size == 3) r.page_size = 4;
  const auto key = [&](int j) {
    const int late = flaw == Flaw::kLateTile ? w.kv_begin + (j - w.kv_begin) % (11 * 64) : j;
    return reinterpret_cast<const Bf16*>(RowAt(a.pool, a.page_tables, r, late, a.granule_bytes));
  };
  const auto value = [flaw](Bf16 x) {
    const float wide = ToFloat(x);
    return flaw == Flaw::kNaNAsZero && std::isnan(wide) ? 0.0f : wide;
  };
  const int seen = r.causal ? r.kv_rows - r.q_rows + q + 1 : w.kv_end;
  const auto* query = static_cast<const Bf16*>(r.q) + q * r.q_row_stride + h * r.q_head_stride;
  std::vector<double> logits;
  double top = kNever;
  for (int j = w.kv_begin; j < std::min(seen, w.kv_end); ++j) {
    const Bf16* const row = key(j);
    double dot = 0.0;
    for (int c = 0; c < kDim; ++c) dot += double{ToFloat(query[c])} * value(row[c]);
    logits.push_back(dot * r.softmax_scale);
    if (!(logits.back() <= top)) top = logits.back();
  }
  RowResult result;
  const double origin = top == kNever ? 0.0 : top;  // all logits -inf: nothing was seen
  double sum = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - origin);
    sum += p;
    const Bf16* const row = key(w.kv_begin + static_cast<int>(i));
    for (int c = 0; c < kLora; ++c) result.o[c] += p * value(row[c]);
  }
  if (sum == 0.0) return RowResult();
  for (double& x : result.o) x /= sum;
  result.lse = origin + std::log(sum);
  return result;
}

// Where column c lies in a partial row: see AttendVariant::exchanged_partials.
int PartialColumn(int c, bool exchanged) {
  return exchanged ? c / 16 * 16 + c % 8 / 2 * 4 + c / 8 % 2 * 2 + c % 2 : c;
}

void AttendItem(const gpu::AttendArgs& a, const kernels::WorkInfo& w, int first, int last,
                bool exchanged, Flaw flaw) {
  const kernels::RequestRecord& r = a.requests[w.request];
  const int heads = w.head_end() - w.head_begin();
  for (int p = first; p < last; ++p) {
    const int q = w.q_begin + p / heads, h = w.head_begin() + p % heads;
    const RowResult result = AttendRow(a, w, q, h, flaw);
    const bool split = w.partial_row >= 0;
    const int64_t row = int64_t{w.partial_row} + p;
    void* o = split ? static_cast<void*>(a.partial_o) : r.o;
    const int64_t index = split ? row * kLora : q * r.o_row_stride + h * r.o_head_stride;
    for (int c = 0; c < kLora; ++c) {
      Store(o, index + PartialColumn(c, split && exchanged), split || a.o_is_f32,
            static_cast<float>(result.o[c]));
    }
    const auto lse = static_cast<float>(result.lse);
    if (split) {
      a.partial_lse[row] = lse;
    } else if (r.lse != nullptr) {
      r.lse[q * r.lse_row_stride + h * r.lse_head_stride] = lse;
    }
  }
}

void Attend(const gpu::AttendArgs& a, uint32_t blocks, int rows, bool exchanged, Flaw flaw) {
  for (uint32_t block = 0; block < blocks; ++block) {
    const int unit = static_cast<int>(block) / a.blocks_per_unit;
    const int share = static_cast<int>(block) % a.blocks_per_unit;
    for (int i = a.work_indptr[unit]; i < a.work_indptr[unit + 1]; ++i) {
      const kernels::WorkInfo& w = a.work_info[i];
      if (flaw == Flaw::kThirdItem && i >= a.work_indptr[unit] + 2) continue;
      if (flaw == Flaw::kNoKeys && w.kv_begin == w.kv_end) continue;
      const int packed = (w.q_end - w.q_begin) * (w.head_end() - w.head_begin());
      AttendItem(a, w, share * rows, std::min(packed, (share + 1) * rows), exchanged, flaw);
    }
  }
}

void CombineRow(const gpu::CombineArgs& a, int tile, int p) {
  const kernels::ReduceTile& t = a.reduce_final_map[tile];
  const int heads = t.head_end() - t.head_begin();
  if (p >= (t.q_end - t.q_begin) * heads) return;
  const kernels::RequestRecord& r = a.requests[t.request];
  const int64_t q = t.q_begin + p / heads, h = t.head_begin() + p % heads;
  const int begin = a.reduce_indptr[tile], end = a.reduce_indptr[tile + 1];
  if (begin == end) return;
  double top = kNever, sum = 0.0;
  for (int i = begin; i < end; ++i) {
    const double lse = a.partial_lse[a.reduce_partial_map[i] + p];
    if (!(lse <= top)) top = lse;
  }
  std::vector<double> o(a.o_dim, 0.0);
  for (int i = begin; i < end && top != kNever; ++i) {
    const int64_t row = int64_t{a.reduce_partial_map[i]} + p;
    const double weight = std::exp(a.partial_lse[row] - top);
    sum += weight;
    for (int c = 0; c < a.o_dim; ++c) {
      o[c] += weight * a.partial_o[row * a.o_dim + PartialColumn(c, a.exchanged != 0)];
    }
  }
  for (int c = 0; c < a.o_dim; ++c) {
    Store(r.o, q * r.o_row_stride + h * r.o_head_stride + c, a.o_is_f32,
          sum == 0.0 ? 0.0f : static_cast<float>(o[c] / sum));
  }
  if (r.lse != nullptr) {
    r.lse[q * r.lse_row_stride + h * r.lse_head_stride] =
        static_cast<float>(sum == 0.0 ? kNever : top + std::log(sum));
  }
}

void ProjectHead(const gpu::ProjectArgs& a, const gpu::ProjectTile& tile, const gpu::ProjectRow& r,
                 int h, bool rounded) {
  const uint16_t* w =
      a.weights[tile.weights_slot] + static_cast<int64_t>(tile.head_offset + h) * a.k * a.n;
  const int64_t in = h * r.in_head_stride, out = h * r.out_head_stride;
  for (int c = 0; c < a.n; ++c) {
    double sum = 0.0;
    for (int k = 0; k < a.k; ++k) {
      const float x = Load(r.in, in + k, a.in_is_f32);
      sum += double{rounded ? ToFloat(ToBf16(x)) : x} * ToFloat(w[int64_t{k} * a.n + c]);
    }
    Store(r.out, out + c, a.out_is_f32, static_cast<float>(sum));
  }
  for (int c = 0; c < a.copy; ++c) {
    Store(r.out, out + a.n + c, a.out_is_f32, Load(r.in, in + a.k + c, a.in_is_f32));
  }
}

void Project(const gpu::ProjectArgs& a, const Grid& grid) {
  const int blocks = (a.n + gpu::kProjectCols - 1) / gpu::kProjectCols;
  for (uint32_t t = 0; t < grid.x; ++t) {
    const gpu::ProjectTile& tile = a.tiles[t];
    for (int p = 0; p < tile.rows; ++p) {
      for (int h = 0; h < std::min<int>(tile.num_heads, grid.y / blocks); ++h) {
        ProjectHead(a, tile, a.rows[tile.first_row + p], h, grid.rounded_inputs);
      }
    }
  }
}

int AttendRows(const std::string& kernel) {
  const std::string prefix = gpu::kAttendPrefix;
  return kernel.starts_with(prefix) ? std::atoi(kernel.c_str() + prefix.size()) : 0;
}

}  // namespace

size_t ArgumentBytes(const std::string& kernel) {
  if (kernel == gpu::kMoveKernel) return sizeof(gpu::MoveArgs);
  if (kernel == gpu::kAppendKernel) return sizeof(gpu::AppendArgs);
  if (kernel == gpu::kCombineKernel) return sizeof(gpu::CombineArgs);
  if (kernel == gpu::kProjectKernel) return sizeof(gpu::ProjectArgs);
  if (kernel == gpu::kExpandKernel) return sizeof(gpu::ExpandArgs);
  if (kernel == gpu::kExpandedKernel) return sizeof(gpu::ExpandedArgs);
  return AttendRows(kernel) > 0 ? sizeof(gpu::AttendArgs) : 0;
}

void RunKernel(const std::string& kernel, const Grid& grid, const void* args) {
  if (kernel == gpu::kMoveKernel) {
    Move(*static_cast<const gpu::MoveArgs*>(args));
  } else if (kernel == gpu::kAppendKernel) {
    Append(*static_cast<const gpu::AppendArgs*>(args));
  } else if (kernel == gpu::kCombineKernel) {
    const auto& combine = *static_cast<const gpu::CombineArgs*>(args);
    const uint32_t rows = grid.y / static_cast<uint32_t>(combine.column_blocks) *
                          (grid.waves / static_cast<uint32_t>(combine.waves_per_row));
    for (uint32_t tile = 0; tile < grid.x; ++tile) {
      for (uint32_t p = 0; p < rows; ++p) {
        CombineRow(combine, static_cast<int>(tile), static_cast<int>(p));
      }
    }
  } else if (kernel == gpu::kProjectKernel) {
    Project(*static_cast<const gpu::ProjectArgs*>(args), grid);
  } else if (kernel == gpu::kExpandKernel) {
    RunExpand(*static_cast<const gpu::ExpandArgs*>(args), grid.x);
  } else if (kernel == gpu::kExpandedKernel) {
    RunAttendExpanded(*static_cast<const gpu::ExpandedArgs*>(args), grid.x, grid.flaw);
  } else {
    // Told from kernels of other architectures by the size of its blocks.
    const gpu::AttendVariant& wide = gpu::kSm90Traits.attend[1];
    const bool exchanged =
        wide.exchanged_partials && static_cast<int>(grid.waves) * 32 == wide.threads;
    Attend(*static_cast<const gpu::AttendArgs*>(args), grid.x, AttendRows(kernel), exchanged,
           grid.flaw);
  }
}

}  // namespace mla::fake_hip
