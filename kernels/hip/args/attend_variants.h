// Lists every attention kernel of every architecture, one on each line. These lists generate the
// kernels (device_code.hip), their table on the host (host_images/device_kernels.h), the shapes
// that a backend runs and how it launches them (arch_traits.h), and the report's kernels
// (tools/report.py).
//
//   X(kernel, rows, tile, format, products, attention, threads, shared, order)
//     rows       packed rows of a block
//     tile       KV rows that it takes at a time
//     format     KvFormat of the rows in the pool
//     products   DType of queries and probabilities in matrix products; queries come as bf16.
//                kFp8E4m3 rounds both, and is for models that ask for it (AttentionDesc::products)
//     attention  AttentionKind: KV rows by position, KV rows that index lists name, or a window
//                and entries of the same format
//     threads    threads of a block
//     shared     dynamic shared memory in bytes; 0 if it is static
//     order      PartOrder of partial rows
//
// Lines with the same format, products and attention are in the order of rows.
//
//   X(kernel, rows, format, products, threads, shared)   the kernel for rows by position that
//   replaces the one of the same rows, format and products in launches of one tile, whose parts the
//   blocks merge themselves (SplitArgs)
//
//   X(kernel, rows, format, products, threads, shared)   the kernel for rows by position that
//   replaces the one of the same rows, format and products in launches whose KV rows lie in boxes
//   of tensor maps (BoxArgs)
//
//   X(kernel, rows, threads, shared)   the kernel for bf16 rows by position with this many packed
//   rows, for launches whose queries arrive while they run (StreamArgs)
//
//   X(kernel, nope, value, format, products, threads, shared)   up-projection of cached rows to
//   keys and values of these dims, for the expanded form; products: DType of the keys and values
//   that it makes, for attention with these products
//
//   X(kernel, nope, value, products, threads, shared, blocks)   attention of the expanded form;
//   blocks: blocks that a unit (SM, CU) holds at a time
#ifndef MLA_KERNELS_HIP_ARGS_ATTEND_VARIANTS_H_
#define MLA_KERNELS_HIP_ARGS_ATTEND_VARIANTS_H_

#define MLA_ATTEND_GFX950(X)                                                                     \
  X(mla_attend_64, 64, 32, kBf16, kBf16, kDense, 256, 0, kColumns)                               \
  X(mla_attend_128, 128, 32, kBf16, kBf16, kDense, 256, 0, kColumns)                             \
  X(mla_attend_64_fp8_tensor, 64, 64, kFp8Tensor, kBf16, kDense, 256, 0, kColumns)               \
  X(mla_attend_128_fp8_tensor, 128, 32, kFp8Tensor, kBf16, kDense, 256, 0, kColumns)             \
  X(mla_attend_64_fp8_row, 64, 64, kFp8Row, kBf16, kDense, 256, 0, kColumns)                     \
  X(mla_attend_64_lists, 64, 32, kBf16, kBf16, kSparse, 256, 0, kColumns)                        \
  X(mla_attend_128_lists, 128, 32, kBf16, kBf16, kSparse, 256, 0, kColumns)                      \
  X(mla_attend_64_fp8_tensor_lists, 64, 64, kFp8Tensor, kBf16, kSparse, 256, 0, kColumns)        \
  X(mla_attend_128_fp8_tensor_lists, 128, 32, kFp8Tensor, kBf16, kSparse, 256, 0, kColumns)      \
  X(mla_attend_64_fp8_row_lists, 64, 64, kFp8Row, kBf16, kSparse, 256, 0, kColumns)              \
  X(mla_attend_64_window, 64, 32, kBf16, kBf16, kWindow, 256, 0, kColumns)                       \
  X(mla_attend_128_window, 128, 32, kBf16, kBf16, kWindow, 256, 0, kColumns)                     \
  X(mla_attend_64_fp8_page_window, 64, 64, kFp8Page, kBf16, kWindow, 256, 0, kColumns)           \
  X(mla_attend_128_fp8_tensor_products, 128, 64, kFp8Tensor, kFp8E4m3, kDense, 256, 0, kColumns) \
  X(mla_attend_128_fp8_tensor_products_lists, 128, 64, kFp8Tensor, kFp8E4m3, kSparse, 256, 0,    \
    kColumns)                                                                                    \
  X(mla_attend_128_fp8_row_products, 128, 64, kFp8Row, kFp8E4m3, kDense, 256, 0, kColumns)       \
  X(mla_attend_128_fp8_row_products_lists, 128, 64, kFp8Row, kFp8E4m3, kSparse, 256, 0, kColumns)
