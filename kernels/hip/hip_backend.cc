#include "kernels/hip/hip_backend.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device_state/capabilities.h"
#include "kernels/hip/launch/absorbed_work.h"
#include "kernels/hip/self_test/host_memory.h"

namespace mla::kernels::hip {

namespace {

constexpr int64_t kMeetingBytes = kMostSplitShares * sizeof(uint32_t);
// Returns the number of digests of a launch: of page writes and page reads. Device and pinned
// memory hold as many.
int64_t DigestCount(const BackendLimits& limits) { return 2 * int64_t{limits.digest_parts}; }
int64_t DigestBytes(const BackendLimits& limits) {
  return DigestCount(limits) * static_cast<int64_t>(sizeof(PartDigest));
}

// The alignment of a kernel's widest access.
constexpr uintptr_t kAlignmentInPlace = 16;

// A host buffer that copies recognise as pinned for as long as it lives.
class ListedBuffer final : public HostBuffer {
 public:
  ListedBuffer(PinnedBuffer buffer, std::shared_ptr<PinnedRanges> ranges)
      : buffer_(std::move(buffer)), ranges_(std::move(ranges)) {
    ranges_->Add(buffer_.data(), buffer_.size());
  }
  ~ListedBuffer() override {
    (void)ranges_->AwaitUnused(ranges_->Retire(buffer_.data()), std::chrono::milliseconds(0));
  }
  std::span<std::byte> bytes() override { return buffer_.bytes(); }

 private:
  PinnedBuffer buffer_;
  std::shared_ptr<PinnedRanges> ranges_;
};

absl::StatusOr<std::span<const std::byte>> FindImage(const std::vector<KernelImage>& images,
                                                     const GpuRuntime& runtime) {
  std::vector<std::string> built;
  for (const KernelImage& image : images) {
    if (image.arch == runtime.arch()) return image.bytes;
    built.push_back(image.arch);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "no code object for ", runtime.arch(), " (", runtime.name(),
      ") was built in; built in: ", built.empty() ? "none" : absl::StrJoin(built, ", "),
      "; kernels exist for gfx950, gfx942, sm_90"));
}

std::string NoteOnGraphs(bool wanted, bool amd, GraphUse use, const absl::Status& tested) {
  if (!tested.ok()) return absl::StrCat("off: ", tested.message());
  if (wanted) return "on";
  if (amd && use == GraphUse::kAuto) {
    return "off: HIP's take device memory with every launch, and some of its versions replay old "
           "arguments; gpu.graphs=on tests them and uses them";
  }
  return "off: gpu.graphs";
}

}  // namespace

absl::StatusOr<std::unique_ptr<HipBackend>> HipBackend::Create(const HipBackendOptions& options) {
  MLA_ASSIGN_OR_RETURN(auto runtime,
                       GpuRuntime::Open(options.vendor, options.device, options.libraries));
  const std::vector<KernelImage> images =
      options.images.empty() ? BuiltInKernelImages() : options.images;
  MLA_ASSIGN_OR_RETURN(auto image, FindImage(images, *runtime));
  const ArchTraits* arch = FindArchTraits(runtime->arch());
  if (arch == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("no kernels are written for ", runtime->arch()));
  }
  std::unique_ptr<HipBackend> backend(new HipBackend(options, std::move(runtime), *arch));
  if (auto sharing = DeviceSharing::Open(backend->runtime_.get()); sharing.ok()) {
    backend->sharing_ = *std::move(sharing);
  }
  MLA_RETURN_IF_ERROR(backend->LoadKernels(image));
  MLA_RETURN_IF_ERROR(backend->CreateStreams());
  DeviceState& device = backend->device_;
  absl::Status prefill =
      FindPrefillKernels(*device.runtime, backend->module_, *arch, &device.kernels);
  if (prefill.ok()) device.info.fp8_prefill_keys = arch->expanded_products_keys;
  MLA_RETURN_IF_ERROR(backend->SettleBoxes());
  SelfTestRun run(options.self_test_options);
  absl::Status tested = options.self_test ? backend->TestKernels(&prefill, run) : absl::OkStatus();
  if (tested.ok()) tested = backend->SettleHostMemory(run);
  if (tested.ok()) tested = backend->SettleGraphs(run);
  if (!tested.ok()) {
    return absl::InternalError(
        absl::StrCat("failed self-test on ", device.info.device, ": ", tested.message()));
  }
  if (prefill.ok()) {
    absl::StrAppend(&device.info.fp8_compute,
                    "; 8-bit products in prefill with nope_dim/v_dim 128/128 where a row sees ",
                    device.info.fp8_prefill_keys,
                    " keys or more on average, bf16 products where it sees fewer");
  } else if (device.info.fp8_products) {
    absl::StrAppend(&device.info.fp8_compute, "; bf16 products in prefill: ", prefill.message());
  }
  MLA_ASSIGN_OR_RETURN(int64_t free_bytes, backend->runtime_->FreeMemory());
  backend->free_bytes_ = free_bytes;
  device.info.memory_bytes = std::max<int64_t>(
      0, static_cast<int64_t>(static_cast<double>(free_bytes) * options.memory_fraction) -
             options.shared_bytes);
  return backend;
}

