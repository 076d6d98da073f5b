// Cost of a plan, compared with the bare greedy loop that any split-KV scheduler must run, in the
// same process and at the same moment.
//
//   plan_benchmark [--json FILE]
//
// Shapes: batch x kv rows x units, decode (one query row, 128 heads). `bare us` is the loop below,
// which writes the same 32-byte records and nothing else; `plan us` is Planner::Build whole:
// checks, counting, five arrays. Both are the least of many short, alternating runs. `allocations`
// counts operator new over all timed runs; `imbalance` is the busiest unit's KV rows, relative to
// the mean. Exits 1 if a plan allocates.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "kernels/testing/allocation_counter.h"
#include "scheduler/planning/planner.h"
#include "scheduler/testing/heap_buffers.h"
#include "tests/bench/json_flag.h"

namespace mla::scheduler {
namespace {

constexpr int32_t kHeads = 128;
constexpr int32_t kBlock = 64;          // rows; the loop's cut granularity
constexpr int32_t kOverheadBlocks = 5;  // charged per work item

struct Shape {
  int32_t units;
  int32_t batch;
  bool ragged;  // 1 .. 65536 rows, else 4096 each

  std::string Name() const {
    return "units=" + std::to_string(units) + " batch=" + std::to_string(batch) +
           " kv=" + (ragged ? "1..65536" : "4096");
  }
};

struct Row {
  std::string shape;
  double us;
  double bare_us;
  int64_t allocations;
  double imbalance;
};

// Requests in order fill units to an equal payload; a request that does not fit is split.
class BareLoop {
 public:
  BareLoop(const std::vector<PlanSegment>& requests, int32_t units)
      : units_(units), unit_begin_(static_cast<size_t>(units) + 1), splits_(requests.size() + 1) {
    for (const PlanSegment& request : requests) kv_rows_.push_back(request.kv_rows);
    items_.reserve(requests.size() + static_cast<size_t>(units) + 8);
  }

  void Run() {
    const auto batch = static_cast<int32_t>(kv_rows_.size());
    int64_t total = 0;
    for (const int32_t rows : kv_rows_) total += Blocks(rows) + kOverheadBlocks;
    const int64_t payload = (total + units_ - 1) / units_ + kOverheadBlocks;
    items_.clear();
    splits_[0] = 0;
    int32_t request = 0, block = 0, split = 0, partials = 0;
    for (int32_t unit = 0; unit < units_; ++unit) {
      unit_begin_[static_cast<size_t>(unit)] = static_cast<int32_t>(items_.size());
      int64_t room = payload;
      while (request < batch) {
        const int32_t rows = kv_rows_[static_cast<size_t>(request)];
        const int64_t remaining = Blocks(rows) - block;
        if (room >= remaining + kOverheadBlocks) {
          items_.push_back({request, split > 0 ? partials + split : -1, 0, 1, block * kBlock, rows,
                            0, kernels::PackHeads(0, kHeads)});
          room -= remaining + kOverheadBlocks;
          partials += split + 1;
          splits_[static_cast<size_t>(++request)] = partials;
          block = split = 0;
          continue;
        }
        if (room > kOverheadBlocks) {
          const auto end = static_cast<int32_t>(block + room - kOverheadBlocks);
          items_.push_back({request, partials + split, 0, 1, block * kBlock, end * kBlock,
                            rows - end * kBlock, kernels::PackHeads(0, kHeads)});
          block = end;
          ++split;
        }
        break;
      }
    }
    unit_begin_[static_cast<size_t>(units_)] = static_cast<int32_t>(items_.size());
  }

 private:
  static int64_t Blocks(int32_t rows) { return (rows + kBlock - 1) / kBlock; }

  const int32_t units_;
  std::vector<int32_t> kv_rows_;
  std::vector<int32_t> unit_begin_;
  std::vector<int32_t> splits_;
  std::vector<kernels::WorkInfo> items_;
};

template <typename Call>
double MicrosOf(Call&& call) {
  constexpr int kCalls = 4;  // one reading of the clock costs a good part of a small plan
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return took.count() / kCalls;
}

Row Measure(const Shape& shape) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int32_t> rows(1, 65536);
  std::vector<PlanSegment> requests(static_cast<size_t>(shape.batch));
  for (PlanSegment& request : requests) {
    request = {1, shape.ragged ? rows(random) : 4096, kHeads, true};
  }
  kernels::PlanTraits traits;
  traits.units = shape.units;
  traits.kv_granularity = kBlock;
  traits.item_overhead_rows = kBlock * kOverheadBlocks;
  const PlanLimits limits{shape.batch, shape.batch, int64_t{shape.batch} * kHeads,
                          65536,       kHeads,      kHeads};
  const auto buffers = testing::MakeBuffers(Planner::Capacity(limits, traits));
  Planner planner;
  BareLoop bare(requests, shape.units);
  const auto plan = [&] {
    if (!planner.Build(requests, traits, *buffers).ok()) std::abort();
  };
  Row row{shape.Name(), 1e9, 1e9, 0, 0};
  const int64_t before = kernels::testing::Allocations();
  for (int i = 0; i < 500; ++i) {
    row.bare_us = std::min(row.bare_us, MicrosOf([&] { bare.Run(); }));
    row.us = std::min(row.us, MicrosOf(plan));
  }
  row.allocations = kernels::testing::Allocations() - before;
  row.imbalance = planner.last_imbalance();
  return row;
}

void WriteJson(const std::vector<Row>& rows, const std::string& path) {
  std::ofstream file(path);
  file << "[\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    file << R"(  {"bench": "plan", "shape": ")" << row.shape << R"(", "us": )" << row.us
         << R"(, "bare_us": )" << row.bare_us << R"(, "allocations": )" << row.allocations
         << R"(, "imbalance": )" << row.imbalance << "}" << (i + 1 < rows.size() ? "," : "")
         << "\n";
  }
  file << "]\n";
}

int Main(const std::string& json) {
  std::vector<Row> rows;
  bool allocated = false;
  std::printf("%-36s %9s %9s %7s %12s %10s\n", "shape", "plan us", "bare us", "ratio",
              "allocations", "imbalance");
  for (const int32_t units : {66, 132, 256}) {
    for (const int32_t batch : {1, 16, 128, 512, 1024}) {
      for (const bool ragged : {false, true}) {
        rows.push_back(Measure({units, batch, ragged}));
        const Row& row = rows.back();
        allocated |= row.allocations != 0;
        std::printf("%-36s %9.2f %9.2f %7.2f %12lld %10.3f\n", row.shape.c_str(), row.us,
                    row.bare_us, row.us / row.bare_us, static_cast<long long>(row.allocations),
                    row.imbalance);
      }
    }
  }
  if (!json.empty()) WriteJson(rows, json);
  return allocated ? 1 : 0;
}

}  // namespace
}  // namespace mla::scheduler

int main(int argc, char** argv) {
  const auto json = mla::bench::ReadJsonFlag(argc, argv, "plan_benchmark");
  return json ? mla::scheduler::Main(*json) : 2;
}
