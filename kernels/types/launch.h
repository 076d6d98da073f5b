// One launch as a plain value: everything that the scheduler hands to a backend at once.
//
// A launch has these parts. They run in this order, each as if the parts before it had ended:
//
//   inputs        host memory -> memory of the slot
//   page_writes   host memory -> pool, bytes as they are
//   pages         copies and zeroing inside the pool
//   tables        entries of the page tables that have changed
//   appends       new KV rows into their pages, or compared with what is there
//   selects       index lists, where the indexer makes them
//   queries       rows of PROJECTED segments into queries, which are rotated
//   absorb        queries of EXPANDED and PROJECTED segments into latent space
//   absorbed      attention in the absorbed form
//   project       their latent outputs out of latent space
//   expanded      attention in the expanded form
//   hiddens       outputs of PROJECTED segments into rows of hidden states
//   outputs       memory of the slot -> host memory
//   page_reads    pool -> host memory, bytes as they are
//
// Signals are set after the outputs. A part with empty spans is left out. Plain data without
// ownership: the launch and all that it refers to must stay valid and unchanged from Submit until
// Wait has returned. Addresses in records are addresses of the backend's memory, which LaunchLayout
// (kernels/launch_layout.h) assigns.
#ifndef MLA_KERNELS_TYPES_LAUNCH_H_
#define MLA_KERNELS_TYPES_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/types/attention_desc.h"
#include "kernels/types/attention_params.h"
#include "kernels/types/input_fragments.h"
#include "kernels/types/part_digest.h"
#include "kernels/types/select.h"
#include "kernels/types/word.h"

