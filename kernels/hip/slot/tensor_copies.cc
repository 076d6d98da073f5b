#include "kernels/hip/slot/tensor_copies.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

DevicePtr AddressOf(const void* at) { return reinterpret_cast<DevicePtr>(at); }

absl::Status NotPinned(const char* what) {
  return absl::InternalError(
      absl::StrCat("launch: an ", what, " in place is neither pinned nor shared"));
}

template <class Tensor>
int64_t CopiedBytes(std::span<const Tensor> tensors) {
  int64_t bytes = 0;
  for (const Tensor& t : tensors) {
    if (!t.in_place()) bytes += t.rows * t.row_bytes;
  }
  return bytes;
}

template <class Tensor>
int64_t Pieces(std::span<const Tensor> tensors) {
  int64_t pieces = 0;
  for (const Tensor& t : tensors) {
    if (!t.in_place()) pieces += t.pitch == t.row_bytes ? 1 : t.rows;
  }
  return pieces;
}

// Adds moves for rows that lie `to_pitch` and `from_pitch` bytes apart.
void AddPieces(std::vector<TensorMove>& moves, DevicePtr target, int64_t to_pitch, DevicePtr from,
               int64_t from_pitch, int64_t row_bytes, int64_t rows) {
  if (row_bytes == 0 || rows == 0) return;
  if (rows == 1 || (to_pitch == row_bytes && from_pitch == row_bytes)) {
    moves.push_back({target, from, rows * row_bytes});
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    moves.push_back({target + static_cast<uint64_t>(row * to_pitch),
                     from + static_cast<uint64_t>(row * from_pitch), row_bytes});
  }
}

// End of the tensor's rows in the staged region.
template <class Tensor>
int64_t EndOf(const Tensor& t, int64_t offset) {
  return offset + (t.rows - 1) * t.pitch + t.row_bytes;
}

}  // namespace

absl::StatusOr<TensorCopies> TensorCopies::Create(GpuRuntime* runtime,
                                                  std::shared_ptr<PinnedRanges> pinned,
                                                  int64_t input_bytes, int64_t output_bytes,
                                                  size_t limit) {
  TensorCopies copies(runtime, std::move(pinned));
  for (const auto& [region, what, bytes] :
       {std::tuple(&copies.input_, "staged input", input_bytes),
        std::tuple(&copies.output_, "staged output", output_bytes)}) {
    MLA_ASSIGN_OR_RETURN(*region, StagedRegion::Create(runtime, what, bytes));
  }
  copies.direct_in_.reserve(limit);
  copies.direct_out_.reserve(limit);
  copies.reached_.reserve(limit);
  return copies;
}

bool TensorCopies::Reaches(const void* host, int64_t bytes) {
  const PinnedRanges::Id piece = pinned_->Find(host, bytes);
  if (piece == PinnedRanges::kNone) return false;
  // Searches from the end, because tensors of one client lie in one piece.
  if (std::find(reached_.rbegin(), reached_.rend(), piece) != reached_.rend()) return true;
  if (reached_.size() == reached_.capacity() || !pinned_->Begin(piece)) return false;
  reached_.push_back(piece);
  return true;
}

void TensorCopies::End() {
  pinned_->End(reached_);
  reached_.clear();
}

absl::Status TensorCopies::HoldInPlace(const LaunchTensors& tensors) {
  for (const HostInput& in : tensors.inputs) {
    if (!in.in_place() && !in.shared) continue;
    if (!Reaches(in.host, in.rows * in.row_bytes)) return NotPinned("input");
  }
  for (const HostOutput& out : tensors.outputs) {
    if (!out.in_place() && !out.shared) continue;
    if (!Reaches(out.host, out.rows * out.row_bytes)) return NotPinned("output");
  }
  return absl::OkStatus();
}

int64_t TensorCopies::BytesOf(std::span<const HostInput> inputs) { return CopiedBytes(inputs); }
int64_t TensorCopies::BytesOf(std::span<const HostOutput> outputs) { return CopiedBytes(outputs); }
bool TensorCopies::InFewPieces(std::span<const HostInput> inputs, size_t most) {
  return Pieces(inputs) <= static_cast<int64_t>(most);
}
bool TensorCopies::InFewPieces(std::span<const HostOutput> outputs, size_t most) {
  return Pieces(outputs) <= static_cast<int64_t>(most);
}

void TensorCopies::AddMoves(std::span<const HostInput> inputs, std::vector<TensorMove>& moves) {
  for (const HostInput& in : inputs) {
    if (in.in_place()) continue;
    if (in.shared || Reaches(in.host, in.rows * in.row_bytes)) {
      AddPieces(moves, AddressOf(in.device), in.pitch, AddressOf(in.host), in.row_bytes,
                in.row_bytes, in.rows);
      continue;
    }
    const int64_t offset = Stage(in);
    AddPieces(moves, AddressOf(in.device), in.pitch, AddressOf(input_.host(offset)), in.pitch,
              in.row_bytes, in.rows);
  }
}

