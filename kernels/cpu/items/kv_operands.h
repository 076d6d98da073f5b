// Prepares the KV rows of one item, a chunk at a time, as operands of its products. It finds rows
// in their pages, widens 8-bit formats, up-projects in the expanded form and packs values.
//
// Its memory is a thread's scratch memory, divided by RunLayout. One thread uses it.
#ifndef MLA_KERNELS_CPU_ITEMS_KV_OPERANDS_H_
#define MLA_KERNELS_CPU_ITEMS_KV_OPERANDS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/items/item_runner.h"
#include "kernels/cpu/items/row_io.h"

namespace mla::kernels::cpu {

class KvOperands {
 public:
  // For the item's segment; unless the attention is dense, the item has one query row.
  KvOperands(const RunContext& context, const WorkInfo& work, const PackedWeights& weights,
             std::byte* scratch)
      : context_(context),
        kernels_(*context.kernels),
        layout_(context.layout),
        segment_(context.params->segments[static_cast<size_t>(work.segment)]),
        window_(WindowOf(context, work)),
        q_row_(work.q_begin),
        weights_(weights),
        scratch_(scratch) {}

  // Expanded form: makes W_UK of head `head` of the model ready for up-projections.
  void SelectHead(int32_t head);
  // Makes a chunk of rows [begin, begin + entries) of the segment, or of the rows at these places
  // of its index list or window. Returns how many rows it has. `keep_rests`: in the expanded form,
  // also keeps the rounding remainders of up-projected values. `pack_values`: false if the product
  // packs them.
  int32_t Prepare(int32_t begin, int32_t entries, bool keep_rests, bool pack_values);
  // Returns true if a product with `panels` panels of queries packs the values of its rows.
  bool PacksInProduct(int32_t panels) const;
  // Finds rows that products may fetch into a cache while they run.
  void FindNext(int32_t begin, int32_t count);

  // Rows of the chunk.
  const void* const* keys() const { return As<const void*>(layout_.key_ptrs); }
  const void* const* next_rows() const { return As<const void*>(layout_.next_rows); }
  int32_t next_count() const { return next_count_; }
  // Returns the values of the tile that begins at row `row` of the chunk, in the form that
  // AccumulateArgs takes.
  const void* values(int32_t row) const;
  uint16_t* value_panels(int32_t row) const {  // bf16 levels: storage of `values`
    return As<uint16_t>(layout_.value_panels_at + row / layout_.tile_rows * layout_.v_tile_bytes);
  }
  const void* value_rests(int32_t row) const;
  int64_t values_ld() const;
  float Value(int32_t row, int32_t d, bool with_rest) const;
  bool ValuesFinite(int32_t row, int32_t rows) const;

  // Returns the factor of an output whose log-sum-exp is `lse`; 1 without sinks.
  float SinkFactorOf(int64_t head, float lse) const {
    const bool sinks = window_ != nullptr && window_->sinks != nullptr;
    return sinks ? static_cast<float>(SinkFactor(window_->sinks[head], lse)) : 1.0f;
  }

  // Returns the factor for logits and outputs. In formats with one scale a layer, keys and values
  // are unscaled codes.
  float scale() const {
    return context_.params->desc.kv_format == KvFormat::kFp8Tensor ? segment_.kv_scale : 1.0f;
  }

 private:
  template <typename T>
  T* As(int64_t at) const {
    return reinterpret_cast<T*>(scratch_ + at);
  }
  bool bf16() const { return kernels_.bf16_operands; }

  static const WindowRecord* WindowOf(const RunContext& context, const WorkInfo& work) {
    if (context.params->desc.attention != AttentionKind::kWindow) return nullptr;
    return &context.params->windows[static_cast<size_t>(work.segment)];
  }

  // Counts of found rows. The first `of_segment` are rows of the segment; entries of a window
  // follow.
  struct Found {
    int32_t rows, of_segment;
  };
  Found Find(int32_t begin, int32_t count, const FoundRows& places) const;
  Found FindWindow(int32_t begin, int32_t count, const FoundRows& places) const;
  void WidenRows(int32_t first, int32_t count);
  void WidenPart(const KvRowLayout& kv, int32_t first, int32_t count);
  void PackValues(const uint16_t* const* values, int32_t first, int32_t count);
  void UpProject(int32_t count, bool keep_rests);
  void PackRests(const float* up, int32_t count);
  const float* FloatValues(int32_t row) const;  // for fp32 levels

  const RunContext& context_;
  const KernelSet& kernels_;
  const RunLayout& layout_;
  const SegmentRecord& segment_;
  const WindowRecord* const window_;
  const int32_t q_row_;
  const PackedWeights& weights_;
  std::byte* scratch_;
  const std::byte* head_weights_ = nullptr;
  int32_t next_count_ = 0;
  int32_t of_segment_ = 0;  // rows of the chunk that are not entries of a window
};

}  // namespace mla::kernels::cpu

#endif  // MLA_KERNELS_CPU_ITEMS_KV_OPERANDS_H_
