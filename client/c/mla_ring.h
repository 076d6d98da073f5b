// A command ring of mla-server on this host, without the rest of a client. It is the transport of
// programs that speak the stepping protocol (mla/v1/attention.proto) themselves, as clients in
// other languages do. C programs take sessions and steps of mla_client.h.
//
//   mla_ring_options options = {.struct_size = sizeof options, .bytes = 64 << 20, .gpu = 0};
//   mla_ring_open("/run/mla-server/mla.sock.shm", &options, &ring, &error);
//   mla_ring_message(ring, begin_step, begin_step_bytes, NULL, 0, 0, &begun, &error);
//   attend.flags |= MLA_RING_CHAINED;                       // tensors are in the ring's memory
//   mla_ring_attend(ring, &attend, 0, &request, &error);    // what the stream gets next finds o
//   mla_request_wait(request, timeout_ms, &error);          // whether o is good
//
// Structs, errors and ownership are as in mla_client.h. Offsets count bytes from the start of the
// ring's memory, or of its device memory; tensors lie at multiples of 64.
//
// Threading: any thread. No function waits for longer than it is told to, so a program that handles
// signals between calls gives short times.
#ifndef MLA_CLIENT_C_MLA_RING_H_
#define MLA_CLIENT_C_MLA_RING_H_

#include "mla_client.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mla_ring mla_ring;        // a connection with its memory
typedef struct mla_request mla_request;  // what was sent

typedef struct mla_ring_options {
  size_t struct_size;
  const char* tenant;       // NULL: the server's default
  uint64_t bytes;           // of memory for tensors and messages
  uint64_t device_bytes;    // of device memory, in whole MiB; 0: none
  int64_t connect_ms;       // 0: 10000
  int64_t request_ms;       // a chained request that has no reply then ends the ring; 0: 60000
  int32_t server_spin_us;   // of the server's thread before it sleeps; it may grant less
  int32_t spin_us;          // of mla_request_wait before it sleeps
  int64_t server_uid;       // a further user whose socket is trusted; 0: none
  int32_t gpu;              // of this process, as the driver counts; -1: none
  int32_t reserved;         // 0
  const char* gpu_library;  // the driver's or runtime's library; NULL: where it is found
} mla_ring_options;

typedef struct mla_ring_info {
  size_t struct_size;
  uint64_t boot_id;  // of the server
  void* memory;      // stays until mla_ring_free
  uint64_t memory_bytes;
  uint64_t arena_offset;  // of the first byte that mla_ring_allocate may give
  void* device_memory;    // an address of the GPU; NULL: there is none
  uint64_t device_bytes;
  uint32_t entries;           // requests that may be under way
  int32_t nvidia;             // 1: the GPU's driver is CUDA; 0: HIP or without a GPU
  int32_t chains_in_memory;   // 1: requests with tensors in `memory` can be chained
  int32_t chains_on_device;   // 1: those with tensors in device memory can
  const char* why_no_device;  // these live as long as the ring; empty where there is nothing to say
  const char* why_no_chains;  // in memory
  const char* device_warning;  // what will be slow
} mla_ring_info;

// mla_ring_attend.flags, as proto/wire/ring_layout.h names them; bits 4 to 32 are of its entries,
// too.
#define MLA_RING_HAS_KV 1
#define MLA_RING_WANT_LSE 2
#define MLA_RING_ON_DEVICE 64  // tensors are in device memory
// `stream` waits for the outputs, and the server waits for `stream`. Put the work that writes the
// tensors on the stream before this call, and the work that reads the outputs after it. Attends in
// flight are all chained by one stream, or none is (MLA_FAILED_PRECONDITION).
#define MLA_RING_CHAINED 128

// One copy that the stream of a chained request makes: `rows` rows of `width` bytes, which begin
// `*_pitch` bytes apart. Addresses of the GPU, or of `memory` of the ring, or of host memory that
// the GPU's driver knows.
typedef struct mla_ring_copy {
  void* to;
  const void* from;
  uint64_t width, rows, to_pitch, from_pitch;
} mla_ring_copy;

