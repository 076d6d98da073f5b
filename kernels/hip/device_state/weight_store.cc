#include "kernels/hip/device_state/weight_store.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/formats/fp8.h"
#include "kernels/hip/args/expanded_args.h"
#include "kernels/hip/args/row_args.h"
#include "kernels/hip/device_state/weight_panels.h"

namespace mla::kernels::hip {

namespace {

int64_t WeightBytes(const Geometry& g, int32_t heads) {
  return int64_t{heads} * g.kv_lora_rank * (g.nope_dim + g.v_dim) * int64_t{sizeof(Bf16)};
}

// Returns the offset of W_UV, which follows W_UK, in a slot for `heads` heads.
int64_t ValuesOffset(const Geometry& g, int32_t heads) {
  return int64_t{heads} * g.kv_lora_rank * g.nope_dim * int64_t{sizeof(Bf16)};
}

static_assert(kRowProductDepth == ProjectedShape::kRowStep);
static_assert(kLeastScaleColumns == kScaledQueryStep && kScaledValueStep == kRowProductDepth);

// The bytes of pinned memory in which matrices are packed; no packed matrix is larger.
constexpr int64_t kPackedBytes = int64_t{4} << 20;
constexpr int64_t kMatrixBytes =
    int64_t{kExpandedLora} * std::max(kDims256.nope, kDims256.value) * int64_t{sizeof(Bf16)};
static_assert(kMatrixBytes <= kPackedBytes);

// Weights come and go as codes of this kind, which every architecture's kind reads as numbers.
constexpr Fp8Kind kContractCodes = Fp8Kind::kE4m3Fn;

absl::Status NotHeld(int32_t slot, int32_t head) {
  return absl::FailedPreconditionError(
      absl::StrCat("weights slot ", slot, " does not hold such weights of head ", head));
}

}  // namespace

absl::Status WeightStore::Configure(GpuRuntime* runtime, Stream stream, const BackendLimits& limits,
                                    const ArchTraits& arch) {
  arch_ = &arch;
  runtime_ = runtime;
  stream_ = stream;
  const int64_t pointers = 2 * limits.weights_slots * static_cast<int64_t>(sizeof(void*));
  for (const auto& [buffer, what, bytes] :
       {std::tuple(&memory_, "limits.weights_bytes", limits.weights_bytes),
        std::tuple(&pointers_, "weight pointers", pointers)}) {
    MLA_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Create(runtime, what, bytes));
  }
  MLA_ASSIGN_OR_RETURN(pointers_host_, PinnedBuffer::Create(runtime, "weight pointers", pointers));
  if (limits.weights_slots > 0) {
    MLA_ASSIGN_OR_RETURN(packed_, PinnedBuffer::Create(runtime, "packed weights", kPackedBytes));
  }
  slots_.resize(static_cast<size_t>(limits.weights_slots));
  projected_.resize(slots_.size());
  arena_ = WeightArena(limits.weights_bytes, 2 * limits.weights_slots);
  return absl::OkStatus();
}

bool WeightStore::InPanels(const Geometry& g) const {
  return arch_ != nullptr && arch_->weight_panels && g.kv_lora_rank == kExpandedLora &&
         HasExpandedForm(*arch_, {g.nope_dim, g.v_dim});
}

bool WeightStore::Holds(int32_t slot, int32_t head_begin, int32_t heads) const {
  if (slot < 0 || slot >= static_cast<int32_t>(slots_.size())) return false;
  const std::vector<bool>& loaded = slots_[slot].loaded;
  if (head_begin < 0 || head_begin + heads > static_cast<int32_t>(loaded.size())) return false;
  return std::all_of(loaded.begin() + head_begin, loaded.begin() + head_begin + heads,
                     [](bool head) { return head; });
}

