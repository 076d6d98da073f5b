#include "server/backends.h"

#include "kernels/reference/reference_backend.h"

namespace mla::server {

kernels::BackendRegistry AllBackends() {
  kernels::BackendRegistry registry;
  // Names are fixed and distinct, so adding a row cannot fail.
  kernels::RegisterReference(registry).IgnoreError();
  return registry;
}

}  // namespace mla::server
