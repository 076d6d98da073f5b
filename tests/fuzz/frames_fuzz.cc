// Frames of a command ring over UCX, in both directions. Whatever a client sends, its relay writes
// only where the frames said, inside the arena; hands on what was sent, in the order of its
// numbers; and sends back nothing from outside the arena and the reply slots. Whatever a relay
// sends, a client takes only completions to its requests, in their order, with the outputs that
// arrived.
//
// An input is a list of actions for one of the two ends. UCX is the fake of tests/fake_ucx.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/ucx/ucx_memory.h"
#include "proto/wire/ucx/frame_batch.h"
#include "proto/wire/ucx/frames.h"
#include "proto/wire/ucx/ucx_link.h"
#include "relay/relay.h"
#include "tests/fake_ucx/fake_ucx.h"
#include "tests/fake_ucx/ring_pair.h"
#include "tests/fake_ucx/test_ring.h"
#include "tests/fuzz/harness/input.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

constexpr uint32_t kEntries = 4;
constexpr uint64_t kArenaBytes = 16384;
constexpr uint64_t kArena = wire::RingBytes(kEntries);
constexpr uint64_t kRegionBytes = kArena + kArenaBytes;
constexpr int kMostActions = 48;
constexpr int kRounds = 24;  // of progress after an action
constexpr std::byte kUntouched{0x5a};

enum End : char { kRelayEnd, kClientEnd, kEnds };
enum Action : char { kFrame, kAnswer, kRun, kReorder, kList, kActions };

wire::UcxToken Token() {
  wire::UcxToken token;
  token.fill(7);
  return token;
}

template <typename Frame>
std::span<const std::byte> HeaderOf(const Frame& frame) {
  return std::as_bytes(std::span<const Frame, 1>(&frame, 1));
}

// Changes bytes of a frame that was well formed: a count, and for each an offset and what the byte
// is combined with.
template <typename Frame>
void Patch(Frame* frame, std::string_view* input) {
  auto* const bytes = reinterpret_cast<unsigned char*>(frame);
  for (int changes = Number<uint8_t>(input) % 8; changes > 0; --changes) {
    const size_t at = Number<uint8_t>(input) % sizeof(Frame);
    bytes[at] ^= Number<uint8_t>(input);
  }
}

std::vector<std::byte> Payload(size_t bytes, uint64_t seed) {
  std::vector<std::byte> payload(bytes);
  for (size_t i = 0; i < bytes; ++i) payload[i] = static_cast<std::byte>(i * 31 + seed * 7 + 1);
  return payload;
}

template <typename Frame>
struct Sent {
  Frame frame{};
  std::vector<std::byte> payload;  // UCX reads it until it has left
};

// The peer of the end under test. Keeps what arrives.
template <typename Frame>
class Peer final : public wire::UcxReceiver {
 public:
  struct Arrival {
    Frame frame{};
    std::vector<std::byte> payload;
  };

  absl::StatusOr<std::byte*> Place(std::span<const std::byte> header, size_t bytes) override {
    arrivals_.push_back(std::make_unique<Arrival>());
    Arrival& arrival = *arrivals_.back();
    if (header.size() != sizeof(Frame)) fault = absl::StrCat("a header of ", header.size());
    std::memcpy(&arrival.frame, header.data(), std::min(header.size(), sizeof(Frame)));
    if (arrival.frame.token != Token()) fault = "a frame without its token";
    arrival.payload.resize(bytes + 1);
    return arrival.payload.data();
  }
  void OnArrived(std::span<const std::byte>) override {}
  void OnSent(uint64_t) override {}

  const std::vector<std::unique_ptr<Arrival>>& arrivals() const { return arrivals_; }
  std::string fault;

 private:
  std::vector<std::unique_ptr<Arrival>> arrivals_;
};

// ------------------------------------------------------------------------------ A client's frames

class RelayEnd final {
 public:
  RelayEnd() {
    fake_ucx::Reset();
    std::memset(ring_.region().data(), static_cast<int>(kUntouched), kRegionBytes);
    relay::RelayOptions options;
    options.token = Token();
    relay_ = *relay::Relay::Open(fake_ucx::Api(), options, &ring_);
    link_ = *wire::UcxLink::Open(fake_ucx::Api(), {}, &peer_);
    Require(relay_->Connect(link_->address()).ok() ? "" : "no connection");
    Require(link_->Connect(relay_->address()).ok() ? "" : "no connection");
    raw_ = std::make_unique<fake_ucx::RawPeer>(relay_->address());
    Require(raw_->connected() ? "" : "no connection");
  }
  ~RelayEnd() {
    relay_.reset();
    link_.reset();
  }

