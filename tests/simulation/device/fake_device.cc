#include "tests/simulation/device/fake_device.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/simulation/oracle/patterns.h"

namespace mla::simulation {
namespace {

constexpr int64_t kAlignment = 64;

int64_t AlignUp(int64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

class Heap final : public kernels::HostBuffer {
 public:
  explicit Heap(size_t bytes) : memory_(bytes) {}
  std::span<std::byte> bytes() override { return memory_; }

 private:
  std::vector<std::byte> memory_;
};

}  // namespace

FakeDevice::FakeDevice(const FakeDeviceOptions& options, scheduler::SimulatedClock* clock,
                       DeviceWatcher* watcher)
    : options_(options), clock_(clock), watcher_(watcher), random_(options.seed) {
  info_.name = "simulated";
  info_.units = options.traits.units;
  info_.unified_memory = options.unified;
  info_.absorbed_q_of_bf16 = kernels::DType::kF32;
}

FakeDevice::~FakeDevice() = default;

void FakeDevice::Violation(const std::string& what) {
  watcher_->OnViolation(absl::StrCat("device: ", what));
}

absl::Status FakeDevice::CanRun(const kernels::AttentionDesc&) const { return absl::OkStatus(); }

kernels::PlanTraits FakeDevice::Traits(const kernels::AttentionDesc& desc) const {
  kernels::PlanTraits traits = options_.traits;
  if (desc.form == kernels::AttentionForm::kExpanded) traits.max_heads_per_tile = 1;
  return traits;
}

absl::Status FakeDevice::Configure(const kernels::BackendLimits& limits) {
  limits_ = limits;
  pool_.assign(static_cast<size_t>(limits.kv_pool_bytes) / 2, kPoison);
  host_tables_.assign(static_cast<size_t>(limits.page_table_entries), kWild);
  tables_ = host_tables_;
  slots_.resize(static_cast<size_t>(limits.launch_slots));
  // Room for what the limits allow and the alignment of each piece.
  const int64_t bytes = limits.staging_in_bytes + limits.staging_out_bytes +
                        limits.slot_workspace_bytes + 8 * kAlignment * limits.launch_requests;
  for (Slot& slot : slots_) slot.memory.resize(static_cast<size_t>(bytes));
  weights_.resize(static_cast<size_t>(limits.weights_slots));
  if (limits.launch_slots != (options_.unified ? 1 : 2))
    Violation("another number of launch slots");
  return absl::OkStatus();
}

absl::Status FakeDevice::Healthy() const {
  return lost_ ? absl::InternalError("the device is lost") : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> FakeDevice::AllocateHost(size_t bytes) {
  auto buffer = std::make_unique<Heap>(bytes);
  own_.push_back(buffer->bytes());
  return buffer;
}

absl::Status FakeDevice::LoadWeights(int32_t slot, const kernels::Geometry& geometry,
                                     int32_t head_begin, int32_t head_end,
                                     const kernels::Bf16* w_uk, const kernels::Bf16* w_uv) {
  Weights& weights = weights_.at(static_cast<size_t>(slot));
  const size_t one = static_cast<size_t>(geometry.kv_lora_rank) * geometry.nope_dim;
  const size_t other = static_cast<size_t>(geometry.kv_lora_rank) * geometry.v_dim;
  if (weights.loaded.empty()) {
    weights.geometry = geometry;
    weights.uk.assign(one * geometry.num_heads, kPoison);
    weights.uv.assign(other * geometry.num_heads, kPoison);
    weights.loaded.assign(static_cast<size_t>(geometry.num_heads), false);
  }
  if (weights.geometry != geometry) Violation("weights of another shape in a slot that is taken");
  const size_t heads = static_cast<size_t>(head_end - head_begin);
  std::memcpy(weights.uk.data() + one * head_begin, w_uk, one * heads * 2);
  std::memcpy(weights.uv.data() + other * head_begin, w_uv, other * heads * 2);
  for (int32_t head = head_begin; head < head_end; ++head) weights.loaded[head] = true;
  return absl::OkStatus();
}

absl::Status FakeDevice::FreeWeights(int32_t slot) {
  if (UsesWeights(slot)) Violation("weights freed while a launch uses them");
  weights_.at(static_cast<size_t>(slot)) = Weights();
  return absl::OkStatus();
}

bool FakeDevice::IsOwn(const void* host) const {
  const auto* at = static_cast<const std::byte*>(host);
  return std::any_of(own_.begin(), own_.end(), [at](std::span<std::byte> memory) {
    return at >= memory.data() && at < memory.data() + memory.size();
  });
}

bool FakeDevice::UsesWeights(int32_t slot) const {
  for (const int32_t running : running_) {
    for (const Command& command : slots_[static_cast<size_t>(running)].commands) {
      for (const auto& record : command.projections) {
        if (record.weights_slot == slot) return true;
      }
      if (command.verb != Verb::kRun) continue;
      for (const auto& record : command.params.requests) {
        if (record.weights_slot == slot) return true;
      }
    }
  }
  return false;
}

const FakeDevice::Weights* FakeDevice::WeightsOf(int32_t slot, int head_begin, int heads) {
  const bool exists = slot >= 0 && slot < static_cast<int32_t>(weights_.size());
  const Weights* weights = exists ? &weights_[static_cast<size_t>(slot)] : nullptr;
  if (weights == nullptr || head_begin + heads > static_cast<int>(weights->loaded.size())) {
    Violation(absl::StrCat("weights slot ", slot, " does not hold the heads"));
    return nullptr;
  }
  return weights;
}

absl::Status FakeDevice::ReadKv(const kernels::AppendRecord& where, kernels::Bf16* out) {
  for (int row = 0; row < where.rows; ++row) {
    const uint16_t* from = Element(where.page_table, where.layer_offset, where.row_stride,
                                   where.page_size, where.first_position + row, host_tables_);
    if (from == nullptr) return absl::InternalError("a wild page");
    std::memcpy(out + static_cast<int64_t>(row) * where.row_dim, from, where.row_dim * 2);
  }
  return absl::OkStatus();
}

absl::Status FakeDevice::Recording(int32_t slot) const {
  if (slots_.at(static_cast<size_t>(slot)).state == State::kRecording) return absl::OkStatus();
  watcher_->OnViolation("device: a verb for a slot that is not being recorded");
  return absl::FailedPreconditionError("the slot is not being recorded");
}

absl::Status FakeDevice::BeginLaunch(int32_t slot) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  if (s.state == State::kRunning) Violation("BeginLaunch of a slot that runs");
  s.state = State::kRecording;
  s.serial = next_serial_++;
  s.used = s.in_bytes = s.out_bytes = s.work_bytes = 0;
  s.staged.clear();
  s.commands.clear();
  s.run = s.to_run = 0;
  s.page_ranges = s.table_ranges = 0;
  s.requests = s.rows = s.packed_rows = 0;
  s.fails = false;
  std::fill(s.memory.begin(), s.memory.end(), std::byte{0xff});
  return absl::OkStatus();
}

absl::StatusOr<int64_t> FakeDevice::Take(int32_t slot, int64_t bytes, int64_t* used, int64_t limit,
                                         const char* what) {
  if (absl::Status s = Recording(slot); !s.ok()) return s;
  Slot& s = slots_[static_cast<size_t>(slot)];
  *used += bytes;
  const int64_t at = s.used;
  s.used += AlignUp(bytes);
  if (bytes < 0 || *used > limit || s.used > static_cast<int64_t>(s.memory.size())) {
    Violation(absl::StrCat(what, ": ", *used, " bytes, limit ", limit));
    return absl::ResourceExhaustedError(what);
  }
  return at;
}

absl::StatusOr<int64_t> FakeDevice::TakePiece(int32_t slot, int64_t bytes, bool output) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  if (options_.unified) {
    return Take(slot, bytes, &s.work_bytes, limits_.slot_workspace_bytes, "slot_workspace_bytes");
  }
  return output ? Take(slot, bytes, &s.out_bytes, limits_.staging_out_bytes, "staging_out_bytes")
                : Take(slot, bytes, &s.in_bytes, limits_.staging_in_bytes, "staging_in_bytes");
}

void FakeDevice::CopyIn(Slot& slot, const Staged& staged) {
  if (staged.device == Staged::kInPlace) return;
  for (int32_t row = 0; row < staged.rows; ++row) {
    std::memcpy(Place(slot, staged.device) + row * staged.pitch,
                staged.host + row * staged.row_bytes, static_cast<size_t>(staged.row_bytes));
  }
}

absl::Status FakeDevice::StageInPlace(int32_t slot, void* host, int64_t bytes, bool output) {
  if (absl::Status s = Recording(slot); !s.ok()) return s;
  Slot& s = slots_[static_cast<size_t>(slot)];
  Staged staged{Staged::kInPlace, bytes, static_cast<std::byte*>(host), bytes, bytes, 1};
  staged.output = output;
  if (!output || !IsOwn(host)) {
    staged.tenant = watcher_->OnStaged(host, bytes, s.serial);
    if (staged.tenant == 0) return absl::InternalError("memory of no request");
  }
  s.staged.push_back(staged);
  return absl::OkStatus();
}

absl::StatusOr<const void*> FakeDevice::StageInput(int32_t slot, const void* host, int64_t bytes) {
  if (options_.unified) {
    const absl::Status staged = StageInPlace(slot, const_cast<void*>(host), bytes, false);
    if (!staged.ok()) return staged;
    return host;
  }
  const kernels::InputPart part{host, bytes};
  return StageInputParts(slot, 1, std::span(&part, 1));
}

absl::StatusOr<void*> FakeDevice::StageOutput(int32_t slot, void* host, int64_t bytes) {
  if (options_.unified) {
    const absl::Status staged = StageInPlace(slot, host, bytes, true);
    if (!staged.ok()) return staged;
    return host;
  }
  const kernels::OutputPart part{host, bytes};
  return StageOutputParts(slot, 1, std::span(&part, 1));
}

absl::StatusOr<const void*> FakeDevice::StageInputParts(int32_t slot, int32_t rows,
                                                        std::span<const kernels::InputPart> parts) {
  int64_t pitch = 0;
  for (const kernels::InputPart& part : parts) pitch += part.row_bytes;
  Slot& s = slots_.at(static_cast<size_t>(slot));
  auto at = TakePiece(slot, rows * pitch, /*output=*/false);
  if (!at.ok()) return at.status();
  int64_t column = *at;
  for (const kernels::InputPart& part : parts) {
    Staged staged{column, rows * pitch - (column - *at)};
    staged.host = static_cast<std::byte*>(const_cast<void*>(part.host));
    staged.row_bytes = part.row_bytes;
    staged.pitch = pitch;
    staged.rows = rows;
    staged.tenant = watcher_->OnStaged(part.host, rows * part.row_bytes, s.serial);
    if (staged.tenant == 0) return absl::InternalError("memory of no request");
    // Read during the call where the piece is in the slot's workspace.
    if (options_.runs_at_submit || options_.unified) CopyIn(s, staged);
    s.staged.push_back(staged);
    column += part.row_bytes;
  }
  return Place(s, *at);
}

absl::StatusOr<void*> FakeDevice::StageOutputParts(int32_t slot, int32_t rows,
                                                   std::span<const kernels::OutputPart> parts) {
  int64_t pitch = 0;
  for (const kernels::OutputPart& part : parts) pitch += part.row_bytes;
  Slot& s = slots_.at(static_cast<size_t>(slot));
  auto at = TakePiece(slot, rows * pitch, /*output=*/true);
  if (!at.ok()) return at.status();
  int64_t column = *at;
  for (const kernels::OutputPart& part : parts) {
    Staged staged{column, rows * pitch - (column - *at)};
    staged.host = static_cast<std::byte*>(part.host);
    staged.row_bytes = part.row_bytes;
    staged.pitch = pitch;
    staged.rows = rows;
    staged.output = true;
    column += part.row_bytes;
    if (part.host == nullptr) continue;
    if (!IsOwn(part.host)) {
      staged.tenant = watcher_->OnStaged(part.host, rows * part.row_bytes, s.serial);
      if (staged.tenant == 0) return absl::InternalError("memory of no request");
    }
    s.staged.push_back(staged);
  }
  return Place(s, *at);
}

absl::StatusOr<void*> FakeDevice::SlotWorkspace(int32_t slot, int64_t bytes) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  auto at = Take(slot, bytes, &s.work_bytes, limits_.slot_workspace_bytes, "slot_workspace_bytes");
  if (!at.ok()) return at.status();
  return Place(s, *at);
}

