#include "tests/simulation/device/fake_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "absl/strings/str_cat.h"
#include "base/splitmix.h"
#include "kernels/host_memory/transfers.h"
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

using kernels::DType;

double Load(const void* base, DType dtype, int64_t index) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, static_cast<const std::byte*>(base) + index * 4, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const std::byte*>(base) + index * 2, sizeof(bits));
  return FromBits(bits);
}

uint16_t ToBits(double value) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  if (std::isnan(value)) return kPoison;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void StoreAt(void* base, DType dtype, int64_t index, double value) {
  if (dtype == DType::kF32) {
    const float narrow = static_cast<float>(value);
    std::memcpy(static_cast<std::byte*>(base) + index * 4, &narrow, sizeof(narrow));
    return;
  }
  const uint16_t bits = ToBits(value);
  std::memcpy(static_cast<std::byte*>(base) + index * 2, &bits, sizeof(bits));
}

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
  random_ = SplitMix(random_);
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

// --------------------------------------------------------------------------- Execution of a launch

int FakeDevice::TenantAt(const Slot& slot, const void* device) const {
  const auto* const at = static_cast<const std::byte*>(device);
  for (const Staged& staged : slot.staged) {
    if (at >= staged.device && at < staged.device + staged.bytes) return staged.tenant;
  }
  return 0;
}

uint16_t* FakeDevice::Element(int64_t page_table, int64_t layer_offset, int64_t row_stride,
                              int page_size, int position, std::span<const uint32_t> tables) {
  const int64_t entry = page_table + position / page_size;
  if (entry < 0 || entry >= static_cast<int64_t>(tables.size()) ||
      tables[static_cast<size_t>(entry)] == kWild) {
    Violation(absl::StrCat("position ", position, " lies on a page that was never published"));
    return nullptr;
  }
  const int64_t offset = tables[static_cast<size_t>(entry)] * kernels::kPageGranuleBytes +
                         layer_offset + (position % page_size) * row_stride;
  if (offset < 0 || offset + row_stride > limits_.kv_pool_bytes) {
    Violation(absl::StrCat("byte ", offset, " of the pool, limit ", limits_.kv_pool_bytes));
    return nullptr;
  }
  return &pool_[static_cast<size_t>(offset) / 2];
}

void FakeDevice::CheckWords(const uint16_t* first, int64_t count, int tenant, bool fresh,
                            const char* where) {
  for (int64_t i = 0; i < count; ++i) {
    const bool poison = first[i] == kPoison;
    if (fresh && (poison || first[i] == 0)) continue;
    if (!poison && TenantOf(first[i]) == tenant) continue;
    Violation(absl::StrCat("tenant ", tenant, " ", where, " a word ",
                           poison          ? "that was never written"
                           : first[i] == 0 ? "that was zeroed"
                                           : absl::StrCat("of tenant ", TenantOf(first[i]))));
    return;
  }
}

void FakeDevice::Execute(Slot& slot) {
  for (; slot.run < slot.to_run; ++slot.run) Execute(slot, slot.parts[slot.run]);
  if (slot.spoils) Spoil(slot);
}

void FakeDevice::Spoil(const Slot& slot) {
  constexpr int kPoisonByte = kPoison & 0xff;
  for (size_t part = slot.to_run; part < slot.parts.size(); ++part) {
    if (slot.parts[part].part == Part::kWritePages) {
      for (const kernels::PageTransfer& t : slot.launch->page_writes) {
        if (InPool(t)) {
          std::memset(PoolBytes() + t.pool_offset, kPoisonByte, static_cast<size_t>(t.bytes));
        }
      }
    }
    if (slot.parts[part].part == Part::kReadPages) {
      for (const kernels::PageTransfer& t : slot.launch->page_reads) {
        std::memset(t.host, kPoisonByte, static_cast<size_t>(t.bytes));
      }
    }
  }
}

void FakeDevice::TakeTables(const Slot& slot) {
  auto entries = slot.entries.begin();
  for (const kernels::TableRange& range : slot.launch->table_changes) {
    std::copy(entries, entries + range.count, tables_.begin() + range.first);
    entries += range.count;
  }
}

