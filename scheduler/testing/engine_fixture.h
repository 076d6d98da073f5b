// The fixture of the engine's tests has one tenant, one stream, and the tiny model.
#ifndef MLA_SCHEDULER_TESTING_ENGINE_FIXTURE_H_
#define MLA_SCHEDULER_TESTING_ENGINE_FIXTURE_H_

#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "scheduler/testing/engine_harness.h"

namespace mla::scheduler::testing {

// Answers may differ by this from dense ones, because fp32 sums have another order.
inline constexpr double kTolerance = 2e-5;

class EngineCoreTest : public ::testing::Test {
 protected:
  EngineCoreTest() : EngineCoreTest(HarnessOptions{TinyLimits(), TinyModel(), nullptr}) {}
  explicit EngineCoreTest(HarnessOptions options)
      : h_(std::move(options)), stream_(h_.core().steps().OpenStream(h_.tenant())) {}

  // Commits `rows` rows to a sequence on both layers; layer l stores Rows(rows, key + l).
  void Fill(const SequenceInfo& seq, int rows, uint64_t key) {
    const SequenceInfo now = h_.Get(seq.id);
    auto begin = h_.Begin(stream_, 900, {{seq.id, now.epoch, now.length, rows}});
    ASSERT_TRUE(begin->status.ok()) << begin->status;
    auto a = h_.AppendOnly(stream_, 900, 0, 0, Rows(rows, key));
    auto b = h_.AppendOnly(stream_, 900, 1, 0, Rows(rows, key + 1));
    h_.Run();
    auto end = h_.End(stream_, 900);
    ASSERT_TRUE(end->status.ok()) << end->status;
  }
  void ExpectCode(const TestRequest& request, absl::StatusCode code, const std::string& reason) {
    ASSERT_EQ(request.answers, 1);
    EXPECT_EQ(request.status.code(), code) << request.status;
    EXPECT_EQ(request.detail.reason, reason) << request.status;
  }

  EngineHarness h_;
  StreamId stream_;
};

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_TESTING_ENGINE_FIXTURE_H_
