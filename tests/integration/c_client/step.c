/* A worker in C: two steps with a sequence, an attend that overlaps another, a fork, a prefix and
 * refusals. Every answer is compared with what must come out.
 *
 *     step TARGET TRANSPORT
 *
 * Prints what it did; exits with 1 at the first difference. */
#include <math.h>
#include <mla_client.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, LORA = 512, ROPE = 64, NOPE = 32, V = 32, ROW = LORA + ROPE, LAYERS = 2 };

static void fail(const char* what, mla_error* error) {
  fprintf(stderr, "%s: %s (field %s, reason %s)\n", what, mla_error_message(error),
          mla_error_field(error), mla_error_reason(error));
  exit(1);
}

static void check(int right, const char* what) {
  if (!right) {
    fprintf(stderr, "wrong: %s\n", what);
    exit(1);
  }
}

/* bf16 values that bf16 holds exactly. */
static uint16_t bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static float value_of(int row, int column) { return (float)((row * 7 + column) % 16 - 8) / 8; }

static mla_client* connect_to(const char* target, const char* transport) {
  mla_connect_options options = {0};
  mla_client* client;
  mla_error* error;
  mla_server_info info = {0};
  options.struct_size = sizeof options;
  options.transport = strcmp(transport, "inline") == 0     ? MLA_TRANSPORT_INLINE
                      : strcmp(transport, "shm") == 0      ? MLA_TRANSPORT_SHM
                      : strcmp(transport, "ucx") == 0      ? MLA_TRANSPORT_UCX
                      : strcmp(transport, "ucx_puts") == 0 ? MLA_TRANSPORT_UCX_PUTS
                                                           : MLA_TRANSPORT_RING;
  if (mla_connect(target, &options, &client, &error) != MLA_OK) fail("connect", error);
  info.struct_size = sizeof info;
  if (mla_client_server_info(client, &info, &error) != MLA_OK) fail("server info", error);
  check(info.boot_id != 0 && info.message_bytes > 0, "server info");
  printf("server %s, backend %s\n", info.server_version, info.backend);
  return client;
}

static void register_model(mla_client* client) {
  mla_model model = {0};
  mla_model_info info = {0};
  mla_error* error;
  model.struct_size = sizeof model;
  model.model_id = "c";
  model.num_heads = HEADS;
  model.kv_lora_rank = LORA;
  model.rope_dim = ROPE;
  model.nope_dim = NOPE;
  model.v_dim = V;
  model.layers = LAYERS;
  model.softmax_scale = 0.125;
  model.page_size = 4;
  info.struct_size = sizeof info;
  if (mla_register_model(client, &model, &info, &error) != MLA_OK) fail("register", error);
  check(info.page_size == 4 && info.page_group_bytes > 0, "model info");
}

/* Weights with one head's W_UV that doubles the first V values of the latent part. */
static void upload(mla_client* client) {
  static uint16_t w_uk[HEADS * NOPE * LORA], w_uv[HEADS * LORA * V];
  mla_weights weights[LAYERS];
  mla_error* error;
  int32_t complete = 0;
  for (int head = 0; head < HEADS; ++head) {
    for (int i = 0; i < V; ++i) w_uv[(head * LORA + i) * V + i] = bf16(2);
  }
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    weights[layer] = (mla_weights){layer, 0, HEADS, w_uk, w_uv};
  }
  if (mla_upload_weights(client, "c", weights, LAYERS, &complete, &error) != MLA_OK) {
    fail("upload", error);
  }
  check(complete == 1, "weights are complete");
}

/* A step of one row at every layer. With one row in the sequence the softmax is 1: o is its latent
 * part, lse its score. */
