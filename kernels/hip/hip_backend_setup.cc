// HipBackend outside launches: creation, memory, weights, registry rows.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/hip/self_test/self_test.h"

namespace mla::kernels::hip {

namespace {

// On an H200 kernels write 33 KiB to the host's memory in less time than copies of it add to a
// launch, and 132 KiB in 18 us, which is more.
constexpr int64_t kMostBytesInPlace = 40 << 10;
// Of the widest access of a kernel.
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

// Records of the projections of one launch: one for each segment that is computed alone, and one
// for each head slice of segments that are computed as one.
int64_t ProjectionRecords(const BackendLimits& l) { return int64_t{2} * l.launch_requests; }

// Their rows, of which each counts once for every slice of its heads, and tiles.
int64_t ProjectionRows(const BackendLimits& l) {
  return std::max<int64_t>(l.launch_rows, l.launch_packed_rows);
}
int64_t ProjectionTiles(const BackendLimits& l) {
  return ProjectionRecords(l) + ProjectionRows(l) / kProjectRows + 1;
}

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

}  // namespace

absl::StatusOr<std::unique_ptr<HipBackend>> HipBackend::Create(const HipBackendOptions& options) {
  auto runtime = GpuRuntime::Open(options.vendor, options.device, options.libraries);
  if (!runtime.ok()) return runtime.status();
  const std::vector<KernelImage> images =
      options.images.empty() ? BuiltInKernelImages() : options.images;
  auto image = FindImage(images, **runtime);
  if (!image.ok()) return image.status();
  const ArchTraits* arch = FindArchTraits((*runtime)->arch());
  if (arch == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("no kernels are written for ", (*runtime)->arch()));
  }
  std::unique_ptr<HipBackend> backend(new HipBackend(options, *std::move(runtime), *arch));
  if (auto sharing = DeviceSharing::Open(backend->runtime_.get()); sharing.ok()) {
    backend->sharing_ = *std::move(sharing);
  }
  if (absl::Status s = backend->LoadKernels(*image); !s.ok()) return s;
  if (absl::Status s = backend->CreateStreams(); !s.ok()) return s;
  absl::Status prefill = backend->LoadPrefill();
  if (options.self_test) {
    absl::Status s = backend->TestKernels(&prefill);
    if (!s.ok()) {
      return absl::InternalError(
          absl::StrCat("failed self-test on ", backend->info_.device, ": ", s.message()));
    }
  }
  if (prefill.ok()) {
    absl::StrAppend(&backend->info_.fp8_compute, "; 8-bit products in prefill where a row sees ",
                    backend->info_.fp8_prefill_keys,
                    " keys or more on average, bf16 products where it sees fewer");
  } else if (backend->info_.fp8_products) {
    absl::StrAppend(&backend->info_.fp8_compute, "; bf16 products in prefill: ", prefill.message());
  }
  absl::StatusOr<int64_t> free_bytes = backend->runtime_->FreeMemory();
  if (!free_bytes.ok()) return free_bytes.status();
  backend->free_bytes_ = *free_bytes;
  backend->info_.memory_bytes = std::max<int64_t>(
      0, static_cast<int64_t>(static_cast<double>(*free_bytes) * options.memory_fraction) -
             options.shared_bytes);
  return backend;
}