namespace mla::kernels {

// Rows of a tensor in host memory and where the launch sees them: row i is at host + i * row_bytes
// and at device + i * pitch. If `device` equals `host`, the launch uses the host's memory in place.
struct HostInput {
  const std::byte* host;
  std::byte* device;
  int64_t row_bytes;
  int64_t rows;
  int64_t pitch;        // bytes
  bool shared = false;  // `host` is an address in shared device memory instead
  bool in_place() const { return host == device; }
};
struct HostOutput {
  std::byte* host;
  std::byte* device;
  int64_t row_bytes;
  int64_t rows;
  int64_t pitch;                   // bytes
  bool shared = false;             // as in HostInput
  bool private_to_caller = false;  // not among the outputs that Launch::signals announce
  bool in_place() const { return host == device; }
};

// Bytes of the pool that a launch fills with zeros, or with a copy of as many bytes from elsewhere
// in the pool. It fills them once, or at `count` places that lie `stride` apart in target and
// source.
struct PageRange {
  static constexpr int64_t kZeros = -1;
  int64_t target_offset = 0;
  int64_t bytes = 0;  // at each place
  int64_t source_offset = kZeros;
  int32_t count = 1;
  int64_t stride = 0;  // bytes; at least `bytes` where count is above 1
  bool zeroes() const { return source_offset == kZeros; }
  // Returns the bytes from the first place's begin to the last place's end, gaps included.
  int64_t extent() const { return (count - 1) * stride + bytes; }
  PageRange place(int32_t index) const {
    const int64_t at = index * stride;
    return {target_offset + at, bytes, zeroes() ? kZeros : source_offset + at};
  }
};
// Bytes that are copied between the pool and host memory unchanged, in the format of the rows.
// 8-bit floats are of the backend's kind (BackendInfo::fp8). Memory from AllocateHost or under
// RegisterHost is copied while the caller goes on. If the device cannot reach the memory by itself,
// Submit may wait for the copy.
struct PageTransfer {
  int64_t pool_offset;
  int64_t bytes;
  std::byte* host;
  // Receives DigestParts(bytes) digests of the copied bytes, valid after Wait; null if none are
  // wanted. With digests, place and size are multiples of kPageGranuleBytes, and a list has at most
  // limits.digest_parts of them.
  PartDigest* digests = nullptr;
};
// Makes a launch wait on the device, before all other work, until words of its clients say that its
// inputs in device memory are complete. The wait ends after limit_ns at most, however many words
// there are; a launch whose wait ended that way is late. A late launch writes no output, appends
// nothing and sets no signal. Only its outputs that are copied to host memory are written, with
// meaningless values. A launch with a gate copies no output to shared memory, and has no attention
// in the expanded form.
struct LaunchGate {
  static constexpr int32_t kMostWords = 8;
  WordValue ready;       // null word: no gate
  int64_t limit_ns = 0;  // two seconds at most
  // Words that must be reached, too; kMostWords together with `ready` at most.
  std::span<const WordValue> others = {};
};
struct TableRange {  // entries of Launch::page_tables
  int64_t first, count;
};

// Batched small GEMMs of the EXPANDED profile around the absorbed form.
struct Projection {
  Geometry geometry;
  DType in = DType::kBf16;
  DType out = DType::kBf16;
  std::span<const ProjectionRecord> records;
  // Empty, or one by record. One with bytes > 0 is read in place of ProjectionRecord::in.
  std::span<const FragmentedInput> fragments;
};

// Sizes of the rows that a worker of PROJECTED sends and receives, 0 in models without that
// profile, and the type in which W_UQ and W_O are held.
struct ProjectedShape {
  int32_t q_lora_rank = 0;  // elements of a normed query row (DeepSeek-V3: 1536)
  int32_t hidden_size = 0;  // elements of a row of hidden states (7168)
  // kBf16, or kFp8E4m3 of kind kE4m3Fn with fp32 scales of blocks (kernels/projected_weights.h).
  DType weights = DType::kBf16;
  // GPUs pad the rows of W_UQ and W_O to multiples of this many elements.
  static constexpr int32_t kRowStep = 64;
  bool present() const { return q_lora_rank > 0; }
  bool codes() const { return weights == DType::kFp8E4m3; }
  friend bool operator==(const ProjectedShape&, const ProjectedShape&) = default;
};

// Says which elements of the rotated part of a query head, of rope_dim elements, form a pair.
enum class RopeLayout : uint8_t {
  kNone = 0,
  kInterleaved = 1,  // elements 2 i and 2 i + 1
  kHalves = 2,       // elements i and i + rope_dim / 2
};

// Weights of PROJECTED, in the order in which rows pass them.
enum class ProjectedPart : uint8_t {
  kQueries = 0,  // W_UQ [heads, nope_dim + rope_dim, q_lora_rank]
  kOutputs = 1,  // W_O [hidden_size, heads, v_dim]
};
inline constexpr int32_t kProjectedParts = 2;

// Products of whole rows with the weights of all heads. With e = nope_dim + rope_dim:
//   queries: out[r, h, :] = rotate(W_UQ[h] x in[r, :])
//            in [rows, q_lora_rank], out [rows, heads, e]
//   hiddens: out[r, :] = W_O x in[r, :, :]
//            in [rows, heads, v_dim], out [rows, hidden_size]
struct RowProjectionRecord {
  const void* in;
  void* out;
  int64_t in_row_stride, out_row_stride;  // elements
  int32_t rows;
  int32_t weights_slot;
  // For queries: the rotations [rows, rope_dim], cosines of the pairs and then their sines; null if
  // rope_dim is 0.
  const float* rotations;
};

struct RowProjection {
  Geometry geometry;
  RopeLayout rope = RopeLayout::kNone;  // of queries
  DType in = DType::kBf16;
  DType out = DType::kBf16;
  // Consecutive records of one weights slot are computed together.
  std::span<const RowProjectionRecord> records;
};

struct Launch {
  std::span<const HostInput> inputs;
  std::span<const HostOutput> outputs;
  LaunchGate gate;  // for backends with waits_for_words
  // The words that the device stores as soon as the outputs are complete, except outputs private to
  // the caller. It does so only where an extra kernel at the end suffices. The caller stores the
  // host's words after Wait in any case, and the nearby ones if AttentionBackend::Signalled returns
  // false.
  std::span<const WordValue> signals;
  // Transfers of one list name no byte of the pool twice; at most limits.page_ranges a list.
  std::span<const PageTransfer> page_writes, page_reads;
  // The list takes effect as if its ranges were carried out one after another, so a range may read
  // or overwrite the bytes of an earlier one. Ranges whose extents share no bytes run in parallel.
  // The extent of a source may not overlap that of its own target. The list has at most
  // limits.page_ranges places.
  std::span<const PageRange> pages;
  // The page tables of the engine, for all sequences. A backend with unified memory reads them in
  // place. Other backends keep a copy, and copy the entries of `table_changes` during Submit.
  // Ranges may overlap; at most limits.table_ranges.
  std::span<const uint32_t> page_tables;
  std::span<const TableRange> table_changes;
  std::span<const AppendRecord> appends;
  // They write the index lists of records of `absorbed`.
  std::span<const SelectRecord> selects;
  RowProjection queries;
  Projection absorb;
  AttentionParams absorbed;
  Projection project;
  AttentionParams expanded;
  RowProjection hiddens;
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_LAUNCH_H_