void TensorCopies::AddMoves(std::span<const HostOutput> outputs, std::vector<TensorMove>& moves) {
  for (const HostOutput& out : outputs) {
    if (out.in_place()) continue;
    const bool direct = out.shared || Reaches(out.host, out.rows * out.row_bytes);
    const void* const to = direct ? out.host : output_.host(output_.OffsetOf(out.device));
    AddPieces(moves, AddressOf(to), direct ? out.row_bytes : out.pitch, AddressOf(out.device),
              out.pitch, out.row_bytes, out.rows);
  }
}

int64_t TensorCopies::Stage(const HostInput& in) {
  const int64_t offset = input_.OffsetOf(in.device);
  for (int64_t row = 0; row < in.rows; ++row) {
    std::memcpy(input_.host(offset + row * in.pitch), in.host + row * in.row_bytes,
                static_cast<size_t>(in.row_bytes));
  }
  copied_bytes_ += in.rows * in.row_bytes;
  return offset;
}

absl::Status TensorCopies::Copy(const HostInput& in, Stream stream) {
  const DevicePtr target = AddressOf(in.device);
  const bool whole = in.rows == 1 || in.pitch == in.row_bytes;
  if (in.shared) {
    return runtime_->CopyRowsDevice(target, in.pitch, AddressOf(in.host), in.row_bytes,
                                    in.row_bytes, in.rows, stream);
  }
  return whole ? runtime_->CopyIn(target, in.host, in.rows * in.row_bytes, stream)
               : runtime_->CopyRowsIn(target, in.pitch, in.host, in.row_bytes, in.row_bytes,
                                      in.rows, stream);
}

absl::Status TensorCopies::Copy(const HostOutput& out, Stream stream) {
  const DevicePtr from = AddressOf(out.device);
  const bool whole = out.rows == 1 || out.pitch == out.row_bytes;
  if (out.shared) {
    return runtime_->CopyRowsDevice(AddressOf(out.host), out.row_bytes, from, out.pitch,
                                    out.row_bytes, out.rows, stream);
  }
  return whole ? runtime_->CopyOut(out.host, from, out.rows * out.row_bytes, stream)
               : runtime_->CopyRowsOut(out.host, out.row_bytes, from, out.pitch, out.row_bytes,
                                       out.rows, stream);
}

absl::StatusOr<bool> TensorCopies::EnqueueStaged(std::span<const HostInput> inputs, Stream stream) {
  direct_in_.clear();
  int64_t staged_end = 0;
  for (const HostInput& in : inputs) {
    direct_in_.push_back(in.in_place() || in.shared || Reaches(in.host, in.rows * in.row_bytes));
    if (!direct_in_.back()) staged_end = std::max(staged_end, EndOf(in, Stage(in)));
  }
  // One copy moves all staged inputs. Direct copies follow on the same stream and overwrite the
  // gaps between them.
  if (staged_end == 0) return false;
  MLA_RETURN_IF_ERROR(runtime_->CopyIn(input_.device(0), input_.host(0), staged_end, stream));
  return true;
}

absl::StatusOr<bool> TensorCopies::EnqueueDirect(std::span<const HostInput> inputs, Stream stream) {
  bool any = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const HostInput& in = inputs[i];
    if (!direct_in_[i] || in.in_place() || in.row_bytes == 0 || in.rows == 0) continue;
    MLA_RETURN_IF_ERROR(Copy(in, stream));
    any = true;
  }
  return any;
}

void TensorCopies::FindDirect(std::span<const HostOutput> outputs) {
  direct_out_.clear();
  for (const HostOutput& out : outputs) {
    direct_out_.push_back(out.in_place() || out.shared ||
                          Reaches(out.host, out.rows * out.row_bytes));
  }
}

absl::Status TensorCopies::EnqueueStaged(std::span<const HostOutput> outputs, Stream stream) {
  int64_t staged_end = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (direct_out_[i]) continue;
    staged_end = std::max(staged_end, EndOf(outputs[i], output_.OffsetOf(outputs[i].device)));
  }
  if (staged_end == 0) return absl::OkStatus();
  return runtime_->CopyOut(output_.host(0), output_.device(0), staged_end, stream);
}

absl::Status TensorCopies::EnqueueDirect(std::span<const HostOutput> outputs, Stream stream) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const HostOutput& out = outputs[i];
    if (!direct_out_[i] || out.in_place() || out.row_bytes == 0 || out.rows == 0) continue;
    MLA_RETURN_IF_ERROR(Copy(out, stream));
  }
  return absl::OkStatus();
}

void TensorCopies::HandOver(std::span<const HostOutput> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (direct_out_[i]) continue;
    const HostOutput& out = outputs[i];
    const int64_t offset = output_.OffsetOf(out.device);
    copied_bytes_ += out.rows * out.row_bytes;
    for (int64_t row = 0; row < out.rows; ++row) {
      std::memcpy(out.host + row * out.row_bytes, output_.host(offset + row * out.pitch),
                  static_cast<size_t>(out.row_bytes));
    }
  }
}

}  // namespace mla::kernels::hip