absl::Status WeightStore::Load(int32_t slot, const Geometry& geometry, int32_t head_begin,
                               int32_t head_end, const Bf16* w_uk, const Bf16* w_uv,
                               const DeviceBuffer& scratch) {
  MLA_RETURN_IF_ERROR(CheckSlot(slot));
  if (head_begin < 0 || head_end <= head_begin) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights heads: got [", head_begin, ", ", head_end, ")"));
  }
  if (WeightBytes(geometry, 1) <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights geometry: got kv_lora_rank ", geometry.kv_lora_rank, ", nope_dim ",
                     geometry.nope_dim, ", v_dim ", geometry.v_dim, "; there is nothing to load"));
  }
  const Slot& target = slots_[slot];
  // The slot has no room for these heads, or holds another model's weights, so it starts empty.
  const int32_t capacity = std::max(geometry.num_heads, head_end);
  if (target.used() &&
      (!(target.geometry == geometry) || capacity > static_cast<int32_t>(target.loaded.size()))) {
    MLA_RETURN_IF_ERROR(Free(slot));
  }
  if (!target.used()) {
    const int64_t bytes = WeightBytes(geometry, capacity);
    MLA_RETURN_IF_ERROR(CheckRoom(bytes));
    slots_[slot] = {geometry, std::vector<bool>(static_cast<size_t>(capacity), false)};
    MLA_RETURN_IF_ERROR(Place(slot, bytes, scratch));
  }
  const DevicePtr uk = memory_.at() + static_cast<uint64_t>(arena_.at(slot));
  const auto places = static_cast<int32_t>(target.loaded.size());
  const DevicePtr uv = uk + static_cast<uint64_t>(ValuesOffset(geometry, places));
  const int32_t heads = head_end - head_begin, lora = geometry.kv_lora_rank;
  const bool in_panels = InPanels(geometry);
  absl::Status copied;
  for (const auto& [address, source, rows, columns] :
       {std::tuple(uk, w_uk, geometry.nope_dim, lora),
        std::tuple(uv, w_uv, lora, geometry.v_dim)}) {
    const int64_t size = int64_t{rows} * columns * int64_t{sizeof(Bf16)};
    if (size == 0 || !copied.ok()) continue;
    copied = CopyMatrices(address + static_cast<uint64_t>(head_begin * size), source, heads, rows,
                          columns, in_panels);
  }
  // The caller owns the source, so a copy that has begun must end before this call returns.
  copied.Update(runtime_->Synchronize(stream_));
  if (!copied.ok()) return copied;
  std::vector<bool>& loaded = slots_[slot].loaded;
  std::fill(loaded.begin() + head_begin, loaded.begin() + head_end, true);
  return absl::OkStatus();
}

