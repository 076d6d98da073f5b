// Computes batched small GEMMs around the absorbed form: out[r, h] = in[r, h] x w[h], w row-major
// [k, n].
//
// A block computes kProjectRows gathered rows x kProjectCols columns of one head, so that a decode
// step of many sequences reads each weight once per tile of 64 rows.
//
// fp32 inputs are multiplied as two bf16 operands, the rounded value and its remainder, which keep
// 16 bits of each. A second rounding of latent outputs would exceed the accepted error for outputs
// of few keys that nearly cancel. There are two limits. Inputs beyond 3.396e38, which no bf16
// holds, count as infinite. And an infinite weight makes the result NaN even for finite inputs,
// because a remainder may be zero or of the other sign.
//
// While one step is multiplied, the weights of the next two steps and the inputs of the next are
// loaded into registers.
//
// A tile of one row gains nothing from matrix cores, because reading the weights dominates.
// ProjectRowOf multiplies such tiles in fp32, without rounding the inputs.
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_PROJECT_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_PROJECT_H_

#include "kernels/hip/device/primitives/late.h"
#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

// Copies four elements of the rotated part of a head's query, from element `c` on, unchanged.
MLA_DEVICE void copy_rotated_run(const ProjectArgs& args, const ProjectRow& r, int head, int c) {
  const int bytes = args.out_is_f32 ? 4 : 2;
  const int64_t from = head * r.in_head_stride + args.k + c;
  const int64_t target = head * r.out_head_stride + args.n + c;
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = args.in_is_f32 ? static_cast<const float*>(r.in)[from + j]
                          : bf16_to_float(static_cast<const uint16_t*>(r.in)[from + j]);
  }
  // n is a multiple of 8.
  store_run(r.out, target, v, args.out_is_f32 != 0,
            aligned_to(r.out, r.out_head_stride, 0, bytes, 4 * bytes));
}
template <int kThreads>
MLA_DEVICE void copy_rotated(const ProjectArgs& args, const ProjectTile& part, int head) {
  const int runs = args.copy / 4;
  for (int i = thread_index(); i < part.rows * runs; i += kThreads) {
    const int p = i / runs;
    copy_rotated_run(args, args.rows[part.first_row + p], head, (i - p * runs) * 4);
  }
}
template <int kThreads>
MLA_DEVICE void copy_rotated(const ProjectArgs& args, const ProjectRow& row, int head) {
  for (int i = thread_index(); i < args.copy / 4; i += kThreads) {
    copy_rotated_run(args, row, head, i * 4);
  }
}

template <class C>
class Project {
 public:
  using W = tile::Wave<C::kWaveRows>;
  static constexpr int kThreads = C::kRowWaves * C::kColWaves * tile::kWave;
  static constexpr int kDepth = 128;  // k per step
  static constexpr int kInBytes = kProjectRows * kDepth * 2;
  static constexpr int kWeightBytes = kDepth * kProjectCols * 2;
  static constexpr int kSharedBytes = 2 * kInBytes + kWeightBytes;
  static_assert(C::kRowWaves * C::kWaveRows == kProjectRows);

  MLA_DEVICE static void run(const ProjectArgs& args) {
    const ProjectTile t = args.tiles[block_index()];
    const int blocks = (args.n + kProjectCols - 1) / kProjectCols;
    const int h = block_index_y() / blocks;
    const int column = (block_index_y() - h * blocks) * kProjectCols;
    if (h >= t.num_heads) return;
    const uint16_t* w =
        args.weights[t.weights_slot] + static_cast<int64_t>(t.head_offset + h) * args.k * args.n;
    const Project self(args, t, h, w, column);
    if (args.in_is_f32 != 0) {
      self.template multiply<true>();
    } else {
      self.template multiply<false>();
    }
    if (column == 0 && args.copy > 0) copy_rotated<kThreads>(args, t, h);
  }

 private:
  static constexpr int kFragments = kProjectCols / C::kColWaves / W::kOutCols;
  static constexpr int kSteps = kDepth / W::kPvDepth;
  // The number of 16-byte chunks of a step: in a tile's row, and per thread.
  static constexpr int kRowChunks = kDepth / 8;
  static constexpr int kWeightRowChunks = kProjectCols / 8;
  static constexpr int kInChunks = kProjectRows * kRowChunks / kThreads;
  static constexpr int kWeightChunks = kDepth * kWeightRowChunks / kThreads;
  using lds_t = tile::lds_t;

  // Addresses of the thread's input chunks at depth 0; null past the tile's rows.
  struct Sources {
    const uint8_t* at[kInChunks];
    bool aligned;  // true if all are aligned
  };
  template <bool kF32>
  struct Inputs {
    uint32_t words[kInChunks][kF32 ? 8 : 4];
  };
  struct Weights {
    uint32_t words[kWeightChunks][4];
  };