HipBackend::HipBackend(const HipBackendOptions& options, std::unique_ptr<GpuRuntime> runtime,
                       const ArchTraits& arch)
    : options_(options), runtime_(std::move(runtime)) {
  device_.runtime = runtime_.get();
  device_.arch = &arch;
  device_.info = InfoOf(*runtime_, arch);
}

HipBackend::~HipBackend() {
  Release();
  for (Stream stream : streams_.all()) runtime_->Destroy(stream);
  runtime_->Unload(module_);
}

absl::Status HipBackend::LoadKernels(std::span<const std::byte> image) {
  MLA_ASSIGN_OR_RETURN(module_, runtime_->Load(image));
  return FindKernels(*runtime_, module_, *device_.arch, &device_.kernels);
}

void HipBackend::ReachHost(bool reach) {
  runtime_->set_kernels_reach_host(reach);
  SetHostMemory(*runtime_, *device_.arch, &device_.info);
}

// On NVIDIA devices the driver's attribute suffices.
absl::Status HipBackend::SettleHostMemory(SelfTestRun& run) {
  if (!options_.reach_host) {
    ReachHost(false);
    return absl::OkStatus();
  }
  absl::Status reached = runtime_->kernels_reach_host()
                             ? absl::OkStatus()
                             : absl::UnimplementedError("the driver says that kernels cannot");
  if (runtime_->vendor() == Vendor::kAmd) {
    reached = ProbeHostMemory(device_, streams_.compute);
    ReachHost(reached.ok());
    if (reached.ok() && options_.self_test) {
      absl::Status s = Allocate(SelfTestLimits(*this));
      if (s.ok()) reached = SelfTestHostMemory(*this, run);
      Release();
      ReachHost(reached.ok());
      if (!s.ok() || !health_.ok()) return s.ok() ? health_ : s;
    }
  }
  device_.info.notes.push_back(
      {"host_memory", reached.ok() ? "kernels reach it"
                                   : absl::StrCat("copied: ", std::string(reached.message()))});
  return absl::OkStatus();
}

absl::Status HipBackend::TestKernels(absl::Status* prefill, SelfTestRun& run) {
  runtime_->set_uses_graphs(false);  // graphs have a test of their own
  absl::Status s = Allocate(SelfTestLimits(*this));
  if (s.ok()) s = SelfTest(*this, run);
  if (s.ok() && prefill->ok()) *prefill = SelfTestPrefill(*this, run);
  if (!prefill->ok()) device_.info.fp8_prefill_keys = 0;
  Release();
  return s;
}

absl::Status HipBackend::SettleGraphs(SelfTestRun& run) {
  const bool amd = runtime_->vendor() == Vendor::kAmd;
  const bool wanted =
      options_.graphs == GraphUse::kOn || (options_.graphs == GraphUse::kAuto && !amd);
  runtime_->set_uses_graphs(wanted);
  absl::Status s;
  if (wanted && options_.self_test) {
    s = Allocate(SelfTestLimits(*this));
    if (!s.ok()) return s;
    s = SelfTestReplays(*this, *runtime_, run);
    Release();
    runtime_->set_uses_graphs(s.ok());
    if (!health_.ok()) return health_;
  }
  device_.info.notes.push_back({"graphs", NoteOnGraphs(wanted, amd, options_.graphs, s)});
  return absl::OkStatus();
}

