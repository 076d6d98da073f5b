// FlashAttention-3's decode for MLA ("qv": 64 rotated columns as keys, 512 as keys and values) as a
// plain C API (time_peers.py), compiled against its sources (build_peers.sh).
#include <cutlass/numeric_types.h>

#include "flash.h"
#include "heuristics.h"

using Bf16 = cutlass::bfloat16_t;

// flash_attention_kernel.cu, a kernel each.
void SplitByPages(Flash_fwd_params& p, cudaStream_t stream);
void SplitByRows(Flash_fwd_params& p, cudaStream_t stream);
void WholeByPages(Flash_fwd_params& p, cudaStream_t stream);
void WholeByRows(Flash_fwd_params& p, cudaStream_t stream);
void CombineParts(Flash_fwd_params& p, cudaStream_t stream);

namespace {

constexpr int kRow = 576, kValues = 512, kRotated = 64, kTile = 64;

int Multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

int RoundUp(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace

extern "C" {

// The bound on parts of a request that FlashAttention-3 chooses for lengths of its own each.
int fa3_splits(int heads, int kv_rows) {
  return num_splits_heuristic((heads + kTile - 1) / kTile, Multiprocessors(),
                              (kv_rows + kTile - 1) / kTile, (heads + kTile - 1) / kTile,
                              kv_rows * kRow * 2, false, 128);
}

// q [batch, heads, 576] with the rotated columns last, kv [blocks, page, 576] alike, table [batch,
// width], out [batch, heads, 512], lse [batch, heads]. plan [3 * batch rounded up to 4, + 1] int32,
// zeros before the first call. copies_pages: a page is one copy of the engine for tensors, else
// rows are copied by threads. planned: the plan of the call before is used, as an engine does from
// its second layer on.
int fa3_mla(int batch, int heads, int width, int blocks, int page, float scale, int splits,
            int copies_pages, int planned, void* q, void* kv, int* table, int* lengths, void* out,
            float* lse, int* plan, float* o_parts, float* lse_parts, void* stream) {
  Flash_fwd_params p = {};
  const auto* rows = static_cast<Bf16*>(kv);
  const auto* queries = static_cast<Bf16*>(q);
  p.is_bf16 = true;
  p.q_ptr = const_cast<Bf16*>(queries + kValues);
  p.qv_ptr = q;
  p.k_ptr = const_cast<Bf16*>(rows + kValues);
  p.v_ptr = kv;
  p.o_ptr = out;
  p.q_batch_stride = p.q_row_stride = p.qv_batch_stride = p.qv_row_stride = heads * kRow;
  p.q_head_stride = p.qv_head_stride = kRow;
  p.k_batch_stride = p.v_batch_stride = page * kRow;
  p.k_row_stride = p.v_row_stride = p.k_head_stride = p.v_head_stride = kRow;
  p.v_dim_stride = 1;
  p.o_batch_stride = p.o_row_stride = heads * kValues;
  p.o_head_stride = kValues;
  p.softmax_lse_ptr = lse;
  p.b = p.b_k = p.total_q = batch;
  p.h = heads;
  p.h_k = 1;
  p.seqlen_q = 1;
  p.seqlen_k = width * page;
  p.total_k = blocks * page;
  p.seqlen_q_rounded = 128;
  p.seqlen_k_rounded = RoundUp(p.seqlen_k, 128);
  p.d = p.d_rounded = kRotated;
  p.dv = p.dv_rounded = kValues;
  p.scale_softmax = scale;
  p.p_dropout = p.rp_dropout = 1;
  p.p_dropout_in_uint8_t = 255;
  p.seqused_k = lengths;
  p.page_table = table;
  p.page_table_batch_stride = width;
  p.page_size = page;
  p.num_pages = blocks;
  p.pagedkv_tma = copies_pages != 0;
  p.window_size_left = p.seqlen_k - 1;
  p.window_size_right = 0;
  p.num_splits = splits;
  p.pack_gqa = true;
  p.arch = 90;
  p.num_sm = Multiprocessors();
  const int offset = RoundUp(batch, 4);
  p.num_splits_dynamic_ptr = plan;
  p.num_m_blocks_ptr = plan + offset;
  p.varlen_batch_idx_ptr = plan + 2 * offset;
  p.tile_count_semaphore = plan + 3 * offset;
  p.tile_count_semaphore_offset = 3 * offset;
  p.varlen_sort_batches = true;
  p.prepare_varlen_pdl = true;
  p.skip_scheduler_metadata_computation = planned != 0;
  if (splits > 1) {
    p.oaccum_ptr = o_parts;
    p.softmax_lseaccum_ptr = lse_parts;
    p.oaccum_row_stride = kValues;
    p.oaccum_head_stride = kValues;
    p.oaccum_batch_stride = heads * kValues;
    p.oaccum_split_stride = static_cast<int64_t>(batch) * heads * kValues;
    p.lseaccum_head_stride = 1;
    p.lseaccum_batch_stride = heads;
    p.lseaccum_split_stride = static_cast<int64_t>(batch) * heads;
  }
  const auto on = static_cast<cudaStream_t>(stream);
  if (splits > 1) {
    copies_pages ? SplitByPages(p, on) : SplitByRows(p, on);
    CombineParts(p, on);
  } else {
    copies_pages ? WholeByPages(p, on) : WholeByRows(p, on);
  }
  if (splits == 1 && planned != 0) {  // else the kernel that merges does it
    cudaMemsetAsync(p.tile_count_semaphore, 0, sizeof(int), on);
  }
  return cudaGetLastError();
}

}  // extern "C"
