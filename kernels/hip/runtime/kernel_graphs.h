// Launches a sequence of kernels with one call of the runtime instead of one call each.
//
// A graph stands for a sequence of kernels with any grids and arguments. Before a launch, each
// kernel whose grid or arguments differ from the graph's is set in it, by a call. So the layers of
// a step, and the steps of a batch, are launches of one graph. Arguments of layers are often
// equally spaced. If they were in the last three launches, the next arguments are set while the
// device works. This happens on NVIDIA devices only, because HIP does not promise to keep the
// arguments that a running kernel still reads.
//
// A graph is made when its sequence has been launched twice kernel by kernel, and stays until the
// end. HIP takes new device memory for the arguments of each kernel that is set, and returns it
// only with the graph. So on AMD devices a graph is replaced by a new one when kMostSets kernels
// have been set. If the runtime refuses a graph, only speed is lost: its kernels are launched one
// by one.
//
// Threading: one thread at a time. After Open, memory is allocated only by the runtime, when a
// graph is made and, on AMD devices, as above.
#ifndef MLA_KERNELS_HIP_RUNTIME_KERNEL_GRAPHS_H_
#define MLA_KERNELS_HIP_RUNTIME_KERNEL_GRAPHS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

// A launch of a kernel that was not yet given to the device.
struct PendingKernel {
  static constexpr size_t kArgBytes = 384;
  Function function = nullptr;
  LaunchShape shape;
  uint32_t arg_bytes = 0;
  alignas(16) std::array<std::byte, kArgBytes> args;
};

struct GraphTable;
struct GraphHandle;
struct GraphExecHandle;
struct GraphNodeHandle;

class KernelGraphs final {
 public:
  // Bound of a graph: twelve kernels, and the copies before and after them. Longer sequences gain
  // little.
  static constexpr size_t kMostKernels = 14;
  static constexpr size_t kMostGraphs = 16;
  static constexpr int32_t kUsesBefore = 2;  // earlier launches, kernel by kernel
  // At most this number of kernels is set in one graph of HIP. As measured, a set takes 6 KiB, so a
  // graph takes 1.5 MiB; making a graph takes some 50 us, spread over a hundred launches.
  static constexpr int32_t kMostSets = 256;

  // `runtime` outlives it. UNAVAILABLE if graphs are not to be used, or names the entry point that
  // the library lacks.
  static absl::StatusOr<std::unique_ptr<KernelGraphs>> Open(GpuRuntime* runtime);
  ~KernelGraphs();
  KernelGraphs(const KernelGraphs&) = delete;
  KernelGraphs& operator=(const KernelGraphs&) = delete;

  // Launches the kernels in order on `stream`. Returns false if nothing has been launched, because
  // there is no graph of them or the runtime refused.
  bool Launch(std::span<const PendingKernel> kernels, Stream stream);
  // Records that kernels have been launched one by one. May make their graph, in tens of
  // microseconds, so call it when the device has work.
  void Learn(std::span<const PendingKernel> kernels);
  // Sets the expected arguments of the next launches in the graphs launched last, and replaces
  // graphs that have been set too often. Call it when the device has work. REQUIRES: launches from
  // before the last call have ended.
  void Prepare();

 private:
  struct Node {
    GraphNodeHandle* handle = nullptr;
    PendingKernel held;      // contents of the graph
    PendingKernel last;      // arguments of the last launch
    PendingKernel expected;  // extrapolated from the last two launches
    bool regular = false;    // `last` was as expected
  };
  // A graph that the runtime has made, or null.
  struct Made {
    GraphHandle* graph = nullptr;
    GraphExecHandle* exec = nullptr;
  };
  // A sequence that has been launched.
  struct Entry {
    int32_t uses = 0;
    bool refused = false;   // by the runtime, for good
    bool launched = false;  // since Prepare
    int32_t sets = 0;       // kernels set in the graph
    size_t count = 0;
    std::array<Node, kMostKernels> nodes;
    Made made;
    Made replaced;  // which a launch may still use
  };

  KernelGraphs(GpuRuntime* runtime, std::unique_ptr<GraphTable> table);
  Entry* Find(std::span<const PendingKernel> kernels);
  bool Set(Entry& entry, Node& node, const PendingKernel& kernel);
  bool Make(Entry& entry);
  bool AddKernel(Entry& entry, size_t index);
  void Replace(Entry& entry);
  void Destroy(Made& made);

  GpuRuntime* const runtime_;
  const std::unique_ptr<GraphTable> api_;
  std::vector<Entry> entries_;  // capacity kMostGraphs
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_KERNEL_GRAPHS_H_
