#include "tests/simulation/device/fake_device.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "absl/strings/str_cat.h"
#include "kernels/testing/launch_clashes.h"
#include "tests/simulation/oracle/patterns.h"

namespace mla::simulation {
namespace {

// Holds wild page-table entries until they are written. Begins at a page's start, so that results
// do not depend on the allocator's address.
class Heap final : public kernels::HostBuffer {
 public:
  explicit Heap(size_t bytes) : bytes_(bytes), memory_(new(kPage) std::byte[bytes]) {
    std::fill_n(memory_.get(), bytes, std::byte{0xff});
  }
  std::span<std::byte> bytes() override { return {memory_.get(), bytes_}; }

 private:
  static constexpr std::align_val_t kPage{4096};
  struct Free {
    void operator()(std::byte* memory) const { operator delete[](memory, kPage); }
  };
  const size_t bytes_;
  const std::unique_ptr<std::byte[], Free> memory_;
};

}  // namespace

FakeDevice::FakeDevice(const FakeDeviceOptions& options, scheduler::SimulatedClock* clock,
                       DeviceWatcher* watcher)
    : options_(options), clock_(clock), watcher_(watcher), random_(options.seed) {
  info_.name = "simulated";
  info_.units = options.traits.units;
  info_.unified_memory = options.unified;
  info_.sparse = true;
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
  if (desc.attention == kernels::AttentionKind::kSparse) traits.max_q_rows_per_tile = 1;
  return traits;
}

absl::Status FakeDevice::Configure(const kernels::BackendLimits& limits) {
  limits_ = limits;
  pool_.assign(static_cast<size_t>(limits.kv_pool_bytes) / 2, kPoison);
  tables_.assign(static_cast<size_t>(limits.page_table_entries), kWild);
  slots_.resize(static_cast<size_t>(limits.launch_slots));
  const int64_t bytes =
      limits.staging_in_bytes + limits.staging_out_bytes + limits.slot_workspace_bytes;
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

std::span<std::byte> FakeDevice::OwnMemory(size_t bytes) const {
  for (const std::span<std::byte> memory : own_) {
    if (memory.size() == bytes) return memory;
  }
  return {};
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
  const auto uses = [slot](const auto& records) {
    return std::any_of(records.begin(), records.end(),
                       [slot](const auto& record) { return record.weights_slot == slot; });
  };
  return std::any_of(running_.begin(), running_.end(), [&](int32_t running) {
    const kernels::Launch& launch = *slots_[static_cast<size_t>(running)].launch;
    return uses(launch.absorb.records) || uses(launch.project.records) ||
           uses(launch.absorbed.segments) || uses(launch.expanded.segments);
  });
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

kernels::SlotMemory FakeDevice::Memory(int32_t slot) {
  const std::span<std::byte> all = slots_.at(static_cast<size_t>(slot)).memory;
  const auto in = static_cast<size_t>(limits_.staging_in_bytes);
  const auto out = static_cast<size_t>(limits_.staging_out_bytes);
  if (options_.unified) return {{}, {}, all.subspan(in + out)};
  return {all.first(in), all.subspan(in, out), all.subspan(in + out)};
}

absl::Status FakeDevice::Stage(int32_t slot, const kernels::Launch& launch) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  const kernels::SlotMemory memory = Memory(slot);
  const auto stage = [&](const std::byte* host, const std::byte* device, int64_t row_bytes,
                         int64_t rows, int64_t pitch, std::span<const std::byte> region,
                         bool own) -> absl::Status {
    Staged staged{device, (rows - 1) * pitch + row_bytes, 0};
    const bool in_place = host == device;
    if (in_place && !options_.unified) Violation("host memory that the device does not reach");
    if (!in_place &&
        (device < region.data() || device + staged.bytes > region.data() + region.size())) {
      Violation("a tensor outside the slot's memory");
    }
    if (!own) {
      staged.tenant = watcher_->OnStaged(host, rows * row_bytes, s.serial);
      if (staged.tenant == 0) return absl::InternalError("memory that belongs to no request");
    }
    s.staged.push_back(staged);
    return absl::OkStatus();
  };
  const std::span<std::byte> in = options_.unified ? memory.workspace : memory.inputs;
  const std::span<std::byte> out = options_.unified ? memory.workspace : memory.outputs;
  absl::Status status;
  for (const kernels::HostInput& i : launch.inputs) {
    status.Update(stage(i.host, i.device, i.row_bytes, i.rows, i.pitch, in, false));
  }
  for (const kernels::HostOutput& o : launch.outputs) {
    status.Update(stage(o.host, o.device, o.row_bytes, o.rows, o.pitch, out, IsOwn(o.host)));
  }
  return status;
}

void FakeDevice::CheckSizes(const kernels::Launch& launch) {
  int64_t places = 0;
  for (const kernels::PageRange& range : launch.pages) places += range.count;
  const size_t transfers = std::max(launch.page_writes.size(), launch.page_reads.size());
  if (std::max(places, static_cast<int64_t>(transfers)) > limits_.page_ranges) {
    Violation("more page ranges than a launch may have");
  }
  if (static_cast<int64_t>(launch.table_changes.size()) > limits_.table_ranges) {
    Violation("more table ranges than a launch may have");
  }
  int64_t requests = 0, rows = 0, packed_rows = 0;
  for (const kernels::AttentionParams* params : {&launch.absorbed, &launch.expanded}) {
    for (const kernels::SegmentRecord& request : params->segments) {
      ++requests;
      rows += request.q_rows;
      packed_rows += int64_t{request.q_rows} * request.num_heads;
    }
  }
  if (requests > limits_.launch_requests || rows > limits_.launch_rows ||
      packed_rows > limits_.launch_packed_rows) {
    Violation(absl::StrCat("a launch of ", requests, " requests, ", rows, " rows and ", packed_rows,
                           " packed rows"));
  }
}

std::vector<FakeDevice::Work> FakeDevice::PartsOf(const kernels::Launch& launch) {
  std::vector<Work> parts;
  const auto attention = [&parts](const kernels::AttentionParams& params) {
    if (params.segments.empty()) return;
    parts.push_back({Part::kAttend, &params});
    parts.push_back({Part::kCombine, &params});
  };
  if (!launch.page_writes.empty()) parts.push_back({Part::kWritePages, nullptr});
  if (!launch.pages.empty()) parts.push_back({Part::kPages, nullptr});
  if (!launch.table_changes.empty()) parts.push_back({Part::kTables, nullptr});
  if (!launch.appends.empty()) parts.push_back({Part::kAppends, nullptr});
  if (!launch.absorb.records.empty()) parts.push_back({Part::kAbsorb, nullptr});
  attention(launch.absorbed);
  if (!launch.project.records.empty()) parts.push_back({Part::kProject, nullptr});
  attention(launch.expanded);
  if (!launch.page_reads.empty()) parts.push_back({Part::kReadPages, nullptr});
  return parts;
}

void FakeDevice::CopyIn(const kernels::Launch& launch) {
  for (const kernels::HostInput& in : launch.inputs) {
    for (int64_t row = 0; !in.in_place() && row < in.rows; ++row) {
      std::memcpy(in.device + row * in.pitch, in.host + row * in.row_bytes,
                  static_cast<size_t>(in.row_bytes));
    }
  }
}

void FakeDevice::CopyOut(const kernels::Launch& launch) {
  for (const kernels::HostOutput& out : launch.outputs) {
    for (int64_t row = 0; !out.in_place() && row < out.rows; ++row) {
      std::memcpy(out.host + row * out.row_bytes, out.device + row * out.pitch,
                  static_cast<size_t>(out.row_bytes));
    }
  }
}

void FakeDevice::Schedule(Slot& slot) {
  slot.run = 0;
  slot.to_run = slot.parts.size();
  slot.fails = false;
  slot.spoils = false;
  random_ = Mix(random_);
  if (armed_ != DeviceFault::kNone) {
    ++faults_;
    slot.fails = true;
    if (armed_ == DeviceFault::kWaitNoneRan) slot.to_run = 0;
    if (armed_ == DeviceFault::kWaitSomeRan) slot.to_run = random_ % (slot.to_run + 1);
    slot.spoils = (random_ >> 32) % 2 == 0;
    armed_ = DeviceFault::kNone;
  }
  // After a launch that did not run to its end, later ones do not run.
  for (const int32_t before : running_) {
    const Slot& earlier = slots_[static_cast<size_t>(before)];
    if (!earlier.fails) continue;
    if (options_.runs_after_failure && earlier.to_run == earlier.parts.size()) continue;
    slot.fails = true;
    slot.to_run = 0;
  }
  // Launches end in order.
  const int64_t takes = 1000 * static_cast<int64_t>(1 + random_ % (options_.latency_us + 1));
  slot.started_at = std::max(last_done_, clock_->Now());
  slot.done_at = last_done_ = slot.started_at + takes;
  if (options_.unified && options_.runs_at_submit) slot.done_at = last_done_ = slot.started_at;
}

absl::Status FakeDevice::Submit(int32_t slot, const kernels::Launch& launch) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  if (s.launch != nullptr) Violation("Submit to a slot that runs");
  s.serial = next_serial_++;
  s.staged.clear();
  s.entries.clear();
  std::fill(s.memory.begin(), s.memory.end(), std::byte{0xff});
  if (absl::Status staged = Stage(slot, launch); !staged.ok()) return staged;
  CheckSizes(launch);
  if (const std::string clash = kernels::testing::LaunchClash(launch); !clash.empty()) {
    Violation(clash);
  }
  if (armed_ == DeviceFault::kLost) lost_ = true;
  if (lost_ || armed_ == DeviceFault::kSubmit) {
    armed_ = DeviceFault::kNone;
    ++faults_;
    watcher_->OnLaunchFailed(s.serial);
    return absl::InternalError("a fault was injected at Submit");
  }
  s.launch = &launch;
  s.parts = PartsOf(launch);
  for (const kernels::TableRange& range : launch.table_changes) {
    const auto entries = launch.page_tables.subspan(static_cast<size_t>(range.first),
                                                    static_cast<size_t>(range.count));
    s.entries.insert(s.entries.end(), entries.begin(), entries.end());
  }
  Schedule(s);
  ++launches_;
  parts_ += static_cast<int64_t>(s.parts.size());
  running_.push_back(slot);
  watcher_->OnSubmitted(s.serial);
  // A unified device gathers parts of tensors during the call.
  if (options_.runs_at_submit || options_.unified) CopyIn(launch);
  if (options_.runs_at_submit) Execute(s);
  return absl::OkStatus();
}

bool FakeDevice::Done(int32_t slot) {
  const Slot& s = slots_.at(static_cast<size_t>(slot));
  return s.launch == nullptr || s.done_at <= clock_->Now();
}

int64_t FakeDevice::NextDone() const {
  return running_.empty() ? -1 : slots_[static_cast<size_t>(running_.front())].done_at;
}

bool FakeDevice::Uses(const void* host, int64_t bytes) const {
  const auto* first = static_cast<const std::byte*>(host);
  const auto uses = [first, bytes](const auto& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [first, bytes](const auto& t) {
      return t.host < first + bytes && first < t.host + t.rows * t.row_bytes;
    });
  };
  return std::any_of(running_.begin(), running_.end(), [&](int32_t running) {
    const kernels::Launch& launch = *slots_[static_cast<size_t>(running)].launch;
    return uses(launch.inputs) || uses(launch.outputs);
  });
}

absl::StatusOr<int64_t> FakeDevice::Wait(int32_t slot) {
  Slot& s = slots_.at(static_cast<size_t>(slot));
  if (s.launch == nullptr || running_.empty() || running_.front() != slot) {
    Violation("Wait for a slot that is not the oldest one running");
    return absl::FailedPreconditionError("the slot is not the oldest one running");
  }
  if (s.done_at > clock_->Now()) clock_->Advance(s.done_at - clock_->Now());
  const kernels::Launch& launch = *s.launch;
  if (!options_.runs_at_submit) {
    if (!options_.unified) CopyIn(launch);
    Execute(s);
  }
  running_.erase(running_.begin());
  s.launch = nullptr;
  if (lost_ || s.fails) {
    watcher_->OnLaunchFailed(s.serial);
    return absl::InternalError("a fault was injected at Wait");
  }
  CopyOut(launch);
  watcher_->OnLaunchDone(s.serial);
  return s.done_at - s.started_at;
}

}  // namespace mla::simulation
