// Probe kernels. Each runs one tile primitive of the architecture on given operands and writes the
// result in plain row-major order, by the layout functions that the real kernels use.
#include "kernels/hip/device/target/target.h"
#if MLA_GFX950
#include "kernels/hip/device/gfx950/code_wave.h"
#elif MLA_GFX942
#include "kernels/hip/device/gfx942/code_wave.h"
#else
#include "kernels/hip/device/sm90/barriers.h"
#include "kernels/hip/device/sm90/tile.h"
#include "kernels/hip/device/sm90/wgmma.h"
#include "tests/tile/probe_e4m3.h"
#endif

#include "kernels/hip/device/kv/kv_stream.h"
#include "tests/tile/probe_args.h"
#if MLA_AMD
#include "tests/tile/probe_codes.h"
#endif

namespace mla::tile_test {

namespace tile = kernels::hip::tile;
using kernels::hip::Chunk;

// Copies a row-major [rows, cols] matrix into a tile of kTileRows rows.
template <int kTileRows>
MLA_DEVICE void stage(tile::lds_t at, const uint16_t* from, int rows, int cols, int threads) {
  for (int i = kernels::hip::thread_index(); i < rows * cols / 8; i += threads) {
    tile::store_chunk(tile::chunk_at<kTileRows>(at, i / (cols / 8), i % (cols / 8)),
                      kernels::hip::load_chunk(from, i * 8, false, true));
  }
}

template <int kRows>
struct Probe {
  using W = tile::Wave<kRows>;
  static constexpr int kFragments = kKvRows / W::kScoreCols;
  static constexpr int kTileABytes = kRows * 128;
  static constexpr int kTileBBytes = kKvRows * kOutCols * 2;
  using Scores = typename W::Scores;

  MLA_DEVICE static tile::lds_t tile_a() {
    return tile::shared_base<kTileABytes + 2 * kTileBBytes>();
  }
  MLA_DEVICE static tile::lds_t tile_b() { return tile_a() + kTileABytes; }
  MLA_DEVICE static tile::lds_t tile_c() { return tile_b() + kTileBBytes; }

  MLA_DEVICE static void multiply_scores(const ProbeArgs& args, Scores (&s)[kFragments]) {
    const int lane = tile::lane_index();
    stage<kRows>(tile_a(), args.a, kRows, kDepth, tile::kWave);
    stage<kKvRows>(tile_b(), args.b, kKvRows, kDepth, tile::kWave);
    kernels::hip::block_barrier();
    for (int f = 0; f < kFragments; ++f) {
      for (int i = 0; i < W::kScoreElems; ++i) s[f].set(i, 0.0f);
    }
    for (int step = 0; step < kDepth / W::kDepth; ++step) {
      typename W::Q q;
#if MLA_AMD
      W::template load_k<kRows>(q, tile_a(), 0, step, lane);  // the same layout
#else
      W::template load_q<kRows>(q, tile_a(), 0, step, lane);
#endif
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        typename W::K k;
        W::template load_k<kKvRows>(k, tile_b(), f * W::kScoreCols, step, lane);
        W::scores(s[f], q, k);
      }
    }
    kernels::hip::block_barrier();
  }

