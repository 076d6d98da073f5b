// Measures how much the time of a caller's calls reveals about prompts in the prefix cache.
//
//   prefix_timing_benchmark [--json=FILE] [--trials=N]
//
// In each trial a victim caches one of two prompts, chosen at random. Then an attacker runs both in
// random order, and guesses that the quicker one is the victim's. A random guess is right in half
// of the trials. The attacker has an advantage over attackers on a network: it reads the processor
// time of the engine's own thread.
//
// The attacker is of another tenant, or of the same tenant with another salt. The control, of the
// same tenant without salts, shares rows and must be right nearly always: otherwise the machine
// disturbs the measurement and the result is "inconclusive". Trials of all three are interleaved.
// The exit status is 1 if an attacker does better than guessing while the control holds.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"
#include "scheduler/engine_tests/pages/prefix_caller.h"

namespace mla::scheduler {
namespace {

using testing::EngineHarness;
using testing::PrefixCaller;

// A two-sided interval of 99.9 % reaches this number of standard deviations.
constexpr double kInterval = 3.29;
constexpr double kControl = 0.9, kGuessing = 0.51;  // shares of right guesses

struct Arm {
  const char* name;
  PrefixCaller victim, attacker;
  int right = 0;

  // Two prompts of a trial belong to that trial alone.
  void Try(uint32_t prompts, std::mt19937_64* random) {
    const uint32_t secret = (*random)() % 2, first = (*random)() % 2;
    victim.Run(prompts + secret);
    const int64_t first_ns = attacker.Run(prompts + first).nanos;
    const int64_t second_ns = attacker.Run(prompts + 1 - first).nanos;
    const uint32_t guess = first_ns < second_ns ? first : 1 - first;
    if (guess == secret) ++right;
  }
};

int Main(int argc, char** argv) {
  int trials = 20'000;
  std::string json;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--trials=")) {
      trials = std::max(1, std::atoi(argv[i] + 9));
    } else if (argument.starts_with("--json=")) {
      json = argument.substr(7);
    } else {
      std::fprintf(stderr, "usage: prefix_timing_benchmark [--json=FILE] [--trials=N]\n");
      return 2;
    }
  }
  EngineHarness engine({testing::PrefixCallerLimits(), testing::TinyModel(), nullptr, nullptr});
  std::vector<std::unique_ptr<Arm>> arms;
  arms.emplace_back(new Arm{"another tenant", {&engine, "one", ""}, {&engine, "two", ""}});
  arms.emplace_back(new Arm{"another salt", {&engine, "three", "a"}, {&engine, "three", "b"}});
  arms.emplace_back(new Arm{"control: shared", {&engine, "four", ""}, {&engine, "four", ""}});
  std::mt19937_64 random(20);
  for (int trial = 0; trial < trials; ++trial) {
    for (const auto& arm : arms) arm->Try(2 * static_cast<uint32_t>(trial), &random);
  }
  nlohmann::json rows = nlohmann::json::array();
  bool control = false, learnt = false;
  for (const auto& arm : arms) {
    const double share = static_cast<double>(arm->right) / trials;
    const double half = kInterval * std::sqrt(share * (1 - share) / trials);
    std::printf("%s: right in %.2f %% of %d trials, 99.9 %% interval %.2f to %.2f\n", arm->name,
                100 * share, trials, 100 * (share - half), 100 * (share + half));
    rows.push_back({{"attacker", arm->name}, {"trials", trials}, {"share", share}});
    if (arm == arms.back()) {
      control = share - half >= kControl;
    } else {
      learnt = learnt || share - half > kGuessing;
    }
  }
  const char* const result = !control ? "inconclusive: the control is not told apart"
                             : learnt ? "callers learn what others have cached"
                                      : "callers learn nothing";
  std::printf("%s\n", result);
  if (!json.empty()) std::ofstream(json) << rows.dump(2) << "\n";
  return control && learnt ? 1 : 0;
}

}  // namespace
}  // namespace mla::scheduler

int main(int argc, char** argv) { return mla::scheduler::Main(argc, argv); }
