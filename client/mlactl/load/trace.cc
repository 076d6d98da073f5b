#include "client/mlactl/load/trace.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/splitmix.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "mla-agents-trace";
constexpr int kVersion = 1;
constexpr uint32_t kForeignBlockRows = 512;  // in traces without a first line of this format
constexpr double kMostMillis = 1e9;
constexpr int kStreamShift = 24;  // in a block's id: the conversation or branch, then its place

uint32_t BlocksOf(uint32_t rows, uint32_t block_rows) {
  return (rows + block_rows - 1) / block_rows;
}

absl::Status Fault(size_t line, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("line ", line, ": ", what));
}

// Reads a number of a line, within its bounds; `otherwise`, if given, is used if the line does not
// have the key.
template <typename Number>
absl::Status Read(const Json& line, size_t number, const char* key, double least, double limit,
                  const Number* otherwise, Number* target) {
  const auto position = line.find(key);
  if (position == line.end() && otherwise != nullptr) {
    *target = *otherwise;
    return absl::OkStatus();
  }
  if (position == line.end() || !position->is_number()) {
    return Fault(number, absl::StrCat(key, ": must be a number"));
  }
  const double value = position->template get<double>();
  if (!(value >= least && value <= limit)) {
    return Fault(number, absl::StrCat(key, ": got ", value, ", must be ", least, "..", limit));
  }
  *target = static_cast<Number>(value);
  return absl::OkStatus();
}

absl::Status ReadBlocks(const Json& line, size_t number, uint32_t block_rows, Turn* turn) {
  const auto ids = line.find("hash_ids");
  if (ids == line.end() || !ids->is_array()) {
    return Fault(number, "hash_ids: must be a list of block ids");
  }
  const size_t least = BlocksOf(turn->input_rows, block_rows);
  const size_t limit = BlocksOf(turn->input_rows + turn->output_rows, block_rows);
  if (ids->size() < least || ids->size() > limit) {
    return Fault(number, absl::StrCat("hash_ids: got ", ids->size(), ", must be ", least, "..",
                                      limit, " of ", block_rows, " rows"));
  }
  for (const Json& id : *ids) {
    if (!id.is_number_unsigned()) {
      return Fault(number, "hash_ids: must be whole numbers from 0 on");
    }
    turn->blocks.push_back(id.get<uint64_t>());
  }
  return absl::OkStatus();
}

absl::Status ReadTurn(const Json& line, size_t number, uint32_t block_rows, Turn* turn) {
  const uint32_t own = static_cast<uint32_t>(number);  // each line is a separate conversation
  absl::Status status =
      Read<double>(line, number, "timestamp", 0, kMostMillis, nullptr, &turn->at_ms);
  const auto rows = [&](const char* key, uint32_t* to) {
    if (status.ok()) status = Read<uint32_t>(line, number, key, 1, kMaxTraceRows, nullptr, to);
  };
  rows("input_length", &turn->input_rows);
  rows("output_length", &turn->output_rows);
  if (status.ok()) {
    status =
        Read<uint32_t>(line, number, "conversation", 0, kMaxTraceTurns, &own, &turn->conversation);
  }
  if (!status.ok()) return status;
  if (const auto branch = line.find("branch"); branch != line.end()) {
    if (!branch->is_boolean()) return Fault(number, "branch: must be true or false");
    turn->branch = branch->get<bool>();
  }
  return ReadBlocks(line, number, block_rows, turn);
}

// Returns the ids of `rows` rows of a stream that begins with the ids of `before`.
std::vector<uint64_t> Blocks(std::vector<uint64_t> before, uint64_t stream, uint32_t rows,
                             uint32_t block_rows) {
  const uint32_t blocks = BlocksOf(rows, block_rows);
  before.resize(std::min<size_t>(before.size(), blocks));
  for (auto at = static_cast<uint32_t>(before.size()); at < blocks; ++at) {
    before.push_back(stream << kStreamShift | at);
  }
  return before;
}

class Generator {
 public:
  Generator(const AgentsShape& shape, uint64_t seed) : shape_(shape), random_(seed) {}

  Trace Run() {
    for (uint32_t i = 0; i < shape_.conversations; ++i) Conversation(i);
    std::stable_sort(trace_.turns.begin(), trace_.turns.end(),
                     [](const Turn& a, const Turn& b) { return a.at_ms < b.at_ms; });
    return std::move(trace_);
  }

 private:
  // Inputs of the turns, rising: each one adds the output of the turn before and a random number of
  // rows.
  std::vector<uint32_t> Inputs() {
    std::exponential_distribution<double> parts(1.0);
    std::vector<double> positions(shape_.turns);
    double sum = 0;
    for (double& part : positions) part = sum += parts(random_);
    const double room = shape_.context - shape_.system - shape_.turns * (shape_.output + 1.0);
    std::vector<uint32_t> inputs;
    for (uint32_t turn = 0; turn < shape_.turns; ++turn) {
      const auto more = static_cast<uint32_t>(std::lround(room * positions[turn] / sum));
      inputs.push_back(shape_.system + (turn + 1) * (shape_.output + 1) + more);
    }
    return inputs;
  }

  double Pause() {
    return std::exponential_distribution<double>(1.0 / std::max(shape_.pause_ms, 1e-3))(random_);
  }