  std::string Do(std::string_view input) {
    for (int action = 0; action < kMostActions && !input.empty(); ++action) {
      switch (Number<uint8_t>(&input) % kActions) {
        case kFrame:
          Send(&input);
          break;
        case kAnswer:
          Answer(&input);
          break;
        case kReorder:
          fake_ucx::faults().reorder = Number<uint8_t>(&input);
          break;
        case kList:
          SendList(&input);
          break;
        default:
          Run();
      }
      if (std::string fault = CheckEntries(); !fault.empty()) return fault;
    }
    Run();
    return Check();
  }

 private:
  using SentFrame = Sent<wire::UcxRequestFrame>;

  void Run() {
    for (int i = 0; i < kRounds; ++i) {
      relay_->Step();
      link_->Progress();
    }
  }

  wire::UcxRequestFrame NextFrame(std::string_view* input) {
    wire::UcxRequestFrame frame{};
    frame.token = Token();
    frame.number = next_++;
    frame.place = kArena + frame.number % kEntries * (kArenaBytes / kEntries);
    frame.out_bytes = Number<uint16_t>(input) % (kArenaBytes / kEntries);
    frame.entry.kind = Number<uint8_t>(input) % 4 == 0 ? wire::kEntryMessage : wire::kEntryAttend;
    frame.entry.tag = 100 + frame.number;
    frame.entry.in_offset = frame.entry.out_offset = frame.place;
    return frame;
  }

  // The bytes that a frame with such a payload may change.
  void Name(const wire::UcxRequestFrame& frame, size_t bytes) {
    if (frame.token != Token() || frame.place < kArena || frame.place >= kRegionBytes) return;
    const uint64_t end = std::min(frame.place + bytes, kRegionBytes);
    std::fill(named_.begin() + static_cast<int64_t>(frame.place),
              named_.begin() + static_cast<int64_t>(end), true);
  }

  // Up to four frames in one message, with changes anywhere in their list.
  void SendList(std::string_view* input) {
    wire::FrameBatch batch;
    for (int frames = 1 + Number<uint8_t>(input) % 4; frames > 0; --frames) {
      const wire::UcxRequestFrame frame = NextFrame(input);
      const uint16_t bytes = Number<uint16_t>(input) % (wire::kMostBatchedPayload + 200);
      if (bytes > wire::kMostBatchedPayload) {
        batch.AddCarried(HeaderOf(frame));
      } else {
        batch.Add(HeaderOf(frame), Payload(bytes, frame.number));
      }
    }
    std::vector<std::byte> list(batch.bytes().begin(), batch.bytes().end());
    for (int changes = Number<uint8_t>(input) % 8; changes > 0; --changes) {
      list[Number<uint16_t>(input) % list.size()] ^= static_cast<std::byte>(Number<uint8_t>(input));
    }
    auto sent = std::make_unique<SentFrame>();
    sent->payload = Payload(Number<uint16_t>(input) % kArenaBytes, 1);
    wire::BatchReader reader(list);
    for (wire::BatchReader::Frame one; !reader.done() && reader.Next(&one);) {
      auto listed = std::make_unique<SentFrame>();
      if (one.header.size() != sizeof(listed->frame)) break;
      std::memcpy(&listed->frame, one.header.data(), one.header.size());
      Name(listed->frame, one.payload_follows ? sent->payload.size() : one.payload.size());
      sent_.push_back(std::move(listed));
    }
    raw_->Send(wire::kUcxBatchId, list, sent->payload);
    sent_.push_back(std::move(sent));
  }

  void Send(std::string_view* input) {
    auto sent = std::make_unique<SentFrame>();
    wire::UcxRequestFrame& frame = sent->frame;
    frame = NextFrame(input);
    const size_t bytes = Number<uint16_t>(input) % (2 * kArenaBytes);
    Patch(&frame, input);
    sent->payload = Payload(bytes, frame.number);
    Name(frame, bytes);
    const size_t header = sizeof(frame) - (Number<uint8_t>(input) == 255 ? 1 : 0);
    link_->Send(HeaderOf(frame).first(header), sent->payload, frame.number).IgnoreError();
    sent_.push_back(std::move(sent));
  }

