#include "kernels/hip/emulator/block/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#define MLA_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MLA_ADDRESS_SANITIZER 1
#endif
#endif
#ifndef MLA_ADDRESS_SANITIZER
#define MLA_ADDRESS_SANITIZER 0
#endif
#if MLA_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "the switch of stacks is written for x86-64"
#endif

// Saves callee-saved registers on the current stack, and restores them from the entered stack.
extern "C" void mla_host_switch(void** left, void* entered);
asm(R"(
.text
.p2align 4
.hidden mla_host_switch
.globl mla_host_switch
.type mla_host_switch, @function
mla_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size mla_host_switch, .-mla_host_switch
)");

namespace mla::kernels::hip::host {
namespace {

// Frames of instrumented code are larger. Only touched pages take memory.
constexpr size_t kStackBytes = MLA_ADDRESS_SANITIZER ? size_t{1} << 20 : size_t{512} << 10;
constexpr size_t kGuardBytes = 4096;
// Stacks begin at different distances from their ends. Lanes run in step, and frames that lie a
// power of two apart would all map to the same few cache sets.
constexpr size_t kColourBytes = 33 * 64;
constexpr int kColours = 64;

#if MLA_ADDRESS_SANITIZER
Fiber* left_fiber = nullptr;  // fiber that the current switch leaves
#endif

}  // namespace

FiberStacks::FiberStacks(int count) : bytes_(static_cast<size_t>(count) * kStackBytes) {
  void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("stacks of lanes");
    std::abort();
  }
  memory_ = static_cast<char*>(memory);
  for (int i = 0; i < count; ++i) {
    mprotect(memory_ + static_cast<size_t>(i) * kStackBytes, kGuardBytes, PROT_NONE);
  }
}

FiberStacks::~FiberStacks() { munmap(memory_, bytes_); }

void FiberStacks::Prepare(int index, Fiber& fiber, void (*entry)()) {
  char* const bottom = memory_ + static_cast<size_t>(index) * kStackBytes + kGuardBytes;
  char* const end = memory_ + static_cast<size_t>(index + 1) * kStackBytes;
#if MLA_ADDRESS_SANITIZER
  // A fiber that was abandoned may have poisoned parts of its stack.
  ASAN_UNPOISON_MEMORY_REGION(bottom, static_cast<size_t>(end - bottom));
#endif
  auto* top =
      reinterpret_cast<uint64_t*>(end - static_cast<size_t>(index % kColours) * kColourBytes);
  *--top = 0;  // return address of the entry
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fiber = Fiber{top, nullptr, bottom, static_cast<size_t>(end - bottom)};
}

void Switch(Fiber& from, Fiber& target) {
#if MLA_ADDRESS_SANITIZER
  left_fiber = &from;
  __sanitizer_start_switch_fiber(&from.fake_stack, target.bottom, target.bytes);
#endif
  mla_host_switch(&from.stack_pointer, target.stack_pointer);
#if MLA_ADDRESS_SANITIZER
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(from.fake_stack, &bottom, &bytes);
  if (left_fiber != nullptr && left_fiber->bottom == nullptr) {
    left_fiber->bottom = bottom;
    left_fiber->bytes = bytes;
  }
#endif
}

void SwitchForGood(Fiber& target) {
  static void* nowhere = nullptr;  // static, because the sanitizer releases the stack first
#if MLA_ADDRESS_SANITIZER
  left_fiber = nullptr;
  __sanitizer_start_switch_fiber(nullptr, target.bottom, target.bytes);
#endif
  mla_host_switch(&nowhere, target.stack_pointer);
  std::abort();
}

void Entered() {
#if MLA_ADDRESS_SANITIZER
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  // The bounds of the thread's own stack are known from here on.
  if (left_fiber != nullptr && left_fiber->bottom == nullptr) {
    left_fiber->bottom = bottom;
    left_fiber->bytes = bytes;
  }
#endif
}

}  // namespace mla::kernels::hip::host
