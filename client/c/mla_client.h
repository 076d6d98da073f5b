// The C client of mla-server, which computes attention over a KV cache that it keeps.
//
//   mla_client* client;
//   mla_error* error;
//   if (mla_connect("unix:/run/mla-server/mla.sock", NULL, &client, &error) != MLA_OK) {
//     fprintf(stderr, "%s (%s)\n", mla_error_message(error), mla_error_field(error));
//     mla_error_free(error);
//   }
//
// Functions that can fail return a code. If `error` is not NULL they also set *error: on failure to
// an object that the caller frees, else to NULL.
//
// Structs that begin with struct_size may grow: set it to sizeof the struct and every field that is
// not used to 0, which means the default. Members of other structs stay as they are.
//
// Ownership: the caller owns the objects that a function returns through `out`, and frees them
// before the objects they were made from: steps before their session, sessions and sequences before
// their client. NULL may be freed. Arguments are copied, except tensors.
//
// Threading: any thread may use a client. Only one thread at a time may use a sequence, a step, a
// pending call or an error; several threads may use different steps of one session.
#ifndef MLA_CLIENT_C_MLA_CLIENT_H_
#define MLA_CLIENT_C_MLA_CLIENT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Any int is a value of such a type in C++, as it is in C: values without a name are refused.
#ifdef __cplusplus
#define MLA_INT_ENUM : int
#else
#define MLA_INT_ENUM
#endif

#if defined(__GNUC__)
#define MLA_API __attribute__((visibility("default")))
#else
#define MLA_API
#endif

typedef struct mla_client mla_client;      // a connection
typedef struct mla_sequence mla_sequence;  // a token stream with its rows in the cache
typedef struct mla_session mla_session;    // a stream of steps
typedef struct mla_step mla_step;          // rows that are added to sequences together
typedef struct mla_pending mla_pending;    // an attend under way
typedef struct mla_error mla_error;        // why a call failed

// The canonical codes of gRPC.
typedef enum mla_code MLA_INT_ENUM {
  MLA_OK = 0,
  MLA_CANCELLED = 1,
  MLA_UNKNOWN = 2,
  MLA_INVALID_ARGUMENT = 3,
  MLA_DEADLINE_EXCEEDED = 4,
  MLA_NOT_FOUND = 5,
  MLA_ALREADY_EXISTS = 6,
  MLA_PERMISSION_DENIED = 7,
  MLA_RESOURCE_EXHAUSTED = 8,
  MLA_FAILED_PRECONDITION = 9,
  MLA_ABORTED = 10,
  MLA_OUT_OF_RANGE = 11,
  MLA_UNIMPLEMENTED = 12,
  MLA_INTERNAL = 13,
  MLA_UNAVAILABLE = 14,
  MLA_DATA_LOSS = 15,
  MLA_UNAUTHENTICATED = 16
} mla_code;

// Returns "MAJOR.MINOR.PATCH" of the library. Libraries of one soname are compatible.
MLA_API const char* mla_version(void);
// Tunes the process's allocator for messages of megabytes; programs that send tensors in gRPC
// messages gain from it. Call it once at the start.
MLA_API void mla_keep_message_memory(void);

// --- Errors. Texts live as long as the error and are never NULL; missing ones are empty. Every
// function takes NULL, which is an error without texts.
MLA_API mla_code mla_error_code(const mla_error* error);
MLA_API const char* mla_error_message(const mla_error* error);
// Return the path of the field to blame, e.g. "attend.row_count", its allowed values, and its
// value.
MLA_API const char* mla_error_field(const mla_error* error);
MLA_API const char* mla_error_limit(const mla_error* error);
MLA_API const char* mla_error_got(const mla_error* error);
// Returns a stable token, e.g. "epoch_mismatch", "server_restarted", "pages_exhausted".
MLA_API const char* mla_error_reason(const mla_error* error);
// Returns HOST:PORT of the server to go to: it has the sequence now ("moved"), or this one drains
// and its sequences go there, so that a new one may be opened there ("draining"). Empty in other
// cases.
MLA_API const char* mla_error_peer(const mla_error* error);
// Returns the milliseconds after which the same call may succeed, or 0 if no time is known.
MLA_API uint32_t mla_error_retry_after_ms(const mla_error* error);
// Returns the number of committed rows of the sequence of a step that failed: go on from there.
MLA_API uint64_t mla_error_last_good_position(const mla_error* error);
// Returns the first row of the still open step that the layer of a failed attend does not have, or
// -1 if the error does not say it.
MLA_API int64_t mla_error_next_row(const mla_error* error);
MLA_API void mla_error_free(mla_error* error);

