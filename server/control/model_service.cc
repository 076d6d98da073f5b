#include "server/control/model_service.h"

#include <span>
#include <string>

#include "base/error.h"
#include "base/status_macros.h"
#include "server/grpc/grpc_status.h"
#include "server/grpc/request_validator.h"
#include "server/hand_over/weights_sender.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

std::span<const float> Span(const google::protobuf::RepeatedField<float>& values) {
  return {values.data(), static_cast<size_t>(values.size())};
}

}  // namespace

ModelService::ModelService(const RpcContext& rpc, int64_t weight_chunk_bytes, IdleCalls* idle)
    : rpc_(rpc), idle_(idle), incoming_(rpc.engine, weight_chunk_bytes) {
  MarkMethodStreamed(MethodIndex("mla.v1.Models.UploadWeights"),
                     ServeUploadBytes<&ModelService::ServeWeights, v1::UploadWeightsReply>(this));
}

grpc::Status ModelService::Register(grpc::ServerContext* context,
                                    const v1::RegisterRequest* request, v1::RegisterReply* reply) {
  return rpc_.Serve(context, "Models.Register", [&](const Identity& who) {
    scheduler::ModelSpec spec;
    MLA_RETURN_IF_ERROR(ParseModelSpec(request->model(), rpc_.engine->limits(), &spec));
    MLA_ASSIGN_OR_RETURN(const auto info, rpc_.engine->RegisterModel(
                                              who.tenant, spec, int64_t{request->lease_ms()},
                                              Span(request->kv_scales()), Span(request->sinks())));
    FillModel(info.spec, reply->mutable_model());
    reply->set_scales_complete(info.scales_complete);
    reply->set_sinks_complete(info.sinks_complete);
    reply->set_page_group_bytes(static_cast<uint64_t>(info.page_group_bytes));
    reply->set_page_groups_max(static_cast<uint64_t>(info.page_groups_max));
    reply->set_max_sequence_rows(static_cast<uint64_t>(info.max_sequence_rows));
    reply->set_lease_ms(static_cast<uint32_t>(info.lease_ms));
    reply->set_instance(info.instance);
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status ModelService::ServeWeights(grpc::ServerContext* context, UploadBytes* in,
                                        v1::UploadWeightsReply* reply) {
  return rpc_.Serve(context, "Models.UploadWeights", [&](const Identity& who) {
    absl::Status status = ServeUpload(who, context, in, reply);
    reply->set_boot_id(rpc_.boot_id);
    return status;
  });
}

absl::Status ModelService::ServeUpload(const Identity& who, grpc::ServerContext* context,
                                       UploadBytes* in, v1::UploadWeightsReply* reply) {
  scheduler::TenantTable& tenants = *rpc_.engine->tenants();
  MLA_ASSIGN_OR_RETURN(scheduler::TenantRef row, tenants.Enter(who.tenant));
  absl::Status status = tenants.Take(*row, scheduler::Resource::kUploads, 1, "call");
  if (!status.ok()) {
    rpc_.metrics->CountRejected(DetailOf(status).reason);
    return status;
  }
  UploadReader reader(context, in, idle_);
  status = Upload(who, &reader, reply);
  tenants.Return(*row, scheduler::Resource::kUploads, 1);
  return idle_->End(context, status);
}

absl::Status ModelService::Upload(const Identity& who, UploadReader* in,
                                  v1::UploadWeightsReply* reply) {
  v1::UploadWeightsRequest message;
  MLA_ASSIGN_OR_RETURN(const bool read, in->Read(&message));
  if (!read || !message.has_header()) {
    return RefuseField("header", "nothing", "the first message of the call", "missing");
  }
  const v1::UploadWeightsRequest::Header header = message.header();
  // Checked before the name is repeated in an error, because trailing metadata must stay small.
  MLA_RETURN_IF_ERROR(
      CheckName(header.model_id(), "header.model_id", false, rpc_.engine->limits()));
  const bool takes_over = !header.tenant().empty();
  if (takes_over) MLA_RETURN_IF_ERROR(rpc_.CheckActsFor(who, header.tenant(), "header.tenant"));
  std::string bytes;
  UploadPayload bulk = {.path = kWeightsPath, .payload = &bytes};
  const auto next = [&]() -> absl::StatusOr<const v1::UploadWeightsRequest*> {
    MLA_ASSIGN_OR_RETURN(const bool any, in->Read(&message, &bulk));
    if (!any) return nullptr;
    if (!bulk.found) return &message;
    if (!message.mutable_chunk()->ParseFromString(bulk.inside)) {
      return RefuseField("chunk", "undecodable bytes", "a serialized chunk", "malformed");
    }
    message.mutable_chunk()->mutable_payload()->swap(bytes);
    return &message;
  };
  const auto accepted = [&] {
    if (header.attempt() != 0) in->Accept(kAcceptedKey);
  };
  MLA_RETURN_IF_ERROR(incoming_.Take(who.tenant, header, next, accepted, reply));
  if (!takes_over || header.is_part()) return absl::OkStatus();
  HandOverCounters& counters = rpc_.metrics->hand_overs();
  ++counters.weights_taken;
  counters.weights_taken_bytes += reply->bytes();
  Log(LogLevel::kInfo, "taken_over_weights",
      {{"operator", who.tenant},
       {"tenant", header.tenant()},
       {"model", header.model_id()},
       {"bytes", reply->bytes()}});
  return absl::OkStatus();
}

grpc::Status ModelService::UploadScales(grpc::ServerContext* context,
                                        const v1::UploadScalesRequest* request,
                                        v1::UploadScalesReply* reply) {
  return rpc_.Serve(context, "Models.UploadScales", [&](const Identity& who) {
    absl::Status status = CheckName(request->model_id(), "model_id", false, rpc_.engine->limits());
    if (status.ok()) {
      status = rpc_.engine->SetScales(who.tenant, request->model_id(), Span(request->scales()));
    }
    reply->set_boot_id(rpc_.boot_id);
    return status;
  });
}

grpc::Status ModelService::UploadSinks(grpc::ServerContext* context,
                                       const v1::UploadSinksRequest* request,
                                       v1::UploadSinksReply* reply) {
  return rpc_.Serve(context, "Models.UploadSinks", [&](const Identity& who) -> absl::Status {
    reply->set_boot_id(rpc_.boot_id);
    MLA_RETURN_IF_ERROR(CheckName(request->model_id(), "model_id", false, rpc_.engine->limits()));
    const scheduler::SinkSlice slice = {request->layer_begin(), request->layer_count(),
                                        request->head_begin(), request->head_count()};
    MLA_ASSIGN_OR_RETURN(const auto missing, rpc_.engine->SetSinks(who.tenant, request->model_id(),
                                                                   slice, Span(request->sinks())));
    reply->set_complete(missing.empty());
    for (const int32_t layer : missing) reply->add_missing_layers(static_cast<uint32_t>(layer));
    return absl::OkStatus();
  });
}

grpc::Status ModelService::List(grpc::ServerContext* context, const v1::ListModelsRequest*,
                                v1::ListModelsReply* reply) {
  return rpc_.Serve(context, "Models.List", [&](const Identity& who) {
    for (const scheduler::ModelInfo& info : rpc_.engine->ListModels(who.tenant)) {
      v1::ModelInfo* model = reply->add_models();
      FillModel(info.spec, model->mutable_model());
      model->set_weights_complete(info.weights_complete);
      model->set_scales_complete(info.scales_complete);
      model->set_sinks_complete(info.sinks_complete);
      model->set_sequences(static_cast<uint32_t>(info.sequences));
      model->set_lease_ms(static_cast<uint32_t>(info.lease_ms));
      model->set_lease_left_ms(static_cast<uint32_t>(info.lease_left_ms));
    }
    reply->set_boot_id(rpc_.boot_id);
    return absl::OkStatus();
  });
}

grpc::Status ModelService::Unregister(grpc::ServerContext* context,
                                      const v1::UnregisterRequest* request,
                                      v1::UnregisterReply* reply) {
  return rpc_.Serve(context, "Models.Unregister", [&](const Identity& who) {
    absl::Status status = CheckName(request->model_id(), "model_id", false, rpc_.engine->limits());
    if (status.ok()) status = rpc_.engine->UnregisterModel(who.tenant, request->model_id());
    reply->set_boot_id(rpc_.boot_id);
    return status;
  });
}

}  // namespace mla::server