absl::Status WeightStore::CopyMatrices(DevicePtr target, const Bf16* from, int32_t heads,
                                       int32_t rows, int32_t columns, bool in_panels) {
  const int64_t elements = int64_t{rows} * columns;
  const int64_t bytes = elements * int64_t{sizeof(Bf16)};
  if (!in_panels) return runtime_->CopyIn(target, from, heads * bytes, stream_);
  const int64_t at_once = kPackedBytes / bytes;
  auto* const packed = reinterpret_cast<Bf16*>(packed_.data());
  for (int64_t head = 0; head < heads; head += at_once) {
    const int64_t count = std::min<int64_t>(at_once, heads - head);
    for (int64_t i = 0; i < count; ++i) {
      PackPanels(from + (head + i) * elements, packed + i * elements, rows, columns);
    }
    absl::Status s = runtime_->CopyIn(target + static_cast<uint64_t>(head * bytes), packed,
                                      count * bytes, stream_);
    s.Update(runtime_->Synchronize(stream_));  // before the same memory is packed again
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status WeightStore::CheckSlot(int32_t slot) const {
  if (slot >= 0 && slot < static_cast<int32_t>(slots_.size())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("weights slot: got ", slot, ", limit ", slots_.size()));
}

absl::Status WeightStore::CheckRoom(int64_t bytes) const {
  if (bytes <= arena_.bytes() - arena_.used()) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("limits.weights_bytes: got ", bytes, " bytes of weights in addition to ",
                   arena_.used(), " in use, limit ", arena_.bytes()));
}

// Makes room for all heads of the model, and publishes the addresses for the kernels. After an
// error the extent's owner holds nothing. REQUIRES: CheckRoom.
absl::Status WeightStore::Place(int32_t extent, int64_t bytes, const DeviceBuffer& scratch) {
  absl::Status s;
  const bool moved = !arena_.Take(extent, bytes);
  if (moved) {
    s = Compact(scratch);
    if (s.ok() && !arena_.Take(extent, bytes)) s = absl::InternalError("no room after compaction");
  }
  if (s.ok()) s = Publish();
  if (s.ok()) return s;
  Drop(extent);
  if (!moved) return s;  // no slot has moved, and a later call publishes again
  // Weights of other models have moved, completely or in part, but the kernels' addresses are old.
  // They must not be read any more.
  torn_ = true;
  return absl::InternalError(absl::StrCat("weights that were being moved: ", s.message()));
}

void WeightStore::Drop(int32_t extent) {
  const auto index = static_cast<size_t>(extent);
  arena_.Free(extent);
  if (index < slots_.size()) {
    slots_[index] = Slot();
  } else {
    projected_[index - slots_.size()] = ProjectedSlot();
  }
}

absl::Status WeightStore::PlaceProjected(int32_t slot, const Geometry& geometry,
                                         const ProjectedShape& shape, const DeviceBuffer& scratch) {
  if (shape.codes() && !CanHoldCodes(geometry)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "weights of e4m3: got nope_dim + rope_dim ", geometry.expanded_q_dim(), ", v_dim ",
        geometry.v_dim, ", limits: multiples of ", kScaledQueryStep, " and ", kScaledValueStep));
  }
  const int64_t bytes = ProjectedBytes(geometry, shape);
  MLA_RETURN_IF_ERROR(CheckRoom(bytes));
  ProjectedSlot& target = projected_[slot];
  target.geometry = geometry;
  target.shape = shape;
  bool padded = false;
  for (const ProjectedPart part : {ProjectedPart::kQueries, ProjectedPart::kOutputs}) {
    const ProjectedMatrix m = MatrixOf(geometry, shape, part);
    padded = padded || m.depth != m.padded_depth;
    target.loaded[static_cast<size_t>(part)].assign(static_cast<size_t>(geometry.num_heads), false);
  }
  const int32_t extent = ExtentOfProjected(slot);
  MLA_RETURN_IF_ERROR(Place(extent, bytes, scratch));
  if (!padded) return absl::OkStatus();
  const DevicePtr at = memory_.at() + static_cast<uint64_t>(arena_.at(extent));
  absl::Status s = runtime_->Fill(at, 0, bytes, stream_);
  if (!s.ok()) Drop(extent);
  return s;
}

absl::Status WeightStore::LoadProjected(int32_t slot, const Geometry& geometry,
                                        const ProjectedShape& shape, ProjectedPart part,
                                        int32_t head, const void* weights,
                                        const DeviceBuffer& scratch) {
  MLA_RETURN_IF_ERROR(CheckSlot(slot));
  if (head < 0 || head >= geometry.num_heads || !shape.present()) {
    return absl::InvalidArgumentError(absl::StrCat("weights head: got ", head, " of ",
                                                   geometry.num_heads, ", q_lora_rank ",
                                                   shape.q_lora_rank));
  }
  ProjectedSlot& target = projected_[slot];
  if (target.used() && (target.shape != shape || !(target.geometry == geometry))) {
    return absl::FailedPreconditionError(
        absl::StrCat("weights slot ", slot, " holds weights of another shape"));
  }
  if (!target.used()) MLA_RETURN_IF_ERROR(PlaceProjected(slot, geometry, shape, scratch));
  const auto loaded = target.loaded[static_cast<size_t>(part)].begin() + head;
  *loaded = false;  // an error leaves part of the old weights
  MLA_RETURN_IF_ERROR(CopyRows(RowsOf(slot, part, head), weights));
  if (shape.codes()) MLA_RETURN_IF_ERROR(CopyScales(slot, part, head, weights));
  *loaded = true;
  return absl::OkStatus();
}

DevicePtr WeightStore::MatrixAt(int32_t slot, ProjectedPart part) const {
  const ProjectedSlot& held = projected_[slot];
  int64_t offset = arena_.at(ExtentOfProjected(slot));
  if (part == ProjectedPart::kOutputs) {
    offset += MatrixOf(held.geometry, held.shape, ProjectedPart::kQueries).bytes();
  }
  return memory_.at() + static_cast<uint64_t>(offset);
}

