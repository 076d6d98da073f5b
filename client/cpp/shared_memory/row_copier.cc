#include "client/cpp/shared_memory/row_copier.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace mla::client {
namespace {

constexpr uint64_t kPiece = 16;  // bytes that a thread copies at a time
constexpr unsigned kThreads = 256;
constexpr unsigned kMostBlocks = 1024;  // of one copy
constexpr size_t kMostCopies = 8;
constexpr int kMemoryTypeAttribute = 2, kOrdinalAttribute = 9;  // CUpointer_attribute
constexpr unsigned kDeviceMemory = 2;                           // CUmemorytype

// One copy in the layout in which the kernel reads it.
struct Job {
  const void* from = nullptr;
  void* to = nullptr;
  uint64_t from_pitch = 0, to_pitch = 0;
  uint32_t pieces = 0;  // of a row
  uint32_t rows = 0;
};
static_assert(sizeof(Job) == 40);
using Jobs = std::array<Job, kMostCopies>;
static_assert(sizeof(Jobs) == 320);

// Blocks (x, k) copy job k: thread i takes pieces i, i + all threads of the job, ...
// PTX of the oldest GPUs that can share memory between processes, compiled by the driver.
constexpr char kKernel[] = R"(
.version 6.3
.target sm_70
.address_size 64
.visible .entry mla_copy_rows(.param .align 8 .b8 jobs[320])
{
  .reg .pred %done, %more;
  .reg .b32 %piece, %pieces, %rows, %all, %threads, %row, %rest, %x, %y, %z, %w;
  .reg .b64 %job, %offset, %from, %to, %from_pitch, %to_pitch, %wide;

  mov.b64 %job, jobs;
  mov.u32 %row, %ctaid.y;
  mul.wide.u32 %offset, %row, 40;
  add.s64 %job, %job, %offset;
  ld.param.u64 %from, [%job];
  ld.param.u64 %to, [%job+8];
  ld.param.u64 %from_pitch, [%job+16];
  ld.param.u64 %to_pitch, [%job+24];
  ld.param.u32 %pieces, [%job+32];
  ld.param.u32 %rows, [%job+36];
  cvta.to.global.u64 %from, %from;
  cvta.to.global.u64 %to, %to;
  mul.lo.u32 %all, %pieces, %rows;
  mov.u32 %piece, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %rest, %tid.x;
  mad.lo.u32 %piece, %piece, %threads, %rest;
  mov.u32 %rest, %nctaid.x;
  mul.lo.u32 %threads, %threads, %rest;
  setp.ge.u32 %done, %piece, %all;
  @%done bra END;
NEXT:
  div.u32 %row, %piece, %pieces;
  mul.lo.u32 %rest, %row, %pieces;
  sub.u32 %rest, %piece, %rest;
  cvt.u64.u32 %wide, %row;
  mul.lo.u64 %offset, %wide, %from_pitch;
  add.u64 %offset, %offset, %from;
  mad.wide.u32 %offset, %rest, 16, %offset;
  ld.global.v4.u32 {%x, %y, %z, %w}, [%offset];
  mul.lo.u64 %offset, %wide, %to_pitch;
  add.u64 %offset, %offset, %to;
  mad.wide.u32 %offset, %rest, 16, %offset;
  st.global.v4.u32 [%offset], {%x, %y, %z, %w};
  add.u32 %piece, %piece, %threads;
  setp.lt.u32 %more, %piece, %all;
  @%more bra NEXT;
END:
  ret;
}
)";

bool IsAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kPiece == 0; }

}  // namespace

std::unique_ptr<RowCopier> RowCopier::Create(const DeviceRuntime& api, int device) {
  if (api.nvidia_load_module == nullptr || api.nvidia_unload_module == nullptr ||
      api.nvidia_function == nullptr || api.nvidia_launch == nullptr ||
      api.nvidia_pointer_attributes == nullptr) {
    return nullptr;
  }
  std::unique_ptr<RowCopier> copier(new RowCopier(api, device));
  if (api.nvidia_load_module(&copier->module_, kKernel) != 0) return nullptr;
  if (api.nvidia_function(&copier->kernel_, copier->module_, "mla_copy_rows") != 0) return nullptr;
  const std::array<DeviceCopy, 1> nothing{};
  void* stream = nullptr;
  if (api.stream_create(&stream, DeviceRuntime::kStreamNonBlocking) != 0) return nullptr;
  const bool ran = copier->Copy(nothing, stream) == 0 && api.stream_finish(stream) == 0;
  (void)api.stream_destroy(stream);
  return ran ? std::move(copier) : nullptr;
}

RowCopier::~RowCopier() {
  if (module_ != nullptr) (void)api_.nvidia_unload_module(module_);
}

bool RowCopier::IsHere(const void* memory) const {
  std::array<int, 2> wanted = {kMemoryTypeAttribute, kOrdinalAttribute};
  unsigned type = 0;
  int ordinal = -1;
  std::array<void*, 2> values = {&type, &ordinal};
  return api_.nvidia_pointer_attributes(wanted.size(), wanted.data(), values.data(), memory) == 0 &&
         type == kDeviceMemory && ordinal == device_;
}

bool RowCopier::Takes(std::span<const DeviceCopy> copies) const {
  if (copies.size() < 2 || copies.size() > kMostCopies) return false;
  return std::all_of(copies.begin(), copies.end(), [this](const DeviceCopy& copy) {
    const bool pieces = copy.width % kPiece == 0 && copy.from_pitch % kPiece == 0 &&
                        copy.to_pitch % kPiece == 0 && IsAligned(copy.from) && IsAligned(copy.to);
    // The kernel counts pieces in 32 bits, and the number of the last piece plus a turn of all
    // threads must fit.
    const uint64_t per_row = copy.width / kPiece;
    const bool countable = per_row <= INT32_MAX && copy.rows <= INT32_MAX &&
                           (copy.rows == 0 || per_row <= INT32_MAX / copy.rows);
    return pieces && countable && (copy.from_here || IsHere(copy.from));
  });
}

int RowCopier::Copy(std::span<const DeviceCopy> copies, void* stream) const {
  Jobs jobs;
  uint64_t largest = 1;
  for (size_t i = 0; i < copies.size(); ++i) {
    const DeviceCopy& copy = copies[i];
    jobs[i] = {copy.from,
               copy.to,
               copy.from_pitch,
               copy.to_pitch,
               static_cast<uint32_t>(copy.width / kPiece),
               static_cast<uint32_t>(copy.rows)};
    largest = std::max(largest, copy.width / kPiece * copy.rows);
  }
  const auto blocks =
      static_cast<unsigned>(std::min<uint64_t>(kMostBlocks, (largest + kThreads - 1) / kThreads));
  std::array<void*, 1> parameters = {&jobs};
  return api_.nvidia_launch(kernel_, blocks, static_cast<unsigned>(copies.size()), 1, kThreads, 1,
                            1, 0, stream, parameters.data(), nullptr);
}

}  // namespace mla::client
