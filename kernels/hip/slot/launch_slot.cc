#include "kernels/hip/slot/launch_slot.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/hip/args/kernel_args.h"

namespace mla::kernels::hip {
namespace {

constexpr auto kSpin = std::chrono::microseconds(300);
constexpr auto kNap = std::chrono::microseconds(20);
// Most blocks of a kernel that waits on the device's units next to a gate.
constexpr uint32_t kBlocksBesideGate = 16;

DevicePtr AddressOf(const void* at) { return reinterpret_cast<DevicePtr>(at); }

absl::Status Full(const char* what, size_t limit) {
  return absl::ResourceExhaustedError(absl::StrCat("launch ", what, ": limit ", limit));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LaunchSlot>> LaunchSlot::Create(GpuRuntime* runtime,
                                                               const Streams& streams,
                                                               std::shared_ptr<PinnedRanges> pinned,
                                                               const SlotSizes& sizes) {
  MLA_ASSIGN_OR_RETURN(auto metadata,
                       StagedRegion::Create(runtime, "launch metadata", sizes.metadata));
  MLA_ASSIGN_OR_RETURN(auto tensors, TensorCopies::Create(runtime, std::move(pinned), sizes.input,
                                                          sizes.output, kMaxTransfers));
  std::unique_ptr<LaunchSlot> slot(new LaunchSlot(runtime, streams, std::move(tensors)));
  slot->metadata_ = std::move(metadata);
  MLA_ASSIGN_OR_RETURN(slot->workspace_, DeviceBuffer::Create(runtime, "slot workspace",
                                                              AlignRegion(sizes.workspace)));
  auto outcome = DeviceBuffer::Create(runtime, "a gate's outcome", sizeof(GateOutcome));
  auto report = PinnedBuffer::Create(runtime, "a gate's outcome", sizeof(GateOutcome));
  if (!outcome.ok() || !report.ok()) return outcome.ok() ? report.status() : outcome.status();
  slot->outcome_ = *std::move(outcome);
  slot->gate_report_ = *std::move(report);
  std::memset(slot->gate_report_.data(), 0, sizeof(GateOutcome));
  const int64_t digests = sizes.digests * static_cast<int64_t>(sizeof(PartDigest));
  auto made_digests = DeviceBuffer::Create(runtime, "digests", digests);
  auto digests_back = PinnedBuffer::Create(runtime, "digests", digests);
  if (!made_digests.ok() || !digests_back.ok()) {
    return made_digests.ok() ? digests_back.status() : made_digests.status();
  }
  slot->digests_ = *std::move(made_digests);
  slot->digests_back_ = *std::move(digests_back);
  for (Event* event : {&slot->inputs_ready_, &slot->started_, &slot->computed_, &slot->done_,
                       &slot->cleared_, &slot->arrived_}) {
    MLA_ASSIGN_OR_RETURN(*event, runtime->CreateEvent());
  }
  slot->kernels_.reserve(kMaxKernels + static_cast<size_t>(sizes.page_ranges));
  // Three sequences: kernels before, inside and after the timed range.
  slot->one_by_one_.reserve(3);
  if (auto graphs = KernelGraphs::Open(runtime); graphs.ok()) slot->graphs_ = *std::move(graphs);
  slot->input_moves_.reserve(kMoves);
  slot->output_moves_.reserve(kMoves);
  return slot;
}

LaunchSlot::~LaunchSlot() {
  if (running_) tensors_.End();
  for (Event event : {inputs_ready_, started_, computed_, done_, cleared_, arrived_}) {
    runtime_->Destroy(event);
  }
}

SlotMemory LaunchSlot::Memory() const {
  const auto region = [](DevicePtr at, int64_t bytes) {
    return std::span(reinterpret_cast<std::byte*>(at), static_cast<size_t>(bytes));
  };
  const StagedRegion &input = tensors_.input(), &output = tensors_.output();
  return {region(input.device(0), input.bytes()), region(output.device(0), output.bytes()),
          region(workspace_.at(), workspace_.bytes())};
}

void LaunchSlot::Begin(const Launch& launch, bool alone) {
  const int64_t bytes = TensorCopies::BytesOf(launch.inputs);
  input_stream_ = alone && bytes <= kMovedBytes ? streams_.compute : streams_.in;
  has_input_ = gated_ = was_late_ = behind_gate_ = gate_is_far_ = false;
  waited_ns_ = 0;
  signals_ = false;
  signal_copy_ = {};
  arrivals_ = {};
  outputs_in_place_ = std::all_of(
      launch.outputs.begin(), launch.outputs.end(),
      [&](const HostOutput& out) { return out.in_place() || CopiedBySignal(launch, out); });
  if (!outputs_in_place_) signal_copy_ = {};
  metadata_.Clear();
  kernels_.clear();
  one_by_one_.clear();
  timed_begin_ = timed_end_ = 0;
  input_moves_.clear();
  output_moves_.clear();
  one_sequence_ = false;
  writes_ = reads_ = {};
  if (!alone || !runtime_->kernels_reach_host()) return;
  if (bytes <= kMovedBytes && TensorCopies::InFewPieces(launch.inputs, kMoves)) {
    tensors_.AddMoves(launch.inputs, input_moves_);
  }
  if (TensorCopies::BytesOf(launch.outputs) <= kMovedBytes &&
      TensorCopies::InFewPieces(launch.outputs, kMoves)) {
    tensors_.AddMoves(launch.outputs, output_moves_);
  }
  one_sequence_ = !input_moves_.empty() && !output_moves_.empty() &&
                  launch.gate.ready.word == nullptr && launch.page_writes.empty() &&
                  launch.page_reads.empty();
}

// True for a small output of a launch with a signal, if the waiting client does not need it first.
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

void LaunchSlot::Abandon() { tensors_.End(); }

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
  const absl::StatusOr<bool> any = tensors_.EnqueueStaged(inputs, stream);
  has_input_ |= any.ok() && *any;
  return any.status();
}

absl::Status LaunchSlot::EnqueueInputs(std::span<const HostInput> inputs) {
  absl::Status s = EnqueueStaged(inputs);
  if (s.ok() && input_moves_.empty()) {
    MLA_ASSIGN_OR_RETURN(const bool any, tensors_.EnqueueDirect(inputs, input_stream_));
    has_input_ |= any;
  }
  if (!s.ok() || input_stream_ == streams_.compute || !has_input_) return s;
  s = runtime_->Record(inputs_ready_, input_stream_);
  return s.ok() ? runtime_->WaitFor(streams_.compute, inputs_ready_) : s;
}

LaunchSlot::Range LaunchSlot::ArrivalRange() const {
  const TensorMove& last = arrivals_.copies.back();
  return {arrivals_.copies.front().to, last.to + static_cast<DevicePtr>(last.bytes)};
}

absl::Status LaunchSlot::Clear(const Range& range, Stream stream) {
  const auto bytes = static_cast<int64_t>(range.end - range.begin);
  absl::Status s = runtime_->Fill(range.begin, kToCome & 0xff, bytes, stream);
  return s.ok() ? runtime_->Record(cleared_, stream) : s;
}

absl::Status LaunchSlot::ClearArrivals() {
  const Range range = ArrivalRange();
  if (range.begin >= cleared_range_.begin && range.end <= cleared_range_.end) {
    return absl::OkStatus();
  }
  absl::Status s = Clear(range, streams_.in);
  return s.ok() ? runtime_->WaitFor(streams_.compute, cleared_) : s;
}

// Enqueued after the kernels that wait for them, because the device fetches new work slowly while
// copies use the bus. Each of these calls may have to wait for a driver call of another thread,
// which waits for the device. So the kernels' wait has a limit (StreamArgs).
absl::Status LaunchSlot::EnqueueArrivals() {
  absl::Status s;
  for (const TensorMove& copy : arrivals_.copies) {
    s = runtime_->CopyIn(copy.to, reinterpret_cast<const void*>(copy.from), copy.bytes,
                         streams_.in);
    if (!s.ok()) break;
  }
  // Stored even if copies were refused, so that the kernels end sooner.
  s.Update(runtime_->StoreWord(arrivals_.word, arrivals_.ticket, streams_.in));
  if (s.ok()) s = runtime_->Record(arrived_, streams_.in);
  return s.ok() ? runtime_->WaitFor(streams_.compute, arrived_) : s;
}

absl::Status LaunchSlot::EnqueueWrites(std::span<const PageTransfer> writes, DevicePtr pool) {
  for (const PageTransfer& t : writes) {
    if (t.bytes == 0) continue;
    (void)Reaches(t.host, t.bytes);  // keeps the range pinned until the launch has ended
    MLA_RETURN_IF_ERROR(runtime_->CopyIn(pool + static_cast<uint64_t>(t.pool_offset), t.host,
                                         t.bytes, streams_.compute));
  }
  return EnqueueDigests(writes_);
}

absl::Status LaunchSlot::EnqueueReads(std::span<const PageTransfer> reads, DevicePtr pool) {
  MLA_RETURN_IF_ERROR(EnqueueDigests(reads_));
  for (const PageTransfer& t : reads) {
    if (t.bytes == 0) continue;
    (void)Reaches(t.host, t.bytes);
    MLA_RETURN_IF_ERROR(runtime_->CopyOut(t.host, pool + static_cast<uint64_t>(t.pool_offset),
                                          t.bytes, streams_.compute));
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

absl::Status LaunchSlot::EnqueueSequence(const Launch& launch) {
  end_ = done_;
  absl::Status s = EnqueueStaged(launch.inputs);
  if (s.ok()) s = EnqueueKernels(0, kernels_.size());
  return s.ok() ? runtime_->Record(done_, streams_.compute) : s;
}

absl::Status LaunchSlot::EnqueueOutputs(std::span<const HostOutput> outputs) {
  end_ = outputs_in_place_ ? computed_ : done_;
  if (outputs_in_place_) return absl::OkStatus();
  if (!output_moves_.empty()) {
    absl::Status s = EnqueueKernels(timed_end_, kernels_.size());
    return s.ok() ? runtime_->Record(done_, streams_.compute) : s;
  }
  MLA_RETURN_IF_ERROR(runtime_->WaitFor(streams_.out, computed_));
  absl::Status s = tensors_.EnqueueStaged(outputs, streams_.out);
  if (s.ok()) s = tensors_.EnqueueDirect(outputs, streams_.out);
  return s.ok() ? runtime_->Record(done_, streams_.out) : s;
}

absl::Status LaunchSlot::Enqueue(const Launch& launch, DevicePtr pool) {
  absl::Status s = tensors_.HoldInPlace(launch);
  tensors_.FindDirect(launch.outputs);
  const bool arrives = !arrivals_.copies.empty();
  if (s.ok() && cleared_range_.end > 0) s = runtime_->WaitFor(streams_.in, cleared_);
  if (!arrives) cleared_range_ = {};  // other launches may write there
  const bool reports = arrives && outputs_in_place_ && launch.page_reads.empty();
  ends_with_report_ = reports;
  report_ = arrives ? arrivals_.report : nullptr;
  ticket_ = arrivals_.ticket;
  if (s.ok() && one_sequence_) return EnqueueSequence(launch);
  if (s.ok()) s = EnqueueInputs(launch.inputs);
  if (s.ok()) s = EnqueueWrites(launch.page_writes, pool);
  if (s.ok()) s = EnqueueKernels(0, timed_begin_);
  if (s.ok() && !gated_ && !reports) s = runtime_->Record(started_, streams_.compute);
  if (s.ok() && arrives) s = ClearArrivals();
  if (s.ok()) s = EnqueueKernels(timed_begin_, timed_end_);
  if (s.ok() && arrives) s = EnqueueArrivals();
  if (s.ok()) s = EnqueueReads(launch.page_reads, pool);
  if (s.ok()) s = runtime_->Record(computed_, streams_.compute);
  if (s.ok()) s = EnqueueOutputs(launch.outputs);
  if (!s.ok() || !arrives) return s;
  // Clears for the next launch, after this one, so that this one's reply does not wait for it.
  cleared_range_ = ArrivalRange();
  return Clear(cleared_range_, streams_.compute);
}

absl::Status LaunchSlot::Submit(const Launch& launch, DevicePtr pool) {
  if (launch.inputs.size() > kMaxTransfers) return Full("inputs", kMaxTransfers);
  if (launch.outputs.size() > kMaxTransfers) return Full("outputs", kMaxTransfers);
  absl::Status s = Enqueue(launch, pool);
  if (s.ok()) {
    running_ = true;
    seen_done_ = false;
    outputs_ = launch.outputs;
    arrivals_ = {};
    submitted_ = std::chrono::steady_clock::now();
    if (graphs_ != nullptr) {
      graphs_->Prepare();
      for (const auto& kernels : one_by_one_) graphs_->Learn(kernels);
    }
    return s;
  }
  // Enqueued work still uses this slot's memory, so it must end before the slot is used again.
  for (Stream stream : streams_.all()) (void)runtime_->Synchronize(stream);
  metadata_.Forget();
  cleared_range_ = {};
  tensors_.End();
  return s;
}

absl::StatusOr<bool> LaunchSlot::Done() {
  if (seen_done_) return true;
  absl::StatusOr<bool> done = AskDone();
  seen_done_ = done.ok() && *done;
  return done;
}

// The device takes microseconds from a kernel's last store to an event that the host sees, so the
// report is read instead.
absl::StatusOr<bool> LaunchSlot::AskDone() const {
  if (!ends_with_report_) return runtime_->Done(end_);
  const auto reported = [this](const uint32_t& ticket) {
    return std::atomic_ref(const_cast<uint32_t&>(ticket)).load(std::memory_order_acquire) ==
           ticket_;
  };
  const auto& tickets = report_->tickets;
  const bool all = std::all_of(std::begin(tickets), std::end(tickets), reported);
  // Queries of a segment without KV rows are copied too, although no kernel waits for them.
  return runtime_->Done(all ? arrived_ : end_);
}

absl::StatusOr<int64_t> LaunchSlot::Wait(std::chrono::milliseconds watchdog) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    absl::StatusOr<bool> done = Done();
    if (!done.ok() || *done) {
      tensors_.End();
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
  tensors_.HandOver(outputs_);
  if (one_sequence_) return static_cast<int64_t>(gate_report()->ended);
  work_.late_copies += report_ != nullptr && report_->impatient == ticket_;
  if (ends_with_report_) {
    const auto& ended = report_->ended;
    const uint64_t last = *std::max_element(std::begin(ended), std::end(ended));
    return static_cast<int64_t>(last - report_->begun);
  }
  if (!gated_) return runtime_->ElapsedNs(started_, computed_);
  was_late_ = gate_report()->late != 0;
  waited_ns_ = static_cast<int64_t>(gate_report()->waited_ns);
  return static_cast<int64_t>(gate_report()->ended);
}

}  // namespace mla::kernels::hip
