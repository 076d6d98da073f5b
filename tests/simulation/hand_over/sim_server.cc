#include "tests/simulation/hand_over/sim_server.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/splitmix.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/kvcache/pool/group_pieces.h"
#include "scheduler/testing/engine_harness.h"
#include "server/hand_over/take_over.h"
#include "server/pages/page_stream.h"

namespace mla::simulation {
namespace {

using scheduler::MovingPages;

constexpr int64_t kChunkBytes = 1 << 20;

// Numbers without infinities or NaN, because rows with those would change when stored.
void FillRow(uint64_t key, int64_t layer, std::span<std::byte> row) {
  for (size_t i = 0; i + 1 < row.size(); i += 2) {
    const uint64_t drawn = SplitMix(key * 1000003u + static_cast<uint64_t>(layer) * 4099u + i);
    const auto bits = static_cast<uint16_t>((drawn & 0x807fu) | 0x3f00u);
    row[i] = static_cast<std::byte>(bits & 0xff);
    row[i + 1] = static_cast<std::byte>(bits >> 8);
  }
}

// W_UK and W_UV of one head.
std::vector<kernels::Bf16> HeadWeights(const scheduler::ModelSpec& model, int32_t layer,
                                       int32_t head, int variant) {
  std::vector<kernels::Bf16> weights(static_cast<size_t>(model.head_elements()));
  const uint64_t key = SplitMix(static_cast<uint64_t>((layer * 64 + head) * 8 + variant));
  FillRow(key, layer, std::as_writable_bytes(std::span(weights)));
  return weights;
}

}  // namespace

SimServer::SimServer(std::string address, std::vector<std::string> tenants,
                     scheduler::SimulatedClock* clock)
    : address_(std::move(address)),
      tenants_(std::move(tenants)),
      clock_(clock),
      next_id_(SplitMix(std::hash<std::string>()(address_))) {
  Restart();
}

void SimServer::Restart() {
  engine_.reset();
  incoming_.reset();
  abandoned_ = std::make_unique<server::AbandonedImports>();
  boot_id_ = SplitMix(++next_id_);
  scheduler::EngineOptions options;
  options.notes_pauses = false;
  options.limits = scheduler::testing::TinyLimits();
  options.limits.kv_cache_bytes = 64 << 10;
  options.limits.max_sequences = 5;
  options.ids = [this] { return SplitMix(++next_id_); };
  options.prefix_secret.emplace();
  auto engine =
      scheduler::Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), clock_);
  absl::Status status = engine.status();
  if (engine.ok()) engine_ = *std::move(engine);
  incoming_ = std::make_unique<server::IncomingWeights>(engine_.get(), kChunkBytes);
  for (const std::string& tenant : tenants_) {
    if (!status.ok()) break;
    status = engine_->RegisterModel(tenant, scheduler::testing::TinyModel()).status();
  }
  if (status.ok()) return;
  std::fprintf(stderr, "sim server: %s\n", status.ToString().c_str());
  std::abort();
}

absl::Status SimServer::MoveRows(const std::string& tenant, const MovingPages& pages, bool in,
                                 const RowKeys& keys) {
  const int64_t page_size = pages.layout.page_size;
  std::vector<std::byte> payload, expected;
  for (int64_t at = 0; at < pages.tags.rows; at += page_size) {
    const int64_t first = pages.tags.first_row + at;
    const auto rows = static_cast<int32_t>(std::min(page_size, pages.tags.rows - at));
    const auto pieces = kvcache::GroupPieces(pages.layout, rows);
    expected.assign(static_cast<size_t>(kvcache::PayloadBytes(pieces)), std::byte{0});
    for (const kvcache::GroupPiece& piece : pieces) {
      for (int64_t row = 0; row < rows; ++row) {
        FillRow(keys[static_cast<size_t>(at + row)], piece.layer,
                std::span(expected).subspan(
                    static_cast<size_t>(piece.payload_offset + row * piece.unit),
                    static_cast<size_t>(piece.unit)));
      }
    }
    payload = in ? expected : std::vector<std::byte>(expected.size());
    scheduler::PageMove move;
    move.tenant = tenant;
    move.id = pages.id;
    move.in = in;
    move.page = first / page_size;
    move.rows = rows;
    move.bytes = payload;
    if (absl::Status moved = engine_->MovePart(&move); !moved.ok()) return moved;
    if (payload != expected) return absl::DataLossError(absl::StrCat("other rows from ", first));
  }
  return absl::OkStatus();
}

absl::StatusOr<scheduler::SequenceInfo> SimServer::AddRows(const std::string& tenant, uint64_t id,
                                                           uint64_t epoch, int64_t length,
                                                           const RowKeys& keys) {
  scheduler::ImportArgs args;
  args.tenant = tenant;
  args.id = id;
  args.expected_epoch = epoch;
  args.client_id = "worker";
  const auto model = engine_->ListModels(tenant).at(0).spec;
  args.model_id = model.id;
  args.tags.geometry = model.geometry;
  args.tags.layers = model.layers;
  args.tags.page_size = model.page_size;
  args.tags.first_row = length;
  args.tags.rows = static_cast<int64_t>(keys.size());
  args.tags.group_bytes = int64_t{2} * model.layers * model.page_size * model.geometry.kv_row_dim();
  const absl::StatusOr<MovingPages> pages = engine_->BeginImport(args);
  if (!pages.ok()) return pages.status();
  if (absl::Status moved = MoveRows(tenant, *pages, true, keys); !moved.ok()) {
    engine_->AbortImport(tenant, *pages);
    return moved;
  }
  return engine_->EndImport(tenant, pages->id, scheduler::Engine::kAllFinite);
}

