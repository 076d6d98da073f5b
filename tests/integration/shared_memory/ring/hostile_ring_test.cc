// Rings and regions of hostile clients. The server writes nothing outside the memory that a request
// offers, no memory of another tenant changes, and the server goes on.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mla/v1/attention.pb.h"
#include "tests/integration/dense_model.h"
#include "tests/integration/shared_memory/ring/ring_hand.h"
#include "tests/integration/shared_memory/shared_memory_harness.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using absl::StatusCode;
using client::ClientOptions;
using std::chrono::milliseconds;
using std::chrono::seconds;

// The lengths of this many sequences take several slots of a ring.
constexpr int kSequences = 1100;
constexpr uint64_t kArenaBytes = 256 << 10;
constexpr std::byte kFill{0xa5};

class HostileRingTest : public testing::Test {
 protected:
  HostileRingTest()
      : server_([](server::Config& config) {
          config.limits.max_sequences = 2 * kSequences;
          config.limits.max_step_sequences = kSequences;
          config.limits.max_step_rows = kSequences;
          config.limits.max_open_steps = 8;
          config.shm.regions_max = 8;
        }),
        client_(server_.Connect(Over(ClientOptions::Transport::kInline))),
        connection_(ShmPathOf(server_)) {
    const std::span<std::byte> region = connection_.Open("", kArenaBytes, /*ring=*/true);
    EXPECT_FALSE(region.empty());
    ring_.emplace(region, connection_.reply().ring_entries);
    arena_ = connection_.reply().arena_offset;
    EXPECT_TRUE(client_->RegisterModel(SpecOf(Dims(), "m")).ok());
    for (int i = 0; i < kSequences; ++i) sequences_.push_back(*client_->OpenSequence("m"));
  }

  v1::AttendStreamRequest Begin(int sequences, uint32_t lease_ms = 0) const {
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(7);
    begin->set_model_id("m");
    begin->set_lease_ms(lease_ms);
    for (int i = 0; i < sequences; ++i) {
      v1::StepSequence* rows = begin->add_sequences();
      rows->set_sequence_id(sequences_[static_cast<size_t>(i)].id());
      rows->set_epoch(sequences_[static_cast<size_t>(i)].epoch());
      rows->set_rows(1);
    }
    return request;
  }

  // Keeps no rows, so that none can be missing.
  static v1::AttendStreamRequest End(int sequences) {
    v1::AttendStreamRequest request;
    request.mutable_end_step()->set_step_id(7);
    for (int i = 0; i < sequences; ++i) request.mutable_end_step()->add_committed_rows(0);
    return request;
  }

  // Bytes of requests lie at the arena's start, so that its end can be checked.
  v1::AttendStreamReply Send(const v1::AttendStreamRequest& request, uint64_t room_at = 0,
                             uint32_t room = 0) {
    ring_->SubmitMessage(request, arena_, room_at, room);
    const auto done = ring_->Wait(seconds(20));
    EXPECT_TRUE(done.has_value());
    const auto reply = done.has_value() ? ring_->Message(*done) : std::nullopt;
    EXPECT_TRUE(reply.has_value());
    return reply.value_or(v1::AttendStreamReply());
  }

  // Afterwards step 7 with one sequence has expired, and step 7 with all of them is open.
  void ReuseTheIdAfterItsLease() {
    ASSERT_TRUE(Send(Begin(1, /*lease_ms=*/1)).has_begin_step());
    ASSERT_TRUE(Becomes(*client_, [](const auto& s) { return s.open_steps() == 0; }));
    const v1::AttendStreamReply begun = Send(Begin(kSequences));
    ASSERT_TRUE(begun.has_begin_step()) << begun.ShortDebugString();
    ASSERT_EQ(begun.begin_step().total_rows(), static_cast<uint32_t>(kSequences));
  }

  // Opens regions of other tenants, on both sides of the existing mappings.
  void OpenNeighbours() {
    for (const char* tenant : {"b", "c"}) {
      neighbours_.push_back(std::make_unique<ShmConnection>(ShmPathOf(server_)));
      const std::span<std::byte> region =
          neighbours_.back()->Open(tenant, kArenaBytes, /*ring=*/false);
      ASSERT_FALSE(region.empty());
      std::fill(region.begin(), region.end(), kFill);
    }
  }

  void ExpectNeighboursUntouched() const {
    for (const auto& neighbour : neighbours_) {
      const std::span<std::byte> region = neighbour->region();
      EXPECT_TRUE(std::all_of(region.begin(), region.end(),
                              [](std::byte value) { return value == kFill; }));
    }
  }

