// Calls that were sent before their tensors were ready and come back, together with requests that
// their client sent after them. The client uses a ring's library without the rules of a session.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "client/cpp/shared_memory/shared_memory.h"
#include "tests/integration/device_memory/device_server.h"
#include "tests/integration/device_memory/fake_stream.h"

namespace mla::integration {
namespace {

constexpr std::chrono::seconds kPatience{20};
constexpr uint64_t kIn = 1152 + 2 * 1152;
constexpr uint64_t kRoom = 4096;  // bytes for a message, and for its reply

class LateCallsTest : public testing::Test {
 protected:
  explicit LateCallsTest(uint64_t words_last = wire::kChainWordsLast)
      : server_([](server::Config& config) {
          config.limits.ahead_us = 10'000;  // leaves time to act while a launch waits
          config.shm.device_wait_ms = 10'000;
        }),
        client_(server_.server().Connect()),
        worker_(client_.get(), DeviceDims(), "m", 1),
        track_(*worker_.Open()) {
    client::SharedMemoryOptions options;
    options.bytes = kMiB;
    options.device_mib = 2;
    options.device.library = kernels::hip::kLibrary;
    options.words_last = words_last;
    auto ring =
        client::SharedMemory::Connect(server_.server().folder().File("mla.sock.shm"), options);
    EXPECT_TRUE(ring.ok()) << ring.status();
    ring_ = *std::move(ring);
    message_ = ring_->Allocate(kRoom);
    reply_ = ring_->Allocate(kRoom);
  }
  ~LateCallsTest() override { server_.control().lazy_words = nullptr; }

  wire::RingHeader& header() const {
    return *reinterpret_cast<wire::RingHeader*>(ring_->region().data());
  }
  void Send(const v1::AttendStreamRequest& request) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryMessage;
    entry.tag = request.tag();
    entry.row_count = static_cast<uint32_t>(request.ByteSizeLong());
    entry.in_offset = ring_->OffsetOf(message_.data());
    entry.num_heads = kRoom;
    entry.out_offset = ring_->OffsetOf(reply_.data());
    ASSERT_TRUE(request.SerializeToArray(message_.data(), kRoom));
    ASSERT_TRUE(ring_->Submit(entry));
    ++sent_;
  }
  void SendBegin(uint64_t step) {
    v1::AttendStreamRequest request;
    request.set_tag(step);
    v1::BeginStep& begin = *request.mutable_begin_step();
    begin.set_step_id(step);
    begin.set_model_id("m");
    v1::StepSequence& sequence = *begin.add_sequences();
    sequence.set_sequence_id(track_.sequence.id());
    sequence.set_epoch(track_.sequence.epoch());
    sequence.set_rows(1);
    Send(request);
  }
  void SendEnd(uint64_t step) {
    v1::AttendStreamRequest request;
    request.set_tag(step);
    request.mutable_end_step()->set_step_id(step);
    request.mutable_end_step()->add_committed_rows(0);
    Send(request);
  }
  void SendChained(uint64_t step) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.profile = v1::PROFILE_ABSORBED;
    entry.flags = wire::kEntryOnDevice | wire::kEntryHasKv;
    entry.dtypes = v1::DTYPE_BF16 | v1::DTYPE_F32 << 4;
    entry.tag = 1000 + step;
    entry.step_id = step;
    entry.row_count = 1;
    entry.num_heads = 2;
    entry.out_offset = wire::AlignShared(kIn);
    ASSERT_TRUE(ring_->Submit(entry, stream_.get(), true));
    ++sent_;
  }
  // Returns the next reply: the number of its request, and its text.
  std::pair<uint64_t, std::string> Answer() {
    wire::CompletionEntry done;
    const absl::Status status = ring_->Wait(&done, kPatience);
    if (!status.ok()) return {0, status.ToString()};
    if (done.kind != wire::kEntryMessage) return {done.tag, ""};
    v1::AttendStreamReply reply;
    const std::string_view bytes = ring_->Message(done);
    EXPECT_TRUE(reply.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())));
    return {done.tag, reply.error().message()};
  }
  using Answered = std::pair<uint64_t, std::string>;

  DeviceServer server_;
  std::unique_ptr<client::Client> client_;
  Worker worker_;
  Track track_;
  std::unique_ptr<client::SharedMemory> ring_;
  std::span<std::byte> message_, reply_;
  FakeStream stream_;
  uint64_t sent_ = 0;
};