static void first_step(mla_session* session, mla_sequence* sequence, uint16_t* in, char* out) {
  uint16_t *kv = in, *q = in + ROW; /* a row is a multiple of 64 bytes */
  float* o = (float*)out;
  float* lse = (float*)(out + HEADS * LORA * sizeof(float));
  const mla_step_rows rows = {sequence, 1};
  mla_pending* pending[LAYERS];
  mla_step* step;
  mla_error* error;
  mla_attend call = {0};
  mla_attend_times times = {0};
  if (mla_step_begin(session, "c", &rows, 1, NULL, &step, &error) != MLA_OK) fail("begin", error);
  check(mla_step_total_rows(step) == 1, "rows of the step");
  for (int i = 0; i < ROW; ++i) kv[i] = bf16(value_of(0, i));
  for (int i = 0; i < HEADS * ROW; ++i) q[i] = bf16(value_of(1 + i / ROW, i % ROW));
  memset(out, 0xff, HEADS * (LORA + 1) * sizeof(float));
  call.struct_size = sizeof call;
  call.row_count = 1;
  call.num_heads = HEADS;
  call.profile = MLA_PROFILE_ABSORBED;
  call.o_dtype = MLA_DTYPE_F32;
  call.kv = kv;
  call.q = q;
  call.o = o;
  call.lse = lse;
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    call.layer = layer;
    if (mla_step_attend_async(step, &call, &pending[layer], &error) != MLA_OK) {
      fail("attend", error);
    }
  }
  times.struct_size = sizeof times;
  for (int layer = 0; layer < LAYERS; ++layer) {
    if (mla_pending_wait(pending[layer], &times, &error) != MLA_OK) fail("wait", error);
    check(times.messages == 1, "messages of an attend");
  }
  for (int head = 0; head < HEADS; ++head) {
    double score = 0;
    for (int i = 0; i < ROW; ++i) score += (double)value_of(0, i) * value_of(1 + head, i);
    check(fabs(lse[head] - 0.125 * score) < 1e-3, "lse");
    for (int i = 0; i < LORA; ++i) check(o[head * LORA + i] == value_of(0, i), "o");
  }
  if (mla_step_end(step, NULL, &error) != MLA_OK) fail("end", error);
  mla_step_free(step);
  check(mla_sequence_length(sequence) == 1, "length");
}

/* Two equal rows more, EXPANDED with outputs in bf16; the second is not committed. */
static void second_step(mla_session* session, mla_sequence* sequence) {
  uint16_t kv[2 * ROW], q[2 * HEADS * (NOPE + ROPE)] = {0}, o[2 * HEADS * V];
  const uint32_t committed = 1;
  const mla_step_rows rows = {sequence, 2};
  mla_step* step;
  mla_error* error;
  mla_attend call = {0};
  if (mla_step_begin(session, "c", &rows, 1, NULL, &step, &error) != MLA_OK) fail("begin", error);
  for (int i = 0; i < 2 * ROW; ++i) kv[i] = bf16(value_of(0, i % ROW));
  call.struct_size = sizeof call;
  call.row_count = 2;
  call.num_heads = HEADS;
  call.profile = MLA_PROFILE_EXPANDED;
  call.kv = kv;
  call.q = q;
  call.o = o;
  for (uint32_t layer = 0; layer < LAYERS; ++layer) {
    call.layer = layer;
    if (mla_step_attend(step, &call, NULL, &error) != MLA_OK) fail("attend", error);
    for (int i = 0; i < 2 * HEADS * V; ++i) check(o[i] == bf16(2 * value_of(0, i % V)), "o");
  }
  if (mla_step_end(step, &committed, &error) != MLA_OK) fail("end", error);
  mla_step_free(step);
  check(mla_sequence_length(sequence) == 2, "length after a draft");
}

