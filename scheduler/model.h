// Describes a registered model as the scheduler and the transports see it; immutable.
#ifndef MLA_SCHEDULER_MODEL_H_
#define MLA_SCHEDULER_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/launch.h"
#include "kernels/types/select.h"
#include "scheduler/request.h"

namespace mla::scheduler {

// The precision in which EXPANDED holds the queries between absorption and the scores.
enum class QueryPrecision : uint8_t {
  kDefault,  // resolved at registration: kSplit if the backend supports it, else kBf16
  kBf16,     // bf16 if the client sends bf16, unless the backend computes in fp32 anyway
  kSplit,    // fp32; with bf16 operands the scores then take a second product
};

inline constexpr size_t kWeightsDigestBytes = 32;
// Selects 8-bit products for attention over 8-bit rows.
enum class Fp8Compute : uint8_t {
  kAuto,  // resolved at registration: kOn if that is faster on the backend, else kOff
  kOff,
  kOn,
};

// The range that an Attend asks for, before its numbers are narrowed.
struct AttendRange {
  int64_t layer = 0;
  int64_t row_begin = 0, row_count = 0;
  int64_t head_offset = 0, num_heads = 0;
};

struct ModelSpec {
  std::string id;
  kernels::Geometry geometry;
  int32_t layers = 0;
  double softmax_scale = 0;  // > 0; multiplies q·k before the softmax; has no default
  int32_t page_size = 0;     // 0 at registration: Limits::default_page_size
  QueryPrecision query_precision = QueryPrecision::kDefault;
  kernels::KvFormat kv_format = kernels::KvFormat::kBf16;
  // For kSparse: requests may bring index lists of at most `top_k` entries. 0 for kDense.
  kernels::AttentionKind attention = kernels::AttentionKind::kDense;
  int32_t top_k = 0;
  kernels::IndexerShape indexer;  // the server's own, of kSparse
  // Digest of all weights that produce the rows, computed by the client: empty, or
  // kWeightsDigestBytes.
  std::string weights_digest = {};
  Fp8Compute fp8_compute = Fp8Compute::kAuto;
  // For kWindow (kernels/types/window.h): the number of rows that are kept, the number of positions
  // that an entry of each layer stands for (0: the layer has no entries), and the format of
  // entries. Index lists have at most `top_k` entries.
  int32_t window = 0;
  std::vector<int32_t> ratios = {};
  int32_t tail_bytes = 0;  // size of a sequence's tail (Tail); 0: no tails
  kernels::KvFormat entry_format = kernels::KvFormat::kBf16;
  bool needs_sinks = false;  // for kWindow: rows wait until every head of every layer has its sink
  // For PROJECTED, which such models have in place of ABSORBED and EXPANDED; else empty and kNone.
  kernels::ProjectedShape projected;
  kernels::RopeLayout rope = kernels::RopeLayout::kNone;
  friend bool operator==(const ModelSpec&, const ModelSpec&) = default;
  // Returns the contents as text: all fields but the id and projected.weights, because no row
  // depends on these two. Different contents give different texts.
  std::string ContentsText() const;

  // --- Rules of an Attend that need only the model. The validator of messages applies them before
  // it sizes memory by these numbers. The engine applies them again, because the step id may name
  // another step by then. Errors name the field, the value and the limit.
  // Checks that the range lies inside a step of `total_rows` >= 1 rows. An append-only request
  // needs no heads.
  absl::Status CheckAttend(const AttendRange& range, Profile profile, int32_t total_rows) const;
  // Checks that the model allows requests of this profile.
  absl::Status CheckProfile(Profile profile, bool has_kv) const;

