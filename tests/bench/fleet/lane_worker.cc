#include "tests/bench/fleet/lane_worker.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace mla::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kLeaseMs = 60000;
constexpr int kWarmUps = 2, kLeastSteps = 3;
constexpr char kModel[] = "two_servers";

// One step of every lane, at the same time.
absl::Status RunStep(const Flags& flags, bool absorbed, const std::vector<Lane>& lanes) {
  std::vector<std::unique_ptr<client::ClusterStep>> steps;
  for (const Lane& lane : lanes) {
    std::vector<client::ClusterRows> rows;
    for (ClusterSequence* one : lane.sequences) rows.push_back({one, 1});
    auto step = lane.session->Begin(kModel, rows, {.step = {.lease_ms = kLeaseMs}});
    if (!step.ok()) return step.status();
    steps.push_back(*std::move(step));
  }
  absl::Status status;
  for (int32_t layer = 0; status.ok() && layer < flags.layers; ++layer) {
    std::vector<client::PendingClusterAttend> pending;
    for (size_t i = 0; i < lanes.size(); ++i) {
      const Point own =
          MakePoint(flags.heads, absorbed, static_cast<int32_t>(lanes[i].sequences.size()));
      client::AttendCall call;
      call.layer = static_cast<uint32_t>(layer);
      call.row_count = own.batch;
      call.num_heads = static_cast<uint32_t>(flags.heads);
      call.profile = own.absorbed ? v1::PROFILE_ABSORBED : v1::PROFILE_EXPANDED;
      call.kv = lanes[i].in.data();
      call.q = lanes[i].in.data() + own.kv_bytes;
      call.o = lanes[i].out.data();
      pending.push_back(steps[i]->AttendAsync(call));
    }
    for (client::PendingClusterAttend& one : pending) status.Update(one.Wait().status());
  }
  if (!status.ok()) return status;
  for (size_t i = 0; i < lanes.size(); ++i) {
    // Drops the new rows, so that contexts keep their length.
    const std::vector<uint32_t> none(lanes[i].sequences.size(), 0);
    status.Update(steps[i]->End(none).status());
  }
  return status;
}

}  // namespace

std::vector<uint16_t> Values(size_t count, uint64_t seed) {
  auto state = static_cast<uint32_t>(seed);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<uint16_t>(0x3d80u | (state >> 31) << 15 | (state >> 16 & 0x7fu));
  }
  return values;
}

absl::Status Worker::Connect(const std::vector<std::string>& targets, uint64_t region_bytes) {
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kRing;
  options.shared_bytes = region_bytes;
  options.sequence_lease_ms = kLeaseMs;
  options.spin_us = static_cast<uint32_t>(flags_.spin_us);
  options.copy_threads = std::max(1, flags_.copy_threads);
  client::ClusterOptions cluster;
  cluster.home = targets[0];
  targets_ = targets;
  auto client = client::ClusterClient::Connect(absl::StrJoin(targets, ","), options, cluster);
  if (!client.ok()) return client.status();
  client_ = *std::move(client);
  return absl::OkStatus();
}

absl::Status Worker::RegisterModel(bool weights) {
  v1::ModelSpec spec;
  spec.set_model_id(kModel);
  spec.set_layers(static_cast<uint32_t>(flags_.layers));
  v1::Geometry& geometry = *spec.mutable_geometry();
  geometry.set_num_heads(static_cast<uint32_t>(flags_.heads));
  geometry.set_kv_lora_rank(kLora);
  geometry.set_rope_dim(kRope);
  geometry.set_nope_dim(kNope);
  geometry.set_v_dim(kValue);
  spec.set_softmax_scale(0.0721687f);
  spec.set_rope_owner(v1::ROPE_OWNER_WORKER);
  if (auto made = client_->RegisterModel(spec); !made.ok()) return made.status();
  if (!weights) return absl::OkStatus();
  return client_->Upload(kModel, "weights",
                         [this](client::Client* server) { return UploadWeights(server); });
}

absl::Status Worker::UploadWeights(client::Client* server) const {
  const uint64_t head_bytes = kLora * (kNope + kValue) * 2;
  const uint64_t most = std::max(head_bytes, server->info().limits().weight_chunk_bytes());
  const auto all = static_cast<uint32_t>(flags_.heads);
  const auto heads = static_cast<uint32_t>(std::min<uint64_t>(most / head_bytes, all));
  const std::vector<uint16_t> values = Values(heads * head_bytes / 2, 1);
  uint32_t layer = 0, head = 0;
  const auto next = [&]() -> std::optional<client::WeightsChunk> {
    if (layer == static_cast<uint32_t>(flags_.layers)) return std::nullopt;
    client::WeightsChunk chunk{layer, head, std::min(heads, all - head), {}};
    chunk.bytes.assign(reinterpret_cast<const char*>(values.data()), chunk.head_count * head_bytes);
    head += chunk.head_count;
    if (head == all) ++layer, head = 0;
    return chunk;
  };
  return server->UploadWeights(kModel, next).status();
}

