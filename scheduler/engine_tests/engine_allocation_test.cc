// In the steady state the engine allocates nothing: counted by replacing operator new.
#include <atomic>
#include <cstdlib>
#include <new>

#include "gtest/gtest.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/testing/engine_harness.h"

namespace {

std::atomic<int64_t> allocations{0};

}  // namespace

void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace mla::scheduler {
namespace {

using testing::EngineHarness;

// A request that is used again and again, as a transport's pool does.
class PooledRequest final : public StreamRequest {
 public:
  void Done(const absl::Status& status) override {
    ok = status.ok();
    ++answers;
  }
  bool ok = false;
  int answers = 0;
};

class Worker {
 public:
  Worker(EngineHarness& harness, StepId step)
      : h_(harness), stream_(h_.core().steps().OpenStream(h_.tenant())), step_(step) {
    sequence_ = h_.Open("", 3'000'000);
    begin_.kind = RequestKind::kBeginStep;
    begin_.begin.model_id = h_.model().id;
    end_.kind = RequestKind::kEndStep;
    end_.end.committed_rows = {1};
    for (size_t i = 0; i < sizeof(kv_) / 2; ++i) kv_[i] = kernels::ToBf16(0.01f * float(i));
    for (size_t i = 0; i < sizeof(q_) / 2; ++i) q_[i] = kernels::ToBf16(0.02f * float(i));
  }

  bool Step() {
    begin_.begin.sequences.assign(1, {sequence_.id, epoch_, length_, 1});
    bool ok = Send(begin_);
    for (int layer = 0; layer < 2; ++layer) {
      AttendArgs& args = attend_.attend;
      args.layer = layer;
      args.row_count = 1;
      args.num_heads = 2;
      args.has_kv = true;
      args.want_lse = true;
      args.kv = reinterpret_cast<const std::byte*>(kv_);
      args.q = reinterpret_cast<const std::byte*>(q_);
      args.o = reinterpret_cast<std::byte*>(o_);
      args.lse = lse_;
      ok &= Send(attend_);
    }
    ok &= Send(end_);
    // A sequence of bounded length: the steady state of a long run.
    if (++length_ == 40) {
      ok &= h_.core().sequences().Truncate(h_.tenant(), sequence_.id, 20, epoch_++).ok();
      length_ = 20;
    }
    return ok;
  }

 private:
  bool Send(PooledRequest& request) {
    request.stream = stream_;
    request.step_id = step_;
    const int before = request.answers;
    h_.Submit(&request);
    h_.Run();
    return request.answers == before + 1 && request.ok;
  }

  EngineHarness& h_;
  const StreamId stream_;
  const StepId step_;
  SequenceInfo sequence_;
  uint64_t epoch_ = 1;
  int64_t length_ = 0;
  PooledRequest begin_, attend_, end_;
  kernels::Bf16 kv_[12];
  kernels::Bf16 q_[24];
  kernels::Bf16 o_[16];
  float lse_[2];
};

// Two ranks with a head each, over one sequence.
class Ranks {
 public:
  explicit Ranks(EngineHarness& harness) : h_(harness), sequence_(h_.Open("", 3'000'000)) {
    for (Rank& rank : ranks_) {
      rank.stream = h_.core().steps().OpenStream(h_.tenant());
      rank.begin.kind = RequestKind::kBeginStep;
      rank.begin.begin.model_id = h_.model().id;
      rank.begin.begin.participants = 2;
      rank.end.kind = RequestKind::kEndStep;
    }
    // In the steady state a sequence keeps its length: nothing is committed.
    ranks_[0].end.end.committed_rows = {0};
  }

  // `late`: the second slice comes after the wait for it.
  bool Step(bool late) {
    bool ok = true;
    for (Rank& rank : ranks_) {
      rank.begin.begin.sequences.assign(1, {sequence_.id, 1, 0, 1});
      Send(rank, rank.begin);
      ok &= rank.begin.ok;
    }
    for (int layer = 0; layer < 2; ++layer) {
      for (int32_t i = 0; i < 2; ++i) {
        Rank& rank = ranks_[i];
        AttendArgs& args = rank.attend.attend;
        args.layer = layer;
        args.row_count = 1;
        args.head_offset = i;
        args.num_heads = 1;
        args.has_kv = i == 0;
        args.want_lse = true;
        args.kv = reinterpret_cast<const std::byte*>(rank.kv);
        args.q = reinterpret_cast<const std::byte*>(rank.q);
        args.o = reinterpret_cast<std::byte*>(rank.o);
        args.lse = &rank.lse;
        Send(rank, rank.attend);
        if (late) h_.AdvanceMicros(h_.core().limits().slice_wait_us);
        h_.Run();
      }
      ok &= ranks_[0].attend.ok && ranks_[1].attend.ok;
    }
    Send(ranks_[0], ranks_[0].end);
    return ok && ranks_[0].end.ok;
  }

 private:
  struct Rank {
    StreamId stream = 0;
    PooledRequest begin, attend, end;
    kernels::Bf16 kv[12] = {};
    kernels::Bf16 q[12] = {};
    kernels::Bf16 o[8] = {};
    float lse = 0;
  };
  void Send(Rank& rank, PooledRequest& request) {
    request.ok = false;
    request.stream = rank.stream;
    request.step_id = 7;
    h_.Submit(&request);
  }

  EngineHarness& h_;
  const SequenceInfo sequence_;
  Rank ranks_[2];
};

TEST(EngineAllocation, SlicesOfRanksAllocateNothing) {
  EngineHarness harness;
  Ranks ranks(harness);
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(ranks.Step(i % 2 == 0));
  const int64_t before = allocations;
  bool ok = true;
  for (int i = 0; i < 2000; ++i) ok &= ranks.Step(i % 4 == 0);
  EXPECT_EQ(allocations - before, 0);
  EXPECT_TRUE(ok);
  EXPECT_EQ(harness.core().Stats().slices_fused, 2u * 2 * (100 + 1500));
}

TEST(EngineAllocation, TheSteadyStateAllocatesNothing) {
  EngineHarness harness;
  Worker a(harness, 1);
  Worker b(harness, 2);
  // Truncate answers with strings, so steps that end in one are not part of the count.
  int64_t counted = 0;
  int64_t dirty = 0;
  for (int i = 0; i < 3000; ++i) {
    const int64_t before = allocations;
    ASSERT_TRUE(a.Step());
    const bool truncates = (i + 1) >= 40 && (i + 1 - 40) % 20 == 0;
    if (i > 200 && !truncates) {
      ++counted;
      dirty += allocations - before;
    }
    ASSERT_TRUE(b.Step());
  }
  EXPECT_GT(counted, 2000);
  EXPECT_EQ(dirty, 0);
}

}  // namespace
}  // namespace mla::scheduler