void FakeDevice::Execute(Slot& slot, const Work& work) {
  const kernels::Launch& launch = *slot.launch;
  switch (work.part) {
    case Part::kWritePages:
      for (const kernels::PageTransfer& t : launch.page_writes) {
        if (InPool(t)) kernels::WritePages(PoolBytes(), t);
      }
      break;
    case Part::kReadPages:
      for (const kernels::PageTransfer& t : launch.page_reads) {
        if (InPool(t)) kernels::ReadPages(PoolBytes(), t);
      }
      break;
    case Part::kPages:
      for (const kernels::PageRange& range : launch.pages) WriteRange(range);
      break;
    case Part::kTables:
      TakeTables(slot);
      break;
    case Part::kAppends:
      for (const kernels::AppendRecord& record : launch.appends) Append(slot, record);
      break;
    case Part::kAbsorb:
      for (const auto& record : launch.absorb.records) {
        ProjectRows(slot, launch.absorb, true, record);
      }
      break;
    case Part::kProject:
      for (const auto& record : launch.project.records) {
        ProjectRows(slot, launch.project, false, record);
      }
      break;
    case Part::kAttend:
      CheckPlan(*work.params);
      RunPlan(slot, *work.params);
      break;
    case Part::kCombine:
      CombinePlan(slot, *work.params);
      break;
  }
}

bool FakeDevice::InPool(const kernels::PageTransfer& transfer) {
  const int64_t end = transfer.pool_offset + transfer.bytes;
  const bool inside =
      transfer.pool_offset >= 0 && transfer.bytes >= 0 && end <= limits_.kv_pool_bytes;
  if (!inside) Violation("a page transfer outside the pool");
  return inside;
}

std::byte* FakeDevice::PoolBytes() { return reinterpret_cast<std::byte*>(pool_.data()); }

void FakeDevice::WriteRange(const kernels::PageRange& range) {
  if (range.count != 1) {
    for (int32_t i = 0; i < range.count; ++i) WriteRange(range.place(i));
    return;
  }
  const auto inside = [&](int64_t offset) {
    return offset >= 0 && range.bytes >= 0 && offset + range.bytes <= limits_.kv_pool_bytes;
  };
  if (!inside(range.target_offset) || (!range.zeroes() && !inside(range.source_offset))) {
    Violation("page work outside the pool");
    return;
  }
  uint16_t* const to = &pool_[static_cast<size_t>(range.target_offset) / 2];
  if (range.zeroes()) {
    std::memset(to, 0, static_cast<size_t>(range.bytes));
  } else {
    std::memmove(to, &pool_[static_cast<size_t>(range.source_offset) / 2],
                 static_cast<size_t>(range.bytes));
  }
}

void FakeDevice::Append(Slot& slot, const kernels::AppendRecord& record) {
  const int tenant = TenantAt(slot, record.kv);
  for (int row = 0; row < record.rows; ++row) {
    const int position = record.first_position + row;
    uint16_t* to = Element(record.page_table, record.layer_offset, record.row_stride,
                           record.page_size, position, TablesOf(slot));
    if (to == nullptr) return;
    const auto sent = [&](int i) {
      return ToBits(Load(record.kv, record.dtype, row * record.kv_row_stride + i));
    };
    if (record.differs != nullptr) {
      CheckWords(to, record.row_dim, tenant, /*fresh=*/false, "compares");
      record.differs[row] = 0;
      for (int i = 0; i < record.row_dim; ++i) record.differs[row] |= to[i] != sent(i);
      continue;
    }
    // Checks the whole page, because later rows would see what an earlier tenant left in it.
    const int64_t words = record.row_stride / 2;
    CheckWords(to - position % record.page_size * words, words * record.page_size, tenant,
               /*fresh=*/true, "is given");
    for (int i = 0; i < record.row_dim; ++i) to[i] = sent(i);
  }
}

void FakeDevice::ProjectRows(Slot& slot, const kernels::Projection& projection, bool absorbs,
                             const kernels::ProjectionRecord& r) {
  const kernels::Geometry& g = projection.geometry;
  const Weights* weights = WeightsOf(r.weights_slot, r.head_offset, r.num_heads);
  if (weights == nullptr) return;
  if (absorbs && r.rows > 0) {
    // Data between the projections belongs to the tenant of the query.
    Staged latent{static_cast<std::byte*>(r.out), 0, 0};
    latent.bytes = (int64_t{r.rows} - 1) * r.out_row_stride * 4 +
                   (int64_t{r.num_heads} - 1) * r.out_head_stride * 4 + 4;
    latent.tenant = TenantAt(slot, r.in);
    slot.staged.push_back(latent);
  }
  const int inner = absorbs ? g.nope_dim : g.kv_lora_rank;
  const int outer = absorbs ? g.kv_lora_rank : g.v_dim;
  for (int row = 0; row < r.rows; ++row) {
    for (int head = 0; head < r.num_heads; ++head) {
      const int64_t in = row * r.in_row_stride + head * r.in_head_stride;
      const int64_t out = row * r.out_row_stride + head * r.out_head_stride;
      const int64_t first = int64_t{r.head_offset + head} * inner * outer;
      const uint16_t* w = (absorbs ? weights->uk : weights->uv).data() + first;
      for (int i = 0; i < outer; ++i) {
        double sum = 0;
        for (int n = 0; n < inner; ++n) {
          sum += Load(r.in, projection.in, in + n) * FromBits(w[n * outer + i]);
        }
        StoreAt(r.out, projection.out, out + i, sum);
      }
      for (int i = 0; absorbs && i < g.rope_dim; ++i) {
        StoreAt(r.out, projection.out, out + outer + i, Load(r.in, projection.in, in + inner + i));
      }
    }
  }
}

