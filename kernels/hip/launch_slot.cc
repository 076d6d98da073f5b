#include "kernels/hip/launch_slot.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"

namespace mla::gpu {
namespace {

constexpr auto kSpin = std::chrono::microseconds(300);
constexpr auto kNap = std::chrono::microseconds(20);

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
  for (Event* event : {&slot->inputs_ready_, &slot->started_, &slot->computed_, &slot->done_}) {
    absl::StatusOr<Event> made = runtime->CreateEvent();
    if (!made.ok()) return made.status();
    *event = *made;
  }
  slot->steps_.reserve(kMaxSteps + static_cast<size_t>(sizes.page_ranges));
  slot->inputs_.reserve(kMaxTransfers);
  slot->outputs_.reserve(kMaxTransfers);
  slot->reached_.reserve(kMaxTransfers);
  return slot;
}

LaunchSlot::~LaunchSlot() {
  if (state_ == State::kRunning) EndCopies();
  for (Event event : {inputs_ready_, started_, computed_, done_}) runtime_->Destroy(event);
}

absl::Status LaunchSlot::Begin() {
  if (state_ == State::kRunning) {
    return absl::FailedPreconditionError("the launch slot is still running");
  }
  state_ = State::kRecording;
  metadata_.Clear();
  input_.Clear();
  output_.Clear();
  workspace_used_ = 0;
  steps_.clear();
  inputs_.clear();
  outputs_.clear();
  reached_.clear();
  staged_input_ = staged_output_ = false;
  return absl::OkStatus();
}

absl::Status LaunchSlot::CheckRecording() const {
  return state_ == State::kRecording
             ? absl::OkStatus()
             : absl::FailedPreconditionError("the launch slot is not recording");
}

absl::Status LaunchSlot::AddInput(const Transfer& t) {
  if (inputs_.size() >= kMaxTransfers) return Full("inputs", kMaxTransfers);
  for (int64_t row = 0; !t.direct && row < t.rows; ++row) {
    std::memcpy(input_.host(t.offset + row * t.pitch), t.host + row * t.bytes,
                static_cast<size_t>(t.bytes));
  }
  staged_input_ |= !t.direct;
  inputs_.push_back(t);
  return absl::OkStatus();
}

absl::Status LaunchSlot::AddOutput(const Transfer& t) {
  if (outputs_.size() >= kMaxTransfers) return Full("outputs", kMaxTransfers);
  staged_output_ |= !t.direct;
  outputs_.push_back(t);
  return absl::OkStatus();
}

bool LaunchSlot::Reaches(const void* host, int64_t bytes) {
  const PinnedRanges::Id piece = pinned_->Find(host, bytes);
  if (piece == PinnedRanges::kNone) return false;
  // Tensors of one client lie in one piece, so the last ones are where to look.
  if (std::find(reached_.rbegin(), reached_.rend(), piece) != reached_.rend()) return true;
  if (reached_.size() == reached_.capacity()) return false;
  reached_.push_back(piece);
  return true;
}

void LaunchSlot::EndCopies() {
  pinned_->End(reached_);
  reached_.clear();
}

absl::StatusOr<const void*> LaunchSlot::StageInput(const void* host, int64_t bytes) {
  if (absl::Status s = CheckRecording(); !s.ok()) return s;
  absl::StatusOr<int64_t> at = input_.Take(bytes);
  if (!at.ok()) return at.status();
  auto* const from = static_cast<std::byte*>(const_cast<void*>(host));
  const bool direct = Reaches(from, bytes);
  if (absl::Status s = AddInput({from, *at, bytes, 1, bytes, direct}); !s.ok()) return s;
  return reinterpret_cast<const void*>(input_.device(*at));
}

absl::StatusOr<void*> LaunchSlot::StageOutput(void* host, int64_t bytes) {
  if (absl::Status s = CheckRecording(); !s.ok()) return s;
  absl::StatusOr<int64_t> at = output_.Take(bytes);
  if (!at.ok()) return at.status();
  auto* const to = static_cast<std::byte*>(host);
  const bool direct = Reaches(to, bytes);
  if (absl::Status s = AddOutput({to, *at, bytes, 1, bytes, direct}); !s.ok()) return s;
  return reinterpret_cast<void*>(output_.device(*at));
}

absl::StatusOr<const void*> LaunchSlot::StageInputParts(int64_t rows,
                                                        std::span<const kernels::InputPart> parts) {
  if (absl::Status s = CheckRecording(); !s.ok()) return s;
  int64_t pitch = 0;
  for (const kernels::InputPart& part : parts) pitch += part.row_bytes;
  absl::StatusOr<int64_t> at = input_.Take(rows * pitch);
  if (!at.ok()) return at.status();
  int64_t column = *at;
  for (const kernels::InputPart& part : parts) {
    auto* const from = static_cast<std::byte*>(const_cast<void*>(part.host));
    const bool direct = Reaches(from, rows * part.row_bytes);
    absl::Status s = AddInput({from, column, part.row_bytes, rows, pitch, direct});
    if (!s.ok()) return s;
    column += part.row_bytes;
  }
  return reinterpret_cast<const void*>(input_.device(*at));
}

absl::StatusOr<void*> LaunchSlot::StageOutputParts(int64_t rows,
                                                   std::span<const kernels::OutputPart> parts) {
  if (absl::Status s = CheckRecording(); !s.ok()) return s;
  int64_t pitch = 0;
  for (const kernels::OutputPart& part : parts) pitch += part.row_bytes;
  absl::StatusOr<int64_t> at = output_.Take(rows * pitch);
  if (!at.ok()) return at.status();
  int64_t column = *at;
  for (const kernels::OutputPart& part : parts) {
    auto* const to = static_cast<std::byte*>(part.host);
    if (to != nullptr) {
      const bool direct = Reaches(to, rows * part.row_bytes);
      absl::Status s = AddOutput({to, column, part.row_bytes, rows, pitch, direct});
      if (!s.ok()) return s;
    }
    column += part.row_bytes;
  }
  return reinterpret_cast<void*>(output_.device(*at));
}

absl::StatusOr<void*> LaunchSlot::Workspace(int64_t bytes) {
  if (absl::Status s = CheckRecording(); !s.ok()) return s;
  if (bytes < 0 || workspace_used_ + AlignRegion(bytes) > workspace_.bytes()) {
    return absl::ResourceExhaustedError(absl::StrCat("slot workspace: ", workspace_used_,
                                                     " bytes used, ", bytes, " wanted, limit ",
                                                     workspace_.bytes()));
  }
  const DevicePtr at = workspace_.at() + static_cast<uint64_t>(workspace_used_);
  workspace_used_ += AlignRegion(bytes);
  return reinterpret_cast<void*>(at);
}

absl::Status LaunchSlot::AddKernelBytes(Function function, const LaunchShape& shape,
                                        const void* args, size_t bytes) {
  if (absl::Status s = CheckRecording(); !s.ok()) return s;
  if (steps_.size() == steps_.capacity()) return Full("steps", steps_.capacity());
  Step& step = steps_.emplace_back();
  step.function = function;
  step.shape = shape;
  std::memcpy(step.args.data(), args, bytes);
  return absl::OkStatus();
}

absl::Status LaunchSlot::CopyIn(const Transfer& t) {
  if (t.bytes == 0 || t.rows == 0) return absl::OkStatus();
  const DevicePtr to = input_.device(t.offset);
  if (t.rows == 1 || t.pitch == t.bytes) {
    return runtime_->CopyIn(to, t.host, t.rows * t.bytes, streams_.in);
  }
  return runtime_->CopyRowsIn(to, t.pitch, t.host, t.bytes, t.bytes, t.rows, streams_.in);
}

absl::Status LaunchSlot::CopyOut(const Transfer& t) {
  if (t.bytes == 0 || t.rows == 0) return absl::OkStatus();
  const DevicePtr from = output_.device(t.offset);
  if (t.rows == 1 || t.pitch == t.bytes) {
    return runtime_->CopyOut(t.host, from, t.rows * t.bytes, streams_.out);
  }
  return runtime_->CopyRowsOut(t.host, t.bytes, from, t.pitch, t.bytes, t.rows, streams_.out);
}

absl::Status LaunchSlot::SubmitInputs() {
  if (metadata_.used() > 0) {
    absl::Status s =
        runtime_->CopyIn(metadata_.device(0), metadata_.host(0), metadata_.used(), streams_.in);
    if (!s.ok()) return s;
  }
  // Bytes that pass through the region travel as one copy; gaps left by direct ones are rewritten
  // by those, which follow on the same stream.
  if (staged_input_) {
    absl::Status s = runtime_->CopyIn(input_.device(0), input_.host(0), input_.used(), streams_.in);
    if (!s.ok()) return s;
  }
  for (const Transfer& t : inputs_) {
    if (!t.direct) continue;
    if (absl::Status s = CopyIn(t); !s.ok()) return s;
  }
  if (absl::Status s = runtime_->Record(inputs_ready_, streams_.in); !s.ok()) return s;
  return runtime_->WaitFor(streams_.compute, inputs_ready_);
}

absl::Status LaunchSlot::SubmitSteps() {
  if (absl::Status s = runtime_->Record(started_, streams_.compute); !s.ok()) return s;
  for (const Step& step : steps_) {
    absl::Status s =
        runtime_->Launch(step.function, step.shape, step.args.data(), streams_.compute);
    if (!s.ok()) return s;
  }
  return runtime_->Record(computed_, streams_.compute);
}

absl::Status LaunchSlot::SubmitOutputs() {
  if (absl::Status s = runtime_->WaitFor(streams_.out, computed_); !s.ok()) return s;
  if (staged_output_) {
    absl::Status s =
        runtime_->CopyOut(output_.host(0), output_.device(0), output_.used(), streams_.out);
    if (!s.ok()) return s;
  }
  for (const Transfer& t : outputs_) {
    if (!t.direct) continue;
    if (absl::Status s = CopyOut(t); !s.ok()) return s;
  }
  return runtime_->Record(done_, streams_.out);
}

absl::Status LaunchSlot::Submit() {
  if (absl::Status s = CheckRecording(); !s.ok()) return s;
  if (!pinned_->Begin(reached_)) {
    state_ = State::kIdle;
    return absl::FailedPreconditionError(
        "launch: memory that it was given is no longer registered");
  }
  absl::Status s = SubmitInputs();
  if (s.ok()) s = SubmitSteps();
  if (s.ok()) s = SubmitOutputs();
  if (s.ok()) {
    state_ = State::kRunning;
    return s;
  }
  // What was enqueued still uses this slot's memory: let it end before the slot is used again.
  for (Stream stream : {streams_.in, streams_.compute, streams_.out}) {
    (void)runtime_->Synchronize(stream);
  }
  EndCopies();
  state_ = State::kIdle;
  return s;
}

absl::StatusOr<bool> LaunchSlot::Done() { return runtime_->Done(done_); }

absl::StatusOr<int64_t> LaunchSlot::Wait(std::chrono::milliseconds watchdog) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    absl::StatusOr<bool> done = runtime_->Done(done_);
    if (!done.ok() || *done) {
      EndCopies();
      state_ = State::kIdle;
      if (!done.ok()) return done.status();
      break;
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > watchdog) {
      state_ = State::kIdle;
      return absl::DeadlineExceededError(
          absl::StrCat("the GPU has not ended a launch within ", watchdog.count(), " ms"));
    }
    if (waited > kSpin) std::this_thread::sleep_for(kNap);
  }
  for (const Transfer& t : outputs_) {
    for (int64_t row = 0; !t.direct && row < t.rows; ++row) {
      std::memcpy(t.host + row * t.bytes, output_.host(t.offset + row * t.pitch),
                  static_cast<size_t>(t.bytes));
    }
  }
  return runtime_->ElapsedNs(started_, computed_);
}

}  // namespace mla::gpu