// --- Connections

typedef enum mla_transport MLA_INT_ENUM {
  MLA_TRANSPORT_AUTO = 0,       // the ring where a unix target offers it, else inline
  MLA_TRANSPORT_INLINE = 1,     // all in gRPC messages
  MLA_TRANSPORT_SHM = 2,        // messages over gRPC, tensors in shared memory
  MLA_TRANSPORT_RING = 3,       // all in shared memory
  MLA_TRANSPORT_UCX = 4,        // as the ring, to a server of any host over UCX (docs/rdma.md)
  MLA_TRANSPORT_UCX_PUTS = 5,   // likewise, with puts if the server allows them; for RDMA
  MLA_TRANSPORT_UCX_DEVICE = 6  // likewise, into memory of the server's GPU, or not at all
} mla_transport;

typedef struct mla_connect_options {
  size_t struct_size;
  const char* tenant;     // sent without TLS only; NULL: the server's default
  const char* client_id;  // groups this client's sequences; NULL: a random name
  const char* tls_ca;     // PEM files; all three or none. Read again when they change
  const char* tls_cert;
  const char* tls_key;
  const char* tls_server_name;  // expected in place of the target's host
  int64_t call_timeout_ms;      // 0: 10000
  int64_t request_timeout_ms;   // of each request of a session; 0: 60000
  int64_t sequence_lease_ms;    // 0: the server's default
  // Size of one session's shared memory; 0: 64 MiB, or less if the server has less left.
  uint64_t shared_bytes;
  mla_transport transport;
  int32_t no_lease_renewal;  // 1: leases of sequences are not renewed in the background
  // Spin time of a session on its ring, before it sleeps; 0: 20, -1: none.
  int32_t spin_us;
  int32_t copy_threads;  // number of threads that copy tensors to shared memory; 0: 1
  int64_t server_uid;    // a further user whose sockets are trusted; 0: none
} mla_connect_options;

typedef struct mla_server_info {
  size_t struct_size;
  uint64_t boot_id;  // of this run of the server
  uint64_t message_bytes, weight_chunk_bytes, kv_cache_bytes, max_sequence_rows;
  uint64_t shm_region_bytes;  // 0: the server has no shared memory
  uint32_t max_step_rows, max_step_sequences, sequence_lease_ms, step_lease_ms;
  const char* server_version;  // both live as long as the client
  const char* backend;
} mla_server_info;

// `target` is "unix:PATH" or "HOST:PORT", or one of a cluster, as for mla_connect_cluster.
// `options` NULL: the defaults. MLA_UNAVAILABLE: no server answered in time.
MLA_API mla_code mla_connect(const char* target, const mla_connect_options* options,
                             mla_client** out, mla_error** error);
MLA_API void mla_client_free(mla_client* client);

// --- Clusters (docs/cluster.md). A connection to a cluster has all calls of one to a server:
// sequences go to the server where they cost least, and a step over sequences of several servers is
// a step on each. The info is the home's. Weights that were uploaded must stay as they are until
// their model is unregistered, since servers get them when they get the model.

typedef struct mla_cluster_options {
  size_t struct_size;
  const char* home;   // address of the server for sequences that share nothing; NULL: by client_id
  uint32_t subset;    // servers that this client uses while they have room; 0: 8
  int32_t all;        // 1: all servers, whatever `subset` says
  int64_t keep_ms;    // how long members are used while the registry is away; 0: ten minutes
  int32_t no_socket;  // 1: servers of this host are reached as others are
  // These are paths of PEM files, which etcds:// needs. Without etcd_ca the system's authorities
  // are trusted; without etcd_cert and etcd_key this client shows no certificate.
  const char* etcd_ca;
  const char* etcd_cert;
  const char* etcd_key;
  // Paths of this host's sockets, with wildcards as in glob(7) ("/run/mla/*.sock"). Servers of this
  // host are then reached by these sockets, whatever the registry says, also with TLS. Calls over a
  // socket have the tenant that the server gives to the socket's users (server.unix_tenant). NULL:
  // those of the registry, without TLS.
  const char* sockets;
} mla_cluster_options;

// `target` is "etcd://HOST:2379/PREFIX", "dns:///NAME:50551" or "a:50551,b:50551". `options`: of
// the connection to each server. Both may be NULL.
MLA_API mla_code mla_connect_cluster(const char* target, const mla_connect_options* options,
                                     const mla_cluster_options* cluster, mla_client** out,
                                     mla_error** error);
