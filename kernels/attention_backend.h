// The seam between the scheduler and what executes attention: plan, submit, complete.
//
// A backend owns the bytes (KV pool, weights, workspaces) and executes launches; it decides nothing
// about batching, pages or plans. The engine drives it like this:
//
//   Create -> CanRun (at model registration) -> Configure (once, sizes everything) -> LoadWeights
//   ... per launch:
//     plan       Traits and ExpandedFormMinRows say how the planner cuts the work, Memory(slot)
//                where tensors may lie; the launch is a plain value (kernels/types/launch.h)
//     submit     Submit(slot, launch) starts it and returns
//     complete   Done(slot) / Wait(slot); then results are in the host's memory
//
// Threading: one thread at a time (the holder of the engine role) makes all calls except Info,
// StuckCall, RegisterHost and UnregisterHost, which any thread may call at any time. Launches
// execute in submission order, so a launch sees all appends of the ones before it.
//
// Errors: capability misses are UNIMPLEMENTED with wanted / supported / missing / device in the
// message; exhausted preallocated space is RESOURCE_EXHAUSTED; device faults are INTERNAL, after
// which Healthy() may turn to an error for good. A failed Submit or Wait fails that launch only.
// When Submit refuses a launch, no part of it has run. No call throws. After Configure, no call
// allocates.
#ifndef MLA_KERNELS_ATTENTION_BACKEND_H_
#define MLA_KERNELS_ATTENTION_BACKEND_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/formats/fp8.h"
#include "kernels/shared_device_memory.h"
#include "kernels/types/attention_desc.h"
#include "kernels/types/attention_params.h"
#include "kernels/types/backend_limits.h"
#include "kernels/types/launch.h"

namespace mla::kernels {

// A text about a backend for operators: names a choice that they cannot see from outside, and its
// reason.
struct BackendNote {
  std::string name;  // "runtime", "graphs", ...
  std::string text;
};

// A CPU core takes this number of nanoseconds for a byte of KV rows under 128 heads.
inline constexpr double kCoreNanosPerKvByte = 1.5;

struct BackendInfo {
  std::string name;         // "reference", "cpu", "hip-gfx950", ...
  std::string description;  // one line for people
  std::string device;       // device name as its driver reports it
  std::string arch;         // instruction set in use: "avx512_bf16", "gfx950", ...
  std::string supported;    // supported shapes in words, shown at refusal and by GetServerInfo
  std::vector<BackendNote> notes;  // shown by GetServerInfo and in the log
  int32_t units = 1;               // parallel workers a plan should be cut for: threads, CUs, SMs
  // Formats of KV rows that the backend computes on; CanRun decides for a whole shape.
  std::vector<KvFormat> kv_formats = {KvFormat::kBf16};
  Fp8Kind fp8 = Fp8Kind::kE4m3Fn;  // kind of the 8-bit floats in its pool
  // Says which products a model over 8-bit rows gets when it leaves the choice open, and why.
  std::string fp8_compute = "bf16 products: this backend multiplies no 8-bit floats";
  bool fp8_products = false;  // such models get AttentionDesc::products of 8 bits where CanRun
                              // allows
  // Keys per query row, averaged over the rows and heads of a launch, from which 8-bit products are
  // faster in the expanded form too; they are used there where CanRun allows. 0 if the expanded
  // form has no 8-bit products.
  int32_t fp8_prefill_keys = 0;
  bool sparse = false;    // computes on index lists (AttentionKind::kSparse)
  bool selects = false;   // makes index lists (Launch::selects)
  int32_t index_dim = 0;  // index dim that it selects with; 0: any
  bool windows = false;   // computes on windows and entries (AttentionKind::kWindow)
  bool projects = false;  // has Launch::queries and Launch::hiddens
  // Holds W_UQ and W_O in e4m3, too (ProjectedShape::weights).
  bool projects_codes = false;
  bool unified_memory = true;  // launches work on host memory in place
  // The nanoseconds that a launch takes for a byte of KV rows which its tiles read, as assumed
  // until launches have been measured. A rate that is far too slow cuts requests of the first
  // launches into parts, and parts that are merged round otherwise.
  double nanos_per_kv_byte = kCoreNanosPerKvByte;
  // Launches whose outputs together take at most this many bytes are faster with outputs, and new
  // KV rows of at most this many bytes, used in place in pinned memory (HostInput::in_place,
  // InPlace) than with copies of them. 0: always copy.
  int64_t in_place_bytes = 0;
  // If at least this number of bytes of queries is copied, a launch in the absorbed form is faster
  // if the queries arrive while it runs (AttentionDesc::streamed). 0: never stream.
  int64_t stream_bytes = 0;
  // Launches can wait on the device for words of host memory (Launch::gate).
  bool waits_for_words = false;
  // Queries may lie in fragments (kernels/types/input_fragments.h).
  bool reads_fragments = false;
  // Device memory that Configure and LoadWeights may take together. 0 for backends that use host
  // memory, which the caller bounds.
  int64_t memory_bytes = 0;
  // The dtypes between the projections of the EXPANDED profile: absorbed queries of clients that
  // send bf16 or fp32, and latent outputs. Latent outputs are fp32 because outputs that are rounded
  // twice would exceed the accepted error.
  DType absorbed_q_of_bf16 = DType::kBf16;
  DType absorbed_q_of_f32 = DType::kF32;
  DType latent_o_dtype = DType::kF32;
  // True if absorbed queries may be fp32 whatever clients send. Where products take bf16 operands,
  // scores then use two of them: the rounded value and its remainder.
  bool splits_queries = false;