  void Answer(std::string_view* input) {
    const auto size = Number<uint16_t>(input);
    if (answered_ == ring_.submitted.size()) return Run();
    const wire::SubmissionEntry& entry = ring_.submitted[answered_++];
    wire::CompletionEntry done{};
    done.kind = entry.kind;
    done.tag = entry.tag;
    if (entry.kind == wire::kEntryMessage) {
      done.message_offset = wire::RepliesOffset(kEntries) + size % 64;
      done.message_length = size % wire::kReplySlotBytes;
    }
    ring_.Complete(done);
    Run();
  }

  // The entries are those of the frames with the numbers 0, 1, ... and no others.
  std::string CheckEntries() const {
    if (ring_.in_flight() > kEntries) return "more requests than the ring has entries";
    for (size_t number = 0; number < ring_.submitted.size(); ++number) {
      const wire::SubmissionEntry& entry = ring_.submitted[number];
      const bool was_sent =
          std::any_of(sent_.begin(), sent_.end(), [&](const std::unique_ptr<SentFrame>& sent) {
            return sent->frame.number == number && sent->frame.token == Token() &&
                   std::memcmp(&sent->frame.entry, &entry, sizeof(entry)) == 0;
          });
      if (!was_sent) return absl::StrCat("entry ", number, " was not sent with that number");
      constexpr int kElsewhere = wire::kEntryOnDevice | wire::kEntryChained;
      if (entry.kind == wire::kEntryAttend && (entry.flags & kElsewhere) != 0) {
        return absl::StrCat("entry ", number, " has flags that do not travel");
      }
    }
    return "";
  }

  std::string Check() const {
    if (!peer_.fault.empty()) return peer_.fault;
    for (size_t i = 0; i < kRegionBytes; ++i) {
      if (!named_[i] && ring_.region()[i] != kUntouched)
        return absl::StrCat("byte ", i, " changed");
    }
    for (const auto& arrival : peer_.arrivals()) {
      const uint64_t place = arrival->frame.place, bytes = arrival->payload.size() - 1;
      const bool attend = arrival->frame.entry.kind == wire::kEntryAttend;
      const uint64_t first = attend ? kArena : wire::RepliesOffset(kEntries);
      if (bytes > 0 && (place < first || place + bytes > kRegionBytes)) {
        return absl::StrCat("a reply from ", place, " + ", bytes);
      }
    }
    return CheckEntries();
  }

  fake_ucx::TestRing ring_{kEntries, kArenaBytes};
  Peer<wire::UcxCompletionFrame> peer_;
  std::vector<std::unique_ptr<SentFrame>> sent_;
  std::vector<bool> named_ = std::vector<bool>(kRegionBytes, false);
  std::unique_ptr<relay::Relay> relay_;
  std::unique_ptr<wire::UcxLink> link_;
  std::unique_ptr<fake_ucx::RawPeer> raw_;
  uint64_t next_ = 0;
  size_t answered_ = 0;
};

// ------------------------------------------------------------------------------- A relay's frames

class ClientEnd final {
 public:
  ClientEnd() {
    fake_ucx::Reset();
    memory_ = *client::UcxMemory::Open(fake_ucx::Api(), {});
    link_ = *wire::UcxLink::Open(fake_ucx::Api(), {}, &peer_);
    const wire::UcxToken bytes = Token();
    const std::string token(bytes.begin(), bytes.end());
    client::UcxRing ring;
    ring.worker_address = link_->address();
    ring.token = token;
    ring.region_bytes = kRegionBytes;
    ring.arena_offset = kArena;
    ring.entries = kEntries;
    ring.arena_bytes = kArenaBytes;
    Require(memory_->Connect(ring).ok() ? "" : "no ring");
    Require(link_->Connect(memory_->address()).ok() ? "" : "no connection");
  }
  ~ClientEnd() {
    memory_.reset();
    link_.reset();
  }

  std::string Do(std::string_view input) {
    std::string fault;
    for (int action = 0; action < kMostActions && !input.empty() && fault.empty(); ++action) {
      switch (Number<uint8_t>(&input) % kActions) {
        case kFrame:
          Send(&input);
          break;
        case kAnswer:
          Submit(&input);
          break;
        case kReorder:
          fake_ucx::faults().reorder = Number<uint8_t>(&input);
          break;
        default:
          fault = TakeAll();
      }
    }
    return fault.empty() ? TakeAll() : fault;
  }