// The tensors become ready after the launch has stopped waiting for them, but before the engine
// knows that it was late. The launch sees no words, because the stream's words in device memory
// come last.
TEST_F(LateCallsTest, AStepDoesNotEndBeforeACallThatComesLate) {
  for (uint64_t step = 1; step <= 3; ++step) {
    SendBegin(step);
    ASSERT_EQ(Answer(), Answered(step, ""));
    server_.control().lazy_words = stream_.get();
    SendChained(step);
    const uint32_t published = static_cast<uint32_t>(sent_);  // of the call
    SendEnd(step);
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
    std::atomic_ref(header().ready).store(published);
    ASSERT_EQ(Answer(), Answered(1000 + step, ""));
    ASSERT_EQ(Answer(), Answered(step, ""));
    server_.control().lazy_words = nullptr;
    stream_.Finish();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // a late call pauses its tenant
  }
}

class OldWordsTest : public LateCallsTest {
 protected:
  static constexpr uint64_t kWordsLast = 5;
  OldWordsTest() : LateCallsTest(kWordsLast) {}
  std::atomic_ref<uint32_t> Done(uint64_t slot) const {
    auto* const completions = reinterpret_cast<wire::CompletionEntry*>(
        ring_->region().data() + wire::CompletionsOffset(ring_->ring_entries()));
    return std::atomic_ref(completions[slot & (ring_->ring_entries() - 1)].done);
  }
  // Makes an entry look 2^31 entries old, seen from entry `index`.
  void MakeOld(uint64_t index) {
    const uint32_t old = wire::PublishedSequence(index) - (1u << 31) - 8;
    for (uint64_t slot = 0; slot < ring_->ring_entries(); ++slot) Done(slot).store(old);
    ASSERT_TRUE(ring_->device()->SetNearby(ring_->ring_entries(), old).ok());
  }
};

TEST_F(OldWordsTest, WordsOfLongAgoAreNotTakenForLaterOnes) {
  for (uint64_t step = 1; step <= 2; ++step) {
    for (uint64_t i = 0; i < kWordsLast; ++i) {
      SendBegin(step);
      ASSERT_EQ(Answer(), Answered(step, ""));
    }
    if (step == 1) {  // words are used from the first chained entry on
      SendChained(step);
      ASSERT_EQ(Answer(), Answered(1000 + step, ""));
      SendEnd(step);
      ASSERT_EQ(Answer(), Answered(step, ""));
      continue;
    }
    const uint64_t index = sent_;
    const auto behind = [index](uint32_t word) {
      return static_cast<int32_t>(word - wire::PublishedSequence(index)) < 0;
    };
    MakeOld(index);
    ASSERT_FALSE(behind(Done(index).load()));
    server_.control().lazy_words = stream_.get();  // so the call's inputs are not stored
    SendChained(step);
    EXPECT_TRUE(behind(Done(index).load()));
    EXPECT_TRUE(behind(*ring_->device()->Nearby(0)));
    EXPECT_TRUE(behind(
        *ring_->device()->Nearby(wire::NearbyDoneOffset(index & (ring_->ring_entries() - 1)))));
    server_.control().lazy_words = nullptr;
    stream_.Finish();
    ASSERT_EQ(Answer(), Answered(1000 + step, ""));
  }
}

}  // namespace
}  // namespace mla::integration
