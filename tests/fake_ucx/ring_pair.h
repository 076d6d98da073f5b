// Both ends of a ring over the fake UCX, and a server that answers each attend with its inputs,
// each byte inverted; and a stranger who sends what it likes. Threading: one thread; the client has
// a thread of its own.
#ifndef MLA_TESTS_FAKE_UCX_RING_PAIR_H_
#define MLA_TESTS_FAKE_UCX_RING_PAIR_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/ucx/ucx_memory.h"
#include "proto/wire/ucx/frames.h"
#include "relay/relay.h"
#include "tests/fake_ucx/fake_ucx.h"
#include "tests/fake_ucx/test_ring.h"

namespace mla::fake_ucx {

// Sends messages of any kind to a worker, as a stranger could.
class RawPeer final {
 public:
  explicit RawPeer(const std::string& address) : api_(Api()) {
    if (api_.worker_create(nullptr, nullptr, &worker_) != UCS_OK) return;
    ucp_ep_params_t params{};
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    if (api_.ep_create(worker_, &params, &endpoint_) != UCS_OK) endpoint_ = nullptr;
  }
  ~RawPeer() {
    if (worker_ != nullptr) api_.worker_destroy(worker_);
  }
  bool connected() const { return endpoint_ != nullptr; }
  // `payload` must be valid as long as this object. REQUIRES: connected().
  void Send(unsigned id, std::span<const std::byte> header, std::span<const std::byte> payload) {
    ucp_request_param_t param{};
    param.cb.send = [](void* request, ucs_status_t, void*) { Api().request_free(request); };
    api_.am_send_nbx(endpoint_, id, header.data(), header.size(), payload.data(), payload.size(),
                     &param);
  }

 private:
  const wire::UcxApi api_;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
};

class RingPair final {
 public:
  static constexpr uint32_t kEntries = 4;
  static constexpr uint64_t kSlotBytes = 65536;  // for inputs, and as many for outputs
  static constexpr uint64_t kArenaBytes = kEntries * 2 * kSlotBytes;
  static constexpr uint64_t kArena = wire::RingBytes(kEntries);

  // Does not reset the fake.
  absl::Status Start(bool client_puts, bool server_puts, client::UcxMemoryOptions client = {},
                     const std::optional<wire::UcxSecret>& secret = {},
                     const std::optional<wire::UcxSecret>& clients_secret = {}) {
    client.link.puts = client_puts;
    auto memory = client::UcxMemory::Open(Api(), client);
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    relay::RelayOptions options;
    options.token.fill(7);
    options.link.puts = client_puts && server_puts;
    options.secret = secret;
    options.batches = batches;
    auto relay = relay::Relay::Open(Api(), options, &ring_);
    if (!relay.ok()) return relay.status();
    relay_ = *std::move(relay);
    if (absl::Status status = relay_->Connect(memory_->address()); !status.ok()) return status;
    wire::UcxTarget arena;
    if (options.link.puts) {
      auto offered = relay_->Offer();
      if (!offered.ok()) return offered.status();
      arena = *std::move(offered);
    }
    const std::string address = relay_->address(), token(wire::kUcxTokenBytes, '\7');
    client::UcxRing ring;
    ring.worker_address = address;
    ring.token = token;
    ring.region_bytes = kArena + kArenaBytes;
    ring.arena_offset = kArena;
    ring.entries = kEntries;
    ring.arena_bytes = kArenaBytes;
    ring.arena_key = arena.key;
    ring.arena_address = arena.address;
    ring.batches = batches;
    const std::optional<wire::UcxSecret>& given = clients_secret ? clients_secret : secret;
    if (given.has_value()) {
      ring.secret = {reinterpret_cast<const char*>(given->data()), given->size()};
    }
    return memory_->Connect(ring);
  }

