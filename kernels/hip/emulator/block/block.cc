#include "kernels/hip/emulator/block/block.h"

#include <array>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <utility>

namespace mla::kernels::hip::host {

Block* the_block = nullptr;
Lane* the_lane = nullptr;
void (*the_watch)(const SharedAccess& access) = nullptr;

namespace {

uint32_t Random(Block& block) {
  block.random = block.random * 1664525u + 1013904223u;
  return block.random >> 16;
}

bool CanRun(const Lane& lane) {
  switch (lane.state) {
    case Lane::State::kRuns:
      return true;
    case Lane::State::kMeets:
    case Lane::State::kBarrier:
      return *lane.generation != lane.awaited;
    case Lane::State::kPolls:
      return lane.ready(lane.at, lane.parity);
    case Lane::State::kEnded:
      return false;
  }
  return false;
}

// Returns the next lane of `wave` after number `after` that can run.
Lane* NextOf(const Wave& wave, int after, int lanes) {
  int number = after;
  for (int i = 0; i < lanes; ++i) {
    number = number + 1 == lanes ? 0 : number + 1;
    Lane* const lane = wave.lane[static_cast<size_t>(number)];
    if (CanRun(*lane)) return lane;
  }
  return nullptr;
}

// Returns a lane that can run, of the same wave if possible, or null if there is none.
Lane* Next(const Lane& from) {
  Block& block = *the_block;
  if (Lane* const lane = NextOf(*from.wave, from.number, block.wave_lanes)) return lane;
  for (const int index : block.order) {
    const Wave& wave = block.waves[static_cast<size_t>(index)];
    if (&wave == from.wave) continue;
    if (Lane* const lane = NextOf(wave, block.wave_lanes - 1, block.wave_lanes)) return lane;
  }
  return nullptr;
}

// Returns the lane that runs after `from`, the running one. If none can run, the kernel before this
// one runs first.
Lane* NextOrFault(Lane& from) {
  Lane* next = Next(from);
  if (next == nullptr && the_block->previous != nullptr) {
    the_block->asks_for_previous = true;
    Switch(from.fiber, the_block->caller);
    next = Next(from);
  }
  if (next == nullptr) Fault("all lanes wait for each other");
  return next;
}

// Suspends the running lane until it can run again.
void Leave() {
  Lane& from = *the_lane;
  Lane* const next = NextOrFault(from);
  if (next != &from) {
    the_lane = next;
    Switch(from.fiber, next->fiber);
  }
  from.state = Lane::State::kRuns;
}

void WaitFor(const uint64_t& generation, Lane::State state) {
  Lane& lane = *the_lane;
  lane.generation = &generation;
  lane.awaited = generation;
  lane.state = state;
  Leave();
}

// Called when all lanes that have not ended are at the barrier.
void OpenBarrier(Block& block) {
  block.at_barrier = 0;
  ++block.barrier_generation;
  block.shared.NextInterval();
  // A random wave goes on first.
  std::swap(block.order.front(), block.order[Random(block) % block.order.size()]);
}

void EndLane() {
  Block& block = *the_block;
  Lane& lane = *the_lane;
  if (!lane.products.empty()) Fault("a lane ended before its products were waited for");
  if (!lane.stores.empty()) Fault("a lane ended before its stores were waited for");
  if (lane.wave->arrived > 0) Fault("a lane ended where others of its wave wait for it");
  lane.state = Lane::State::kEnded;
  --lane.wave->lanes;
  --block.live_lanes;
  if (block.live_lanes > 0 && block.at_barrier == block.live_lanes) OpenBarrier(block);
  if (block.live_lanes == 0) {
    for (uint32_t i = 0; i < block.grid.threads; ++i) {
      if (block.lanes[i].copies.count() > 0) Fault("the block ended before its copies had landed");
    }
    SwitchForGood(block.caller);
  }
  Lane* const to = NextOrFault(lane);
  the_lane = to;
  SwitchForGood(to->fiber);
}

void LaneEntry() {
  Entered();
  the_block->kernel->lane(the_block->arguments);
  EndLane();
}

void PrepareLanes(Block& block, FiberStacks& stacks) {
  block.wave_count = 0;
  const int lanes = static_cast<int>(block.grid.threads);
  for (int i = 0; i < lanes; ++i) {
    Lane& lane = block.lanes[static_cast<size_t>(i)];
    Wave& wave = block.waves[static_cast<size_t>(i / block.wave_lanes)];
    if (i % block.wave_lanes == 0) {
      wave.index = block.wave_count++;
      wave.lanes = block.wave_lanes;
      wave.arrived = 0;
      wave.registers = 0;
      wave.open_accesses.clear();
      wave.closed_accesses = 0;
    }
    lane.accesses = 0;
    lane.index = i;
    lane.number = i % block.wave_lanes;
    lane.wave = &wave;
    lane.state = Lane::State::kRuns;
    lane.uniform_sum = 0;
    lane.copies.Clear();
    lane.products.clear();
    lane.stores.clear();
    wave.lane[static_cast<size_t>(lane.number)] = &lane;
    stacks.Prepare(i, lane.fiber, LaneEntry);
  }
  ++block.number;
  block.live_lanes = lanes;
  block.at_barrier = 0;
  block.named = {};
  block.groups = {};
  block.order.resize(static_cast<size_t>(block.wave_count));
  std::iota(block.order.begin(), block.order.end(), 0);
  std::swap(block.order.front(), block.order[Random(block) % block.order.size()]);
  block.shared.Reset();
}

// Runs the lanes of a block until all have ended, or one has a fault.
void RunLanes(Block& block) {
  the_lane = &block.lanes[0];
  Switch(block.caller, the_lane->fiber);
  while (std::exchange(block.asks_for_previous, false)) {
    Lane* const asking = the_lane;
    const Previous* const previous = std::exchange(block.previous, nullptr);
    previous->run(previous->of);
    the_block = &block;
    the_lane = asking;
    Switch(block.caller, asking->fiber);
  }
}

// A launch, and the launch before it that it waits for, run at a time.
constexpr size_t kMostRuns = 2;
class RunCount {
 public:
  explicit RunCount(size_t& runs) : runs_(++runs) {}
  ~RunCount() { --runs_; }
  RunCount(const RunCount&) = delete;
  RunCount& operator=(const RunCount&) = delete;

