// Runs a thread block on the host, one fiber for each lane. The order in which lanes run is chosen
// so that code which relies on more than a device promises gives wrong results here.
//
// A lane runs until it has to wait for others. The lanes of a wave wait for each other at
// instructions that read other lanes (Meet); the last lane to arrive carries the instruction out
// for all. A wave then runs on as far as it can. Only a barrier of the block lets the other waves
// catch up, in an order that changes from barrier to barrier. A missing barrier therefore shows as
// one wave far ahead of the others.
//
// Conditions under which a device would give wrong numbers now and then are faults here, which end
// the launch (Fault): lanes of a wave at different instructions, lanes that wait for an event that
// never comes, and everything that shared_memory.h watches.
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_BLOCK_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_BLOCK_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "kernels/hip/emulator/block/fiber.h"
#include "kernels/hip/emulator/block/image.h"
#include "kernels/hip/emulator/block/shared_memory.h"
#include "kernels/hip/emulator/block/warpgroup.h"

namespace mla::kernels::hip::host {

inline constexpr int kMostLanes = 1024;  // lanes a block
inline constexpr int kMostWaveLanes = 64;
inline constexpr int kGroupLanes = 128;  // lanes a warpgroup

struct Wave;
struct Lane;

// An instruction that reads several lanes, and is carried out once for the whole wave.
using Instruction = void (*)(Wave& wave);

// A copy from shared memory that its lane has started.
struct BulkStore {
  const char* from;
  void* to;
  uint32_t bytes;
};

struct Lane {
  enum class State : uint8_t {
    kRuns,     // or can run
    kMeets,    // waits for its wave
    kBarrier,  // waits for generation `awaited` of its barrier to end
    kPolls,    // until ready(at, parity)
    kEnded,
  };
  Fiber fiber;
  State state = State::kEnded;
  int index = 0;   // in the block
  int number = 0;  // in the wave
  Wave* wave = nullptr;
  void* slot = nullptr;      // operands and results of the instruction that Meet waits for
  uint32_t uniform_sum = 0;  // checksum of values that all lanes of the wave must share
  uint64_t awaited = 0;
  const uint64_t* generation = nullptr;  // counter of the barrier it waits for
  bool (*ready)(uint32_t at, uint32_t parity) = nullptr;
  uint32_t at = 0, parity = 0;
  CopyQueue copies;
  uint64_t accesses = 0;          // accesses to shared memory, counted where they are watched
  std::vector<Product> products;  // products that have not been waited for
  uint64_t product_group = 0;
  std::vector<BulkStore> stores;  // stores that have not been waited for
};

// An access of a wave that only some of its lanes have made so far.
struct OpenAccess {
  SharedAccess access{};
  int lanes = 0;
};

struct Wave {
  std::deque<OpenAccess> open_accesses;
  uint64_t closed_accesses = 0;
  int index = 0;
  int lanes = 0;      // lanes that have not ended
  int arrived = 0;    // lanes of these at the instruction
  int registers = 0;  // registers a lane that it has asked for; 0: none yet
  Instruction instruction = nullptr;
  uint64_t generation = 0;
  // The array has all lanes of the wave, also lanes that have ended.
  std::array<Lane*, kMostWaveLanes> lane;
  template <class Slot>
  Slot& slot(int number) const {
    return *static_cast<Slot*>(lane[static_cast<size_t>(number)]->slot);
  }
};

// A barrier for a number of threads, some of which only arrive.
struct NamedBarrier {
  int arrived = 0;
  uint64_t generation = 0;
  bool any = false, answer = false;
};

struct Block {
  Grid grid;
  int wave_lanes = 0;
  uint32_t x = 0, y = 0;  // in the grid
  uint64_t number = 0;    // count of all blocks run before
  const Kernel* kernel = nullptr;
  const void* arguments = nullptr;
  Fiber caller;                        // the caller of Run
  const Previous* previous = nullptr;  // null if it has ended
  bool asks_for_previous = false;      // a lane has switched to the caller, which is to run it
  std::array<Lane, kMostLanes> lanes;
  std::array<Wave, kMostLanes / 32> waves;
  std::vector<int> order;  // of waves
  int wave_count = 0;
  int live_lanes = 0;
  int at_barrier = 0;  // lanes
  uint64_t barrier_generation = 0;
  std::array<NamedBarrier, 16> named;
  std::array<NamedBarrier, kMostLanes / kGroupLanes> groups;  // barriers of warpgroups
  SharedMemory shared;
  std::string fault;
  uint32_t random = 1;
};

extern Block* the_block;
extern Lane* the_lane;  // the lane that runs

// See Image::watch.
void Watch(void (*sink)(const SharedAccess& access));
extern void (*the_watch)(const SharedAccess& access);
void NoteAccess(const char* instruction, const void* address);
// Notes an access of the lane to shared memory, as part of its wave's access.
inline void Access(const char* instruction, const void* at) {
  if (the_watch != nullptr) NoteAccess(instruction, at);
}

// Ends the launch with a message, as printf. Lanes are abandoned where they are, so their stacks
// must not own memory.
[[noreturn]] void Fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Waits for all lanes of the wave, each with its slot. The last lane carries `instruction` out.
void Meet(Instruction instruction, void* slot);
// Waits at the barrier of the block.
void BlockBarrier();
// Arrives at a barrier of `threads` threads, and with `waits` waits for all of them. Returns true
// if `x` was true in any of them.
bool Barrier(NamedBarrier& barrier, int threads, bool waits, bool x);
// The lane's wave asks for `count` registers a lane. A block of sm_90 starts with equal parts of
// kRegisters, in multiples of eight. Waves that need more than the others release wait forever.
inline constexpr int kRegisters = 65536;
void SetRegisters(int count);
// Lets other lanes run until ready(barrier, parity).
void Poll(bool (*ready)(uint32_t, uint32_t), uint32_t barrier, uint32_t parity);
// Lets other lanes run until the kernel before this one has ended. That kernel runs only when all
// lanes of the block wait, so lanes that read its results before they wait see what was there.
void WaitForPrevious();
// Records a value that must be the same in all lanes of the wave; their next meeting checks it.
inline int Uniform(int x) {
  the_lane->uniform_sum = the_lane->uniform_sum * 31 + static_cast<uint32_t>(x) + 1;
  return x;
}

// See Image::run. `wave_lanes`: 32 or 64.
const char* Run(const Kernel& kernel, int wave_lanes, const Grid& grid, const void* arguments,
                const Previous* previous = nullptr);

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_BLOCK_H_