  MLA_DEVICE Project(const ProjectArgs& a, const ProjectTile& t, int h, const uint16_t* weights,
                     int first_column)
      : args(a), part(t), head(h), w(weights), column(first_column) {
    in_tile = tile::shared_base<kSharedBytes>();
    weight_tile = in_tile + 2 * kInBytes;
  }

  MLA_DEVICE const ProjectRow& row(int p) const { return args.rows[part.first_row + p]; }

  // Return the row of the thread's chunk i and its chunk in that row, for the tile of inputs and
  // for weights.
  MLA_DEVICE static int in_row(int i) { return (thread_index() + i * kThreads) / kRowChunks; }
  MLA_DEVICE static int in_chunk() { return thread_index() % kRowChunks; }
  MLA_DEVICE static int weight_row(int i) {
    return (thread_index() + i * kThreads) / kWeightRowChunks;
  }
  MLA_DEVICE static int weight_chunk() { return thread_index() % kWeightRowChunks; }

  template <bool kF32>
  MLA_DEVICE Sources sources() const {
    constexpr int kBytes = kF32 ? 4 : 2;
    Sources s;
    s.aligned = true;
#pragma unroll
    for (int i = 0; i < kInChunks; ++i) {
      s.at[i] = nullptr;
      if (in_row(i) >= part.rows) continue;
      const ProjectRow r = row(in_row(i));
      s.at[i] =
          static_cast<const uint8_t*>(r.in) + (head * r.in_head_stride + in_chunk() * 8) * kBytes;
      s.aligned = s.aligned && aligned_to(r.in, r.in_head_stride, 0, kBytes, 16);
    }
    return s;
  }