#define MLA_RING_MOST_COPIES 8

// The fields mean what they mean in mla.v1.Attend.
typedef struct mla_ring_entry {
  size_t struct_size;
  uint64_t step_id;
  uint64_t in_offset;   // kv, then q, then lists, each at the next multiple of 64
  uint64_t out_offset;  // o, then lse, then lists
  void* stream;         // a CUstream or hipStream_t, for MLA_RING_ON_DEVICE or MLA_RING_CHAINED
  uint32_t layer, row_begin, row_count, head_offset, num_heads, timeout_us;
  uint8_t profile, flags;
  uint8_t q_dtype, o_dtype;  // mla_dtype
  // For MLA_RING_CHAINED: what the stream copies before the server reads the tensors, and once the
  // outputs are there; at most MLA_RING_MOST_COPIES each.
  const mla_ring_copy* in;
  const mla_ring_copy* out;
  uint32_t in_count, out_count;
  // For rings over UCX: the bytes of the inputs from in_offset on, and of the outputs from
  // out_offset on, gaps included.
  uint64_t in_bytes, out_bytes;
  // 1: all that `in` copies from is memory of the ring's GPU, so the driver is not asked for it.
  uint32_t in_on_gpu;
  uint32_t reserved;  // 0
} mla_ring_entry;

// `path` is the server's shm.path. MLA_UNAVAILABLE: no server answered in time, or it has no shared
// memory. The call succeeds even if the server does not grant device memory; mla_ring_info says
// why.
MLA_API mla_code mla_ring_open(const char* path, const mla_ring_options* options, mla_ring** out,
                               mla_error** error);
// Sends no request. `info->struct_size` must be set.
MLA_API mla_code mla_ring_describe(const mla_ring* ring, mla_ring_info* info, mla_error** error);
// Allocates `bytes` of the ring's memory, or of its device memory, and returns their offset;
// UINT64_MAX if there is not enough room.
MLA_API uint64_t mla_ring_allocate(mla_ring* ring, uint64_t bytes, int32_t on_device);
// Frees allocated bytes, which no request may be using.
MLA_API void mla_ring_deallocate(mla_ring* ring, uint64_t offset, int32_t on_device);
// Sends an attend. Waits, for `room_ms` at most, until an entry is free. MLA_DEADLINE_EXCEEDED if
// none became free; nothing was sent then.
MLA_API mla_code mla_ring_attend(mla_ring* ring, const mla_ring_entry* entry, int64_t room_ms,
                                 mla_request** out, mla_error** error);
// A chain sends chained attends that differ only in step, layer and addresses, in less time of the
// caller: it reads and checks `entry` once. The entry's step_id, layer and stream are ignored, and
// so are the addresses from which `in` copies and to which `out` copies. Only one thread at a time
// may use a chain.
typedef struct mla_chain mla_chain;
MLA_API mla_code mla_chain_new(mla_ring* ring, const mla_ring_entry* entry, mla_chain** out,
                               mla_error** error);
// Sends an attend as mla_ring_attend does. `addresses` are those from which each copy of `in`
// copies, then those to which each copy of `out` copies; NULL if there are no copies.
MLA_API mla_code mla_chain_attend(mla_chain* chain, uint64_t step_id, uint32_t layer, void* stream,
                                  void* const* addresses, int64_t room_ms, mla_error** error);
// Begins a step as mla_ring_message does, and leaves the reply to mla_chain_wait. `message`: a
// serialised mla.v1.AttendStreamRequest with a begin_step of one participant, without rotations.
// MLA_FAILED_PRECONDITION while a step of the chain is open, or calls of it are not awaited.
MLA_API mla_code mla_chain_begin(mla_chain* chain, const void* message, size_t bytes,
                                 int64_t room_ms, mla_error** error);
