// Random operations on a KvCache beside an oracle that shares none of its code: for each sequence
// the list of row ids it should hold. The pool's bytes are simulated too: copies and zeroing wait
// until launches take them, in pieces; up to two launches run at a time, and some fail after they
// have done an unknown part of their work. Rows are then read back through the published page
// tables alone. So a lost copy, a wrong page, a stale table or a word of another tenant shows as
// what it would be in production.
//
// MLA_TEST_SEED sets the first seed, MLA_TEST_LONG runs twenty times as much.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "scheduler/kvcache/kv_cache_simulation.h"

namespace mla::kvcache {
namespace {

#ifdef MLA_SANITIZED
constexpr int kRuns = 100;
#else
constexpr int kRuns = 1'000;
#endif
TEST(KvCacheModelTest, AgreesWithTheOracle) {
  const char* seed_text = std::getenv("MLA_TEST_SEED");
  const bool seeded = seed_text != nullptr && *seed_text != '\0';
  const auto first = seeded ? static_cast<uint32_t>(std::atoll(seed_text)) : 1u;
  const char* is_long = std::getenv("MLA_TEST_LONG");
  const int runs = is_long != nullptr && *is_long == '1' ? 20 * kRuns : kRuns;
  int64_t refused = 0;
  int64_t failed = 0;
  uint64_t copies = 0;
  uint64_t scrubs = 0;
  int64_t matched = 0, in_page = 0;
  uint64_t evicted = 0, superseded = 0;
  for (int run = 0; run < runs; ++run) {
    const uint32_t seed = first + static_cast<uint32_t>(run);
    Simulation simulation(seed);
    simulation.Run();
    ASSERT_EQ(simulation.fault(), "") << "MLA_TEST_SEED=" << seed;
    refused += simulation.refused();
    failed += simulation.failed();
    copies += simulation.stats().copies_on_write;
    scrubs += simulation.stats().scrubs;
    matched += simulation.matched();
    in_page += simulation.in_page();
    evicted += simulation.prefixes().evicted;
    superseded += simulation.prefixes().superseded;
  }
  // The operations must keep reaching what they are for.
  EXPECT_GT(refused, 5 * runs);
  EXPECT_GT(failed, 5 * runs);
  EXPECT_GT(copies, static_cast<uint64_t>(5 * runs));
  EXPECT_GT(scrubs, static_cast<uint64_t>(5 * runs));
  EXPECT_GT(matched, 5 * runs);
  EXPECT_GT(in_page, runs);
  EXPECT_GT(evicted, static_cast<uint64_t>(5 * runs));
  EXPECT_GT(superseded, static_cast<uint64_t>(runs) / 10);
}

}  // namespace
}  // namespace mla::kvcache