  MLA_DEVICE static void scores(const ProbeArgs& args) {
    const int lane = tile::lane_index();
    Scores s[kFragments];
    multiply_scores(args, s);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kScoreElems; ++i) {
        args.out[W::row(lane, W::score_slot(i)) * kKvRows + f * W::kScoreCols +
                 W::score_col(lane, i)] = s[f].at(i);
      }
    }
  }

  template <class MakeP>
  MLA_DEVICE static void multiply_outputs(const ProbeArgs& args, tile::lds_t v_tile,
                                          const MakeP& make_p) {
    constexpr int kOutFragments = kOutCols / W::kOutCols;
    const int lane = tile::lane_index();
    typename W::Out o[kOutFragments];
#pragma unroll
    for (int f = 0; f < kOutFragments; ++f) W::clear(o[f]);
#pragma unroll
    for (int step = 0; step < kKvRows / W::kPvDepth; ++step) {
      typename W::P p;
      make_p(p, step);
#pragma unroll
      for (int f = 0; f < kOutFragments; ++f) {
        typename W::V v;
        W::template load_v<kKvRows>(v, v_tile, step, f, lane);
        W::outputs(o[f], p, v);
      }
    }
#pragma unroll
    for (int f = 0; f < kOutFragments; ++f) {
#pragma unroll
      for (int i = 0; i < W::kOutElems; ++i) {
        args.out[W::row(lane, W::out_slot(i)) * kOutCols + W::out_col(lane, f, i)] = o[f].at(i);
      }
    }
  }

  MLA_DEVICE static void outputs(const ProbeArgs& args) {
    const int lane = tile::lane_index();
    stage<kRows>(tile_a(), args.a, kRows, kKvRows, tile::kWave);
    stage<kKvRows>(tile_b(), args.b, kKvRows, kOutCols, tile::kWave);
    kernels::hip::block_barrier();
    multiply_outputs(args, tile_b(), [lane](typename W::P& p, int step) {
      W::template load_p<kRows>(p, tile_a(), 0, step, lane);
    });
  }

  // Turns scores into the operand of the outputs in the same way as the attention kernels.
  MLA_DEVICE static void chain(const ProbeArgs& args) {
    stage<kKvRows>(tile_c(), args.c, kKvRows, kOutCols, tile::kWave);
    Scores s[kFragments];
    multiply_scores(args, s);
#if MLA_AMD
    multiply_outputs(args, tile_c(), [&s](typename W::P& p, int step) { W::make_p(p, s, step); });
#else
    const int lane = tile::lane_index();
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      W::template store_p<kRows>(tile_a(), 0, f * W::kScoreCols, s[f], lane);
    }
    kernels::hip::block_barrier();
    multiply_outputs(args, tile_c(), [lane](typename W::P& p, int step) {
      W::template load_p<kRows>(p, tile_a(), 0, step, lane);
    });
#endif
  }

  MLA_DEVICE static void rows(const ProbeArgs& args) {
    const int lane = tile::lane_index();
#pragma unroll
    for (int slot = 0; slot < W::kSlots; ++slot) {
      const int at = slot * tile::kWave + lane;
      args.out[2 * at] = W::row_max(args.c32[at]);
      args.out[2 * at + 1] = W::row_sum(args.c32[at]);
    }
  }
};

#define MLA_PROBE(name, threads, call)                                                       \
  extern "C" __global__ void MLA_LAUNCH_BOUNDS(threads) probe_##name(const ProbeArgs args) { \
    call(args);                                                                              \
  }

MLA_PROBE(scores_16, tile::kWave, Probe<16>::scores)
MLA_PROBE(scores_32, tile::kWave, Probe<32>::scores)
MLA_PROBE(outputs_16, tile::kWave, Probe<16>::outputs)
MLA_PROBE(outputs_32, tile::kWave, Probe<32>::outputs)
MLA_PROBE(chain_16, tile::kWave, Probe<16>::chain)
MLA_PROBE(chain_32, tile::kWave, Probe<32>::chain)
MLA_PROBE(rows_16, tile::kWave, Probe<16>::rows)
MLA_PROBE(rows_32, tile::kWave, Probe<32>::rows)

// Four waves copy one tile of paged rows while the copy of another tile is still in flight.
struct CopyConfig {
  static constexpr int kTileKv = kKvRows, kStages = 2, kLora = kCopyDim - 64, kRope = 64;
};
// The part of RowSource that KvStream uses: the first rows of a sequence.
struct FirstRows {
  static constexpr bool kLists = false;
  MLA_DEVICE int place(int at) const { return at < end ? at : end - 1; }
  MLA_DEVICE const uint32_t* table_at(int row) const { return pages.table + pages.place(row).page; }
  MLA_DEVICE int inside(int row) const { return pages.place(row).inside; }
  MLA_DEVICE kernels::hip::RowSpot spot(int row) const { return {table_at(row), inside(row)}; }
  MLA_DEVICE const uint8_t* address(uint32_t granule, int row) const {
    return pages.address(granule, row);
  }