  // Returns the operand type of the products of the absorbed form.
  kernels::DType products() const {
    return fp8_compute == Fp8Compute::kOn ? kernels::DType::kFp8E4m3 : kernels::DType::kBf16;
  }
  // Returns the number of elements of one query or output head in a profile; 0 for append-only.
  // For PROJECTED these are the server's own tensors; a client's rows differ (q_row_dim,
  // o_row_dim).
  int32_t q_dim(Profile profile) const;
  int32_t o_dim(Profile profile) const;
  // Returns the number of elements of a row of q and of o as the client has them, of `heads` heads.
  int64_t q_row_dim(Profile profile, int32_t heads) const {
    return profile == Profile::kProjected ? projected.q_lora_rank : int64_t{heads} * q_dim(profile);
  }
  int64_t o_row_dim(Profile profile, int32_t heads) const {
    return profile == Profile::kProjected ? projected.hidden_size : int64_t{heads} * o_dim(profile);
  }
  // Return the number of weights of one head in one layer: W_UK and W_UV, or a part of PROJECTED.
  int64_t head_elements() const {
    return int64_t{geometry.kv_lora_rank} * (int64_t{geometry.nope_dim} + geometry.v_dim);
  }
  int64_t head_elements(kernels::ProjectedPart part) const {
    return part == kernels::ProjectedPart::kQueries
               ? int64_t{projected.q_lora_rank} * geometry.expanded_q_dim()
               : int64_t{projected.hidden_size} * geometry.v_dim;
  }
  // Returns the number of weights of one head in one layer, for all profiles that the model has.
  int64_t head_weights() const;
  // Returns the bytes of a head's weights of PROJECTED as they come and go
  // (kernels/projected_weights.h).
  int64_t head_bytes(kernels::ProjectedPart part, int32_t head) const;
  // Returns the number of bytes of a layer's weights as a GPU holds them: as bf16, or PROJECTED's
  // as codes and scales. The rows of PROJECTED's matrices count with their padding: without it,
  // small models could take many times their share of the memory.
  int64_t layer_weight_bytes() const;
  // Returns the number of elements of a KV row as sent: the row itself, then its index key if there
  // is an indexer.
  int32_t sent_row_dim() const { return geometry.kv_row_dim() + indexer.dim; }

  // Returns true if the geometry has the dims of the expanded form, which needs weights.
  bool has_expanded() const { return geometry.nope_dim > 0 && geometry.v_dim > 0; }
  bool windowed() const { return attention == kernels::AttentionKind::kWindow; }
  int32_t ratio(int32_t layer) const { return windowed() ? ratios[static_cast<size_t>(layer)] : 0; }
  // Returns the number of rows of a page of the window. Pages as large as the pages of entries
  // would make a sequence keep many more rows than the window.
  int32_t window_page_size() const { return std::min(page_size, kWindowPageRows); }
  static constexpr int32_t kWindowPageRows = 64;
};

// The sink of a head that has no sink.
inline constexpr float kNoSink = -std::numeric_limits<float>::infinity();

// The layers and heads of an upload of sinks. A count of 0 means all from the first one on.
struct SinkSlice {
  int64_t layer_begin = 0;
  int64_t layer_count = 0;
  int64_t head_begin = 0;
  int64_t head_count = 0;
};

// Identifies one upload of weights; never 0, and not reused while the model lives.
using UploadId = uint64_t;

// A model that has all its weights, or all its sinks if it has a window. Weights stay the same as
// long as the model is registered.
struct HeldWeights {
  std::string tenant;
  std::shared_ptr<const ModelSpec> spec;  // identifies the registration, too
  std::vector<float> kv_scales;           // one for each layer; empty if the format has none
  std::vector<float> sinks;               // [layers, num_heads]; empty: the model has weights
};

struct ModelInfo {
  ModelSpec spec;
  int64_t page_group_bytes = 0;
  int64_t page_groups_max = 0;
  int64_t max_sequence_rows = 0;
  uint64_t instance = 0;  // another number whenever a model of this name is made
  bool weights_complete = false;
  // Rows may be stored: the format needs no scales, or the model has them.
  bool scales_complete = false;
  bool sinks_complete = false;  // spec.needs_sinks is false, or the model has all sinks
  int32_t sequences = 0;
  int64_t lease_ms = 0;       // 0: the model stays until it is unregistered
  int64_t lease_left_ms = 0;  // lease_ms unless the model has a lease and no sequences
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_MODEL_H_