absl::StatusOr<FakeDevice::Command*> FakeDevice::Record(int32_t slot, Verb verb) {
  if (absl::Status s = Recording(slot); !s.ok()) return s;
  if (lost_ || armed_ == DeviceFault::kEnqueue) {
    if (!lost_) armed_ = DeviceFault::kNone;
    ++faults_;
    watcher_->OnLaunchFailed(slots_[static_cast<size_t>(slot)].serial);
    return absl::InternalError("a fault was injected at an enqueue");
  }
  Command& command = slots_[static_cast<size_t>(slot)].commands.emplace_back();
  command.verb = verb;
  return &command;
}

absl::Status FakeDevice::WritePages(int32_t slot, std::span<const kernels::PageRange> ranges) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  s.page_ranges += static_cast<int64_t>(ranges.size());
  if (s.page_ranges > limits_.page_ranges) Violation("more page ranges than a launch may have");
  auto command = Record(slot, Verb::kPages);
  if (command.ok()) (*command)->ranges = ranges;
  return command.status();
}

absl::Status FakeDevice::PublishPageTable(int32_t slot,
                                          std::span<const kernels::TableRange> changed) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  s.table_ranges += static_cast<int64_t>(changed.size());
  if (s.table_ranges > limits_.table_ranges) Violation("more table ranges than a launch may have");
  for (const kernels::TableRange& range : changed) {
    auto command = Record(slot, Verb::kTables);
    if (!command.ok()) return command.status();
    const auto entries = std::span<uint32_t>(host_tables_).subspan(range.first, range.count);
    (*command)->first_entry = range.first;
    (*command)->entries.assign(entries.begin(), entries.end());
  }
  return absl::OkStatus();
}

