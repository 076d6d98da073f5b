#include "tests/bench/gpu/gpu_decode_c.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/hip/hip_backend.h"
#include "scheduler/planning/planner.h"
#include "scheduler/testing/heap_buffers.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

using kernels::hip::DeviceBuffer;
using kernels::hip::DevicePtr;

constexpr int32_t kRowDim = 576;
constexpr int kMostBatch = 100000;

struct Key {  // inputs of the uploaded records
  const void *q = nullptr, *out = nullptr, *lse = nullptr;
  int batch = 0, heads = 0, max_blocks = 0, page = 0;
  float scale = 0.0f;
  friend bool operator==(const Key&, const Key&) = default;
};

class Decoder {
 public:
  static absl::StatusOr<std::unique_ptr<Decoder>> Create();
  absl::Status Plan(const int* lengths, int batch, int heads, int page);
  absl::Status Run(const Key& key, const void* kv, const int* table, kernels::hip::Stream stream);

 private:
  absl::Status CheckSizes(const int* lengths, int batch, int heads, int page) const;
  absl::StatusOr<DevicePtr> Take(int64_t bytes);
  template <class T>
  absl::StatusOr<DevicePtr> Upload(std::span<const T> values);
  // `busy` units have work.
  void ShapeCombine(const kernels::PlanView& plan, int32_t rows, int32_t busy);
  absl::Status UploadRequests(const Key& key, kernels::hip::Stream stream);

  std::unique_ptr<kernels::hip::HipBackend> backend_;
  kernels::hip::GpuRuntime* runtime_ = nullptr;
  const kernels::hip::ArchTraits* arch_ = nullptr;
  kernels::hip::Module module_ = nullptr;
  std::vector<kernels::hip::Function> attend_;
  kernels::hip::Function combine_ = nullptr;
  scheduler::Planner planner_;
  std::unique_ptr<scheduler::MetadataBuffers> buffers_;
  DeviceBuffer memory_, partial_o_, partial_lse_;
  int64_t used_ = 0;
  kernels::hip::Stream stream_ = nullptr;

  std::vector<int32_t> lengths_;
  int heads_ = 0, page_ = 0;
  kernels::hip::AttendArgs attend_args_ = {};
  kernels::hip::CombineArgs combine_args_ = {};
  kernels::hip::LaunchShape attend_shape_, combine_shape_;
  size_t variant_ = 0;
  Key key_;
  DevicePtr requests_ = 0;
};

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create() {
  auto self = std::make_unique<Decoder>();
  const kernels::hip::HipBackendOptions& options = DecodeOptions();
  auto backend = AnyGpu(options);
  if (!backend.ok()) return backend.status();
  self->backend_ = *std::move(backend);
  self->runtime_ = &self->backend_->runtime();
  self->arch_ = kernels::hip::FindArchTraits(self->runtime_->arch());
  self->stream_ = self->backend_->compute_stream();
  for (const kernels::hip::KernelImage& image :
       options.images.empty() ? kernels::hip::BuiltInKernelImages() : options.images) {
    if (image.arch != self->runtime_->arch()) continue;
    auto module = self->runtime_->Load(image.bytes);
    if (!module.ok()) return module.status();
    self->module_ = *module;
  }
  for (const kernels::hip::AttendVariant& v : self->arch_->attend) {
    auto f = self->runtime_->Find(self->module_, v.kernel);
    if (!f.ok()) return f.status();
    if (absl::Status s = self->runtime_->AllowSharedBytes(*f, v.shared_bytes); !s.ok()) return s;
    self->attend_.push_back(*f);
  }
  auto combine = self->runtime_->Find(self->module_, kernels::hip::kCombineKernel);
  if (!combine.ok()) return combine.status();
  self->combine_ = *combine;
  for (const auto& [buffer, bytes] : {std::pair(&self->memory_, int64_t{64} << 20),
                                      std::pair(&self->partial_o_, int64_t{100000} * 512 * 4),
                                      std::pair(&self->partial_lse_, int64_t{100000} * 4)}) {
    auto made = DeviceBuffer::Create(self->runtime_, "bench", bytes);
    if (!made.ok()) return made.status();
    *buffer = *std::move(made);
  }
  self->buffers_ = scheduler::testing::MakeBuffers({1024, 20000, 20000, 40000, 100000});
  return self;
}

