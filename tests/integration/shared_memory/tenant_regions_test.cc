// Shared memory of two tenants on one server. If one of them names anything of the other's, over a
// stream or a ring, it does not exist for it. Neither the other's memory nor its steps change.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mla/v1/attention.grpc.pb.h"
#include "tests/integration/shared_memory/ring/ring_hand.h"
#include "tests/integration/shared_memory/shared_memory_harness.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using absl::StatusCode;
using std::chrono::seconds;

constexpr uint64_t kArenaBytes = 64 << 10;
constexpr std::byte kFill{0x3c};  // a small number in bf16
constexpr uint64_t kAbsentStep = 99;
// Two rows of four heads with their KV rows: kv 160 bytes, padded to 192, q 640; o 512.
constexpr uint64_t kInBytes = 192 + 640, kOutBytes = 512, kOutAt = 4096, kMessageAt = 8192;

// A tenant with a stream, a region for its tensors, and a ring. It has one open step on each, of
// two rows of one sequence.
class Party {
 public:
  Party(const TestServer& server, const std::string& tenant, uint64_t first_step)
      : stream_step_(first_step),
        ring_step_(first_step + 1),
        client_(server.Connect(Over(client::ClientOptions::Transport::kInline, tenant))),
        tensors_(ShmPathOf(server)),
        ring_connection_(ShmPathOf(server)),
        stub_(v1::Attention::NewStub(
            grpc::CreateChannel(server.unix_target(), grpc::InsecureChannelCredentials()))) {
    EXPECT_TRUE(client_->RegisterModel(SpecOf(Dims(), "m")).ok());
    for (int i = 0; i < 2; ++i) sequences_.push_back(*client_->OpenSequence("m"));
    context_.AddMetadata("mla-tenant", tenant);
    stream_ = stub_->Attend(&context_);
    EXPECT_FALSE(tensors_.Open(tenant, kArenaBytes, /*ring=*/false).empty());
    const std::span<std::byte> region = ring_connection_.Open(tenant, kArenaBytes, /*ring=*/true);
    EXPECT_FALSE(region.empty());
    ring_.emplace(region, ring_connection_.reply().ring_entries);
    for (std::span<std::byte> arena : {stream_arena(), ring_arena()}) {
      std::fill(arena.begin(), arena.end(), kFill);
    }
    EXPECT_TRUE(OnStream(Begin(stream_step_, sequences_[0])).has_begin_step());
    EXPECT_TRUE(OnRing(Begin(ring_step_, sequences_[1])).has_begin_step());
    std::fill(ring_arena().begin(), ring_arena().end(), kFill);
  }
  ~Party() {
    stream_->WritesDone();
    EXPECT_TRUE(stream_->Finish().ok());
  }

  static v1::AttendStreamRequest Begin(uint64_t step, const client::Sequence& sequence) {
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(step);
    begin->set_model_id("m");
    v1::StepSequence* rows = begin->add_sequences();
    rows->set_sequence_id(sequence.id());
    rows->set_epoch(sequence.epoch());
    rows->set_rows(2);
    return request;
  }
  static v1::AttendStreamRequest End(uint64_t step) {
    v1::AttendStreamRequest request;
    request.mutable_end_step()->set_step_id(step);
    request.mutable_end_step()->add_committed_rows(0);
    return request;
  }
  static v1::AttendStreamRequest Abort(uint64_t step) {
    v1::AttendStreamRequest request;
    request.mutable_abort_step()->set_step_id(step);
    return request;
  }
  // The step's two rows at layer 0, in the region with that handle.
  static v1::AttendStreamRequest Attend(uint64_t step, const std::string& handle) {
    v1::AttendStreamRequest request;
    v1::Attend* attend = request.mutable_attend();
    attend->set_step_id(step);
    attend->set_row_count(2);
    attend->set_num_heads(4);
    attend->set_profile(v1::PROFILE_ABSORBED);
    attend->set_has_kv(true);
    v1::SharedTensors* shared = request.mutable_shared();
    shared->set_handle(handle);
    shared->set_in_length(kInBytes);
    shared->set_out_offset(kOutAt);
    shared->set_out_length(kOutBytes);
    return request;
  }

