// Counts heap allocations of the program that links it, so that a test can hold code to none.
#ifndef MLA_SCHEDULER_TESTING_ALLOCATION_COUNTER_H_
#define MLA_SCHEDULER_TESTING_ALLOCATION_COUNTER_H_

#include <cstdint>

namespace mla::scheduler::testing {

// Calls of operator new so far, by all threads.
int64_t Allocations();

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_TESTING_ALLOCATION_COUNTER_H_