  void ExpectServes() {
    Worker worker(client_.get(), Dims(), "m", 1);
    Track track = *worker.Open();
    EXPECT_EQ(worker.Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }

  TestServer server_;
  std::unique_ptr<client::Client> client_;
  ShmConnection connection_;
  std::optional<RingHand> ring_;
  uint64_t arena_ = 0;
  std::vector<client::Sequence> sequences_;
  std::vector<std::unique_ptr<ShmConnection>> neighbours_;
};

TEST_F(HostileRingTest, TheReplyOfAnIdUsedAgainKeepsToItsRoom) {
  OpenNeighbours();
  const uint64_t size = ring_->region().size();
  ReuseTheIdAfterItsLease();
  const std::pair<uint64_t, uint32_t> kRooms[] = {{0, 0}, {size - 64, 64}, {size - 8192, 8192}};
  for (const auto& [at, room] : kRooms) {
    std::fill(ring_->region().end() - 8192, ring_->region().end(), kFill);
    const v1::AttendStreamReply refused = Send(End(kSequences), at, room);
    EXPECT_EQ(refused.error().code(), static_cast<int>(StatusCode::kInvalidArgument)) << room;
    EXPECT_EQ(refused.error().detail().field(), "num_heads") << room;
    EXPECT_EQ(refused.error().detail().reason(), "reply_too_large") << room;
    EXPECT_EQ(refused.error().detail().got(), std::to_string(room) + " bytes");
    EXPECT_FALSE(refused.error().detail().limit().empty());
    EXPECT_TRUE(std::all_of(ring_->region().end() - 8192, ring_->region().end(),
                            [](std::byte value) { return value == kFill; }))
        << room;
  }
  ExpectNeighboursUntouched();
  // The step is still open, and ends when its request has room for the lengths.
  const v1::AttendStreamReply ended = Send(End(kSequences), size - 12288, 12288);
  ASSERT_TRUE(ended.has_end_step()) << ended.ShortDebugString();
  EXPECT_EQ(ended.end_step().lengths_size(), kSequences);
  ExpectServes();
}

// The bound of an EndStep is that of the step when it ends, not that of a refused BeginStep with
// the same id in between.
TEST_F(HostileRingTest, ARefusedBeginChangesNoRoom) {
  ASSERT_TRUE(Send(Begin(kSequences)).has_begin_step());
  ring_->SubmitMessage(Begin(1), arena_, 0, 0);
  const v1::AttendStreamRequest end = End(kSequences);
  ring_->SubmitMessage(end, arena_ + 65536, 0, 0);
  const auto begun = ring_->Wait(seconds(20)), ended = ring_->Wait(seconds(20));
  ASSERT_TRUE(begun.has_value() && ended.has_value());
  EXPECT_EQ(ring_->Message(*begun)->error().detail().reason(), "step_exists");
  EXPECT_EQ(ring_->Message(*ended)->error().detail().field(), "num_heads");
  EXPECT_TRUE(Becomes(*client_, [](const auto& s) { return s.open_steps() == 1; }));
}

// Bytes of a message that change while the server reads them affect only its reply.
TEST_F(HostileRingTest, MessagesMayChangeWhileTheyAreRead) {
  const std::string one = Begin(1).SerializeAsString();
  std::string other = one;
  std::atomic<bool> stop{false};
  std::byte* const target = ring_->region().data() + arena_;
  std::thread writer([&] {
    for (size_t i = 0; !stop; ++i) {
      target[i % one.size()] = static_cast<std::byte>(i * 7);
      if (i % 64 == 0)
        std::copy_n(reinterpret_cast<const std::byte*>(one.data()), one.size(), target);
    }
  });
  for (int i = 0; i < 500; ++i) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryMessage;
    entry.row_count = static_cast<uint32_t>(one.size());
    entry.in_offset = arena_;
    ring_->Submit(entry);
    ASSERT_TRUE(ring_->Wait(seconds(20)).has_value()) << i;
  }
  stop = true;
  writer.join();
  ExpectServes();
}

// A sequence of a sparse model whose pages lie between pages of another sequence, where all rows
// are NaN; and calls of its step whose index lists or index inputs change while they are used.
class HostileListsTest : public HostileRingTest {
 protected:
  static constexpr uint32_t kTopK = 64, kIndexHeads = 2, kIndexDim = 8, kRows = 4;
  static constexpr uint32_t kRounds = 40;  // rounds of four rows

