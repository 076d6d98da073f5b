#include "kernels/hip/runtime/launch_slot.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::kernels::hip {
namespace {

constexpr auto kSpin = std::chrono::microseconds(300);
constexpr auto kNap = std::chrono::microseconds(20);
// Of a kernel that waits on the device's units while a gate does.
constexpr uint32_t kBlocksBesideGate = 16;

absl::Status NotPinned(const char* what) {
  return absl::InternalError(
      absl::StrCat("launch: an ", what, " in place is neither pinned nor shared"));
}

// Of the tensors that are not used in place.
template <class Tensor>
int64_t BytesOf(std::span<const Tensor> tensors) {
  int64_t bytes = 0;
  for (const Tensor& t : tensors) {
    if (!t.in_place()) bytes += t.rows * t.row_bytes;
  }
  return bytes;
}

// Pieces of memory that they are in.
template <class Tensor>
bool InFewPieces(std::span<const Tensor> tensors, size_t most) {
  int64_t pieces = 0;
  for (const Tensor& t : tensors) {
    if (!t.in_place()) pieces += t.pitch == t.row_bytes ? 1 : t.rows;
  }
  return pieces <= static_cast<int64_t>(most);
}

// Adds the pieces of rows that lie `to_pitch` and `from_pitch` bytes apart.
template <class Moves>
void AddPieces(Moves& moves, DevicePtr to, int64_t to_pitch, DevicePtr from, int64_t from_pitch,
               int64_t row_bytes, int64_t rows) {
  if (row_bytes == 0 || rows == 0) return;
  if (rows == 1 || (to_pitch == row_bytes && from_pitch == row_bytes)) {
    moves.push_back({to, from, rows * row_bytes});
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    moves.push_back({to + static_cast<uint64_t>(row * to_pitch),
                     from + static_cast<uint64_t>(row * from_pitch), row_bytes});
  }
}

constexpr DevicePtr kNoEnd = ~DevicePtr{0};

// What lies at device addresses [begin, end) of the tensor; one whose rows lie apart is there whole
// or not at all. No rows: nothing.
template <class Tensor>
Tensor PartWithin(const Tensor& tensor, DevicePtr begin, DevicePtr end) {
  Tensor part = tensor;
  const auto at = reinterpret_cast<DevicePtr>(tensor.device);
  if (tensor.rows > 1 && tensor.pitch != tensor.row_bytes) {
    if (at < begin || at >= end) part.rows = 0;
    return part;
  }
  const DevicePtr last = at + static_cast<DevicePtr>(tensor.rows * tensor.row_bytes);
  const DevicePtr first = std::max(at, begin);
  const DevicePtr behind = std::min(last, end);
  part.rows = behind > first ? 1 : 0;
  if (part.rows == 0) return part;
  part.host += first - at;
  part.device += first - at;
  part.row_bytes = part.pitch = static_cast<int64_t>(behind - first);
  return part;
}

DevicePtr AddressOf(const void* at) { return reinterpret_cast<DevicePtr>(at); }

absl::Status Full(const char* what, size_t limit) {
  return absl::ResourceExhaustedError(absl::StrCat("launch ", what, ": limit ", limit));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LaunchSlot>> LaunchSlot::Create(GpuRuntime* runtime,
                                                               const Streams& streams,
                                                               std::shared_ptr<PinnedRanges> pinned,
                                                               const SlotSizes& sizes) {
  std::unique_ptr<LaunchSlot> slot(new LaunchSlot(runtime, streams, std::move(pinned)));
  for (const auto& [region, what, bytes] :
       {std::tuple(&slot->metadata_, "launch metadata", sizes.metadata),
        std::tuple(&slot->input_, "staged input", sizes.input),
        std::tuple(&slot->output_, "staged output", sizes.output)}) {
    absl::StatusOr<StagedRegion> made = StagedRegion::Create(runtime, what, bytes);
    if (!made.ok()) return made.status();
    *region = *std::move(made);
  }
  absl::StatusOr<DeviceBuffer> workspace =
      DeviceBuffer::Create(runtime, "slot workspace", AlignRegion(sizes.workspace));
  if (!workspace.ok()) return workspace.status();
  slot->workspace_ = *std::move(workspace);
  auto outcome = DeviceBuffer::Create(runtime, "a gate's outcome", sizeof(GateOutcome));
  auto report = PinnedBuffer::Create(runtime, "a gate's outcome", sizeof(GateOutcome));
  if (!outcome.ok() || !report.ok()) return outcome.ok() ? report.status() : outcome.status();
  slot->outcome_ = *std::move(outcome);
  slot->report_ = *std::move(report);
  std::memset(slot->report_.data(), 0, sizeof(GateOutcome));
  const int64_t digests = sizes.digests * static_cast<int64_t>(sizeof(PartDigest));
  auto made_digests = DeviceBuffer::Create(runtime, "digests", digests);
  auto digests_back = PinnedBuffer::Create(runtime, "digests", digests);
  if (!made_digests.ok() || !digests_back.ok()) {
    return made_digests.ok() ? digests_back.status() : made_digests.status();
  }
  slot->digests_ = *std::move(made_digests);
  slot->digests_back_ = *std::move(digests_back);
  std::vector<Event*> events = {&slot->started_, &slot->done_};
  for (ChunkEvents& chunk : slot->events_) {
    events.insert(events.end(), {&chunk.inputs_ready, &chunk.computed});
  }
  for (Event* event : events) {
    absl::StatusOr<Event> made = runtime->CreateEvent();
    if (!made.ok()) return made.status();
    *event = *made;
  }
  slot->chunks_.reserve(kMostChunks);
  slot->kernels_.reserve(kMaxKernels + static_cast<size_t>(sizes.page_ranges));
  slot->direct_in_.reserve(kMaxTransfers);
  slot->direct_out_.reserve(kMaxTransfers);
  slot->reached_.reserve(kMaxTransfers);
  // Those before the timed ones, these by chunk, and those behind.
  slot->one_by_one_.reserve(2 + kMostChunks);
  if (auto graphs = KernelGraphs::Open(runtime); graphs.ok()) slot->graphs_ = *std::move(graphs);
  slot->input_moves_.reserve(kMoves);
  slot->output_moves_.reserve(kMoves);
  return slot;
}

LaunchSlot::~LaunchSlot() {
  if (running_) EndCopies();
  for (const ChunkEvents& chunk : events_) {
    for (Event event : {chunk.inputs_ready, chunk.computed}) runtime_->Destroy(event);
  }
  for (Event event : {started_, done_}) runtime_->Destroy(event);
}

SlotMemory LaunchSlot::Memory() const {
  const auto region = [](DevicePtr at, int64_t bytes) {
    return std::span(reinterpret_cast<std::byte*>(at), static_cast<size_t>(bytes));
  };
  return {region(input_.device(0), input_.bytes()), region(output_.device(0), output_.bytes()),
          region(workspace_.at(), workspace_.bytes())};
}

void LaunchSlot::Begin(const Launch& launch, bool alone) {
  const int64_t bytes = BytesOf(launch.inputs);
  const bool whole = launch.absorbed_chunks.empty();
  input_stream_ = alone && whole && bytes <= kMovedBytes ? streams_.compute : streams_.in;
  has_input_ = gated_ = was_late_ = behind_gate_ = gate_is_far_ = false;
  waited_ns_ = 0;
  signals_ = false;
  signal_copy_ = {};
  outputs_in_place_ = std::all_of(
      launch.outputs.begin(), launch.outputs.end(),
      [&](const HostOutput& out) { return out.in_place() || CopiedBySignal(launch, out); });
  if (!outputs_in_place_) signal_copy_ = {};
  metadata_.Clear();
  kernels_.clear();
  one_by_one_.clear();
  timed_begin_ = timed_end_ = 0;
  chunks_.assign(1, Chunk());
  input_moves_.clear();
  output_moves_.clear();
  one_sequence_ = false;
  writes_ = reads_ = {};
  if (!alone || !whole || !runtime_->kernels_reach_host()) return;
  if (bytes <= kMovedBytes && InFewPieces(launch.inputs, kMoves)) FindInputMoves(launch.inputs);
  if (BytesOf(launch.outputs) <= kMovedBytes && InFewPieces(launch.outputs, kMoves)) {
    FindOutputMoves(launch.outputs);
  }
  one_sequence_ = !input_moves_.empty() && !output_moves_.empty() &&
                  launch.gate.ready.word == nullptr && launch.page_writes.empty() &&
                  launch.page_reads.empty();
}

// Of a launch with a signal, whose waiting client does not need the output.
bool LaunchSlot::CopiedBySignal(const Launch& launch, const HostOutput& out) {
  const bool signals = launch.gate.ready.word != nullptr || !launch.signals.empty();
  const int64_t bytes = out.rows * out.row_bytes;
  if (!signals || !out.private_to_caller || out.rows != 1 || bytes > kSignalCopyBytes ||
      signal_copy_.bytes > 0 || !runtime_->kernels_reach_host() || !Reaches(out.host, bytes)) {
    return false;
  }
  signal_copy_ = {AddressOf(out.host), AddressOf(out.device), bytes};
  return true;
}

int64_t LaunchSlot::StageInput(const HostInput& in) {
  const int64_t offset = input_.OffsetOf(in.device);
  for (int64_t row = 0; row < in.rows; ++row) {
    std::memcpy(input_.host(offset + row * in.pitch), in.host + row * in.row_bytes,
                static_cast<size_t>(in.row_bytes));
  }
  work_.copied_bytes += in.rows * in.row_bytes;
  return offset;
}

void LaunchSlot::FindInputMoves(std::span<const HostInput> inputs) {
  for (const HostInput& in : inputs) {
    if (in.in_place()) continue;
    if (in.shared || Reaches(in.host, in.rows * in.row_bytes)) {
      AddPieces(input_moves_, AddressOf(in.device), in.pitch, AddressOf(in.host), in.row_bytes,
                in.row_bytes, in.rows);
      continue;
    }
    const int64_t offset = StageInput(in);
    AddPieces(input_moves_, AddressOf(in.device), in.pitch, AddressOf(input_.host(offset)),
              in.pitch, in.row_bytes, in.rows);
  }
}

void LaunchSlot::FindOutputMoves(std::span<const HostOutput> outputs) {
  for (const HostOutput& out : outputs) {
    if (out.in_place()) continue;
    const bool direct = out.shared || Reaches(out.host, out.rows * out.row_bytes);
    const void* const to = direct ? out.host : output_.host(output_.OffsetOf(out.device));
    AddPieces(output_moves_, AddressOf(to), direct ? out.row_bytes : out.pitch,
              AddressOf(out.device), out.pitch, out.row_bytes, out.rows);
  }
}

void LaunchSlot::Abandon() { EndCopies(); }

bool LaunchSlot::Reaches(const void* host, int64_t bytes) {
  const PinnedRanges::Id piece = pinned_->Find(host, bytes);
  if (piece == PinnedRanges::kNone) return false;
  // Tensors of one client lie in one piece, so the last ones are where to look.
  if (std::find(reached_.rbegin(), reached_.rend(), piece) != reached_.rend()) return true;
  if (reached_.size() == reached_.capacity() || !pinned_->Begin(piece)) return false;
  reached_.push_back(piece);
  return true;
}

void LaunchSlot::EndCopies() {
  pinned_->End(reached_);
  reached_.clear();
}

absl::Status LaunchSlot::AddKernelBytes(Function function, const LaunchShape& shape,
                                        const void* args, size_t bytes) {
  if (kernels_.size() == kernels_.capacity()) return Full("kernels", kernels_.capacity());
  PendingKernel& kernel = kernels_.emplace_back();
  kernel.function = function;
  kernel.shape = shape;
  if (std::exchange(behind_gate_, false)) {
    kernel.shape.overlap_predecessor = shape.overlap_gate && shape.grid_x <= kBlocksBesideGate;
  }
  kernel.arg_bytes = static_cast<uint32_t>(bytes);
  std::memcpy(kernel.args.data(), args, bytes);
  return absl::OkStatus();
}

absl::Status LaunchSlot::HoldInPlace(const Launch& launch) {
  for (const HostInput& in : launch.inputs) {
    if (!in.in_place() && !in.shared) continue;
    if (!Reaches(in.host, in.rows * in.row_bytes)) return NotPinned("input");
  }
  for (const HostOutput& out : launch.outputs) {
    if (!out.in_place() && !out.shared) continue;
    if (!Reaches(out.host, out.rows * out.row_bytes)) return NotPinned("output");
  }
  return absl::OkStatus();
}

absl::Status LaunchSlot::CopyInput(const HostInput& in, Stream stream) {
  const auto to = reinterpret_cast<DevicePtr>(in.device);
  const bool whole = in.rows == 1 || in.pitch == in.row_bytes;
  if (in.shared) {
    return runtime_->CopyRowsDevice(to, in.pitch, reinterpret_cast<DevicePtr>(in.host),
                                    in.row_bytes, in.row_bytes, in.rows, stream);
  }
  return whole ? runtime_->CopyIn(to, in.host, in.rows * in.row_bytes, stream)
               : runtime_->CopyRowsIn(to, in.pitch, in.host, in.row_bytes, in.row_bytes, in.rows,
                                      stream);
}

absl::Status LaunchSlot::CopyOutput(const HostOutput& out, Stream stream) {
  const auto from = reinterpret_cast<DevicePtr>(out.device);
  const bool whole = out.rows == 1 || out.pitch == out.row_bytes;
  if (out.shared) {
    return runtime_->CopyRowsDevice(reinterpret_cast<DevicePtr>(out.host), out.row_bytes, from,
                                    out.pitch, out.row_bytes, out.rows, stream);
  }
  return whole ? runtime_->CopyOut(out.host, from, out.rows * out.row_bytes, stream)
               : runtime_->CopyRowsOut(out.host, out.row_bytes, from, out.pitch, out.row_bytes,
                                       out.rows, stream);
}

absl::Status LaunchSlot::BeginChunk(DevicePtr inputs, DevicePtr outputs) {
  const Chunk& last = chunks_.back();
  if (chunks_.size() == kMostChunks) return Full("chunks", kMostChunks);
  if (inputs <= last.inputs_begin || outputs <= last.outputs_begin) {
    return absl::InvalidArgumentError("run.absorbed_chunks: not in the order of their tensors");
  }
  chunks_.push_back({kernels_.size(), inputs, outputs});
  return absl::OkStatus();
}

absl::Status LaunchSlot::EnqueueStaged(std::span<const HostInput> inputs) {
  const Stream stream = input_stream_;
  if (metadata_.changed()) {
    absl::Status s =
        runtime_->CopyIn(metadata_.device(0), metadata_.host(0), metadata_.used(), stream);
    if (!s.ok()) return s;
    metadata_.NoteUpload();
    NoteInput();
  }
  if (!input_moves_.empty()) return absl::OkStatus();
  direct_in_.clear();
  int64_t staged_end = 0;
  for (const HostInput& in : inputs) {
    direct_in_.push_back(in.in_place() || in.shared || Reaches(in.host, in.rows * in.row_bytes));
    if (direct_in_.back()) continue;
    const int64_t offset = StageInput(in);
    staged_end = std::max(staged_end, offset + (in.rows - 1) * in.pitch + in.row_bytes);
  }
  // Bytes that pass through the region travel as one copy; gaps left by direct ones are rewritten
  // by those, which follow on the same stream.
  if (staged_end == 0) return absl::OkStatus();
  NoteInput();
  return runtime_->CopyIn(input_.device(0), input_.host(0), staged_end, stream);
}

absl::Status LaunchSlot::EnqueueInputs(std::span<const HostInput> inputs, size_t chunk) {
  const Stream stream = input_stream_;
  const bool last = chunk + 1 == chunks_.size();
  const DevicePtr begin = chunks_[chunk].inputs_begin;
  const DevicePtr end = last ? kNoEnd : chunks_[chunk + 1].inputs_begin;
  for (size_t i = 0; i < inputs.size() && input_moves_.empty(); ++i) {
    if (!direct_in_[i] || inputs[i].in_place()) continue;
    const HostInput in = PartWithin(inputs[i], begin, end);
    if (in.row_bytes == 0 || in.rows == 0) continue;
    if (absl::Status s = CopyInput(in, stream); !s.ok()) return s;
    NoteInput();
  }
  if (stream == streams_.compute || !has_input_) return absl::OkStatus();
  return runtime_->Record(events_[chunk].inputs_ready, stream);
}

absl::Status LaunchSlot::EnqueueChunk(const Launch& launch, DevicePtr pool, size_t chunk) {
  const ChunkEvents& events = events_[chunk];
  const bool last = chunk + 1 == chunks_.size();
  absl::Status s;
  if (has_input_ && input_stream_ != streams_.compute) {
    s = runtime_->WaitFor(streams_.compute, events.inputs_ready);
  }
  if (chunk == 0) {
    if (s.ok()) s = EnqueueWrites(launch.page_writes, pool);
    if (s.ok()) s = EnqueueKernels(0, timed_begin_);
  }
  const size_t begin = std::max(timed_begin_, chunks_[chunk].kernels_begin);
  const size_t end = last ? timed_end_ : chunks_[chunk + 1].kernels_begin;
  if (s.ok() && chunk == 0 && !gated_) s = runtime_->Record(started_, streams_.compute);
  if (s.ok()) s = EnqueueKernels(begin, end);
  if (s.ok() && last) s = EnqueueReads(launch.page_reads, pool);
  if (s.ok()) s = runtime_->Record(events.computed, streams_.compute);
  if (!s.ok()) return s;
  if (last) return EnqueueOutputs(launch.outputs);
  s = runtime_->WaitFor(streams_.out, events.computed);
  return s.ok() ? CopyOutputs(launch.outputs, chunks_[chunk].outputs_begin,
                              chunks_[chunk + 1].outputs_begin)
                : s;
}

absl::Status LaunchSlot::EnqueueWrites(std::span<const PageTransfer> writes, DevicePtr pool) {
  for (const PageTransfer& t : writes) {
    if (t.bytes == 0) continue;
    (void)Reaches(t.host, t.bytes);  // the range stays pinned until the launch has ended
    absl::Status s = runtime_->CopyIn(pool + static_cast<uint64_t>(t.pool_offset), t.host, t.bytes,
                                      streams_.compute);
    if (!s.ok()) return s;
  }
  return EnqueueDigests(writes_);
}

absl::Status LaunchSlot::EnqueueReads(std::span<const PageTransfer> reads, DevicePtr pool) {
  if (absl::Status s = EnqueueDigests(reads_); !s.ok()) return s;
  for (const PageTransfer& t : reads) {
    if (t.bytes == 0) continue;
    (void)Reaches(t.host, t.bytes);
    absl::Status s = runtime_->CopyOut(t.host, pool + static_cast<uint64_t>(t.pool_offset), t.bytes,
                                       streams_.compute);
    if (!s.ok()) return s;
  }
  const int64_t digests = digests_taken() * static_cast<int64_t>(sizeof(PartDigest));
  if (digests == 0 || runtime_->kernels_reach_host()) return absl::OkStatus();
  return runtime_->CopyOut(digests_back_.data(), digests_.at(), digests, streams_.compute);
}

absl::Status LaunchSlot::EnqueueDigests(const Digests& digests) {
  if (digests.parts == 0) return absl::OkStatus();
  const PendingKernel& kernel = digests.kernel;
  return runtime_->Launch(kernel.function, kernel.shape, kernel.args.data(), streams_.compute);
}

void LaunchSlot::TakeDigests(const Digests& digests) const {
  if (digests.parts == 0) return;
  const auto* from = reinterpret_cast<const PartDigest*>(digests_back_.data()) + digests.first;
  for (const PageTransfer& t : digests.transfers) {
    if (t.digests == nullptr) continue;
    const int64_t parts = DigestParts(t.bytes);
    std::copy_n(from, parts, t.digests);
    from += parts;
  }
}

absl::Status LaunchSlot::EnqueueKernels(size_t begin, size_t end) {
  const auto kernels = std::span<const PendingKernel>(kernels_).subspan(begin, end - begin);
  if (graphs_ != nullptr && graphs_->Launch(kernels, streams_.compute)) return absl::OkStatus();
  one_by_one_.push_back(kernels);
  for (const PendingKernel& kernel : kernels) {
    absl::Status s =
        runtime_->Launch(kernel.function, kernel.shape, kernel.args.data(), streams_.compute);
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

void LaunchSlot::FindDirectOutputs(std::span<const HostOutput> outputs) {
  direct_out_.clear();
  for (const HostOutput& out : outputs) {
    direct_out_.push_back(out.in_place() || out.shared ||
                          Reaches(out.host, out.rows * out.row_bytes));
  }
}

absl::Status LaunchSlot::EnqueueSequence(const Launch& launch) {
  end_ = done_;
  absl::Status s = EnqueueStaged(launch.inputs);
  if (s.ok()) s = EnqueueKernels(0, kernels_.size());
  return s.ok() ? runtime_->Record(done_, streams_.compute) : s;
}

absl::Status LaunchSlot::CopyOutputs(std::span<const HostOutput> outputs, DevicePtr begin,
                                     DevicePtr end) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!direct_out_[i] || outputs[i].in_place()) continue;
    const HostOutput out = PartWithin(outputs[i], begin, end);
    if (out.row_bytes == 0 || out.rows == 0) continue;
    if (absl::Status s = CopyOutput(out, streams_.out); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status LaunchSlot::EnqueueOutputs(std::span<const HostOutput> outputs) {
  const Event computed = events_[chunks_.size() - 1].computed;
  end_ = outputs_in_place_ ? computed : done_;
  if (outputs_in_place_) return absl::OkStatus();
  if (!output_moves_.empty()) {
    absl::Status s = EnqueueKernels(timed_end_, kernels_.size());
    return s.ok() ? runtime_->Record(done_, streams_.compute) : s;
  }
  if (absl::Status s = runtime_->WaitFor(streams_.out, computed); !s.ok()) return s;
  int64_t staged_end = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const HostOutput& out = outputs[i];
    if (direct_out_[i]) continue;
    const int64_t offset = output_.OffsetOf(out.device);
    staged_end = std::max(staged_end, offset + (out.rows - 1) * out.pitch + out.row_bytes);
  }
  if (staged_end > 0) {
    absl::Status s =
        runtime_->CopyOut(output_.host(0), output_.device(0), staged_end, streams_.out);
    if (!s.ok()) return s;
  }
  absl::Status s = CopyOutputs(outputs, chunks_.back().outputs_begin, kNoEnd);
  if (s.ok()) s = CopyOutputs(outputs, 0, chunks_.front().outputs_begin);
  return s.ok() ? runtime_->Record(done_, streams_.out) : s;
}

absl::Status LaunchSlot::Enqueue(const Launch& launch, DevicePtr pool) {
  absl::Status s = HoldInPlace(launch);
  FindDirectOutputs(launch.outputs);
  if (s.ok() && one_sequence_) return EnqueueSequence(launch);
  if (s.ok()) s = EnqueueStaged(launch.inputs);
  if (s.ok()) s = EnqueueInputs(launch.inputs, 0);
  // Copies of the next chunk come first: giving kernels to the device takes a while.
  for (size_t chunk = 0; chunk < chunks_.size() && s.ok(); ++chunk) {
    if (chunk + 1 < chunks_.size()) s = EnqueueInputs(launch.inputs, chunk + 1);
    if (s.ok()) s = EnqueueChunk(launch, pool, chunk);
  }
  return s;
}

absl::Status LaunchSlot::Submit(const Launch& launch, DevicePtr pool) {
  if (launch.inputs.size() > kMaxTransfers) return Full("inputs", kMaxTransfers);
  if (launch.outputs.size() > kMaxTransfers) return Full("outputs", kMaxTransfers);
  absl::Status s = Enqueue(launch, pool);
  if (s.ok()) {
    running_ = true;
    outputs_ = launch.outputs;
    submitted_ = std::chrono::steady_clock::now();
    if (graphs_ != nullptr) {
      graphs_->Prepare();
      for (const auto& kernels : one_by_one_) graphs_->Learn(kernels);
    }
    return s;
  }
  // What was enqueued still uses this slot's memory: let it end before the slot is used again.
  for (Stream stream : streams_.all()) (void)runtime_->Synchronize(stream);
  metadata_.Forget();
  EndCopies();
  return s;
}

absl::StatusOr<int64_t> LaunchSlot::Wait(std::chrono::milliseconds watchdog) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    absl::StatusOr<bool> done = runtime_->Done(end_);
    if (!done.ok() || *done) {
      EndCopies();
      running_ = false;
      if (!done.ok()) return done.status();
      break;
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > watchdog) {
      running_ = false;
      return absl::DeadlineExceededError(
          absl::StrCat("the GPU has not ended a launch within ", watchdog.count(), " ms"));
    }
    if (waited <= kSpin) continue;
    std::this_thread::sleep_for(kNap);
    ++work_.sleeps;
  }
  work_.polling_ns +=
      std::chrono::nanoseconds(std::chrono::steady_clock::now() - submitted_).count();
  TakeDigests(writes_);
  TakeDigests(reads_);
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (direct_out_[i]) continue;
    const HostOutput& out = outputs_[i];
    const int64_t offset = output_.OffsetOf(out.device);
    work_.copied_bytes += out.rows * out.row_bytes;
    for (int64_t row = 0; row < out.rows; ++row) {
      std::memcpy(out.host + row * out.row_bytes, output_.host(offset + row * out.pitch),
                  static_cast<size_t>(out.row_bytes));
    }
  }
  if (one_sequence_) return static_cast<int64_t>(gate_report()->ended);
  if (!gated_) return runtime_->ElapsedNs(started_, events_[chunks_.size() - 1].computed);
  was_late_ = gate_report()->late != 0;
  waited_ns_ = static_cast<int64_t>(gate_report()->waited_ns);
  return static_cast<int64_t>(gate_report()->ended);
}

}  // namespace mla::kernels::hip