  // Returns the dtype of absorbed queries for clients that send `sent`. `split` asks for fp32
  // whatever they send, and REQUIRES splits_queries.
  DType absorbed_q_dtype(DType sent, bool split) const {
    if (split) return DType::kF32;
    return sent == DType::kF32 ? absorbed_q_of_f32 : absorbed_q_of_bf16;
  }
  DType widest_absorbed_q() const {
    const bool wide =
        splits_queries || absorbed_q_of_bf16 == DType::kF32 || absorbed_q_of_f32 == DType::kF32;
    return wide ? DType::kF32 : DType::kBf16;
  }
};

// Tells the planner how to make rounds of the expanded form (kernels/types/round_info.h).
struct RoundTraits {
  // Size of the workspace for up-projected keys and values, at least LeastRoundWorkspace(dims). 0:
  // the planner makes no rounds.
  int64_t workspace_bytes = 0;
  int32_t most = kMostRounds;               // rounds of a launch; at most kMostRounds
  ExpandedDims dims = {};                   // dims of the up-projected rows
  int64_t cache_bytes = int64_t{24} << 20;  // keys and values attended to at a time
  // Rows of the partial buffers that carry results from round to round:
  // [first_carry_row, first_carry_row + carry_rows).
  int32_t first_carry_row = 0;
  int32_t carry_rows = 0;

  friend bool operator==(const RoundTraits&, const RoundTraits&) = default;
};

// Tells the planner to use fewer units for small batches, so that fewer parts are written and
// merged. It pays since `blocks` blocks of `block_rows` packed rows each run at a time, and those
// blocks of one tile share its KV rows.
struct SmallBatches {
  int32_t blocks = 0;  // 0: never plan for fewer units
  int32_t block_rows = 1;
  int32_t unit_kv_rows = 0;  // most KV rows for each of the fewer units

  friend bool operator==(const SmallBatches&, const SmallBatches&) = default;
};

// Tells the planner how to cut launches of one desc for this backend.
struct PlanTraits {
  int32_t units = 1;                 // number of work_indptr ranges
  int32_t tile_rows = 128;           // packed rows (query rows x heads) a tile holds at most
  int32_t max_heads_per_tile = 0;    // 0: as many as fit; 1: one head a tile (the expanded form)
  int32_t max_q_rows_per_tile = 0;   // 0: as many as fit; 1: sparse attention
  int32_t kv_granularity = 16;       // KV cut points are multiples of this, in rows
  int32_t item_overhead_rows = 256;  // fixed cost of a work item, as KV rows of one (full) tile
  // > 0: fixed-split mode. Every tile is cut at multiples of this many KV rows, whatever else is in
  // the batch, which makes results independent of batch composition.
  int32_t fixed_split_rows = 0;
  // > 0: tiles are cut into equal pieces, at most this many a unit unless there are more tiles.
  // Pieces are dealt to the units in turn, one each, so that all units work on the first segments
  // before any begins later ones. Excludes fixed_split_rows.
  int32_t dealt_pieces = 0;
  // > 0: a tile is charged by its packed rows, and for at least this many. This is the height
  // of a matrix unit, or the rows from which arithmetic costs more than reading the KV rows. 0: all
  // tiles cost the same per KV row, whatever they hold. At most tile_rows.
  int32_t min_charged_rows = 0;
  SmallBatches small = {};
  RoundTraits rounds = {};

