#include "kernels/hip/runtime/kernel_graphs.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/shared_library.h"
#include "base/status_macros.h"
#include "kernels/hip/runtime/call_watch.h"

namespace mla::kernels::hip {
namespace {

constexpr unsigned kCooperative = 2;  // attribute of a kernel
constexpr unsigned char kProgrammaticPort = 1;
constexpr unsigned char kProgrammaticEdge = 1;

struct Size3 {
  unsigned x = 1, y = 1, z = 1;
};
struct AmdKernelNode {
  Size3 block;
  void** extra;
  Function function;
  Size3 grid;
  void** parameters;
  unsigned shared_bytes;
};
static_assert(sizeof(AmdKernelNode) == 64);
struct NvidiaKernelNode {
  Function function;
  Size3 grid, block;
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};
static_assert(sizeof(NvidiaKernelNode) == 72);
union NvidiaAttribute {
  char reserved[64];
  int flag;
};
struct NvidiaEdge {
  unsigned char from_port, to_port, type, reserved[5];
};

}  // namespace

struct GraphTable {
  int (*create)(GraphHandle**, unsigned);
  int (*destroy)(GraphHandle*);
  int (*add_kernel)(GraphNodeHandle**, GraphHandle*, GraphNodeHandle* const*, size_t, const void*);
  int (*instantiate)(GraphExecHandle**, GraphHandle*, unsigned long long);
  int (*destroy_exec)(GraphExecHandle*);
  int (*set_kernel)(GraphExecHandle*, GraphNodeHandle*, const void*);
  int (*launch)(GraphExecHandle*, Stream);
  // NVIDIA only.
  int (*nvidia_add_edges)(GraphHandle*, GraphNodeHandle* const*, GraphNodeHandle* const*,
                          const NvidiaEdge*, size_t);
  int (*nvidia_set_attribute)(GraphNodeHandle*, unsigned, const NvidiaAttribute*);
};

namespace {

// Gives a kernel the form that the vendor's calls take.
class NodeParams {
 public:
  NodeParams(Vendor vendor, const PendingKernel& kernel)
      : parameters_{const_cast<std::byte*>(kernel.args.data())} {
    const LaunchShape& shape = kernel.shape;
    const Size3 grid{shape.grid_x, shape.grid_y, 1}, block{shape.threads, 1, 1};
    if (vendor == Vendor::kAmd) {
      amd_ = {block, nullptr, kernel.function, grid, parameters_, shape.shared_bytes};
      form_ = &amd_;
    } else {
      nvidia_ = {kernel.function, grid,    block,   shape.shared_bytes,
                 parameters_,     nullptr, nullptr, nullptr};
      form_ = &nvidia_;
    }
  }
  NodeParams(const NodeParams&) = delete;
  NodeParams& operator=(const NodeParams&) = delete;
  const void* at() const { return form_; }