absl::StatusOr<DevicePtr> Decoder::Take(int64_t bytes) {
  const DevicePtr address = memory_.at() + static_cast<uint64_t>(used_);
  if (used_ + kernels::hip::AlignRegion(bytes) > memory_.bytes()) {
    return absl::ResourceExhaustedError(absl::StrCat("metadata: ", used_, " bytes used, ", bytes,
                                                     " wanted, limit ", memory_.bytes()));
  }
  used_ += kernels::hip::AlignRegion(bytes);
  return address;
}

template <class T>
absl::StatusOr<DevicePtr> Decoder::Upload(std::span<const T> values) {
  const auto bytes = static_cast<int64_t>(values.size_bytes());
  absl::StatusOr<DevicePtr> at = Take(bytes);
  if (!at.ok() || bytes == 0) return at;
  if (absl::Status s = runtime_->CopyIn(*at, values.data(), bytes, stream_); !s.ok()) return s;
  return at;
}

absl::Status Decoder::CheckSizes(const int* lengths, int batch, int heads, int page) const {
  if (lengths == nullptr) return absl::InvalidArgumentError("host_lengths: got null");
  for (const auto& [what, got, most] :
       {std::tuple("batch", batch, kMostBatch), std::tuple("heads", heads, 65535),
        std::tuple("page", page, 1 << 20)}) {
    if (got >= 1 && got <= most) continue;
    return absl::InvalidArgumentError(absl::StrCat(what, ": got ", got, ", must be 1..", most));
  }
  const int* const negative = std::find_if(lengths, lengths + batch, [](int n) { return n < 0; });
  if (negative != lengths + batch) {
    return absl::InvalidArgumentError(
        absl::StrCat("host_lengths[", negative - lengths, "]: got ", *negative));
  }
  return absl::OkStatus();
}