  void SetUp() override {
    v1::ModelSpec spec = SpecOf(dims_, "s");
    spec.set_attention(v1::ATTENTION_KIND_SPARSE_V32);
    spec.set_top_k(kTopK);
    spec.set_index_heads(kIndexHeads);
    spec.set_index_dim(kIndexDim);
    ASSERT_TRUE(client_->RegisterModel(spec).ok());
    nan_ = *client_->OpenSequence("s");
    sequence_ = *client_->OpenSequence("s");
    const auto session = *client_->OpenSession();
    std::vector<uint16_t> kv(2 * kRows * row_, 0x7fc0);
    for (uint32_t round = 0; round < kRounds; ++round) {
      const auto rows = RandomBf16(kRows * row_, &random_);
      std::copy(rows.begin(), rows.end(), kv.begin() + kRows * row_);
      auto step = session->Begin("s", {{&*nan_, kRows}, {&*sequence_, kRows}});
      ASSERT_TRUE(step.ok()) << step.status();
      for (int layer = 0; layer < dims_.layers; ++layer) {
        client::AttendCall call;
        call.layer = static_cast<uint32_t>(layer);
        call.row_count = 2 * kRows;
        call.profile = v1::PROFILE_APPEND_ONLY;
        call.kv = kv.data();
        ASSERT_TRUE((*step)->Attend(call).ok());
      }
      ASSERT_TRUE((*step)->End().ok());
    }
    const auto first = RandomBf16((kRows * row_ + 31) / 32 * 32, &random_);
    const auto q = RandomBf16(kRows * Heads() * static_cast<size_t>(dims_.row()), &random_);
    q_at_ = AfterAligned(arena_, kRows * row_ * 2);
    lists_at_ = AfterAligned(q_at_, q.size() * 2);
    std::copy(first.begin(), first.end(), At<uint16_t>(arena_));
    std::copy(q.begin(), q.end(), At<uint16_t>(q_at_));
  }

  size_t Heads() const { return static_cast<size_t>(dims_.heads); }
  static uint64_t AfterAligned(uint64_t at, uint64_t bytes) { return (at + bytes + 63) / 64 * 64; }
  template <typename T>
  T* At(uint64_t offset) const {
    return reinterpret_cast<T*>(ring_->region().data() + offset);
  }

  // Begins a step, attends and keeps nothing. Returns true if there was a reply, which is checked,
  // and false if the call was refused because a list names no position.
  bool Step(uint8_t source) {
    v1::AttendStreamRequest begin = Begin(1);
    v1::BeginStep* const args = begin.mutable_begin_step();
    args->set_model_id("s");
    args->mutable_sequences(0)->set_sequence_id(sequence_->id());
    args->mutable_sequences(0)->set_epoch(sequence_->epoch());
    args->mutable_sequences(0)->set_start_position(kRounds * kRows);
    args->mutable_sequences(0)->set_rows(kRows);
    // Messages follow the tensors.
    const uint64_t messages = arena_ + kArenaBytes / 2, out = messages + 65536;
    const auto send = [&](const v1::AttendStreamRequest& request) {
      ring_->SubmitMessage(request, messages, 0, 0);
      const auto done = ring_->Wait(seconds(20));
      return done.has_value() ? ring_->Message(*done) : std::nullopt;
    };
    const auto begun = send(begin);
    EXPECT_TRUE(begun.has_value() && begun->has_begin_step())
        << (begun.has_value() ? begun->ShortDebugString() : "no reply");
    wire::SubmissionEntry attend{};
    attend.kind = wire::kEntryAttend;
    attend.profile = v1::PROFILE_ABSORBED;
    attend.flags = wire::kEntryHasKv | wire::kEntryWantLse | source;
    attend.dtypes = v1::DTYPE_BF16 | v1::DTYPE_F32 << 4;
    attend.step_id = 7;
    attend.row_count = kRows;
    attend.num_heads = static_cast<uint32_t>(Heads());
    attend.in_offset = arena_;
    attend.out_offset = out;
    ring_->Submit(attend);
    const auto done = ring_->Wait(seconds(20));
    EXPECT_TRUE(done.has_value());
    const bool answered = done.has_value() && done->kind == wire::kEntryAttend;
    if (answered) {
      const float* const o = At<float>(out);
      const size_t count = kRows * Heads() * static_cast<size_t>(dims_.lora);
      EXPECT_TRUE(std::all_of(o, o + count, [](float v) { return std::isfinite(v); }));
    } else if (done.has_value()) {
      EXPECT_EQ(ring_->Message(*done)->error().detail().reason(), "list_position");
    }
    EXPECT_TRUE(send(End(1)).has_value());
    return answered;
  }

