#include "client/mlactl/views/sizing.h"

#include <algorithm>
#include <cmath>

namespace mla::mlactl {
namespace {

constexpr uint64_t kBf16Bytes = 2;
constexpr uint64_t kScaleBytes = 4, kValuesPerScale = 128;  // docs/fp8.md

uint64_t RowBytes(const ModelSize& model, const std::string& format) {
  const auto lora = static_cast<uint64_t>(model.lora), rope = static_cast<uint64_t>(model.rope);
  if (format == "fp8_tensor") return lora + rope;
  if (format == "fp8_row") {
    return lora + (lora + kValuesPerScale - 1) / kValuesPerScale * kScaleBytes + rope * kBf16Bytes;
  }
  return (lora + rope) * kBf16Bytes;
}

uint64_t Parts(double whole, double part) { return static_cast<uint64_t>(std::ceil(whole / part)); }

}  // namespace

const std::vector<ModelSize>& KnownModels() {
  static const auto* const kModels = new std::vector<ModelSize>{
      {"deepseek-v3", 61, 128, 512, 64, 128, 128},
      {"kimi-k2", 61, 64, 512, 64, 128, 128},
      {"deepseek-v2", 60, 128, 512, 64, 128, 128},
      {"deepseek-v2-lite", 27, 16, 512, 64, 128, 128},
  };
  return *kModels;
}

const ModelSize* FindModel(const std::string& name) {
  for (const ModelSize& model : KnownModels()) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

Sizing SizeUp(const ModelSize& model, const Load& load) {
  const auto layers = static_cast<uint64_t>(model.layers),
             heads = static_cast<uint64_t>(model.heads);
  const auto page = static_cast<uint64_t>(load.page_rows);
  Sizing size;
  size.row_bytes = RowBytes(model, load.format);
  size.token_bytes = size.row_bytes * layers;
  size.server_tokens = load.memory_bytes / size.token_bytes;
  // A conversation takes whole pages.
  const uint64_t session_bytes = (load.tokens + page - 1) / page * page * size.token_bytes;
  size.server_sessions = load.memory_bytes / session_bytes;
  size.servers_for_memory =
      size.server_sessions == 0 ? 0 : Parts(double(load.sessions), double(size.server_sessions));
  // EXPANDED sends, in bf16, queries of nope and rotated part and one KV row, and gets outputs of
  // v.
  const auto query = static_cast<uint64_t>(model.nope + model.rope);
  const auto row = static_cast<uint64_t>(model.lora + model.rope);
  size.step_bytes = layers * kBf16Bytes * (heads * (query + static_cast<uint64_t>(model.v)) + row);
  size.wire_bytes_per_second = load.tokens_per_second * static_cast<double>(size.step_bytes);
  if (load.link_bytes_per_second > 0) {
    size.servers_for_link = Parts(size.wire_bytes_per_second, load.link_bytes_per_second);
  }
  size.servers = std::max(size.servers_for_memory, size.servers_for_link);
  size.weight_bytes = layers * heads * static_cast<uint64_t>(model.lora) *
                      static_cast<uint64_t>(model.nope + model.v) * kBf16Bytes;
  return size;
}

}  // namespace mla::mlactl
