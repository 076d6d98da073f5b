// Fibers: functions with stacks of their own. One fiber at a time runs on the thread.
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_FIBER_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_FIBER_H_

#include <cstddef>

namespace mla::kernels::hip::host {

// A suspended execution: a fiber, or the thread itself.
struct Fiber {
  void* stack_pointer = nullptr;
  // The address sanitizer needs it.
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
};

// Stacks of `count` fibers, each with an inaccessible guard page below it.
class FiberStacks {
 public:
  explicit FiberStacks(int count);
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  // Makes fiber `index` begin with `entry`, which must not return, at the next switch to it.
  // Discards the previous contents of its stack.
  void Prepare(int index, Fiber& fiber, void (*entry)());

 private:
  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

// Suspends `from`, which goes on when it is switched to again, and resumes `target`.
void Switch(Fiber& from, Fiber& target);
// Does what Switch does, from a fiber that has ended.
[[noreturn]] void SwitchForGood(Fiber& target);
// Every entry must call this first.
void Entered();

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_FIBER_H_
