#include "server/attend/attend_message.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/wire/fp8/fp8_tensor.h"
#include "server/grpc/grpc_status.h"

namespace mla::server {
namespace {

// Returns the layout of inputs of these bytes and of the attend's outputs.
wire::AttendLayout LayoutOf(int64_t kv, int64_t q, int64_t lists, const AttendSizes& sizes) {
  return wire::AttendLayout({.kv = static_cast<uint64_t>(kv),
                             .q = static_cast<uint64_t>(q),
                             .lists = static_cast<uint64_t>(lists),
                             .o = static_cast<uint64_t>(sizes.o_bytes),
                             .lse = static_cast<uint64_t>(sizes.lse_bytes),
                             .lists_out = static_cast<uint64_t>(sizes.lists_out_bytes)});
}

wire::BadFp8Scale Decode(const wire::Fp8Tensor& tensor, const std::byte* sent, kernels::DType dtype,
                         std::byte* destination) {
  return dtype == kernels::DType::kF32
             ? wire::DecodeFp8Tensor(tensor, sent, reinterpret_cast<float*>(destination))
             : wire::DecodeFp8Tensor(tensor, sent, reinterpret_cast<uint16_t*>(destination));
}

absl::Status RefuseScale(const std::string& vector, const wire::BadFp8Scale& bad) {
  return RefuseField("payload", absl::StrCat(vector, ", scale ", bad.part, ": ", bad.scale),
                     "scales of 2^-100 to 2^72", "bad_scale");
}

uint32_t Micros(int64_t ns) {
  return static_cast<uint32_t>(std::clamp<int64_t>(ns / 1000, 0, UINT32_MAX));
}

}  // namespace

absl::Status TensorMemory::Refusal(uint64_t offset, uint64_t length, const char* prefix,
                                   const char* field) const {
  if (offset % wire::kSharedAlignment != 0) {
    return RefuseField(absl::StrCat(prefix, field), absl::StrCat(offset),
                       absl::StrCat("a multiple of ", wire::kSharedAlignment), "misaligned");
  }
  return RefuseField(absl::StrCat(prefix, field), absl::StrCat(offset),
                     absl::StrCat("such that ", length, " bytes lie within ", begin, "..", end));
}

SentLists AttendMessage::Lists() const {
  return {attend.row_begin,   attend.row_count, sizes.list_width,
          sizes.list_entries, sizes.list_top_k, sizes.list_ratio};
}

wire::AttendLayout AttendMessage::SentLayout() const {
  return LayoutOf(sizes.kv_sent(), sizes.q_sent(), sizes.list_bytes, sizes);
}

StagedLayout AttendMessage::Staged() const {
  const auto lists = sizes.list_bytes > 0 ? static_cast<int64_t>(Lists().bytes()) : 0;
  StagedLayout staged{LayoutOf(sizes.kv_bytes, sizes.q_bytes, lists, sizes)};
  wire::TensorRow& inputs = staged.tensors.inputs;
  if (sizes.selects) {
    staged.index_inputs = inputs.Append(static_cast<uint64_t>(sizes.list_bytes));
  }
  staged.sent_fp8 =
      inputs.Append(static_cast<uint64_t>(std::max(sizes.kv_fp8.bytes(), sizes.q_fp8.bytes())));
  return staged;
}

void AttendMessage::PointOutputs(std::byte* memory, const wire::AttendLayout& layout) {
  if (sizes.o_bytes > 0) attend.o = memory;
  if (sizes.lse_bytes > 0) attend.lse = reinterpret_cast<float*>(memory + layout.lse);
  if (sizes.lists_out_bytes > 0) {
    attend.lists_out = reinterpret_cast<int32_t*>(memory + layout.lists_out);
  }
}

absl::Status AttendMessage::PointInto(const TensorMemory& memory, const wire::AttendLayout& layout,
                                      uint64_t in_offset, uint64_t out_offset, const char* prefix) {
  MLA_RETURN_IF_ERROR(memory.Check(in_offset, layout.inputs.bytes(), prefix, "in_offset"));
  MLA_RETURN_IF_ERROR(memory.Check(out_offset, layout.outputs.bytes(), prefix, "out_offset"));
  // An offset of no bytes is not checked.
  std::byte* const in = layout.inputs.bytes() > 0 ? memory.base + in_offset : nullptr;
  std::byte* const out = layout.outputs.bytes() > 0 ? memory.base + out_offset : nullptr;
  if (sizes.kv_bytes > 0) attend.kv = in;
  if (sizes.q_bytes > 0) attend.q = in + layout.q;
  if (sizes.list_bytes > 0) sent_lists = in + layout.lists;
  PointOutputs(out, layout);
  return absl::OkStatus();
}

absl::Status AttendMessage::PointIntoDevice(const kernels::SharedDeviceMemory& memory,
                                            const wire::AttendLayout& layout, uint64_t in_offset,
                                            uint64_t out_offset) {
  if (sizes.list_bytes > 0 || sizes.lists_out_bytes > 0) {
    return RefuseField("flags", "index lists of tensors in device memory",
                       "index lists of tensors in the region");
  }
  if (sizes.kv_fp8.vectors > 0 || sizes.q_fp8.vectors > 0) {
    return RefuseField("flags", "tensors of 8 bits in device memory",
                       "tensors of 8 bits in the region");
  }
  if (attend.sized_window > 0) {
    return RefuseField("flags", "tensors in device memory of a model with a window",
                       "tensors in the region");
  }
  const std::span<std::byte> bytes = memory.bytes();
  attend.on_device = true;
  return PointInto({bytes.data(), 0, bytes.size()}, layout, in_offset, out_offset, "");
}

absl::Status AttendMessage::DecodeKv(const std::byte* sent, std::byte* target) {
  attend.kv = target;
  const wire::BadFp8Scale bad = Decode(sizes.kv_fp8, sent, attend.q_dtype, target);
  if (bad.vector < 0) return absl::OkStatus();
  return RefuseScale(absl::StrCat("kv row ", bad.vector), bad);
}

absl::Status AttendMessage::DecodeQueries(const std::byte* sent, std::byte* target) {
  attend.q = target;
  const wire::BadFp8Scale bad = Decode(sizes.q_fp8, sent, attend.q_dtype, target);
  if (bad.vector < 0) return absl::OkStatus();
  return RefuseScale(absl::StrCat("q row ", bad.vector / attend.num_heads, ", head ",
                                  bad.vector % attend.num_heads),
                     bad);
}

void AttendMessage::FillReply(uint64_t boot_id, v1::AttendStreamReply* reply) const {
  // An attend's reply sets every field below, so a reply of that kind can be reused without
  // clearing it.
  const bool attended = answer.ok() && kind == scheduler::RequestKind::kAttend;
  if (!attended || !reply->has_attend()) reply->Clear();
  reply->set_tag(tag);
  reply->set_boot_id(boot_id);
  if (!answer.ok()) {
    v1::StepError* error = reply->mutable_error();
    error->set_code(static_cast<int32_t>(answer.code()));
    error->set_message(std::string(answer.message()));
    *error->mutable_detail() = ToErrorDetail(answer);
    if (trace.on()) {
      error->mutable_detail()->set_trace_id(TraceIdText(trace.step.trace));
    }
    error->set_step_aborted(step_aborted);
    return;
  }
  switch (kind) {
    case scheduler::RequestKind::kBeginStep: {
      v1::BeginStepReply* body = reply->mutable_begin_step();
      body->set_total_rows(static_cast<uint32_t>(total_rows));
      body->set_lease_ms(static_cast<uint32_t>(lease_ms));
      body->set_joined(static_cast<uint32_t>(joined));
      return;
    }
    case scheduler::RequestKind::kEndStep:
      reply->mutable_end_step()->mutable_lengths()->Add(lengths.begin(), lengths.end());
      return;
    case scheduler::RequestKind::kAbortStep:
      reply->mutable_abort_step();
      return;
    case scheduler::RequestKind::kAttend:
      break;
  }
  const scheduler::AttendArgs& args = attend;
  v1::AttendReply* body = reply->mutable_attend();
  body->set_row_begin(static_cast<uint32_t>(args.row_begin));
  body->set_row_count(static_cast<uint32_t>(args.row_count));
  body->set_head_offset(static_cast<uint32_t>(args.head_offset));
  body->set_num_heads(static_cast<uint32_t>(args.num_heads));
  body->set_layer(static_cast<uint32_t>(args.layer));
  body->set_o_dtype(args.o_dtype == kernels::DType::kBf16 ? v1::DTYPE_BF16 : v1::DTYPE_F32);
  v1::Timings* times = reply->mutable_timings();
  times->set_queue_us(Micros(timings.queue_ns));
  times->set_plan_us(Micros(timings.plan_ns));
  times->set_kernel_us(Micros(timings.kernel_ns));
  times->set_write_us(Micros(SteadyNanos() - answered_ns));
  times->set_launch_requests(static_cast<uint32_t>(timings.launch_requests));
  times->set_launch_layers(static_cast<uint32_t>(timings.launch_layers));
  times->set_launch_clients(static_cast<uint32_t>(timings.launch_clients));
  times->set_plan_reused(timings.plan_reused);
}

void AttendMessage::Done(const absl::Status& status) {
  answer = status;
  owner->OnAnswered(this);
}

void AttendMessage::Unref() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  Recycle();
  // This may be the last reference to the pool, which must survive Return.
  const std::shared_ptr<AttendMessagePool> home = std::move(home_);
  home->Return(this);
}