  friend bool operator==(const PlanTraits&, const PlanTraits&) = default;
};

// The memory of a launch slot: regions that a launch lays out as it likes. Where memory is unified,
// only the workspace has bytes.
struct SlotMemory {
  std::span<std::byte> inputs, outputs, workspace;
};

// Returns a PlanView::generation that no other plan of the process has. Any thread.
inline uint64_t NextPlanGeneration() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Host memory that device copies can reach directly (pinned for GPUs). Move-only owner.
class HostBuffer {
 public:
  virtual ~HostBuffer() = default;
  virtual std::span<std::byte> bytes() = 0;
};

// Cost of a backend's launches for the host since Configure, if a device runs them.
struct HostWork {
  int64_t copied_bytes = 0;  // of tensors, into or out of the backend's pinned memory
  int64_t sleeps = 0;        // times that a thread slept until the device was done with something
  int64_t polling_ns = 0;    // from launches' submission to their end, while threads look at events
  // Streamed launches that read queries in host memory because their copy reached the device too
  // late: another thread's driver call had delayed the submitting thread.
  int64_t late_copies = 0;
};

class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  virtual const BackendInfo& Info() const = 0;
  virtual absl::Status CanRun(const AttentionDesc& desc) const = 0;
  virtual PlanTraits Traits(const AttentionDesc& desc) const = 0;
  // Returns the number of query rows of one request from which the expanded form costs less than
  // absorb + latent attention + project, or a value above launch_rows when it never does.
  virtual int32_t ExpandedFormMinRows(const Geometry& geometry) const = 0;
  // Returns the number of bytes of device (or host, when unified) memory that Configure would take
  // for these limits, pool included.
  virtual int64_t WorkspaceSize(const BackendLimits& limits) const = 0;
  // Returns the bytes of host memory that Configure would take in addition, where WorkspaceSize
  // counts device memory.
  virtual int64_t HostWorkspaceSize(const BackendLimits& limits) const {
    static_cast<void>(limits);
    return 0;
  }
  virtual absl::Status Configure(const BackendLimits& limits) = 0;
  virtual absl::Status Healthy() const = 0;
  // Names the call that should have returned long ago, or empty. Such a call never returns, and
  // blocks all other calls to the backend. Any thread.
  virtual std::string StuckCall() const { return ""; }
  virtual HostWork Work() const { return {}; }

  // --- Memory.
  virtual absl::StatusOr<std::unique_ptr<HostBuffer>> AllocateHost(size_t bytes) = 0;

  // Announces host memory that later launches will read and write, so that the backend can pin it
  // once. UnregisterHost announces its end. Between the two calls, launches may name addresses
  // inside it. Pinning takes milliseconds, so no request should wait for it. A backend that works
  // on host memory in place has nothing to do.
  virtual absl::Status RegisterHost(std::span<std::byte> memory) {
    static_cast<void>(memory);
    return absl::OkStatus();
  }
  virtual void UnregisterHost(std::span<std::byte> memory) { static_cast<void>(memory); }

  // Returns true if kernels read and write these bytes in place.
  virtual bool InPlace(const void* host, int64_t bytes) const {
    static_cast<void>(host);
    static_cast<void>(bytes);
    return false;
  }

  // Allocates device memory that launches use in place and another process of the host may map
  // (LaunchLayout::InputOnDevice), `bytes` rounded up, with `events` events. As RegisterHost: any
  // thread, milliseconds. UNIMPLEMENTED if the backend has no such memory, RESOURCE_EXHAUSTED if
  // none is left.
  virtual absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> AllocateShared(int64_t bytes,
                                                                             int32_t events) {
    static_cast<void>(bytes);
    static_cast<void>(events);
    return absl::UnimplementedError("the backend has no device memory that can be shared");
  }
  // Copies between shared device memory and host memory, after all launches submitted before. The
  // caller waits; not for the steady state.
  virtual absl::Status ReadShared(void* to, const void* from, int64_t bytes) {
    static_cast<void>(to), static_cast<void>(from), static_cast<void>(bytes);
    return absl::UnimplementedError("the backend has no device memory that can be shared");
  }
  virtual absl::Status WriteShared(void* to, const void* from, int64_t bytes) {
    static_cast<void>(to), static_cast<void>(from), static_cast<void>(bytes);
    return absl::UnimplementedError("the backend has no device memory that can be shared");
  }