 private:
  using SentFrame = Sent<wire::UcxCompletionFrame>;

  void Submit(std::string_view* input) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.tag = submitted_;
    entry.in_offset = entry.out_offset = kArena + submitted_ % kEntries * (kArenaBytes / kEntries);
    const uint64_t bytes = Number<uint16_t>(input) % (kArenaBytes / kEntries);
    if (memory_->Submit(entry, {entry.in_offset, bytes, bytes}, nullptr, false)) ++submitted_;
  }

  void Send(std::string_view* input) {
    auto sent = std::make_unique<SentFrame>();
    wire::UcxCompletionFrame& frame = sent->frame;
    frame.token = Token();
    frame.number = next_++;
    frame.place = kArena + frame.number % kEntries * (kArenaBytes / kEntries);
    frame.entry.kind = wire::kEntryAttend;
    frame.entry.tag = frame.number;
    const size_t bytes = Number<uint16_t>(input) % (kArenaBytes / kEntries);
    Patch(&frame, input);
    sent->payload = Payload(bytes, frame.number);
    link_->Send(HeaderOf(frame), sent->payload, frame.number).IgnoreError();
    sent_.push_back(std::move(sent));
  }

  // Every completion answers the next request, and is one that was sent with that number.
  std::string TakeAll() {
    for (int i = 0; i < kRounds; ++i) {
      link_->Progress();
      wire::CompletionEntry entry;
      if (!memory_->Wait(&entry, std::chrono::nanoseconds(0)).ok()) continue;
      const uint64_t number = taken_++;
      if (number >= submitted_) return "a completion to nothing";
      // A number may have been sent twice: the first that arrived counts.
      const bool was_sent =
          std::any_of(sent_.begin(), sent_.end(), [&](const std::unique_ptr<SentFrame>& one) {
            return one->frame.number == number && one->frame.token == Token() &&
                   std::memcmp(&one->frame.entry, &entry, sizeof(entry)) == 0 && HasOutputs(*one);
          });
      if (!was_sent) return absl::StrCat("completion ", number, " with outputs not as sent");
    }
    return peer_.fault;
  }

  // True if the outputs are there as they were sent, or another frame's may lie over them.
  bool HasOutputs(const SentFrame& sent) const {
    const uint64_t begin = sent.frame.place, end = begin + sent.payload.size();
    if (end < begin || end > kRegionBytes) return false;
    for (const std::unique_ptr<SentFrame>& other : sent_) {
      const uint64_t from = other->frame.place, to = from + other->payload.size();
      if (other.get() != &sent && from < end && begin < to) return true;
    }
    return std::equal(sent.payload.begin(), sent.payload.end(),
                      memory_->region().begin() + static_cast<int64_t>(begin));
  }

  Peer<wire::UcxRequestFrame> peer_;
  std::vector<std::unique_ptr<SentFrame>> sent_;
  std::unique_ptr<client::UcxMemory> memory_;
  std::unique_ptr<wire::UcxLink> link_;
  uint64_t submitted_ = 0, next_ = 0, taken_ = 0;
};

std::string CheckOne(std::string_view input) {
  if (Number<uint8_t>(&input) % kEnds == kRelayEnd) return RelayEnd().Do(input);
  return ClientEnd().Do(input);
}

// ------------------------------------------------------------------------------------------ Inputs

struct Change {
  uint8_t at, bits;
};

std::string Changes(const std::vector<Change>& changes) {
  std::string bytes = Packed(static_cast<uint8_t>(changes.size()));
  for (const Change& change : changes) bytes += Packed(change.at, change.bits);
  return bytes;
}

