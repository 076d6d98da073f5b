// Buffers that gRPC reads in place. It gives them back after they have gone to the connection, from
// whichever thread writes there, and their memory is used again: a large buffer that comes from the
// heap each time costs as much as its copy.
//
// Threading: any thread. Slices may outlive the object.
#ifndef MLA_PROTO_WIRE_CALLS_REUSED_BYTES_H_
#define MLA_PROTO_WIRE_CALLS_REUSED_BYTES_H_

#include <grpcpp/support/slice.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::wire {

class ReusedBytes final {
 public:
  // At most this number of returned buffers is kept. A call has one on its way and one that is
  // being filled.
  static constexpr size_t kKept = 2;

  // Takes `bytes`, and leaves a returned buffer there, with its old size and contents, or an empty
  // string. The slice keeps the bytes.
  grpc::Slice SliceOf(std::string* bytes) {
    auto* const buffer = new Buffer{shelf_, std::move(*bytes)};
    *bytes = shelf_->Take();
    return grpc::Slice(buffer->bytes.data(), buffer->bytes.size(), Return, buffer);
  }

 private:
  class Shelf {
   public:
    std::string Take() {
      const MutexLock lock(mutex_);
      if (kept_.empty()) return "";
      std::string bytes = std::move(kept_.back());
      kept_.pop_back();
      return bytes;
    }
    void Put(std::string bytes) {
      const MutexLock lock(mutex_);
      if (kept_.size() < kKept) kept_.push_back(std::move(bytes));
    }

   private:
    Mutex mutex_;
    std::vector<std::string> kept_ ABSL_GUARDED_BY(mutex_);
  };
  struct Buffer {
    std::shared_ptr<Shelf> shelf;
    std::string bytes;
  };
  static void Return(void* opaque) {
    const std::unique_ptr<Buffer> buffer(static_cast<Buffer*>(opaque));
    buffer->shelf->Put(std::move(buffer->bytes));
  }

  const std::shared_ptr<Shelf> shelf_ = std::make_shared<Shelf>();
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_CALLS_REUSED_BYTES_H_
