// The backends with which this binary was built; probing prefers the first.
#ifndef MLA_SERVER_BACKENDS_H_
#define MLA_SERVER_BACKENDS_H_

#include "kernels/backend_registry.h"

namespace mla::server {

// Returns a registry with one row for each backend. A new backend is added in backends.cc.
kernels::BackendRegistry AllBackends();

}  // namespace mla::server

#endif  // MLA_SERVER_BACKENDS_H_