HipBackend::HipBackend(const HipBackendOptions& options, std::unique_ptr<GpuRuntime> runtime,
                       const ArchTraits& arch)
    : options_(options), runtime_(std::move(runtime)), arch_(&arch) {
  const char* vendor = runtime_->vendor() == Vendor::kAmd ? "hip" : "cuda";
  info_.name = absl::StrCat(vendor, "-", runtime_->arch());
  info_.description = "tile kernels on matrix cores, persistent over the plan";
  info_.device = runtime_->name();
  info_.arch = runtime_->arch();
  info_.fp8 = arch_->fp8;
  info_.supported =
      "absorbed form with nope_dim and v_dim multiples of 8, expanded form with both 128; "
      "kv_lora_rank 512, rope_dim 64, rows of bf16, fp8_tensor or fp8_row, bf16 queries (fp32 "
      "ones in EXPANDED only), bf16 or fp32 outputs, any heads, query rows and page size";
  info_.kv_formats.clear();
  for (const KvFormat format : kKvFormats) {
    if (MostRows(arch, format, DType::kBf16, AttentionKind::kDense) > 0) {
      info_.kv_formats.push_back(format);
    }
  }
  info_.sparse = std::any_of(arch.attend.begin(), arch.attend.end(), [](const AttendVariant& v) {
    return v.attention == AttentionKind::kSparse;
  });
  if (info_.sparse) info_.supported += "; index lists in the absorbed form";
  info_.windows = std::any_of(arch.attend.begin(), arch.attend.end(), [](const AttendVariant& v) {
    return v.attention == AttentionKind::kWindow;
  });
  if (info_.windows) {
    info_.supported +=
        "; windows with kv_lora_rank 448, rows and entries both of bf16 or both of fp8_page";
  }
  info_.selects = arch.indexer;
  if (info_.selects) {
    info_.index_dim = kIndexDim;
    info_.supported += absl::StrCat("; an indexer with index_dim ", kIndexDim);
  }
  info_.fp8_products = !arch.fp8_compute.empty();
  if (info_.fp8_products) info_.fp8_compute = std::string(arch.fp8_compute);
  info_.units = runtime_->units();
  info_.unified_memory = false;
  info_.in_place_bytes = runtime_->kernels_reach_host() ? kMostBytesInPlace : 0;
  info_.absorbed_q_of_f32 = DType::kBf16;  // the kernels read no other queries
}

HipBackend::~HipBackend() {
  Release();
  for (Stream stream : {streams_.in, streams_.compute, streams_.out}) runtime_->Destroy(stream);
  runtime_->Unload(module_);
}

absl::Status HipBackend::LoadKernels(std::span<const std::byte> image) {
  absl::StatusOr<Module> module = runtime_->Load(image);
  if (!module.ok()) return module.status();
  module_ = *module;
  const auto find = [this](const std::string& name, int32_t shared, Function* into) {
    absl::StatusOr<Function> f = runtime_->Find(module_, name.c_str());
    if (!f.ok()) return f.status();
    *into = *f;
    return shared > 0 ? runtime_->AllowSharedBytes(*f, shared) : absl::OkStatus();
  };
  absl::Status s = find(kMoveKernel, 0, &kernels_.move);
  if (s.ok() && runtime_->kernels_reach_host()) {
    s = find(kCopyTensorsKernel, 0, &kernels_.copy_tensors);
  }
  if (s.ok()) s = find(kAppendKernel, 0, &kernels_.append);
  if (s.ok()) s = find(kCombineKernel, arch_->combine_shared_bytes, &kernels_.combine);
  if (s.ok()) s = find(kProjectKernel, arch_->project_shared_bytes, &kernels_.project);
  if (s.ok() && arch_->project_row_wide_shared_bytes > 0) {
    s = find(kProjectRowWideKernel, arch_->project_row_wide_shared_bytes,
             &kernels_.project_row_wide);
    if (s.ok()) {
      s = find(kProjectRowDeepKernel, arch_->project_row_deep_shared_bytes,
               &kernels_.project_row_deep);
    }
  }
  if (s.ok() && arch_->widens_lists) s = find(kWidenKernel, 0, &kernels_.widen);
  if (s.ok() && arch_->indexer) {
    s = find(kIndexLogitsKernel, IndexLogitsSharedBytes(*arch_, kMaxIndexHeads, DType::kF32),
             &kernels_.index_logits);
    if (s.ok()) {
      s = find(kIndexSelectKernel, arch_->index_select_shared_bytes, &kernels_.index_select);
    }
  }
  if (s.ok()) {
    s = find(kExpandedKernel, arch_->expanded_shared_bytes, &kernels_.attend_expanded);
  }
  for (const AttendVariant& v : arch_->attend) {
    if (s.ok()) s = find(v.kernel, v.shared_bytes, &kernels_.attend.emplace_back());
  }
  for (const ExpandVariant& v : arch_->expand) {
    Function& into = kernels_.expand.emplace_back();
    if (s.ok() && v.products == DType::kBf16) s = find(v.kernel, v.shared_bytes, &into);
  }
  return s;
}

