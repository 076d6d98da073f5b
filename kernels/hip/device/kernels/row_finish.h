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
  // `column` is the first of the run. sum(other) is the whole sum of another column of the row.
  template <class Sum>
  MLA_DEVICE static void run(const RowProductArgs& args, const RowProductRow& r, int column,
                             float (&x)[kRowRun], const Sum& sum) {
    if (args.pairs > 0 && r.rotation != nullptr) {
      const int in_head = column % args.head;
#pragma unroll
      for (int i = 0; i < kRowRun; ++i) {
        int e = in_head + i;
        while (e >= args.head) e -= args.head;
        if (column + i < args.columns) x[i] = rotated(args, r, column + i, e, x[i], sum);
      }
    }
    store(args, r.out, column, x);
  }

 private:
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
    float x[kRowRun] = {};
    for (int s = 0; s < args.splits; ++s) {
      uint32_t words[kRowRun];
      load_words(words, sums_of(args, s, row) + column);
#pragma unroll
      for (int i = 0; i < kRowRun; ++i) x[i] += bits_to_float(words[i]);
    }
    RowFinish::run(args, args.rows[row], column, x, [&args, row](int other) {
      float y = 0.0f;
      for (int s = 0; s < args.splits; ++s) {
        y += as_global<const float>(sums_of(args, s, row))[other];
      }
      return y;
    });
  }

 private:
  MLA_DEVICE static const float* sums_of(const RowProductArgs& args, int split, int row) {
    return args.sums + (static_cast<int64_t>(split) * args.count + row) * args.pitch;
  }
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KERNELS_ROW_FINISH_H_
