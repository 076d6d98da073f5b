// Counts heap allocations of the program that links it, so that a test can require that code makes
// none.
#ifndef MLA_KERNELS_TESTING_ALLOCATION_COUNTER_H_
#define MLA_KERNELS_TESTING_ALLOCATION_COUNTER_H_

#include <cstdint>

namespace mla::kernels::testing {

// Calls of operator new so far, by all threads.
int64_t Allocations();

}  // namespace mla::kernels::testing

#endif  // MLA_KERNELS_TESTING_ALLOCATION_COUNTER_H_
