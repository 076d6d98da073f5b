// Multiplies whole rows with W_UQ and W_O: out[r, :] = in[r, :] x weights^T, weights row-major
// [columns, depth]. Both operands have their depth along a row, as queries and keys of scores do.
//
// A block computes all rows and 96 to 192 columns over its share of the depth, and reads each
// weight once. While one stage is multiplied, copies of the later stages are in flight:
//
//   rows    [kRows x 64]    --+
//                             +-- sums [kRows x kColumns], in registers
//   weights [kColumns x 64] --+
//
// Sums of the shares are stored as fp32. mla_finish_rows adds them up in order, rotates and rounds
// once, so that results do not depend on which block ends first. A product without shares is
// finished by its own blocks where each has both elements of its pairs (RowProductArgs::finishes).
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_ROW_PRODUCT_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_ROW_PRODUCT_H_

#include "kernels/hip/args/row_args.h"
#include "kernels/hip/device/kernels/row_finish.h"
#include "kernels/hip/device/primitives/late.h"
#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

// Copies rows that are fp32, not aligned, or no multiple of a step long to args.packed: rounded,
// padded with zeros, and for fp32 rows followed by the rounding remainders. A thread packs eight
// elements. Grid: x = padded depth, y = row.
struct PackRows {
  static constexpr int kThreads = 256;
  static constexpr int kRun = 8;

  MLA_DEVICE static void run(const RowProductArgs& args) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int row = block_index_y();
    const int first = (block_index() * kThreads + thread_index()) * kRun;
    if (first >= args.padded_depth) return;
    const void* const in = args.rows[row].in;
    uint32_t rounded[kRun / 2], rests[kRun / 2];
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) {
      const float a = element(args, in, first + 2 * i), b = element(args, in, first + 2 * i + 1);
      rounded[i] = pack_bf16(a, b);
      rests[i] = pack_bf16(rest_of(a, rounded[i] << 16), rest_of(b, rounded[i] & 0xffff0000u));
    }
    uint16_t* const to =
        args.packed + static_cast<int64_t>(row) * args.planes * args.padded_depth + first;
    store_words(to, rounded);
    if (args.planes > 1) store_words(to + args.padded_depth, rests);
  }

 private:
  MLA_DEVICE static float element(const RowProductArgs& args, const void* in, int at) {
    if (at >= args.depth) return 0.0f;
    return args.in_is_f32 != 0 ? as_global<const float>(in)[at]
                               : bf16_to_float(as_global<const uint16_t>(in)[at]);
  }
  // Returns the rounding remainder of x. 0 for infinities, whose remainder would be NaN.
  MLA_DEVICE static float rest_of(float x, uint32_t rounded) {
    return (rounded & 0x7f800000u) == 0x7f800000u ? 0.0f : x - bits_to_float(rounded);
  }
};

// The products of a block's waves: a grid of kRowWaves x kColWaves waves, each with its own rows
// and columns.
template <class C>
struct WaveProducts {
  using W = tile::Wave<C::kWaveRows>;
  using lds_t = tile::lds_t;
  static constexpr int kRows = C::kRowWaves * C::kWaveRows;
  static constexpr int kWaves = C::kRowWaves * C::kColWaves;
  static constexpr int kStages = C::kStages;
  static constexpr int kColumns = C::kColumns;
  static constexpr bool kFinishes = C::kFinishes;
  static constexpr bool kAsynchronous = false;  // `begin` multiplies
  static constexpr int kRun = W::kRun;
  static constexpr int kFragments = kColumns / C::kColWaves / W::kScoreCols;
  static_assert(kFragments * C::kColWaves * W::kScoreCols == kColumns);

  const int lane, row0, first_fragment;
  typename W::Scores sums[kFragments];

