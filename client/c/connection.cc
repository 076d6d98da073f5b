// Connections and models.
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/c/connection.h"
#include "client/c/handles.h"
#include "client/c/version.h"
#include "client/cpp/cluster/targets.h"
#include "proto/wire/grpc_tuning.h"

namespace mla::capi {
namespace {

constexpr uint64_t kElementBytes = 2;  // size of a weight: bf16

}  // namespace

absl::StatusOr<client::ClientOptions> OptionsOf(const mla_connect_options* given) {
  mla_connect_options known;
  MLA_RETURN_IF_ERROR(Read(given, false, "options", &known));
  if (known.transport < MLA_TRANSPORT_AUTO || known.transport > MLA_TRANSPORT_UCX_DEVICE) {
    return Refuse("options.transport", "0..6", std::to_string(known.transport));
  }
  client::ClientOptions options;
  options.tenant = Text(known.tenant);
  options.client_id = Text(known.client_id);
  options.tls_ca = Text(known.tls_ca);
  options.tls_cert = Text(known.tls_cert);
  options.tls_key = Text(known.tls_key);
  options.tls_server_name = Text(known.tls_server_name);
  if (known.call_timeout_ms != 0) options.call_timeout_ms = known.call_timeout_ms;
  if (known.request_timeout_ms != 0) options.request_timeout_ms = known.request_timeout_ms;
  options.sequence_lease_ms = known.sequence_lease_ms;
  options.shared_bytes = known.shared_bytes;
  options.transport = static_cast<client::ClientOptions::Transport>(known.transport);
  options.renew_leases = known.no_lease_renewal == 0;
  if (known.spin_us != 0) options.spin_us = static_cast<uint32_t>(std::max(known.spin_us, 0));
  if (known.copy_threads != 0) options.copy_threads = known.copy_threads;
  if (known.server_uid != 0) options.server_uid = known.server_uid;
  return options;
}

namespace {

v1::ModelSpec SpecOf(const mla_model& model) {
  v1::ModelSpec spec;
  spec.set_model_id(Text(model.model_id));
  v1::Geometry* geometry = spec.mutable_geometry();
  geometry->set_num_heads(model.num_heads);
  geometry->set_kv_lora_rank(model.kv_lora_rank);
  geometry->set_rope_dim(model.rope_dim);
  geometry->set_nope_dim(model.nope_dim);
  geometry->set_v_dim(model.v_dim);
  spec.set_layers(model.layers);
  spec.set_softmax_scale(model.softmax_scale);
  spec.set_q_lora_rank(model.q_lora_rank);
  spec.set_hidden_size(model.hidden_size);
  spec.set_rope_layout(static_cast<v1::RopeLayout>(model.rope_layout));
  const bool server =
      model.q_lora_rank > 0 || model.hidden_size > 0 || model.rope_layout != mla_rope_layout{};
  // Eight bytes: a smaller field would lie in the padding of older callers' structs.
  if (model.projected_e4m3 != 0) spec.set_projected_dtype(v1::DTYPE_F8_E4M3);
  spec.set_rope_owner(server ? v1::ROPE_OWNER_SERVER : v1::ROPE_OWNER_WORKER);
  spec.set_page_size(model.page_size);
  spec.set_kv_format(static_cast<v1::KvFormat>(model.kv_format));
  if (model.kv_format <= MLA_KV_FORMAT_BF16) spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_query_precision(static_cast<v1::QueryPrecision>(model.query_precision));
  if (model.sparse_top_k > 0) spec.set_attention(v1::ATTENTION_KIND_SPARSE_V32);
  spec.set_top_k(model.sparse_top_k);
  return spec;
}

// Cuts weights into chunks of as many heads as a message may hold.
class ChunkSource final {
 public:
  ChunkSource(const v1::Geometry& geometry, uint64_t most_bytes,
              std::span<const mla_weights> weights)
      : uk_bytes_(kElementBytes * geometry.nope_dim() * geometry.kv_lora_rank()),
        uv_bytes_(kElementBytes * geometry.kv_lora_rank() * geometry.v_dim()),
        most_heads_(
            std::max<uint64_t>(1, most_bytes / std::max<uint64_t>(1, uk_bytes_ + uv_bytes_))),
        weights_(weights) {}