 private:
  size_t& runs_;
};
struct Runner {
  FiberStacks stacks{kMostLanes};
  Block block;
};
Runner& RunnerOf(size_t run) {
  static std::array<Runner*, kMostRuns> runners = {};
  if (runners[run] == nullptr) runners[run] = new Runner;
  return *runners[run];
}

}  // namespace

void Fault(const char* format, ...) {
  char what[300];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof(what), format, arguments);
  va_end(arguments);
  Block& block = *the_block;
  char text[400];
  std::snprintf(text, sizeof(text), "%s, block %u,%u, lane %d: %s", block.kernel->name, block.x,
                block.y, the_lane->index, what);
  block.fault = text;
  SwitchForGood(block.caller);
}

void Watch(void (*sink)(const SharedAccess& access)) { the_watch = sink; }

void NoteAccess(const char* instruction, const void* address) {
  Lane& lane = *the_lane;
  Wave& wave = *lane.wave;
  const uint64_t index = lane.accesses++ - wave.closed_accesses;
  if (index == wave.open_accesses.size()) {
    wave.open_accesses.emplace_back().access.instruction = instruction;
  }
  OpenAccess& open = wave.open_accesses[index];
  if (open.access.instruction != instruction) Fault("lanes of a wave access shared memory apart");
  open.access.at[lane.number] =
      static_cast<uint32_t>(static_cast<const char*>(address) - the_block->shared.base());
  if (++open.lanes < SharedAccess::kLanes) return;
  the_watch(open.access);  // lanes are in order, so this is the first
  wave.open_accesses.pop_front();
  ++wave.closed_accesses;
}