  MLA_DEVICE WaveProducts(int wave, int lane_number)
      : lane(lane_number),
        row0(wave / C::kColWaves * C::kWaveRows),
        first_fragment((wave - wave / C::kColWaves * C::kColWaves) * kFragments) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) sums[f].set(i, 0.0f);
    }
  }

  // Called by the waves whose copies have landed, before the barrier that precedes begin.
  MLA_DEVICE static void publish() {}
  // Begins to add the products of a step. Reads of shared memory end with `end` at the latest.
  MLA_DEVICE void begin(lds_t rows, lds_t weights_at, int count) {
    if (row0 >= count) return;
    const typename W::template KeyRows<kColumns> weights(weights_at, 0, lane);
#pragma unroll
    for (int step = 0; step < kRowProductDepth / W::kDepth; ++step) {
      typename W::Q q;
      W::template load_q<kRows>(q, rows, row0, step, lane);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        typename W::K k;
        weights.load(k, (first_fragment + f) * W::kScoreCols, step);
        W::scores(sums[f], q, k);
      }
    }
  }
  MLA_DEVICE void end(int) {}
  // Calls visit(row, column, run) for the runs of consecutive columns that this lane holds.
  template <class Visit>
  MLA_DEVICE void for_each_run(const Visit& visit) const {
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      const int row = row0 + W::row(lane, slot);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < W::kScoreElems; i += W::kRun) {
          if (W::score_slot(i) != slot) continue;
          float run[W::kRun];
#pragma unroll
          for (int j = 0; j < W::kRun; ++j) run[j] = sums[f].at(i + j);
          visit(row, (first_fragment + f) * W::kScoreCols + W::score_col(lane, i), run);
        }
      }
    }
  }
};

// The place of a block in a product, and the end of its work. Products is WaveProducts, or has the
// same members. Grid: x = columns, y = split.
template <class Products>
class RowProductBlock {
 public:
  static constexpr int kRows = Products::kRows;
  static constexpr int kColumns = Products::kColumns;
  static constexpr int kDepth = kRowProductDepth;
  static constexpr int kWaves = Products::kWaves;
  static constexpr int kStages = Products::kStages;
  static constexpr int kThreads = kWaves * tile::kWave;
  static_assert(kDepth * 2 == 128);

 protected:
  using lds_t = tile::lds_t;
  using Copies = tile::WeightCopies;
  // Rows of 128 bytes that all waves copy at once.
  static constexpr int kRowsPerCopy = tile::kWave / 8;
  static constexpr int kRowsAtOnce = kWaves * kRowsPerCopy;
  static constexpr int kRowCopies = kRows / kRowsAtOnce;
  static_assert(kRowCopies * kRowsAtOnce == kRows);
  // Rows of sums begin four banks apart.
  static constexpr int kSumPitch = kColumns + kRowRun;
  static constexpr int kSumBytes = Products::kFinishes ? kRows * kSumPitch * 4 : 0;

  // `shared` has the stages of the product, and in their place the sums at its end.
  MLA_DEVICE RowProductBlock(const RowProductArgs& a, lds_t shared)
      : args(a),
        lane(tile::lane_index()),
        wave(tile::wave_index()),
        first_column(block_index() * kColumns),
        split(block_index_y()),
        stages(shared) {}

  // Returns the row of an operand that this lane copies the i-th time. Its chunk is the same each
  // time, because the rows are multiples of 32 apart.
  MLA_DEVICE int copied_row(int i) const {
    return i * kRowsAtOnce + wave * kRowsPerCopy + (lane >> 3);
  }
  MLA_DEVICE int first_step(int of_split) const {
    return static_cast<int>(static_cast<int64_t>(args.planes) * weight_steps() * of_split /
                            args.splits);
  }
  MLA_DEVICE int weight_steps() const { return args.padded_depth / kDepth; }
  // Returns the step of the weights in a step of the product.
  MLA_DEVICE int weight_step(int step) const {
    return step < weight_steps() ? step : step - weight_steps();
  }
  MLA_DEVICE static int least(int a, int b) { return a < b ? a : b; }

  // Returns the address of this lane's chunk of the i-th copied row at step `begin`. Rows past the
  // last one repeat it; their sums are not stored.
  MLA_DEVICE const uint8_t* row_source(int i, int begin) const {
    const int chunk = ((lane & 7) ^ tile::swizzle(copied_row(0))) * 16;
    const int64_t row_bytes = static_cast<int64_t>(args.planes) * args.padded_depth * 2;
    const int row = least(copied_row(i), args.count - 1);
    const auto* const in = args.packed != nullptr
                               ? reinterpret_cast<const uint8_t*>(args.packed) + row * row_bytes
                               : static_cast<const uint8_t*>(args.rows[row].in);
    return in + begin * (kDepth * 2) + chunk;
  }
  // Returns true if the i-th copied row is brought. Where copies are counted by stage, rows that do
  // not exist are left out: what lies in their place reaches their own sums alone.
  MLA_DEVICE bool brings_row(int i) const { return MLA_AMD || copied_row(i) < args.count; }

