// Finds parts of one launch that name the same bytes of the pool although the order of parts
// (kernels/types/launch.h) would make one of them useless.
//
// Moved rows are written before the page work of their launch, and moved rows leave at its end. So
// rows must not be moved into a page that the launch zeroes, copies, appends to or attends to. And
// a page that the launch has just filled by page work must not leave.
#ifndef MLA_KERNELS_TESTING_LAUNCH_CLASHES_H_
#define MLA_KERNELS_TESTING_LAUNCH_CLASHES_H_

#include <string>

#include "kernels/types/launch.h"

namespace mla::kernels::testing {

// Names the first clash, or "" if there is none. Reads the page tables of the launch as they are
// now. Does not look at rows that attention reads in models with a window.
std::string LaunchClash(const Launch& launch);

}  // namespace mla::kernels::testing

#endif  // MLA_KERNELS_TESTING_LAUNCH_CLASHES_H_