// Gives values as of mla_connect; a cluster's home is asked again. `info->struct_size` must be set.
MLA_API mla_code mla_client_server_info(const mla_client* client, mla_server_info* info,
                                        mla_error** error);

// --- Models

typedef enum mla_kv_format MLA_INT_ENUM {
  MLA_KV_FORMAT_BF16 = 1,
  MLA_KV_FORMAT_FP8_TENSOR = 2,  // e4m3, one scale a layer
  MLA_KV_FORMAT_FP8_ROW = 3,     // latent part e4m3 with a scale per 128 values, rotated bf16
  // As FP8_ROW, with a power of two per 64 values, after a page's rows.
  MLA_KV_FORMAT_FP8_PAGE = 4
} mla_kv_format;

typedef enum mla_query_precision MLA_INT_ENUM {
  MLA_QUERY_PRECISION_BF16 = 1,
  MLA_QUERY_PRECISION_SPLIT = 2
} mla_query_precision;

// Says which elements of the rotated part of a query form a pair, for MLA_PROFILE_PROJECTED.
typedef enum mla_rope_layout MLA_INT_ENUM {
  MLA_ROPE_LAYOUT_INTERLEAVED = 1,  // elements 2 i and 2 i + 1
  MLA_ROPE_LAYOUT_HALVES = 2        // elements i and i + rope_dim / 2
} mla_rope_layout;

typedef struct mla_model {
  size_t struct_size;
  const char* model_id;
  // DeepSeek-V3 has 128, 512, 64, 128, 128. The last two are of the EXPANDED profile; 0: not used.
  uint32_t num_heads, kv_lora_rank, rope_dim, nope_dim, v_dim;
  uint32_t layers;
  double softmax_scale;     // multiplies q·k; required
  uint32_t page_size;       // rows; 0: the server's default
  uint32_t lease_ms;        // unregistered after this time without use; 0: the server's default
  mla_kv_format kv_format;  // 0: bf16
  mla_query_precision query_precision;  // for EXPANDED; 0: the best one that the server has
  uint32_t sparse_top_k;  // > 0: rows attend to index lists of at most this many entries
  uint32_t kv_scale_count;
  const float* kv_scales;  // for MLA_KV_FORMAT_FP8_TENSOR, one a layer; may come later
  // For MLA_PROFILE_PROJECTED, which such models have in place of ABSORBED and EXPANDED: elements
  // of a normed query row and of hidden states, and how queries are rotated. All are set, or none.
  uint32_t q_lora_rank, hidden_size;
  mla_rope_layout rope_layout;
  uint64_t projected_e4m3;  // nonzero: the server holds W_UQ and W_O in e4m3, if it can
} mla_model;

typedef struct mla_model_info {
  size_t struct_size;
  uint64_t page_group_bytes;  // a page of every layer, the unit of allocation
  uint64_t page_groups_max;   // groups that the whole pool could hold
  uint64_t max_sequence_rows;
  uint32_t page_size, lease_ms;
  int32_t scales_complete;
} mla_model_info;

// The up-projection weights of some heads of a layer: bf16, row-major.
typedef struct mla_weights {
  uint32_t layer, head_begin, head_count;
  const void* w_uk;  // [head_count, nope_dim, kv_lora_rank]
  const void* w_uv;  // [head_count, kv_lora_rank, v_dim]
} mla_weights;

// The weights of MLA_PROFILE_PROJECTED of some heads of a layer, row-major: bf16, or codes of e4m3
// if there are scales. A scale is for a block of 128 x 128 elements of the matrix of all heads, as
// checkpoints have it; both matrices have scales or neither.
typedef struct mla_projected_weights {
  size_t struct_size;
  uint32_t layer, head_begin, head_count;
  uint32_t reserved;
  const void* w_uq;  // [head_count, nope_dim + rope_dim, q_lora_rank]
  const void* w_o;   // [hidden_size, head_count, v_dim]
  // [ceil(num_heads * (nope_dim + rope_dim) / 128), ceil(q_lora_rank / 128)], or NULL
  const float* w_uq_scales;
  const float* w_o_scales;  // [ceil(hidden_size / 128), ceil(num_heads * v_dim / 128)], or NULL
} mla_projected_weights;

// Repeating it with equal contents succeeds. `info` may be NULL.
MLA_API mla_code mla_register_model(mla_client* client, const mla_model* model,
                                    mla_model_info* info, mla_error** error);
