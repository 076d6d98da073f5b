// The fake HIP runtime's streams that are captured: copies of rows and batches of words become the
// nodes of a graph, which a test launches as often as it likes.
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "tests/fake_hip/runtime/fake_state.h"

extern "C" {
int hipStreamWaitValue32(mla::fake_hip::Stream*, void*, uint32_t, unsigned, uint32_t);
int hipStreamWriteValue32(mla::fake_hip::Stream*, void*, uint32_t, unsigned);
}

namespace mla::fake_hip {

// hipStreamBatchMemOpParams.
struct WordOperation {
  int operation;
  void* word;
  uint64_t value;
  unsigned flags;
  uint64_t alias, reserved;
};
struct WordNode {
  void* context;
  unsigned count;
  WordOperation* operations;
  unsigned flags;
};

struct CapturedNode {
  std::vector<WordOperation> words;
  std::function<int(Stream*)> run;  // of any other node
};
// A graph, and its only instance.
struct Captured {
  std::vector<std::unique_ptr<CapturedNode>> nodes;
  void* last = nullptr;
};

namespace {

constexpr int kAwait = 1, kStore = 2;

std::map<Stream*, Captured*>& Captures() {
  static std::map<Stream*, Captured*> captures;
  return captures;
}

int RunWords(Stream* stream, const std::vector<WordOperation>& words) {
  for (const WordOperation& one : words) {
    const auto value = static_cast<uint32_t>(one.value);
    const int code = one.operation == kAwait
                         ? hipStreamWaitValue32(stream, one.word, value, one.flags, ~0u)
                         : hipStreamWriteValue32(stream, one.word, value, one.flags);
    if (code != 0) return code;
  }
  return 0;
}

}  // namespace

bool AddCaptured(Stream* stream, std::function<int(Stream*)> run) {
  const auto found = Captures().find(stream);
  if (found == Captures().end()) return false;
  Captured& graph = *found->second;
  graph.nodes.push_back(std::make_unique<CapturedNode>(CapturedNode{{}, std::move(run)}));
  graph.last = graph.nodes.back().get();
  return true;
}

}  // namespace mla::fake_hip

namespace fake = mla::fake_hip;
using mla::fake_hip::Enter;
using mla::fake_hip::State;

extern "C" {

int fake_hip_begin_capture(fake::Stream* stream) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  fake::Captures()[stream] = new fake::Captured;
  return 0;
}
void* fake_hip_end_capture(fake::Stream* stream) {
  const std::lock_guard<std::recursive_mutex> lock(State().mutex);
  fake::Captured* const graph = fake::Captures()[stream];
  fake::Captures().erase(stream);
  return graph;
}
int fake_hip_launch_captured(fake::Captured* graph, fake::Stream* stream) {
  for (const auto& node : graph->nodes) {
    const int code = node->run ? node->run(stream) : fake::RunWords(stream, node->words);
    if (code != 0) return code;
  }
  return 0;
}
void fake_hip_free_captured(fake::Captured* graph) { delete graph; }

int hipStreamBatchMemOp(fake::Stream* stream, unsigned count, fake::WordOperation* operations,
                        unsigned) {
  const std::vector<fake::WordOperation> words(operations, operations + count);
  {
    FAKE_ENTER("hipStreamBatchMemOp");
    const auto found = fake::Captures().find(stream);
    if (found != fake::Captures().end()) {
      found->second->nodes.push_back(
          std::make_unique<fake::CapturedNode>(fake::CapturedNode{words, nullptr}));
      found->second->last = found->second->nodes.back().get();
      return 0;
    }
  }
  // Without the lock, because a store waits here for the word before it, which another thread of
  // this process may have to set by calls of its own.
  return fake::RunWords(stream, words);
}
int hipStreamGetCaptureInfo_v2(fake::Stream* stream, int* status, uint64_t* id, void** graph,
                               void* const** nodes, size_t* count) {
  FAKE_ENTER("hipStreamGetCaptureInfo_v2");
  const auto found = fake::Captures().find(stream);
  *status = found == fake::Captures().end() ? 0 : 1;
  if (*status == 0) return 0;
  *id = 1;
  *graph = found->second;
  *nodes = &found->second->last;
  *count = found->second->last == nullptr ? 0 : 1;
  return 0;
}
int hipGraphExecBatchMemOpNodeSetParams(fake::Captured* graph, fake::CapturedNode* node,
                                        const fake::WordNode* params) {
  FAKE_ENTER("hipGraphExecBatchMemOpNodeSetParams");
  const bool known = std::any_of(graph->nodes.begin(), graph->nodes.end(),
                                 [node](const auto& one) { return one.get() == node; });
  if (!known || params->count != node->words.size()) return fake::kInvalidValue;
  node->words.assign(params->operations, params->operations + params->count);
  return 0;
}

}  // extern "C"
