// Describes conversations of agents: which turns there were, how long they were, and which rows
// they share.
//
// A trace is text, a JSON object a line; client/mlactl/agents/README.md has the keys. The first
// line says how many rows a block has; each other line is a turn. A turn's rows are named by the
// ids of their blocks, as other traces of requests do it: two turns share a beginning if it has the
// same ids, and the contents of rows are not in the trace.
//
// Threading: not thread-safe.
#ifndef MLA_CLIENT_MLACTL_LOAD_TRACE_H_
#define MLA_CLIENT_MLACTL_LOAD_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace mla::mlactl {

struct Turn {
  double at_ms = 0;  // earliest start, counted from the start of the first turn
  uint32_t conversation = 0;
  // Runs on a fork of the last turn that is not a branch; later turns do not see it.
  bool branch = false;
  uint32_t input_rows = 0;   // rows of the prompt, including rows of earlier turns
  uint32_t output_rows = 0;  // at least 1
  // Blocks of its rows: all of the input, and the output as far as later turns share it.
  std::vector<uint64_t> blocks;
};

struct Trace {
  uint32_t block_rows = 64;
  std::vector<Turn> turns;  // turns of a conversation, in order

  // Returns the tokens of the rows [first, end) of a turn. Rows after its blocks have no tokens, so
  // the result is then shorter.
  std::vector<uint32_t> Tokens(const Turn& turn, uint32_t first, uint32_t end) const;
  // Returns the rows that both have in common at the beginning, in whole blocks.
  uint32_t Shared(const Turn& one, const Turn& other) const;
};

inline constexpr uint32_t kMaxTraceRows = 1u << 24;  // per turn
inline constexpr uint32_t kMaxBlockRows = 1u << 16;
inline constexpr size_t kMaxTraceTurns = 1u << 20;

// Reads a trace. INVALID_ARGUMENT names the line and the key if this is not a trace or a number is
// out of bounds.
absl::StatusOr<Trace> ParseTrace(absl::string_view text);
std::string TraceText(const Trace& trace);

// The parameters of GenerateAgents. Lengths are in rows.
struct AgentsShape {
  uint32_t conversations = 8;
  uint32_t turns = 43;      // per conversation
  uint32_t context = 4096;  // input of the last turn
  uint32_t system = 512;    // beginning that all conversations share
  uint32_t output = 4;      // per turn
  double branching = 0.44;  // share of the conversations that have branches
  uint32_t branches = 3;    // per conversation with branches
  double pause_ms = 2000;   // between turns, the mean
};

// Generates conversations whose inputs grow with each turn, by the output of the turn before and a
// random number of rows, up to `context`. Some have branches: an agent that starts with a fork of
// the conversation and its own rows, an eighth of `context`. REQUIRES: context >= system + turns *
// (output + 1), and at least one block of rows.
Trace GenerateAgents(const AgentsShape& shape, uint64_t seed);

// Makes one turn of a long conversation, again and again: `repeats` times with none of its
// `context` rows in the cache, and as often with `share` of them. An earlier turn puts them there.
// REQUIRES: context is more than a block.
Trace GenerateTurn(uint32_t context, double share, uint32_t repeats, uint64_t seed);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_LOAD_TRACE_H_