// Sends weights with a digest; several calls may bring a model's. *complete, if not NULL: 1 once
// all layers and heads are there, which EXPANDED needs. This client must have registered the model:
// its shape, and not the server's answer, says how many bytes of the weights are read.
MLA_API mla_code mla_upload_weights(mla_client* client, const char* model_id,
                                    const mla_weights* weights, size_t count, int32_t* complete,
                                    mla_error** error);
// Uploads W_UQ and W_O like mla_upload_weights; MLA_PROFILE_PROJECTED needs them in addition. Of a
// cluster, the sequences of a step of this profile must be on one server.
MLA_API mla_code mla_upload_projected(mla_client* client, const char* model_id,
                                      const mla_projected_weights* weights, int32_t* complete,
                                      mla_error** error);
// Sets the scales of a model whose format has one for each layer; `count` is the number of layers.
// Other values than the present ones are refused while a sequence of the model is open.
MLA_API mla_code mla_upload_scales(mla_client* client, const char* model_id, const float* scales,
                                   size_t count, mla_error** error);
// Forgets the model. MLA_FAILED_PRECONDITION while sequences of it are open.
MLA_API mla_code mla_unregister_model(mla_client* client, const char* model_id, mla_error** error);

// --- Sequences

// Says what rows stand for: token ids or page keys, not both.
typedef struct mla_prefix {
  size_t struct_size;
  const uint32_t* token_ids;  // one a row
  size_t token_count;
  const void* page_keys;  // page_key_bytes for each whole page
  size_t page_key_count;
  const char* salt;  // rows of other salts are not shared; NULL: ""
  // The sequence has at most this number of rows after the match; 0: all cached rows. For a prompt
  // of one row, which is to be computed, open the sequence without a prefix.
  uint64_t max_rows;
  size_t page_key_bytes;  // 16 for names of mla_page_names; 0: 32
} mla_prefix;

#define MLA_PAGE_NAME_BYTES 16
// Writes the names of whole pages, MLA_PAGE_NAME_BYTES each, for mla_prefix.page_keys: token_count
// / page_size of them. All workers that share rows must have the same salt, of 1 to 64 bytes. Rows
// that are named in this way and rows that are named by token ids do not find each other.
MLA_API mla_code mla_page_names(const uint32_t* token_ids, size_t token_count, uint32_t page_size,
                                const void* salt, size_t salt_bytes, void* names,
                                mla_error** error);

// A server's answer to a probe, before a sequence is opened there.
typedef struct mla_probe {
  size_t struct_size;
  uint64_t boot_id;
  uint64_t rows_asked;                                // of the prefix's whole pages
  uint64_t rows_in_pool, rows_in_host, rows_in_file;  // of these, that the server has, by place
  uint64_t bytes_free, bytes_cached, bytes_total;     // cached ones are free, too
  uint64_t wait_us;  // that requests lately waited for a launch; 0: none is queued
  uint32_t sequences, queued_requests;
  int32_t draining;  // 1: no sequence may be opened there
} mla_probe;

// Asks the server, or a cluster's home, what a sequence with this prefix would find now. Leaves no
// trace. `model_id` and `prefix` may be NULL: the answer is about the server alone. Opening a
// cluster's sequence probes the servers by itself.
MLA_API mla_code mla_client_probe(mla_client* client, const char* model_id,
                                  const mla_prefix* prefix, mla_probe* probe, mla_error** error);

typedef enum mla_match_end MLA_INT_ENUM {
  MLA_MATCH_END_NONE = 0,      // no rows were asked for, or the sequence ends inside a page
  MLA_MATCH_END_ALL = 1,       // everything was found
  MLA_MATCH_END_ABSENT = 2,    // the rows that follow are not known
  MLA_MATCH_END_DIVERGED = 3,  // the cached rows that follow differ
  MLA_MATCH_END_EVICTED = 4,   // the rows that follow were there
  MLA_MATCH_END_DEFERRED = 5   // they are on their way back: ask again
} mla_match_end;

typedef struct mla_prefix_match {
  size_t struct_size;
  uint64_t rows;  // rows added to the sequence
  mla_match_end end;
} mla_prefix_match;

// Opens a sequence, which the caller frees. If `prefix` is not NULL, the sequence starts with as
// many of its rows as are cached.
MLA_API mla_code mla_sequence_open(mla_client* client, const char* model_id,
                                   const mla_prefix* prefix, mla_sequence** out, mla_error** error);
