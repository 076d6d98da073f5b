#include "server/model_service.h"

#include "absl/cleanup/cleanup.h"
#include "server/request_validator.h"
#include "server/weights_upload.h"

namespace mla::server {
namespace {

using scheduler::Fault;

void Fill(const scheduler::ModelSpec& from, v1::ModelSpec* to) {
  to->set_model_id(from.id);
  to->mutable_geometry()->set_num_heads(static_cast<uint32_t>(from.geometry.num_heads));
  to->mutable_geometry()->set_kv_lora_rank(static_cast<uint32_t>(from.geometry.kv_lora_rank));
  to->mutable_geometry()->set_rope_dim(static_cast<uint32_t>(from.geometry.rope_dim));
  to->mutable_geometry()->set_nope_dim(static_cast<uint32_t>(from.geometry.nope_dim));
  to->mutable_geometry()->set_v_dim(static_cast<uint32_t>(from.geometry.v_dim));
  to->set_layers(static_cast<uint32_t>(from.layers));
  to->set_softmax_scale(from.softmax_scale);
  to->set_kv_dtype(v1::DTYPE_BF16);
  to->set_rope_owner(v1::ROPE_OWNER_WORKER);
  to->set_page_size(static_cast<uint32_t>(from.page_size));
}

}  // namespace

grpc::Status ModelService::Register(grpc::ServerContext* context,
                                    const v1::RegisterRequest* request, v1::RegisterReply* reply) {
  return rpc_.Serve(context, "Models.Register", [&](const Identity& who, Fault* fault) {
    scheduler::ModelSpec spec;
    absl::Status status = ParseModelSpec(request->model(), rpc_.engine->limits(), &spec, fault);
    if (!status.ok()) return status;
    const auto info = rpc_.engine->RegisterModel(who.tenant, spec, fault);
    if (!info.ok()) return info.status();
    Fill(info->spec, reply->mutable_model());
    reply->set_page_group_bytes(static_cast<uint64_t>(info->page_group_bytes));
    reply->set_page_groups_max(static_cast<uint64_t>(info->page_groups_max));
    reply->set_max_sequence_rows(static_cast<uint64_t>(info->max_sequence_rows));
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status ModelService::UploadWeights(grpc::ServerContext* context,
                                         grpc::ServerReader<v1::UploadWeightsRequest>* reader,
                                         v1::UploadWeightsReply* reply) {
  return rpc_.Serve(context, "Models.UploadWeights", [&](const Identity& who, Fault* fault) {
    absl::Status status = Upload(who.tenant, reader, reply, fault);
    reply->set_boot_id(rpc_.boot_id);
    return status;
  });
}

absl::Status ModelService::Upload(const std::string& tenant,
                                  grpc::ServerReader<v1::UploadWeightsRequest>* in,
                                  v1::UploadWeightsReply* reply, Fault* fault) {
  v1::UploadWeightsRequest message;
  if (!in->Read(&message) || !message.has_header()) {
    return InvalidField(fault, "header", "the first message of the call", "nothing", "missing");
  }
  const std::string model_id = message.header().model_id();
  // Before it is echoed: trailing metadata must stay small.
  const absl::Status named =
      CheckName(model_id, "header.model_id", false, rpc_.engine->limits(), fault);
  if (!named.ok()) return named;
  const auto model = rpc_.engine->FindModel(tenant, model_id);
  if (model == nullptr) {
    fault->field = "header.model_id";
    fault->got = model_id;
    fault->limit = "a registered model of this tenant";
    fault->reason = "model_not_found";
    return absl::NotFoundError("header.model_id: no such model");
  }
  const auto key = std::pair(tenant, model_id);
  {
    const std::lock_guard lock(mutex_);
    if (!uploading_.insert(key).second) {
      fault->field = "header.model_id";
      fault->got = model_id;
      fault->limit = "a model without an upload under way";
      fault->reason = "upload_under_way";
      fault->retry_after_ms = 1000;
      return absl::AbortedError("header.model_id: another upload of this model is under way");
    }
  }
  const absl::Cleanup forget = [&] {
    const std::lock_guard lock(mutex_);
    uploading_.erase(key);
  };
  WeightsUpload upload(rpc_.engine, tenant, model, weight_chunk_bytes_);
  while (in->Read(&message)) {
    absl::Status status = upload.Add(message, fault);
    if (!status.ok()) return status;
  }
  return upload.Finish(reply, fault);
}

grpc::Status ModelService::List(grpc::ServerContext* context, const v1::ListModelsRequest*,
                                v1::ListModelsReply* reply) {
  return rpc_.Serve(context, "Models.List", [&](const Identity& who, Fault*) {
    for (const scheduler::ModelInfo& info : rpc_.engine->ListModels(who.tenant)) {
      v1::ModelInfo* model = reply->add_models();
      Fill(info.spec, model->mutable_model());
      model->set_weights_complete(info.weights_complete);
      model->set_sequences(static_cast<uint32_t>(info.sequences));
    }
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status ModelService::Unregister(grpc::ServerContext* context,
                                      const v1::UnregisterRequest* request,
                                      v1::UnregisterReply* reply) {
  return rpc_.Serve(context, "Models.Unregister", [&](const Identity& who, Fault* fault) {
    absl::Status status =
        CheckName(request->model_id(), "model_id", false, rpc_.engine->limits(), fault);
    if (status.ok()) status = rpc_.engine->UnregisterModel(who.tenant, request->model_id(), fault);
    reply->set_boot_id(rpc_.boot_id);
    return status;
  });
}

}  // namespace mla::server