  const Dims dims_;
  const size_t row_ = static_cast<size_t>(dims_.row()) + kIndexDim;
  std::mt19937_64 random_{3};
  std::optional<client::Sequence> nan_, sequence_;
  uint64_t q_at_ = 0, lists_at_ = 0;
};

TEST_F(HostileListsTest, ListsMayChangeWhileTheyAreUsed) {
  constexpr int32_t kWild[] = {-2, 4 * kRounds + 4, 5000, 1 << 20, 1 << 30, INT32_MAX, INT32_MIN};
  volatile int32_t* const lists = At<int32_t>(lists_at_);
  for (uint32_t i = 0; i < kRows * kTopK; ++i) lists[i] = static_cast<int32_t>(i * 7 % 160);
  ASSERT_TRUE(Step(wire::kEntryHasLists));
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    const auto wait = [&stop](uint32_t turns) {
      while (turns > 0 && !stop) --turns;
    };
    for (uint32_t i = 0; !stop; ++i) {
      volatile int32_t& entry = lists[i * 37 % (kRows * kTopK)];
      const int32_t good = entry;
      entry = kWild[i % std::size(kWild)];
      wait(100);
      entry = good;
      wait(i % 100);
      if (i % 1024 == 0) std::this_thread::yield();
    }
  });
  // On a busy machine the writer may sleep during hundreds of steps.
  int steps = 0, answered = 0;
  for (; steps < 400 || (answered == steps && steps < 20'000); ++steps) {
    answered += Step(wire::kEntryHasLists) ? 1 : 0;
  }
  stop = true;
  writer.join();
  EXPECT_LT(answered, steps) << "no list changed in time";
  EXPECT_TRUE(Step(wire::kEntryHasLists));
  ExpectServes();
}

TEST_F(HostileListsTest, IndexInputsMayChangeWhileTheyAreUsed) {
  constexpr size_t kBytes = kRows * kIndexHeads * (kIndexDim * 2 + 4);
  volatile uint8_t* const inputs = At<uint8_t>(lists_at_);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    std::mt19937 random(5);  // any bits, including NaN and infinities
    for (uint32_t i = 0; !stop; ++i) {
      inputs[random() % kBytes] = static_cast<uint8_t>(random());
      if (i % 1024 == 0) std::this_thread::yield();
    }
  });
  for (int i = 0; i < 400; ++i) EXPECT_TRUE(Step(wire::kEntrySelects));
  stop = true;
  writer.join();
  ExpectServes();
}

// An id may be reused as soon as its step is over, however the step ended.
TEST_F(HostileRingTest, IdsAreUsedAgainAfterTheirLease) {
  ReuseTheIdAfterItsLease();
  wire::SubmissionEntry attend{};
  attend.kind = wire::kEntryAttend;
  attend.profile = v1::PROFILE_APPEND_ONLY;
  attend.flags = wire::kEntryHasKv;
  attend.step_id = 7;
  attend.row_count = 100;
  attend.in_offset = arena_;
  ring_->Submit(attend);
  const auto done = ring_->Wait(seconds(20));
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->kind, wire::kEntryAttend);
}

// Any number of expired steps leaves an open step in place.
TEST_F(HostileRingTest, ShortStepsDisplaceNoOpenStep) {
  v1::AttendStreamRequest lasting = Begin(1);
  lasting.mutable_begin_step()->set_step_id(1);
  ASSERT_TRUE(Send(lasting).has_begin_step());
  v1::AttendStreamRequest brief = Begin(2, /*lease_ms=*/1);
  brief.mutable_begin_step()->mutable_sequences()->DeleteSubrange(0, 1);
  v1::AttendStreamRequest abort;
  const uint64_t kSteps = 4 * static_cast<uint64_t>(server::Config().limits.max_open_steps) + 60;
  for (uint64_t id = 2; id < 2 + kSteps; ++id) {
    brief.mutable_begin_step()->set_step_id(id);
    // Its lease expires or has expired; until then the sequence is in the previous step.
    for (int tries = 0; !Send(brief).has_begin_step(); ++tries) ASSERT_LT(tries, 2000);
  }
  wire::SubmissionEntry attend{};
  attend.kind = wire::kEntryAttend;
  attend.profile = v1::PROFILE_APPEND_ONLY;
  attend.flags = wire::kEntryHasKv;
  attend.step_id = 1;
  attend.row_count = 1;
  attend.in_offset = arena_;
  ring_->Submit(attend);
  const auto done = ring_->Wait(seconds(20));
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->kind, wire::kEntryAttend) << ring_->Message(*done)->ShortDebugString();
}