  template <bool kF32>
  MLA_DEVICE void multiply() const {
    typename W::Out o[kFragments];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) W::clear(o[f]);
    const Sources from = sources<kF32>();
    Weights even, odd;
    Inputs<kF32> in;
    fetch_weights(even, 0);
    fetch_weights(odd, kDepth);
    // The previous kernel does not write weights and records; it does write the inputs.
    wait_for_previous_kernel();
    fetch_inputs(in, from, 0);
    for (int k0 = 0; k0 < args.k; k0 += 2 * kDepth) {
      step(o, in, even, from, k0);
      if (k0 + kDepth < args.k) step(o, in, odd, from, k0 + kDepth);
    }
    // The wave index needs all lanes of a wave active, so it is read before they diverge.
    const int lane = tile::lane_index(), row0 = row_wave() * C::kWaveRows;
    const int fragment0 = first_fragment();
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      const int p = row0 + W::row(lane, slot);
      if (p < part.rows) write_row(o, slot, p, fragment0, lane);
    }
  }

  MLA_DEVICE static int row_wave() { return tile::wave_index() / C::kColWaves; }
  MLA_DEVICE static int first_fragment() {
    return (tile::wave_index() - row_wave() * C::kColWaves) * kFragments;
  }

  // Multiplies the loaded operands, then loads the next ones into the same registers.
  template <bool kF32>
  MLA_DEVICE void step(typename W::Out (&o)[kFragments], Inputs<kF32>& in, Weights& weights,
                       const Sources& from, int k0) const {
    block_barrier();
    store(in);
    store(weights);
    block_barrier();
    fetch_weights(weights, k0 + 2 * kDepth);
    fetch_inputs(in, from, k0 + kDepth);
    if (row_wave() * C::kWaveRows >= part.rows) return;
    const int lane = tile::lane_index();
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s) {
      typename W::P p, rest;
      W::template load_p<kProjectRows>(p, in_tile, row_wave() * C::kWaveRows, s, lane);
      if constexpr (kF32) {
        W::template load_p<kProjectRows>(rest, in_tile + kInBytes, row_wave() * C::kWaveRows, s,
                                         lane);
      }
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        typename W::V v;
        W::template load_v<kDepth>(v, weight_tile, s, first_fragment() + f, lane);
        if constexpr (kF32) W::outputs(o[f], rest, v);
        W::outputs(o[f], p, v);
      }
    }
  }

  // Returns true if weights lie in panels as wide as a block's columns
  // (device_state/weight_panels.h).
  MLA_DEVICE bool in_panels() const {
#if MLA_AMD
    return false;
#else
    return args.weight_panels != 0;
#endif
  }
  MLA_DEVICE void fetch_weights(Weights& weights, int k0) const {
    // A thread's rows are a multiple of 8 apart, so in panels its chunk has the same place in every
    // row.
    const int place = weight_chunk() ^ (in_panels() ? tile::swizzle(weight_row(0)) : 0);
    const int stride = in_panels() ? kProjectCols : args.n;
    const uint16_t* const from = w + column * (in_panels() ? args.k : 1) + place * 8;
    const int rows = column + weight_chunk() * 8 < args.n ? args.k : 0;
#pragma unroll
    for (int i = 0; i < kWeightChunks; ++i) {
      const int k = k0 + weight_row(i);
      if (k < rows) {
        load_words(weights.words[i], from + k * stride);
      } else {
        clear(weights.words[i]);
      }
    }
  }

  template <bool kF32>
  MLA_DEVICE void fetch_inputs(Inputs<kF32>& in, const Sources& from, int k0) const {
#pragma unroll
    for (int i = 0; i < kInChunks; ++i) {
      if (from.at[i] == nullptr || k0 + in_chunk() * 8 >= args.k) {
        clear(in.words[i]);
      } else if constexpr (kF32) {
        load_floats(in.words[i], from.at[i] + static_cast<int64_t>(k0) * 4, from.aligned);
      } else {
        const Chunk c = load_chunk(from.at[i], k0, false, from.aligned);
#pragma unroll
        for (int j = 0; j < 4; ++j) in.words[i][j] = c.w[j];
      }
    }
  }

  template <int kWords>
  MLA_DEVICE static void clear(uint32_t (&words)[kWords]) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) words[j] = 0;
  }

  template <bool kF32>
  MLA_DEVICE void store(const Inputs<kF32>& in) const {
#pragma unroll
    for (int i = 0; i < kInChunks; ++i) {
      const lds_t address = tile::chunk_at<kProjectRows>(in_tile, in_row(i), in_chunk());
      Chunk c;
      if constexpr (kF32) {
        Chunk rest;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float a = bits_to_float(in.words[i][2 * j]);
          const float b = bits_to_float(in.words[i][2 * j + 1]);
          c.w[j] = pack_bf16(a, b);
          rest.w[j] = pack_bf16(rest_of(a, c.w[j] << 16), rest_of(b, c.w[j] & 0xffff0000u));
        }
        tile::store_chunk(address + kInBytes, rest);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) c.w[j] = in.words[i][j];
      }
      tile::store_chunk(address, c);
    }
  }
  MLA_DEVICE void store(const Weights& weights) const {
#pragma unroll
    for (int i = 0; i < kWeightChunks; ++i) {
      const uint32_t(&x)[4] = weights.words[i];
      tile::store_chunk(tile::chunk_at<kDepth>(weight_tile, weight_row(i), weight_chunk()),
                        Chunk{{x[0], x[1], x[2], x[3]}});
    }
  }

  // Returns the rounding remainder of x. 0 for infinities, whose remainder would be NaN.
  MLA_DEVICE static float rest_of(float x, uint32_t rounded) {
    return (rounded & 0x7f800000u) == 0x7f800000u ? 0.0f : x - bits_to_float(rounded);
  }

  MLA_DEVICE void write_row(const typename W::Out (&o)[kFragments], int slot, int p, int fragment0,
                            int lane) const {
    const ProjectRow r = row(p);
    const int64_t index = head * r.out_head_stride + column;
    const int bytes = args.out_is_f32 ? 4 : 2;
    const bool aligned = aligned_to(r.out, r.out_head_stride, 0, bytes, bytes * W::kRun);
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
        store_run(r.out, index + c, run, args.out_is_f32 != 0, aligned);
      }
    }
  }

  const ProjectArgs& args;
  const ProjectTile part;
  const int head;
  const uint16_t* w;  // weights of the head
  const int column;
  lds_t in_tile, weight_tile;  // inputs, followed by their remainders
};

// Multiplies tiles of one row. In each step a block takes kGroups x kProjectCols columns of one
// head and kLoads x 32 rows of its weights. In every group, thread t takes 8 columns from 8 (t % 8)
// on, in row t / 8 of every 32 rows. In decode one step covers everything, so all loads of a block
// are in flight at once. Threads of a column add up their sums through shared memory.
template <int kGroups, int kLoads>
class ProjectRowOf {
 public:
  static constexpr int kThreads = 256;
  static constexpr int kColumns = kGroups * kProjectCols;
  static constexpr int kChunks = kProjectCols / 8;   // 16-byte chunks in a group of a row of
                                                     // weights
  static constexpr int kLanes = kThreads / kChunks;  // threads that share a column
  static constexpr int kDepth = kLanes * kLoads;     // k per step
  static constexpr int kSharedBytes = kDepth * 4 + kLanes * kColumns * 4;

  MLA_DEVICE static void run(const ProjectArgs& args) {
    const bool only = args.tiles == nullptr;
    const ProjectTile t = only ? args.only_tile : args.tiles[block_index()];
    const ProjectRow r = only ? args.only_row : args.rows[t.first_row];
    const uint16_t* const w = only ? args.only_weights : args.weights[t.weights_slot];
    const int blocks = (args.n + kColumns - 1) / kColumns;
    const int h = block_index_y() / blocks;
    const int column = (block_index_y() - h * blocks) * kColumns;
    if (h >= t.num_heads) return;
    const ProjectRowOf self(args, r, h,
                            w + static_cast<int64_t>(t.head_offset + h) * args.k * args.n, column);
    self.multiply();
  }

