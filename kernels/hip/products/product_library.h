// Products of matrices by the GPU vendor's library, opened at run time: cuBLASLt on NVIDIA devices
// and hipBLASLt on AMD ones. The two differ in names and in a few numbers, so one table serves
// both. Every object of the library is opaque: it is made, changed and destroyed by calls, and no
// layout of a structure is assumed, except that an algorithm comes first in a result of the
// heuristic, as both libraries document.
//
// A product is sums[r, c] = rows[r, :] . weights[c, :], bf16 operands, fp32 sums. Its algorithm is
// chosen and run once when weights are loaded (Choose). A launch only enqueues (Multiply): there it
// asks nothing, allocates nothing and waits for nothing.
//
// Order: the library's kernels run after all earlier work on the stream. They neither start before
// their predecessor has ended nor tell their successor to start, so the kernel after a product must
// not overlap its predecessor (LaunchShape).
//
// Threading: one thread at a time.
#ifndef MLA_KERNELS_HIP_PRODUCTS_PRODUCT_LIBRARY_H_
#define MLA_KERNELS_HIP_PRODUCTS_PRODUCT_LIBRARY_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

// Fewest rows that the library multiplies. On an H200 cuBLASLt took 31 and 78 us for DeepSeek-V3's
// two products of 128 rows where the backend's own kernels took 48 and 97. Up to 64 rows these
// kernels stay within 1.3 times the time in which the device reads the weights.
inline constexpr int32_t kLibraryRows = 65;

struct ProductTable;  // entry points
struct ProductPlan;   // the library's objects for one shape

// Dims of a product. Rows lie one after another.
struct ProductShape {
  int32_t rows = 0;
  int32_t columns = 0;  // rows of the weights, [columns, depth]
  int32_t depth = 0;
  int32_t pitch = 0;  // elements from one row of sums to the next
  bool operator==(const ProductShape&) const = default;
};

class ProductLibrary;
// A product as a launch records it. Addresses are of device memory.
struct LibraryProduct {
  const ProductLibrary* library = nullptr;
  const ProductPlan* plan = nullptr;
  DevicePtr weights = 0, rows = 0;  // multiples of kOperandAlignment
  DevicePtr sums = 0;               // a multiple of kSumsAlignment
  DevicePtr workspace = 0;          // ProductLibrary::kWorkspaceBytes, a multiple of kSumsAlignment
};

class ProductLibrary final {
 public:
  // cuBLASLt's manual recommends 32 MiB on sm_90.
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
  static constexpr uint32_t kOperandAlignment = 16, kSumsAlignment = 256;
  // Shapes that are remembered, also if the library has refused them. A further shape takes the
  // place of the one that was used least recently.
  static constexpr size_t kMostPlans = 64;

  // Returns the names under which the vendor's library is searched for, newest first. They begin
  // with the folder of the runtime's library `runtime`, if that is a path.
  static std::vector<std::string> Names(Vendor vendor, const std::string& runtime);
  // Opens the first of `names` that can be opened; empty: Names. `runtime` outlives it. UNAVAILABLE
  // says that there is none, or names the entry point that it lacks. INTERNAL has the code of a
  // failed call.
  static absl::StatusOr<std::unique_ptr<ProductLibrary>> Open(GpuRuntime* runtime,
                                                              std::span<const std::string> names);
  ~ProductLibrary();
  ProductLibrary(const ProductLibrary&) = delete;
  ProductLibrary& operator=(const ProductLibrary&) = delete;

  // The library's name and version, for people.
  const std::string& description() const { return description_; }

  // Chooses an algorithm for products of `shape`, and runs it once on `stream` with the addresses
  // of `trial`, whose plan is ignored, so that the library loads its kernels now. Waits for the
  // stream. A shape is asked for once: later calls return OK. UNIMPLEMENTED if the library has no
  // algorithm, INTERNAL if a call failed; the shape has no plan then.
  absl::Status Choose(const ProductShape& shape, const LibraryProduct& trial, Stream stream);
  // Returns the plan of a shape; null if it has none. Valid until the next Choose.
  const ProductPlan* Find(const ProductShape& shape);
  // Enqueues the product. INTERNAL if the library refused.
  absl::Status Multiply(const LibraryProduct& product, Stream stream) const;
  // Products enqueued by Multiply so far.
  int64_t multiplied() const { return multiplied_; }

 private:
  struct Entry {
    ProductShape shape;
    std::unique_ptr<ProductPlan> plan;  // null: refused
    uint64_t used = 0;                  // turn of the last use
  };
  ProductLibrary(GpuRuntime* runtime, std::unique_ptr<ProductTable> table, std::string name);
  absl::Status Start();
  absl::StatusOr<std::unique_ptr<ProductPlan>> Plan(const ProductShape& shape) const;
  absl::Status Ask(const ProductShape& shape, ProductPlan& plan) const;
  absl::Status Check(int code, const char* call) const;
  void Destroy(ProductPlan& plan) const;
  Entry* Known(const ProductShape& shape);
  void Remember(const ProductShape& shape, std::unique_ptr<ProductPlan> plan);

  GpuRuntime* const runtime_;
  const std::unique_ptr<ProductTable> api_;
  std::string description_;
  void* handle_ = nullptr;
  std::vector<Entry> entries_;
  uint64_t turn_ = 0;
  mutable int64_t multiplied_ = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_PRODUCTS_PRODUCT_LIBRARY_H_
