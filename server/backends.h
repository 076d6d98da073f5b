// The backends that this binary was built with, best first when probed.
#ifndef MLA_SERVER_BACKENDS_H_
#define MLA_SERVER_BACKENDS_H_

#include "kernels/backend_registry.h"

namespace mla::server {

// A registry with one row for every backend; a new backend adds its line in backends.cc.
kernels::BackendRegistry AllBackends();

}  // namespace mla::server

#endif  // MLA_SERVER_BACKENDS_H_
