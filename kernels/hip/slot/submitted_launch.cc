#include "kernels/hip/slot/submitted_launch.h"

#include <algorithm>
#include <atomic>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "base/pauses.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

constexpr auto kSpin = std::chrono::microseconds(300);

}  // namespace

absl::StatusOr<std::unique_ptr<SubmittedLaunch>> SubmittedLaunch::Create(GpuRuntime* runtime,
                                                                         const Streams& streams,
                                                                         LaunchRecording* recording,
                                                                         TensorCopies* copies) {
  std::unique_ptr<SubmittedLaunch> launch(new SubmittedLaunch(runtime, streams, recording, copies));
  for (Event* event : {&launch->inputs_ready_, &launch->started_, &launch->computed_,
                       &launch->done_, &launch->cleared_, &launch->arrived_}) {
    MLA_ASSIGN_OR_RETURN(*event, runtime->CreateEvent());
  }
  // There are three sequences: kernels before, inside and after the timed range.
  launch->one_by_one_.reserve(3);
  if (auto graphs = KernelGraphs::Open(runtime); graphs.ok()) launch->graphs_ = *std::move(graphs);
  return launch;
}

SubmittedLaunch::~SubmittedLaunch() {
  if (running_) copies_->End();
  for (Event event : {inputs_ready_, started_, computed_, done_, cleared_, arrived_}) {
    runtime_->Destroy(event);
  }
}

absl::Status SubmittedLaunch::EnqueueStaged(std::span<const HostInput> inputs) {
  const Stream stream = recording_.input_stream();
  if (recording_.metadata().changed()) {
    MLA_RETURN_IF_ERROR(runtime_->CopyIn(recording_.metadata().device(0),
                                         recording_.metadata().host(0),
                                         recording_.metadata().used(), stream));
    recording_.metadata().NoteUpload();
    recording_.NoteInput();
  }
  if (!recording_.input_moves().empty()) return absl::OkStatus();
  const absl::StatusOr<bool> any = copies_->EnqueueStaged(inputs, stream);
  if (any.ok() && *any) recording_.NoteInput();
  return any.status();
}

absl::Status SubmittedLaunch::EnqueueInputs(std::span<const HostInput> inputs) {
  absl::Status s = EnqueueStaged(inputs);
  if (s.ok() && recording_.input_moves().empty()) {
    MLA_ASSIGN_OR_RETURN(const bool any, copies_->EnqueueDirect(inputs, recording_.input_stream()));
    if (any) recording_.NoteInput();
  }
  if (!s.ok() || recording_.input_stream() == streams_.compute || !recording_.has_input()) return s;
  s = runtime_->Record(inputs_ready_, recording_.input_stream());
  return s.ok() ? runtime_->WaitFor(streams_.compute, inputs_ready_) : s;
}

SubmittedLaunch::Range SubmittedLaunch::ArrivalRange() const {
  const TensorMove& last = recording_.arrivals().copies.back();
  return {recording_.arrivals().copies.front().to, last.to + static_cast<DevicePtr>(last.bytes)};
}

absl::Status SubmittedLaunch::Clear(const Range& range, Stream stream) {
  const auto bytes = static_cast<int64_t>(range.end - range.begin);
  absl::Status s = runtime_->Fill(range.begin, kToCome & 0xff, bytes, stream);
  return s.ok() ? runtime_->Record(cleared_, stream) : s;
}

absl::Status SubmittedLaunch::ClearArrivals() {
  const Range range = ArrivalRange();
  if (range.begin >= cleared_range_.begin && range.end <= cleared_range_.end) {
    return absl::OkStatus();
  }
  absl::Status s = Clear(range, streams_.in);
  return s.ok() ? runtime_->WaitFor(streams_.compute, cleared_) : s;
}

// Enqueues copies after the kernels that wait for them, because the device fetches new work slowly
// while copies use the bus. Each of these calls may have to wait for a driver call of another
// thread, which waits for the device. So the kernels' wait has a limit (StreamArgs).
absl::Status SubmittedLaunch::EnqueueArrivals() {
  absl::Status s;
  for (const TensorMove& copy : recording_.arrivals().copies) {
    s = runtime_->CopyIn(copy.to, reinterpret_cast<const void*>(copy.from), copy.bytes,
                         streams_.in);
    if (!s.ok()) break;
  }
  // The value is stored even if copies were refused, so that the kernels end sooner.
  s.Update(
      runtime_->StoreWord(recording_.arrivals().word, recording_.arrivals().ticket, streams_.in));
  if (s.ok()) s = runtime_->Record(arrived_, streams_.in);
  return s.ok() ? runtime_->WaitFor(streams_.compute, arrived_) : s;
}

