// A command ring used by any client. Whatever the client writes into its region, the server writes
// only where a request has offered room, and no memory of another tenant changes.
//
// An input is a list of actions: entries, bytes of the arena, words of the header, time. This
// thread polls the ring and steps the engine, so that an input always has the same effect.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/testing/heap_buffers.h"
#include "server/memory/shared_region.h"
#include "server/shared_memory/command_ring.h"
#include "tests/fuzz/harness/input.h"
#include "tests/fuzz/harness/target.h"
#include "tests/integration/shared_memory/ring/ring_hand.h"

namespace mla::fuzz {
namespace {

using integration::RingHand;
using server::SharedRegion;

constexpr uint32_t kEntries = 4;
constexpr uint64_t kArenaBytes = 32768;
constexpr int kSequences = 1100;  // their lengths fit no slot

enum Action : char { kEntry, kBegin, kBytes, kHeader, kTime, kTake, kActions };

scheduler::Limits SmallLimits() {
  scheduler::Limits limits;
  limits.kv_cache_bytes = 1 << 18;
  limits.weights_bytes = 1 << 16;
  limits.max_sequences = kSequences;
  limits.max_step_sequences = kSequences;
  limits.max_step_rows = kSequences;
  limits.max_open_steps = 4;
  limits.queue_requests = 16;
  limits.max_pages_per_sequence = 16;
  limits.max_sequence_rows = 64;
  limits.max_layers = 1;
  limits.max_heads = 2;
  limits.max_row_dim = 12;
  limits.max_v_dim = 1;
  limits.launch_rows = 64;
  limits.launch_packed_rows = 128;
  limits.launch_requests = 64;
  limits.prefill_rows = 64;
  limits.default_page_size = 4;
  return limits;
}

// The server's side of one ring; a new one for every input.
class Side {
 public:
  explicit Side(server::SharedRegionTable* regions) : regions_(regions) {
    scheduler::EngineOptions options;
    options.limits = SmallLimits();
    options.dedicated_thread = false;
    engine_ =
        *scheduler::Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock_);
    scheduler::ModelSpec model;
    model.id = "m";
    model.geometry = {2, 8, 4, 0, 0};
    model.layers = 1;
    model.softmax_scale = 1;
    Require(engine_->RegisterModel("t", model).ok() ? "" : "no model");
    pool_ = std::make_shared<server::AttendMessagePool>(
        std::make_unique<scheduler::testing::HeapBuffer>(4096), engine_->tenants());
    region_ = *regions->Create("t", kArenaBytes, wire::RingBytes(kEntries));
    server::CommandRingOptions ring;
    ring.engine = engine_.get();
    ring.pool = pool_;
    ring.metrics = &metrics_;
    ring.tenant = "t";
    ring.boot_id = 7;
    ring.entries = kEntries;
    ring_ = std::make_unique<server::CommandRing>(std::move(ring), region_);
    hand_.emplace(std::span(region_->data(), region_->size()), kEntries);
    shadow_.assign(region_->data(), region_->data() + region_->size());
    writable_.assign(region_->size(), false);
  }
  ~Side() {
    ring_.reset();
    regions_->Remove(*region_);
  }

  // Returns "" or a fault in the server's behaviour so far.
  std::string Do(const std::string& input);

 private:
  std::string Act(std::string_view* input);
  void Begin(std::string_view* input);
  void Submit(const wire::SubmissionEntry& entry);
  void Poke(uint64_t offset, std::string_view bytes);
  std::string CheckCompletions();
  std::string CheckMemory() const;

  server::SharedRegionTable* const regions_;
  scheduler::SimulatedClock clock_{1};
  server::Metrics metrics_;
  std::unique_ptr<scheduler::Engine> engine_;
  std::shared_ptr<server::AttendMessagePool> pool_;
  std::shared_ptr<SharedRegion> region_;
  std::unique_ptr<server::CommandRing> ring_;
  std::optional<RingHand> hand_;
  std::vector<scheduler::SequenceId> sequences_;
  uint64_t taken_ = 0;
  std::vector<std::byte> shadow_;  // the region as the client wrote it
  std::vector<bool> writable_;     // bytes that requests have offered
};

void Side::Poke(uint64_t offset, std::string_view bytes) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    region_->data()[offset + i] = shadow_[offset + i] = static_cast<std::byte>(bytes[i]);
  }
}