  v1::AttendStreamReply OnStream(const v1::AttendStreamRequest& request) {
    v1::AttendStreamReply reply;
    EXPECT_TRUE(stream_->Write(request));
    EXPECT_TRUE(stream_->Read(&reply));
    return reply;
  }
  v1::AttendStreamReply OnRing(const v1::AttendStreamRequest& request) {
    ring_->SubmitMessage(request, arena_at() + kMessageAt, 0, 0);
    return RingReply();
  }
  // The step's two rows at layer 0, with tensors at these offsets of the ring's region.
  v1::AttendStreamReply AttendOnRing(uint64_t step, uint64_t in_offset, uint64_t out_offset) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.profile = v1::PROFILE_ABSORBED;
    entry.flags = wire::kEntryHasKv;
    entry.step_id = step;
    entry.row_count = 2;
    entry.num_heads = 4;
    entry.in_offset = in_offset;
    entry.out_offset = out_offset;
    ring_->Submit(entry);
    return RingReply();
  }

  // Both steps still take tensors and end normally. All KV rows are equal, so the outputs are
  // equal, too.
  void ExpectServed() {
    const auto clear = [](std::span<std::byte> out) {
      std::fill(out.begin(), out.end(), std::byte{0});
      return out;
    };
    const std::span<std::byte> outs[] = {clear(stream_arena().subspan(kOutAt, kOutBytes)),
                                         clear(ring_arena().subspan(kOutAt, kOutBytes))};
    EXPECT_TRUE(OnStream(Attend(stream_step_, handle())).has_attend());
    EXPECT_TRUE(AttendOnRing(ring_step_, arena_at(), arena_at() + kOutAt).has_attend());
    for (std::span<std::byte> out : outs) {
      EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](std::byte b) { return b == kFill; }));
    }
    EXPECT_TRUE(OnStream(Abort(stream_step_)).has_abort_step());
    EXPECT_TRUE(OnRing(Abort(ring_step_)).has_abort_step());
  }
  void ExpectUntouched() {
    for (std::span<std::byte> arena : {stream_arena(), ring_arena()}) {
      EXPECT_TRUE(std::all_of(arena.begin(), arena.end(), [](std::byte b) { return b == kFill; }));
    }
  }

  std::string handle() const { return HandleOf(tensors_); }
  std::string ring_handle() const { return HandleOf(ring_connection_); }
  uint64_t stream_step() const { return stream_step_; }
  uint64_t ring_step() const { return ring_step_; }
  const std::vector<client::Sequence>& sequences() const { return sequences_; }
  client::Client& client() { return *client_; }
  // Offset of tensors in the ring's region.
  uint64_t arena_at() const { return ring_connection_.reply().arena_offset; }
  uint64_t ring_region_bytes() const { return ring_connection_.region().size(); }

 private:
  static std::string HandleOf(const ShmConnection& connection) {
    return std::string(reinterpret_cast<const char*>(connection.reply().handle),
                       wire::kHandleBytes);
  }
  std::span<std::byte> stream_arena() const { return tensors_.region(); }
  std::span<std::byte> ring_arena() const { return ring_connection_.region().subspan(arena_at()); }

  // A completion of an attend has no message.
  v1::AttendStreamReply RingReply() {
    v1::AttendStreamReply reply;
    const auto done = ring_->Wait(seconds(20));
    EXPECT_TRUE(done.has_value());
    if (done.has_value() && done->kind == wire::kEntryAttend) reply.mutable_attend();
    if (done.has_value() && done->kind != wire::kEntryAttend) {
      const auto message = ring_->Message(*done);
      EXPECT_TRUE(message.has_value());
      reply = message.value_or(reply);
    }
    return reply;
  }

  const uint64_t stream_step_, ring_step_;
  std::unique_ptr<client::Client> client_;
  std::vector<client::Sequence> sequences_;
  ShmConnection tensors_, ring_connection_;
  std::optional<RingHand> ring_;
  std::unique_ptr<v1::Attention::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttendStreamRequest, v1::AttendStreamReply>> stream_;
};

class TenantRegionsTest : public testing::Test {
 protected:
  // The reply about the other tenant's object must equal the reply about one that never existed.
  static void ExpectAbsent(const v1::AttendStreamReply& foreign,
                           const v1::AttendStreamReply& absent, const std::string& reason) {
    ASSERT_TRUE(foreign.has_error()) << foreign.ShortDebugString();
    ASSERT_TRUE(absent.has_error()) << absent.ShortDebugString();
    EXPECT_EQ(foreign.error().code(), static_cast<int>(StatusCode::kNotFound));
    EXPECT_EQ(foreign.error().detail().reason(), reason);
    EXPECT_EQ(foreign.error().code(), absent.error().code());
    EXPECT_EQ(foreign.error().detail().reason(), absent.error().detail().reason());
    EXPECT_EQ(foreign.error().detail().field(), absent.error().detail().field());
    EXPECT_EQ(foreign.error().detail().limit(), absent.error().detail().limit());
    EXPECT_EQ(foreign.error().step_aborted(), absent.error().step_aborted());
  }