 private:
  void* parameters_[1];
  AmdKernelNode amd_;
  NvidiaKernelNode nvidia_;
  const void* form_;
};

bool OfOneKind(const PendingKernel& a, const PendingKernel& b) {
  return a.function == b.function && a.shape.overlap_predecessor == b.shape.overlap_predecessor &&
         a.shape.blocks_meet == b.shape.blocks_meet;
}

bool Same(const PendingKernel& a, const PendingKernel& b) {
  return a.shape == b.shape && a.arg_bytes == b.arg_bytes &&
         std::memcmp(a.args.data(), b.args.data(), a.arg_bytes) == 0;
}

void Copy(const PendingKernel& from, PendingKernel& target) {
  target.function = from.function;
  target.shape = from.shape;
  target.arg_bytes = from.arg_bytes;
  std::memcpy(target.args.data(), from.args.data(), from.arg_bytes);
}

// Extrapolates the arguments: each word of `next` plus its difference from `last`.
void Extend(const PendingKernel& last, const PendingKernel& next, PendingKernel& expected) {
  Copy(next, expected);
  if (last.arg_bytes != next.arg_bytes) return;
  for (size_t offset = 0; offset + sizeof(uint64_t) <= next.arg_bytes; offset += sizeof(uint64_t)) {
    uint64_t before, word;
    std::memcpy(&before, last.args.data() + offset, sizeof(before));
    std::memcpy(&word, next.args.data() + offset, sizeof(word));
    word += word - before;
    std::memcpy(expected.args.data() + offset, &word, sizeof(word));
  }
}

}  // namespace

KernelGraphs::KernelGraphs(GpuRuntime* runtime, std::unique_ptr<GraphTable> table)
    : runtime_(runtime), api_(std::move(table)) {
  entries_.reserve(kMostGraphs);
}

KernelGraphs::~KernelGraphs() {
  if (!runtime_->Bind().ok()) return;
  for (Entry& entry : entries_) {
    Destroy(entry.made);
    Destroy(entry.replaced);
  }
}

absl::StatusOr<std::unique_ptr<KernelGraphs>> KernelGraphs::Open(GpuRuntime* runtime) {
  if (!runtime->uses_graphs()) return absl::UnavailableError("graphs are off");
  auto table = std::make_unique<GraphTable>();
  SymbolTable symbols = runtime->Symbols();
  // A null name: the vendor has no such call.
  const auto need = [&](const char* amd, const char* nvidia, auto** function) {
    symbols.Need(runtime->vendor() == Vendor::kAmd ? amd : nvidia, function);
  };
  need("hipGraphCreate", "cuGraphCreate", &table->create);
  need("hipGraphDestroy", "cuGraphDestroy", &table->destroy);
  need("hipGraphAddKernelNode", "cuGraphAddKernelNode_v2", &table->add_kernel);
  need("hipGraphInstantiateWithFlags", "cuGraphInstantiateWithFlags", &table->instantiate);
  need("hipGraphExecDestroy", "cuGraphExecDestroy", &table->destroy_exec);
  need("hipGraphExecKernelNodeSetParams", "cuGraphExecKernelNodeSetParams_v2", &table->set_kernel);
  need("hipGraphLaunch", "cuGraphLaunch", &table->launch);
  need(nullptr, "cuGraphAddDependencies_v2", &table->nvidia_add_edges);
  need(nullptr, "cuGraphKernelNodeSetAttribute", &table->nvidia_set_attribute);
  MLA_RETURN_IF_ERROR(symbols.Check("the GPU runtime"));
  return std::unique_ptr<KernelGraphs>(new KernelGraphs(runtime, std::move(table)));
}

KernelGraphs::Entry* KernelGraphs::Find(std::span<const PendingKernel> kernels) {
  const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) {
    return std::equal(e.nodes.begin(), e.nodes.begin() + static_cast<ptrdiff_t>(e.count),
                      kernels.begin(), kernels.end(),
                      [](const Node& n, const PendingKernel& k) { return OfOneKind(n.last, k); });
  });
  return entry == entries_.end() ? nullptr : &*entry;
}

bool KernelGraphs::Set(Entry& entry, Node& node, const PendingKernel& kernel) {
  if (Same(node.held, kernel)) return true;
  node.held.arg_bytes = 0;  // invalid if the call below fails
  const NodeParams params(runtime_->vendor(), kernel);
  ++entry.sets;
  if (api_->set_kernel(entry.made.exec, node.handle, params.at()) != 0) return false;
  Copy(kernel, node.held);
  return true;
}

bool KernelGraphs::Launch(std::span<const PendingKernel> kernels, Stream stream) {
  if (kernels.empty() || kernels.size() > kMostKernels) return false;
  Entry* const entry = Find(kernels);
  CallWatch::NoteDriverCall("graph launch");
  if (entry == nullptr || entry->made.exec == nullptr || !runtime_->Bind().ok()) return false;
  for (size_t i = 0; i < kernels.size(); ++i) {
    if (!Set(*entry, entry->nodes[i], kernels[i])) return false;
  }
  if (api_->launch(entry->made.exec, stream) != 0) return false;
  runtime_->NoteGraphLaunch();
  for (size_t i = 0; i < kernels.size(); ++i) {
    Node& node = entry->nodes[i];
    node.regular = Same(node.expected, kernels[i]);
    Extend(node.last, kernels[i], node.expected);
    Copy(kernels[i], node.last);
  }
  entry->launched = true;
  return true;
}