void Side::Submit(const wire::SubmissionEntry& entry) {
  const auto offer = [this](uint64_t offset, uint64_t bytes) {
    if (!region_->Holds(offset, bytes)) return;
    std::fill_n(writable_.begin() + static_cast<int64_t>(offset), bytes, true);
  };
  if (entry.kind == wire::kEntryMessage) {
    offer(entry.out_offset, entry.num_heads);
  } else if (entry.kind == wire::kEntryAttend) {
    const uint64_t slots = uint64_t{entry.row_count} * entry.num_heads;
    const uint64_t o_bytes = slots * 8 * ((entry.dtypes >> 4) == v1::DTYPE_F32 ? 4 : 2);
    if (slots < kArenaBytes) {
      offer(entry.out_offset, o_bytes);
      if ((entry.flags & wire::kEntryWantLse) != 0) {
        offer(entry.out_offset + wire::AlignShared(o_bytes), slots * 4);
      }
    }
  }
  hand_->Submit(entry);
  ring_->Poll();
}

// A BeginStep of existing sequences. Their ids are random, so an input could not name them.
void Side::Begin(std::string_view* input) {
  v1::AttendStreamRequest request;
  v1::BeginStep* const begin = request.mutable_begin_step();
  begin->set_step_id(Number<uint8_t>(input));
  begin->set_lease_ms(Number<uint8_t>(input));
  begin->set_model_id("m");
  const size_t count = Number<uint16_t>(input) % (kSequences + 1);
  while (sequences_.size() < count) {
    scheduler::OpenArgs args;
    args.tenant = "t";
    args.model_id = "m";
    sequences_.push_back(engine_->OpenSequence(args)->id);
  }
  for (size_t i = 0; i < count; ++i) {
    v1::StepSequence* const rows = begin->add_sequences();
    rows->set_sequence_id(sequences_[i]);
    rows->set_epoch(1);
    rows->set_rows(1);
  }
  const std::string bytes = request.SerializeAsString().substr(0, kArenaBytes);
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryMessage;
  entry.row_count = static_cast<uint32_t>(bytes.size());
  entry.in_offset = region_->arena_offset();
  entry.out_offset = region_->arena_offset() + Number<uint16_t>(input);
  entry.num_heads = Number<uint16_t>(input);
  Poke(entry.in_offset, bytes);
  Submit(entry);
}

std::string Side::Act(std::string_view* input) {
  switch (Number<uint8_t>(input) % kActions) {
    case kEntry: {
      wire::SubmissionEntry entry{};
      const std::string_view bytes = Take(input, sizeof(entry) - sizeof(entry.sequence));
      std::memcpy(reinterpret_cast<char*>(&entry) + sizeof(entry.sequence), bytes.data(),
                  bytes.size());
      Submit(entry);
      break;
    }
    case kBegin:
      Begin(input);
      break;
    case kBytes: {
      const uint64_t offset = Number<uint16_t>(input) % kArenaBytes;
      const size_t length = std::min<size_t>(Number<uint16_t>(input), kArenaBytes - offset);
      Poke(region_->arena_offset() + offset, Take(input, length));
      break;
    }
    case kHeader: {  // doorbells, waiter flag, count of taken completions, closed
      const uint64_t offset = 64 + Number<uint8_t>(input) % (sizeof(wire::RingHeader) - 72);
      Poke(offset, Take(input, 8));
      break;
    }
    case kTime:
      clock_.Advance(int64_t{Number<uint8_t>(input)} * 1'000'000);
      break;
    default:
      return CheckCompletions();
  }
  for (int i = 0; i < 8 && engine_->Poll(); ++i) {
  }
  return "";
}

std::string Side::CheckCompletions() {
  const uint64_t slots = wire::RepliesOffset(kEntries);
  while (const auto done = hand_->Poll()) {
    if (++taken_ > hand_->published()) return "more completions than submissions";
    if (done->boot_id != 7) return "another boot_id";
    if (done->kind == wire::kEntryAttend) continue;
    if (done->kind != wire::kEntryMessage) return absl::StrCat("kind ", int{done->kind});
    const uint64_t begin = done->message_offset, length = done->message_length;
    const bool in_slot = begin >= slots && begin + length <= wire::RingBytes(kEntries) &&
                         (begin - slots) % wire::kReplySlotBytes + length <= wire::kReplySlotBytes;
    if (!in_slot && !region_->Holds(begin, length)) {
      return absl::StrCat("a message at ", begin, " + ", length);
    }
    const auto reply = hand_->Message(*done);
    // A message in the arena may be invalid, because the client may have overwritten it.
    if (in_slot && !reply.has_value()) return "an invalid message";
    if (in_slot && reply->has_error() && reply->error().detail().reason().empty()) {
      return absl::StrCat("an error without a reason: ", reply->ShortDebugString());
    }
  }
  return "";
}

