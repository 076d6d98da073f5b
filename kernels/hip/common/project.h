// Batched small GEMMs around the absorbed form: out[r, h] = in[r, h] x w[h], w row-major [k, n].
//
// A block computes kProjectRows gathered rows x kProjectCols columns of one head. Rows come from
// consecutive records that share a weight slot, so that one decode step of many sequences reads
// each weight once per tile of 64 rows.
#ifndef MLA_KERNELS_HIP_COMMON_PROJECT_H_
#define MLA_KERNELS_HIP_COMMON_PROJECT_H_

#include "kernels/hip/common/memory.h"

namespace mla::gpu {

template <class C>
class Project {
 public:
  using W = tile::Wave<C::kWaveRows>;
  static constexpr int kThreads = C::kRowWaves * C::kColWaves * tile::kWave;
  static constexpr int kDepth = 64;  // k per step
  static constexpr int kInBytes = kProjectRows * kDepth * 2;
  static constexpr int kWeightBytes = kDepth * kProjectCols * 2;
  static constexpr int kSharedBytes = kInBytes + kWeightBytes;
  static_assert(C::kRowWaves * C::kWaveRows == kProjectRows);

  MLA_DEVICE static void run(const ProjectArgs& args) {
    const ProjectTile t = args.tiles[block_index()];
    const ProjectionRecord& head_record = args.records[t.first_record];
    const int blocks = (args.n + kProjectCols - 1) / kProjectCols;
    const int h = block_index_y() / blocks;
    const int column = (block_index_y() - h * blocks) * kProjectCols;
    if (h >= head_record.num_heads) return;
    const uint16_t* w = args.weights[head_record.weights_slot] +
                        static_cast<int64_t>(head_record.head_offset + h) * args.k * args.n;
    Project self(args, t, h);
    self.multiply(w, column);
    if (column == 0 && args.copy > 0) self.copy_tail();
  }

 private:
  static constexpr int kFragments = kProjectCols / C::kColWaves / W::kOutCols;
  static constexpr int kSteps = kDepth / W::kPvDepth;
  using lds_t = tile::lds_t;

  struct Row {
    const ProjectionRecord* record;
    int row;
  };

  MLA_DEVICE Project(const ProjectArgs& a, const ProjectTile& t, int h)
      : args(a), tile_rows(t), head(h) {
    in_tile = tile::shared_base<kSharedBytes>();
    weight_tile = in_tile + kInBytes;
  }

  // Row p of the tile: records are walked, since most tiles hold one or 64 of them.
  MLA_DEVICE Row find(int p) const {
    const ProjectionRecord* record = args.records + tile_rows.first_record;
    int row = tile_rows.first_row + p;
    while (row >= record->rows) {
      row -= record->rows;
      ++record;
    }
    return Row{record, row};
  }

  MLA_DEVICE Chunk in_chunk(const Row& r, int element) const {
    const ProjectionRecord& x = *r.record;
    return load_chunk(x.in, r.row * x.in_row_stride + head * x.in_head_stride + element,
                      args.in_is_f32 != 0,
                      aligned_to(x.in, x.in_row_stride, x.in_head_stride, 2, 16));
  }

  MLA_DEVICE void multiply(const uint16_t* w, int column) {
    typename W::Out o[kFragments];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) W::clear(o[f]);
    const int lane = tile::lane_index(), wave = tile::wave_index();
    const int row_wave = wave / C::kColWaves, col_wave = wave - row_wave * C::kColWaves;
    for (int k0 = 0; k0 < args.k; k0 += kDepth) {
      block_barrier();
      load_tiles(w, column, k0);
      block_barrier();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        typename W::P p;
        W::template load_p<kProjectRows>(p, in_tile, row_wave * C::kWaveRows, step, lane);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          typename W::V v;
          W::template load_v<kDepth>(v, weight_tile, step, col_wave * kFragments + f, lane);
          W::outputs(o[f], p, v);
        }
      }
    }
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      const int p = row_wave * C::kWaveRows + W::row(lane, slot);
      if (p < tile_rows.rows) write_row(o, slot, p, column, col_wave * kFragments, lane);
    }
  }

  MLA_DEVICE void load_tiles(const uint16_t* w, int column, int k0) const {
    for (int i = thread_index(); i < kProjectRows * (kDepth / 8); i += kThreads) {
      const int p = i / (kDepth / 8), chunk = i % (kDepth / 8);
      const bool inside = p < tile_rows.rows && k0 + chunk * 8 < args.k;
      tile::store_chunk(tile::chunk_at<kProjectRows>(in_tile, p, chunk),
                        inside ? in_chunk(find(p), k0 + chunk * 8) : Chunk{{0, 0, 0, 0}});
    }
    for (int i = thread_index(); i < kDepth * (kProjectCols / 8); i += kThreads) {
      const int k = i / (kProjectCols / 8), chunk = i % (kProjectCols / 8);
      const int c = column + chunk * 8;
      const bool inside = k0 + k < args.k && c < args.n;
      tile::store_chunk(tile::chunk_at<kDepth>(weight_tile, k, chunk),
                        inside
                            ? load_chunk(w, static_cast<int64_t>(k0 + k) * args.n + c, false, true)
                            : Chunk{{0, 0, 0, 0}});
    }
  }

  MLA_DEVICE void write_row(const typename W::Out (&o)[kFragments], int slot, int p, int column,
                            int fragment0, int lane) const {
    const Row r = find(p);
    const ProjectionRecord& x = *r.record;
    const int64_t index = r.row * x.out_row_stride + head * x.out_head_stride + column;
    const int bytes = args.out_is_f32 ? 4 : 2;
    const bool aligned =
        aligned_to(x.out, x.out_row_stride, x.out_head_stride, bytes, bytes * W::kRun);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kOutElems; i += W::kRun) {
        if (W::out_slot(i) != slot) continue;
        const int c = W::out_col(lane, fragment0 + f, i);
        if (column + c >= args.n) continue;
        float run[W::kRun];
#pragma unroll
        for (int j = 0; j < W::kRun; ++j) run[j] = o[f].at(i + j);
        store_run(x.out, index + c, run, args.out_is_f32 != 0, aligned);
      }
    }
  }

  // The rotated part of the queries passes through unchanged.
  MLA_DEVICE void copy_tail() const {
    const int pairs = args.copy / 2;
    for (int i = thread_index(); i < tile_rows.rows * pairs; i += kThreads) {
      const int p = i / pairs, c = (i - p * pairs) * 2;
      const Row r = find(p);
      const ProjectionRecord& x = *r.record;
      const int64_t from = r.row * x.in_row_stride + head * x.in_head_stride + args.k + c;
      const int64_t to = r.row * x.out_row_stride + head * x.out_head_stride + args.n + c;
      float v[2];
      if (args.in_is_f32) {
        v[0] = static_cast<const float*>(x.in)[from];
        v[1] = static_cast<const float*>(x.in)[from + 1];
      } else {
        v[0] = bf16_to_float(static_cast<const uint16_t*>(x.in)[from]);
        v[1] = bf16_to_float(static_cast<const uint16_t*>(x.in)[from + 1]);
      }
      store_run(x.out, to, v, args.out_is_f32 != 0, false);
    }
  }

  const ProjectArgs& args;
  const ProjectTile tile_rows;
  const int head;
  lds_t in_tile, weight_tile;
};

}  // namespace mla::gpu

#endif  // MLA_KERNELS_HIP_COMMON_PROJECT_H_