  // W_UK [heads, nope_dim, kv_lora_rank] and W_UV [heads, kv_lora_rank, v_dim] of heads
  // [head_begin, head_end), bf16 row-major. May repack; the source is free after the call. The call
  // blocks, so it is not for the steady state.
  virtual absl::Status LoadWeights(int32_t slot, const Geometry& geometry, int32_t head_begin,
                                   int32_t head_end, const Bf16* w_uk, const Bf16* w_uv) = 0;
  // Loads W_UQ of one head [nope_dim + rope_dim, q_lora_rank], or its columns of W_O [hidden_size,
  // v_dim], row-major, like LoadWeights. `weights` are Bf16, or if the shape says so codes and
  // scales (kernels/projected_weights.h), where codes are neither NaN nor -0, and scales are 0,
  // or 2^-100 to 2^72. UNIMPLEMENTED unless Info().projects, and for codes unless
  // Info().projects_codes.
  virtual absl::Status LoadProjected(int32_t slot, const Geometry& geometry,
                                     const ProjectedShape& shape, ProjectedPart part, int32_t head,
                                     const void* weights) {
    static_cast<void>(slot), static_cast<void>(geometry), static_cast<void>(shape);
    static_cast<void>(part), static_cast<void>(head), static_cast<void>(weights);
    return absl::UnimplementedError("the backend does not project queries with such weights");
  }
  // Copy the weights of one head back, bit for bit as LoadWeights and LoadProjected got them, in
  // the same shapes. FAILED_PRECONDITION if the slot does not hold the head's weights for this
  // geometry and shape. The calls block, so they are not for the steady state.
  virtual absl::Status ReadWeights(int32_t slot, const Geometry& geometry, int32_t head, Bf16* w_uk,
                                   Bf16* w_uv) {
    static_cast<void>(slot), static_cast<void>(geometry), static_cast<void>(head);
    static_cast<void>(w_uk), static_cast<void>(w_uv);
    return absl::UnimplementedError("the backend does not give weights back");
  }
  virtual absl::Status ReadProjected(int32_t slot, const Geometry& geometry,
                                     const ProjectedShape& shape, ProjectedPart part, int32_t head,
                                     void* weights) {
    static_cast<void>(slot), static_cast<void>(geometry), static_cast<void>(shape);
    static_cast<void>(part), static_cast<void>(head), static_cast<void>(weights);
    return absl::UnimplementedError("the backend does not project queries with such weights");
  }
  // Frees all weights of the slot.
  virtual absl::Status FreeWeights(int32_t slot) = 0;

  // --- Launches. `slot` is in [0, launch_slots).
  // Memory returns the same regions for as long as the backend lives.
  virtual SlotMemory Memory(int32_t slot) = 0;
  // Starts the launch in an idle slot. INVALID_ARGUMENT names the malformed part (a page range that
  // leaves the pool), FAILED_PRECONDITION what is missing (weights of a head, or an idle slot),
  // RESOURCE_EXHAUSTED the limit.
  virtual absl::Status Submit(int32_t slot, const Launch& launch) = 0;
  // Returns true if Wait would return at once: the launch has completed, or the device is lost, or
  // it has taken too long since the first of these calls.
  virtual bool Done(int32_t slot) = 0;
  // Blocks until the launch has completed; a CPU backend computes on the calling thread too.
  // Returns the kernel time in nanoseconds.
  virtual absl::StatusOr<int64_t> Wait(int32_t slot) = 0;
  // Returns true if the slot's launch was late (Launch::gate). REQUIRES: Wait has returned for it.
  virtual bool WasLate(int32_t slot) const {
    static_cast<void>(slot);
    return false;
  }
  // Returns true if the device has stored all signals of the launch. The answer has a meaning only
  // if the launch was not late.
  virtual bool Signalled(int32_t slot) const {
    static_cast<void>(slot);
    return false;
  }
  // Returns for how long its gate kept the device waiting.
  virtual int64_t GateNanos(int32_t slot) const {
    static_cast<void>(slot);
    return 0;
  }
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_ATTENTION_BACKEND_H_