absl::Status HipBackend::LoadPrefill() {
  if (arch_->expanded_products_threads == 0) {
    return absl::UnimplementedError(absl::StrCat("no kernels are written for ", info_.arch));
  }
  const auto find = [this](const char* name, int32_t shared, Function* into) {
    absl::StatusOr<Function> f = runtime_->Find(module_, name);
    if (!f.ok()) return f.status();
    *into = *f;
    return runtime_->AllowSharedBytes(*f, shared);
  };
  absl::Status s = find(kExpandedProductsKernel, arch_->expanded_products_shared_bytes,
                        &kernels_.attend_expanded_products);
  for (size_t i = 0; i < arch_->expand.size() && s.ok(); ++i) {
    const ExpandVariant& v = arch_->expand[i];
    if (v.products != DType::kBf16) s = find(v.kernel, v.shared_bytes, &kernels_.expand[i]);
  }
  if (s.ok()) info_.fp8_prefill_keys = arch_->expanded_products_keys;
  return s;
}

absl::Status HipBackend::TestKernels(absl::Status* prefill) {
  absl::Status s = Allocate(SelfTestLimits(*this));
  if (s.ok()) s = SelfTest(*this);
  if (s.ok() && prefill->ok()) *prefill = SelfTestPrefill(*this);
  if (!prefill->ok()) info_.fp8_prefill_keys = 0;
  Release();
  return s;
}

absl::Status HipBackend::CreateStreams() {
  for (Stream* stream : {&streams_.in, &streams_.compute, &streams_.out}) {
    absl::StatusOr<Stream> made = runtime_->CreateStream();
    if (!made.ok()) return made.status();
    *stream = *made;
  }
  return absl::OkStatus();
}

// Bytes of one launch's metadata: its records, changed table entries, and the alignment of each
// array.
int64_t HipBackend::MetadataBytes(const BackendLimits& l) const {
  constexpr int64_t kForms = 2;
  constexpr int64_t kAppends = 2;  // of a request: rows, and index keys or entries
  constexpr int64_t kSlack = 256 * 1024;
  const int64_t segments =
      static_cast<int64_t>(l.launch_requests) *
      (kForms * sizeof(SegmentRecord) + sizeof(int32_t) + sizeof(WindowRecord) +
       kAppends * (sizeof(AppendRecord) + sizeof(int32_t)) + kRegionAlignment);
  const int64_t projections = 2 * (ProjectionRows(l) * static_cast<int64_t>(sizeof(ProjectRow)) +
                                   ProjectionTiles(l) * static_cast<int64_t>(sizeof(ProjectTile)));
  const int64_t tables = l.page_table_entries * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t moves = (int64_t{l.page_ranges} + l.table_ranges) *
                        static_cast<int64_t>(sizeof(MoveRange) + 2 * sizeof(int32_t));
  return segments + projections + tables + moves + IndexMetadataBytes(l) + kSlack;
}

int64_t HipBackend::PlanBytes(const BackendLimits& l) const {
  constexpr int64_t kMaxRounds = 1024;
  constexpr int64_t kMaxUnits = 4096;
  constexpr int64_t kArrays = 8;
  const auto entries = [](int64_t count, size_t size) {
    return count * static_cast<int64_t>(size);
  };
  const int64_t items =
      entries(l.work_items, sizeof(WorkInfo)) + entries(kMaxUnits, sizeof(int32_t));
  const int64_t reduce = entries(l.reduce_tiles + 1, sizeof(int32_t) + sizeof(ReduceTile)) +
                         entries(l.reduce_partials, sizeof(int32_t));
  const int64_t units = runtime_->units() * arch_->expanded_blocks + 1;
  const int64_t rounds =
      entries(l.round_items, sizeof(ExpandedItem)) +
      entries(l.round_expansions, sizeof(Expansion)) +
      entries(std::min(l.round_expansions + 1, kMaxRounds) * units, sizeof(int32_t));
  return std::max(items, rounds) + reduce + kArrays * kRegionAlignment;
}

