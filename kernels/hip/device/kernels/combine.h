// The kernel that merges the partial results of split tiles.
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_COMBINE_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_COMBINE_H_

#include "kernels/hip/device/primitives/block.h"

namespace mla::kernels::hip {

// Merges packed rows, waves_per_row waves each. Few parts of many rows need many rows at a time;
// many parts of few rows need many waves, and column_blocks blocks for each row as well. Each wave
// of a row adds every waves_per_row-th part with its weight; lanes own columns. Sums of the waves
// are added up in shared memory.
class Combine {
 public:
  static constexpr int kVectors = 512 / (4 * tile::kWave);  // of 4 columns, a lane and window
  static constexpr int kWindow = kVectors * 4 * tile::kWave;
  static constexpr int kStatisticsBytes = 128;  // top and sum of each wave
  static constexpr int kSharedBytes = kStatisticsBytes + kSmallWaves * kWindow * 4;

  MLA_DEVICE static void run(const CombineArgs& args) {
    let_next_kernel_start();
    const int tile_index = block_index();
    const int begin = args.reduce_indptr[tile_index];
    const int count = args.reduce_indptr[tile_index + 1] - begin;
    const ReduceTile t = args.reduce_final_map[tile_index];
    const int heads = static_cast<int>(t.heads >> 16) - static_cast<int>(t.heads & 0xffffu);
    const int rows = (t.q_end - t.q_begin) * heads;
    const int group = block_index_y() / args.column_blocks;
    const int first = group * (kSmallWaves / args.waves_per_row);
    if (count == 0 || first >= rows) return;
    const int p = first + tile::wave_index() / args.waves_per_row;
    const bool mine = p < rows;
    const Combine self(args, args.reduce_partial_map + begin, count, mine ? p : 0);
    const int own = self.part(0);
    const Target target(args, t.segment, t.q_begin + self.p / heads,
                        static_cast<int>(t.heads & 0xffffu) + self.p % heads);
    const int column_block = block_index_y() - group * args.column_blocks;
    // The attention kernel writes nothing read so far; only its results are waited for.
    wait_for_previous_kernel();
    if (args.column_blocks == 1) {
      self.merge<kVectors>(target, own, mine, 0);
    } else {
      self.merge<1>(target, own, mine, column_block);
    }
  }

 private:
  // Names the memory that receives a row's results.
  struct Target {
    void* o;
    float* lse;
    const float* sink;  // null: no sink
    bool aligned;       // to four results

    MLA_DEVICE Target(const CombineArgs& args, int segment, int64_t q, int64_t h) {
      const SegmentRecord& r = args.segments[segment];
      const float* const sinks = args.windows == nullptr ? nullptr : args.windows[segment].sinks;
      sink = sinks == nullptr ? nullptr : sinks + h;
      const int bytes = args.o_is_f32 ? 4 : 2;
      o = static_cast<uint8_t*>(r.o) + (q * r.o_row_stride + h * r.o_head_stride) * bytes;
      lse = r.lse == nullptr ? nullptr : r.lse + q * r.lse_row_stride + h * r.lse_head_stride;
      aligned = aligned_to(o, 0, 0, bytes, 4 * bytes);
    }
  };

  // The merged parts so far: the largest LSE, and sums weighted by exp(lse - origin).
  template <int kCount>
  struct Sums {
    float acc[kCount][4] = {};
    float top = negative_infinity();
    float sum = 0.0f;
    // NaN parts also leave `top` at -inf, but make the sum NaN.
    MLA_DEVICE float origin() const { return top == negative_infinity() ? 0.0f : top; }
  };

  MLA_DEVICE Combine(const CombineArgs& a, const int32_t* parts_at, int part_count, int row)
      : args(a),
        parts(parts_at),
        p(row),
        lane(tile::lane_index()),
        wave(tile::wave_index() % a.waves_per_row),
        count((part_count - wave + a.waves_per_row - 1) / a.waves_per_row) {}

  // Returns the first partial row of the part that this lane looks up, among the wave's parts from
  // `first_part` on.
  MLA_DEVICE int part(int first_part) const {
    return first_part + lane < count ? parts[(first_part + lane) * args.waves_per_row + wave] : 0;
  }
  MLA_DEVICE float lse(int first_part, int part_row) const {
    return first_part + lane < count ? args.partial_lse[static_cast<int64_t>(part_row) + p]
                                     : negative_infinity();
  }
  MLA_DEVICE static float weight(float from, float to) { return exp2_fast((from - to) * kLog2e); }

  // Merges window `column_block` and every column_blocks-th window after it.
  template <int kCount>
  MLA_DEVICE void merge(const Target& target, int own, bool mine, int column_block) const {
    constexpr int kColumns = kCount * 4 * tile::kWave;
    const int step = args.column_blocks * kColumns;
    for (int column = column_block * kColumns; column < args.o_dim; column += step) {
      Sums<kCount> sums;
      for (int at = 0; at < count; at += tile::kWave) add_parts(sums, at, own, column);
      sums.sum = wave_sum(sums.sum);
      if (args.waves_per_row > 1) add_waves(sums);
      if (!mine || wave != 0) continue;
      const bool empty = sums.sum == 0.0f;
      const float lse = empty ? negative_infinity() : sums.origin() + log2_fast(sums.sum) * kLn2;
      const float inverse = (empty ? 0.0f : 1.0f / sums.sum) *
                            (target.sink == nullptr ? 1.0f : sink_factor(*target.sink, lse));
      if (column == 0 && lane == 0 && target.lse != nullptr) *target.lse = lse;
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums.acc[v][j] *= inverse;
        store(target, column + (v * tile::kWave + lane) * 4, sums.acc[v]);
      }
    }
  }

