// Cost of checking the index lists of a decode step: 128 rows of 2048 entries each.
//
//   list_check_benchmark [--json FILE] [--threads N]
//
// Lists in ascending order are checked by vector code alone. Lists in the order of scores, as a
// top-k produces them, are also checked for repeats. `fills`: a sixteenth of the entries are -1.
// Times are the medians of 201 runs. Each run checks a fresh copy, as if another core had just
// written the lists. `threads`: 1, and N that check together, by default as many as the server
// uses; helpers poll between runs, as between the layers of a step.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/usable_cpus.h"
#include "server/index_lists/list_checker.h"

namespace mla::server {
namespace {

constexpr int32_t kRows = 128;
constexpr int32_t kEntries = 2048;
constexpr int kRuns = 201;

enum class Order { kAscending, kScores, kFills };
constexpr const char* kNames[] = {"ascending", "scores", "fills"};

struct Row {
  int32_t context;
  Order order;
  int32_t threads;
  double us;
};

std::vector<int32_t> MakeLists(int32_t context, Order order) {
  std::mt19937 random(1);
  std::vector<int32_t> positions(static_cast<size_t>(context)), lists;
  std::iota(positions.begin(), positions.end(), 0);
  for (int32_t row = 0; row < kRows; ++row) {
    for (int32_t i = 0; i < kEntries; ++i) {
      std::swap(positions[static_cast<size_t>(i)],
                positions[static_cast<size_t>(i) + random() % static_cast<uint32_t>(context - i)]);
    }
    lists.insert(lists.end(), positions.begin(), positions.begin() + kEntries);
    const auto list = lists.end() - kEntries;
    if (order == Order::kAscending) std::sort(list, lists.end());
    for (int32_t i = 0; order == Order::kFills && i < kEntries; i += 16) list[i] = -1;
  }
  return lists;
}

double Measure(int32_t context, Order order, int32_t threads) {
  const std::vector<scheduler::StepSequenceArgs> step(kRows, {1, 1, context - 1, 1});
  const SentLists sent{0, kRows, kEntries, kRows * kEntries, kEntries};
  const std::vector<int32_t> lists = MakeLists(context, order);
  std::vector<int32_t> memory(sent.bytes() / sizeof(int32_t));
  wire::ThreadTeam team({threads, 1000});
  ListChecker checker(&team);
  std::vector<double> times;
  for (int run = 0; run < kRuns; ++run) {
    std::copy(lists.begin(), lists.end(), memory.begin() + kRows + 1);
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status = checker.Check(sent, step, memory.data());
    const auto end = std::chrono::steady_clock::now();
    if (!status.ok()) {
      std::fprintf(stderr, "list_check: %s\n", status.ToString().c_str());
      std::exit(1);
    }
    times.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

}  // namespace
}  // namespace mla::server

int main(int argc, char** argv) {
  using namespace mla::server;
  std::string path;
  int32_t threads = std::min(mla::base::UsableCpuCount() / 4, 4);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string_view(argv[i]) == "--json") path = argv[i + 1];
    if (std::string_view(argv[i]) == "--threads") threads = std::atoi(argv[i + 1]);
  }
  std::vector<Row> rows;
  for (const int32_t context : {4096, 65536, 131072}) {
    for (const Order order : {Order::kAscending, Order::kScores, Order::kFills}) {
      rows.push_back({context, order, 1, Measure(context, order, 1)});
      if (threads > 1) rows.push_back({context, order, threads, Measure(context, order, threads)});
    }
  }
  std::printf("%10s %10s %10s %10s\n", "context", "order", "threads", "us");
  for (const Row& row : rows) {
    std::printf("%10d %10s %10d %10.1f\n", row.context, kNames[static_cast<int>(row.order)],
                row.threads, row.us);
  }
  if (path.empty()) return 0;
  std::ofstream json(path);
  json << "[\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    json << "  {\"bench\": \"list_check\", \"shape\": \"rows=128 entries=2048 context="
         << rows[i].context << " order=" << kNames[static_cast<int>(rows[i].order)]
         << (rows[i].threads > 1 ? " threads=" + std::to_string(rows[i].threads) : std::string())
         << "\", \"us\": " << rows[i].us << "}" << (i + 1 < rows.size() ? "," : "") << "\n";
  }
  json << "]\n";
  return json.good() ? 0 : 1;
}