absl::Status SubmittedLaunch::EnqueueWrites(std::span<const PageTransfer> writes, DevicePtr pool) {
  for (const PageTransfer& t : writes) {
    if (t.bytes == 0) continue;
    (void)recording_.Reaches(t.host, t.bytes);  // keeps the range pinned until the launch has ended
    MLA_RETURN_IF_ERROR(runtime_->CopyIn(pool + static_cast<uint64_t>(t.pool_offset), t.host,
                                         t.bytes, streams_.compute));
  }
  return EnqueueDigests(recording_.writes());
}

absl::Status SubmittedLaunch::EnqueueReads(std::span<const PageTransfer> reads, DevicePtr pool) {
  MLA_RETURN_IF_ERROR(EnqueueDigests(recording_.reads()));
  for (const PageTransfer& t : reads) {
    if (t.bytes == 0) continue;
    (void)recording_.Reaches(t.host, t.bytes);
    MLA_RETURN_IF_ERROR(runtime_->CopyOut(t.host, pool + static_cast<uint64_t>(t.pool_offset),
                                          t.bytes, streams_.compute));
  }
  const int64_t digests = recording_.digests_taken() * static_cast<int64_t>(sizeof(PartDigest));
  if (digests == 0 || runtime_->kernels_reach_host()) return absl::OkStatus();
  return runtime_->CopyOut(recording_.buffers().digests_back.data(),
                           recording_.buffers().digests.at(), digests, streams_.compute);
}

absl::Status SubmittedLaunch::EnqueueDigests(const LaunchRecording::Digests& digests) {
  if (digests.parts == 0) return absl::OkStatus();
  const PendingKernel& kernel = digests.kernel;
  return runtime_->Launch(kernel.function, kernel.shape, kernel.args.data(), streams_.compute);
}

void SubmittedLaunch::TakeDigests(const LaunchRecording::Digests& digests) const {
  if (digests.parts == 0) return;
  const auto* from =
      reinterpret_cast<const PartDigest*>(recording_.buffers().digests_back.data()) + digests.first;
  for (const PageTransfer& t : digests.transfers) {
    if (t.digests == nullptr) continue;
    const int64_t parts = DigestParts(t.bytes);
    std::copy_n(from, parts, t.digests);
    from += parts;
  }
}

absl::Status SubmittedLaunch::EnqueueKernels(size_t begin, size_t end) {
  const auto kernels = recording_.kernels().subspan(begin, end - begin);
  if (graphs_ != nullptr && graphs_->Launch(kernels, streams_.compute)) return absl::OkStatus();
  one_by_one_.push_back(kernels);
  for (const PendingKernel& kernel : kernels) {
    MLA_RETURN_IF_ERROR(
        runtime_->Launch(kernel.function, kernel.shape, kernel.args.data(), streams_.compute));
  }
  return absl::OkStatus();
}

absl::Status SubmittedLaunch::EnqueueSequence(std::span<const HostInput> inputs) {
  end_ = done_;
  absl::Status s = EnqueueStaged(inputs);
  if (s.ok()) s = EnqueueKernels(0, recording_.kernels().size());
  return s.ok() ? runtime_->Record(done_, streams_.compute) : s;
}

absl::Status SubmittedLaunch::EnqueueOutputs(std::span<const HostOutput> outputs) {
  end_ = recording_.outputs_in_place() ? computed_ : done_;
  if (recording_.outputs_in_place()) return absl::OkStatus();
  if (!recording_.output_moves().empty()) {
    absl::Status s = EnqueueKernels(recording_.timed_end(), recording_.kernels().size());
    return s.ok() ? runtime_->Record(done_, streams_.compute) : s;
  }
  MLA_RETURN_IF_ERROR(runtime_->WaitFor(streams_.out, computed_));
  absl::Status s = copies_->EnqueueStaged(outputs, streams_.out);
  if (s.ok()) s = copies_->EnqueueDirect(outputs, streams_.out);
  return s.ok() ? runtime_->Record(done_, streams_.out) : s;
}