std::string Request(uint16_t out_bytes, uint16_t bytes, const std::vector<Change>& changes = {},
                    bool message = false, uint8_t header = 0) {
  return Packed(char{kFrame}, out_bytes, static_cast<uint8_t>(message ? 0 : 1), bytes) +
         Changes(changes) + Packed(header);
}
// A list of frames with payloads of these sizes, of which those above 1,024 are the message's.
std::string List(const std::vector<uint16_t>& sizes, uint16_t payload, int changed = -1) {
  std::string bytes = Packed(char{kList}, static_cast<uint8_t>(sizes.size() - 1));
  for (const uint16_t size : sizes) bytes += Packed(uint16_t{100}, uint8_t{1}, size);
  bytes += Packed(static_cast<uint8_t>(changed < 0 ? 0 : 1));
  if (changed >= 0) bytes += Packed(static_cast<uint16_t>(changed), uint8_t{0x11});
  return bytes + Packed(payload);
}
std::string Answer(uint16_t size) { return Packed(char{kAnswer}, size); }
std::string Run() { return Packed(char{kRun}); }
std::string Reorder(uint8_t seed) { return Packed(char{kReorder}, seed); }
std::string Completion(uint16_t bytes, const std::vector<Change>& changes = {}) {
  return Packed(char{kFrame}, bytes) + Changes(changes);
}

uint8_t At(size_t offset) { return static_cast<uint8_t>(offset); }

std::vector<std::string> RelaySeeds() {
  using Frame = wire::UcxRequestFrame;
  const std::string three = Request(500, 700) + Request(2000, 3000) + Request(0, 100, {}, true);
  const std::string steps = three + Run() + Answer(0) + Answer(0) + Answer(90);
  const uint8_t number = At(offsetof(Frame, number)), place = At(offsetof(Frame, place)),
                out_bytes = At(offsetof(Frame, out_bytes)),
                flags = At(offsetof(Frame, entry) + offsetof(wire::SubmissionEntry, flags)),
                out_offset =
                    At(offsetof(Frame, entry) + offsetof(wire::SubmissionEntry, out_offset));
  return {
      steps + steps + steps,
      Reorder(3) + three + three + Run() + Answer(0) + Run(),
      three + three + Run(),                             // more than the ring has entries
      Request(0, 64, {{0, 1}}),                          // token
      Request(0, 64) + Request(0, 64, {{number, 1}}),    // a number twice
      Request(0, 64, {{number, 4}}),                     // a number out of turn
      Request(0, 64, {{uint8_t(place + 1), 0xff}}),      // in the ring, or beyond
      Request(0, 64, {{uint8_t(place + 7), 0xff}}),      // far away
      Request(0, 20000),                                 // too long
      Request(0, 64, {{uint8_t(out_bytes + 3), 0xff}}),  // outputs beyond
      Request(64, 64, {{uint8_t(out_offset + 1), 0xff}}) + Run() + Answer(0),
      Request(0, 64, {{flags, wire::kEntryOnDevice}}),
      Request(0, 64, {{flags, wire::kEntryChained}}),
      Request(0, 64, {}, false, 255),  // a header that is too short
      List({10, 1024, 0}, 0) + Run() + Answer(0) + Answer(0) + List({0, 1100, 64}, 3000) + Run(),
      List({1100, 1100}, 2000) + List({64, 64}, 2000),  // two payloads follow, and one of none
      List({64, 64}, 0, 0),
      List({64, 64}, 0, 2),
      List({64, 64}, 0, 172)};
}

std::vector<std::string> ClientSeeds() {
  using Frame = wire::UcxCompletionFrame;
  const std::string two = Answer(200) + Answer(3000);
  const std::string steps = two + Completion(100) + Completion(2000) + Run();
  const uint8_t number = At(offsetof(Frame, number)), place = At(offsetof(Frame, place));
  return {steps + steps + steps,
          Reorder(5) + two + two + Completion(2000) + Completion(3000) + Completion(10) + Run(),
          Completion(64) + Run(),                                // to nothing
          two + Completion(64, {{0, 1}}) + Run(),                // token
          two + Completion(64, {{number, 1}}) + Completion(64),  // out of order, and twice
          two + Completion(64, {{uint8_t(place + 1), 0xff}}) + Run(),
          two + Completion(64, {{uint8_t(place + 7), 0xff}}) + Run()};
}

}  // namespace

FuzzTarget TargetUnderTest() {
  FuzzTarget target;
  target.executions = 3000;
  for (const std::string& seed : RelaySeeds()) {
    target.seeds.push_back(std::string(1, kRelayEnd) + seed);
  }
  for (const std::string& seed : ClientSeeds()) {
    target.seeds.push_back(std::string(1, kClientEnd) + seed);
  }
  return target;
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::CheckOne({reinterpret_cast<const char*>(data), size}));
  return 0;
}