absl::Status FakeDevice::AppendKv(int32_t slot, std::span<const kernels::AppendRecord> records) {
  auto command = Record(slot, Verb::kAppend);
  if (command.ok()) (*command)->appends = records;
  return command.status();
}

absl::Status FakeDevice::Absorb(int32_t slot, const kernels::Geometry& geometry, kernels::DType in,
                                kernels::DType out,
                                std::span<const kernels::ProjectionRecord> records) {
  auto command = Record(slot, Verb::kAbsorb);
  if (!command.ok()) return command.status();
  (*command)->geometry = geometry;
  (*command)->in = in;
  (*command)->out = out;
  (*command)->projections = records;
  return absl::OkStatus();
}

absl::Status FakeDevice::Project(int32_t slot, const kernels::Geometry& geometry, kernels::DType in,
                                 kernels::DType out,
                                 std::span<const kernels::ProjectionRecord> records) {
  auto command = Record(slot, Verb::kProject);
  if (!command.ok()) return command.status();
  (*command)->geometry = geometry;
  (*command)->in = in;
  (*command)->out = out;
  (*command)->projections = records;
  return absl::OkStatus();
}

absl::Status FakeDevice::Run(int32_t slot, const kernels::AttentionParams& params) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  for (const kernels::RequestRecord& request : params.requests) {
    ++s.requests;
    s.rows += request.q_rows;
    s.packed_rows += int64_t{request.q_rows} * request.num_heads;
  }
  if (s.requests > limits_.launch_requests || s.rows > limits_.launch_rows ||
      s.packed_rows > limits_.launch_packed_rows) {
    Violation(absl::StrCat("a launch of ", s.requests, " requests, ", s.rows, " rows and ",
                           s.packed_rows, " packed rows"));
  }
  auto command = Record(slot, Verb::kRun);
  if (command.ok()) (*command)->params = params;
  return command.status();
}

