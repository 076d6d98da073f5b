// The decode kernels behind a plain C entry point, for timing side by side with other libraries in
// one process. Page tables hold block numbers of [blocks, page, 576] bf16 here, which the kernels
// take through their granule argument.
//
//   int mla_decode_plan(const int* host_lengths, int batch, int heads, int page);
//   int mla_decode(q, kv, table, lengths, out, lse, batch, heads, max_blocks, blocks, page, scale,
//                  stream);
//
// mla_decode_plan plans for the batch on the host and uploads; mla_decode uploads the request
// records when an address has changed since the last call, and launches. 0 means success; errors go
// to stderr. One thread.
#include <cstdio>
#include <memory>
#include <vector>

#include "kernels/hip/hip_backend.h"
#include "scheduler/metadata_buffers.h"
#include "scheduler/planner.h"
#include "scheduler/testing/heap_buffers.h"

namespace mla::bench {
namespace {

using gpu::DeviceBuffer;
using gpu::DevicePtr;

constexpr int32_t kRowDim = 576;

struct Key {  // what the uploaded records were made from
  const void *q = nullptr, *out = nullptr, *lse = nullptr;
  int max_blocks = 0;
  float scale = 0.0f;
  friend bool operator==(const Key&, const Key&) = default;
};

class Decoder {
 public:
  static absl::StatusOr<std::unique_ptr<Decoder>> Create();
  absl::Status Plan(const int* lengths, int batch, int heads, int page);
  absl::Status Run(const Key& key, const void* kv, const int* table, gpu::Stream stream);

 private:
  template <class T>
  absl::StatusOr<DevicePtr> Upload(std::span<const T> values);
  absl::Status UploadRequests(const Key& key, gpu::Stream stream);

  std::unique_ptr<gpu::HipBackend> backend_;
  gpu::GpuRuntime* runtime_ = nullptr;
  const gpu::ArchTraits* arch_ = nullptr;
  gpu::Module module_ = nullptr;
  std::vector<gpu::Function> attend_;
  gpu::Function combine_ = nullptr;
  scheduler::Planner planner_;
  std::unique_ptr<scheduler::MetadataBuffers> buffers_;
  DeviceBuffer memory_, partial_o_, partial_lse_;
  int64_t used_ = 0;
  gpu::Stream stream_ = nullptr;

