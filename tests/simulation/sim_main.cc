// ./dev sim: see --help. Exit status 0: no violation; 1: a violation, with the seed to replay it;
// 2: usage.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "tests/simulation/simulator/simulation_run.h"

namespace mla::simulation {
namespace {

constexpr char kUsage[] =
    "usage: sim [--ops N] [--seed S] [--seeds N] [--steps N] [--threads N] [--quiet] [--progress]\n"
    "  --ops N      go on until N operations were done (default 1000000)\n"
    "  --seed S     the first seed (default 1); a seed decides everything\n"
    "  --seeds N    at most N seeds\n"
    "  --steps N    operations drawn for one seed (default 2000)\n"
    "  --threads N  seeds that run at a time (default: cores); the result does not depend on it\n"
    "  --quiet      the last line alone, and a violation; --progress tells of the seeds begun\n";

int64_t Number(const char* flag, const char* text) {
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 0) {
    std::fprintf(stderr, "sim: %s: got '%s', must be a number\n%s", flag, text, kUsage);
    std::exit(2);
  }
  return value;
}

void Print(const SimulatorCounts& counts) {
  for (size_t i = 0; i < counts.operations.size(); ++i) {
    std::printf("%-14s %10" PRId64 "\n", Name(static_cast<Op>(i)), counts.operations[i]);
  }
  const struct {
    const char* what;
    int64_t count;
  } others[] = {
      {"answers compared", counts.answers_checked},
      {"of them by lists", counts.lists_checked},
      {"with a window", counts.windows_checked},
      {"late launches", counts.late_checked},
      {"sequences handed over", counts.sequences_moved},
      {"calls sent again", counts.resent},
      {"refusals foretold", counts.refusals},
      {"steps committed", counts.commits},
      {"steps aborted", counts.aborts},
      {"leases expired", counts.expired},
      {"launches", counts.launches},
      {"most passed over", counts.most_passed_over},
      {"one-slot launches", counts.one_slot_launches},
      {"device commands", counts.commands},
      {"device faults", counts.faults},
      {"pages zeroed", counts.scrubs},
      {"pages copied", counts.copies},
      {"slices fused", counts.slices_fused},
  };
  for (const auto& other : others) std::printf("%-18s %10" PRId64 "\n", other.what, other.count);
}

int Main(int argc, char** argv) {
  RunOptions options;
  options.operations = 1'000'000;
  options.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  bool quiet = false;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--quiet") {
      quiet = true;
      continue;
    }
    if (flag == "--progress") {
      options.progress = true;
      continue;
    }
    if (flag == "--help") {
      std::printf("%s", kUsage);
      return 0;
    }
    if (i + 1 == argc) Number(flag.c_str(), "");
    const int64_t value = Number(flag.c_str(), argv[++i]);
    if (flag == "--ops") {
      options.operations = value;
    } else if (flag == "--seed") {
      options.seed = static_cast<uint64_t>(value);
    } else if (flag == "--seeds") {
      options.most_seeds = value;
    } else if (flag == "--steps") {
      options.steps_per_seed = static_cast<int>(std::clamp<int64_t>(value, 1, 1'000'000));
    } else if (flag == "--threads") {
      options.threads = static_cast<int>(std::clamp<int64_t>(value, 1, 64));
    } else {
      std::fprintf(stderr, "sim: no flag '%s'\n%s", flag.c_str(), kUsage);
      return 2;
    }
  }
  const RunResult run = RunSeeds(options);
  if (!quiet) Print(run.counts);
  if (run.violations > 0) {
    std::printf("violation after %" PRId64 " seeds: %s\nreplay: ./dev sim --seed %" PRIu64
                " --seeds 1 --steps %d\n",
                run.seeds, run.violation.c_str(), run.failing_seed, options.steps_per_seed);
  }
  std::printf("sim: %" PRId64 " operations, %" PRId64 " violations, seed %" PRIu64
              ", hash %016" PRIx64 "\n",
              run.counts.total(), run.violations, options.seed, run.hash);
  return run.violations > 0 ? 1 : 0;
}

}  // namespace
}  // namespace mla::simulation

int main(int argc, char** argv) { return mla::simulation::Main(argc, argv); }