// A launch holds one of each form, at most; two more, so that compositions which alternate find
// theirs again.
int32_t HipBackend::PlanCopies(const BackendLimits& l) { return 2 * l.launch_slots + 2; }

// Of one launch slot, in pinned host memory and as much on the device.
int64_t HipBackend::StagedBytes(const BackendLimits& l) const {
  return AlignRegion(MetadataBytes(l)) + AlignRegion(l.staging_in_bytes) +
         AlignRegion(l.staging_out_bytes);
}

int64_t HipBackend::HostWorkspaceSize(const BackendLimits& l) const {
  return l.launch_slots * StagedBytes(l) + PlanCopies(l) * AlignRegion(PlanBytes(l));
}

int64_t HipBackend::WorkspaceSize(const BackendLimits& l) const {
  const int64_t slot = StagedBytes(l) + AlignRegion(l.slot_workspace_bytes);
  return l.kv_pool_bytes + l.page_table_entries * static_cast<int64_t>(sizeof(uint32_t)) +
         (l.partial_rows + l.launch_rows) * (static_cast<int64_t>(l.max_o_dim) + 1) *
             static_cast<int64_t>(sizeof(float)) +
         ExpandedWorkspaceBytes(l) + IndexWorkspaceBytes(l) + l.weights_bytes +
         l.weights_slots * 2 * static_cast<int64_t>(sizeof(void*)) + l.launch_slots * slot +
         PlanCopies(l) * AlignRegion(PlanBytes(l));
}

absl::Status HipBackend::Configure(const BackendLimits& limits) {
  if (configured_) return absl::FailedPreconditionError("Configure was called before");
  if (limits.launch_slots < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("limits.launch_slots: got ", limits.launch_slots, ", want >= 1"));
  }
  const int64_t wanted = WorkspaceSize(limits);
  if (wanted > info_.memory_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "device memory: ", wanted, " bytes wanted, limit ", info_.memory_bytes,
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
  absl::Status weights =
      weights_.Configure(runtime_.get(), streams_.compute, limits, arch_->weight_panels);
  if (!weights.ok()) return weights;
  const int64_t tables = limits.page_table_entries * static_cast<int64_t>(sizeof(uint32_t));
  // Behind the plan's partial rows: what the expanded form carries between rounds.
  const int64_t partials =
      (limits.partial_rows + limits.launch_rows) * static_cast<int64_t>(sizeof(float));
  for (const auto& [buffer, what, bytes] :
       {std::tuple(&pool_, "kv_cache.bytes", limits.kv_pool_bytes),
        std::tuple(&table_mirror_, "page tables", tables),
        std::tuple(&partial_o_, "partial outputs", partials * limits.max_o_dim),
        std::tuple(&partial_lse_, "partial log-sum-exps", partials),
        std::tuple(&expanded_workspace_, "gpu.expanded_workspace_bytes",
                   ExpandedWorkspaceBytes(limits))}) {
    absl::StatusOr<DeviceBuffer> made = DeviceBuffer::Create(runtime_.get(), what, bytes);
    if (!made.ok()) return made.status();
    *buffer = *std::move(made);
  }
  // An entry that was never published leads to the pool's first page and not anywhere.
  if (tables > 0) {
    absl::Status cleared = runtime_->Fill(table_mirror_.at(), 0, tables, streams_.compute);
    if (!cleared.ok()) return cleared;
  }
  if (absl::Status s = AllocateIndex(limits); !s.ok()) return s;
  const SlotSizes sizes{limits.page_ranges, MetadataBytes(limits), limits.staging_in_bytes,
                        limits.staging_out_bytes, limits.slot_workspace_bytes};
  for (int32_t i = 0; i < limits.launch_slots; ++i) {
    auto slot = LaunchSlot::Create(runtime_.get(), streams_, pinned_, sizes);
    if (!slot.ok()) return slot.status();
    slots_.push_back(*std::move(slot));
  }
  page_work_ = std::make_unique<PageWork>(limits, pool_.at(), table_mirror_.at(), kernels_.move,
                                          kernels_.copy_tensors);
  tiles_.reserve(static_cast<size_t>(ProjectionTiles(limits)));
  project_rows_.reserve(static_cast<size_t>(ProjectionRows(limits)));
  auto plans = PlanStore::Create(runtime_.get(), PlanCopies(limits), PlanBytes(limits));
  if (!plans.ok()) return plans.status();
  plans_ = *std::move(plans);
  configured_ = true;
  return absl::OkStatus();
}

