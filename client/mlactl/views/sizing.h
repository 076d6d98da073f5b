// Computes what a server needs for a model and a number of conversations: arithmetic, without a
// server.
//
// Page groups of other sizes, prefixes that conversations share, and slower tiers are not counted:
// the figures are what conversations need that share nothing.
#ifndef MLA_CLIENT_MLACTL_VIEWS_SIZING_H_
#define MLA_CLIENT_MLACTL_VIEWS_SIZING_H_

#include <cstdint>
#include <string>
#include <vector>

namespace mla::mlactl {

struct ModelSize {
  std::string name;
  int layers = 0, heads = 0, lora = 0, rope = 0, nope = 0, v = 0;
};

// Returns the models whose numbers are public; the first is the default.
const std::vector<ModelSize>& KnownModels();
// Returns null if no model has the name.
const ModelSize* FindModel(const std::string& name);

struct Load {
  uint64_t memory_bytes = 0;         // of one server, for the cache
  uint64_t sessions = 0;             // conversations at a time
  uint64_t tokens = 0;               // rows of each
  double tokens_per_second = 0;      // decoded, all together
  double link_bytes_per_second = 0;  // of one server; 0: any
  std::string format = "bf16";       // bf16, fp8_row, fp8_tensor
  int page_rows = 64;
};

struct Sizing {
  uint64_t row_bytes = 0;        // of one layer
  uint64_t token_bytes = 0;      // of all layers
  uint64_t server_tokens = 0;    // that one server holds
  uint64_t server_sessions = 0;  // of `tokens` rows, whole pages
  uint64_t servers_for_memory = 0;
  uint64_t step_bytes = 0;           // on the wire for a decoded token, all layers, both directions
  double wire_bytes_per_second = 0;  // of the whole load
  uint64_t servers_for_link = 0;     // 0: no link given
  uint64_t servers = 0;              // the larger of both
  uint64_t weight_bytes = 0;         // of W_UK and W_UV, which prefill uses
};

// REQUIRES: memory_bytes, tokens and page_rows are above 0, and the format is one of the three.
Sizing SizeUp(const ModelSize& model, const Load& load);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_VIEWS_SIZING_H_