WeightStore::HeadRows WeightStore::RowsOf(int32_t slot, ProjectedPart part, int32_t head) const {
  const ProjectedSlot& held = projected_[slot];
  const auto size = static_cast<int64_t>(ElementSize(held.shape.weights));
  const WeightWindow window = WindowOf(held.geometry, held.shape, part, head, 1);
  HeadRows result;
  result.rows = window.rows;
  result.row_bytes = window.columns * size;
  result.pitch = MatrixOf(held.geometry, held.shape, part).padded_depth * size;
  result.at = MatrixAt(slot, part) +
              static_cast<uint64_t>(window.row * result.pitch + window.column * size);
  return result;
}

WeightStore::HeadRows WeightStore::ScalesOf(int32_t slot, ProjectedPart part, int32_t head) const {
  const ProjectedSlot& held = projected_[slot];
  const ProjectedMatrix m = MatrixOf(held.geometry, held.shape, part);
  const WeightWindow window = WindowOf(held.geometry, held.shape, part, head, 1);
  constexpr int64_t kSize = sizeof(float);
  HeadRows result;
  result.rows = (window.rows + m.scale_rows - 1) / m.scale_rows;
  result.row_bytes = (window.columns + m.scale_depth - 1) / m.scale_depth * kSize;
  result.pitch = m.scale_pitch * kSize;
  result.at = MatrixAt(slot, part) +
              static_cast<uint64_t>(m.weight_bytes() + window.row / m.scale_rows * result.pitch +
                                    window.column / m.scale_depth * kSize);
  return result;
}

absl::Status WeightStore::CheckRow(int64_t row_bytes) {
  if (row_bytes > 0 && row_bytes <= kPackedBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("weights: got rows of ", row_bytes, " bytes, limit ", kPackedBytes));
}

