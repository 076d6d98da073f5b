// The path for clients on the same host, byte by byte: the packets of the shared-memory listener's
// socket, and the command ring that may lie at the front of a region. docs/shared_memory.md
// explains it with a picture.
//
// A region is one memory object that the server created, sealed against resizing and mapped by both
// sides. All offsets count bytes from its start. A region with a ring begins with RingHeader, the
// submission entries, the completion entries and the reply slots. The rest, from
// ConnectReply::arena_offset on, is the arena; the client places tensors and messages in it.
// Without a ring the arena begins at 0.
//
// The ring. Entry i of either direction lies in slot i % entries and is valid once its `sequence`
// word equals PublishedSequence(i): The writer fills the other bytes first and then stores the word
// with release order. The reader loads it with acquire order and copies the entry once before it
// reads any field. So no entry is read before it is complete. The client may have at most `entries`
// requests whose completions it has not taken, which is all the flow control there is: a client
// that sends more is disconnected.
//
// Sleeping. A side that wants to sleep reads its doorbell, sets its waiter flag, and looks at the
// ring one more time. It then waits (FUTEX_WAIT, not private) until the doorbell differs from the
// value read. The other side, after publishing and a full fence, reads that flag; if it is set it
// adds 1 to the doorbell and wakes. A side that spins never sets its flag and so costs the other no
// system call.
//
// Device memory. A client that asks for it (kWantDevice, with a ring) may get device memory in
// addition to the region, on the server's GPU: DeviceHeader then follows the reply slots. It says
// how the client maps the memory, and the handles of one interprocess event for each submission
// slot follow it. Tensors of an entry with kEntryOnDevice lie there, at offsets from its start.
// Before the client publishes such an entry, it records in the slot's event the work that must
// complete before the tensors may be used. The server reads them after that work, and the outputs
// are complete when the completion is published. An event is not recorded again before its entry's
// completion was taken. The server makes memory and events, so the end of a client takes nothing
// that the server uses.
//
// Chains. If DeviceHeader::chains is 1, such an entry may have kEntryChained. Then events are not
// recorded: the client's stream stores PublishedSequence(i) in RingHeader::ready when the tensors
// of entry i may be used. It may wait until CompletionEntry::done of slot i % entries, which
// belongs to submission i, has that value. The server, or its device, stores it when the outputs
// are complete or will not come. Attends in flight are either all chained, by one stream, or all
// unchained. A client that begins a chain sets `ready` to the entry before its first. Messages may
// lie between chained entries: the server takes each after the entries before it.
// If RingHeader::chains is 1, entries whose tensors lie in the arena may be chained, too.
// Words count modulo 2^32, so old ones look like later ones one day: a client that begins a chain
// sets all words to the entry before it if its last chained entry lies kChainWordsLast entries
// back, or if it has had none. Words in device memory pass the turn sooner. If DeviceHeader::words
// is not 0, such a client may set RingHeader::nearby before its first chain: its streams then store
// `ready` in device memory too, before the word of the ring. They wait for `done` in device memory,
// where the server's device stores it.
//
// Integers are little endian; everything is naturally aligned. Plain data: any thread.
#ifndef MLA_PROTO_WIRE_RING_LAYOUT_H_
#define MLA_PROTO_WIRE_RING_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mla::wire {

inline constexpr uint32_t kHandshakeMagic = 0x314d4853;  // "SHM1"
inline constexpr uint16_t kHandshakeVersion = 1;
inline constexpr uint16_t kWantRing = 1;    // ConnectRequest::flags
inline constexpr uint16_t kWantDevice = 2;  // ConnectRequest::flags, with kWantRing
inline constexpr uint16_t kHasDevice = 1;   // ConnectReply::flags
inline constexpr size_t kHandleBytes = 16;
// Tensors in a region start at multiples of this.
inline constexpr size_t kSharedAlignment = 64;
inline constexpr size_t kHandshakeTextBytes = 128;

// The client sends this to the server as the first and only packet.
struct ConnectRequest {
  uint32_t magic;       // kHandshakeMagic
  uint16_t version;     // kHandshakeVersion
  uint16_t flags;       // kWantRing, kWantDevice
  uint64_t bytes;       // arena bytes wanted
  uint32_t spin_us;     // how long the ring's poller spins before it sleeps; the server may cap it
  uint32_t device_mib;  // device memory wanted, in MiB; of kWantDevice
  char tenant[kHandshakeTextBytes];  // padded with zeros; empty: "default"
};

