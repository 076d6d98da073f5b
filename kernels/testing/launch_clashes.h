// Parts of one launch that name the same bytes of the pool although their order within a launch
// (kernels/types/launch.h) would make one of them worth nothing.
//
// Moved rows are written before the page work of their launch, and bytes leave at its end. So a
// page that a launch zeroes or copies, appends to, or attends to is not one that it moves rows
// into, and no page leaves that it has just filled by page work.
#ifndef MLA_KERNELS_TESTING_LAUNCH_CLASHES_H_
#define MLA_KERNELS_TESTING_LAUNCH_CLASHES_H_

#include <string>

#include "kernels/types/launch.h"

namespace mla::kernels::testing {

// What clashes first, in words; "" if nothing does. The page tables of the launch are read as they
// are now. Rows of models with a window are not looked at where attention reads them.
std::string LaunchClash(const Launch& launch);

}  // namespace mla::kernels::testing

#endif  // MLA_KERNELS_TESTING_LAUNCH_CLASHES_H_