  const kernels::hip::PagedRows& pages;
  const int begin = 0, end = kKvRows;
};
MLA_DEVICE void copy(const ProbeArgs& args) {
  constexpr int kWaves = 4;
  using Layout = kernels::hip::StageLayout<kernels::hip::KvFormat::kBf16, CopyConfig>;
  using Stream = kernels::hip::KvStream<FirstRows, Layout, CopyConfig::kStages, kWaves>;
  const tile::lds_t stages = tile::shared_base<2 * Stream::kStageBytes + Stream::kLookUpBytes>();
  const auto* table = reinterpret_cast<const uint32_t*>(args.b);
  const kernels::hip::PagedRows pages(table, 0, reinterpret_cast<const uint8_t*>(args.a), 0,
                                      kCopyDim * 2, kCopyPage, kCopyPage * kCopyDim * 2);
  const FirstRows rows{pages};
  Stream stream(rows, stages, stages + 2 * Stream::kStageBytes, tile::wave_index());
  stream.look_up(0);
  if constexpr (Stream::kInLds) {
    stream.look_up(1);
    stream.template wait<0>();
  }
  stream.issue(0);
  stream.close_stage();
  stream.look_up(Stream::kInLds ? 2 : 1);
  if constexpr (tile::Copies::kThroughRegisters) {
    stream.land(0);
  } else {
    stream.issue(1);
    stream.close_stage();
    if constexpr (Stream::kInLds) stream.look_up(3);
    stream.template wait<1>();
  }
  kernels::hip::block_barrier();
  for (int i = kernels::hip::thread_index(); i < kKvRows * kCopyDim / 8;
       i += kWaves * tile::kWave) {
    const int row = i / (kCopyDim / 8), chunk = i % (kCopyDim / 8);
    const Chunk c = tile::load_chunk_shared(tile::chunk_at<kKvRows>(stages, row, chunk));
    for (int e = 0; e < 8; ++e) {
      const uint32_t word = c.w[e >> 1];
      args.out[row * kCopyDim + chunk * 8 + e] =
          kernels::hip::bits_to_float((e & 1) != 0 ? word & 0xffff0000u : word << 16);
    }
  }
  if constexpr (!tile::Copies::kThroughRegisters) stream.template wait<0>();
}
MLA_PROBE(copy, 4 * tile::kWave, copy)

MLA_DEVICE void math(const ProbeArgs& args) {
  for (int i = tile::lane_index(); i < kMathValues; i += tile::kWave) {
    const float x = args.c32[i];
    args.out[i] = kernels::hip::exp2_fast(x);
    args.out[kMathValues + i] = kernels::hip::log2_fast(x);
    args.out[2 * kMathValues + i] =
        kernels::hip::bits_to_float(kernels::hip::pack_bf16(x, args.c32[(i + 1) % kMathValues]));
  }
}
MLA_PROBE(math, tile::kWave, math)

MLA_DEVICE void lanes(const ProbeArgs& args) {
  const int lane = tile::lane_index();
  const float x = args.c32[lane];
  const float results[6] = {tile::any(lane == 13) ? 1.0f : 0.0f,
                            tile::exchange<1>(x),
                            tile::exchange<2>(x),
                            tile::exchange<16>(x),
                            tile::broadcast(x, 13),
                            tile::any(lane > 1000) ? 1.0f : 0.0f};
  for (int i = 0; i < 6; ++i) args.out[i * tile::kWave + lane] = results[i];
}
MLA_PROBE(lanes, tile::kWave, lanes)