// The server answers with this, its only packet. It carries the region's descriptor if `code` is 0,
// and after it the descriptor of the device memory, if any (DeviceHeader::kind).
struct ConnectReply {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;         // kHasDevice
  int32_t code;           // canonical status code
  uint32_t ring_entries;  // 0: no ring
  uint8_t handle[kHandleBytes];
  uint64_t region_bytes;
  uint64_t arena_offset;
  uint64_t boot_id;
  uint32_t spin_us;  // as granted
  uint32_t reserved1;
  char message[kHandshakeTextBytes];  // why not, or why without device memory, padded with zeros
};

struct RingHeader {
  // Line 0: written by the server before the client sees the region.
  uint32_t magic;    // kHandshakeMagic
  uint32_t entries;  // in each direction, a power of two
  uint64_t submissions_offset;
  uint64_t completions_offset;
  uint64_t replies_offset;  // `entries` slots of kReplySlotBytes
  uint32_t chains;          // 1: entries in the arena may have kEntryChained
  uint8_t reserved0[28];
  // Line 1: how the server sleeps.
  uint32_t submit_doorbell;
  uint32_t server_waits;
  uint8_t reserved1[56];
  // Line 2: how the client sleeps.
  uint32_t complete_doorbell;
  uint32_t client_waits;
  uint8_t reserved2[56];
  // Line 3: written by the client: number of completions it has taken. Their slots may be reused.
  uint64_t completions_taken;
  uint64_t reserved3;
  uint32_t ready;   // by its device, of chains
  uint32_t nearby;  // 1: its chains use the words in device memory
  uint8_t reserved5[40];
  // Line 4: written by the server: 1 once the ring is dead. Requests without a completion are lost.
  uint32_t closed;
  uint8_t reserved4[60];
};

enum EntryKind : uint8_t {
  // Submission: the fields of mla.v1.Attend, tensors in the arena. Completion: it succeeded.
  kEntryAttend = 1,
  // Submission: a serialized AttendStreamRequest with begin_step, end_step or abort_step.
  // Completion: a serialized AttendStreamReply: the answer to such a request, or a StepError.
  kEntryMessage = 2,
};

inline constexpr uint8_t kEntryHasKv = 1;    // SubmissionEntry::flags
inline constexpr uint8_t kEntryWantLse = 2;  // SubmissionEntry::flags
// The entry has index lists, like INDEX_LISTS_FIXED with the model's top_k.
inline constexpr uint8_t kEntryHasLists = 4;  // SubmissionEntry::flags
// The entry has index inputs instead, like INDEX_LISTS_SERVER, and wants the lists that follow from
// them.
inline constexpr uint8_t kEntrySelects = 8;     // SubmissionEntry::flags
inline constexpr uint8_t kEntryWantLists = 16;  // SubmissionEntry::flags
// KV rows are DTYPE_F8_E4M3. Otherwise kv_row_dtype is not used.
inline constexpr uint8_t kEntryFp8Kv = 32;      // SubmissionEntry::flags
inline constexpr uint8_t kEntryOnDevice = 64;   // SubmissionEntry::flags; without lists or 8 bits
inline constexpr uint8_t kEntryChained = 128;   // SubmissionEntry::flags
inline constexpr uint8_t kEntryPlanReused = 1;  // CompletionEntry::flags

struct SubmissionEntry {
  uint32_t sequence;
  uint8_t kind;
  uint8_t profile;  // mla.v1.Profile
  uint8_t flags;
  uint8_t dtypes;  // mla.v1.DType: Attend.q_dtype in the low half, o_dtype in the high half
  uint64_t tag;
  uint64_t step_id;
  uint32_t layer;
  uint32_t row_begin;
  uint32_t row_count;  // kEntryMessage: bytes of the message at in_offset
  uint32_t head_offset;
  uint32_t num_heads;  // kEntryMessage: bytes at out_offset for a reply that fits no slot
  uint32_t timeout_us;
  uint64_t in_offset;   // kv, then q, then index lists or inputs
  uint64_t out_offset;  // o, then lse, then lists
};

inline constexpr uint8_t kEntryDTypeFp8 = 3;  // mla.v1.DTYPE_F8_E4M3 in SubmissionEntry::dtypes

// The server's host reads tensors of the attend before it computes: index lists and inputs of such,
// which it checks, and 8 bits, which it decodes.
constexpr bool HostReads(const SubmissionEntry& entry) {
  constexpr uint8_t kRead = kEntryHasLists | kEntrySelects | kEntryFp8Kv;
  return (entry.flags & kRead) != 0 || (entry.dtypes & 0xf) == kEntryDTypeFp8;
}
// Tensors of the entry may lie in device memory: the host neither reads them nor writes lists.
constexpr bool MayLieOnDevice(const SubmissionEntry& entry) {
  return entry.kind == kEntryAttend && !HostReads(entry) && (entry.flags & kEntryWantLists) == 0;
}