void FakeDevice::CheckPlan(const kernels::AttentionParams& params) {
  plan_segments_.clear();
  for (const kernels::SegmentRecord& r : params.segments) {
    int longest = 0;
    for (int row = 0; r.list_begin != nullptr && row < r.q_rows; ++row) {
      longest = std::max(longest, r.list_begin[row + 1] - r.list_begin[row]);
    }
    const bool sparse = params.desc.attention == kernels::AttentionKind::kSparse;
    if (sparse != (r.list_begin != nullptr)) Violation("lists in a launch of the other kind");
    plan_segments_.push_back(
        {r.q_rows, sparse ? longest : r.kv_rows, r.num_heads, r.causal != 0 && !sparse});
  }
  scheduler::PlanCapacity capacity;
  capacity.units = options_.traits.units;
  capacity.work_items = limits_.work_items;
  capacity.reduce_tiles = limits_.reduce_tiles;
  capacity.reduce_partials = limits_.reduce_partials;
  capacity.partial_rows = limits_.partial_rows;
  // The balance is not checked here, because the planner's own tests compare it.
  const double balance = std::numeric_limits<double>::quiet_NaN();
  const std::string fault =
      checker_.Fault(plan_segments_, Traits(params.desc), params.plan, capacity, balance);
  if (!fault.empty()) Violation(absl::StrCat("plan: ", fault));
}

void FakeDevice::RunPlan(Slot& slot, const kernels::AttentionParams& params) {
  const size_t rows = static_cast<size_t>(std::max(0, params.plan.partial_rows));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  slot.partial_sums.assign(rows * params.desc.geometry.kv_lora_rank, nan);
  slot.partial_most.assign(rows, nan);
  slot.partial_total.assign(rows, nan);
  for (size_t unit = 0; unit + 1 < params.plan.work_indptr.size(); ++unit) {
    for (int32_t i = params.plan.work_indptr[unit]; i < params.plan.work_indptr[unit + 1]; ++i) {
      RunItem(slot, params, params.plan.work_info[static_cast<size_t>(i)]);
    }
  }
}

void FakeDevice::RunItem(Slot& slot, const kernels::AttentionParams& params,
                         const kernels::WorkInfo& item) {
  const kernels::SegmentRecord& segment = params.segments[static_cast<size_t>(item.segment)];
  const int tenant = TenantAt(slot, segment.q);
  const int lora = params.desc.geometry.kv_lora_rank;
  int64_t packed = item.partial_row;
  for (int row = item.q_begin; row < item.q_end; ++row) {
    for (int head = item.head_begin(); head < item.head_end(); ++head, ++packed) {
      AttendPiece(slot, params, segment, item, row, head, tenant);
      if (item.partial_row == kernels::kUnsplit) {
        Store(params, segment, row, head, piece_);
        continue;
      }
      slot.partial_most[packed] = piece_.most;
      slot.partial_total[packed] = piece_.total;
      std::copy(piece_.sums.begin(), piece_.sums.end(), slot.partial_sums.begin() + packed * lora);
    }
  }
}

