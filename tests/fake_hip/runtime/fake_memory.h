// The fake runtime's device memory, which is the host's, and its handles for other processes.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_MEMORY_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_MEMORY_H_

#include <cstddef>

namespace mla::fake_hip {

// Null when the system refuses. Memory of whole units of 2 MiB has a page after it that may not be
// touched, and moves to a file when a handle of it is asked for (hipIpcGetMemHandle), in which no
// kernel may run. Before that, a forked process has memory of its own. Smaller pieces come from the
// heap, where the address sanitizer sees their ends.
void* TakeMemory(size_t bytes);
void GiveMemory(void* at, size_t bytes);

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_FAKE_MEMORY_H_