#define MLA_EXPAND_GFX950(X)                                                \
  X(mla_expand, 128, 128, kBf16, kBf16, 256, 0)                             \
  X(mla_expand_fp8_tensor, 128, 128, kFp8Tensor, kBf16, 256, 0)             \
  X(mla_expand_fp8_row, 128, 128, kFp8Row, kBf16, 256, 0)                   \
  X(mla_expand_fp8_tensor_products, 128, 128, kFp8Tensor, kFp8E4m3, 256, 0) \
  X(mla_expand_fp8_row_products, 128, 128, kFp8Row, kFp8E4m3, 256, 0)       \
  X(mla_expand_256, 192, 256, kBf16, kBf16, 256, 0)                         \
  X(mla_expand_256_fp8_tensor, 192, 256, kFp8Tensor, kBf16, 256, 0)         \
  X(mla_expand_256_fp8_row, 192, 256, kFp8Row, kBf16, 256, 0)
#define MLA_EXPANDED_GFX950(X)                                   \
  X(mla_attend_expanded, 128, 128, kBf16, 256, 0, 2)             \
  X(mla_attend_expanded_products, 128, 128, kFp8E4m3, 256, 0, 2) \
  X(mla_attend_expanded_256, 192, 256, kBf16, 256, 0, 1)

#define MLA_ATTEND_GFX942(X)                                                                     \
  X(mla_attend_64, 64, 32, kBf16, kBf16, kDense, 256, 0, kColumns)                               \
  X(mla_attend_64_fp8_tensor, 64, 32, kFp8Tensor, kBf16, kDense, 256, 0, kColumns)               \
  X(mla_attend_64_fp8_row, 64, 32, kFp8Row, kBf16, kDense, 256, 0, kColumns)                     \
  X(mla_attend_64_lists, 64, 32, kBf16, kBf16, kSparse, 256, 0, kColumns)                        \
  X(mla_attend_64_fp8_tensor_lists, 64, 32, kFp8Tensor, kBf16, kSparse, 256, 0, kColumns)        \
  X(mla_attend_64_fp8_row_lists, 64, 32, kFp8Row, kBf16, kSparse, 256, 0, kColumns)              \
  X(mla_attend_64_window, 64, 32, kBf16, kBf16, kWindow, 256, 0, kColumns)                       \
  X(mla_attend_64_fp8_page_window, 64, 32, kFp8Page, kBf16, kWindow, 256, 0, kColumns)           \
  X(mla_attend_64_fp8_tensor_products, 64, 32, kFp8Tensor, kFp8E4m3, kDense, 256, 0, kColumns)   \
  X(mla_attend_128_fp8_tensor_products, 128, 32, kFp8Tensor, kFp8E4m3, kDense, 256, 0, kColumns) \
  X(mla_attend_64_fp8_tensor_products_lists, 64, 32, kFp8Tensor, kFp8E4m3, kSparse, 256, 0,      \
    kColumns)                                                                                    \
  X(mla_attend_128_fp8_tensor_products_lists, 128, 32, kFp8Tensor, kFp8E4m3, kSparse, 256, 0,    \
    kColumns)
#define MLA_EXPAND_GFX942(X)                                        \
  X(mla_expand, 128, 128, kBf16, kBf16, 256, 0)                     \
  X(mla_expand_fp8_tensor, 128, 128, kFp8Tensor, kBf16, 256, 0)     \
  X(mla_expand_fp8_row, 128, 128, kFp8Row, kBf16, 256, 0)           \
  X(mla_expand_256, 192, 256, kBf16, kBf16, 256, 0)                 \
  X(mla_expand_256_fp8_tensor, 192, 256, kFp8Tensor, kBf16, 256, 0) \
  X(mla_expand_256_fp8_row, 192, 256, kFp8Row, kBf16, 256, 0)
#define MLA_EXPANDED_GFX942(X)                       \
  X(mla_attend_expanded, 128, 128, kBf16, 256, 0, 2) \
  X(mla_attend_expanded_256, 192, 256, kBf16, 256, 0, 1)