absl::Status SubmittedLaunch::Enqueue(const Launch& launch, const LaunchTensors& tensors,
                                      DevicePtr pool) {
  absl::Status s = copies_->HoldInPlace(tensors);
  copies_->FindDirect(tensors.outputs);
  const bool arrives = !recording_.arrivals().copies.empty();
  if (s.ok() && cleared_range_.end > 0) s = runtime_->WaitFor(streams_.in, cleared_);
  if (!arrives) cleared_range_ = {};  // other launches may write there
  const bool reports = arrives && recording_.outputs_in_place() && launch.page_reads.empty();
  ends_with_report_ = reports;
  report_ = arrives ? recording_.arrivals().report : nullptr;
  ticket_ = recording_.arrivals().ticket;
  if (s.ok() && recording_.one_sequence()) return EnqueueSequence(tensors.inputs);
  if (s.ok()) s = EnqueueInputs(tensors.inputs);
  if (s.ok()) s = EnqueueWrites(launch.page_writes, pool);
  if (s.ok()) s = EnqueueKernels(0, recording_.timed_begin());
  if (s.ok() && !recording_.gated() && !reports) s = runtime_->Record(started_, streams_.compute);
  if (s.ok() && arrives) s = ClearArrivals();
  if (s.ok()) s = EnqueueKernels(recording_.timed_begin(), recording_.timed_end());
  if (s.ok() && arrives) s = EnqueueArrivals();
  if (s.ok()) s = EnqueueReads(launch.page_reads, pool);
  if (s.ok()) s = runtime_->Record(computed_, streams_.compute);
  if (s.ok()) s = EnqueueOutputs(tensors.outputs);
  if (!s.ok() || !arrives) return s;
  // Clears for the next launch, after this one, so that this one's reply does not wait for it.
  cleared_range_ = ArrivalRange();
  return Clear(cleared_range_, streams_.compute);
}

absl::Status SubmittedLaunch::Submit(const Launch& launch, const LaunchTensors& tensors,
                                     DevicePtr pool) {
  was_late_ = false;
  waited_ns_ = 0;
  one_by_one_.clear();
  absl::Status s = Enqueue(launch, tensors, pool);
  if (s.ok()) {
    running_ = true;
    seen_done_ = false;
    first_look_ = {};
    outputs_ = tensors.outputs;
    submitted_ = std::chrono::steady_clock::now();
    if (graphs_ != nullptr) {
      graphs_->Prepare();
      for (const auto& kernels : one_by_one_) graphs_->Learn(kernels);
    }
    return s;
  }
  // Enqueued work still uses this slot's memory, so it must end before the slot is used again.
  for (Stream stream : streams_.all()) (void)runtime_->Synchronize(stream);
  recording_.metadata().Forget();
  cleared_range_ = {};
  copies_->End();
  return s;
}

absl::StatusOr<bool> SubmittedLaunch::Done() {
  if (seen_done_) return true;
  absl::StatusOr<bool> done = AskDone();
  seen_done_ = done.ok() && *done;
  if (!seen_done_ && first_look_ == std::chrono::steady_clock::time_point()) {
    first_look_ = std::chrono::steady_clock::now();
  }
  return done;
}

bool SubmittedLaunch::Overdue(std::chrono::milliseconds watchdog) const {
  return !seen_done_ && std::chrono::steady_clock::now() - first_look_ > watchdog;
}

// The device takes microseconds from a kernel's last store to an event that the host sees, so the
// report is read instead.
absl::StatusOr<bool> SubmittedLaunch::AskDone() const {
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

absl::Status SubmittedLaunch::AwaitEnd(std::chrono::milliseconds watchdog) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    absl::StatusOr<bool> done = Done();
    if (!done.ok() || *done) {
      copies_->End();
      running_ = false;
      return done.status();
    }
    if (Overdue(watchdog)) {
      running_ = false;
      return absl::DeadlineExceededError(
          absl::StrCat("the GPU has not ended a launch within ", watchdog.count(), " ms"));
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited <= kSpin) continue;
    // Counted from the end of the spin. An eighth of all would be 37 us from the first nap on.
    Nap(waited - kSpin);
    ++work_.sleeps;
  }
}

absl::StatusOr<int64_t> SubmittedLaunch::Wait(std::chrono::milliseconds watchdog) {
  MLA_RETURN_IF_ERROR(AwaitEnd(watchdog));
  work_.polling_ns +=
      std::chrono::nanoseconds(std::chrono::steady_clock::now() - submitted_).count();
  TakeDigests(recording_.writes());
  TakeDigests(recording_.reads());
  copies_->HandOver(outputs_);
  if (recording_.one_sequence()) return static_cast<int64_t>(recording_.gate_report()->ended);
  work_.late_copies += report_ != nullptr && report_->impatient == ticket_;
  if (ends_with_report_) {
    const auto& ended = report_->ended;
    const uint64_t last = *std::max_element(std::begin(ended), std::end(ended));
    return static_cast<int64_t>(last - report_->begun);
  }
  if (!recording_.gated()) return runtime_->ElapsedNs(started_, computed_);
  was_late_ = recording_.gate_report()->late != 0;
  waited_ns_ = static_cast<int64_t>(recording_.gate_report()->waited_ns);
  return static_cast<int64_t>(recording_.gate_report()->ended);
}

}  // namespace mla::kernels::hip