std::string Side::CheckMemory() const {
  const size_t arena = region_->arena_offset();
  for (size_t i = arena; i < region_->size(); ++i) {
    if (!writable_[i] && region_->data()[i] != shadow_[i]) {
      return absl::StrCat("byte ", i - arena, " of the arena was written");
    }
  }
  // The part that the server wrote before the client saw the region must be unchanged.
  return std::memcmp(region_->data(), shadow_.data(), 32) == 0 ? "" : "the header was written";
}

std::string Side::Do(const std::string& input) {
  std::string_view left = input;
  std::string fault;
  for (int action = 0; action < 64 && !left.empty() && fault.empty(); ++action) {
    fault = Act(&left);
  }
  if (fault.empty()) fault = CheckCompletions();
  if (fault.empty()) fault = CheckMemory();
  ring_->Stop();
  if (fault.empty()) fault = CheckMemory();
  if (fault.empty() && engine_->Stats().open_steps != 0) fault = "a step outlives its ring";
  return fault;
}

// --- Inputs.

template <typename... Numbers>
std::string Packed(Numbers... numbers) {
  std::string bytes;
  (bytes.append(reinterpret_cast<const char*>(&numbers), sizeof(numbers)), ...);
  return bytes;
}

std::string Entry(const wire::SubmissionEntry& entry) {
  return std::string(1, kEntry) +
         std::string(reinterpret_cast<const char*>(&entry) + 4, sizeof(entry) - 4);
}

std::string BeginStep(uint8_t id, uint8_t lease_ms, uint16_t sequences) {
  return std::string(1, kBegin) + Packed(id, lease_ms, sequences, uint16_t{0}, uint16_t{0});
}

std::string Time(uint8_t ms) { return std::string(1, kTime) + Packed(ms); }

// Writes the message's bytes, and an entry that offers `room` bytes at `room_at` of the arena.
std::string Message(const v1::AttendStreamRequest& request, uint64_t room_at, uint32_t room) {
  const std::string bytes = request.SerializeAsString();
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryMessage;
  entry.row_count = static_cast<uint32_t>(bytes.size());
  entry.in_offset = wire::RingBytes(kEntries);
  entry.out_offset = wire::RingBytes(kEntries) + room_at;
  entry.num_heads = room;
  return std::string(1, kBytes) + Packed(uint16_t{0}, static_cast<uint16_t>(bytes.size())) + bytes +
         Entry(entry);
}

std::string EndStep(uint8_t id, uint16_t sequences, uint64_t room_at, uint32_t room) {
  v1::AttendStreamRequest request;
  request.mutable_end_step()->set_step_id(id);
  for (int i = 0; i < sequences; ++i) request.mutable_end_step()->add_committed_rows(0);
  return Message(request, room_at, room);
}

std::string Attend(uint8_t step, uint8_t rows, uint64_t out) {
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryAttend;
  entry.profile = v1::PROFILE_ABSORBED;
  entry.flags = wire::kEntryHasKv | wire::kEntryWantLse;
  entry.step_id = step;
  entry.row_count = rows;
  entry.num_heads = 2;
  entry.in_offset = wire::RingBytes(kEntries);
  entry.out_offset = wire::RingBytes(kEntries) + out;
  return Entry(entry);
}

// Each of these once revealed a fault.
std::vector<std::string> RegressionInputs() {
  const std::string reused = BeginStep(7, 1, 1) + Time(250) + BeginStep(7, 0, kSequences);
  return {
      // An id that is reused after its lease: the reply had the room of the earlier step.
      reused + EndStep(7, kSequences, 0, 0),
      reused + EndStep(7, kSequences, kArenaBytes - 64, 64),
      reused + EndStep(7, kSequences, 0, 1100),
  };
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds = RegressionInputs();
  const std::string take(1, kTake);
  const std::string step = BeginStep(3, 0, 2) + Attend(3, 2, 4096) + take;
  seeds.push_back(step + EndStep(3, 0, 8192, 64) + take);
  seeds.push_back(step + EndStep(3, 2, 0, 0) + BeginStep(3, 50, 5) + take + Time(100));
  seeds.push_back(step + std::string(1, kHeader) + Packed(uint8_t{128}, uint64_t{9}) + step);
  v1::AttendStreamRequest abort;
  abort.mutable_abort_step()->set_step_id(3);
  seeds.push_back(step + Message(abort, 0, 0) + Attend(3, 1, 0));
  return seeds;
}

server::SharedRegionTable* Regions() {
  static server::SharedRegionTable regions({1 << 20, 1 << 24, 64, 64}, {});
  return &regions;
}

std::string CheckOne(const std::string& input) { return Side(Regions()).Do(input); }

}  // namespace

FuzzTarget TargetUnderTest() { return {.seeds = Seeds(), .executions = 1000}; }

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::CheckOne({reinterpret_cast<const char*>(data), size}));
  return 0;
}
