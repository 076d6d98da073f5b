// FlashMLA's kernels for sm_90 as a plain C API (time_peers.py), compiled against its sources
// (build_peers.sh). Pointers are the device's; each call returns after the launch. A fault that
// FlashMLA finds ends the process.
#include <algorithm>
#include <cmath>

#include "params.h"
#include "sm90/decode/dense/splitkv_mla.h"
#include "sm90/decode/sparse_fp8/splitkv_mla.h"
#include "sm90/prefill/sparse/phase1.h"
#include "smxx/decode/combine/combine.h"
#include "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.h"

namespace {

using Bf16 = cutlass::bfloat16_t;

constexpr int kRow = 576, kValues = 512, kPage = 64, kTileRows = 64;
constexpr int kRowBytes = 656;  // a cached row of V3.2
constexpr int kV4Row = 512, kV4RowBytes = 584;
constexpr int kOverheadBlocks = 5;  // as FlashMLA's own interface has it

int Multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Memory for parts of results: [batch + parts, heads, 512] and [batch + parts, heads], fp32.
struct Scratch {
  void* meta;
  int* splits;
  float* o;
  float* lse;
};

void Plan(int batch, int parts, int top_k, int extra, int* lengths, void* meta, int* splits,
          void* stream) {
  GetDecodeSchedMetaParams p = {};
  p.b = batch;
  p.s_q = 1;
  p.block_size_n = kTileRows;
  p.fixed_overhead_num_blocks = kOverheadBlocks;
  p.topk = top_k;
  p.extra_topk = extra;
  p.seqlens_k_ptr = lengths;
  p.tile_scheduler_metadata_ptr = static_cast<DecodingSchedMeta*>(meta);
  p.num_splits_ptr = splits;
  p.num_sm_parts = parts;
  p.stream = static_cast<cudaStream_t>(stream);
  smxx::decode::run_get_decoding_sched_meta_kernel(p);
}

void Combine(int batch, int heads, int parts, void* out, float* lse, const Scratch& scratch,
             void* stream) {
  CombineParams p = {};
  p.b = batch;
  p.s_q = 1;
  p.h_q = heads;
  p.d_v = kValues;
  p.lse = lse;
  p.out = out;
  p.stride_lse_b = p.stride_lse_s_q = heads;
  p.stride_o_b = p.stride_o_s_q = heads * kValues;
  p.stride_o_h_q = kValues;
  p.lse_accum = scratch.lse;
  p.o_accum = scratch.o;
  p.stride_lse_accum_split = p.stride_lse_accum_s_q = heads;
  p.stride_o_accum_split = p.stride_o_accum_s_q = heads * kValues;
  p.stride_o_accum_h_q = kValues;
  p.tile_scheduler_metadata_ptr = static_cast<DecodingSchedMeta*>(scratch.meta);
  p.num_splits_ptr = scratch.splits;
  p.num_sm_parts = parts;
  p.stream = static_cast<cudaStream_t>(stream);
  smxx::decode::run_flash_mla_combine_kernel<Bf16>(p);
}

int Parts(int heads) { return std::max(Multiprocessors() / ((heads + 63) / 64), 1); }

// Rows of a cache: blocks of `page` rows, each block `block_bytes` apart.
struct Rows {
  void* at;
  int* indices;  // [batch, top_k]
  int blocks, page, top_k;
  long long block_bytes;
};

void Sparse(int batch, int heads, bool v4, const Rows& rows, const Rows& extra, float scale,
            void* q, void* out, float* lse, const Scratch& scratch, void* stream) {
  const int dims = v4 ? kV4Row : kRow, row_bytes = v4 ? kV4RowBytes : kRowBytes;
  SparseAttnDecodeParams p = {};
  p.b = batch;
  p.s_q = 1;
  p.h_q = heads;
  p.h_kv = 1;
  p.d_qk = dims;
  p.d_v = kValues;
  p.sm_scale = scale;
  p.sm_scale_div_log2 = scale * static_cast<float>(M_LOG2E);
  p.num_blocks = rows.blocks;
  p.page_block_size = rows.page;
  p.topk = rows.top_k;
  p.model_type = v4 ? ModelType::MODEL1 : ModelType::V32;
  p.q = static_cast<Bf16*>(q);
  p.kv = static_cast<Bf16*>(rows.at);
  p.indices = rows.indices;
  p.lse = lse;
  p.out = static_cast<Bf16*>(out);
  p.extra_num_blocks = extra.blocks;
  p.extra_page_block_size = extra.page;
  p.extra_topk = extra.top_k;
  p.extra_kv = static_cast<Bf16*>(extra.at);
  p.extra_indices = extra.indices;
  p.stride_q_b = p.stride_q_s_q = heads * dims;
  p.stride_q_h_q = dims;
  p.stride_kv_block = static_cast<int>(rows.block_bytes);
  p.stride_kv_row = row_bytes;
  p.stride_indices_b = p.stride_indices_s_q = rows.top_k;
  p.stride_lse_b = p.stride_lse_s_q = heads;
  p.stride_o_b = p.stride_o_s_q = heads * kValues;
  p.stride_o_h_q = kValues;
  if (extra.at != nullptr) {
    p.stride_extra_kv_block = static_cast<int>(extra.block_bytes);
    p.stride_extra_kv_row = row_bytes;
    p.stride_extra_indices_b = p.stride_extra_indices_s_q = extra.top_k;
  }
  p.stream = static_cast<cudaStream_t>(stream);
  p.lse_accum = scratch.lse;
  p.o_accum = scratch.o;
  p.stride_lse_accum_split = p.stride_lse_accum_s_q = heads;
  p.stride_o_accum_split = p.stride_o_accum_s_q = heads * kValues;
  p.stride_o_accum_h_q = kValues;
  p.tile_scheduler_metadata_ptr = static_cast<DecodingSchedMeta*>(scratch.meta);
  p.num_splits_ptr = scratch.splits;
  p.num_sm_parts = Parts(heads);
  using namespace sm90::decode::sparse_fp8;
  if (v4) {
    run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1, 128>(p);
  } else if (heads == 128) {
    run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::V32, 128>(p);
  } else {
    run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::V32, 64>(p);
  }
  Combine(batch, heads, p.num_sm_parts, out, lse, scratch, stream);
}

}  // namespace

