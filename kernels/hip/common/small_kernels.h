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

// Merges packed rows, waves_per_row waves each: few parts of many rows want many rows at a time,
// many parts of few rows want many waves. Waves of a row take every waves_per_row-th part, lanes
// own columns; the waves' sums meet in shared memory.
class Combine {
 public:
  static constexpr int kVectors = 512 / (4 * tile::kWave);  // of 4 columns a lane and window
  static constexpr int kWindow = kVectors * 4 * tile::kWave;
  static constexpr int kSharedBytes = kSmallWaves * kWindow * 4;

  MLA_DEVICE static void run(const CombineArgs& args) {
    const int tile_index = block_index();
    const int begin = args.reduce_indptr[tile_index];
    const int count = args.reduce_indptr[tile_index + 1] - begin;
    const ReduceTile t = args.reduce_final_map[tile_index];
    const int heads = static_cast<int>(t.heads >> 16) - static_cast<int>(t.heads & 0xffffu);
    const int rows = (t.q_end - t.q_begin) * heads;
    const int first = block_index_y() * (kSmallWaves / args.waves_per_row);
    if (count == 0 || first >= rows) return;
    const int p = first + tile::wave_index() / args.waves_per_row;
    Combine self(args, args.reduce_partial_map + begin, count, p < rows ? p : 0);
    // Nothing so far is written by the attention kernel; only its results are waited for.
    const int own = self.part(0);
    wait_for_previous_kernel();
    self.weigh(own);
    const RequestRecord& r = args.requests[t.request];
    const int64_t q = t.q_begin + self.p / heads;
    const int64_t h = static_cast<int>(t.heads & 0xffffu) + self.p % heads;
    self.merge(r, q, h, own, p < rows);
  }

 private:
  MLA_DEVICE Combine(const CombineArgs& a, const int32_t* parts_at, int part_count, int row)
      : args(a),
        parts(parts_at),
        count(part_count),
        p(row),
        lane(tile::lane_index()),
        wave(tile::wave_index() % a.waves_per_row) {}

  // First partial row of this lane's part of those from `at` on.
  MLA_DEVICE int part(int at) const { return at + lane < count ? parts[at + lane] : 0; }
  MLA_DEVICE float lse(int at, int part_row) const {
    return at + lane < count ? args.partial_lse[static_cast<int64_t>(part_row) + p]
                             : negative_infinity();
  }

  // The row's maximum and sum, over all parts.
  MLA_DEVICE void weigh(int own) {
    own_lse = lse(0, own);
    float top = own_lse;
    for (int at = tile::kWave; at < count; at += tile::kWave) top = max_f(top, lse(at, part(at)));
    top = wave_max(top);
    origin = top == negative_infinity() ? 0.0f : top;
    float sum = weight(own_lse);
    for (int at = tile::kWave; at < count; at += tile::kWave) sum += weight(lse(at, part(at)));
    sum = wave_sum(sum);
    empty = sum == 0.0f;  // NaN parts leave `top` at -inf too, but not the sum
    inverse = empty ? 0.0f : 1.0f / sum;
    total_lse = empty ? negative_infinity() : origin + log2_fast(sum) * kLn2;
  }
  MLA_DEVICE float weight(float part_lse) const { return exp2_fast((part_lse - origin) * kLog2e); }

  MLA_DEVICE void merge(const RequestRecord& r, int64_t q, int64_t h, int own, bool mine) const {
    if (mine && wave == 0 && lane == 0 && r.lse != nullptr) {
      r.lse[q * r.lse_row_stride + h * r.lse_head_stride] = total_lse;
    }
    const int64_t index = q * r.o_row_stride + h * r.o_head_stride;
    const int bytes = args.o_is_f32 ? 4 : 2;
    const bool aligned = aligned_to(r.o, r.o_row_stride, r.o_head_stride, bytes, 4 * bytes);
    for (int column = 0; column < args.o_dim; column += kWindow) {
      float acc[kVectors][4];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[v][j] = 0.0f;
      }
      for (int at = 0; at < count; at += tile::kWave) {
        const int rows = at == 0 ? own : part(at);
        const float w = weight(at == 0 ? own_lse : lse(at, rows)) * inverse;
        const int here = count - at < tile::kWave ? count - at : tile::kWave;
        add_parts(acc, rows, w, here, column);
      }
      if (args.waves_per_row > 1) add_waves(acc);
      if (!mine || wave != 0) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int c = column + (v * tile::kWave + lane) * 4;
        if (c < args.o_dim) store_run(r.o, index + c, acc[v], args.o_is_f32 != 0, aligned);
      }
    }
  }

  // Adds this wave's share of `here` parts, of which lane i holds first row and weight of part i.
  MLA_DEVICE void add_parts(float (&acc)[kVectors][4], int rows, float weights, int here,
                            int column) const {
#if !defined(__HIP__)
#pragma unroll 2
#endif
    for (int i = wave; i < here; i += args.waves_per_row) {
      const float w = tile::broadcast(weights, i);
      const int64_t row = static_cast<int64_t>(float_to_bits(
                              tile::broadcast(bits_to_float(static_cast<uint32_t>(rows)), i))) +
                          p;
      const float* o = args.partial_o + row * args.o_dim + column;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int c = (v * tile::kWave + lane) * 4;
        if (column + c >= args.o_dim) continue;
        uint32_t x[4];
        load_words(x, o + c);
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[v][j] = fma_f(w, bits_to_float(x[j]), acc[v][j]);
      }
    }
  }

  // Sums of a row's waves, to the first of them.
  MLA_DEVICE void add_waves(float (&acc)[kVectors][4]) const {
    const tile::lds_t sums =
        tile::shared_base<kSharedBytes>() + tile::wave_index() * (kWindow * 4) + lane * 16;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Chunk c;
#pragma unroll
      for (int j = 0; j < 4; ++j) c.w[j] = float_to_bits(acc[v][j]);
      tile::store_chunk(sums + v * (tile::kWave * 16), c);
    }
    block_barrier();
    const int others = wave == 0 ? args.waves_per_row : 0;
    for (int w = 1; w < others; ++w) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const Chunk c = tile::load_chunk_shared(sums + w * (kWindow * 4) + v * (tile::kWave * 16));
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[v][j] += bits_to_float(c.w[j]);
      }
    }
    block_barrier();
  }

  const CombineArgs& args;
  const int32_t* parts;  // of this row's tile
  int count, p;
  int lane, wave;  // the wave's number among those of its row
  float own_lse, origin, inverse, total_lse;
  bool empty;
};

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_COMMON_SMALL_KERNELS_H_