absl::Status Decoder::Plan(const int* lengths, int batch, int heads, int page) {
  lengths_.clear();  // no plan exists until all steps have succeeded
  if (absl::Status s = CheckSizes(lengths, batch, heads, page); !s.ok()) return s;
  heads_ = heads;
  page_ = page;
  std::vector<scheduler::PlanSegment> requests;
  for (int i = 0; i < batch; ++i) requests.push_back({1, lengths[i], heads, true});
  kernels::AttentionDesc desc;
  desc.geometry = {heads, 512, 64, 128, 128};
  auto plan = planner_.Build(requests, backend_->Traits(desc), *buffers_);
  if (!plan.ok()) return plan.status();

  used_ = 0;
  key_ = Key();
  auto indptr = Upload(plan->work_indptr);
  auto work = Upload(plan->work_info);
  auto reduce_indptr = Upload(plan->reduce_indptr);
  auto final_map = Upload(plan->reduce_final_map);
  auto partial_map = Upload(plan->reduce_partial_map);
  for (const absl::Status& status : {indptr.status(), work.status(), reduce_indptr.status(),
                                     final_map.status(), partial_map.status()}) {
    if (!status.ok()) return status;
  }
  auto records = Take(int64_t{batch} * static_cast<int64_t>(sizeof(kernels::SegmentRecord)));
  if (!records.ok()) return records.status();
  requests_ = *records;
  if (absl::Status s = runtime_->Synchronize(stream_); !s.ok()) return s;

  constexpr kernels::hip::KvFormat kFormat = kernels::hip::KvFormat::kBf16;
  constexpr kernels::hip::DType kProducts = kernels::hip::DType::kBf16;
  constexpr kernels::AttentionKind kKind = kernels::AttentionKind::kDense;
  const int32_t largest = kernels::hip::MostRows(*arch_, kFormat, kProducts, kKind);
  const int32_t rows = std::min(heads, largest * arch_->blocks_per_unit);
  int32_t busy = 0, last = 0;
  for (size_t i = 0; i + 1 < plan->work_indptr.size(); ++i) {
    if (plan->work_indptr[i + 1] == plan->work_indptr[i]) continue;
    ++busy;
    last = static_cast<int32_t>(i) + 1;
  }
  variant_ =
      kernels::hip::ChooseAttend(*arch_, kFormat, kProducts, kKind, rows, busy, runtime_->units());
  attend_args_ = {};
  attend_args_.work_indptr = reinterpret_cast<const int32_t*>(*indptr);
  attend_args_.work_info = reinterpret_cast<const kernels::WorkInfo*>(*work);
  attend_args_.partial_o = partial_o_.As<float>();
  attend_args_.partial_lse = partial_lse_.As<float>();
  attend_args_.segments = reinterpret_cast<const kernels::SegmentRecord*>(requests_);
  attend_args_.segment_count = batch;
  attend_args_.item_count = static_cast<int32_t>(plan->work_info.size());
  attend_args_.granule_bytes = int64_t{page} * kRowDim * 2;
  attend_args_.blocks_per_unit =
      (rows + arch_->attend[variant_].rows - 1) / arch_->attend[variant_].rows;
  attend_args_.blocks = last * attend_args_.blocks_per_unit;
  attend_args_.xcds = kernels::hip::XcdsOf(*arch_, runtime_->units());
  attend_shape_ = {};
  attend_shape_.grid_x = static_cast<uint32_t>(attend_args_.blocks);
  attend_shape_.threads = static_cast<uint32_t>(arch_->attend[variant_].threads);
  attend_shape_.shared_bytes = arch_->attend[variant_].shared_bytes;
  combine_args_ = {};
  combine_args_.segments = attend_args_.segments;
  combine_args_.reduce_indptr = reinterpret_cast<const int32_t*>(*reduce_indptr);
  combine_args_.reduce_final_map = reinterpret_cast<const kernels::ReduceTile*>(*final_map);
  combine_args_.reduce_partial_map = reinterpret_cast<const int32_t*>(*partial_map);
  ShapeCombine(*plan, rows, busy);
  lengths_.assign(lengths, lengths + batch);
  return absl::OkStatus();
}

void Decoder::ShapeCombine(const kernels::PlanView& plan, int32_t rows, int32_t busy) {
  combine_args_.partial_o = partial_o_.As<float>();
  combine_args_.partial_lse = partial_lse_.As<float>();
  combine_args_.o_dim = 512;
  int32_t parts = 0;
  for (size_t i = 0; i + 1 < plan.reduce_indptr.size(); ++i) {
    parts = std::max(parts, plan.reduce_indptr[i + 1] - plan.reduce_indptr[i]);
  }
  const int64_t tiles = static_cast<int64_t>(plan.reduce_final_map.size());
  combine_args_.waves_per_row =
      kernels::hip::CombineWavesPerRow(*arch_, tiles * rows, parts, runtime_->units());
  combine_args_.column_blocks = kernels::hip::CombineColumnBlocks(
      *arch_, tiles * rows, combine_args_.waves_per_row, combine_args_.o_dim, runtime_->units());
  combine_args_.waves_per_row = kernels::hip::CombineWavesBeside(
      *arch_, tiles * rows, parts, combine_args_.waves_per_row, combine_args_.column_blocks,
      std::max(0, runtime_->units() - busy * attend_args_.blocks_per_unit));
  combine_args_.order = arch_->attend[variant_].order;
  const int32_t rows_per_block = arch_->waves_per_block / combine_args_.waves_per_row;
  combine_shape_ = {};
  combine_shape_.grid_x = static_cast<uint32_t>(tiles);
  combine_shape_.grid_y = static_cast<uint32_t>((rows + rows_per_block - 1) / rows_per_block *
                                                combine_args_.column_blocks);
  combine_shape_.threads = 256;
  combine_shape_.shared_bytes = arch_->combine_shared_bytes;
  combine_shape_.overlap_predecessor = true;
}

