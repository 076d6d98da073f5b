// The fake runtime's device memory, which is host memory, and its handles for other processes.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_MEMORY_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_MEMORY_H_

#include <cstddef>

namespace mla::fake_hip {

// Returns null if the system refuses. Whole units of 2 MiB are followed by a guard page. They move
// to a file in hipIpcGetMemHandle, and no kernel may run during this call. Before that, a forked
// process has its own copy of the memory. Smaller pieces come from the heap, where the address
// sanitizer detects overruns.
void* TakeMemory(size_t bytes);
void GiveMemory(void* at, size_t bytes);

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_MEMORY_H_
