// HipBackend: weights. Everything happens on the compute stream, so launches that were submitted
// before see what was there before.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/hip/hip_backend.h"

namespace mla::kernels::hip {

using kernels::Bf16;
using kernels::Geometry;

namespace {

int64_t WeightBytes(const Geometry& g, int32_t heads) {
  return int64_t{heads} * g.kv_lora_rank * (g.nope_dim + g.v_dim) * int64_t{sizeof(Bf16)};
}

// Of W_UV behind W_UK, in a slot for `heads` heads.
int64_t ValuesOffset(const Geometry& g, int32_t heads) {
  return int64_t{heads} * g.kv_lora_rank * g.nope_dim * int64_t{sizeof(Bf16)};
}

}  // namespace

absl::Status HipBackend::LoadWeights(int32_t slot, const Geometry& geometry, int32_t head_begin,
                                     int32_t head_end, const Bf16* w_uk, const Bf16* w_uv) {
  if (!health_.ok()) return health_;
  if (slot < 0 || slot >= static_cast<int32_t>(weights_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights slot: got ", slot, ", limit ", weights_.size()));
  }
  if (head_begin < 0 || head_end <= head_begin) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights heads: got [", head_begin, ", ", head_end, ")"));
  }
  if (WeightBytes(geometry, 1) <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights geometry: got kv_lora_rank ", geometry.kv_lora_rank, ", nope_dim ",
                     geometry.nope_dim, ", v_dim ", geometry.v_dim, "; there is nothing to load"));
  }
  const Weights& target = weights_[slot];
  // Another model's weights, or more heads than there is room for: the slot starts afresh.
  const int32_t capacity = std::max(geometry.num_heads, head_end);
  if (target.used() &&
      (!(target.geometry == geometry) || capacity > static_cast<int32_t>(target.loaded.size()))) {
    if (absl::Status s = FreeWeights(slot); !s.ok()) return s;
  }
  if (!target.used()) {
    if (absl::Status s = PlaceWeights(slot, geometry, capacity); !s.ok()) return s;
  }
  const DevicePtr uk = weights_memory_.at() + static_cast<uint64_t>(arena_.at(slot));
  const auto places = static_cast<int32_t>(target.loaded.size());
  const DevicePtr uv = uk + static_cast<uint64_t>(ValuesOffset(geometry, places));
  const int64_t row = geometry.kv_lora_rank * int64_t{sizeof(Bf16)};
  absl::Status copied;
  for (const auto& [at, source, size] : {std::tuple(uk, w_uk, row * geometry.nope_dim),
                                         std::tuple(uv, w_uv, row * geometry.v_dim)}) {
    if (size == 0 || !copied.ok()) continue;
    copied = runtime_->CopyIn(at + static_cast<uint64_t>(head_begin * size), source,
                              (head_end - head_begin) * size, streams_.compute);
  }
  // The source is the caller's: a copy that has begun ends before this call does.
  copied.Update(runtime_->Synchronize(streams_.compute));
  if (!copied.ok()) return copied;
  std::vector<bool>& loaded = weights_[slot].loaded;
  std::fill(loaded.begin() + head_begin, loaded.begin() + head_end, true);
  return absl::OkStatus();
}

// Room for all heads of the model, and its addresses where the kernels look for them.
absl::Status HipBackend::PlaceWeights(int32_t slot, const Geometry& geometry, int32_t heads) {
  const int64_t bytes = WeightBytes(geometry, heads);
  if (bytes > arena_.bytes() - arena_.used()) {
    return absl::ResourceExhaustedError(absl::StrCat("limits.weights_bytes: got ", bytes,
                                                     " bytes of weights beside ", arena_.used(),
                                                     " in use, limit ", arena_.bytes()));
  }
  absl::Status s;
  const bool moved = !arena_.Take(slot, bytes);
  if (moved) {
    s = CompactWeights();
    if (s.ok() && !arena_.Take(slot, bytes)) s = absl::InternalError("no room after compaction");
  }
  if (s.ok()) {
    weights_[slot] = {geometry, std::vector<bool>(static_cast<size_t>(heads), false)};
    s = PublishWeights();
  }
  if (s.ok()) return s;
  s.Update(FreeWeights(slot));
  if (!moved) return s;  // the others are where they were, and a later call publishes again
  // Other models lie elsewhere than the kernels would look for them, or in part. They must
  // not be read any more.
  return Fault(absl::InternalError(absl::StrCat("weights that were being moved: ", s.message())));
}

// Copies may not overlap, so an extent moves in pieces no longer than its way. Where the way is
// short, those would be many: then pieces go through the expanded form's workspace, which holds
// nothing between launches.
absl::Status HipBackend::CompactWeights() {
  const auto copy = [this](DevicePtr to, DevicePtr from, int64_t bytes) {
    return runtime_->CopyDevice(to, from, bytes, streams_.compute);
  };
  const DevicePtr through = expanded_workspace_.at();
  for (const WeightArena::Move& move : arena_.Compact()) {
    const int64_t way = move.from - move.to;
    const bool direct = move.bytes <= way || expanded_workspace_.bytes() <= 2 * way;
    const int64_t piece = direct ? way : expanded_workspace_.bytes();
    for (int64_t done = 0; done < move.bytes; done += piece) {
      const DevicePtr from = weights_memory_.at() + static_cast<uint64_t>(move.from + done);
      const DevicePtr to = weights_memory_.at() + static_cast<uint64_t>(move.to + done);
      const int64_t bytes = std::min(piece, move.bytes - done);
      absl::Status s = direct ? copy(to, from, bytes) : copy(through, from, bytes);
      if (s.ok() && !direct) s = copy(to, through, bytes);
      if (!s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

absl::Status HipBackend::PublishWeights() {
  auto* pointers = reinterpret_cast<uint64_t*>(weight_pointers_host_.data());
  const size_t slots = weights_.size();
  for (size_t i = 0; i < slots; ++i) {
    const Weights& w = weights_[i];
    const int64_t at = arena_.at(static_cast<int32_t>(i));
    const int64_t values = ValuesOffset(w.geometry, static_cast<int32_t>(w.loaded.size()));
    pointers[i] = w.used() ? weights_memory_.at() + static_cast<uint64_t>(at) : 0;
    pointers[slots + i] = w.used() ? pointers[i] + static_cast<uint64_t>(values) : 0;
  }
  absl::Status s =
      runtime_->CopyIn(weight_pointers_.at(), pointers, weight_pointers_.bytes(), streams_.compute);
  return s.ok() ? runtime_->Synchronize(streams_.compute) : s;  // the next call writes them again
}

absl::Status HipBackend::FreeWeights(int32_t slot) {
  if (slot < 0 || slot >= static_cast<int32_t>(weights_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights slot: got ", slot, ", limit ", weights_.size()));
  }
  arena_.Free(slot);
  weights_[slot] = Weights();
  return absl::OkStatus();
}

}  // namespace mla::kernels::hip
