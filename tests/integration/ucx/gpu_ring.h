// Parts of tests of memory of the server's GPU over the fake UCX: a ring with its relay, steps over
// any stream, and a peer of UCX that sends what the test likes. Threading: one thread each; a relay
// that is connected has a thread of its own.
#ifndef MLA_TESTS_INTEGRATION_UCX_GPU_RING_H_
#define MLA_TESTS_INTEGRATION_UCX_GPU_RING_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/streams/ring_stream.h"
#include "client/cpp/ucx/ucx_memory.h"
#include "proto/wire/ucx/frames.h"
#include "relay/relay.h"
#include "tests/fake_ucx/fake_ucx.h"
#include "tests/integration/device_memory/device_server.h"

namespace mla::integration {

inline constexpr uint64_t kTypes = UCS_BIT(UCS_MEMORY_TYPE_HOST) | UCS_BIT(UCS_MEMORY_TYPE_CUDA);
inline constexpr uint64_t kArena = kMiB;
inline constexpr uint32_t kRows = 32, kHeads = 2, kRowDim = 576, kLora = 512;
inline constexpr auto kLong = std::chrono::seconds(20);

inline bool AllZero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

inline bool Becomes(const std::function<bool()>& holds) {
  for (int i = 0; i < 2000; ++i) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

inline relay::RelayOptions RelayOptionsOf(bool device = true) {
  relay::RelayOptions options;
  options.token.fill(7);
  options.link.puts = true;
  options.batches = true;
  options.device = device;
  return options;
}

// A ring of the server with memory of its GPU, and its relay.
class GpuRing final {
 public:
  static absl::StatusOr<std::unique_ptr<client::SharedMemory>> Attach(const DeviceServer& server,
                                                                      const std::string& tenant,
                                                                      uint32_t device_mib = 2) {
    client::SharedMemoryOptions options;
    options.tenant = tenant;
    options.bytes = kArena;
    options.device_mib = device_mib;
    options.device = {client::DeviceRegionOptions::kTheServers, kernels::hip::kLibrary};
    return client::SharedMemory::Connect(server.server().folder().File("mla.sock.shm"), options);
  }

  ~GpuRing() { End(); }
  absl::Status Open(const DeviceServer& server, const std::string& tenant = "") {
    auto shared = Attach(server, tenant);
    if (!shared.ok()) return shared.status();
    shared_ = *std::move(shared);
    auto relay = relay::Relay::Open(fake_ucx::Api(), RelayOptionsOf(), shared_.get());
    if (!relay.ok()) return relay.status();
    relay_ = *std::move(relay);
    auto arena = relay_->Offer();
    if (!arena.ok()) return arena.status();
    auto device = relay_->OfferDevice();
    if (!device.ok()) return device.status();
    arena_ = *std::move(arena);
    device_ = *std::move(device);
    return absl::OkStatus();
  }
  absl::Status Connect(std::string_view client) {
    absl::Status status = relay_->Connect(client);
    if (status.ok() && pipe(control_) == 0) {
      thread_ = std::thread([this] { relay_->Run(control_[0]).IgnoreError(); });
    }
    return status;
  }
  client::UcxRing Described() const {
    client::UcxRing ring;
    ring.token = {reinterpret_cast<const char*>(token_.data()), token_.size()};
    ring.region_bytes = shared_->region().size();
    ring.arena_offset = shared_->arena_offset();
    ring.entries = shared_->ring_entries();
    ring.arena_bytes = kArena;
    ring.arena_key = arena_.key;
    ring.arena_address = arena_.address;
    ring.device_key = device_.key;
    ring.device_address = device_.address;
    ring.device_bytes = device_.bytes;
    ring.batches = true;
    return ring;
  }
  // As the end of the relay's process.
  void End() {
    if (control_[1] >= 0) close(std::exchange(control_[1], -1));
    if (thread_.joinable()) thread_.join();
    if (control_[0] >= 0) close(std::exchange(control_[0], -1));
    relay_.reset();
    if (shared_ != nullptr) shared_->Close(kLong);
    shared_.reset();
  }

  client::SharedMemory& shared() { return *shared_; }
  relay::Relay& relay() { return *relay_; }
  const wire::UcxTarget& arena() const { return arena_; }
  const wire::UcxTarget& device() const { return device_; }

 private:
  std::unique_ptr<client::SharedMemory> shared_;
  std::unique_ptr<relay::Relay> relay_;
  const wire::UcxToken token_ = RelayOptionsOf().token;
  wire::UcxTarget arena_, device_;
  int control_[2] = {-1, -1};
  std::thread thread_;
};

// The layers of one step, over any stream.
class Steps final {
 public:
  explicit Steps(client::Client* client) : client_(client) {
    EXPECT_TRUE(client->RegisterModel(SpecOf(DeviceDims(), "m")).ok());
    in_.resize((kRows * kRowDim + kRows * kHeads * kRowDim) * 2);
    auto* const values = reinterpret_cast<uint16_t*>(in_.data());
    for (size_t i = 0; i < in_.size() / 2; ++i) {
      values[i] = static_cast<uint16_t>(0x3c00 + i * 2654435761u % 0x300 + (i % 3 << 15));
    }
  }
  // The outputs of the layers of a step with `rows` rows, or the first error.
  absl::StatusOr<std::vector<std::byte>> Run(client::StepStream* stream, uint32_t rows) {
    auto sequence = client_->OpenSequence("m");
    if (!sequence.ok()) return sequence.status();
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(++step_);
    begin->set_model_id("m");
    v1::StepSequence* one = begin->add_sequences();
    one->set_sequence_id(sequence->id());
    one->set_epoch(sequence->epoch());
    one->set_rows(rows);
    client::PendingReply begun;
    absl::Status status = stream->Call(&request, &begun);
    const size_t kv = rows * kRowDim * 2, q = kv * kHeads, o = rows * kHeads * kLora * 2;
    std::vector<std::byte> outputs(2 * o);
    for (uint32_t layer = 0; layer < 2 && status.ok(); ++layer) {
      v1::AttendStreamRequest attend;
      v1::Attend* fields = attend.mutable_attend();
      fields->set_step_id(step_);
      fields->set_layer(layer);
      fields->set_row_count(rows);
      fields->set_num_heads(kHeads);
      fields->set_profile(v1::PROFILE_ABSORBED);
      fields->set_has_kv(true);
      const auto pending = std::make_shared<client::PendingReply>();
      pending->o = std::span(outputs).subspan(layer * o, o);
      const std::span<const std::byte> in = in_;
      stream->Send(&attend, {in.first(kv), in.subspan(kv, q), {}}, pending);
      status = stream->Wait(pending.get());
    }
    v1::AttendStreamRequest end;
    end.mutable_end_step()->set_step_id(step_);
    client::PendingReply ended;
    if (status.ok()) status = stream->Call(&end, &ended);
    if (!status.ok()) return status;
    return outputs;
  }

 private:
  client::Client* const client_;
  std::vector<std::byte> in_;
  uint64_t step_ = 0;
};

// Takes whatever comes.
class Peer final : public wire::UcxReceiver {
 public:
  Peer() {
    wire::UcxLinkOptions options;
    options.puts = true;
    link_ = *wire::UcxLink::Open(fake_ucx::Api(), options, this);
  }
  absl::StatusOr<std::byte*> Place(std::span<const std::byte>, size_t bytes) override {
    room.resize(std::max<size_t>(bytes, 1));
    return room.data();
  }
  void OnArrived(std::span<const std::byte>) override { ++arrived; }
  void OnSent(uint64_t) override {}

  wire::UcxLink& link() { return *link_; }
  template <typename Frame>
  absl::Status Send(const Frame& frame, std::span<const std::byte> payload = {}) {
    return link_->Send(std::as_bytes(std::span<const Frame, 1>(&frame, 1)), payload, 0);
  }
  // A put that no frame follows to its receiver: the header is no frame of anyone's.
  absl::Status Put(std::span<const std::byte> payload, uint64_t offset, wire::UcxRemote which) {
    const std::byte header[1] = {};
    return link_->Put(header, payload, offset, 0, which);
  }
  void Progress() {
    for (int i = 0; i < 200; ++i) link_->Progress();
  }
  std::vector<std::byte> room;
  int arrived = 0;

 private:
  std::unique_ptr<wire::UcxLink> link_;
};

// An attend whose tensors lie in memory of the GPU.
inline wire::UcxRequestFrame OnDevice(uint64_t number) {
  wire::UcxRequestFrame frame{};
  frame.token.fill(7);
  frame.number = number;
  frame.out_bytes = 64;
  frame.entry.kind = wire::kEntryAttend;
  frame.entry.flags = wire::kEntryOnDevice;
  frame.entry.tag = number;
  frame.entry.row_count = 1;
  frame.entry.num_heads = kHeads;
  frame.entry.profile = v1::PROFILE_ABSORBED;
  return frame;
}

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_UCX_GPU_RING_H_