  void Conversation(uint32_t index) {
    const std::vector<uint64_t> system =
        Blocks({}, 0, shape_.system / trace_.block_rows * trace_.block_rows, trace_.block_rows);
    const bool branching = std::bernoulli_distribution(shape_.branching)(random_);
    std::vector<uint32_t> branches(shape_.turns);  // branches after each turn
    for (uint32_t i = 0; branching && i < shape_.branches; ++i) {
      ++branches[random_() % shape_.turns];
    }
    const uint64_t stream = next_stream_++;
    double at_ms = Pause();
    Turn turn;
    turn.conversation = index;
    turn.output_rows = shape_.output;
    const std::vector<uint32_t> inputs = Inputs();
    for (uint32_t i = 0; i < shape_.turns; ++i) {
      turn.at_ms = at_ms;
      turn.branch = false;
      turn.input_rows = inputs[i];
      turn.blocks = Blocks(system, stream, turn.input_rows + turn.output_rows, trace_.block_rows);
      trace_.turns.push_back(turn);
      for (uint32_t each = 0; each < branches[i]; ++each) Branch(turn);
      at_ms += Pause();
    }
  }

  void Branch(Turn turn) {
    const uint32_t shared =
        (turn.input_rows + turn.output_rows) / trace_.block_rows * trace_.block_rows;
    turn.branch = true;
    turn.input_rows = shared + std::max(shape_.context / 8, 1u);
    turn.blocks.resize(shared / trace_.block_rows);
    turn.blocks = Blocks(std::move(turn.blocks), next_stream_++, turn.input_rows + turn.output_rows,
                         trace_.block_rows);
    trace_.turns.push_back(std::move(turn));
  }

  const AgentsShape shape_;
  std::mt19937_64 random_;
  Trace trace_;
  uint64_t next_stream_ = 1;
};

}  // namespace

std::vector<uint32_t> Trace::Tokens(const Turn& turn, uint32_t first, uint32_t end) const {
  const uint64_t named = uint64_t{turn.blocks.size()} * block_rows;
  std::vector<uint32_t> tokens;
  for (uint64_t row = first; row < std::min<uint64_t>(end, named); ++row) {
    const uint64_t id = turn.blocks[row / block_rows];
    tokens.push_back(static_cast<uint32_t>(MixBits(MixBits(id) + row % block_rows)));
  }
  return tokens;
}

uint32_t Trace::Shared(const Turn& one, const Turn& other) const {
  const size_t blocks = std::min(one.blocks.size(), other.blocks.size());
  const auto differ =
      std::mismatch(one.blocks.begin(), one.blocks.begin() + static_cast<std::ptrdiff_t>(blocks),
                    other.blocks.begin());
  return static_cast<uint32_t>(differ.first - one.blocks.begin()) * block_rows;
}

absl::StatusOr<Trace> ParseTrace(absl::string_view text) {
  Trace trace;
  trace.block_rows = kForeignBlockRows;
  size_t number = 0;
  for (const absl::string_view part : absl::StrSplit(text, '\n')) {
    ++number;
    if (part.empty()) continue;
    const Json line = Json::parse(part.begin(), part.end(), nullptr, /*allow_exceptions=*/false);
    if (!line.is_object()) return Fault(number, "must be a JSON object");
    if (number == 1 && line.contains("format")) {
      if (line["format"] != kFormat || line.value("version", Json()) != kVersion) {
        return Fault(number, absl::StrCat("must be format ", kFormat, ", version ", kVersion));
      }
      absl::Status status =
          Read<uint32_t>(line, number, "block_rows", 1, kMaxBlockRows, nullptr, &trace.block_rows);
      if (!status.ok()) return status;
      continue;
    }
    if (trace.turns.size() == kMaxTraceTurns) {
      return Fault(number, absl::StrCat("there may be ", kMaxTraceTurns, " turns"));
    }
    Turn turn;
    absl::Status status = ReadTurn(line, number, trace.block_rows, &turn);
    if (!status.ok()) return status;
    trace.turns.push_back(std::move(turn));
  }
  if (trace.turns.empty()) return Fault(number, "there are no turns");
  return trace;
}

std::string TraceText(const Trace& trace) {
  std::string text =
      Json{{"format", kFormat}, {"version", kVersion}, {"block_rows", trace.block_rows}}.dump() +
      "\n";
  for (const Turn& turn : trace.turns) {
    Json line{{"timestamp", turn.at_ms},
              {"conversation", turn.conversation},
              {"input_length", turn.input_rows},
              {"output_length", turn.output_rows},
              {"hash_ids", turn.blocks}};
    if (turn.branch) line["branch"] = true;
    absl::StrAppend(&text, line.dump(), "\n");
  }
  return text;
}

Trace GenerateAgents(const AgentsShape& shape, uint64_t seed) {
  return Generator(shape, seed).Run();
}

Trace GenerateTurn(uint32_t context, double share, uint32_t repeats, uint64_t seed) {
  Trace trace;
  Turn turn;
  turn.output_rows = 1;
  // Whole blocks only, and one block less if otherwise nothing were left to compute.
  uint32_t blocks = BlocksOf(static_cast<uint32_t>(context * share), trace.block_rows);
  blocks = std::max(1u, std::min(blocks, (context - 1) / trace.block_rows));
  const uint32_t cached = blocks * trace.block_rows;
  uint64_t stream = 1 + (MixBits(seed) % 1024) * (2 * uint64_t{repeats} + 1);
  const std::vector<uint64_t> common = Blocks({}, stream++, cached, trace.block_rows);
  turn.input_rows = cached;
  turn.blocks = common;
  trace.turns.push_back(turn);
  turn.input_rows = context;
  for (uint32_t i = 0; i < repeats; ++i) {
    for (const bool hit : {false, true}) {
      ++turn.conversation;
      turn.blocks =
          Blocks(hit ? common : std::vector<uint64_t>(), stream++, context, trace.block_rows);
      trace.turns.push_back(turn);
    }
  }
  return trace;
}

}  // namespace mla::mlactl
