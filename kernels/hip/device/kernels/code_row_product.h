// Multiplies whole rows with W_UQ and W_O that are held as e4m3 codes with fp32 scales. A weight is
// its code times its scale, rounded to bf16. row_product.h multiplies, so the sums have the same
// bits as with these weights in bf16.
//
// Codes are copied ahead as weights of bf16 are, in half the bytes. Every thread widens the codes
// that it has copied itself, for the step after the one that is being multiplied:
//
//   rows  [kRows x 64] bf16  ---------------------------------------+
//                                                                   +-- sums
//   codes [kColumns x 64] -- times scale --> [kColumns x 64] bf16 --+
//
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_CODE_ROW_PRODUCT_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_CODE_ROW_PRODUCT_H_

#include "kernels/hip/device/kernels/row_product.h"
#if MLA_AMD
#include "kernels/hip/device/amd/formats/fp8_format.h"
#else
#include "kernels/hip/device/sm90/fp8_instructions.h"
#endif

namespace mla::kernels::hip {

template <class Products>
class CodeRowProduct : RowProductBlock<Products> {
  using Block = RowProductBlock<Products>;
  using Block::args;
  using Block::first_column;
  using Block::kRowCopies;
  using Block::kRowsAtOnce;
  using Block::kRowsPerCopy;
  using Block::kWaves;
  using Block::lane;
  using Block::split;
  using Block::stages;
  using Block::wave;
  using typename Block::Copies;
  using typename Block::lds_t;

 public:
  using Block::kColumns;
  using Block::kDepth;
  using Block::kRows;
  using Block::kStages;
  using Block::kThreads;
  // Where copies pass through registers, codes are widened from there, and one tile of widened
  // weights is enough.
  static constexpr bool kThroughRegisters = Copies::kThroughRegisters;
  static constexpr int kRowBytes = kRows * 128, kWidenedBytes = kColumns * 128;
  static constexpr int kStageBytes = kRowBytes + (kThroughRegisters ? 0 : kColumns * kDepth);
  static constexpr int kTiles = kThroughRegisters ? 1 : 2;
  // Scales come with the codes of their stage where copies are counted by stage.
  static constexpr bool kCopiesScales = !MLA_AMD;
  static_assert(!kThroughRegisters || kStages == 1);

  MLA_DEVICE static void run(const RowProductArgs& args) {
    const CodeRowProduct self(args);
    Products products(self.wave, self.lane);
    if constexpr (kThroughRegisters) {
      self.multiply_from_registers(products);
    } else {
      self.multiply(products);
    }
    self.close(products);
  }

 private:
  // Pieces of 16 codes: four a column, and kPieces for each thread. If they are not enough for all
  // waves, the last waves have one less.
  static constexpr int kPiecesOfColumn = kDepth / 16;
  static constexpr int kAllPieces = kColumns * kPiecesOfColumn;
  static constexpr int kPieces = (kAllPieces + kThreads - 1) / kThreads;
  static constexpr int kColumnsOfWave = tile::kWave / kPiecesOfColumn;
  static constexpr int kCopies = kRowCopies + kPieces;
  static_assert(kAllPieces % tile::kWave == 0);
  static_assert(!MLA_AMD || kAllPieces % kThreads == 0);  // waves count copies alike
  // The columns that a wave copies at once have one scale.
  static_assert(kLeastScaleColumns % kColumnsOfWave == 0 && kColumns % kLeastScaleColumns == 0);

  // Scales that a wave copies for each stage.
  static constexpr int kScaleBytes = kCopiesScales ? kWaves * kPieces * 4 : 0;

 public:
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kTiles * kWidenedBytes + kStages * kScaleBytes;
  static_assert(Block::kSumBytes <= kSharedBytes);

 private:
  // The addresses from which this lane copies at the next step.
  struct Sources {
    const uint8_t* rows[kRowCopies];
    const uint8_t* codes[kPieces];
    const float* scales;  // with kCopiesScales, those of this wave's piece `lane`
  };
  struct Scales {
    float of[kPieces];
  };
  struct Codes {
    uint32_t words[kPieces][4];
  };

  MLA_DEVICE explicit CodeRowProduct(const RowProductArgs& a)
      : Block(a, tile::shared_base<kSharedBytes>()) {}