MLA_API uint64_t mla_sequence_id(const mla_sequence* sequence);
MLA_API uint64_t mla_sequence_epoch(const mla_sequence* sequence);
// Returns the number of committed rows as of the last reply.
MLA_API uint64_t mla_sequence_length(const mla_sequence* sequence);
// Makes a sequence that shares the first `length` rows, copy-on-write; UINT64_MAX stands for all
// committed rows.
MLA_API mla_code mla_sequence_fork(mla_sequence* sequence, uint64_t length, mla_sequence** out,
                                   mla_error** error);
// Declares the contents of rows from `first_row` on, and appends cached rows to the committed ones.
// `match` may be NULL.
MLA_API mla_code mla_sequence_match(mla_sequence* sequence, const mla_prefix* prefix,
                                    uint64_t first_row, mla_prefix_match* match, mla_error** error);
// Drops the rows from `length` on. The sequence gets another epoch.
MLA_API mla_code mla_sequence_truncate(mla_sequence* sequence, uint64_t length, mla_error** error);
// Asks the server for the sequence's epoch and length.
MLA_API mla_code mla_sequence_refresh(mla_sequence* sequence, mla_error** error);  // epoch, length
// Returns the address of the server that has a cluster's sequence; "" for sequences of one server.
// It lives until the sequence is recovered or freed.
MLA_API const char* mla_sequence_address(const mla_sequence* sequence);

typedef enum mla_recovered MLA_INT_ENUM {
  MLA_RECOVERED_ALIVE = 1,       // its server has it as before
  MLA_RECOVERED_MOVED = 2,       // a drain has moved it
  MLA_RECOVERED_CHECKPOINT = 3,  // from its checkpoint
  MLA_RECOVERED_PEER = 4,        // from rows that another server had
  MLA_RECOVERED_NONE = 5         // from nothing: all rows are to be sent again
} mla_recovered;

typedef struct mla_recovery {
  size_t struct_size;
  mla_recovered how;
  uint64_t rows;  // that it has
  uint64_t lost;  // that it had before and has not now
} mla_recovery;

// Goes on with a cluster's sequence whose server has failed, drained or restarted: the object
// stays, its server, id, epoch and length may be others. Rows from its length on are to be sent
// again. `prefix`, which may be NULL, says what its rows stand for. `recovery` may be NULL.
// MLA_FAILED_PRECONDITION for a sequence of a single server.
MLA_API mla_code mla_sequence_recover(mla_client* client, mla_sequence* sequence,
                                      const mla_prefix* prefix, mla_recovery* recovery,
                                      mla_error** error);
// Releases its rows on the server. The object is freed whether that succeeds or not.
MLA_API mla_code mla_sequence_release(mla_sequence* sequence, mla_error** error);
// As mla_sequence_release, without an answer.
MLA_API void mla_sequence_free(mla_sequence* sequence);

// --- Sessions and steps

typedef enum mla_profile MLA_INT_ENUM {
  MLA_PROFILE_ABSORBED = 1,  // q of kv_lora_rank + rope_dim, o of kv_lora_rank
  MLA_PROFILE_EXPANDED = 2,  // q of nope_dim + rope_dim, o of v_dim: the server has W_UK and W_UV
  MLA_PROFILE_APPEND_ONLY = 3,  // rows alone
  // q [rows, q_lora_rank], normed; o [rows, hidden_size]; all heads in one call
  MLA_PROFILE_PROJECTED = 4
} mla_profile;

typedef enum mla_dtype MLA_INT_ENUM { MLA_DTYPE_BF16 = 1, MLA_DTYPE_F32 = 2 } mla_dtype;

// The rows that a step adds to a sequence.
typedef struct mla_step_rows {
  mla_sequence* sequence;
  uint32_t rows;
} mla_step_rows;

typedef struct mla_step_options {
  size_t struct_size;
  uint64_t step_id;       // 0: chosen by the library; participants agree on one
  uint32_t participants;  // sessions that take part; 0: 1
  uint32_t lease_ms;      // 0: the server's default
  // The header of W3C Trace Context that names the span to which the step belongs. A server that
  // records traces then records the step as its child. NULL: none.
  const char* traceparent;
  // For MLA_PROFILE_PROJECTED: the rotation of each row, [rows of the step, rope_dim], cosines
  // [rope_dim / 2] and then sines; and how many numbers these are. NULL and 0: none.
  const float* rotations;
  size_t rotation_count;
  // For steps of a cluster. 1: if some servers fail and others do not, calls succeed, and
  // mla_step_sequence_status tells whose rows are NaN and stay uncommitted. 0: such calls are
  // MLA_ABORTED with the reason "owners_failed", once for each failure.
  int32_t partial;
} mla_step_options;