absl::Status FakeDevice::Combine(int32_t slot, const kernels::AttentionParams& params) {
  auto command = Record(slot, Verb::kCombine);
  if (command.ok()) (*command)->params = params;
  return command.status();
}

absl::Status FakeDevice::Submit(int32_t slot) {
  if (absl::Status s = Recording(slot); !s.ok()) return s;
  Slot& s = slots_[static_cast<size_t>(slot)];
  if (armed_ == DeviceFault::kLost) lost_ = true;
  if (lost_ || armed_ == DeviceFault::kSubmit) {
    armed_ = DeviceFault::kNone;
    ++faults_;
    s.state = State::kIdle;
    watcher_->OnLaunchFailed(s.serial);
    return absl::InternalError("a fault was injected at Submit");
  }
  s.to_run = s.commands.size();
  random_ = Mix(random_);
  if (armed_ != DeviceFault::kNone) {
    ++faults_;
    s.fails = true;
    if (armed_ == DeviceFault::kWaitNoneRan) s.to_run = 0;
    if (armed_ == DeviceFault::kWaitSomeRan) s.to_run = random_ % (s.to_run + 1);
    armed_ = DeviceFault::kNone;
  }
  // Nothing runs behind a launch that did not run to its end.
  for (const int32_t before : running_) {
    const Slot& earlier = slots_[static_cast<size_t>(before)];
    if (!earlier.fails) continue;
    if (options_.runs_after_failure && earlier.to_run == earlier.commands.size()) continue;
    s.fails = true;
    s.to_run = 0;
  }
  ++launches_;
  commands_ += static_cast<int64_t>(s.commands.size());
  s.state = State::kRunning;
  // Launches end in their order.
  const int64_t takes = 1000 * static_cast<int64_t>(1 + random_ % (options_.latency_us + 1));
  s.started_at = std::max(last_done_, clock_->Now());
  s.done_at = last_done_ = s.started_at + takes;
  if (options_.unified && options_.runs_at_submit) s.done_at = last_done_ = s.started_at;
  running_.push_back(slot);
  watcher_->OnSubmitted(s.serial);
  if (options_.runs_at_submit) Execute(s, s.to_run);
  return absl::OkStatus();
}