absl::Status HipBackend::SettleBoxes() {
  if (device_.arch->boxes.empty()) return absl::OkStatus();
  MLA_ASSIGN_OR_RETURN(auto page, DeviceBuffer::Create(runtime_.get(), "a page of rows",
                                                       kMostBoxRows * int64_t{kBf16RowBytes}));
  absl::Status encoded;
  for (const FormatVariant& v : device_.arch->boxes) {
    BoxArgs args = {};
    args.box_rows = kMostBoxRows;
    const int64_t row_bytes = MakeKvRowLayout(v.format, kExpandedLora, kExpandedRope).row_bytes;
    encoded.Update(AbsorbedWork::EncodeMaps(*runtime_, {page.at(), 1, kMostBoxRows, row_bytes},
                                            v.format, &args));
  }
  device_.brings_boxes = encoded.ok();
  device_.info.notes.push_back({"boxes", encoded.ok()
                                             ? "the copy engine brings KV rows"
                                             : absl::StrCat("KV rows come by copies of 16 bytes: ",
                                                            std::string(encoded.message()))});
  return absl::OkStatus();
}

absl::Status HipBackend::CreateStreams() {
  for (Stream* stream : {&streams_.in, &streams_.compute, &streams_.out}) {
    MLA_ASSIGN_OR_RETURN(*stream, runtime_->CreateStream());
  }
  return absl::OkStatus();
}

absl::Status HipBackend::CanRun(const AttentionDesc& desc) const {
  return CheckSupported(*device_.arch, device_.info, desc);
}

PlanTraits HipBackend::Traits(const AttentionDesc& desc) const {
  PlanTraits traits = PlanTraitsOf(*device_.arch, runtime_->units(), desc);
  if (desc.form == AttentionForm::kExpanded) {
    traits.rounds.workspace_bytes =
        configured_ ? device_.expanded_workspace.bytes() : options_.expanded_workspace_bytes;
    traits.rounds.most = options_.most_rounds;
    traits.rounds.first_carry_row = static_cast<int32_t>(limits_.partial_rows);
    traits.rounds.carry_rows = limits_.launch_rows;
  }
  return traits;
}

int32_t HipBackend::ExpandedFormMinRows(const Geometry& geometry) const {
  if (device_.expanded_workspace.bytes() == 0) return limits_.launch_rows + 1;
  return ExpandedWork::MinRows(geometry, limits_.launch_rows);
}

int64_t HipBackend::StagedBytes(const BackendLimits& l) const {
  return AlignRegion(LaunchBuilder::MetadataBytes(l, device_.info)) +
         AlignRegion(l.staging_in_bytes) + AlignRegion(l.staging_out_bytes);
}

int64_t HipBackend::ExpandedWorkspaceBytes(const BackendLimits& l) const {
  return ExpandedWork::WorkspaceBytes(*device_.arch, l, options_.expanded_workspace_bytes);
}

int64_t HipBackend::HostWorkspaceSize(const BackendLimits& l) const {
  return l.launch_slots * (StagedBytes(l) + DigestBytes(l)) + LaunchBuilder::HostBytes(device_, l);
}

int64_t HipBackend::WorkspaceSize(const BackendLimits& l) const {
  const int64_t slot = StagedBytes(l) + DigestBytes(l) + AlignRegion(l.slot_workspace_bytes) +
                       static_cast<int64_t>(sizeof(GateOutcome));
  return l.kv_pool_bytes + l.page_table_entries * static_cast<int64_t>(sizeof(uint32_t)) +
         (l.partial_rows + l.launch_rows) * (static_cast<int64_t>(l.max_o_dim) + 1) *
             static_cast<int64_t>(sizeof(float)) +
         kMeetingBytes + ExpandedWorkspaceBytes(l) + l.weights_bytes +
         l.weights_slots * 2 * static_cast<int64_t>(sizeof(void*)) + l.launch_slots * slot +
         LaunchBuilder::WorkspaceBytes(device_, l);
}