  // Waits until this lane's copies of `step` have landed. kYounger stages after it may have begun,
  // each of kCopies copies.
  template <int kYounger, int kCopies>
  MLA_DEVICE static void wait_for_step(Copies& copies, int step, int end) {
    if (step + kYounger < end) {
      copies.template wait<kYounger, kCopies>();
    } else {
      copies.template wait<0, kCopies>();
    }
  }
  // Starts the copies of the first kAhead stages. The previous kernel writes the rows and not the
  // weights, so where copies are counted by stage the weights' begin before it has ended:
  // `weights(s)` starts the copies of stage s then, and `rest(s)` all others afterwards.
  template <int kAhead, class Weights, class Rest>
  MLA_DEVICE static void start_stages(Copies& copies, int begin, int end, const Weights& weights,
                                      const Rest& rest) {
    if constexpr (MLA_AMD) {
      wait_for_previous_kernel();
    } else {
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (begin + s < end) weights(s);
      }
      wait_for_previous_kernel();
      let_next_kernel_start();
    }
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (begin + s < end) rest(s);
      copies.close_stage();
    }
  }

  // Stores or finishes the sums.
  MLA_DEVICE void close(const Products& products) const {
    if constexpr (Products::kFinishes) {
      if (args.finishes != 0) return finish(products);
    }
    store(products);
  }

 private:
  MLA_DEVICE void store(const Products& products) const {
    products.for_each_run([this](int row, int in_block, const auto& run) {
      const int column = first_column + in_block;
      // The pitch has room for the rest of a run.
      if (row >= args.count || column >= args.columns) return;
      float* const to = args.sums + (static_cast<int64_t>(split) * args.count + row) * args.pitch;
      store_run(to, column, run, true, true);
    });
  }

  // Finishes the rows, with their sums in the place of the stages.
  MLA_DEVICE void finish(const Products& products) const {
    block_barrier();
    products.for_each_run([this](int row, int in_block, const auto& run) {
      if (row >= args.count) return;
#pragma unroll
      for (int j = 0; j < Products::kRun; ++j) {
        tile::store_float(sum_at(row, in_block + j), run[j]);
      }
    });
    block_barrier();
    // Each thread finishes one run of columns of every kRowsOfPass-th row, kAhead rows at a time,
    // so that their loads are on their way together.
    constexpr int kRuns = kColumns / kRowRun, kRowsOfPass = kThreads / kRuns, kAhead = 4;
    const int first = thread_index() / kRuns, in_block = (thread_index() - first * kRuns) * kRowRun;
    const int column = first_column + in_block;
    if (first >= kRowsOfPass || column >= args.columns) return;
    const int in_head = RowFinish::in_head(args, column);
    for (int begin = first; begin < args.count; begin += kAhead * kRowsOfPass) {
      RowProductRow rows[kAhead];
      float x[kAhead][kRowRun];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = least(begin + i * kRowsOfPass, args.count - 1);
        rows[i] = args.rows[row];
        const Chunk sums = tile::load_chunk_shared(sum_at(row, in_block));
#pragma unroll
        for (int j = 0; j < kRowRun; ++j) x[i][j] = bits_to_float(sums.w[j]);
      }
      RowFinish::rotate(args, rows, column, in_head, x, [this, begin](int i, int other) {
        const int row = least(begin + i * kRowsOfPass, args.count - 1);
        return tile::load_float(sum_at(row, other - first_column));
      });
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + i * kRowsOfPass < args.count) RowFinish::store(args, rows[i].out, column, x[i]);
      }
    }
  }
  static_assert(kColumns % kRowRun == 0 && kRowRun == 4);
  MLA_DEVICE lds_t sum_at(int row, int in_block) const {
    return stages + (row * kSumPitch + in_block) * 4;
  }

 protected:
  const RowProductArgs& args;
  const int lane, wave, first_column, split;
  const lds_t stages;
};

// Products of rows with weights of bf16.
template <class Products>
class RowProduct : RowProductBlock<Products> {
  using Block = RowProductBlock<Products>;

 public:
  using Block::kColumns;
  using Block::kDepth;
  using Block::kRows;
  using Block::kStages;
  using Block::kThreads;
  static constexpr int kStageBytes = (kRows + kColumns) * 128;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(Block::kSumBytes <= kSharedBytes);

  MLA_DEVICE static void run(const RowProductArgs& args) {
    const RowProduct self(args);
    Copies copies;
    Products products(self.wave, self.lane);
    self.multiply(copies, products);
    self.close(products);
  }

 private:
  using Block::args;
  using Block::first_column;
  using Block::kRowCopies;
  using Block::kRowsAtOnce;
  using Block::kRowsPerCopy;
  using Block::lane;
  using Block::split;
  using Block::stages;
  using Block::wave;
  using Block::weight_steps;
  using typename Block::Copies;
  using typename Block::lds_t;
  // Copies of rows and of weights that a stage takes.
  static constexpr int kCopies = kStageBytes / 128 / kRowsAtOnce;
  static_assert(kCopies * kRowsAtOnce * 128 == kStageBytes);