bool FakeDevice::Done(int32_t slot) {
  const Slot& s = slots_.at(static_cast<size_t>(slot));
  return s.state != State::kRunning || s.done_at <= clock_->Now();
}

int64_t FakeDevice::NextDone() const {
  return running_.empty() ? -1 : slots_[static_cast<size_t>(running_.front())].done_at;
}

bool FakeDevice::Uses(const void* host, int64_t bytes) const {
  const auto* first = static_cast<const std::byte*>(host);
  for (const int32_t running : running_) {
    for (const Staged& staged : slots_[static_cast<size_t>(running)].staged) {
      const std::byte* end = staged.host + staged.rows * staged.row_bytes;
      if (staged.host < first + bytes && first < end) return true;
    }
  }
  return false;
}

absl::StatusOr<int64_t> FakeDevice::Wait(int32_t slot) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  if (s.state != State::kRunning || running_.empty() || running_.front() != slot) {
    Violation("Wait for a slot that is not the oldest one running");
    return absl::FailedPreconditionError("the slot is not the oldest one running");
  }
  if (s.done_at > clock_->Now()) clock_->Advance(s.done_at - clock_->Now());
  if (!options_.runs_at_submit) {
    for (const Staged& staged : s.staged) {
      if (!staged.output && !options_.unified) CopyIn(s, staged);
    }
    Execute(s, s.to_run);
  }
  running_.erase(running_.begin());
  s.state = State::kIdle;
  if (lost_ || s.fails) {
    watcher_->OnLaunchFailed(s.serial);
    return absl::InternalError("a fault was injected at Wait");
  }
  for (const Staged& staged : s.staged) {
    const bool copied = staged.output && staged.device != Staged::kInPlace;
    for (int32_t row = 0; copied && row < staged.rows; ++row) {
      std::memcpy(staged.host + row * staged.row_bytes,
                  Place(s, staged.device) + row * staged.pitch,
                  static_cast<size_t>(staged.row_bytes));
    }
  }
  watcher_->OnLaunchDone(s.serial);
  return s.done_at - s.started_at;
}

}  // namespace mla::simulation
