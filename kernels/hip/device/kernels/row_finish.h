// The end of products of whole rows (row_product.h): adds up the sums of the shares of a depth in
// order, rotates queries, and rounds once. A block of a product without shares does the same with
// its own sums.
#ifndef MLA_KERNELS_HIP_DEVICE_KERNELS_ROW_FINISH_H_
#define MLA_KERNELS_HIP_DEVICE_KERNELS_ROW_FINISH_H_

#include "kernels/hip/args/row_args.h"
#include "kernels/hip/device/primitives/late.h"
#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

// The last part of a product: rotates sums, rounds once, and stores kRowRun columns of a row.
struct RowFinish {
  // Returns the place of `column`, the first of a run, in its head.
  MLA_DEVICE static int in_head(const RowProductArgs& args, int column) {
    return args.pairs > 0 ? column % args.head : 0;
  }
  // Rotates the same run of columns of several rows. It begins at `column`, whose place in its head
  // is `in_head`. sum(i, other) is the whole sum of another column of row i.
  template <int kRows, class Sum>
  MLA_DEVICE static void rotate(const RowProductArgs& args, const RowProductRow (&rows)[kRows],
                                int column, int in_head, float (&x)[kRows][kRowRun],
                                const Sum& sum) {
    const int place = in_head - (args.head - 2 * args.pairs);
    if (args.pairs == 0 || place + kRowRun <= 0) return;
    if (args.halves == 0 && place >= 0 && (place & 1) == 0 && in_head + kRowRun <= args.head) {
      return rotate_pairs(args, rows, place >> 1, x);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (rows[i].rotation == nullptr) continue;
#pragma unroll
      for (int j = 0; j < kRowRun; ++j) {
        int e = in_head + j;
        while (e >= args.head) e -= args.head;
        if (column + j >= args.columns) continue;
        x[i][j] = rotated(args, rows[i], column + j, e, x[i][j],
                          [&sum, i](int other) { return sum(i, other); });
      }
    }
  }
  MLA_DEVICE static void store(const RowProductArgs& args, void* out, int column,
                               const float (&x)[kRowRun]) {
    const bool f32 = args.out_is_f32 != 0;
    if (column + kRowRun <= args.columns) {
      const int bytes = f32 ? 4 : 2;
      return store_run(out, column, x, f32, aligned_to(out, 0, 0, bytes, bytes * kRowRun));
    }
#pragma unroll
    for (int i = 0; i < kRowRun; ++i) {
      if (column + i >= args.columns) continue;
      if (f32) {
        as_global<float>(out)[column + i] = x[i];
      } else {
        as_global<uint16_t>(out)[column + i] = to_bf16(x[i]);
      }
    }
  }

 private:
  // Rotates as `rotate` does, where the run is whole pairs of neighbours, from `pair` on. All loads
  // are on their way together.
  template <int kRows>
  MLA_DEVICE static void rotate_pairs(const RowProductArgs& args,
                                      const RowProductRow (&rows)[kRows], int pair,
                                      float (&x)[kRows][kRowRun]) {
    constexpr int kPairs = kRowRun / 2;
    float cosines[kRows][kPairs], sines[kRows][kPairs];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (rows[i].rotation == nullptr) continue;
      const auto* const rotation = as_global<const float>(rows[i].rotation);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        cosines[i][j] = rotation[pair + j];
        sines[i][j] = rotation[args.pairs + pair + j];
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (rows[i].rotation == nullptr) continue;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float first = x[i][2 * j], second = x[i][2 * j + 1];
        x[i][2 * j] = first * cosines[i][j] - second * sines[i][j];
        x[i][2 * j + 1] = first * sines[i][j] + second * cosines[i][j];
      }
    }
  }
  // Returns element `e` of a head after the rotation; x is its value before it.
  template <class Sum>
  MLA_DEVICE static float rotated(const RowProductArgs& args, const RowProductRow& r, int column,
                                  int e, float x, const Sum& sum) {
    const int place = e - (args.head - 2 * args.pairs);
    if (place < 0) return x;
    const bool halves = args.halves != 0;
    const bool second = halves ? place >= args.pairs : (place & 1) != 0;
    const int pair = halves ? (second ? place - args.pairs : place) : place >> 1;
    const int apart = halves ? args.pairs : 1;
    const float y = sum(column + (second ? -apart : apart));
    const auto* const rotation = as_global<const float>(r.rotation);
    const float cosine = rotation[pair], sine = rotation[args.pairs + pair];
    return second ? y * sine + x * cosine : x * cosine - y * sine;
  }
};

// Grid: x = runs of kRowRun columns, y = row.
struct FinishRows {
  static constexpr int kThreads = 256;

  MLA_DEVICE static void run(const RowProductArgs& args) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int row = block_index_y();
    const int column = (block_index() * kThreads + thread_index()) * kRowRun;
    if (column >= args.columns) return;
    float x[1][kRowRun] = {};
    for (int s = 0; s < args.splits; ++s) {
      uint32_t words[kRowRun];
      load_words(words, sums_of(args, s, row) + column);
#pragma unroll
      for (int i = 0; i < kRowRun; ++i) x[0][i] += bits_to_float(words[i]);
    }
    const RowProductRow rows[1] = {args.rows[row]};
    const auto sum = [&args, row](int, int other) {
      float y = 0.0f;
      for (int s = 0; s < args.splits; ++s) {
        y += as_global<const float>(sums_of(args, s, row))[other];
      }
      return y;
    };
    RowFinish::rotate(args, rows, column, RowFinish::in_head(args, column), x, sum);
    RowFinish::store(args, rows[0].out, column, x[0]);
  }

 private:
  MLA_DEVICE static const float* sums_of(const RowProductArgs& args, int split, int row) {
    return args.sums + (static_cast<int64_t>(split) * args.count + row) * args.pitch;
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_ROW_FINISH_H_