  // Steps stay open for as long as a test takes.
  TestServer server_{[](server::Config& config) { config.limits.step_lease_ms = 60000; }};
  std::optional<Party> a_{std::in_place, server_, "a", 1};
  Party b_{server_, "b", 11};
};

TEST_F(TenantRegionsTest, RegionsOfAnotherTenantCannotBeNamed) {
  const std::string absent(wire::kHandleBytes, 'x');
  for (const std::string& handle : {b_.handle(), b_.ring_handle()}) {
    ExpectAbsent(a_->OnStream(Party::Attend(a_->stream_step(), handle)),
                 a_->OnStream(Party::Attend(a_->stream_step(), absent)), "region_not_found");
    // A ring accepts no handles at all.
    const v1::AttendStreamReply reply = a_->OnRing(Party::Attend(a_->ring_step(), handle));
    ASSERT_TRUE(reply.has_error());
    EXPECT_EQ(reply.error().detail().field(), "message");
  }
  b_.ExpectUntouched();
  a_->ExpectServed();
  b_.ExpectUntouched();
  b_.ExpectServed();
}

TEST_F(TenantRegionsTest, PlacesReachNoOtherRegion) {
  const uint64_t size = a_->ring_region_bytes(), good = a_->arena_at();
  const uint64_t bads[] = {size,
                           size + 4096,
                           size + b_.ring_region_bytes(),
                           uint64_t{1} << 47,
                           UINT64_MAX - 63,
                           UINT64_MAX - size + 1,
                           0};
  for (const uint64_t bad : bads) {
    for (const bool in : {true, false}) {
      const auto reply = a_->AttendOnRing(a_->ring_step(), in ? bad : good, in ? good : bad);
      ASSERT_TRUE(reply.has_error()) << bad;
      EXPECT_EQ(reply.error().code(), static_cast<int>(StatusCode::kInvalidArgument));
      EXPECT_EQ(reply.error().detail().field(), in ? "in_offset" : "out_offset") << bad;
    }
    v1::AttendStreamRequest request = Party::Attend(a_->stream_step(), a_->handle());
    request.mutable_shared()->set_out_offset(bad == 0 ? kArenaBytes : bad);
    EXPECT_EQ(a_->OnStream(request).error().detail().field(), "shared.out_offset") << bad;
  }
  b_.ExpectUntouched();
  a_->ExpectServed();
  b_.ExpectServed();
}

TEST_F(TenantRegionsTest, StepsAndSequencesOfAnotherTenantAreNotThere) {
  for (const uint64_t step : {b_.stream_step(), b_.ring_step()}) {
    for (const auto& make : {Party::Abort, Party::End}) {
      ExpectAbsent(a_->OnStream(make(step)), a_->OnStream(make(kAbsentStep)), "step_not_found");
      ExpectAbsent(a_->OnRing(make(step)), a_->OnRing(make(kAbsentStep)), "step_not_found");
    }
    ExpectAbsent(a_->OnStream(Party::Attend(step, a_->handle())),
                 a_->OnStream(Party::Attend(kAbsentStep, a_->handle())), "step_not_found");
    const uint64_t at = a_->arena_at();
    ExpectAbsent(a_->AttendOnRing(step, at, at + kOutAt),
                 a_->AttendOnRing(kAbsentStep, at, at + kOutAt), "step_not_found");
  }
  for (const client::Sequence& sequence : b_.sequences()) {
    for (const bool ring : {false, true}) {
      const auto begin = Party::Begin(kAbsentStep, sequence);
      const auto reply = ring ? a_->OnRing(begin) : a_->OnStream(begin);
      ASSERT_TRUE(reply.has_error());
      EXPECT_EQ(reply.error().detail().reason(), "sequence_not_found");
    }
  }
  b_.ExpectUntouched();
  b_.ExpectServed();
}

TEST_F(TenantRegionsTest, RegionsOutliveAnotherTenantsConnections) {
  EXPECT_TRUE(Becomes(b_.client(), [](const auto& s) { return s.shared_regions() == 4; }));
  a_.reset();
  EXPECT_TRUE(Becomes(b_.client(), [](const auto& s) {
    return s.shared_regions() == 2 && s.rings() == 1 && s.open_steps() == 2;
  }));
  b_.ExpectUntouched();
  b_.ExpectServed();
}

}  // namespace
}  // namespace mla::integration