extern "C" {

int fm_parts(int heads) { return Parts(heads); }

// meta [parts, 8], splits [batch + 1], int32. top_k -1: dense, by `lengths`.
int fm_plan(int batch, int heads, int top_k, int extra, int* lengths, void* meta, int* splits,
            void* stream) {
  Plan(batch, Parts(heads), top_k, extra, lengths, meta, splits, stream);
  return cudaGetLastError();
}

// q [batch, heads, 576], kv [blocks, 64, 576], table [batch, width], out [batch, heads, 512].
int fm_dense(int batch, int heads, int blocks, int width, float scale, void* q, void* kv,
             int* table, int* lengths, void* out, float* lse, void* meta, int* splits,
             float* o_parts, float* lse_parts, void* stream) {
  DenseAttnDecodeParams p = {};
  p.b = batch;
  p.s_q = 1;
  p.q_seq_per_hk = p.h_q = p.q_head_per_hk = heads;
  p.d = kRow;
  p.d_v = kValues;
  p.h_k = 1;
  p.num_blocks = blocks;
  p.scale_softmax = scale;
  p.scale_softmax_log2 = static_cast<float>(scale * M_LOG2E);
  p.q_ptr = q;
  p.k_ptr = kv;
  p.o_ptr = out;
  p.softmax_lse_ptr = lse;
  p.q_batch_stride = heads * kRow;
  p.q_row_stride = p.k_row_stride = p.q_head_stride = p.k_head_stride = kRow;
  p.k_batch_stride = kPage * kRow;
  p.o_batch_stride = p.o_head_stride = heads * kValues;
  p.o_row_stride = kValues;
  p.block_table = table;
  p.block_table_batch_stride = width;
  p.page_block_size = kPage;
  p.seqlens_k_ptr = lengths;
  p.tile_scheduler_metadata_ptr = static_cast<DecodingSchedMeta*>(meta);
  p.num_sm_parts = Parts(heads);
  p.num_splits_ptr = splits;
  p.total_num_splits = batch + p.num_sm_parts;
  p.softmax_lseaccum_ptr = lse_parts;
  p.oaccum_ptr = o_parts;
  p.stream = static_cast<cudaStream_t>(stream);
  sm90::run_flash_splitkv_mla_kernel<Bf16>(p);
  Combine(batch, heads, p.num_sm_parts, out, lse, {meta, splits, o_parts, lse_parts}, stream);
  return cudaGetLastError();
}

// kv [blocks, page, 656] bytes, indices [batch, top_k]; 64 or 128 heads.
int fm_sparse(int batch, int heads, int top_k, int blocks, float scale, void* q, void* kv,
              int* indices, void* out, float* lse, void* meta, int* splits, float* o_parts,
              float* lse_parts, void* stream) {
  Sparse(batch, heads, false, {kv, indices, blocks, kPage, top_k, kPage * kRowBytes}, {}, scale, q,
         out, lse, {meta, splits, o_parts, lse_parts}, stream);
  return cudaGetLastError();
}

// V4: rows of a window and entries, each cache of blocks of 64, `block_bytes` apart; 128 heads.
int fm_window(int batch, int rows, int entries, int row_blocks, int entry_blocks, int block_bytes,
              float scale, void* q, void* kv, int* row_indices, void* entry_kv, int* entry_indices,
              void* out, float* lse, void* meta, int* splits, float* o_parts, float* lse_parts,
              void* stream) {
  Sparse(batch, 128, true, {kv, row_indices, row_blocks, kPage, rows, block_bytes},
         {entry_kv, entry_indices, entry_blocks, kPage, entries, block_bytes}, scale, q, out, lse,
         {meta, splits, o_parts, lse_parts}, stream);
  return cudaGetLastError();
}

// q [rows, heads, 576], kv [kv_rows, 576], indices [rows, top_k], out [rows, heads, 512].
int fm_sparse_prefill(int rows, int kv_rows, int heads, int top_k, float scale, void* q, void* kv,
                      int* indices, void* out, float* most, float* lse, void* stream) {
  SparseAttnFwdParams p = {};
  p.s_q = rows;
  p.s_kv = kv_rows;
  p.h_q = heads;
  p.h_kv = 1;
  p.d_qk = kRow;
  p.d_v = kValues;
  p.topk = top_k;
  p.sm_scale = scale;
  p.sm_scale_div_log2 = scale * static_cast<float>(M_LOG2E);
  p.q = static_cast<Bf16*>(q);
  p.kv = static_cast<Bf16*>(kv);
  p.indices = indices;
  p.stride_q_s_q = heads * kRow;
  p.stride_q_h_q = p.stride_kv_s_kv = p.stride_kv_h_kv = kRow;
  p.stride_indices_s_q = p.stride_indices_h_kv = top_k;
  p.out = static_cast<Bf16*>(out);
  p.max_logits = most;
  p.lse = lse;
  p.num_sm = Multiprocessors();
  p.stream = static_cast<cudaStream_t>(stream);
  sm90::fwd::run_fwd_phase1_kernel<kRow, false>(p);
  return cudaGetLastError();
}

}  // extern "C"
