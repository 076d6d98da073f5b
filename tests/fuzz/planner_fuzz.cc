// The planner with arbitrary lengths and traits. It must plan every valid batch, with every pair of
// rows once and inside its arrays, and must refuse the others with a reason. Lengths come from
// clients, so a plan that read or wrote past its arrays would be an attack.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "scheduler/planning/planner.h"
#include "scheduler/testing/heap_buffers.h"
#include "scheduler/testing/plan_checker.h"
#include "tests/fuzz/harness/target.h"

namespace mla::fuzz {
namespace {

using kernels::PlanTraits;
using scheduler::PlanCapacity;
using scheduler::Planner;
using scheduler::PlanSegment;

constexpr int64_t kMostPieces = 3000;  // bound of plans that are checked; larger ones take too long
// The largest value of a trait that the planner takes.
constexpr int32_t kTraitMax = std::numeric_limits<int32_t>::max() - 1;

// An input: traits, which array is too short and by how much, then segments. Numbers are little
// endian.
struct Batch {
  PlanTraits traits;
  uint8_t short_array = 0;  // 0: none
  uint8_t missing = 0;
  std::vector<PlanSegment> segments;
};

template <typename T>
bool Take(const std::string& input, size_t* at, T* value) {
  if (input.size() - *at < sizeof(T)) return false;
  std::memcpy(value, input.data() + *at, sizeof(T));
  *at += sizeof(T);
  return true;
}

template <typename T>
void Put(T value, std::string* text) {
  text->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

bool Parse(const std::string& input, Batch* batch) {
  size_t offset = 0;
  int16_t small[7] = {};
  for (int16_t& value : small) {
    if (!Take(input, &offset, &value)) return false;
  }
  PlanTraits& t = batch->traits;
  t.units = small[0], t.tile_rows = small[1], t.max_heads_per_tile = small[2];
  t.kv_granularity = small[3], t.item_overhead_rows = small[4], t.min_charged_rows = small[5];
  t.max_q_rows_per_tile = small[6];
  if (!Take(input, &offset, &t.fixed_split_rows) || !Take(input, &offset, &batch->short_array) ||
      !Take(input, &offset, &batch->missing)) {
    return false;
  }
  for (;;) {
    int16_t q_rows = 0;
    int32_t kv_rows = 0;
    uint16_t heads = 0;
    uint8_t causal = 0;
    if (!Take(input, &offset, &q_rows) || !Take(input, &offset, &kv_rows) ||
        !Take(input, &offset, &heads) || !Take(input, &offset, &causal)) {
      return true;
    }
    batch->segments.push_back({q_rows, kv_rows, heads, causal % 2 == 1});
  }
}

std::string Encode(const PlanTraits& t, const std::vector<PlanSegment>& segments) {
  std::string text;
  for (const int32_t value : {t.units, t.tile_rows, t.max_heads_per_tile, t.kv_granularity,
                              t.item_overhead_rows, t.min_charged_rows, t.max_q_rows_per_tile}) {
    Put(static_cast<int16_t>(value), &text);
  }
  Put(t.fixed_split_rows, &text);
  Put(uint8_t{0}, &text);
  Put(uint8_t{0}, &text);
  for (const PlanSegment& segment : segments) {
    Put(static_cast<int16_t>(segment.q_rows), &text);
    Put(segment.kv_rows, &text);
    Put(static_cast<uint16_t>(segment.num_heads), &text);
    Put(static_cast<uint8_t>(segment.causal), &text);
  }
  return text;
}

bool IsValid(const Batch& batch) {
  const PlanTraits& t = batch.traits;
  return t.units >= 1 && t.tile_rows >= 1 && t.max_heads_per_tile >= 0 && t.kv_granularity >= 1 &&
         t.max_q_rows_per_tile >= 0 && t.item_overhead_rows >= 0 && t.min_charged_rows >= 0 &&
         t.min_charged_rows <= t.tile_rows && t.fixed_split_rows >= 0 &&
         t.fixed_split_rows <= kTraitMax &&
         std::all_of(batch.segments.begin(), batch.segments.end(), [](const PlanSegment& r) {
           return r.q_rows >= 0 && r.kv_rows >= 0 && r.num_heads >= 1;
         });
}

// A lower bound of the number of pieces of tiles before any unit's cut.
int64_t PiecesOf(const Batch& batch) {
  const PlanTraits& t = batch.traits;
  int64_t pieces = 0;
  for (const PlanSegment& r : batch.segments) {
    int32_t heads = std::min(t.tile_rows, r.num_heads);
    if (t.max_heads_per_tile > 0) heads = std::min(heads, t.max_heads_per_tile);
    const int64_t tiles = int64_t{r.q_rows} * ((r.num_heads + heads - 1) / heads);
    pieces += tiles * (t.fixed_split_rows > 0 ? r.kv_rows / t.fixed_split_rows + 1 : 1);
  }
  return pieces;
}

PlanCapacity CapacityFor(const Batch& batch) {
  scheduler::PlanLimits limits;
  limits.segments = static_cast<int32_t>(batch.segments.size());
  limits.max_heads = 1;
  limits.min_heads = std::numeric_limits<int32_t>::max();
  for (const PlanSegment& r : batch.segments) {
    limits.q_rows += r.q_rows;
    limits.packed_rows += int64_t{r.q_rows} * r.num_heads;
    limits.kv_rows = std::max(limits.kv_rows, r.kv_rows);
    limits.min_heads = std::min(limits.min_heads, r.num_heads);
    limits.max_heads = std::max(limits.max_heads, r.num_heads);
  }
  limits.min_heads = std::min(limits.min_heads, limits.max_heads);
  return Planner::Capacity(limits, batch.traits);
}

// Takes `missing` from one of the arrays. Returns false if nothing was taken.
bool Shorten(const Batch& batch, PlanCapacity* capacity) {
  int64_t* const arrays[] = {&capacity->units, &capacity->work_items, &capacity->reduce_tiles,
                             &capacity->reduce_partials, &capacity->partial_rows};
  if (batch.short_array == 0 || batch.missing == 0) return false;
  int64_t& array = *arrays[batch.short_array % std::size(arrays)];
  const int64_t before = array;
  array = std::max<int64_t>(array - batch.missing, &array == &capacity->units ? 1 : 0);
  return array != before;
}

std::string Plan(const std::string& input) {
  static scheduler::testing::PlanChecker checker;
  Batch batch;
  if (!Parse(input, &batch)) return "";
  Planner planner;
  if (!IsValid(batch)) {
    const auto buffers = scheduler::testing::MakeBuffers({1, 16, 16, 16, 16});
    const absl::Status refused = planner.Build(batch.segments, batch.traits, *buffers).status();
    return absl::IsInvalidArgument(refused) ? "" : "an invalid batch: " + refused.ToString();
  }
  if (PiecesOf(batch) > kMostPieces) return "";
  PlanCapacity capacity = CapacityFor(batch);
  // Buffers count partial rows in 32 bits, although no memory is taken for them here.
  if (capacity.bytes() > (int64_t{64} << 20) || capacity.partial_rows > INT32_MAX / 2) return "";
  const bool shortened = Shorten(batch, &capacity);
  const auto buffers = scheduler::testing::MakeBuffers(capacity);
  const auto view = planner.Build(batch.segments, batch.traits, *buffers);
  if (!view.ok()) {
    return shortened && absl::IsResourceExhausted(view.status())
               ? ""
               : "a valid batch: " + view.status().ToString();
  }
  return checker.Fault(batch.segments, batch.traits, *view, capacity, planner.last_imbalance());
}

}  // namespace

FuzzTarget TargetUnderTest() {
  FuzzTarget target;
  target.executions = 5000;  // each is planned and checked as a whole
  target.input_bytes_max = 512;
  PlanTraits traits;
  traits.units = 7;
  target.seeds = {Encode(traits, {{1, 4096, 128, true}, {1, 100, 128, true}}),
                  Encode(traits, {{300, 900, 16, true}, {0, 0, 1, true}, {9, 4, 65, false}})};
  traits.units = 132;
  traits.tile_rows = 64;
  traits.min_charged_rows = 16;
  traits.max_heads_per_tile = 1;
  target.seeds.push_back(Encode(traits, {{64, 5000, 8, true}, {3, 70000, 2, true}}));
  traits.fixed_split_rows = 512;
  target.seeds.push_back(Encode(traits, {{2, 4097, 3, true}, {1, 1, 1, true}}));
  // The last segment is invalid, and the first one alone has 300 million tiles.
  const std::string refused = Encode(traits, {{17733, 5000, 17733, true}, {-1, 5000, 8, true}});
  traits.fixed_split_rows = kTraitMax + 1;
  const std::string too_long = Encode(traits, {{1, 4096, 128, true}});
  for (const std::string& seed : target.seeds) {
    Batch batch;
    const bool plans = Parse(seed, &batch) && IsValid(batch) && !batch.segments.empty() &&
                       PiecesOf(batch) <= kMostPieces;
    Require(plans ? "" : "a seed that is not planned");
  }
  target.seeds.push_back(refused);
  target.seeds.push_back(too_long);
  return target;
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  mla::fuzz::Require(mla::fuzz::Plan({reinterpret_cast<const char*>(data), size}));
  return 0;
}