 private:
  using lds_t = tile::lds_t;

  MLA_DEVICE ProjectRowOf(const ProjectArgs& a, const ProjectRow& r, int h, const uint16_t* weights,
                          int first_column)
      : args(a),
        row(r),
        head(h),
        w(weights),
        column(first_column),
        inputs(tile::shared_base<kSharedBytes>()) {}

  MLA_DEVICE static int chunk() { return thread_index() % kChunks; }
  MLA_DEVICE static int k_lane() { return thread_index() / kChunks; }

  MLA_DEVICE void multiply() const {
    float acc[kGroups][8] = {};
    uint32_t weights[kGroups][kLoads][4];
    fetch(weights, 0);
    // The previous kernel does not write weights and records; it does write the inputs, and the
    // gate may not have ended before this.
    wait_for_previous_kernel();
    if (came_late(args)) return;
    for (int k0 = 0; k0 < args.k; k0 += kDepth) {
      if (k0 > 0) {
        fetch(weights, k0);
        block_barrier();
      }
      bring_in(k0);
      block_barrier();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float x = tile::load_float(inputs + (i * kLanes + k_lane()) * 4);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32_t pair = weights[g][i][j];
            acc[g][2 * j] = fma_f(x, bits_to_float(pair << 16), acc[g][2 * j]);
            acc[g][2 * j + 1] = fma_f(x, bits_to_float(pair & 0xffff0000u), acc[g][2 * j + 1]);
          }
        }
      }
    }
    add_up(acc);
    if (column == 0 && args.copy > 0) copy_rotated<kThreads>(args, row, head);
  }

  // Rows of weights past the end are zeros, and so are their inputs. A thread's rows are a multiple
  // of 8 apart, so in panels its chunk has the same place in every row
  // (device_state/weight_panels.h).
  MLA_DEVICE void fetch(uint32_t (&weights)[kGroups][kLoads][4], int k0) const {
    const bool panels = args.weight_panels != 0;
    const int place = chunk() ^ (panels ? tile::swizzle(k_lane()) : 0);
    const int stride = panels ? kProjectCols : args.n;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int first = column + g * kProjectCols;
      const uint16_t* const from = w + first * (panels ? args.k : 1) + place * 8;
      const int rows = first + chunk() * 8 < args.n ? args.k : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int k = k0 + i * kLanes + k_lane();
        if (k < rows) {
          load_words(weights[g][i], from + static_cast<int64_t>(k) * stride);
        } else {
          weights[g][i][0] = weights[g][i][1] = weights[g][i][2] = weights[g][i][3] = 0;
        }
      }
    }
  }

  MLA_DEVICE void bring_in(int k0) const {
    for (int i = thread_index(); i < kDepth; i += kThreads) {
      const int64_t index = head * row.in_head_stride + k0 + i;
      float x = 0.0f;
      if (k0 + i < args.k) {
        x = args.in_is_f32 != 0 ? as_global<const float>(row.in)[index]
                                : bf16_to_float(as_global<const uint16_t>(row.in)[index]);
      }
      tile::store_float(inputs + i * 4, x);
    }
  }

  MLA_DEVICE void add_up(const float (&acc)[kGroups][8]) const {
    const lds_t sums = inputs + kDepth * 4;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Chunk c;
#pragma unroll
        for (int j = 0; j < 4; ++j) c.w[j] = float_to_bits(acc[g][4 * half + j]);
        tile::store_chunk(
            sums + (k_lane() * kColumns + g * kProjectCols + chunk() * 8 + 4 * half) * 4, c);
      }
    }
    block_barrier();
    const int c = column + thread_index();
    if (thread_index() >= kColumns || c >= args.n) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      sum += tile::load_float(sums + (i * kColumns + thread_index()) * 4);
    }
    const int64_t index = head * row.out_head_stride + c;
    if (args.out_is_f32 != 0) {
      as_global<float>(row.out)[index] = sum;
    } else {
      as_global<uint16_t>(row.out)[index] = to_bf16(sum);
    }
  }

  const ProjectArgs& args;
  const ProjectRow row;
  const int head;
  const uint16_t* w;  // weights of the head
  const int column;
  const lds_t inputs;  // fp32 [kDepth], followed by the sums
};

// The first is for short weights and wide outputs (absorb), the second for the reverse (project).
using ProjectRowWide = ProjectRowOf<4, 4>;
using ProjectRowDeep = ProjectRowOf<1, 16>;

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_PROJECT_H_
