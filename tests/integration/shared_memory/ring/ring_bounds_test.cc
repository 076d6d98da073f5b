// Tests where a ring may make the server write: a reply that fits no slot goes to the memory that
// the request offers, and nowhere else.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "client/cpp/shared_memory/shared_memory.h"
#include "mla/v1/attention.pb.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using absl::StatusCode;

// The lengths of this many sequences make a reply that no slot of the ring holds.
constexpr int kSequences = 120;

class RingBoundsTest : public testing::Test {
 protected:
  RingBoundsTest()
      : server_([](server::Config& config) {
          config.limits.max_sequences = 2 * kSequences;
          config.limits.max_step_sequences = kSequences;
          config.limits.max_name_bytes = 4096;
        }),
        client_(server_.Connect()) {
    EXPECT_TRUE(client_->RegisterModel(SpecOf(Dims(), "m")).ok());
    client::SharedMemoryOptions options;
    options.bytes = 1 << 20;
    auto ring = client::SharedMemory::Connect(server_.folder().File("mla.sock.shm"), options);
    EXPECT_TRUE(ring.ok()) << ring.status();
    ring_ = *std::move(ring);
    message_ = ring_->Allocate(16384);
    room_ = ring_->Allocate(4096);
    std::fill(room_.begin(), room_.end(), std::byte{0xa5});
  }

  // Sends `request` as a message that offers `room` bytes at `room_at` for its reply.
  v1::AttendStreamReply Send(const v1::AttendStreamRequest& request, uint64_t room_at,
                             uint32_t room) {
    const std::string bytes = request.SerializeAsString();
    std::memcpy(message_.data(), bytes.data(), bytes.size());
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryMessage;
    entry.row_count = static_cast<uint32_t>(bytes.size());
    entry.in_offset = ring_->OffsetOf(message_.data());
    entry.num_heads = room;
    entry.out_offset = room_at;
    EXPECT_TRUE(ring_->Submit(entry));
    wire::CompletionEntry done;
    EXPECT_EQ(ring_->Wait(&done, std::chrono::seconds(20)), absl::OkStatus());
    answer_at_ = done.message_offset;
    v1::AttendStreamReply reply;
    EXPECT_TRUE(reply.ParseFromString(std::string(ring_->Message(done))));
    return reply;
  }

  v1::AttendStreamRequest Begin() {
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(1);
    begin->set_model_id("m");
    for (int i = 0; i < kSequences; ++i) {
      sequences_.push_back(*client_->OpenSequence("m"));
      v1::StepSequence* rows = begin->add_sequences();
      rows->set_sequence_id(sequences_.back().id());
      rows->set_epoch(sequences_.back().epoch());
      rows->set_rows(1);
    }
    return request;
  }

  // Keeps no rows, so that none can be missing.
  static v1::AttendStreamRequest End() {
    v1::AttendStreamRequest request;
    request.mutable_end_step()->set_step_id(1);
    for (int i = 0; i < kSequences; ++i) request.mutable_end_step()->add_committed_rows(0);
    return request;
  }

  TestServer server_;
  std::unique_ptr<client::Client> client_;
  std::vector<client::Sequence> sequences_;
  std::unique_ptr<client::SharedMemory> ring_;
  std::span<std::byte> message_, room_;
  uint64_t answer_at_ = 0;
};

TEST_F(RingBoundsTest, RepliesAreWrittenInsideTheArenaOnly) {
  const uint64_t size = ring_->region().size();
  const uint64_t arena = size - ring_->arena_bytes();
  const v1::AttendStreamRequest request = Begin();
  const std::pair<uint64_t, uint32_t> kOutside[] = {
      {size, 1},
      {size - 64, 65},
      {arena - 1, 64},
      {0, 4096},
      {uint64_t{1} << 40, 4096},
      {std::numeric_limits<uint64_t>::max() - 63, 64},
      {arena, std::numeric_limits<uint32_t>::max()},
  };
  for (const auto& [at, room] : kOutside) {
    const v1::AttendStreamReply reply = Send(request, at, room);
    EXPECT_EQ(reply.error().code(), static_cast<int>(StatusCode::kInvalidArgument)) << at;
    EXPECT_EQ(reply.error().detail().field(), "out_offset") << at;
  }
  EXPECT_TRUE(Send(request, ring_->OffsetOf(room_.data()), 4096).has_begin_step());
  EXPECT_TRUE(client_->GetStats().ok());
}

// The client can read an error whose text is cut to fit the slot.
TEST_F(RingBoundsTest, LongErrorsAreCutBetweenCharacters) {
  for (const int shift : {0, 1, 2}) {
    std::string name(static_cast<size_t>(shift), 'x');
    for (int i = 0; i < 1300; ++i) name += "\xe2\x82\xac";  // three bytes each
    v1::AttendStreamRequest request;
    request.mutable_begin_step()->set_model_id(name);
    request.mutable_begin_step()->add_sequences()->set_rows(1);
    const v1::AttendStreamReply reply = Send(request, 0, 0);  // parses it
    EXPECT_EQ(reply.error().code(), static_cast<int>(StatusCode::kNotFound)) << shift;
    EXPECT_EQ(reply.error().detail().reason(), "model_not_found");
    const std::string& got = reply.error().detail().got();
    EXPECT_GT(got.size(), 150u);
    EXPECT_EQ(got, name.substr(0, got.size()));
  }
}

TEST_F(RingBoundsTest, AReplyThatFitsNeitherSlotNorRoomIsRefused) {
  ASSERT_TRUE(Send(Begin(), 0, 0).has_begin_step());
  const uint64_t room_at = ring_->OffsetOf(room_.data());
  for (const uint32_t room : {0u, 1u, 64u, 1024u, 1200u}) {
    const v1::AttendStreamReply refused = Send(End(), room == 0 ? 0 : room_at, room);
    EXPECT_EQ(refused.error().code(), static_cast<int>(StatusCode::kInvalidArgument)) << room;
    EXPECT_EQ(refused.error().detail().field(), "num_heads") << room;
    EXPECT_TRUE(std::all_of(room_.begin(), room_.end(), [](std::byte b) {
      return b == std::byte{0xa5};
    })) << room;
  }
  // The step is still open, and ends when its request has room for the lengths.
  const v1::AttendStreamReply ended = Send(End(), room_at, 2048);
  ASSERT_TRUE(ended.has_end_step()) << ended.ShortDebugString();
  EXPECT_EQ(ended.end_step().lengths_size(), kSequences);
  EXPECT_TRUE(answer_at_ == room_at || ended.ByteSizeLong() <= wire::kReplySlotBytes);
  EXPECT_TRUE(std::all_of(room_.begin() + 2048, room_.end(),
                          [](std::byte b) { return b == std::byte{0xa5}; }));
  EXPECT_EQ(client_->GetStats()->open_steps(), 0u);
}

}  // namespace
}  // namespace mla::integration
