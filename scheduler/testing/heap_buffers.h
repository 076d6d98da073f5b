// Plan buffers in plain heap memory, for tests and benchmarks that have no backend.
#ifndef MLA_SCHEDULER_TESTING_HEAP_BUFFERS_H_
#define MLA_SCHEDULER_TESTING_HEAP_BUFFERS_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attention_backend.h"
#include "scheduler/metadata_buffers.h"

namespace mla::scheduler::testing {

class HeapBuffer final : public kernels::HostBuffer {
 public:
  explicit HeapBuffer(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {}
  std::span<std::byte> bytes() override { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// REQUIRES: a capacity that MetadataBuffers accepts.
inline std::unique_ptr<MetadataBuffers> MakeBuffers(const PlanCapacity& capacity) {
  return MetadataBuffers::Create(capacity, std::make_unique<HeapBuffer>(capacity.bytes())).value();
}

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_TESTING_HEAP_BUFFERS_H_