  // Stores words c to c + 3 of a merged row.
  MLA_DEVICE void store(const Target& target, int c, const float (&x)[4]) const {
    if (c >= args.o_dim) return;
    const bool f32 = args.o_is_f32 != 0;
    if (args.order == PartOrder::kColumns) {
      store_run(target.o, c, x, f32, target.aligned);
      return;
    }
    if constexpr (tile::kPairsParts) {
      if (args.order == PartOrder::kPaired) {
        store_paired(target.o, c, x, f32, target.aligned);
        return;
      }
    }
    store_exchanged(target.o, c, x, f32, target.aligned);
  }

  // Adds the wave's parts [at, at + kWave); each lane has looked up one of them.
  template <int kCount>
  MLA_DEVICE void add_parts(Sums<kCount>& sums, int first_part, int own, int column) const {
    constexpr int kAhead = 8 / kCount;  // parts whose values are loaded at a time
    const int rows = first_part == 0 ? own : part(first_part);
    const int here = count - first_part < tile::kWave ? count - first_part : tile::kWave;
    uint32_t x[kAhead][kCount][4];
    load_parts(x, rows, 0, here, column);
    const float own_lse = lse(first_part, rows);
    const float top = max_f(sums.top, wave_max(own_lse));
    if (sums.top != negative_infinity() && sums.top != top) move(sums, weight(sums.top, top));
    sums.top = top;
    const float weights = weight(own_lse, sums.origin());
    sums.sum += weights;
    for (int i = 0; i < here; i += kAhead) {
      if (i > 0) load_parts(x, rows, i, here, column);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const float w = tile::broadcast(weights, i + k);  // zero past the last part
#pragma unroll
        for (int v = 0; v < kCount; ++v) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sums.acc[v][j] = fma_f(w, bits_to_float(x[k][v][j]), sums.acc[v][j]);
          }
        }
      }
    }
  }
  template <int kCount>
  MLA_DEVICE static void move(Sums<kCount>& sums, float factor) {
    sums.sum *= factor;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums.acc[v][j] *= factor;
    }
  }

  // Loads values of parts i, i + 1, ..., whose first rows are in lanes i, i + 1, ... Zeros for
  // parts from `here` on.
  template <int kAhead, int kCount>
  MLA_DEVICE void load_parts(uint32_t (&x)[kAhead][kCount][4], int rows, int i, int here,
                             int column) const {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const float first = tile::broadcast(bits_to_float(static_cast<uint32_t>(rows)), i + k);
      const int64_t row = static_cast<int64_t>(float_to_bits(first)) + p;
      const float* o = args.partial_o + row * args.o_dim + column;
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        const int c = (v * tile::kWave + lane) * 4;
        if (i + k < here && column + c < args.o_dim) {
          load_words(x[k][v], o + c);
        } else {
          x[k][v][0] = x[k][v][1] = x[k][v][2] = x[k][v][3] = 0;
        }
      }
    }
  }

  // Adds the sums of a row's waves in the first of them.
  template <int kCount>
  MLA_DEVICE void add_waves(Sums<kCount>& sums) const {
    constexpr int kBytes = kCount * tile::kWave * 16;  // bytes of a wave
    const tile::lds_t own = tile::shared_base<kSharedBytes>() + tile::wave_index() * 8;
    const tile::lds_t own_values = tile::shared_base<kSharedBytes>() + kStatisticsBytes +
                                   tile::wave_index() * kBytes + lane * 16;
    if (lane == 0) {
      tile::store_float(own, sums.top);
      tile::store_float(own + 4, sums.sum);
    }
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      Chunk c;
#pragma unroll
      for (int j = 0; j < 4; ++j) c.w[j] = float_to_bits(sums.acc[v][j]);
      tile::store_chunk(own_values + v * (tile::kWave * 16), c);
    }
    block_barrier();
    const int waves = wave == 0 ? args.waves_per_row : 0;
    float top = sums.top;
    for (int w = 1; w < waves; ++w) top = max_f(top, tile::load_float(own + w * 8));
    if (sums.top != negative_infinity()) move(sums, weight(sums.top, top));
    sums.top = top;
    for (int w = 1; w < waves; ++w) {
      const float from = tile::load_float(own + w * 8);
      const float factor = from == negative_infinity() ? 1.0f : weight(from, top);
      sums.sum = fma_f(factor, tile::load_float(own + w * 8 + 4), sums.sum);
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        const Chunk c = tile::load_chunk_shared(own_values + w * kBytes + v * (tile::kWave * 16));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums.acc[v][j] = fma_f(factor, bits_to_float(c.w[j]), sums.acc[v][j]);
        }
      }
    }
    block_barrier();
  }

  const CombineArgs& args;
  const int32_t* parts;  // parts of this row's tile
  int p;                 // packed row
  int lane, wave;        // the wave's number among the waves of its row
  int count;             // parts of this wave
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_COMBINE_H_
