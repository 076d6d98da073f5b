#include "server/backends.h"

#include "kernels/cpu/cpu_backend.h"
#include "kernels/hip/hip_backend.h"
#include "kernels/reference/reference_backend.h"

namespace mla::server {

kernels::BackendRegistry AllBackends() {
  kernels::BackendRegistry registry;
  // Names are fixed and distinct, so adding rows cannot fail.
  kernels::RegisterReference(registry).IgnoreError();
  kernels::RegisterCpu(registry).IgnoreError();
  kernels::hip::RegisterGpuBackends(registry).IgnoreError();
  return registry;
}

}  // namespace mla::server