void KernelGraphs::Prepare() {
  CallWatch::NoteDriverCall("graph update");
  const bool amd = runtime_->vendor() == Vendor::kAmd;
  for (Entry& entry : entries_) {
    Destroy(entry.replaced);
    if (amd && entry.sets >= kMostSets) Replace(entry);
    if (!std::exchange(entry.launched, false) || amd) continue;
    for (Node& node : std::span(entry.nodes).first(entry.count)) {
      if (node.regular && !Set(entry, node, node.expected)) return;
    }
  }
}

void KernelGraphs::Learn(std::span<const PendingKernel> kernels) {
  if (kernels.empty() || kernels.size() > kMostKernels) return;
  Entry* entry = Find(kernels);
  if (entry == nullptr) {
    if (entries_.size() == kMostGraphs) return;
    entry = &entries_.emplace_back();
    entry->count = kernels.size();
    for (size_t i = 0; i < kernels.size(); ++i) Copy(kernels[i], entry->nodes[i].last);
  }
  if (entry->made.exec != nullptr || entry->refused || ++entry->uses < kUsesBefore) return;
  for (size_t i = 0; i < kernels.size(); ++i) {
    Node& node = entry->nodes[i];
    Copy(kernels[i], node.held);
    Copy(kernels[i], node.last);
    Copy(kernels[i], node.expected);
  }
  entry->refused = !Make(*entry);
  if (entry->refused) Destroy(entry->made);
}

// A launch in progress keeps the graph that it was made from. If no other graph can be made,
// kernels are launched one by one from here on.
void KernelGraphs::Replace(Entry& entry) {
  entry.replaced = std::exchange(entry.made, {});
  for (Node& node : std::span(entry.nodes).first(entry.count)) Copy(node.last, node.held);
  entry.refused = !Make(entry);
  if (entry.refused) Destroy(entry.made);
}

bool KernelGraphs::Make(Entry& entry) {
  CallWatch::NoteDriverCall("graph creation");
  entry.sets = 0;
  if (!runtime_->Bind().ok() || api_->create(&entry.made.graph, 0) != 0) return false;
  for (size_t i = 0; i < entry.count; ++i) {
    if (!AddKernel(entry, i)) return false;
  }
  return api_->instantiate(&entry.made.exec, entry.made.graph, 0) == 0;
}

bool KernelGraphs::AddKernel(Entry& entry, size_t index) {
  Node& node = entry.nodes[index];
  GraphNodeHandle* const previous = index > 0 ? entry.nodes[index - 1].handle : nullptr;
  const bool overlaps = previous != nullptr && runtime_->vendor() == Vendor::kNvidia &&
                        node.held.shape.overlap_predecessor;
  const size_t waits_for = previous != nullptr && !overlaps ? 1 : 0;
  const NodeParams params(runtime_->vendor(), node.held);
  if (api_->add_kernel(&node.handle, entry.made.graph, waits_for > 0 ? &previous : nullptr,
                       waits_for, params.at()) != 0) {
    return false;
  }
  if (node.held.shape.blocks_meet && runtime_->vendor() == Vendor::kNvidia) {
    NvidiaAttribute cooperative = {};
    cooperative.flag = 1;
    if (api_->nvidia_set_attribute(node.handle, kCooperative, &cooperative) != 0) return false;
  }
  if (!overlaps) return true;
  const NvidiaEdge edge{kProgrammaticPort, 0, kProgrammaticEdge, {}};
  return api_->nvidia_add_edges(entry.made.graph, &previous, &node.handle, &edge, 1) == 0;
}

void KernelGraphs::Destroy(Made& made) {
  if (made.exec != nullptr) (void)api_->destroy_exec(std::exchange(made.exec, nullptr));
  if (made.graph != nullptr) (void)api_->destroy(std::exchange(made.graph, nullptr));
}

}  // namespace mla::kernels::hip