static void forks_and_prefixes(mla_client* client, mla_sequence* sequence) {
  const uint32_t tokens[2] = {11, 12};
  mla_prefix prefix = {0};
  mla_prefix_match match = {0};
  mla_sequence *fork, *other;
  mla_error* error;
  if (mla_sequence_fork(sequence, 1, &fork, &error) != MLA_OK) fail("fork", error);
  check(mla_sequence_length(fork) == 1, "length of a fork");
  check(mla_sequence_id(fork) != mla_sequence_id(sequence), "ids");
  if (mla_sequence_release(fork, &error) != MLA_OK) fail("release", error);
  prefix.struct_size = sizeof prefix;
  prefix.token_ids = tokens;
  prefix.token_count = 2;
  match.struct_size = sizeof match;
  if (mla_sequence_match(sequence, &prefix, 0, &match, &error) != MLA_OK) fail("match", error);
  if (mla_sequence_open(client, "c", &prefix, &other, &error) != MLA_OK) fail("open", error);
  mla_sequence_free(other);
  if (mla_sequence_truncate(sequence, 1, &error) != MLA_OK) fail("truncate", error);
  if (mla_sequence_refresh(sequence, &error) != MLA_OK) fail("refresh", error);
  check(mla_sequence_length(sequence) == 1 && mla_sequence_epoch(sequence) > 0, "truncated");
}

static void refusals(mla_client* client, mla_session* session, mla_sequence* sequence) {
  const mla_step_rows rows = {sequence, 1};
  uint16_t q[HEADS * ROW] = {0}, kv[ROW] = {0};
  float o[HEADS * LORA];
  mla_step* step;
  mla_sequence* none;
  mla_error* error;
  mla_attend call = {0};
  check(mla_sequence_open(client, "absent", NULL, &none, &error) == MLA_NOT_FOUND, "no model");
  check(none == NULL && mla_error_code(error) == MLA_NOT_FOUND, "code of an error");
  mla_error_free(error);
  if (mla_step_begin(session, "c", &rows, 1, NULL, &step, &error) != MLA_OK) fail("begin", error);
  call.struct_size = sizeof call;
  call.layer = LAYERS;
  call.row_count = 1;
  call.num_heads = HEADS;
  call.profile = MLA_PROFILE_ABSORBED;
  call.o_dtype = MLA_DTYPE_F32;
  call.kv = kv;
  call.q = q;
  call.o = o;
  check(mla_step_attend(step, &call, NULL, &error) != MLA_OK, "a layer that the model has not");
  printf("refused: field %s, limit %s, got %s\n", mla_error_field(error), mla_error_limit(error),
         mla_error_got(error));
  mla_error_free(error);
  mla_step_free(step); /* aborts it */
}

int main(int argc, char** argv) {
  mla_client* client;
  mla_session* session;
  mla_sequence* sequence;
  mla_error* error;
  uint16_t in[ROW * (1 + HEADS)];
  float out[HEADS * (LORA + 1)];
  void *shared_in, *shared_out;
  if (argc != 3) return 2;
  client = connect_to(argv[1], argv[2]);
  register_model(client);
  upload(client);
  if (mla_sequence_open(client, "c", NULL, &sequence, &error) != MLA_OK) fail("open", error);
  if (mla_session_open(client, &session, &error) != MLA_OK) fail("session", error);
  check(strcmp(mla_session_transport(session),
               strcmp(argv[2], "ucx_puts") == 0 ? "ucx" : argv[2]) == 0,
        "transport");
  shared_in = mla_session_allocate(session, sizeof in);
  shared_out = mla_session_allocate(session, sizeof out);
  check((shared_in != NULL) == (strcmp(argv[2], "inline") != 0), "shared memory");
  first_step(session, sequence, shared_in ? shared_in : in, shared_out ? shared_out : (void*)out);
  mla_session_deallocate(session, shared_in);
  mla_session_deallocate(session, shared_out);
  second_step(session, sequence);
  forks_and_prefixes(client, sequence);
  refusals(client, session, sequence);
  mla_session_free(session);
  if (mla_sequence_release(sequence, &error) != MLA_OK) fail("release", error);
  if (mla_unregister_model(client, "c", &error) != MLA_OK) fail("unregister", error);
  mla_client_free(client);
  printf("library %s: done over %s\n", mla_version(), argv[2]);
  return 0;
}