  std::vector<int32_t> lengths_;
  int heads_ = 0, page_ = 0;
  gpu::AttendArgs attend_args_ = {};
  gpu::CombineArgs combine_args_ = {};
  gpu::LaunchShape attend_shape_, combine_shape_;
  size_t variant_ = 0;
  Key key_;
  DevicePtr requests_ = 0;
};

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create() {
  auto self = std::make_unique<Decoder>();
  gpu::HipBackendOptions options;
  options.vendor = gpu::Vendor::kNvidia;
  auto backend = gpu::HipBackend::Create(options);
  if (!backend.ok()) return backend.status();
  self->backend_ = *std::move(backend);
  self->runtime_ = &self->backend_->runtime();
  self->arch_ = gpu::FindArchTraits(self->runtime_->arch());
  self->stream_ = self->backend_->compute_stream();
  for (const gpu::KernelImage& image : gpu::BuiltInKernelImages()) {
    if (image.arch != self->runtime_->arch()) continue;
    auto module = self->runtime_->Load(image.bytes);
    if (!module.ok()) return module.status();
    self->module_ = *module;
  }
  for (const gpu::AttendVariant& v : self->arch_->attend) {
    if (v.rows == 0) continue;
    const std::string name = gpu::kAttendPrefix + std::to_string(v.rows);
    auto f = self->runtime_->Find(self->module_, name.c_str());
    if (!f.ok()) return f.status();
    if (absl::Status s = self->runtime_->AllowSharedBytes(*f, v.shared_bytes); !s.ok()) return s;
    self->attend_.push_back(*f);
  }
  auto combine = self->runtime_->Find(self->module_, gpu::kCombineKernel);
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

template <class T>
absl::StatusOr<DevicePtr> Decoder::Upload(std::span<const T> values) {
  const DevicePtr at = memory_.at() + static_cast<uint64_t>(used_);
  const auto bytes = static_cast<int64_t>(values.size_bytes());
  used_ += gpu::AlignRegion(bytes);
  if (used_ > memory_.bytes()) return absl::ResourceExhaustedError("bench metadata");
  if (bytes == 0) return at;
  if (absl::Status s = runtime_->CopyIn(at, values.data(), bytes, stream_); !s.ok()) return s;
  return at;
}

absl::Status Decoder::Plan(const int* lengths, int batch, int heads, int page) {
  lengths_.assign(lengths, lengths + batch);
  heads_ = heads;
  page_ = page;
  std::vector<scheduler::PlanRequest> requests;
  for (const int n : lengths_) requests.push_back({1, n, heads, true});
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
  requests_ = memory_.at() + static_cast<uint64_t>(used_);
  if (!partial_map.ok()) return partial_map.status();
  if (absl::Status s = runtime_->Synchronize(stream_); !s.ok()) return s;

  const int32_t largest = arch_->attend[attend_.size() - 1].rows;
  const int32_t rows = std::min(heads, largest * arch_->blocks_per_unit);
  int32_t busy = 0, last = 0;
  for (size_t i = 0; i + 1 < plan->work_indptr.size(); ++i) {
    if (plan->work_indptr[i + 1] == plan->work_indptr[i]) continue;
    ++busy;
    last = static_cast<int32_t>(i) + 1;
  }
  variant_ = gpu::ChooseAttend(*arch_, rows, busy, runtime_->units());
  attend_args_ = {};
  attend_args_.work_indptr = reinterpret_cast<const int32_t*>(*indptr);
  attend_args_.work_info = reinterpret_cast<const kernels::WorkInfo*>(*work);
  attend_args_.partial_o = partial_o_.As<float>();
  attend_args_.partial_lse = partial_lse_.As<float>();
  attend_args_.requests = reinterpret_cast<const kernels::RequestRecord*>(requests_);
  attend_args_.granule_bytes = int64_t{page} * kRowDim * 2;
  attend_args_.blocks_per_unit =
      (rows + arch_->attend[variant_].rows - 1) / arch_->attend[variant_].rows;
  attend_shape_ = {};
  attend_shape_.grid_x = static_cast<uint32_t>(last * attend_args_.blocks_per_unit);
  attend_shape_.threads = static_cast<uint32_t>(arch_->attend[variant_].threads);
  attend_shape_.shared_bytes = arch_->attend[variant_].shared_bytes;
  combine_args_ = {};
  combine_args_.requests = attend_args_.requests;
  combine_args_.reduce_indptr = reinterpret_cast<const int32_t*>(*reduce_indptr);
  combine_args_.reduce_final_map = reinterpret_cast<const kernels::ReduceTile*>(*final_map);
  combine_args_.reduce_partial_map = reinterpret_cast<const int32_t*>(*partial_map);
  combine_args_.partial_o = partial_o_.As<float>();
  combine_args_.partial_lse = partial_lse_.As<float>();
  combine_args_.o_dim = 512;
  int32_t parts = 0;
  for (size_t i = 0; i + 1 < plan->reduce_indptr.size(); ++i) {
    parts = std::max(parts, plan->reduce_indptr[i + 1] - plan->reduce_indptr[i]);
  }
  const int64_t tiles = static_cast<int64_t>(plan->reduce_final_map.size());
  combine_args_.waves_per_row =
      gpu::CombineWavesPerRow(*arch_, tiles * rows, parts, runtime_->units());
  combine_args_.column_blocks = gpu::CombineColumnBlocks(
      *arch_, tiles * rows, combine_args_.waves_per_row, combine_args_.o_dim, runtime_->units());
  combine_args_.waves_per_row = gpu::CombineWavesBeside(
      *arch_, tiles * rows, parts, combine_args_.waves_per_row, combine_args_.column_blocks,
      std::max(0, runtime_->units() - busy * attend_args_.blocks_per_unit));
  combine_args_.exchanged = arch_->attend[variant_].exchanged_partials;
  const int32_t rows_per_block = arch_->waves_per_block / combine_args_.waves_per_row;
  combine_shape_ = {};
  combine_shape_.grid_x = static_cast<uint32_t>(tiles);
  combine_shape_.grid_y = static_cast<uint32_t>((rows + rows_per_block - 1) / rows_per_block *
                                                combine_args_.column_blocks);
  combine_shape_.threads = 256;
  combine_shape_.shared_bytes = arch_->combine_shared_bytes;
  combine_shape_.overlap_predecessor = true;
  return absl::OkStatus();
}

absl::Status Decoder::UploadRequests(const Key& key, gpu::Stream stream) {
  std::vector<kernels::RequestRecord> records(lengths_.size());
  for (size_t i = 0; i < records.size(); ++i) {
    kernels::RequestRecord& r = records[i];
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
      static_cast<int64_t>(records.size() * sizeof(kernels::RequestRecord)), stream);
  if (s.ok()) s = runtime_->Synchronize(stream);
  if (s.ok()) key_ = key;
  return s;
}

absl::Status Decoder::Run(const Key& key, const void* kv, const int* table, gpu::Stream stream) {
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
}  // namespace mla::bench

extern "C" __attribute__((visibility("default"))) int mla_decode_plan(const int* host_lengths,
                                                                      int batch, int heads,
                                                                      int page) {
  mla::bench::Decoder* decoder = mla::bench::TheDecoder();
  if (decoder == nullptr) return 1;
  return mla::bench::Report(decoder->Plan(host_lengths, batch, heads, page));
}

extern "C" __attribute__((visibility("default"))) int mla_decode(const void* q, const void* kv,
                                                                 const int* table, const int*,
                                                                 void* out, float* lse, int, int,
                                                                 int max_blocks, int, int,
                                                                 float scale, void* stream) {
  mla::bench::Decoder* decoder = mla::bench::TheDecoder();
  if (decoder == nullptr) return 1;
  return mla::bench::Report(decoder->Run({q, out, lse, max_blocks, scale}, kv, table,
                                         static_cast<mla::gpu::Stream>(stream)));
}
