#include "kernels/launch_layout.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels {

void LaunchLayout::Clear() {
  inputs_used_ = outputs_used_ = workspace_used_ = 0;
  in_place_ = false;
  inputs_.clear();
  outputs_.clear();
}

absl::StatusOr<std::byte*> LaunchLayout::Take(std::span<std::byte> region, int64_t& used,
                                              int64_t bytes, const char* what) {
  const auto limit = static_cast<int64_t>(region.size());
  if (bytes < 0 || bytes > limit - used) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": ", used, " bytes used, ", bytes, " wanted, limit ", limit));
  }
  std::byte* const at = region.data() + used;
  used += (bytes + kLaunchAlignment - 1) / kLaunchAlignment * kLaunchAlignment;
  return at;
}

absl::StatusOr<std::byte*> LaunchLayout::TakeInput(int64_t bytes) {
  return unified_ ? Take(memory_.workspace, workspace_used_, bytes, "slot workspace")
                  : Take(memory_.inputs, inputs_used_, bytes, "staged input");
}

absl::StatusOr<std::byte*> LaunchLayout::TakeOutput(int64_t bytes) {
  return unified_ ? Take(memory_.workspace, workspace_used_, bytes, "slot workspace")
                  : Take(memory_.outputs, outputs_used_, bytes, "staged output");
}

absl::StatusOr<const void*> LaunchLayout::Input(const void* host, int64_t bytes) {
  const auto* const from = static_cast<const std::byte*>(host);
  // The cast is safe: a launch writes only to inputs that it copies.
  auto* address = const_cast<std::byte*>(from);
  if (!unified_) {
    MLA_ASSIGN_OR_RETURN(address, TakeInput(bytes));
  }
  inputs_.push_back({from, address, bytes, 1, bytes});
  return address;
}

absl::StatusOr<const void*> LaunchLayout::InputReadOnce(const void* host, int64_t bytes) {
  const bool in_place = InPlace(host, bytes) && bytes <= backend_->Info().in_place_bytes;
  if (!in_place) return Input(host, bytes);
  const auto* const from = static_cast<const std::byte*>(host);
  inputs_.push_back({from, const_cast<std::byte*>(from), bytes, 1, bytes});
  return host;
}

absl::StatusOr<void*> LaunchLayout::Output(void* host, int64_t bytes) {
  auto* const target = static_cast<std::byte*>(host);
  std::byte* address = target;
  if (!unified_ && !InPlace(host, bytes)) {
    MLA_ASSIGN_OR_RETURN(address, TakeOutput(bytes));
  }
  outputs_.push_back({target, address, bytes, 1, bytes});
  return address;
}

absl::StatusOr<void*> LaunchLayout::PrivateOutput(void* host, int64_t bytes) {
  if (unified_) return Output(host, bytes);
  MLA_ASSIGN_OR_RETURN(std::byte* const address, TakeOutput(bytes));
  outputs_.push_back({static_cast<std::byte*>(host), address, bytes, 1, bytes, false, true});
  return address;
}

const void* LaunchLayout::SharedInput(const void* at, int64_t bytes) {
  auto* const from = const_cast<std::byte*>(static_cast<const std::byte*>(at));
  inputs_.push_back({from, from, bytes, 1, bytes, true});
  return at;
}

void* LaunchLayout::SharedOutput(void* at, int64_t bytes) {
  auto* const to = static_cast<std::byte*>(at);
  outputs_.push_back({to, to, bytes, 1, bytes, true});
  return at;
}

void LaunchLayout::CopyToShared(void* to, const void* from, int64_t row_bytes, int64_t rows,
                                int64_t pitch) {
  auto* const written = const_cast<std::byte*>(static_cast<const std::byte*>(from));
  outputs_.push_back({static_cast<std::byte*>(to), written, row_bytes, rows, pitch, true});
}

absl::StatusOr<const void*> LaunchLayout::InputParts(int64_t rows,
                                                     std::span<const InputPart> parts) {
  int64_t pitch = 0;
  for (const InputPart& part : parts) pitch += part.row_bytes;
  MLA_ASSIGN_OR_RETURN(std::byte* const region, TakeInput(rows * pitch));
  std::byte* column = region;
  for (const InputPart& part : parts) {
    inputs_.push_back({static_cast<const std::byte*>(part.host), column, part.row_bytes, rows,
                       pitch, part.shared});
    column += part.row_bytes;
  }
  return region;
}

absl::StatusOr<void*> LaunchLayout::OutputParts(int64_t rows, std::span<const OutputPart> parts) {
  int64_t pitch = 0;
  for (const OutputPart& part : parts) pitch += part.row_bytes;
  MLA_ASSIGN_OR_RETURN(std::byte* const region, TakeOutput(rows * pitch));
  std::byte* column = region;
  for (const OutputPart& part : parts) {
    if (part.host != nullptr) {
      outputs_.push_back(
          {static_cast<std::byte*>(part.host), column, part.row_bytes, rows, pitch, part.shared});
    }
    column += part.row_bytes;
  }
  return region;
}

absl::StatusOr<void*> LaunchLayout::Workspace(int64_t bytes) {
  MLA_ASSIGN_OR_RETURN(std::byte* const address,
                       Take(memory_.workspace, workspace_used_, bytes, "slot workspace"));
  return address;
}

}  // namespace mla::kernels
