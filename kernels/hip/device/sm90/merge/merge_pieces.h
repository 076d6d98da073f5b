// Merges a tile's pieces in a launch with StreamArgs, in the blocks that made them.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MERGE_PIECES_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MERGE_PIECES_H_

#include "kernels/hip/device/primitives/block.h"
#include "kernels/hip/device/sm90/merge/meeting.h"

namespace mla::kernels::hip {

// Merges packed rows [share * kRows, ...) of the item's tile, by kWarps warps of each block of that
// share, a row a warp. Pieces are weighted as in Combine, and their values are in the order of
// PartOrder::kExchanged.
template <int kRows>
class MergePieces {
 public:
  static constexpr int kWarps = 8;

  // `scratch`: 8 bytes of shared memory that nothing else uses. It is small because rows of the
  // next item arrive during this merge.
  MLA_DEVICE MergePieces(const StreamArgs& args, const Item& item, int of_share,
                         tile::lds_t scratch)
      : record(item.segment),
        share(of_share),
        packed_rows((item.work.q_end - item.work.q_begin) * item.heads),
        heads(item.heads),
        head_begin(static_cast<int>(item.work.heads & 0xffffu)),
        q_begin(item.work.q_begin),
        piece(item.work.kv_begin / args.piece_rows),
        pieces(pieces_of(args, item)),
        f32(args.o_is_f32 != 0),
        turn_at(scratch),
        lane(tile::lane_index()),
        warp(tile::wave_index()) {
    const int first = item.work.partial_row - piece * packed_rows;
    partial_o = args.partial_o + static_cast<int64_t>(first) * kColumns;
    partial_lse = args.partial_lse + first;
    meeting = args.meetings + first + share;
  }

  // `sync`: a barrier of the warps.
  template <class Sync>
  MLA_DEVICE void run(const Sync& sync) const {
    const auto [first, step] = meet(meeting, piece, pieces, turn_at, sync);
    const int left = packed_rows - share * kRows;
    const int rows = left < kRows ? left : kRows;
    for (int row = first * kWarps + warp; row < rows; row += step * kWarps) {
      merge(share * kRows + row);
    }
  }

 private:
  static constexpr int kColumns = 512, kWindows = kColumns / 128;  // a lane has four columns of a
                                                                   // window
  static constexpr int kLanePieces = kMostStreamPieces / tile::kWave;
  static constexpr int kAhead = 4;  // pieces whose values are loaded at a time
  static_assert(kLanePieces * tile::kWave == kMostStreamPieces);

  // Pieces are cut as the planner does in fixed-split mode: each begins at a row that the tile's
  // first query row sees.
  MLA_DEVICE static int pieces_of(const StreamArgs& args, const Item& item) {
    MLA_RECORD const SegmentRecord& r = *item.segment;
    const int unseen = r.causal ? r.q_rows - item.work.q_begin - 1 : 0;
    return 1 + (r.kv_rows - unseen - 1) / args.piece_rows;
  }

  MLA_DEVICE void merge(int p) const {
    uint32_t x[kAhead][kWindows][4];
    load(x, 0, p);
    float weights[kLanePieces];
    float origin;
    const float sum = weigh(p, weights, origin);
    float acc[kWindows][4] = {};
#pragma unroll
    for (int i = 0; i < kLanePieces; ++i) {
      const int begin = i * tile::kWave;
      const int end = pieces - begin < tile::kWave ? pieces : begin + tile::kWave;
      for (int first = begin; first < end; first += kAhead) {
        if (first > 0) load(x, first, p);
        add(acc, x, weights[i], first - begin);
      }
    }
    const bool empty = sum == 0.0f;
    store(p, acc, empty ? 0.0f : 1.0f / sum,
          empty ? negative_infinity() : origin + log2_fast(sum) * kLn2);
  }

  // Lane `first + i` holds the weight of piece i after this one.
  MLA_DEVICE static void add(float (&acc)[kWindows][4], const uint32_t (&x)[kAhead][kWindows][4],
                             float weights, int first) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const float w = tile::broadcast(weights, first + k);  // zero past the last piece
#pragma unroll
      for (int v = 0; v < kWindows; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[v][j] = fma_f(w, bits_to_float(x[k][v][j]), acc[v][j]);
      }
    }
  }

  // Computes the weights of the lane's pieces, lane + i * kWave each; zero past the last. Returns
  // the sum of the weights over all lanes.
  MLA_DEVICE float weigh(int p, float (&weights)[kLanePieces], float& origin) const {
    float top = negative_infinity();
#pragma unroll
    for (int i = 0; i < kLanePieces; ++i) {
      const int of = i * tile::kWave + lane;
      weights[i] =
          of < pieces ? tile::load_fresh(partial_lse + of * packed_rows + p) : negative_infinity();
      top = max_f(top, weights[i]);
    }
    top = wave_max(top);
    origin = top == negative_infinity() ? 0.0f : top;  // NaN pieces leave it at -inf, but make the
                                                       // sum NaN
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kLanePieces; ++i) {
      weights[i] = exp2_fast((weights[i] - origin) * kLog2e);
      sum += weights[i];
    }
    return wave_sum(sum);
  }

  // Loads values of pieces first, first + 1, ...; zeros past the last.
  MLA_DEVICE void load(uint32_t (&x)[kAhead][kWindows][4], int first, int p) const {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t row = static_cast<int64_t>(first + k) * packed_rows + p;
#pragma unroll
      for (int v = 0; v < kWindows; ++v) {
        if (first + k < pieces) {
          tile::load_fresh(x[k][v], partial_o + row * kColumns + v * 128 + lane * 4);
        } else {
          x[k][v][0] = x[k][v][1] = x[k][v][2] = x[k][v][3] = 0;
        }
      }
    }
  }

  MLA_DEVICE void store(int p, const float (&x)[kWindows][4], float inverse, float lse) const {
    MLA_RECORD const SegmentRecord& r = *record;
    const int64_t q = q_begin + p / heads, h = head_begin + p % heads;
    if (lane == 0 && r.lse != nullptr) r.lse[q * r.lse_row_stride + h * r.lse_head_stride] = lse;
    const int bytes = f32 ? 4 : 2;
    void* const o = static_cast<uint8_t*>(r.o) + (q * r.o_row_stride + h * r.o_head_stride) * bytes;
    const bool aligned = aligned_to(o, 0, 0, bytes, 4 * bytes);
#pragma unroll
    for (int v = 0; v < kWindows; ++v) {
      float merged[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) merged[j] = x[v][j] * inverse;
      store_exchanged(o, v * 128 + lane * 4, merged, f32, aligned);
    }
  }

  MLA_RECORD const SegmentRecord* const record;
  const int share, packed_rows, heads, head_begin, q_begin, piece, pieces;
  const bool f32;
  const tile::lds_t turn_at;
  const int lane, warp;
  const float* partial_o;  // the tile's first piece; the others follow
  const float* partial_lse;
  uint32_t* meeting;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_MERGE_MERGE_PIECES_H_
