// A prompt costs a caller the same work of the engine whether or not the prefix cache has it for
// another tenant, or for the same tenant with another salt. So the time of calls does not reveal
// other prompts; prefix_timing_benchmark measures that time.
#include <tuple>

#include "gtest/gtest.h"
#include "scheduler/engine_tests/pages/prefix_caller.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using testing::PrefixCaller;
using testing::PrefixWork;

constexpr uint32_t kTrials = 200;

auto CountsOf(const PrefixWork& work) {
  return std::tuple(work.launches, work.rows, work.page_groups);
}

// The work of `attacker` for a prompt that `victim` has run just before, and for one that it has
// not, in both orders.
void Compare(PrefixCaller& victim, PrefixCaller& attacker, bool shared) {
  for (uint32_t trial = 0; trial < kTrials; ++trial) {
    const uint32_t known = 2 * trial + trial / 2 % 2, unknown = known ^ 1;
    victim.Run(known);
    const bool known_first = trial % 2 == 0;
    const PrefixWork first = attacker.Run(known_first ? known : unknown);
    const PrefixWork second = attacker.Run(known_first ? unknown : known);
    const PrefixWork& of_known = known_first ? first : second;
    const PrefixWork& of_unknown = known_first ? second : first;
    if (shared) {
      EXPECT_LT(of_known.rows, of_unknown.rows) << trial;
    } else {
      EXPECT_EQ(CountsOf(of_known), CountsOf(of_unknown)) << trial;
      EXPECT_EQ(of_known.rows, static_cast<uint64_t>(testing::kPromptRows)) << trial;
    }
  }
}

class PrefixIsolationTest : public ::testing::Test {
 protected:
  EngineHarness engine_{{testing::PrefixCallerLimits(), testing::TinyModel(), nullptr, nullptr}};
};

TEST_F(PrefixIsolationTest, AnotherTenantsPromptsSaveNoWork) {
  PrefixCaller victim(&engine_, "one", ""), attacker(&engine_, "two", "");
  Compare(victim, attacker, /*shared=*/false);
}

TEST_F(PrefixIsolationTest, PromptsOfAnotherSaltSaveNoWork) {
  PrefixCaller victim(&engine_, "one", "a"), attacker(&engine_, "one", "b");
  Compare(victim, attacker, /*shared=*/false);
}

TEST_F(PrefixIsolationTest, PromptsOfTheSameTenantDo) {
  PrefixCaller victim(&engine_, "one", ""), attacker(&engine_, "one", "");
  Compare(victim, attacker, /*shared=*/true);
}

}  // namespace
}  // namespace mla::scheduler