#define MLA_ATTEND_SM90(X)                                                                         \
  X(mla_attend_16, 16, 64, kBf16, kBf16, kDense, 256, 223744, kColumns)                            \
  X(mla_attend_64, 64, 64, kBf16, kBf16, kDense, 384, 224000, kExchanged)                          \
  X(mla_attend_16_fp8_tensor, 16, 64, kFp8Tensor, kBf16, kDense, 640, 208272, kPaired)             \
  X(mla_attend_64_fp8_tensor, 64, 64, kFp8Tensor, kBf16, kDense, 384, 232192, kExchanged)          \
  X(mla_attend_16_fp8_row, 16, 64, kFp8Row, kBf16, kDense, 640, 192912, kPaired)                   \
  X(mla_attend_64_fp8_row, 64, 64, kFp8Row, kBf16, kDense, 384, 232192, kExchanged)                \
  X(mla_attend_64_lists, 64, 64, kBf16, kBf16, kSparse, 384, 224064, kExchanged)                   \
  X(mla_attend_16_fp8_tensor_lists, 16, 64, kFp8Tensor, kBf16, kSparse, 640, 208272, kPaired)      \
  X(mla_attend_64_fp8_tensor_lists, 64, 64, kFp8Tensor, kBf16, kSparse, 384, 232256, kExchanged)   \
  X(mla_attend_16_fp8_row_lists, 16, 64, kFp8Row, kBf16, kSparse, 640, 192912, kPaired)            \
  X(mla_attend_64_fp8_row_lists, 64, 64, kFp8Row, kBf16, kSparse, 384, 232256, kExchanged)         \
  X(mla_attend_64_fp8_tensor_products, 64, 64, kFp8Tensor, kFp8E4m3, kDense, 512, 204608, kPaired) \
  X(mla_attend_64_fp8_row_products, 64, 64, kFp8Row, kFp8E4m3, kDense, 384, 231424, kPaired)       \
  X(mla_attend_64_fp8_tensor_products_lists, 64, 64, kFp8Tensor, kFp8E4m3, kSparse, 512, 204640,   \
    kPaired)                                                                                       \
  X(mla_attend_64_fp8_row_products_lists, 64, 64, kFp8Row, kFp8E4m3, kSparse, 384, 231456,         \
    kPaired)                                                                                       \
  X(mla_attend_64_window, 64, 64, kBf16, kBf16, kWindow, 384, 215872, kExchanged)                  \
  X(mla_attend_64_fp8_page_window, 64, 64, kFp8Page, kBf16, kWindow, 384, 230208, kExchanged)
#define MLA_SPLIT_SM90(X)                                        \
  X(mla_split_16, 16, kBf16, kBf16, 256, 223744)                 \
  X(mla_split_64, 64, kBf16, kBf16, 384, 224000)                 \
  X(mla_split_16_fp8_tensor, 16, kFp8Tensor, kBf16, 640, 208272) \
  X(mla_split_16_fp8_row, 16, kFp8Row, kBf16, 640, 192912)       \
  X(mla_split_64_fp8_row_products, 64, kFp8Row, kFp8E4m3, 384, 231424)
#define MLA_BOXES_SM90(X)                                                           \
  X(mla_attend_64_boxes, 64, kBf16, kBf16, 384, 224000)                             \
  X(mla_attend_64_fp8_tensor_products_boxes, 64, kFp8Tensor, kFp8E4m3, 512, 204608) \
  X(mla_attend_64_fp8_row_products_boxes, 64, kFp8Row, kFp8E4m3, 384, 231424)
#define MLA_STREAM_SM90(X) X(mla_stream_64, 64, 384, 224016)
#define MLA_EXPAND_SM90(X)                                                       \
  X(mla_expand, 128, 128, kBf16, kBf16, 384, 229568)                             \
  X(mla_expand_fp8_tensor, 128, 128, kFp8Tensor, kBf16, 384, 229568)             \
  X(mla_expand_fp8_row, 128, 128, kFp8Row, kBf16, 384, 229568)                   \
  X(mla_expand_fp8_tensor_products, 128, 128, kFp8Tensor, kFp8E4m3, 384, 229600) \
  X(mla_expand_fp8_row_products, 128, 128, kFp8Row, kFp8E4m3, 384, 229600)       \
  X(mla_expand_256, 192, 256, kBf16, kBf16, 384, 229568)                         \
  X(mla_expand_256_fp8_tensor, 192, 256, kFp8Tensor, kBf16, 384, 229568)         \
  X(mla_expand_256_fp8_row, 192, 256, kFp8Row, kBf16, 384, 229568)
#define MLA_EXPANDED_SM90(X)                                          \
  X(mla_attend_expanded, 128, 128, kBf16, 384, 213632, 1)             \
  X(mla_attend_expanded_products, 128, 128, kFp8E4m3, 384, 215232, 1) \
  X(mla_attend_expanded_256, 192, 256, kBf16, 384, 197248, 1)

#endif  // MLA_KERNELS_HIP_ARGS_ATTEND_VARIANTS_H_