absl::Status HipBackend::Configure(const BackendLimits& limits) {
  if (configured_) return absl::FailedPreconditionError("Configure was called before");
  if (limits.launch_slots < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("limits.launch_slots: got ", limits.launch_slots, ", want >= 1"));
  }
  const int64_t wanted = WorkspaceSize(limits);
  if (wanted > device_.info.memory_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "device memory: ", wanted, " bytes wanted, limit ", device_.info.memory_bytes,
        " (gpu.memory_fraction ", options_.memory_fraction, " of ", free_bytes_,
        " that are free); kv pool ", limits.kv_pool_bytes, ", limits.weights_bytes ",
        limits.weights_bytes, ", expanded keys and values ", ExpandedWorkspaceBytes(limits)));
  }
  absl::Status s = Allocate(limits);
  if (!s.ok()) Release();
  return s;
}

absl::Status HipBackend::Allocate(const BackendLimits& limits) {
  limits_ = limits;
  MLA_RETURN_IF_ERROR(
      device_.weights.Configure(runtime_.get(), streams_.compute, limits, *device_.arch));
  const int64_t tables = limits.page_table_entries * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t partials =
      (limits.partial_rows + limits.launch_rows) * static_cast<int64_t>(sizeof(float));
  for (const auto& [buffer, what, bytes] :
       {std::tuple(&device_.pool, "kv_cache.bytes", limits.kv_pool_bytes),
        std::tuple(&device_.table_mirror, "page tables", tables),
        std::tuple(&device_.partial_o, "partial outputs", partials * limits.max_o_dim),
        std::tuple(&device_.partial_lse, "partial log-sum-exps", partials),
        std::tuple(&device_.meetings, "meetings of blocks", kMeetingBytes),
        std::tuple(&device_.expanded_workspace, "gpu.expanded_workspace_bytes",
                   ExpandedWorkspaceBytes(limits))}) {
    MLA_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Create(runtime_.get(), what, bytes));
  }
  MLA_RETURN_IF_ERROR(runtime_->Fill(device_.meetings.at(), 0, kMeetingBytes, streams_.compute));
  // Zeros, so that a table entry that was never published leads to the pool's first page.
  if (tables > 0) {
    MLA_RETURN_IF_ERROR(runtime_->Fill(device_.table_mirror.at(), 0, tables, streams_.compute));
  }
  const SlotSizes sizes{
      limits.page_ranges,          LaunchBuilder::MetadataBytes(limits, device_.info),
      limits.staging_in_bytes,     limits.staging_out_bytes,
      limits.slot_workspace_bytes, DigestCount(limits)};
  for (int32_t i = 0; i < limits.launch_slots; ++i) {
    MLA_ASSIGN_OR_RETURN(auto slot, LaunchSlot::Create(runtime_.get(), streams_, pinned_, sizes));
    slots_.push_back(std::move(slot));
  }
  MLA_ASSIGN_OR_RETURN(builder_, LaunchBuilder::Create(device_, limits, streams_.compute));
  configured_ = true;
  return absl::OkStatus();
}

void HipBackend::Release() {
  for (Stream stream : streams_.all()) {
    if (stream != nullptr) (void)runtime_->Synchronize(stream);
  }
  slots_.clear();
  builder_.reset();
  device_.weights = WeightStore();
  for (DeviceBuffer* buffer :
       {&device_.pool, &device_.table_mirror, &device_.partial_o, &device_.partial_lse,
        &device_.meetings, &device_.expanded_workspace}) {
    *buffer = DeviceBuffer();
  }
  configured_ = false;
}

absl::StatusOr<std::unique_ptr<HostBuffer>> HipBackend::AllocateHost(size_t bytes) {
  const CallWatch::Scope scope(calls_, "an allocation of host memory");
  MLA_ASSIGN_OR_RETURN(auto buffer, PinnedBuffer::Create(runtime_.get(), "host buffer",
                                                         std::max<int64_t>(1, bytes)));
  return std::make_unique<ListedBuffer>(std::move(buffer), pinned_);
}

absl::Status HipBackend::LoadWeights(int32_t slot, const Geometry& geometry, int32_t head_begin,
                                     int32_t head_end, const Bf16* w_uk, const Bf16* w_uv) {
  if (!health_.ok()) return health_;
  const CallWatch::Scope scope(calls_, "an upload of weights");
  // The expanded form's workspace is unused between launches, so it may serve as scratch.
  absl::Status s = device_.weights.Load(slot, geometry, head_begin, head_end, w_uk, w_uv,
                                        device_.expanded_workspace);
  return device_.weights.torn() ? Fault(std::move(s)) : s;
}

