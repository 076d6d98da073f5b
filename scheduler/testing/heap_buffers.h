// Plan buffers in plain heap memory, for tests and benchmarks without a backend.
#ifndef MLA_SCHEDULER_TESTING_HEAP_BUFFERS_H_
#define MLA_SCHEDULER_TESTING_HEAP_BUFFERS_H_

#include <cstddef>
#include <memory>
#include <span>

#include "kernels/attention_backend.h"
#include "scheduler/planning/planner.h"

namespace mla::scheduler::testing {

class HeapBuffer final : public kernels::HostBuffer {
 public:
  explicit HeapBuffer(int64_t bytes)
      : size_(static_cast<size_t>(bytes)),
        data_(std::make_unique_for_overwrite<std::byte[]>(size_)) {}
  std::span<std::byte> bytes() override { return {data_.get(), size_}; }

 private:
  size_t size_;
  std::unique_ptr<std::byte[]> data_;
};

// REQUIRES: MetadataBuffers accepts the capacity.
inline std::unique_ptr<MetadataBuffers> MakeBuffers(const PlanCapacity& capacity) {
  return MetadataBuffers::Create(capacity, std::make_unique<HeapBuffer>(capacity.bytes())).value();
}

}  // namespace mla::scheduler::testing

#endif  // MLA_SCHEDULER_TESTING_HEAP_BUFFERS_H_
