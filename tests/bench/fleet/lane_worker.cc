#include "tests/bench/fleet/lane_worker.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace mla::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kLeaseMs = 60000;
constexpr int kWarmUps = 2, kLeastSteps = 3;
constexpr char kModel[] = "two_servers";

// A step of one row for each sequence of a lane.
class LaneStep final {
 public:
  LaneStep(const Flags& flags, bool absorbed, const Lane& lane)
      : flags_(flags),
        lane_(lane),
        shape_(MakePoint(flags.heads, absorbed, static_cast<int32_t>(lane.sequences.size()))) {}

  absl::Status Begin() {
    std::vector<client::ClusterRows> rows;
    for (ClusterSequence* one : lane_.sequences) rows.push_back({one, 1});
    auto step = lane_.session->Begin(kModel, rows, {.step = {.lease_ms = kLeaseMs}});
    if (!step.ok()) return step.status();
    step_ = *std::move(step);
    layer_ = 0;
    return absl::OkStatus();
  }
  void Send() {
    client::AttendCall call;
    call.layer = static_cast<uint32_t>(layer_++);
    call.row_count = shape_.batch;
    call.num_heads = static_cast<uint32_t>(flags_.heads);
    call.profile = shape_.absorbed ? v1::PROFILE_ABSORBED : v1::PROFILE_EXPANDED;
    call.kv = lane_.in.data();
    call.q = lane_.in.data() + shape_.kv_bytes;
    call.o = lane_.out.data();
    pending_.emplace(step_->AttendAsync(call));
  }
  bool open() const { return step_ != nullptr; }
  bool sent_all() const { return layer_ == flags_.layers; }
  bool Ready() { return pending_->Ready(); }
  absl::Status Wait() { return pending_->Wait().status(); }
  // Drops the new rows, so that contexts keep their length.
  absl::Status End() {
    const std::vector<uint32_t> none(lane_.sequences.size(), 0);
    absl::Status status = step_->End(none).status();
    pending_.reset();
    step_.reset();
    return status;
  }

 private:
  const Flags& flags_;
  const Lane& lane_;
  const Point shape_;
  std::unique_ptr<client::ClusterStep> step_;
  std::optional<client::PendingClusterAttend> pending_;
  int32_t layer_ = 0;
};

// One step of every lane. Each layer waits for all lanes.
absl::Status RunStep(const Flags& flags, bool absorbed, const std::vector<Lane>& lanes) {
  std::deque<LaneStep> steps;
  absl::Status status;
  for (const Lane& lane : lanes) status.Update(steps.emplace_back(flags, absorbed, lane).Begin());
  while (status.ok() && !steps[0].sent_all()) {
    for (LaneStep& step : steps) step.Send();
    for (LaneStep& step : steps) status.Update(step.Wait());
  }
  if (!status.ok()) return status;
  for (LaneStep& step : steps) status.Update(step.End());
  return status;
}

double SecondsSince(Clock::time_point begun) {
  return std::chrono::duration<double>(Clock::now() - begun).count();
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

absl::Status LaneWorker::Connect(const std::vector<std::string>& targets, uint64_t region_bytes) {
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

absl::Status LaneWorker::RegisterModel(bool weights) {
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

absl::Status LaneWorker::UploadWeights(client::Client* server) const {
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

absl::StatusOr<Lane> LaneWorker::MakeLane(size_t server, uint64_t in, uint64_t out) {
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
absl::Status LaneWorker::FillStep(const Lane& lane, ClusterSequence* sequence, uint32_t rows) {
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

absl::Status LaneWorker::Fill(const Lane& lane, uint32_t count, uint64_t seed) {
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

absl::Status LaneWorker::Attach(size_t server, const std::vector<uint64_t>& ids) {
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

void LaneWorker::Detach() {
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
    elapsed = SecondsSince(begun);
  }
  if (!status.ok()) return status;
  const auto count = static_cast<double>(steps);
  return Rate{count * static_cast<double>(rows) / elapsed, 1e6 * elapsed / count / flags.layers};
}

absl::StatusOr<Rate> RunApart(const Flags& flags, bool absorbed, const std::vector<Lane>& lanes) {
  absl::Status status;
  for (int i = 0; status.ok() && i < kWarmUps; ++i) status = RunStep(flags, absorbed, lanes);
  std::deque<LaneStep> steps;
  std::vector<uint64_t> ended(lanes.size());
  Rate sum;
  const Clock::time_point begun = Clock::now();
  for (const Lane& lane : lanes) {
    status.Update(steps.emplace_back(flags, absorbed, lane).Begin());
    if (status.ok()) steps.back().Send();
  }
  for (size_t under_way = lanes.size(); status.ok() && under_way > 0;) {
    bool waits = true;
    for (size_t i = 0; status.ok() && i < lanes.size(); ++i) {
      LaneStep& step = steps[i];
      if (!step.open() || !step.Ready()) continue;
      waits = false;
      status = step.Wait();
      if (status.ok() && step.sent_all()) {
        status = step.End();
        const double elapsed = SecondsSince(begun);
        const auto count = static_cast<double>(++ended[i]);
        if (elapsed >= flags.seconds && ended[i] >= kLeastSteps) {
          --under_way;
          sum.rows_s += count * static_cast<double>(lanes[i].sequences.size()) / elapsed;
          sum.layer_us = std::max(sum.layer_us, 1e6 * elapsed / count / flags.layers);
          continue;
        }
        status.Update(step.Begin());
      }
      if (status.ok()) step.Send();
    }
    if (waits) std::this_thread::yield();
  }
  if (!status.ok()) return status;
  return sum;
}

}  // namespace mla::bench