absl::StatusOr<Lane> Worker::MakeLane(size_t server, uint64_t in, uint64_t out) {
  Lane lane;
  sessions_.push_back(client_->OpenSession(targets_[server % targets_.size()]));
  lane.session = sessions_.back().get();
  lane.in = lane.session->Allocate(in);
  lane.out = lane.session->Allocate(out);
  if (lane.in.empty() || lane.out.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no region of ", in + out, " bytes at ", targets_[server % targets_.size()]));
  }
  return lane;
}

// One step that adds rows to a sequence. Its layers are under way at the same time.
absl::Status Worker::FillStep(const Lane& lane, ClusterSequence* sequence, uint32_t rows) {
  auto step = lane.session->Begin(kModel, {{sequence, rows}}, {.step = {.lease_ms = kLeaseMs}});
  if (!step.ok()) return step.status();
  std::vector<client::PendingClusterAttend> pending;
  for (int32_t layer = 0; layer < flags_.layers; ++layer) {
    client::AttendCall call;
    call.layer = static_cast<uint32_t>(layer);
    call.row_count = rows;
    call.num_heads = static_cast<uint32_t>(flags_.heads);
    call.profile = v1::PROFILE_APPEND_ONLY;
    call.kv = lane.in.data();
    pending.push_back((*step)->AttendAsync(call));
  }
  absl::Status status;
  for (client::PendingClusterAttend& one : pending) status.Update(one.Wait().status());
  if (!status.ok()) return status;
  return (*step)->End().status();
}

absl::Status Worker::Fill(const Lane& lane, uint32_t count, uint64_t seed) {
  const auto context = static_cast<uint32_t>(flags_.context);
  for (uint32_t i = 0; i < count; ++i) {
    auto opened = client_->OpenSequence(kModel);
    if (!opened.ok()) return opened.status();
    sequences_[0].push_back(*std::move(opened));
    ClusterSequence& sequence = sequences_[0].back();
    while (sequence.length() < context) {
      const auto rows = std::min(kFillRows, context - static_cast<uint32_t>(sequence.length()));
      const std::vector<uint16_t> kv =
          Values(uint64_t{rows} * (kLora + kRope), sequence.length() + i + (seed << 20));
      std::memcpy(lane.in.data(), kv.data(), kv.size() * sizeof(kv[0]));
      if (absl::Status s = FillStep(lane, &sequence, rows); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

absl::Status Worker::Attach(size_t server, const std::vector<uint64_t>& ids) {
  for (const uint64_t id : ids) {
    auto attached = client_->Attach(kModel, id);
    if (!attached.ok()) return attached.status();
    if (attached->address() != targets_[server]) {
      return absl::InternalError(
          absl::StrCat("a sequence of ", targets_[server], " is at ", attached->address()));
    }
    sequences_[server].push_back(*std::move(attached));
  }
  return absl::OkStatus();
}

void Worker::Detach() {
  for (auto& some : sequences_) {
    for (ClusterSequence& one : some) one.Detach();
  }
}

absl::StatusOr<Rate> RunFor(const Flags& flags, bool absorbed, const std::vector<Lane>& lanes,
                            std::barrier<>* together) {
  absl::Status status;
  for (int i = 0; status.ok() && i < kWarmUps; ++i) status = RunStep(flags, absorbed, lanes);
  if (together != nullptr) together->arrive_and_wait();
  const Clock::time_point begun = Clock::now();
  uint64_t steps = 0, rows = 0;
  double elapsed = 0;
  for (const Lane& lane : lanes) rows += lane.sequences.size();
  while (status.ok() && (elapsed < flags.seconds || steps < kLeastSteps)) {
    status = RunStep(flags, absorbed, lanes);
    ++steps;
    elapsed = std::chrono::duration<double>(Clock::now() - begun).count();
  }
  if (!status.ok()) return status;
  const auto count = static_cast<double>(steps);
  return Rate{count * static_cast<double>(rows) / elapsed, 1e6 * elapsed / count / flags.layers};
}

}  // namespace mla::bench
