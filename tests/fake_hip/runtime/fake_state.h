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
  std::deque<std::function<void()>> work;
  uint64_t enqueued = 0;
  uint64_t executed = 0;

  void Add(std::function<void()> item) {
    work.push_back(std::move(item));
    ++enqueued;
  }
  void RunTo(uint64_t position) {
    while (executed < position && !work.empty()) {
      const std::function<void()> item = std::move(work.front());
      work.pop_front();
      ++executed;
      item();
    }
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