#if MLA_AMD
MLA_PROBE(codes_32, tile::kWave, ProbeCodes<32>::scores)
MLA_PROBE(code_outputs_32, tile::kWave, ProbeCodes<32>::outputs)
#if MLA_GFX942
MLA_PROBE(codes_16, tile::kWave, ProbeCodes<16>::scores)
MLA_PROBE(code_outputs_16, tile::kWave, ProbeCodes<16>::outputs)
#endif
#endif

#if MLA_SM90
constexpr int kGroupThreads = 128;

MLA_DEVICE int group_row(int slot) {
  return (kernels::hip::thread_index() >> 5) * 16 + slot * 8 + (tile::lane_index() >> 2);
}
// Column of element i of a warpgroup's accumulators, whose slot is (i >> 1) & 1.
MLA_DEVICE int group_col(int i) { return 8 * (i >> 2) + 2 * (tile::lane_index() & 3) + (i & 1); }

MLA_DEVICE void wgmma_scores(const ProbeArgs& args) {
  const uint32_t a = tile::shared_base<kSharedBytes>(), b = a + kGroupRows * 128;
  stage<kGroupRows>(a, args.a, kGroupRows, kDepth, kGroupThreads);
  stage<kKvRows>(b, args.b, kKvRows, kDepth, kGroupThreads);
  tile::publish_shared();
  kernels::hip::block_barrier();
  float c[32];
  tile::wgmma_begin();
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    tile::wgmma_64x64(c, tile::along_rows(a + step * 32), tile::along_rows(b + step * 32),
                      step > 0);
  }
  tile::wgmma_commit();
  tile::wgmma_wait<0>();
  tile::pin(c);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    args.out[group_row((i >> 1) & 1) * kKvRows + group_col(i)] = c[i];
  }
}
MLA_PROBE(wgmma_scores, kGroupThreads, wgmma_scores)

MLA_DEVICE void write_group_outputs(float* out, const float (&c)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) out[group_row((i >> 1) & 1) * kGroupCols + group_col(i)] = c[i];
}

MLA_DEVICE void wgmma_outputs(const ProbeArgs& args) {
  const uint32_t a = tile::shared_base<kSharedBytes>(), b = a + kGroupRows * 128;
  constexpr uint32_t kBlockBytes = kKvRows * 128;
  stage<kGroupRows>(a, args.a, kGroupRows, kKvRows, kGroupThreads);
  stage<kKvRows>(b, args.b, kKvRows, kGroupCols, kGroupThreads);
  tile::publish_shared();
  kernels::hip::block_barrier();
  float c[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) c[i] = 0.0f;
  tile::pin(c);
  tile::wgmma_begin();
#pragma unroll
  for (int step = 0; step < kKvRows / 16; ++step) {
    tile::wgmma_64x256(c, tile::along_rows(a + step * 32),
                       tile::down_rows(b + step * 2048, kBlockBytes));
  }
  tile::wgmma_commit();
  tile::wgmma_wait<0>();
  tile::pin(c);
  write_group_outputs(args.out, c);

  const auto pair = [&args](int slot, int k) {
    return *reinterpret_cast<const uint32_t*>(args.a + group_row(slot) * kKvRows + k +
                                              2 * (tile::lane_index() & 3));
  };
  uint32_t p[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) p[i] = pair(i & 1, 8 * (i >> 1));
#pragma unroll
  for (int i = 0; i < 128; ++i) c[i] = 0.0f;
  tile::pin(c);
  tile::wgmma_begin();
#pragma unroll
  for (int step = 0; step < kKvRows / 16; ++step) {
    tile::wgmma_64x256(c, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                       tile::down_rows(b + step * 2048, kBlockBytes));
  }
  tile::wgmma_commit();
  tile::wgmma_wait<0>();
  tile::pin(c);
  write_group_outputs(args.out + kGroupRows * kGroupCols, c);
}
MLA_PROBE(wgmma_outputs, kGroupThreads, wgmma_outputs)