void HipBackend::Release() {
  for (Stream stream : {streams_.in, streams_.compute, streams_.out}) {
    if (stream != nullptr) (void)runtime_->Synchronize(stream);
  }
  slots_.clear();
  page_work_.reset();
  weights_ = WeightStore();
  for (DeviceBuffer* buffer : {&pool_, &table_mirror_, &partial_o_, &partial_lse_,
                               &expanded_workspace_, &index_ranks_, &index_bins_}) {
    *buffer = DeviceBuffer();
  }
  plans_.reset();
  configured_ = false;
}

absl::StatusOr<std::unique_ptr<HostBuffer>> HipBackend::AllocateHost(size_t bytes) {
  auto buffer = PinnedBuffer::Create(runtime_.get(), "host buffer", std::max<int64_t>(1, bytes));
  if (!buffer.ok()) return buffer.status();
  return std::make_unique<ListedBuffer>(*std::move(buffer), pinned_);
}

absl::Status HipBackend::LoadWeights(int32_t slot, const Geometry& geometry, int32_t head_begin,
                                     int32_t head_end, const Bf16* w_uk, const Bf16* w_uv) {
  if (!health_.ok()) return health_;
  // The expanded form's workspace holds nothing between launches.
  absl::Status s =
      weights_.Load(slot, geometry, head_begin, head_end, w_uk, w_uv, expanded_workspace_);
  return weights_.torn() ? Fault(std::move(s)) : s;
}

absl::Status HipBackend::FreeWeights(int32_t slot) { return weights_.Free(slot); }

absl::Status HipBackend::RegisterHost(std::span<std::byte> memory) {
  if (lost_) return absl::UnavailableError("the device is lost");
  absl::Status s = runtime_->RegisterHost(memory.data(), static_cast<int64_t>(memory.size()));
  if (s.ok()) pinned_->Add(memory.data(), static_cast<int64_t>(memory.size()));
  return s;
}

void HipBackend::UnregisterHost(std::span<std::byte> memory) {
  const PinnedRanges::Id piece = pinned_->Retire(memory.data());
  if (piece == PinnedRanges::kNone || lost_) return;
  // A launch that has not ended by then has lost the device.
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
  return AwaitShared(
      runtime_->CopyOut(to, reinterpret_cast<DevicePtr>(from), bytes, streams_.compute), bytes);
}

absl::Status HipBackend::WriteShared(void* to, const void* from, int64_t bytes) {
  return AwaitShared(
      runtime_->CopyIn(reinterpret_cast<DevicePtr>(to), from, bytes, streams_.compute), bytes);
}

absl::Status RegisterGpuBackends(BackendRegistry& registry, const HipBackendOptions& base) {
  const auto row = [&base](const char* name, int32_t rank, Vendor vendor) {
    return BackendRow{
        name, rank,
        [vendor,
         base](const BackendOptions& options) -> absl::StatusOr<std::unique_ptr<AttentionBackend>> {
          HipBackendOptions hip = base;
          hip.vendor = vendor;
          hip.device = options.device;
          hip.memory_fraction = options.gpu_memory_fraction;
          hip.expanded_workspace_bytes = options.gpu_expanded_workspace_bytes;
          hip.shared_bytes = options.gpu_shared_bytes;
          hip.watchdog_ms = options.gpu_watchdog_ms;
          auto backend = HipBackend::Create(hip);
          if (!backend.ok()) return backend.status();
          return std::unique_ptr<AttentionBackend>(*std::move(backend));
        }};
  };
  if (absl::Status s = registry.Add(row("hip", 200, Vendor::kAmd)); !s.ok()) return s;
  return registry.Add(row("cuda", 190, Vendor::kNvidia));
}

}  // namespace mla::kernels::hip
