// Describes the shape that a caller asks of a backend, independent of any one launch. It is the key
// of capability checks and dispatch.
#ifndef MLA_KERNELS_TYPES_ATTENTION_DESC_H_
#define MLA_KERNELS_TYPES_ATTENTION_DESC_H_

#include <cstdint>
#include <string>

#include "kernels/formats/dtype.h"
#include "kernels/formats/kv_format.h"

namespace mla::kernels {

// The geometry of a model's attention, as registered. All dims are counted in elements and are
// data, never constants.
struct Geometry {
  int32_t num_heads = 0;     // query heads of the model; a request may carry a slice of them
  int32_t kv_lora_rank = 0;  // latent part of a KV row, for keys and values (DeepSeek-V3: 512)
  int32_t rope_dim = 0;      // rotated part of a KV row, keys only (64)
  int32_t nope_dim = 0;      // unrotated part of an expanded query head (128)
  int32_t v_dim = 0;         // value part of an expanded output head (128)

  int32_t kv_row_dim() const { return kv_lora_rank + rope_dim; }
  int32_t absorbed_q_dim() const { return kv_lora_rank + rope_dim; }
  int32_t expanded_q_dim() const { return nope_dim + rope_dim; }
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

// The two forms of the same attention.
enum class AttentionForm : uint8_t {
  // Query rows live in latent space (W_UK absorbed): q [rows, heads, kv_lora_rank + rope_dim]
  // against the shared KV row; output [rows, heads, kv_lora_rank].
  kAbsorbed = 1,
  // Keys and values are up-projected from the latent rows through W_UK / W_UV:
  // q [rows, heads, nope_dim + rope_dim], output [rows, heads, v_dim].
  kExpanded = 2,
};

// Selects the KV rows that a query row attends to.
enum class AttentionKind : uint8_t {
  kDense = 1,   // all rows that it sees
  kSparse = 2,  // rows of its own index list; in the absorbed form
  // The last rows, and compressed entries (kernels/types/window.h); in the absorbed form.
  kWindow = 3,
};

struct AttentionDesc {
  Geometry geometry;
  AttentionForm form = AttentionForm::kAbsorbed;
  KvFormat kv_format = KvFormat::kBf16;
  DType q_dtype = DType::kBf16;
  DType o_dtype = DType::kBf16;
  int32_t page_size = 64;  // rows a page, >= 1
  AttentionKind attention = AttentionKind::kDense;
  KvFormat entry_format = KvFormat::kBf16;  // format of the entries of kWindow
  // The dtype of the products over 8-bit rows: kBf16 or kFp8E4m3. For kFp8E4m3 a kernel may round
  // queries and probabilities, and in the expanded form keys and values too.
  DType products = DType::kBf16;
  // Queries arrive, and outputs leave, while the launch runs, in the order of segments. Such a
  // launch is planned with traits of its own, and has the absorbed form.
  bool streamed = false;

  // Returns the number of elements of one head's output row.
  int32_t value_dim() const {
    if (attention == AttentionKind::kWindow) return geometry.kv_row_dim();
    return form == AttentionForm::kAbsorbed ? geometry.kv_lora_rank : geometry.v_dim;
  }
  friend bool operator==(const AttentionDesc&, const AttentionDesc&) = default;
};

const char* Name(AttentionForm form);

// Returns one line for logs and refusals, e.g. "absorbed heads=128 lora=512 rope=64 q=bf16 o=bf16
// kv=bf16 page=64".
std::string ToString(const AttentionDesc& desc);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_ATTENTION_DESC_H_