absl::Status WeightStore::CopyRows(const HeadRows& target, const void* from) {
  MLA_RETURN_IF_ERROR(CheckRow(target.row_bytes));
  const auto* const source = static_cast<const std::byte*>(from);
  const int64_t at_once = kPackedBytes / target.row_bytes;
  for (int64_t row = 0; row < target.rows; row += at_once) {
    const int64_t count = std::min(at_once, target.rows - row);
    std::memcpy(packed_.data(), source + row * target.row_bytes,
                static_cast<size_t>(count * target.row_bytes));
    absl::Status s =
        runtime_->CopyRowsIn(target.at + static_cast<uint64_t>(row * target.pitch), target.pitch,
                             packed_.data(), target.row_bytes, target.row_bytes, count, stream_);
    s.Update(runtime_->Synchronize(stream_));  // before the same memory is filled again
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status WeightStore::CopyRowsOut(const HeadRows& from, void* to) {
  MLA_RETURN_IF_ERROR(CheckRow(from.row_bytes));
  auto* const target = static_cast<std::byte*>(to);
  const int64_t at_once = kPackedBytes / from.row_bytes;
  for (int64_t row = 0; row < from.rows; row += at_once) {
    const int64_t count = std::min(at_once, from.rows - row);
    absl::Status s = runtime_->CopyRowsOut(packed_.data(), from.row_bytes,
                                           from.at + static_cast<uint64_t>(row * from.pitch),
                                           from.pitch, from.row_bytes, count, stream_);
    s.Update(runtime_->Synchronize(stream_));  // after it the memory holds the rows
    if (!s.ok()) return s;
    std::memcpy(target + row * from.row_bytes, packed_.data(),
                static_cast<size_t>(count * from.row_bytes));
  }
  return absl::OkStatus();
}

template <class Visit>
void WeightStore::ForEachScale(const ProjectedSlot& held, ProjectedPart part,
                               const WeightWindow& window, const Visit& visit) const {
  const ProjectedMatrix m = MatrixOf(held.geometry, held.shape, part);
  for (int64_t r = 0; r < window.rows; r += m.scale_rows) {
    for (int64_t c = 0; c < window.columns; c += m.scale_depth) visit(window.BlockOf(r, c));
  }
}

absl::Status WeightStore::CopyScales(int32_t slot, ProjectedPart part, int32_t head,
                                     const void* from) {
  const ProjectedSlot& held = projected_[slot];
  const HeadRows target = ScalesOf(slot, part, head);
  MLA_RETURN_IF_ERROR(CheckRow(target.rows * target.row_bytes));
  const WeightWindow window = WindowOf(held.geometry, held.shape, part, head, 1);
  auto* next = reinterpret_cast<float*>(packed_.data());
  ForEachScale(held, part, window, [&](int64_t block) {
    const float scale = ScaleOf(window, from, block);
    *next++ = arch_->fp8 == Fp8Kind::kE4m3Fn ? scale : ScaleToKind(scale, arch_->fp8);
  });
  absl::Status s = runtime_->CopyRowsIn(target.at, target.pitch, packed_.data(), target.row_bytes,
                                        target.row_bytes, target.rows, stream_);
  s.Update(runtime_->Synchronize(stream_));  // before the same memory is filled again
  return s;
}

absl::Status WeightStore::CopyScalesOut(int32_t slot, ProjectedPart part, int32_t head, void* out) {
  const ProjectedSlot& held = projected_[slot];
  const HeadRows from = ScalesOf(slot, part, head);
  absl::Status s = runtime_->CopyRowsOut(packed_.data(), from.row_bytes, from.at, from.pitch,
                                         from.row_bytes, from.rows, stream_);
  s.Update(runtime_->Synchronize(stream_));  // after it the memory holds the scales
  if (!s.ok()) return s;
  const WeightWindow window = WindowOf(held.geometry, held.shape, part, head, 1);
  auto* const scales = static_cast<std::byte*>(out) + window.elements();
  const auto* next = reinterpret_cast<const float*>(packed_.data());
  ForEachScale(held, part, window, [&](int64_t block) {
    const float scale = arch_->fp8 == Fp8Kind::kE4m3Fn ? *next : ScaleToKind(*next, kContractCodes);
    ++next;
    std::memcpy(scales + block * int64_t{sizeof(scale)}, &scale, sizeof(scale));
  });
  return absl::OkStatus();
}

absl::Status WeightStore::CopyMatrixOut(DevicePtr from, Bf16* out, int32_t rows, int32_t columns,
                                        bool in_panels) {
  const int64_t bytes = int64_t{rows} * columns * int64_t{sizeof(Bf16)};
  // A matrix in panels fits into the pinned memory as a whole.
  for (int64_t done = 0; done < bytes; done += kPackedBytes) {
    const int64_t piece = std::min(kPackedBytes, bytes - done);
    absl::Status s =
        runtime_->CopyOut(packed_.data(), from + static_cast<uint64_t>(done), piece, stream_);
    s.Update(runtime_->Synchronize(stream_));  // after it the memory holds the piece
    if (!s.ok()) return s;
    if (in_panels) {
      UnpackPanels(reinterpret_cast<const Bf16*>(packed_.data()), out, rows, columns);
    } else {
      std::memcpy(reinterpret_cast<std::byte*>(out) + done, packed_.data(),
                  static_cast<size_t>(piece));
    }
  }
  return absl::OkStatus();
}

absl::Status WeightStore::Read(int32_t slot, const Geometry& geometry, int32_t head, Bf16* w_uk,
                               Bf16* w_uv) {
  MLA_RETURN_IF_ERROR(CheckSlot(slot));
  if (!Holds(slot, head, 1) || !(slots_[slot].geometry == geometry)) return NotHeld(slot, head);
  const int32_t lora = geometry.kv_lora_rank;
  const auto places = static_cast<int32_t>(slots_[slot].loaded.size());
  const DevicePtr uk = memory_.at() + static_cast<uint64_t>(arena_.at(slot));
  const DevicePtr uv = uk + static_cast<uint64_t>(ValuesOffset(geometry, places));
  for (const auto& [at, target, rows, columns] : {std::tuple(uk, w_uk, geometry.nope_dim, lora),
                                                  std::tuple(uv, w_uv, lora, geometry.v_dim)}) {
    const int64_t size = int64_t{rows} * columns * int64_t{sizeof(Bf16)};
    MLA_RETURN_IF_ERROR(CopyMatrixOut(at + static_cast<uint64_t>(head * size), target, rows,
                                      columns, InPanels(geometry)));
  }
  return absl::OkStatus();
}

absl::Status WeightStore::ReadProjected(int32_t slot, const Geometry& geometry,
                                        const ProjectedShape& shape, ProjectedPart part,
                                        int32_t head, void* weights) {
  MLA_RETURN_IF_ERROR(CheckSlot(slot));
  const ProjectedSlot& held = projected_[slot];
  const std::vector<bool>& loaded = held.loaded[static_cast<size_t>(part)];
  if (!held.used() || held.shape != shape || !(held.geometry == geometry) || head < 0 ||
      head >= static_cast<int32_t>(loaded.size()) || !loaded[static_cast<size_t>(head)]) {
    return NotHeld(slot, head);
  }
  MLA_RETURN_IF_ERROR(CopyRowsOut(RowsOf(slot, part, head), weights));
  return shape.codes() ? CopyScalesOut(slot, part, head, weights) : absl::OkStatus();
}

WeightStore::HeldMatrix WeightStore::Projected(int32_t slot, ProjectedPart part) const {
  if (!CheckSlot(slot).ok() || !projected_[slot].used()) return {};
  const ProjectedSlot& held = projected_[slot];
  const std::vector<bool>& loaded = held.loaded[static_cast<size_t>(part)];
  if (!std::all_of(loaded.begin(), loaded.end(), [](bool head) { return head; })) return {};
  HeldMatrix m{.shape = MatrixOf(held.geometry, held.shape, part)};
  const auto* const matrix = memory_.As<const uint8_t>() + (MatrixAt(slot, part) - memory_.at());
  if (held.shape.codes()) {
    m.codes = matrix;
    m.scales = reinterpret_cast<const float*>(matrix + m.shape.weight_bytes());
  } else {
    m.weights = reinterpret_cast<const uint16_t*>(matrix);
  }
  return m;
}

// Copies may not overlap, so an extent moves in pieces no longer than its distance. A short
// distance would need many pieces; they then go through `scratch`.
absl::Status WeightStore::Compact(const DeviceBuffer& scratch) {
  const auto copy = [this](DevicePtr to, DevicePtr from, int64_t bytes) {
    return runtime_->CopyDevice(to, from, bytes, stream_);
  };
  const DevicePtr through = scratch.at();
  for (const WeightArena::Move& move : arena_.Compact()) {
    const int64_t way = move.from - move.to;
    const bool direct = move.bytes <= way || scratch.bytes() <= 2 * way;
    const int64_t piece = direct ? way : scratch.bytes();
    for (int64_t done = 0; done < move.bytes; done += piece) {
      const DevicePtr from = memory_.at() + static_cast<uint64_t>(move.from + done);
      const DevicePtr to = memory_.at() + static_cast<uint64_t>(move.to + done);
      const int64_t bytes = std::min(piece, move.bytes - done);
      absl::Status s = direct ? copy(to, from, bytes) : copy(through, from, bytes);
      if (s.ok() && !direct) s = copy(to, through, bytes);
      if (!s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

absl::Status WeightStore::Publish() {
  auto* pointers = reinterpret_cast<uint64_t*>(pointers_host_.data());
  const size_t slots = slots_.size();
  for (size_t i = 0; i < slots; ++i) {
    const Slot& w = slots_[i];
    const int64_t at = arena_.at(static_cast<int32_t>(i));
    const int64_t values = ValuesOffset(w.geometry, static_cast<int32_t>(w.loaded.size()));
    pointers[i] = w.used() ? memory_.at() + static_cast<uint64_t>(at) : 0;
    pointers[slots + i] = w.used() ? pointers[i] + static_cast<uint64_t>(values) : 0;
  }
  absl::Status s = runtime_->CopyIn(pointers_.at(), pointers, pointers_.bytes(), stream_);
  return s.ok() ? runtime_->Synchronize(stream_) : s;  // the next call writes them again
}

absl::Status WeightStore::Free(int32_t slot) {
  MLA_RETURN_IF_ERROR(CheckSlot(slot));
  Drop(slot);
  Drop(ExtentOfProjected(slot));
  return absl::OkStatus();
}

}  // namespace mla::kernels::hip