absl::Status HipBackend::LoadProjected(int32_t slot, const Geometry& geometry,
                                       const ProjectedShape& shape, ProjectedPart part,
                                       int32_t head, const void* weights) {
  if (!health_.ok()) return health_;
  const CallWatch::Scope scope(calls_, "an upload of weights");
  absl::Status s = device_.weights.LoadProjected(slot, geometry, shape, part, head, weights,
                                                 device_.expanded_workspace);
  return device_.weights.torn() ? Fault(std::move(s)) : s;
}

absl::Status HipBackend::ReadWeights(int32_t slot, const Geometry& geometry, int32_t head,
                                     Bf16* w_uk, Bf16* w_uv) {
  if (!health_.ok()) return health_;
  const CallWatch::Scope scope(calls_, "a copy of weights to the host");
  return device_.weights.Read(slot, geometry, head, w_uk, w_uv);
}

absl::Status HipBackend::ReadProjected(int32_t slot, const Geometry& geometry,
                                       const ProjectedShape& shape, ProjectedPart part,
                                       int32_t head, void* weights) {
  if (!health_.ok()) return health_;
  const CallWatch::Scope scope(calls_, "a copy of weights to the host");
  return device_.weights.ReadProjected(slot, geometry, shape, part, head, weights);
}

absl::Status HipBackend::FreeWeights(int32_t slot) { return device_.weights.Free(slot); }

absl::Status HipBackend::RegisterHost(std::span<std::byte> memory) {
  if (lost_) return absl::UnavailableError("the device is lost");
  absl::Status s = runtime_->RegisterHost(memory.data(), static_cast<int64_t>(memory.size()));
  if (s.ok() && runtime_->kernels_reach_host()) s = CheckReached(memory);
  if (s.ok()) pinned_->Add(memory.data(), static_cast<int64_t>(memory.size()));
  return s;
}

// Kernels would use the host's addresses of this memory, so the device must map it there.
absl::Status HipBackend::CheckReached(std::span<std::byte> memory) {
  absl::StatusOr<bool> same = runtime_->SameAddress(memory.data());
  if (same.ok() && *same) return absl::OkStatus();
  (void)runtime_->UnregisterHost(memory.data());
  if (!same.ok()) return same.status();
  return absl::UnavailableError("the device has this memory at another address than the host");
}

void HipBackend::UnregisterHost(std::span<std::byte> memory) {
  const PinnedRanges::Id piece = pinned_->Retire(memory.data());
  if (piece == PinnedRanges::kNone || lost_) return;
  // A launch that has not ended by then means that the device is lost.
  const std::chrono::milliseconds most(2 * options_.watchdog_ms);
  if (!pinned_->AwaitUnused(piece, most) || lost_) return;
  (void)runtime_->UnregisterHost(memory.data());
}

bool HipBackend::InPlace(const void* host, int64_t bytes) const {
  return runtime_->kernels_reach_host() &&
         reinterpret_cast<uintptr_t>(host) % kAlignmentInPlace == 0 &&
         pinned_->Find(host, bytes) != PinnedRanges::kNone;
}

absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> HipBackend::AllocateShared(int64_t bytes,
                                                                               int32_t events) {
  if (lost_) return absl::UnavailableError("the device is lost");
  if (sharing_ == nullptr) return absl::UnimplementedError("the GPU runtime shares no memory");
  return sharing_->Allocate(bytes, events, pinned_,
                            std::chrono::milliseconds(2 * options_.watchdog_ms));
}

HostWork HipBackend::Work() const {
  HostWork all = shared_work_;
  for (const auto& slot : slots_) {
    all.copied_bytes += slot->work().copied_bytes;
    all.sleeps += slot->work().sleeps;
    all.polling_ns += slot->work().polling_ns;
    all.late_copies += slot->work().late_copies;
  }
  return all;
}

absl::Status HipBackend::AwaitShared(absl::Status copied, int64_t bytes) {
  if (!copied.ok()) return copied;
  shared_work_.copied_bytes += bytes;
  ++shared_work_.sleeps;
  return runtime_->Synchronize(streams_.compute);
}

absl::Status HipBackend::ReadShared(void* to, const void* from, int64_t bytes) {
  const CallWatch::Scope scope(calls_, "a copy of shared memory");
  return AwaitShared(
      runtime_->CopyOut(to, reinterpret_cast<DevicePtr>(from), bytes, streams_.compute), bytes);
}