  // Returns this wave's number as a copier of codes. Where rows are few, the first waves multiply
  // them and the last waves have more time, so on sm_90 the last wave copies first.
  MLA_DEVICE int copier() const { return MLA_AMD ? wave : kWaves - 1 - wave; }
  MLA_DEVICE bool has_piece(int i) const {
    return (i + 1) * kThreads <= kAllPieces || i * kThreads + copier() * tile::kWave < kAllPieces;
  }
  // Returns the first of the columns of the block whose i-th pieces this wave copies.
  MLA_DEVICE int wave_column(int i) const {
    return i * (kThreads / kPiecesOfColumn) + copier() * kColumnsOfWave;
  }
  MLA_DEVICE int column(int i) const { return wave_column(i) + lane / kPiecesOfColumn; }
  MLA_DEVICE int piece() const { return lane % kPiecesOfColumn; }

  // Columns past the last one repeat it; their sums are not stored.
  MLA_DEVICE Sources find(int begin) const {
    Sources from;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) from.rows[i] = this->row_source(i, begin);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = this->least(first_column + column(i), args.columns - 1);
      from.codes[i] = args.codes + static_cast<int64_t>(at) * args.padded_depth +
                      this->weight_step(begin) * kDepth + piece() * 16;
    }
    if constexpr (kCopiesScales) from.scales = scales_of(lane < kPieces ? lane : 0);
    return from;
  }
  // Returns the scales of this wave's i-th pieces.
  MLA_DEVICE const float* scales_of(int i) const {
    const int at = this->least(first_column + wave_column(i), args.columns - 1);
    return args.scales + (at >> args.scale_column_shift) * args.scale_pitch;
  }
  // Returns the place of a step's scale among the scales of some pieces.
  MLA_DEVICE int scale_place(int step) const {
    return this->weight_step(step) >> args.scale_step_shift;
  }
  // Returns the scales of this wave's pieces at a step. They are the same in every lane.
  MLA_DEVICE Scales load_scales(int step) const {
    Scales scales = {};
    if constexpr (!kCopiesScales) {
      const int place = scale_place(step);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) scales.of[i] = *as_record(scales_of(i) + place);
    }
    return scales;
  }

  // For the remainders of fp32 rows the weights repeat.
  MLA_DEVICE int codes_ahead(int step) const {
    return kDepth - (step == this->weight_steps() - 1 ? args.padded_depth : 0);
  }
  MLA_DEVICE lds_t stage_at(int stage) const { return stages + stage * kStageBytes; }
  MLA_DEVICE lds_t tile_at(int turn) const {
    return stages + kStages * kStageBytes + (turn & (kTiles - 1)) * kWidenedBytes;
  }
  MLA_DEVICE lds_t rows_of_wave(int stage) const {
    return stage_at(stage) + wave * kRowsPerCopy * 128;
  }
  MLA_DEVICE lds_t codes_of_wave(int stage) const {
    return stage_at(stage) + kRowBytes + copier() * tile::kWave * 16;
  }

  template <int kIndex = 0>
  MLA_DEVICE void issue_rows(Copies& copies, Sources& from, int stage) const {
    if constexpr (kIndex < kRowCopies) {
      if (this->brings_row(kIndex)) {
        copies.template issue<kIndex, kIndex * kRowsAtOnce * 128>(rows_of_wave(stage), lane,
                                                                  from.rows[kIndex]);
      }
      from.rows[kIndex] += kDepth * 2;
      issue_rows<kIndex + 1>(copies, from, stage);
    }
  }
  // Returns the address of this lane's scale in a stage. The first kPieces lanes of a wave copy one
  // each.
  MLA_DEVICE lds_t scale_at(int stage) const {
    return tile_at(0) + kTiles * kWidenedBytes + stage * kScaleBytes + (wave * kPieces + lane) * 4;
  }

  template <int kIndex = 0>
  MLA_DEVICE void issue_codes(Copies& copies, Sources& from, int step, int stage) const {
    if constexpr (kIndex == 0 && kCopiesScales) {
      if (lane < kPieces && has_piece(lane)) {
        copies.issue_word(scale_at(stage), from.scales + scale_place(step));
      }
    }
    if constexpr (kIndex < kPieces) {
      if (has_piece(kIndex)) {
        copies.template issue<kRowCopies + kIndex, kIndex * kThreads * 16>(
            codes_of_wave(stage), lane, from.codes[kIndex]);
      }
      from.codes[kIndex] += codes_ahead(step);
      issue_codes<kIndex + 1>(copies, from, step, stage);
    }
  }
  // OfRegisters is Copies, where it passes through registers.
  template <int kIndex = 0, class OfRegisters>
  MLA_DEVICE void land_rows(OfRegisters& copies) const {
    if constexpr (kIndex < kRowCopies) {
      copies.template land<kIndex, kIndex * kRowsAtOnce * 128>(rows_of_wave(0), lane);
      land_rows<kIndex + 1>(copies);
    }
  }
  MLA_DEVICE void load_codes(Codes& codes, Sources& from, int step) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      load_words(codes.words[i], from.codes[i]);
      from.codes[i] += codes_ahead(step);
    }
  }

  // Stores the i-th piece of this lane, widened, in a tile as products read it.
  MLA_DEVICE void widen(const uint32_t (&codes)[4], float scale, int i, lds_t tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t eight[2] = {codes[2 * half], codes[2 * half + 1]};
      tile::store_chunk(tile::chunk_at<kColumns>(tile, column(i), 2 * piece() + half),
                        fp8_chunk(eight, scale));
    }
  }
  // Widens all codes of a stage that this lane has copied. Uses `scales` only if a stage does not
  // bring its own.
  MLA_DEVICE void widen_stage(int stage, Scales scales, lds_t tile) const {
    if constexpr (kCopiesScales) {
      const float own = lane < kPieces ? tile::load_float(scale_at(stage)) : 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) scales.of[i] = tile::broadcast(own, i);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!has_piece(i)) continue;
      const Chunk codes =
          tile::load_chunk_shared(codes_of_wave(stage) + i * kThreads * 16 + lane * 16);
      widen(codes.w, scales.of[i], i, tile);
    }
  }

  MLA_DEVICE void multiply_from_registers(Products& products) const {
    const int begin = this->first_step(split), end = this->first_step(split + 1);
    Copies copies;
    Codes codes;
    Sources from = find(begin);
    wait_for_previous_kernel();
    if (begin < end) {
      issue_rows(copies, from, 0);
      load_codes(codes, from, begin);
    }
    for (int step = begin; step < end; ++step) {
      const Scales scales = load_scales(step);
      land_rows(copies);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) widen(codes.words[i], scales.of[i], i, tile_at(0));
      block_barrier();
      if (step + 1 < end) {
        issue_rows(copies, from, 0);
        load_codes(codes, from, step + 1);
      }
      products.begin(stages, tile_at(0), args.count);
      products.end(args.count);
      block_barrier();
    }
  }

  template <int kYounger>
  MLA_DEVICE static void wait(Copies& copies, int step, int end) {
    Block::template wait_for_step<kYounger, kCopies>(copies, step, end);
  }

  MLA_DEVICE void multiply(Products& products) const {
    const int begin = this->first_step(split), end = this->first_step(split + 1);
    Copies copies;
    Sources from = find(begin);
    Scales scales = load_scales(begin);
    start(copies, from, begin, end);
    wait<kStages - 1>(copies, begin, end);
    widen_stage(0, scales, tile_at(0));
    if (begin + 1 < end) scales = load_scales(begin + 1);
    Products::publish();
    block_barrier();
    // The stages of all steps of the inner loop are known on NVIDIA devices, and so are most of
    // their addresses.
    constexpr int kKnown = MLA_AMD ? 1 : kStages;
    int stage = 0;
    for (int first = begin; first < end; first += kKnown) {
#pragma unroll
      for (int i = 0; i < kKnown; ++i) {
        const int step = first + i;
        if (step >= end) break;
        if constexpr (kKnown > 1) stage = i;
        const int turn = kKnown % kTiles == 0 ? i : step - begin;
        multiply_step(products, copies, from, scales, step, end, stage, turn);
        stage = next_stage(stage);
      }
    }
    copies.template wait<0, kCopies>();
  }
  MLA_DEVICE static int next_stage(int stage) { return stage + 1 < kStages ? stage + 1 : 0; }

  // Multiplies a step while the codes of the next one are widened, and starts the copies of a later
  // one. `turn` names the tile of the step, as tile_at takes it.
  MLA_DEVICE void multiply_step(Products& products, Copies& copies, Sources& from, Scales& scales,
                                int step, int end, int stage, int turn) const {
    products.begin(stage_at(stage), tile_at(turn), args.count);
    if (step + 1 < end) {
      wait<kStages - 2>(copies, step + 1, end);
      widen_stage(next_stage(stage), scales, tile_at(turn + 1));
      if (step + 2 < end) scales = load_scales(step + 2);
    }
    products.end(args.count);
    Products::publish();
    block_barrier();
    if (step + kStages < end) {
      issue_codes(copies, from, step + kStages, stage);
      issue_rows(copies, from, stage);
    }
    copies.close_stage();
  }

  MLA_DEVICE void start(Copies& copies, Sources& from, int begin, int end) const {
    Block::template start_stages<kStages>(
        copies, begin, end, [&](int s) { issue_codes(copies, from, begin + s, s); },
        [&](int s) {
          if constexpr (MLA_AMD) issue_codes(copies, from, begin + s, s);
          issue_rows(copies, from, s);
        });
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_CODE_ROW_PRODUCT_H_