// Register m of load_matrices holds row lane / 4, columns 2 (lane % 4) and the next, of 8x8 matrix
// m.
MLA_DEVICE void matrices(const ProbeArgs& args) {
  const int lane = tile::lane_index();
  const uint32_t a = tile::shared_base<kSharedBytes>(), back = a + 16 * 128;
  stage<16>(a, args.a, 16, 16, tile::kWave);
  kernels::hip::block_barrier();
  uint32_t r[2][4];
  const uint32_t at = tile::chunk_at<16>(a, lane & 15, lane >> 4);
  tile::load_matrices(r[0], at);
  tile::load_matrices_transposed(r[1], at);
  tile::store_matrices(tile::chunk_at<16>(back, lane & 15, lane >> 4), r[0][0], r[0][1], r[0][2],
                       r[0][3]);
  kernels::hip::block_barrier();
  for (int m = 0; m < 4; ++m) {
    const int row = (m & 1) * 8 + (lane >> 2), col = (m >> 1) * 8 + 2 * (lane & 3);
    for (int e = 0; e < 2; ++e) {
      for (int t = 0; t < 2; ++t) {
        args.out[t * 256 + row * 16 + col + e] =
            kernels::hip::bits_to_float(e != 0 ? r[t][m] & 0xffff0000u : r[t][m] << 16);
      }
    }
  }
  for (int i = lane; i < 16 * 16; i += 32) {
    const Chunk c = tile::load_chunk_shared(tile::chunk_at<16>(back, i >> 4, (i & 15) >> 3));
    const uint32_t word = c.w[(i & 7) >> 1];
    args.out[512 + i] = kernels::hip::bits_to_float((i & 1) != 0 ? word & 0xffff0000u : word << 16);
  }
}
MLA_PROBE(matrices, tile::kWave, matrices)

// One group copies and arrives, and begins again only when the other has read; three rounds.
MLA_DEVICE void barriers(const ProbeArgs& args) {
  const uint32_t at = tile::shared_base<kSharedBytes>();
  const uint32_t filled = at + kKvRows * 128, emptied = filled + 8;
  const int thread = kernels::hip::thread_index() & (kGroupThreads - 1);
  if (kernels::hip::thread_index() == 0) {
    tile::barrier_init(filled, kGroupThreads);
    tile::barrier_init(emptied, kGroupThreads);
  }
  kernels::hip::block_barrier();
  constexpr int kRounds = 4, kRoundRows = kKvRows / kRounds;
  for (int round = 0; round < kRounds; ++round) {
    const uint16_t* rows = args.a + round * kRoundRows * kDepth;
    const int row = thread >> 3, chunk = thread & 7;
    const uint32_t target = tile::chunk_at<kKvRows>(at, row, chunk);
    if (kernels::hip::thread_index() < kGroupThreads) {
      if (round > 0) tile::barrier_wait(emptied, (round - 1) & 1);
      tile::copy_chunk(target, rows + row * kDepth + chunk * 8);
      tile::barrier_arrive_after_copies(filled);
    } else {
      while (!tile::barrier_test(filled, round & 1)) {
      }
      const bool seen = tile::named_any<1, kGroupThreads>(thread == 77);
      // Reads a chunk that another thread copied.
      const int other = (thread * 5 + 3) & (kGroupThreads - 1);
      const Chunk c = tile::load_chunk_shared(tile::chunk_at<kKvRows>(at, other >> 3, other & 7));
      for (int e = 0; e < 8 && seen; ++e) {
        const uint32_t word = c.w[e >> 1];
        args.out[(round * kRoundRows + (other >> 3)) * kDepth + (other & 7) * 8 + e] =
            kernels::hip::bits_to_float((e & 1) != 0 ? word & 0xffff0000u : word << 16);
      }
      tile::barrier_arrive(emptied);
    }
  }
}
MLA_PROBE(barriers, 2 * kGroupThreads, barriers)

MLA_PROBE(e4m3, ProbeE4m3::kThreads, ProbeE4m3::run)
#endif

}  // namespace mla::tile_test