  std::optional<client::WeightsChunk> Next() {
    while (!weights_.empty() && done_ == weights_.front().head_count) {
      weights_ = weights_.subspan(1);
      done_ = 0;
    }
    if (weights_.empty()) return std::nullopt;
    const mla_weights& whole = weights_.front();
    client::WeightsChunk chunk;
    chunk.layer = whole.layer;
    chunk.head_begin = whole.head_begin + done_;
    chunk.head_count =
        static_cast<uint32_t>(std::min<uint64_t>(most_heads_, whole.head_count - done_));
    chunk.bytes.reserve(chunk.head_count * (uk_bytes_ + uv_bytes_));
    chunk.bytes.append(static_cast<const char*>(whole.w_uk) + done_ * uk_bytes_,
                       chunk.head_count * uk_bytes_);
    chunk.bytes.append(static_cast<const char*>(whole.w_uv) + done_ * uv_bytes_,
                       chunk.head_count * uv_bytes_);
    done_ += chunk.head_count;
    return chunk;
  }

 private:
  const uint64_t uk_bytes_, uv_bytes_, most_heads_;
  std::span<const mla_weights> weights_;  // not yet sent; the first of them may be sent in part
  uint32_t done_ = 0;                     // heads of the first
};

absl::Status SendWeights(client::Client* server, const std::string& model_id,
                         const v1::Geometry& geometry, std::span<const mla_weights> weights,
                         int32_t* complete) {
  ChunkSource chunks(geometry, server->info().limits().weight_chunk_bytes(), weights);
  const auto reply = server->UploadWeights(model_id, [&chunks] { return chunks.Next(); });
  if (reply.ok() && complete != nullptr) *complete = reply->complete() ? 1 : 0;
  return reply.status();
}

absl::Status Upload(mla_client* client, const char* model_id, std::span<const mla_weights> weights,
                    int32_t* complete) {
  absl::Status named = CheckNotNull(model_id, "model_id");
  if (named.ok() && !weights.empty()) named = CheckNotNull(weights.data(), "weights");
  if (!named.ok()) return named;
  for (const mla_weights& one : weights) {
    for (const void* tensor : {one.w_uk, one.w_uv}) {
      absl::Status status =
          CheckNotNull(tensor, tensor == one.w_uk ? "weights.w_uk" : "weights.w_uv");
      if (!status.ok()) return status;
    }
  }
  MLA_ASSIGN_OR_RETURN(const auto model,
                       client->With([&](auto* one) { return one->RegisteredModel(model_id); }));
  if (client->cluster == nullptr) {
    return SendWeights(client->client.get(), model_id, model.geometry(), weights, complete);
  }
  // Servers that get the model later are sent the same tensors.
  std::string about = "weights";
  for (const mla_weights& one : weights) {
    absl::StrAppend(&about, " ", one.layer, ":", one.head_begin, "+", one.head_count);
  }
  const auto all = std::make_shared<std::atomic<int32_t>>(0);
  const absl::Status status = client->cluster->Upload(
      model_id, about,
      [all, id = std::string(model_id), geometry = model.geometry(),
       kept = std::vector<mla_weights>(weights.begin(), weights.end())](client::Client* server) {
        int32_t done = 0;
        absl::Status sent = SendWeights(server, id, geometry, kept, &done);
        if (sent.ok()) *all = done;
        return sent;
      });
  if (status.ok() && complete != nullptr) *complete = *all;
  return status;
}

absl::Status Register(mla_client* client, const mla_model* given, mla_model_info* info) {
  mla_model model;
  MLA_RETURN_IF_ERROR(Read(given, true, "model", &model));
  if (model.kv_scale_count > 0) {
    absl::Status status = CheckNotNull(model.kv_scales, "model.kv_scales");
    if (!status.ok()) return status;
  }
  MLA_ASSIGN_OR_RETURN(const auto reply, client->With([&](auto* one) {
    return one->RegisterModel(SpecOf(model), model.lease_ms,
                              {model.kv_scales, model.kv_scale_count});
  }));
  mla_model_info known{};
  known.page_group_bytes = reply.page_group_bytes();
  known.page_groups_max = reply.page_groups_max();
  known.max_sequence_rows = reply.max_sequence_rows();
  known.page_size = reply.model().page_size();
  known.lease_ms = reply.lease_ms();
  known.scales_complete = reply.scales_complete() ? 1 : 0;
  Write(known, info);
  return absl::OkStatus();
}

absl::Status ServerInfo(const mla_client& client, mla_server_info* info) {
  mla_server_info known{};
  MLA_RETURN_IF_ERROR(Read(info, true, "info", &known));
  MLA_ASSIGN_OR_RETURN(const v1::GetServerInfoReply reply, client.cluster != nullptr
                                                               ? client.cluster->HomeInfo()
                                                               : client.client->info());
  known.boot_id = reply.boot_id();
  known.message_bytes = reply.limits().message_bytes();
  known.weight_chunk_bytes = reply.limits().weight_chunk_bytes();
  known.kv_cache_bytes = reply.limits().kv_cache_bytes();
  known.max_sequence_rows = reply.limits().max_sequence_rows();
  known.shm_region_bytes = reply.limits().shm_region_bytes();
  known.max_step_rows = reply.limits().max_step_rows();
  known.max_step_sequences = reply.limits().max_step_sequences();
  known.sequence_lease_ms = reply.limits().sequence_lease_ms();
  known.step_lease_ms = reply.limits().step_lease_ms();
  {
    const MutexLock lock(client.texts_mutex);
    known.server_version = client.texts.insert(reply.server_version()).first->c_str();
    known.backend = client.texts.insert(reply.backend().name()).first->c_str();
  }
  Write(known, info);
  return absl::OkStatus();
}

}  // namespace
}  // namespace mla::capi

