// The kernels around attention: KV append, scrubbing, and the merge of partial tiles.
#ifndef MLA_KERNELS_HIP_COMMON_SMALL_KERNELS_H_
#define MLA_KERNELS_HIP_COMMON_SMALL_KERNELS_H_

#include "kernels/hip/common/memory.h"

namespace mla::gpu {

inline constexpr int kSmallThreads = 256;
inline constexpr int kSmallWaves = kSmallThreads / tile::kWave;

// Index i with first[i] <= x < first[i + 1].
MLA_DEVICE int find_range(const int32_t* first, int count, int x) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] <= x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// One wave a row.
MLA_DEVICE void append_kv(const AppendArgs& args) {
  const int lane = tile::lane_index();
  const int row = block_index() * kSmallWaves + tile::wave_index();
  if (row >= args.first_row[args.count]) return;
  const int index = find_range(args.first_row, args.count, row);
  const AppendRecord& r = args.records[index];
  if (r.first_position < 0) return;
  const int source_row = row - args.first_row[index];
  const PagedRows pages(args.page_tables, r.page_table, args.pool, r.layer_offset, r.row_stride,
                        r.page_size, kernels::kPageGranuleBytes);
  uint8_t* target = const_cast<uint8_t*>(pages.row(r.first_position + source_row));
  const bool f32 = r.dtype == kernels::DType::kF32;
  const bool aligned = aligned_to(r.kv, r.kv_row_stride, 0, 2, 16);
  const int64_t source = source_row * r.kv_row_stride;
  for (int c = lane; c < r.row_dim / 8; c += tile::kWave) {
    const Chunk chunk = load_chunk(r.kv, source + c * 8, f32, aligned);
    store_words(target + c * 16, chunk.w);
  }
}

template <int kStep = tile::kWave / 2>
MLA_DEVICE float wave_max(float x) {
  x = max_f(x, tile::exchange<kStep>(x));
  if constexpr (kStep > 1) return wave_max<kStep / 2>(x);
  return x;
}
template <int kStep = tile::kWave / 2>
MLA_DEVICE float wave_sum(float x) {
  x += tile::exchange<kStep>(x);
  if constexpr (kStep > 1) return wave_sum<kStep / 2>(x);
  return x;
}

// One block merges one packed row. Waves take every kSmallWaves-th part, lanes own columns; the
// waves' sums meet in shared memory.
class Combine {
 public:
  static constexpr int kVectors = 512 / (4 * tile::kWave);  // of 4 columns a lane and window
  static constexpr int kWindow = kVectors * 4 * tile::kWave;
  static constexpr int kSharedBytes = kSmallWaves * kWindow * 4;

  MLA_DEVICE static void run(const CombineArgs& args) {
    const int tile_index = block_index();
    const int begin = args.reduce_indptr[tile_index], end = args.reduce_indptr[tile_index + 1];
    if (begin == end) return;
    const ReduceTile t = args.reduce_final_map[tile_index];
    const int heads = static_cast<int>(t.heads >> 16) - static_cast<int>(t.heads & 0xffffu);
    const int p = block_index_y();
    if (p >= (t.q_end - t.q_begin) * heads) return;
    const RequestRecord& r = args.requests[t.request];
    const int64_t q = t.q_begin + p / heads;
    const int64_t h = static_cast<int>(t.heads & 0xffffu) + p % heads;
    const int32_t* parts = args.reduce_partial_map;
    const int lane = tile::lane_index(), wave = tile::wave_index();
    // Nothing above is written by the attention kernel; only its results are waited for.
    const int own = begin + lane < end ? parts[begin + lane] : 0;
    wait_for_previous_kernel();

    float top = negative_infinity();
    for (int i = begin + lane; i < end; i += tile::kWave) {
      const int64_t part = i == begin + lane ? own : parts[i];
      top = max_f(top, args.partial_lse[part + p]);
    }
    top = wave_max(top);
    const float origin = top == negative_infinity() ? 0.0f : top;
    float sum = 0.0f;
    for (int i = begin + lane; i < end; i += tile::kWave) {
      sum += exp2_fast((args.partial_lse[static_cast<int64_t>(parts[i]) + p] - origin) * kLog2e);
    }
    sum = wave_sum(sum);
    const bool empty = sum == 0.0f;  // NaN parts leave `top` at -inf too, but not the sum
    if (thread_index() == 0 && r.lse != nullptr) {
      r.lse[q * r.lse_row_stride + h * r.lse_head_stride] =
          empty ? negative_infinity() : origin + log2_fast(sum) * kLn2;
    }
    const float inverse = empty ? 0.0f : 1.0f / sum;
    const int64_t index = q * r.o_row_stride + h * r.o_head_stride;
    const int bytes = args.o_is_f32 ? 4 : 2;
    const bool aligned = aligned_to(r.o, r.o_row_stride, r.o_head_stride, bytes, 4 * bytes);
    for (int column = 0; column < args.o_dim; column += kWindow) {
      window(args, begin, end, p, column, origin, inverse, wave, lane);
      for (int at = thread_index() * 4; at < kWindow; at += kSmallThreads * 4) {
        if (column + at < args.o_dim) write(args, r, index, column, at, end - begin, aligned);
      }
      block_barrier();
    }
  }

 private:
  MLA_DEVICE static void window(const CombineArgs& args, int begin, int end, int p, int column,
                                float origin, float inverse, int wave, int lane) {
    float acc[kVectors][4];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[v][j] = 0.0f;
    }
#pragma unroll 4
    for (int i = begin + wave; i < end; i += kSmallWaves) {
      const int64_t row = static_cast<int64_t>(args.reduce_partial_map[i]) + p;
      const float weight = exp2_fast((args.partial_lse[row] - origin) * kLog2e) * inverse;
      const float* o = args.partial_o + row * args.o_dim + column;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int c = (v * tile::kWave + lane) * 4;
        if (column + c >= args.o_dim) continue;
        uint32_t x[4];
        load_words(x, o + c);
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[v][j] = fma_f(weight, bits_to_float(x[j]), acc[v][j]);
      }
    }
    const tile::lds_t sums = tile::shared_base<kSharedBytes>() + wave * (kWindow * 4);
    if (wave >= end - begin) {  // had no part
      block_barrier();
      return;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        tile::store_float(sums + ((v * tile::kWave + lane) * 4 + j) * 4, acc[v][j]);
      }
    }
    block_barrier();
  }

  MLA_DEVICE static void write(const CombineArgs& args, const RequestRecord& r, int64_t index,
                               int column, int at, int parts, bool aligned) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kSmallWaves; ++w) {
      if (w >= parts) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] += tile::load_float(tile::shared_base<kSharedBytes>() + (w * kWindow + at + j) * 4);
      }
    }
    store_run(r.o, index + column + at, x, args.o_is_f32 != 0, aligned);
  }
};

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_COMMON_SMALL_KERNELS_H_