// One layer of a step, or a part of its rows or heads. Tensors are row-major; kv, q and o begin
// with row_begin's row.
typedef struct mla_attend {
  size_t struct_size;
  uint32_t layer, row_begin, row_count, head_offset, num_heads;
  mla_profile profile;
  mla_dtype q_dtype, o_dtype;  // of kv and q, and of o; 0: bf16
  uint32_t timeout_us;         // 0: the server's
  uint32_t list_width;         // entries of every index list; 0: ragged
  const void* kv;              // [rows, kv_lora_rank + rope_dim]; NULL: another head slice has them
  // [rows, num_heads, q dim] and [rows, num_heads, o dim], or as PROJECTED says; not of
  // APPEND_ONLY
  const void* q;
  void* o;
  float* lse;  // [rows, num_heads], base e; NULL: not wanted
  // For sparse models: the positions to which each row attends, padded with -1. NULL: all positions
  // that the row sees.
  const int32_t* list_entries;
  const int32_t* list_begin;  // for ragged lists, [rows + 1]: list i ends at list_begin[i + 1]
} mla_attend;

// The times of the slowest message of a call.
typedef struct mla_attend_times {
  size_t struct_size;
  uint32_t queue_us, plan_us, kernel_us, write_us;
  uint32_t launch_requests;
  uint32_t messages;
  uint32_t launch_layers, launch_clients;
  uint32_t plan_reused;  // 1: the launch was planned as the one before it
} mla_attend_times;

// Opens a stream of steps, which the caller frees. Sessions do not depend on each other.
MLA_API mla_code mla_session_open(mla_client* client, mla_session** out, mla_error** error);
// Returns "inline", "shm", "ring" or "ucx".
MLA_API const char* mla_session_transport(const mla_session* session);
// Returns shared memory in which tensors are used where they lie: put kv and q into one block, and
// o and lse into another, the second tensor of each at the next multiple of 64 bytes. NULL without
// shared memory, or if it is full. Lives as long as the session.
MLA_API void* mla_session_allocate(mla_session* session, size_t bytes);
MLA_API void mla_session_deallocate(mla_session* session, void* block);
// Aborts open steps.
MLA_API void mla_session_free(mla_session* session);

// Begins a step that adds rows to `count` sequences: the server reserves pages for all rows at all
// layers, or refuses the whole step. The caller frees the step. Sequences must stay until the step
// has ended.
MLA_API mla_code mla_step_begin(mla_session* session, const char* model_id,
                                const mla_step_rows* rows, size_t count,
                                const mla_step_options* options, mla_step** out, mla_error** error);
MLA_API uint64_t mla_step_id(const mla_step* step);
MLA_API uint32_t mla_step_total_rows(const mla_step* step);
// Stores KV rows and computes attention at one layer. Returns when o and lse are written. `times`
// may be NULL.
MLA_API mla_code mla_step_attend(mla_step* step, const mla_attend* call, mla_attend_times* times,
                                 mla_error** error);
// Sends such a call and returns. The call's tensors are in use until mla_pending_wait has returned.
MLA_API mla_code mla_step_attend_async(mla_step* step, const mla_attend* call, mla_pending** out,
                                       mla_error** error);
// Returns 1 if mla_pending_wait would not wait for the server any more, else 0. Takes replies that
// have come, and waits for none. Has no timeout; mla_pending_wait has.
MLA_API int mla_pending_ready(mla_pending* pending);
// Waits for the reply and frees `pending`. Call it once.
MLA_API mla_code mla_pending_wait(mla_pending* pending, mla_attend_times* times, mla_error** error);
// Commits the step's rows, `committed` of each sequence (NULL: all), and sets the lengths of its
// sequences. The caller must still free the step.
MLA_API mla_code mla_step_end(mla_step* step, const uint32_t* committed, mla_error** error);
// Drops the step: its sequences are as they were before it.
MLA_API mla_code mla_step_abort(mla_step* step, mla_error** error);
// For steps of a cluster: returns MLA_OK unless the server of the step's sequence at this place has
// failed, and otherwise that server's error.
MLA_API mla_code mla_step_sequence_status(const mla_step* step, size_t place, mla_error** error);
// Aborts a step that has not ended.
MLA_API void mla_step_free(mla_step* step);

#ifdef __cplusplus
}
#endif

#endif  // MLA_CLIENT_C_MLA_CLIENT_H_