using mla::capi::CheckNotNull;
using mla::capi::Guard;

const char* mla_version(void) { return mla::capi::kVersion; }

void mla_keep_message_memory(void) { mla::wire::KeepMessageMemory(); }

mla_code mla_connect(const char* target, const mla_connect_options* options, mla_client** out,
                     mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(out, "out"); !status.ok()) return status;
    *out = nullptr;
    if (absl::Status status = CheckNotNull(target, "target"); !status.ok()) return status;
    if (mla::client::NamesCluster(target)) {
      return mla::capi::ConnectCluster(target, options, nullptr, out);
    }
    const auto known = mla::capi::OptionsOf(options);
    if (!known.ok()) return known.status();
    auto connected = mla::client::Client::Connect(target, *known);
    if (!connected.ok()) return connected.status();
    auto client = std::make_unique<mla_client>();
    client->client = *std::move(connected);
    *out = client.release();
    return absl::OkStatus();
  });
}

void mla_client_free(mla_client* client) { delete client; }

mla_code mla_client_server_info(const mla_client* client, mla_server_info* info,
                                mla_error** error) {
  return Guard(error, [&] { return mla::capi::ServerInfo(*client, info); });
}

mla_code mla_register_model(mla_client* client, const mla_model* model, mla_model_info* info,
                            mla_error** error) {
  return Guard(error, [&] { return mla::capi::Register(client, model, info); });
}

mla_code mla_upload_weights(mla_client* client, const char* model_id, const mla_weights* weights,
                            size_t count, int32_t* complete, mla_error** error) {
  return Guard(error, [&] {
    return mla::capi::Upload(client, model_id, {weights, count}, complete);
  });
}

mla_code mla_upload_scales(mla_client* client, const char* model_id, const float* scales,
                           size_t count, mla_error** error) {
  return Guard(error, [&] {
    absl::Status named = CheckNotNull(model_id, "model_id");
    if (named.ok() && count > 0) named = CheckNotNull(scales, "scales");
    if (!named.ok()) return named;
    if (client->cluster == nullptr) return client->client->UploadScales(model_id, {scales, count});
    return client->cluster->Upload(
        model_id, mla::client::ClusterClient::kScales,
        [id = std::string(model_id), kept = std::vector<float>(scales, scales + count)](
            mla::client::Client* server) { return server->UploadScales(id, kept); });
  });
}

mla_code mla_unregister_model(mla_client* client, const char* model_id, mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(model_id, "model_id"); !status.ok()) return status;
    return client->With([&](auto* one) { return one->UnregisterModel(model_id); });
  });
}