// Begins the step that follows the chain's last one: as many rows of the same sequences, which
// start where that one ended. MLA_FAILED_PRECONDITION also if no step of the chain has succeeded.
MLA_API mla_code mla_chain_begin_next(mla_chain* chain, uint64_t step_id, int64_t room_ms,
                                      mla_error** error);
// Ends the open step with all of its rows, and leaves the reply to mla_chain_wait.
MLA_API mla_code mla_chain_end(mla_chain* chain, int64_t room_ms, mla_error** error);
// Waits for all calls since the last wait that did not return "no_reply_yet", and returns what
// mla_requests_wait returns.
// MLA_DATA_LOSS if the server's answer to a begin or end is not the one that it must be.
MLA_API mla_code mla_chain_wait(mla_chain* chain, int64_t wait_ms, mla_error** error);
// Frees the chain. The call may come before the replies, as for mla_request_free.
MLA_API void mla_chain_free(mla_chain* chain);
// Captures chained requests in a graph of the GPU's runtime. While `entry->stream` captures a graph
// (CUDA's or HIP's), mla_graph_capture captures the copies and the words of one attend; nothing is
// sent, and entry->step_id counts for nothing. For each launch of an instance of the graph,
// mla_graph_send first sends the captured attends as attends of step `step_id`. Then launch `exec`
// once, on `stream`. Tensors stay at their offsets, and the graph itself stays, as long as
// instances of it are launched. A graph belongs to one ring; the kernels in it, and what is
// captured next to it, are the program's.
typedef struct mla_graph mla_graph;
MLA_API mla_code mla_graph_new(mla_ring* ring, mla_graph** out, mla_error** error);
MLA_API mla_code mla_graph_capture(mla_graph* graph, const mla_ring_entry* entry,
                                   mla_error** error);
// Returns the number of attends that were captured: mla_graph_send writes as many requests to
// `out`. If mla_graph_send fails, nothing was sent, and `exec` must not be launched.
// MLA_FAILED_PRECONDITION: calls of another kind or stream are under way. MLA_RESOURCE_EXHAUSTED:
// the ring has fewer entries than the graph attends.
MLA_API size_t mla_graph_size(const mla_graph* graph);
MLA_API mla_code mla_graph_send(mla_graph* graph, uint64_t step_id, void* exec, void* stream,
                                int64_t room_ms, mla_request** out, mla_error** error);
MLA_API void mla_graph_free(mla_graph* graph);
// Sends a serialised mla.v1.AttendStreamRequest with begin_step, end_step or abort_step; its tag is
// set here. `tails`, of an end_step, are copied. `room_ms` as above. Chained requests may be under
// way: the server takes it in its turn.
MLA_API mla_code mla_ring_message(mla_ring* ring, const void* message, size_t bytes,
                                  const void* tails, size_t tail_bytes, int64_t room_ms,
                                  mla_request** out, mla_error** error);
// Waits for the reply to a request. MLA_OK: the request has succeeded. MLA_DEADLINE_EXCEEDED with
// reason "no_reply_yet": `wait_ms` has passed; wait again. Any other code: it has failed, or the
// ring has ended.
MLA_API mla_code mla_request_wait(mla_request* request, int64_t wait_ms, mla_error** error);
// Sets `times` for a request whose wait succeeded. Both may be NULL.
MLA_API void mla_request_times(const mla_request* request, mla_attend_times* times);
// Returns the reply to a message, a serialised mla.v1.AttendStreamReply; as long as the request.
MLA_API const void* mla_request_reply(mla_request* request, size_t* bytes);
// Frees the request. The call may come before the reply: the memory of its tensors must stay as it
// is until the reply has come.
MLA_API void mla_request_free(mla_request* request);
// Waits for all requests as mla_request_wait does: MLA_OK if all have succeeded, else the error of
// the first that has failed. No request may be NULL.
MLA_API mla_code mla_requests_wait(mla_request* const* requests, size_t count, int64_t wait_ms,
                                   mla_error** error);
