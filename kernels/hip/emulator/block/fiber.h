// Fibers: functions with stacks of their own, of which one at a time runs on the thread.
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_FIBER_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_FIBER_H_

#include <cstddef>

namespace mla::kernels::hip::host {

// A place where execution can go on: a fiber that stands, or the thread itself.
struct Fiber {
  void* stack_pointer = nullptr;
  // For the address sanitizer.
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
};

// Stacks of `count` fibers, each with a page below it that may not be touched.
class FiberStacks {
 public:
  explicit FiberStacks(int count);
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  // Makes fiber `index` begin with `entry`, which must not return, when it is switched to. Whatever
  // stood on its stack is gone.
  void Prepare(int index, Fiber& fiber, void (*entry)());

 private:
  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

// Leaves `from`, which goes on when it is switched to again, for `to`.
void Switch(Fiber& from, Fiber& to);
// The same for a fiber that has ended.
[[noreturn]] void SwitchForGood(Fiber& to);
// The first call of every entry.
void Entered();

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_FIBER_H_
