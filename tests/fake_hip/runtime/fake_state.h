// The state of the fake HIP runtime, which its entry points share.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_STATE_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_STATE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/fake_hip/runtime/fake_control.h"
#include "tests/fake_hip/runtime/fake_image.h"

namespace mla::fake_hip {

inline constexpr int kInvalidValue = 1;

struct Stream {
  struct Work {
    std::function<void()> run;
    bool is_kernel = false;
    bool overlaps = false;  // a kernel that may begin before the kernel before it has ended
  };
  std::deque<Work> work;
  uint64_t enqueued = 0;
  uint64_t executed = 0;
  // The kernel before the one that runs, if that may begin earlier. It runs when the later kernel
  // waits for it, or afterwards, so a kernel that reads results before its wait sees older ones.
  std::function<void()> held;
  uint64_t chains = 0;  // of kernels that overlap

  void Add(std::function<void()> item) { AddWork({std::move(item)}); }
  void AddWork(Work item) {
    work.push_back(std::move(item));
    ++enqueued;
  }
  void RunHeld() {
    if (const auto run = std::exchange(held, nullptr)) run();
  }
  void RunTo(uint64_t position) {
    while (executed < position && !work.empty()) {
      Work item = std::move(work.front());
      work.pop_front();
      ++executed;
      if (held == nullptr && item.is_kernel && Holds(item, position)) {
        held = std::move(item.run);
        continue;
      }
      item.run();
      RunHeld();
    }
  }

 private:
  bool Overlaps(size_t index, uint64_t position) const {
    return executed + index < position && index < work.size() && work[index].overlaps;
  }
  // Returns true if the kernel is held until the next one waits for it. A kernel is not held while
  // it waits itself, so of a chain only every second kernel is. Chains take turns in which.
  bool Holds(const Work& item, uint64_t position) {
    if (!Overlaps(0, position)) return false;
    return item.overlaps || !Overlaps(1, position) || chains++ % 2 == 0;
  }
};

struct Function {
  std::string name;
  const kernels::hip::host::Image* image;
  const kernels::hip::host::Kernel* kernel;
};
struct Size3 {
  unsigned x, y, z;
};
struct KernelNodeParams {
  Size3 block;
  void** extra;
  Function* function;
  Size3 grid;
  void** parameters;
  unsigned shared_bytes;
};
// A launch in the form that a graph stores.
struct PendingLaunch {
  Function* function;
  kernels::hip::host::Grid grid;
  std::vector<std::byte> args;
  bool overlaps = false;  // as in Stream::Work

  explicit PendingLaunch(const KernelNodeParams& p)
      : function(p.function), grid{p.grid.x, p.grid.y, p.block.x, p.shared_bytes} {
    const auto* const bytes = static_cast<const std::byte*>(p.parameters[0]);
    args.assign(bytes, bytes + p.function->kernel->argument_bytes);
  }
};
struct Runtime {
  std::recursive_mutex mutex;
  Control control;
  std::unordered_map<const void*, int64_t> device_memory;
  std::unordered_map<const void*, int64_t> registered;
  std::unordered_map<const void*, int64_t> host_memory;  // of hipHostMalloc
  // The last copy from the host, for StaleReplay::kInputs alone.
  struct LastInput {
    void* to = nullptr;
    std::vector<std::byte> before;
  };
  LastInput last_input;
  // A copy to the host that has not arrived yet, for Control::late_copies_out alone.
  struct LateCopy {
    void* to;
    std::vector<std::byte> bytes;
  };
  std::vector<LateCopy> late_copies;
};
Runtime& State();
// Every entry point calls this first. Returns 0 to continue, else the code to return.
int Enter(const char* call);
// Tells the test about a launch before it is enqueued. Called without the lock.
void Announce(const PendingLaunch& launch);
void Enqueue(const PendingLaunch& launch, Stream& stream);
// Returns true if the stream's work is being captured; `run` is a node of its graph then.
bool AddCaptured(Stream* stream, std::function<int(Stream*)> run);

}  // namespace mla::fake_hip

#define FAKE_ENTER(call)                                           \
  const std::lock_guard<std::recursive_mutex> lock(State().mutex); \
  if (const int code = Enter(call); code != 0) return code

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_STATE_H_