absl::Status HipBackend::WriteShared(void* to, const void* from, int64_t bytes) {
  const CallWatch::Scope scope(calls_, "a copy of shared memory");
  return AwaitShared(
      runtime_->CopyIn(reinterpret_cast<DevicePtr>(to), from, bytes, streams_.compute), bytes);
}

absl::Status HipBackend::CheckSlot(int32_t slot) const {
  if (slot < 0 || slot >= static_cast<int32_t>(slots_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("launch slot: got ", slot, ", limit ", slots_.size()));
  }
  return absl::OkStatus();
}

SlotMemory HipBackend::Memory(int32_t slot) { return slots_[static_cast<size_t>(slot)]->Memory(); }

absl::Status HipBackend::Fault(absl::Status status) {
  if (!status.ok() && health_.ok()) {
    health_ = absl::InternalError(absl::StrCat("device lost: ", status.message()));
    lost_ = true;
  }
  return status;
}

std::string HipBackend::StuckCall() const {
  const CallWatch::Running call = calls_.Read();
  const int64_t least = std::max(2 * options_.watchdog_ms, kLeastStuckMs);
  const std::chrono::milliseconds most(options_.stuck_ms > 0 ? options_.stuck_ms : least);
  if (call.what == nullptr || call.lasts < most) return "";
  const auto lasts = std::chrono::duration_cast<std::chrono::milliseconds>(call.lasts);
  return absl::StrCat(call.what, " has not returned for ", lasts.count(),
                      " ms; its last GPU call is ",
                      call.driver_call == nullptr ? "none" : call.driver_call);
}

absl::Status HipBackend::Submit(int32_t slot, const Launch& launch) {
  const CallWatch::Scope scope(calls_, "the submission of a launch");
  if (!health_.ok()) return health_;
  MLA_RETURN_IF_ERROR(CheckSlot(slot));
  LaunchSlot& owner = *slots_[static_cast<size_t>(slot)];
  if (owner.submitted().running())
    return absl::FailedPreconditionError("the launch slot is still running");
  const bool alone = std::none_of(slots_.begin(), slots_.end(),
                                  [](const auto& other) { return other->submitted().running(); });
  LaunchRecording& recording = owner.recording();
  MLA_ASSIGN_OR_RETURN(const LaunchForm form, builder_->Choose(recording, slot, launch));
  recording.Begin(launch, form.tensors, alone);
  absl::Status s = builder_->Build(recording, slot, launch, form);
  if (s.ok()) {
    s = owner.Submit(launch, form.tensors, device_.pool.at());
  } else {
    owner.Abandon();
  }
  if (s.ok()) return s;
  builder_->Release(slot);
  // After a refused call the device is usable. If the device is lost, the next call fails too.
  if (s.code() == absl::StatusCode::kInternal) {
    if (absl::Status alive = runtime_->Synchronize(streams_.compute); !alive.ok()) {
      return Fault(std::move(alive));
    }
  }
  return s;
}

bool HipBackend::Done(int32_t slot) {
  const CallWatch::Scope scope(calls_, "a look at a launch");
  if (!CheckSlot(slot).ok() || !slots_[slot]->submitted().running()) return true;
  SubmittedLaunch& launch = slots_[slot]->submitted();
  absl::StatusOr<bool> done = launch.Done();
  // Wait reports the error. It is called for a launch that is done, so one that hangs must be, too.
  return !done.ok() || *done || launch.Overdue(std::chrono::milliseconds(options_.watchdog_ms));
}

absl::StatusOr<int64_t> HipBackend::Wait(int32_t slot) {
  const CallWatch::Scope scope(calls_, "the wait for a launch");
  MLA_RETURN_IF_ERROR(CheckSlot(slot));
  if (!slots_[slot]->submitted().running()) {
    return absl::FailedPreconditionError(absl::StrCat("launch slot ", slot, " is not running"));
  }
  // Other launches in flight on a lost device get no time of their own.
  const std::chrono::milliseconds longest(lost_ ? 0 : options_.watchdog_ms);
  absl::StatusOr<int64_t> ns = slots_[slot]->submitted().Wait(longest);
  if (!ns.ok()) {
    (void)Fault(ns.status());
    return health_;
  }
  builder_->Release(slot);
  return ns;
}

}  // namespace mla::kernels::hip