absl::Status Decoder::UploadRequests(const Key& key, kernels::hip::Stream stream) {
  std::vector<kernels::SegmentRecord> records(lengths_.size());
  for (size_t i = 0; i < records.size(); ++i) {
    kernels::SegmentRecord& r = records[i];
    const auto first = static_cast<int64_t>(i) * heads_;
    r = {};
    r.q = static_cast<const uint16_t*>(key.q) + first * kRowDim;
    r.o = static_cast<uint16_t*>(const_cast<void*>(key.out)) + first * 512;
    r.lse = static_cast<float*>(const_cast<void*>(key.lse)) + first;
    r.q_head_stride = kRowDim;
    r.q_row_stride = int64_t{heads_} * kRowDim;
    r.o_head_stride = 512;
    r.o_row_stride = int64_t{heads_} * 512;
    r.lse_head_stride = 1;
    r.lse_row_stride = heads_;
    r.page_table = static_cast<int64_t>(i) * key.max_blocks;
    r.row_stride = kRowDim * 2;
    r.page_size = page_;
    r.q_rows = 1;
    r.kv_rows = lengths_[i];
    r.num_heads = heads_;
    r.softmax_scale = key.scale;
    r.causal = 1;
  }
  absl::Status s = runtime_->CopyIn(
      requests_, records.data(),
      static_cast<int64_t>(records.size() * sizeof(kernels::SegmentRecord)), stream);
  if (s.ok()) s = runtime_->Synchronize(stream);
  if (s.ok()) key_ = key;
  return s;
}

absl::Status Decoder::Run(const Key& key, const void* kv, const int* table,
                          kernels::hip::Stream stream) {
  if (lengths_.empty()) return absl::FailedPreconditionError("mla_decode_plan comes first");
  const auto batch = static_cast<int>(lengths_.size());
  if (key.batch != batch || key.heads != heads_ || key.page != page_) {
    return absl::FailedPreconditionError(absl::StrCat("batch ", key.batch, ", heads ", key.heads,
                                                      ", page ", key.page, "; planned: ", batch,
                                                      ", ", heads_, ", ", page_));
  }
  if (key.q == nullptr || kv == nullptr || table == nullptr || key.out == nullptr ||
      key.lse == nullptr) {
    return absl::InvalidArgumentError("q, kv, table, out, lse: got null");
  }
  if (key != key_) {
    if (absl::Status s = UploadRequests(key, stream); !s.ok()) return s;
  }
  attend_args_.pool = static_cast<const uint8_t*>(kv);
  attend_args_.page_tables = reinterpret_cast<const uint32_t*>(table);
  absl::Status s = runtime_->Launch(attend_[variant_], attend_shape_, &attend_args_, stream);
  if (!s.ok() || combine_shape_.grid_x == 0) return s;
  return runtime_->Launch(combine_, combine_shape_, &combine_args_, stream);
}

Decoder* TheDecoder() {
  static std::unique_ptr<Decoder>* decoder = [] {
    auto made = Decoder::Create();
    if (!made.ok()) {
      std::fprintf(stderr, "mla_decode: %s\n", made.status().ToString().c_str());
      return new std::unique_ptr<Decoder>();
    }
    return new std::unique_ptr<Decoder>(*std::move(made));
  }();
  return decoder->get();
}

int Report(const absl::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "mla_decode: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace

kernels::hip::HipBackendOptions& DecodeOptions() {
  static kernels::hip::HipBackendOptions& options = *new kernels::hip::HipBackendOptions;
  return options;
}

}  // namespace mla::bench

int mla_decode_plan(const int* host_lengths, int batch, int heads, int page) {
  mla::bench::Decoder* decoder = mla::bench::TheDecoder();
  if (decoder == nullptr) return 1;
  return mla::bench::Report(decoder->Plan(host_lengths, batch, heads, page));
}

int mla_decode(const void* q, const void* kv, const int* table, const int*, void* out, float* lse,
               int batch, int heads, int max_blocks, int, int page, float scale, void* stream) {
  mla::bench::Decoder* decoder = mla::bench::TheDecoder();
  if (decoder == nullptr) return 1;
  return mla::bench::Report(decoder->Run({q, out, lse, batch, heads, max_blocks, page, scale}, kv,
                                         table, static_cast<mla::kernels::hip::Stream>(stream)));
}