absl::Status SimServer::CheckRows(const std::string& tenant, const scheduler::SequenceInfo& info,
                                  const RowKeys& keys) {
  if (info.length != static_cast<int64_t>(keys.size())) {
    return absl::DataLossError(absl::StrCat(info.length, " rows, not ", keys.size()));
  }
  const absl::StatusOr<MovingPages> pages =
      engine_->BeginExport({tenant, info.id, info.epoch, 0, info.length, /*in_place=*/true});
  return pages.ok() ? MoveRows(tenant, *pages, false, keys) : pages.status();
}

absl::StatusOr<v1::ImportReply> SimServer::ServeImport(const v1::ImportTarget& target,
                                                       const std::vector<v1::PagesPart>& parts,
                                                       bool whole,
                                                       const std::function<void()>& between) {
  if (parts.empty()) return absl::CancelledError("cut before the header");
  scheduler::ImportArgs args;
  absl::Status status = server::ParseTarget(target, engine_->limits(), &args);
  args.tenant = target.tenant();
  args.restored_id = target.new_sequence_id();
  if (status.ok()) status = server::ParseHeader(parts[0].header(), engine_->limits(), &args.tags);
  if (!status.ok()) return status;
  size_t next = 1;
  v1::PagesPart part;
  uint64_t bytes = 0;
  // A restart during the call ends it: no part of it reaches the next engine.
  const auto info = server::RunImport(
      engine_.get(), *abandoned_, args, target.attempt(), kChunkBytes,
      [&]() -> absl::StatusOr<v1::PagesPart*> {
        between();
        if (next < parts.size()) {
          part = parts[next++];
          return &part;
        }
        if (!whole) return absl::CancelledError("cut");
        return nullptr;
      },
      &bytes);
  if (!info.ok()) return info.status();
  v1::ImportReply reply;
  reply.mutable_sequence()->set_sequence_id(info->id);
  reply.mutable_sequence()->set_length(static_cast<uint64_t>(info->length));
  reply.set_bytes(bytes);
  reply.set_boot_id(boot_id_);
  return reply;
}

absl::Status SimServer::LoadWeights(const std::string& tenant, int variant) {
  const auto model = engine_->FindModel(tenant, scheduler::testing::TinyModel().id);
  const scheduler::UploadId upload = engine_->NewUpload();
  const auto heads = model->geometry.num_heads;
  absl::Status status;
  for (int32_t layer = 0; layer < model->layers && status.ok(); ++layer) {
    for (int32_t head = 0; head < heads && status.ok(); ++head) {
      const std::vector<kernels::Bf16> weights = HeadWeights(*model, layer, head, variant);
      status = engine_->LoadWeights(tenant, model->id, upload, layer, head, 1,
                                    std::as_bytes(std::span(weights)));
    }
  }
  if (status.ok()) status = engine_->CommitWeights(tenant, model->id, upload).status();
  if (!status.ok()) engine_->DiscardWeights(tenant, model->id, upload);
  return status;
}

absl::StatusOr<int> SimServer::WeightsOf(const std::string& tenant) {
  const int64_t charged = engine_->tenants()->Usage(tenant).used[scheduler::Resource::kWeightBytes];
  for (const scheduler::HeldWeights& held : engine_->AllWeights()) {
    if (held.tenant != tenant) continue;
    if (charged == 0) return absl::InternalError("weights that no tenant is charged for");
    int found = -1;
    std::vector<kernels::Bf16> got(static_cast<size_t>(held.spec->head_elements()));
    for (int32_t layer = 0; layer < held.spec->layers; ++layer) {
      for (int32_t head = 0; head < held.spec->geometry.num_heads; ++head) {
        absl::Status read = engine_->ReadWeights(held, layer, head, got);
        if (!read.ok()) return read;
        int variant = 0;
        while (variant < kWeightVariants && got != HeadWeights(*held.spec, layer, head, variant)) {
          ++variant;
        }
        if (variant == kWeightVariants) return absl::InternalError("weights that were never sent");
        if (found >= 0 && found != variant) return absl::InternalError("weights of two uploads");
        found = variant;
      }
    }
    return found;
  }
  if (charged != 0) return absl::InternalError("a charge for weights that are not there");
  return -1;
}

absl::StatusOr<v1::UploadWeightsReply> SimServer::ServeWeights(
    const std::vector<v1::UploadWeightsRequest>& messages, bool whole,
    const std::function<void()>& between) {
  if (messages.empty()) return absl::CancelledError("cut before the header");
  v1::UploadWeightsReply reply;
  reply.set_boot_id(boot_id_);
  size_t next = 1;
  const absl::Status status = incoming_->Take(
      "operator", messages[0].header(),
      [&]() -> absl::StatusOr<const v1::UploadWeightsRequest*> {
        between();
        if (next < messages.size()) return &messages[next++];
        if (!whole) return absl::CancelledError("cut");
        return nullptr;
      },
      [] {}, &reply);
  if (!status.ok()) return status;
  return reply;
}

uint32_t SimServer::Evict(const v1::EvictSequencesRequest& request) {
  scheduler::SequenceSelection selection;
  selection.tenant = request.tenant();
  selection.ids.assign(request.sequence_ids().begin(), request.sequence_ids().end());
  std::vector<scheduler::SequenceId> absent;
  return static_cast<uint32_t>(server::EvictAndGiveUp(engine_.get(), abandoned_.get(),
                                                      request.attempt(), selection, &absent));
}

}  // namespace mla::simulation