  // Puts an attend into the ring with `bytes` of inputs and outputs. False: the ring is full.
  bool Submit(uint64_t bytes) {
    if (memory_->in_flight() >= kEntries) return false;  // its places are in use
    const uint64_t tag = submitted_;
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.tag = tag;
    entry.row_count = static_cast<uint32_t>(bytes);
    entry.in_offset = InOffset(tag);
    entry.out_offset = InOffset(tag) + kSlotBytes;
    std::byte* const inputs = memory_->region().data() + entry.in_offset;
    for (uint64_t i = 0; i < bytes; ++i) inputs[i] = Input(tag, i);
    std::fill_n(inputs + kSlotBytes, bytes, std::byte{0});
    if (!memory_->Submit(entry, {entry.in_offset, bytes, bytes}, nullptr, false)) return false;
    bytes_[submitted_++] = bytes;
    return true;
  }

  // One round of the relay and the server.
  void Step() {
    if (relay_ != nullptr) relay_->Step();
    Serve();
  }

  // Takes the next completion if it has come; OK if there was none.
  absl::Status Take() {
    wire::CompletionEntry entry;
    const absl::Status status = memory_->Wait(&entry, std::chrono::nanoseconds(0));
    if (absl::IsDeadlineExceeded(status)) return absl::OkStatus();
    if (!status.ok()) return status;
    if (entry.tag != taken_) fault_ = "completions in another order";
    const std::byte* const outputs = memory_->region().data() + InOffset(taken_) + kSlotBytes;
    for (uint64_t i = 0; i < bytes_[taken_]; ++i) {
      if (outputs[i] != ~Input(taken_, i)) fault_ = "wrong outputs";
    }
    ++taken_;
    return absl::OkStatus();
  }

  // Runs `requests` more attends of `bytes` to their ends; false if that does not come about.
  bool Run(uint64_t requests, uint64_t bytes) {
    const uint64_t end = submitted_ + requests;
    for (int round = 0; round < kMostRounds; ++round) {
      if (submitted_ < end) Submit(bytes);
      Step();
      if (!Take().ok() || !fault_.empty()) return false;
      if (taken_ == end) return true;
    }
    return false;
  }

  client::UcxMemory* memory() { return memory_.get(); }
  relay::Relay* relay() { return relay_.get(); }
  TestRing& ring() { return ring_; }
  void EndClient() { memory_.reset(); }
  void EndRelay() { relay_.reset(); }
  uint64_t taken() const { return taken_; }
  // Wrong rows that either end has seen; empty: none.
  const std::string& fault() const { return fault_; }
  bool batches = true;   // before Start: both ends take frames that travel together
  bool computes = true;  // the server answers
  bool knows = true;     // and knows what inputs it gets

 private:
  static constexpr int kMostRounds = 200'000;

  static uint64_t InOffset(uint64_t tag) { return kArena + tag % kEntries * 2 * kSlotBytes; }
  static std::byte Input(uint64_t tag, uint64_t i) {
    return static_cast<std::byte>(i * 13 + tag * 101 + (i >> 8));
  }

  void Serve() {
    for (; computes && served_ < ring_.submitted.size(); ++served_) {
      const wire::SubmissionEntry& entry = ring_.submitted[served_];
      if (entry.tag != served_) fault_ = "requests in another order";
      std::byte* const inputs = ring_.region().data() + entry.in_offset;
      std::byte* const outputs = ring_.region().data() + entry.out_offset;
      for (uint64_t i = 0; i < entry.row_count; ++i) {
        if (knows && inputs[i] != Input(entry.tag, i)) fault_ = "wrong inputs";
        outputs[i] = ~inputs[i];
      }
      wire::CompletionEntry done{};
      done.kind = wire::kEntryAttend;
      done.tag = entry.tag;
      ring_.Complete(done);
    }
  }

  TestRing ring_{kEntries, kArenaBytes};
  std::unique_ptr<client::UcxMemory> memory_;
  std::unique_ptr<relay::Relay> relay_;
  std::map<uint64_t, uint64_t> bytes_;  // by tag
  uint64_t submitted_ = 0, taken_ = 0;
  size_t served_ = 0;
  std::string fault_;
};

}  // namespace mla::fake_ucx

#endif  // MLA_TESTS_FAKE_UCX_RING_PAIR_H_
