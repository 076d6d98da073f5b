// One launch as a plain value: what the scheduler hands to a backend, whole.
//
// A launch does the following, in this order, each part as if the parts before it had ended:
//
//   inputs        host memory -> memory of the slot
//   page_writes   host memory -> pool, bytes as they are
//   pages         copies and zeroing inside the pool
//   tables        entries of the page tables that have changed
//   appends       new KV rows into their pages, or compared with what is there
//   selects       index lists, where the indexer makes them
//   absorb        queries of EXPANDED segments into latent space
//   absorbed      attention in the absorbed form
//   project       latent outputs of EXPANDED segments out of latent space
//   expanded      attention in the expanded form
//   outputs       memory of the slot -> host memory
//   page_reads    pool -> host memory, bytes as they are
//
// Between outputs and the end, the signals are set. Empty spans leave a part out. Plain data
// without ownership: the launch and all that it refers to stay valid and unchanged from Submit
// until Wait has returned. Addresses in records are those that the backend sees; LaunchLayout
// (kernels/launch_layout.h) gives them.
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
// and at device + i * pitch. Where `device` is `host`, the launch uses the host's memory in place.
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
  bool shared = false;             // as of HostInput
  bool private_to_caller = false;  // none of those that Launch::signals speak of
  bool in_place() const { return host == device; }
};

// Bytes of the pool that a launch fills: with a copy of as many bytes from elsewhere in the pool,
// or with zeros; once, or at `count` places that lie `stride` apart, in target and source alike.
struct PageRange {
  static constexpr int64_t kZeros = -1;
  int64_t target_offset = 0;
  int64_t bytes = 0;  // at each place
  int64_t source_offset = kZeros;
  int32_t count = 1;
  int64_t stride = 0;  // bytes; at least `bytes` where count is above 1
  bool zeroes() const { return source_offset == kZeros; }
  // From the first byte to the last place's end, what lies between the places included.
  int64_t extent() const { return (count - 1) * stride + bytes; }
  PageRange place(int32_t index) const {
    const int64_t at = index * stride;
    return {target_offset + at, bytes, zeroes() ? kZeros : source_offset + at};
  }
};
// Bytes that travel between the pool and host memory as they lie there, in the format of the rows
// and, where these hold 8-bit floats, of the backend's kind (BackendInfo::fp8). Memory from
// AllocateHost or under RegisterHost is copied while the caller goes on; where the device does not
// reach the memory by itself, Submit may wait for the copy.
struct PageTransfer {
  int64_t pool_offset;
  int64_t bytes;
  std::byte* host;
  // Where to put DigestParts(bytes) digests of what was copied; there after Wait. Null: nowhere.
  // With digests, place and size are multiples of kPageGranuleBytes; at most limits.digest_parts a
  // list.
  PartDigest* digests = nullptr;
};
// A launch whose inputs in device memory are there once `ready` is reached. It waits for that on
// the device, before all else and for limit_ns at most. When these have passed it was late: it
// writes no output and appends nothing, but for outputs that are copied to host memory, which are
// worth nothing, and it sets no signal. It copies no output to shared memory, and has no attention
// in the expanded form.
struct LaunchGate {
  WordValue ready;       // no word: there is no gate
  int64_t limit_ns = 0;  // two seconds at most
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
  // Empty, or by record: one with bytes > 0 is read in place of ProjectionRecord::in.
  std::span<const FragmentedInput> fragments;
};

struct Launch {
  std::span<const HostInput> inputs;
  std::span<const HostOutput> outputs;
  LaunchGate gate;  // of backends that wait for words
  // Stored by the device as soon as the outputs are there, but for those private to the caller,
  // where that takes nothing but a kernel at the end: the caller stores the words of the host after
  // Wait in any case, and those nearby where AttentionBackend::Signalled says no.
  std::span<const WordValue> signals;
  // Transfers of one list name no byte of the pool twice; at most limits.page_ranges a list.
  std::span<const PageTransfer> page_writes, page_reads;
  // The list takes effect as if its ranges were carried out one after another, so a range may read
  // or overwrite what an earlier one has written. Ranges whose extents share no bytes run in
  // parallel. The extent of a source may not overlap that of its own target. At most
  // limits.page_ranges places.
  std::span<const PageRange> pages;
  // The engine's page tables, of all sequences. A backend with unified memory reads them where they
  // are; others have a copy of their own and take over the entries of `table_changes`, as they are
  // during Submit. Ranges may overlap; at most limits.table_ranges.
  std::span<const uint32_t> page_tables;
  std::span<const TableRange> table_changes;
  std::span<const AppendRecord> appends;
  // Their lists are those of records of `absorbed`.
  std::span<const SelectRecord> selects;
  Projection absorb;
  AttentionParams absorbed;
  Projection project;
  AttentionParams expanded;
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_LAUNCH_H_