void FakeDevice::AttendPiece(const Slot& slot, const kernels::AttentionParams& params,
                             const kernels::SegmentRecord& segment, const kernels::WorkInfo& item,
                             int row, int head, int tenant) {
  const kernels::Geometry& g = params.desc.geometry;
  const int dim = g.kv_row_dim();
  double query[64] = {};
  const int64_t q = row * segment.q_row_stride + head * segment.q_head_stride;
  if (params.desc.form == kernels::AttentionForm::kAbsorbed) {
    for (int i = 0; i < dim; ++i) query[i] = Load(segment.q, params.desc.q_dtype, q + i);
  } else if (const Weights* w = WeightsOf(segment.weights_slot, segment.head_offset + head, 1)) {
    const uint16_t* uk =
        w->uk.data() + int64_t{segment.head_offset + head} * g.nope_dim * g.kv_lora_rank;
    for (int n = 0; n < g.nope_dim; ++n) {
      const double value = Load(segment.q, params.desc.q_dtype, q + n);
      for (int i = 0; i < g.kv_lora_rank; ++i) {
        query[i] += value * FromBits(uk[n * g.kv_lora_rank + i]);
      }
    }
    for (int i = 0; i < g.rope_dim; ++i) {
      query[g.kv_lora_rank + i] = Load(segment.q, params.desc.q_dtype, q + g.nope_dim + i);
    }
  }
  piece_.most = -std::numeric_limits<double>::infinity();
  piece_.total = 0;
  piece_.sums.assign(g.kv_lora_rank, 0.0);
  const int sees =
      segment.causal != 0 ? segment.kv_rows - segment.q_rows + row + 1 : segment.kv_rows;
  const bool sparse = segment.list_begin != nullptr;
  const int places = sparse ? segment.list_begin[row + 1] - segment.list_begin[row] : sees;
  for (int place = item.kv_begin; place < std::min(item.kv_end, places); ++place) {
    int j = place;
    if (sparse) j = segment.list[segment.list_begin[row] - segment.list_begin[0] + place];
    if (j < 0 || j >= sees) return Violation("a list names a row that its query row does not see");
    const uint16_t* kv = Element(segment.page_table, segment.layer_offset, segment.row_stride,
                                 segment.page_size, j, TablesOf(slot));
    if (kv == nullptr) return;
    CheckWords(kv, dim, tenant, /*fresh=*/false, "reads");
    double logit = 0;
    for (int i = 0; i < dim; ++i) logit += query[i] * FromBits(kv[i]);
    logit *= segment.softmax_scale;
    const double maximum = std::max(piece_.most, logit);
    const double scale = piece_.total > 0 ? std::exp(piece_.most - maximum) : 0.0;
    const double weight = std::exp(logit - maximum);
    piece_.total = piece_.total * scale + weight;
    for (int i = 0; i < g.kv_lora_rank; ++i) {
      piece_.sums[i] = piece_.sums[i] * scale + weight * FromBits(kv[i]);
    }
    piece_.most = maximum;
  }
}

void FakeDevice::Store(const kernels::AttentionParams& params,
                       const kernels::SegmentRecord& segment, int row, int head,
                       const Piece& piece) {
  const kernels::Geometry& g = params.desc.geometry;
  const double inverse = piece.total > 0 ? 1 / piece.total : 0;
  const int64_t o = row * segment.o_row_stride + head * segment.o_head_stride;
  if (params.desc.form == kernels::AttentionForm::kAbsorbed) {
    for (int i = 0; i < g.kv_lora_rank; ++i) {
      StoreAt(segment.o, params.desc.o_dtype, o + i, piece.sums[i] * inverse);
    }
  } else if (const Weights* w = WeightsOf(segment.weights_slot, segment.head_offset + head, 1)) {
    const uint16_t* uv =
        w->uv.data() + int64_t{segment.head_offset + head} * g.v_dim * g.kv_lora_rank;
    for (int n = 0; n < g.v_dim; ++n) {
      double sum = 0;
      for (int i = 0; i < g.kv_lora_rank; ++i) {
        sum += piece.sums[i] * inverse * FromBits(uv[i * g.v_dim + n]);
      }
      StoreAt(segment.o, params.desc.o_dtype, o + n, sum);
    }
  }
  if (segment.lse == nullptr) return;
  StoreAt(segment.lse, DType::kF32, row * segment.lse_row_stride + head * segment.lse_head_stride,
          piece.most + std::log(piece.total));
}

void FakeDevice::CombinePlan(Slot& slot, const kernels::AttentionParams& params) {
  const kernels::PlanView& plan = params.plan;
  const int lora = params.desc.geometry.kv_lora_rank;
  for (size_t t = 0; t < plan.reduce_final_map.size(); ++t) {
    const kernels::ReduceTile& tile = plan.reduce_final_map[t];
    const kernels::SegmentRecord& segment = params.segments[static_cast<size_t>(tile.segment)];
    int64_t packed = 0;
    for (int row = tile.q_begin; row < tile.q_end; ++row) {
      for (int head = tile.head_begin(); head < tile.head_end(); ++head, ++packed) {
        double maximum = -std::numeric_limits<double>::infinity();
        for (int32_t p = plan.reduce_indptr[t]; p < plan.reduce_indptr[t + 1]; ++p) {
          maximum = std::max(maximum, slot.partial_most[plan.reduce_partial_map[p] + packed]);
        }
        merged_.most = maximum;
        merged_.total = 0;
        merged_.sums.assign(lora, 0.0);
        for (int32_t p = plan.reduce_indptr[t]; p < plan.reduce_indptr[t + 1]; ++p) {
          const int64_t index = plan.reduce_partial_map[p] + packed;
          if (slot.partial_total[index] == 0) continue;
          const double scale = std::exp(slot.partial_most[index] - maximum);
          merged_.total += slot.partial_total[index] * scale;
          for (int i = 0; i < lora; ++i) {
            merged_.sums[i] += slot.partial_sums[index * lora + i] * scale;
          }
        }
        Store(params, segment, row, head, merged_);
      }
    }
  }
}

}  // namespace mla::simulation