// After a step's end, the engine says why it is gone.
TEST_F(HostileRingTest, AStepThatRanOutSaysWhy) {
  ASSERT_TRUE(Send(Begin(1, /*lease_ms=*/1)).has_begin_step());
  ASSERT_TRUE(Becomes(*client_, [](const auto& s) { return s.open_steps() == 0; }));
  wire::SubmissionEntry attend{};
  attend.kind = wire::kEntryAttend;
  attend.profile = v1::PROFILE_ABSORBED;
  attend.step_id = 7;
  attend.row_count = 1;
  attend.num_heads = 1;
  ring_->Submit(attend);
  const auto done = ring_->Wait(seconds(20));
  ASSERT_TRUE(done.has_value());
  const auto reply = ring_->Message(*done);
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->error().code(), static_cast<int>(StatusCode::kAborted));
  EXPECT_EQ(reply->error().detail().reason(), "step_aborted");
}

// A client that returns pages of its region to the system costs the server only these pages again,
// and loses the region.
TEST_F(HostileRingTest, HolesInARegionEndIt) {
  ASSERT_TRUE(Send(Begin(1)).has_begin_step());
  const std::span<std::byte> region = ring_->region();
  ASSERT_EQ(madvise(region.data() + arena_, region.size() - arena_, MADV_REMOVE), 0);
  ASSERT_EQ(fallocate(connection_.descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                      static_cast<off_t>(region.size())),
            0);
  // The server reads and writes the removed pages, the ring's own words included.
  wire::SubmissionEntry attend{};
  attend.kind = wire::kEntryAttend;
  attend.profile = v1::PROFILE_ABSORBED;
  attend.flags = wire::kEntryHasKv | wire::kEntryWantLse;
  attend.step_id = 7;
  attend.row_count = 1;
  attend.num_heads = 4;
  attend.in_offset = arena_;
  attend.out_offset = arena_ + 65536;
  ring_->Submit(attend);
  ExpectServes();
  EXPECT_TRUE(connection_.Ended(seconds(20)));
  EXPECT_TRUE(Becomes(*client_, [](const auto& s) { return s.shared_regions() == 0; }));
  const std::string metrics = HttpGet(server_.server().ops_port(), "/metrics");
  EXPECT_NE(metrics.find("mla_streams_disconnected_total{reason=\"region_holes\"} 1"),
            std::string::npos);
  ExpectServes();
}

// Without a free descriptor, clients are refused at once, and the listener does not spin.
TEST_F(HostileRingTest, AClientIsRefusedWhenDescriptorsRunOut) {
  // This client connects while there is a descriptor, and is accepted when there is none.
  const int late = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  rlimit before_limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before_limit), 0);
  rlimit few = before_limit;
  few.rlim_cur = 512;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<int> descriptors;
  for (int one = dup(late); one >= 0; one = dup(late)) descriptors.push_back(one);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ShmPathOf(server_).copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(connect(late, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  pollfd ended{late, POLLIN | POLLRDHUP, 0};
  EXPECT_EQ(poll(&ended, 1, 20000), 1);
  // Processor time, of which a busy machine gives less, not more.
  const auto cpu_ms = [] { return 1000 * std::clock() / CLOCKS_PER_SEC; };
  const auto before = cpu_ms();
  std::this_thread::sleep_for(milliseconds(1000));
  EXPECT_LT(cpu_ms() - before, 500);
  for (const int one : descriptors) close(one);
  close(late);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before_limit), 0);
  const std::string metrics = HttpGet(server_.server().ops_port(), "/metrics");
  EXPECT_EQ(metrics.find("mla_shm_connections_refused_total 0\n"), std::string::npos);
  ShmConnection again(ShmPathOf(server_));
  EXPECT_FALSE(again.Open("", kArenaBytes, /*ring=*/true).empty());
}

TEST_F(HostileRingTest, ABrokenRuleHasItsOwnReason) {
  std::atomic_ref(ring_->header().completions_taken).store(1'000'000);
  ring_->Submit({});
  EXPECT_TRUE(connection_.Ended(seconds(10)));
  const std::string metrics = HttpGet(server_.server().ops_port(), "/metrics");
  EXPECT_NE(metrics.find("mla_streams_disconnected_total{reason=\"ring_rules\"} 1"),
            std::string::npos);
  EXPECT_NE(metrics.find("mla_streams_disconnected_total{reason=\"slow_reader\"} 0"),
            std::string::npos);
}

}  // namespace
}  // namespace mla::integration