struct CompletionEntry {
  uint32_t sequence;
  uint8_t kind;
  uint8_t flags;
  uint16_t launch_layers;
  uint64_t tag;
  uint64_t boot_id;
  // As in mla.v1.Timings; for kEntryAttend.
  uint32_t queue_us;
  uint32_t plan_us;
  uint32_t kernel_us;
  uint32_t write_us;
  uint32_t launch_requests;
  uint32_t launch_clients;
  // For kEntryMessage.
  uint64_t message_offset;
  uint32_t message_length;
  uint32_t done;  // for the submission of this slot; not among the bytes that the writer fills
};

inline constexpr size_t kReplySlotBytes = 1024;
inline constexpr uint64_t kChainWordsLast = uint64_t{1} << 30;

enum DeviceMemoryKind : uint32_t {
  kDeviceDescriptor = 1,  // the reply carries a POSIX descriptor of the virtual memory calls
  kDeviceHandle = 2,      // `memory` is an interprocess handle
};
inline constexpr size_t kDeviceHandleBytes = 64;

struct DeviceHeader {
  uint32_t magic;   // kHandshakeMagic
  uint32_t nvidia;  // 1: NVIDIA's handles, 0: AMD's
  uint32_t kind;    // DeviceMemoryKind
  uint32_t chains;  // 1: entries may have kEntryChained
  uint64_t bytes;
  uint8_t uuid[16];  // of the device, as its runtime reports it
  uint64_t words;    // place of the chain words in device memory; 0: none
  uint8_t reserved1[16];
  uint8_t memory[kDeviceHandleBytes];
  // The event handles follow, kDeviceHandleBytes each, by slot.
};

static_assert(sizeof(ConnectRequest) == 152 && std::is_trivially_copyable_v<ConnectRequest>);
static_assert(sizeof(ConnectReply) == 192 && std::is_trivially_copyable_v<ConnectReply>);
static_assert(offsetof(RingHeader, submit_doorbell) == 64);
static_assert(offsetof(RingHeader, complete_doorbell) == 128);
static_assert(offsetof(RingHeader, completions_taken) == 192);
static_assert(offsetof(RingHeader, ready) == 208);
static_assert(offsetof(RingHeader, closed) == 256);
static_assert(sizeof(RingHeader) == 320 && std::is_trivially_copyable_v<RingHeader>);
static_assert(sizeof(SubmissionEntry) == 64 && offsetof(SubmissionEntry, in_offset) == 48);
static_assert(sizeof(CompletionEntry) == 64 && offsetof(CompletionEntry, message_offset) == 48);
static_assert(offsetof(CompletionEntry, done) == 60);

static_assert(sizeof(DeviceHeader) == 128 && offsetof(DeviceHeader, memory) == 64);

constexpr uint32_t PublishedSequence(uint64_t index) { return static_cast<uint32_t>(index + 1); }

constexpr uint64_t AlignShared(uint64_t bytes) {
  return (bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
}

// Return the offsets of the parts of a ring with `entries` slots.
constexpr uint64_t SubmissionsOffset() { return sizeof(RingHeader); }
constexpr uint64_t CompletionsOffset(uint64_t entries) {
  return SubmissionsOffset() + entries * sizeof(SubmissionEntry);
}
constexpr uint64_t RepliesOffset(uint64_t entries) {
  return CompletionsOffset(entries) + entries * sizeof(CompletionEntry);
}
// Returns the first byte after the ring, at a page boundary.
constexpr uint64_t RingBytes(uint64_t entries) {
  return (RepliesOffset(entries) + entries * kReplySlotBytes + 4095) / 4096 * 4096;
}

// Return the offsets of the words of chains in device memory, from DeviceHeader::words on: `ready`,
// and `done` for each slot.
constexpr uint64_t NearbyDoneOffset(uint64_t slot) {
  return kSharedAlignment + slot * sizeof(uint32_t);
}
constexpr uint64_t NearbyBytes(uint64_t entries) { return AlignShared(NearbyDoneOffset(entries)); }

// Returns the number of bytes of the device part, which begins at RingBytes and is followed by the
// arena.
constexpr uint64_t DevicePartBytes(uint64_t entries) {
  return (sizeof(DeviceHeader) + entries * kDeviceHandleBytes + 4095) / 4096 * 4096;
}

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_RING_LAYOUT_H_