MLA_API void mla_requests_free(mla_request* const* requests, size_t count);
// Returns MLA_OK while the ring can be used, else the reason why it cannot.
MLA_API mla_code mla_ring_state(mla_ring* ring, mla_error** error);
// Ends the ring: requests under way fail, and streams that wait for them go on. If `wait_ms` > 0,
// first waits for so long at most until requests have ended and the server has aborted open steps.
MLA_API void mla_ring_end(mla_ring* ring, int64_t wait_ms);
// Free requests first. In a process that was forked from the one that opened it, does nothing.
MLA_API void mla_ring_free(mla_ring* ring);

// --- Rings over UCX (docs/rdma.md), to a server of any host. The caller makes the call
// mla.v1.Transports.OpenUcx, with its own means: after mla_ucx_start, and with what that gives. The
// reply goes to mla_ucx_open. The ring lives as long as the call.

typedef struct mla_ucx mla_ucx;

typedef struct mla_ucx_options {
  size_t struct_size;
  const char* library;     // of UCX; NULL: libucp.so.0 where the loader finds it
  const char* transports;  // as of UCX_TLS; NULL: of the environment, or UCX's choice
  const char* devices;     // as of UCX_NET_DEVICES; NULL: likewise
  int32_t spin_us;         // of mla_request_wait before it sleeps
  int32_t puts;            // 1: tensors are put if the server allows it; for RDMA (docs/rdma.md)
  // 1: the ring's memory is registered with the driver of `gpu` (of this process, as the driver
  // counts), so that requests can be chained.
  int32_t pins;
  int32_t gpu;
  const char* gpu_library;  // the driver's or runtime's library; NULL: where it is found
  int32_t device_memory;    // with puts, 1: tensors are put into memory of the server's GPU
} mla_ucx_options;

typedef struct mla_ucx_reply {
  size_t struct_size;
  // These are fields of OpenUcxReply.
  uint64_t boot_id;
  const void* worker_address;
  size_t worker_address_bytes;
  const void* token;
  size_t token_bytes;
  uint64_t region_bytes, arena_offset;
  uint32_t ring_entries;
  uint32_t reserved;   // 0
  uint64_t bytes;      // of the request
  int64_t request_ms;  // 0: 60000
  // Called once, by any thread, when the ring is given up; the caller must then end its call.
  void (*give_up)(void* argument);
  void* argument;
  // Fields of OpenUcxReply, of puts.
  const void* arena_key;
  size_t arena_key_bytes;
  uint64_t arena_address;
  // The request's `encrypts` and `batches` are true.
  const void* secret;
  size_t secret_bytes;
  int32_t batches;  // 1 or 0
  // These are fields of OpenUcxReply.device_memory.
  const void* device_key;
  size_t device_key_bytes;
  uint64_t device_address, device_bytes;
} mla_ucx_reply;

// MLA_UNAVAILABLE: UCX cannot be opened or started, with its reason.
MLA_API mla_code mla_ucx_start(const mla_ucx_options* options, mla_ucx** out, mla_error** error);
// Returns the address for the request's worker_address. It is valid as long as the object, or its
// ring, lives. The request takes `puts` and `device_memory` from the options.
MLA_API const void* mla_ucx_address(const mla_ucx* ucx, size_t* bytes);
// Returns the value for the request's handles_losses.
MLA_API int32_t mla_ucx_handles_losses(const mla_ucx* ucx);
// Makes the ring. May be called once for each object, which stays to be freed.
MLA_API mla_code mla_ucx_open(mla_ucx* ucx, const mla_ucx_reply* reply, mla_ring** out,
                              mla_error** error);
MLA_API void mla_ucx_free(mla_ucx* ucx);
// Tells a ring over UCX that its call has ended, and why. Not to be called after mla_ring_free;
// does nothing for other rings.
MLA_API void mla_ring_call_ended(mla_ring* ring, const char* why);

#ifdef __cplusplus
}
#endif

#endif  // MLA_CLIENT_C_MLA_RING_H_