void AttendMessage::Recycle() {
  owner = nullptr;
  tag = 0;
  // The count is returned before the memory, because waiting streams try again when memory comes
  // back.
  if (staged > 0) home_->tenants().Return(*tenant, scheduler::Resource::kStagedBytes, staged);
  staged = 0;
  input.Reset();
  output.Reset();
  slices.clear();
  fragments.clear();
  region.reset();
  reply_area = {};
  sizes = {};
  sent_lists = nullptr;
  answer = absl::OkStatus();
  reserved_bytes = 0;
  ring_index = 0;
  begin_order = 0;
  answered_ns = 0;
  trace = {};
  next = nullptr;
  Reset();
}

AttendMessage* AttendMessagePool::Take() {
  const MutexLock lock(mutex_);
  AttendMessage* message = free_;
  if (message != nullptr) {
    free_ = std::exchange(message->next, nullptr);
  } else {
    all_.push_back(std::make_unique<AttendMessage>());
    message = all_.back().get();
  }
  message->references_.store(1, std::memory_order_relaxed);
  message->home_ = shared_from_this();
  return message;
}

absl::Status AttendMessagePool::TakeStaging(size_t in, size_t out, AttendMessage* message,
                                            bool* stalled) {
  using scheduler::Resource;
  scheduler::Tenant& tenant = *message->tenant;
  const auto staged =
      static_cast<int64_t>(StagingPool::BlockBytes(in) + StagingPool::BlockBytes(out));
  if (staged > tenant.bound(Resource::kStagedBytes)) {  // waiting would not help
    return tenants_->Refusal(tenant, Resource::kStagedBytes, staged, "payload");
  }
  *stalled = !tenants_->TryTake(tenant, Resource::kStagedBytes, staged);
  if (*stalled) return absl::OkStatus();
  message->staged = staged;
  message->input = staging_.Take(in);
  message->output = staging_.Take(out);
  *stalled = !message->input || (out > 0 && !message->output);
  return absl::OkStatus();
}

void AttendMessagePool::Return(AttendMessage* message) {
  const MutexLock lock(mutex_);
  message->next = free_;
  free_ = message;
}

}  // namespace mla::server