void Meet(Instruction instruction, void* slot) {
  Lane& lane = *the_lane;
  Wave& wave = *lane.wave;
  lane.slot = slot;
  if (wave.arrived == 0) {
    wave.instruction = instruction;
  } else if (wave.instruction != instruction) {
    Fault("lanes of a wave are at different instructions");
  }
  if (++wave.arrived < wave.lanes) return WaitFor(wave.generation, Lane::State::kMeets);
  for (int i = 0; i < the_block->wave_lanes; ++i) {
    const Lane& other = *wave.lane[static_cast<size_t>(i)];
    if (other.state == Lane::State::kEnded)
      Fault("a lane is missing at an instruction of its wave");
    if (other.uniform_sum != lane.uniform_sum)
      Fault("lanes differ in a value that must be the same");
  }
  instruction(wave);
  wave.arrived = 0;
  ++wave.generation;
}

void BlockBarrier() {
  Block& block = *the_block;
  if (++block.at_barrier < block.live_lanes) {
    return WaitFor(block.barrier_generation, Lane::State::kBarrier);
  }
  OpenBarrier(block);
  // The lane that arrives last does not go on first, unless its wave was drawn.
  Lane& lane = *the_lane;
  Wave& first = block.waves[static_cast<size_t>(block.order.front())];
  if (&first == lane.wave) return;
  if (Lane* const to = NextOf(first, block.wave_lanes - 1, block.wave_lanes)) {
    lane.state = Lane::State::kRuns;
    the_lane = to;
    Switch(lane.fiber, to->fiber);
  }
}

bool Barrier(NamedBarrier& barrier, int threads, bool waits, bool x) {
  the_block->shared.WatchCopiesOnly();
  barrier.any |= x;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.answer = std::exchange(barrier.any, false);
    ++barrier.generation;
  } else if (waits) {
    WaitFor(barrier.generation, Lane::State::kBarrier);
  }
  return barrier.answer;
}

void SetRegisters(int count) {
  the_lane->wave->registers = count;
  const int waves = the_block->wave_count, lanes = waves * the_block->wave_lanes;
  int asked = 0;
  for (int i = 0; i < waves; ++i) {
    const int of_wave = the_block->waves[static_cast<size_t>(i)].registers;
    if (of_wave == 0) return;
    asked += of_wave;
  }
  const int most = kRegisters / lanes / 8 * 8 * waves;
  if (asked > most) Fault("waves ask for %d registers a lane, of %d in all", asked, most);
}

void Poll(bool (*ready)(uint32_t, uint32_t), uint32_t barrier, uint32_t parity) {
  if (ready(barrier, parity)) return;
  Lane& lane = *the_lane;
  lane.ready = ready;
  lane.at = barrier;
  lane.parity = parity;
  lane.state = Lane::State::kPolls;
  Leave();
}

void WaitForPrevious() {
  Poll([](uint32_t, uint32_t) { return the_block->previous == nullptr; }, 0, 0);
}

const char* Run(const Kernel& kernel, int wave_lanes, const Grid& grid, const void* arguments,
                const Previous* previous) {
  static std::recursive_mutex& mutex = *new std::recursive_mutex;
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  static size_t runs = 0;
  if (runs == kMostRuns) return "the launch before has a launch before it";
  auto& [stacks, block] = RunnerOf(runs);
  const RunCount count(runs);
  block.fault.clear();
  block.previous = previous;
  block.asks_for_previous = false;
  block.grid = grid;
  block.wave_lanes = wave_lanes;
  block.kernel = &kernel;
  block.arguments = arguments;
  the_block = &block;
  if (grid.threads == 0 || grid.threads > kMostLanes ||
      grid.threads % static_cast<uint32_t>(wave_lanes) != 0) {
    block.fault = "a block is a whole number of waves, at most 1024 threads";
    return block.fault.c_str();
  }
  for (block.y = 0; block.y < grid.y; ++block.y) {
    for (block.x = 0; block.x < grid.x; ++block.x) {
      PrepareLanes(block, stacks);
      RunLanes(block);
      if (!block.fault.empty()) return block.fault.c_str();
    }
  }
  return nullptr;
}

}  // namespace mla::kernels::hip::host
