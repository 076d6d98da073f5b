#include "client/mlactl/agents/turn_worker.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/status_macros.h"
#include "client/cpp/streams/errors.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/transport.h"
#include "client/mlactl/tensors/random_tensors.h"

namespace mla::mlactl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kAlignment = 64;
constexpr double kDeviation = 0.1;

uint64_t AlignUp(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The bytes of an attend's tensors, which follow each other at multiples of 64 bytes.
struct CallBytes {
  uint64_t kv, q, o;
  uint64_t sum() const { return AlignUp(kv) + AlignUp(q) + AlignUp(o); }
};

CallBytes BytesOf(const v1::ModelSpec& model, v1::Profile profile, uint64_t rows) {
  const v1::Geometry& geometry = model.geometry();
  const uint64_t rows_heads = rows * geometry.num_heads();
  const bool absorbed = profile == v1::PROFILE_ABSORBED;
  const uint64_t query = absorbed ? geometry.kv_lora_rank() : geometry.nope_dim();
  const uint64_t value = absorbed ? geometry.kv_lora_rank() : geometry.v_dim();
  return {rows * (geometry.kv_lora_rank() + geometry.rope_dim()) * 2,
          rows_heads * (query + geometry.rope_dim()) * 2, rows_heads * value * 2};
}

int64_t NanosSince(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // namespace

absl::StatusOr<std::unique_ptr<TurnWorker>> TurnWorker::Create(const BenchOptions& options,
                                                               const std::string& model_id,
                                                               uint32_t index,
                                                               std::function<bool()> stopping) {
  std::unique_ptr<TurnWorker> worker(new TurnWorker(options, model_id, std::move(stopping)));
  MLA_RETURN_IF_ERROR(worker->Connect(index));
  return worker;
}

absl::Status TurnWorker::Connect(uint32_t index) {
  const BenchPoint& point = options_.points.front();
  client::ClientOptions options = options_.client;
  const CallBytes most = BytesOf(options_.model, point.profile, options_.scene.prefill_rows);
  options.shared_bytes = most.sum() + (8u << 20);
  SetTransport(point.transport, options_.spin_us, &options);
  MLA_ASSIGN_OR_RETURN(client_, client::Client::Connect(options_.target, options));
  most_rows_ = std::min(client_->info().limits().max_step_rows(), options_.scene.prefill_rows);
  MLA_ASSIGN_OR_RETURN(session_, client_->OpenSession());
  PlaceTensors(index);
  return absl::OkStatus();
}

// Puts inputs in one block and the output in another, as shared memory requires.
void TurnWorker::PlaceTensors(uint32_t index) {
  const BenchPoint& point = options_.points.front();
  const CallBytes bytes = BytesOf(options_.model, point.profile, most_rows_);
  const uint64_t in_bytes = AlignUp(bytes.kv) + bytes.q;
  std::byte* in = session_->Allocate(in_bytes).data();
  std::byte* out = in == nullptr ? nullptr : session_->Allocate(bytes.o).data();
  if (out == nullptr) {
    own_.resize(bytes.sum() + kAlignment);
    void* start = own_.data();
    size_t room = own_.size();
    in = static_cast<std::byte*>(std::align(kAlignment, bytes.sum(), start, room));
    out = in + AlignUp(in_bytes);
  }
  std::vector<uint16_t> values(in_bytes / 2);
  FillRandomBf16(options_.load.seed + index, kDeviation, values);
  std::memcpy(in, values.data(), in_bytes);
  std::memset(out, 0, bytes.o);
  call_.num_heads = options_.model.geometry().num_heads();
  call_.profile = point.profile;
  call_.kv = in;
  call_.q = in + AlignUp(bytes.kv);
  call_.o = out;
}

absl::StatusOr<TurnResult> TurnWorker::Run(const Trace& trace, const Turn& turn, bool keep) {
  TurnResult result;
  if (!turn.branch) Drop();
  while (true) {
    const absl::Status status = Try(trace, turn, keep, &result);
    if (status.ok()) return result;
    const auto detail = client::DetailOf(status);
    if (!detail || detail->retry_after_ms() == 0) return status;
    ++result.refused;
    std::this_thread::sleep_for(std::chrono::milliseconds(detail->retry_after_ms()));
    if (stopping_()) return absl::CancelledError("interrupted");
  }
}

absl::StatusOr<client::Sequence> TurnWorker::Open(const Trace& trace, const Turn& turn,
                                                  TurnResult* result) {
  v1::Prefix prefix;
  const auto name = [&](uint32_t first) {
    const std::vector<uint32_t> tokens = trace.Tokens(turn, first, turn.input_rows);
    prefix.mutable_token_ids()->Assign(tokens.begin(), tokens.end());
    // The last row is computed, because its output is the first of the turn.
    prefix.set_max_rows(turn.input_rows - 1);
  };
  v1::PrefixMatch match;
  std::optional<client::Sequence> sequence;
  if (turn.branch && kept_) {
    const uint32_t shared =
        std::min<uint32_t>({trace.Shared(kept_->turn, turn), turn.input_rows - 1,
                            static_cast<uint32_t>(kept_->sequence.length())});
    MLA_ASSIGN_OR_RETURN(sequence, kept_->sequence.Fork(shared));
    // A prompt of one row has nothing to match, and the server takes a bound of 0 as unbounded.
    if (turn.input_rows > 1) {
      name(shared);
      MLA_ASSIGN_OR_RETURN(match, sequence->Match(prefix, shared));
    }
  } else {
    if (turn.input_rows > 1) name(0);
    MLA_ASSIGN_OR_RETURN(sequence, client_->OpenSequence(model_id_, "", prefix, &match));
  }
  result->end = match.end();
  result->found = static_cast<uint32_t>(sequence->length());
  return *std::move(sequence);
}

absl::Status TurnWorker::Append(client::Sequence* sequence, uint32_t rows) {
  client::BeginOptions options;
  options.lease_ms = StepLeaseMs(*client_);
  MLA_ASSIGN_OR_RETURN(auto step, session_->Begin(model_id_, {{sequence, rows}}, options));
  call_.row_count = rows;
  for (uint32_t layer = 0; layer < options_.model.layers(); ++layer) {
    if (stopping_()) return absl::CancelledError("interrupted");
    call_.layer = layer;
    MLA_RETURN_IF_ERROR(step->Attend(call_).status());
  }
  return step->End().status();
}

absl::Status TurnWorker::Try(const Trace& trace, const Turn& turn, bool keep, TurnResult* result) {
  const Clock::time_point start = Clock::now();
  result->open_from_ms = UnixMillis();
  absl::StatusOr<client::Sequence> sequence = Open(trace, turn, result);
  result->open_to_ms = UnixMillis();
  if (!sequence.ok()) return sequence.status();
  while (sequence->length() < turn.input_rows) {
    const auto rows =
        static_cast<uint32_t>(std::min<uint64_t>(most_rows_, turn.input_rows - sequence->length()));
    MLA_RETURN_IF_ERROR(Append(&*sequence, rows));
  }
  result->first_ns = NanosSince(start);
  result->next_ns.clear();
  for (uint32_t output = 1; output < turn.output_rows; ++output) {
    const Clock::time_point before = Clock::now();
    MLA_RETURN_IF_ERROR(Append(&*sequence, 1));
    result->next_ns.push_back(NanosSince(before));
  }
  // Declares the outputs, so that later turns find their rows.
  v1::Prefix prefix;
  const std::vector<uint32_t> tokens =
      trace.Tokens(turn, turn.input_rows, static_cast<uint32_t>(sequence->length()));
  prefix.mutable_token_ids()->Assign(tokens.begin(), tokens.end());
  if (!tokens.empty()) {
    MLA_RETURN_IF_ERROR(sequence->Match(prefix, turn.input_rows).status());
  }
  result->done = true;
  if (keep) {
    kept_.emplace(Kept{turn, *std::move(sequence)});
    return absl::OkStatus();
  }
  return sequence->Release();
}

}  // namespace mla::mlactl