  // The addresses from which this lane copies at the next step.
  struct Sources {
    const uint8_t* at[kCopies];
  };

  MLA_DEVICE explicit RowProduct(const RowProductArgs& a)
      : Block(a, tile::shared_base<kSharedBytes>()) {}

  // Columns past the last one repeat it; their sums are not stored.
  MLA_DEVICE Sources find(int begin) const {
    Sources from;
    const int chunk = ((lane & 7) ^ tile::swizzle(this->copied_row(0))) * 16;
    const int weights_begin = this->weight_step(begin);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i < kRowCopies) {
        from.at[i] = this->row_source(i, begin);
      } else {
        const int column =
            this->least(first_column + this->copied_row(i - kRowCopies), args.columns - 1);
        from.at[i] = reinterpret_cast<const uint8_t*>(args.weights) +
                     static_cast<int64_t>(column) * args.padded_depth * 2 +
                     weights_begin * (kDepth * 2) + chunk;
      }
    }
    return from;
  }

  // Starts copies [kIndex, kEnd) of a step. Each is called for the steps in order.
  template <int kIndex, int kEnd>
  MLA_DEVICE void issue(Copies& copies, Sources& from, int step, int stage) const {
    if constexpr (kIndex < kEnd) {
      if (kIndex >= kRowCopies || this->brings_row(kIndex)) {
        copies.template issue<kIndex, kIndex * kRowsAtOnce * 128>(base(stage), lane,
                                                                  from.at[kIndex]);
      }
      from.at[kIndex] += kDepth * 2;
      // For the remainders of fp32 rows the weights repeat.
      if (kIndex >= kRowCopies && step == weight_steps() - 1) {
        from.at[kIndex] -= args.padded_depth * 2;
      }
      issue<kIndex + 1, kEnd>(copies, from, step, stage);
    }
  }
  // OfRegisters is Copies, where it passes through registers.
  template <int kIndex = 0, class OfRegisters>
  MLA_DEVICE void land(OfRegisters& copies) const {
    if constexpr (kIndex < kCopies) {
      copies.template land<kIndex, kIndex * kRowsAtOnce * 128>(base(0), lane);
      land<kIndex + 1>(copies);
    }
  }
  MLA_DEVICE lds_t base(int stage) const {
    return stages + stage * kStageBytes + wave * kRowsPerCopy * 128;
  }

  MLA_DEVICE void multiply(Copies& copies, Products& products) const {
    const int begin = this->first_step(split), end = this->first_step(split + 1);
    Sources from = find(begin);
    if constexpr (Copies::kThroughRegisters) {
      wait_for_previous_kernel();
      if (begin < end) issue<0, kCopies>(copies, from, begin, 0);
      for (int step = begin; step < end; ++step) {
        land(copies);
        block_barrier();
        if (step + 1 < end) issue<0, kCopies>(copies, from, step + 1, 0);
        products.begin(stages, stages + kRows * 128, args.count);
        products.end(args.count);
        block_barrier();
      }
    } else {
      start(copies, from, begin, end);
      for (int step = begin; step < end; ++step) {
        const int turn = step - begin;
        Block::template wait_for_step<kStages - 2, kCopies>(copies, step, end);
        if constexpr (Products::kAsynchronous) {
          if (step > begin) products.end(args.count);
        }
        Products::publish();
        block_barrier();
        const lds_t own = stages + turn % kStages * kStageBytes;
        if constexpr (Products::kAsynchronous) products.begin(own, own + kRows * 128, args.count);
        const int ahead = step + kStages - 1;
        if (ahead < end) issue<0, kCopies>(copies, from, ahead, (turn + kStages - 1) % kStages);
        copies.close_stage();
        if constexpr (!Products::kAsynchronous) {
          products.begin(own, own + kRows * 128, args.count);
          products.end(args.count);
        }
      }
      if constexpr (Products::kAsynchronous) {
        if (begin < end) products.end(args.count);
      }
      copies.template wait<0, kCopies>();
    }
  }

  MLA_DEVICE void start(Copies& copies, Sources& from, int begin, int end) const {
    Block::template start_stages<kStages - 1>(
        copies, begin, end, [&](int s) { issue<kRowCopies, kCopies>(copies, from, begin + s, s); },
        [&](int s) { issue<0, MLA_AMD ? kCopies : kRowCopies>(copies, from, begin + s, s); });
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_ROW_PRODUCT_H_
