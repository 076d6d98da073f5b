// mlactl replay against a real server, with recordings whose outputs the dense model computed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/integration/dense_model.h"
#include "tests/integration/processes.h"

namespace mla::integration {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

template <typename Number>
void Append(const Number& value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string Bytes(const std::vector<uint16_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
}

// Writes a recording in the format of client/demo/RECORDING.md, independently of the product's own
// writer.
class Recorder {
 public:
  explicit Recorder(uint64_t seed) : random_(seed), weights_(RandomWeights(dims_, &random_)) {
    const json model = {
        {"model_id", "demo"},     {"num_heads", dims_.heads},     {"kv_lora_rank", dims_.lora},
        {"rope_dim", dims_.rope}, {"nope_dim", dims_.nope},       {"v_dim", dims_.v},
        {"layers", dims_.layers}, {"softmax_scale", dims_.scale}, {"page_size", 0}};
    bytes_ = json{{"format", "mla-recording"}, {"version", 1}, {"models", {model}}}.dump() + "\n";
  }

  void Add(const json& header, const std::string& payload = "") {
    const std::string text = header.dump();
    Append(static_cast<uint32_t>(text.size()), &bytes_);
    bytes_ += text;
    Append(uint64_t{payload.size()}, &bytes_);
    bytes_ += payload;
  }

  void Upload() {
    for (const client::WeightsChunk& chunk : ChunksOf(dims_, weights_)) {
      Add({{"kind", "weights"},
           {"model_id", "demo"},
           {"layer", chunk.layer},
           {"head_begin", chunk.head_begin},
           {"head_count", chunk.head_count}},
          chunk.bytes);
    }
  }

  void Open(int sequence) {
    Add({{"kind", "open"}, {"sequence", sequence}, {"model_id", "demo"}});
    caches_.emplace(sequence, DenseCache(dims_.layers));
  }

  size_t Length(int sequence) const {
    return caches_.at(sequence).layer[0].size() / static_cast<size_t>(dims_.row());
  }

  // A step of all layers, with heads cut into `slices`, that keeps `keep` rows of each sequence.
  void Step(const std::vector<int>& sequences, const std::vector<uint32_t>& rows,
            const std::string& profile, int slices, std::vector<uint32_t> keep = {}) {
    if (keep.empty()) keep = rows;
    json begin = json::array(), lengths = json::array();
    for (size_t i = 0; i < sequences.size(); ++i) {
      const size_t start = Length(sequences[i]);
      begin.push_back({{"sequence", sequences[i]}, {"start_position", start}, {"rows", rows[i]}});
      lengths.push_back(start + keep[i]);
    }
    Add({{"kind", "begin"}, {"step", ++step_}, {"sequences", begin}});
    for (int layer = 0; layer < dims_.layers; ++layer) {
      for (int slice = 0; slice < slices; ++slice) {
        Attend(sequences, rows, profile, layer, slice * dims_.heads / slices, dims_.heads / slices);
      }
    }
    Add({{"kind", "end"}, {"step", step_}, {"committed_rows", keep}, {"lengths", lengths}});
    for (size_t i = 0; i < sequences.size(); ++i) {
      caches_.at(sequences[i]).Truncate(dims_, lengths[i].get<size_t>());
    }
  }

  void Fork(int parent, int child, size_t length) {
    Add({{"kind", "fork"}, {"sequence", child}, {"parent", parent}, {"length", length}});
    caches_.emplace(child, caches_.at(parent));
    caches_.at(child).Truncate(dims_, length);
  }

  void Truncate(int sequence, size_t length) {
    Add({{"kind", "truncate"}, {"sequence", sequence}, {"length", length}});
    caches_.at(sequence).Truncate(dims_, length);
  }

  void Release(int sequence) { Add({{"kind", "release"}, {"sequence", sequence}}); }

  // `change` may falsify the expected outputs of an attend, counted from 0.
  std::function<void(int attend, std::vector<float>* o, std::vector<float>* lse)> change;

  std::string Write(const ServerProcess& server, const std::string& name) const {
    const std::string path = server.File(name);
    std::ofstream(path, std::ios::binary) << bytes_;
    return path;
  }

 private:
  void Attend(const std::vector<int>& sequences, const std::vector<uint32_t>& rows,
              const std::string& profile, int layer, int head_begin, int heads) {
    const auto l = static_cast<size_t>(layer), row_dim = static_cast<size_t>(dims_.row());
    const bool expanded = profile == "EXPANDED", computes = profile != "APPEND_ONLY";
    const auto q_dim = static_cast<size_t>(expanded ? dims_.nope + dims_.rope : dims_.row());
    const auto n = static_cast<size_t>(heads);
    std::string kv_bytes, q_bytes;
    std::vector<float> o, lse;
    size_t total = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      std::vector<uint16_t>& cache = caches_.at(sequences[s]).layer[l];
      if (head_begin == 0) {
        const std::vector<uint16_t> kv = RandomBf16(rows[s] * row_dim, &random_);
        cache.insert(cache.end(), kv.begin(), kv.end());
        kv_bytes += Bytes(kv);
      }
      const std::vector<uint16_t> q = RandomBf16(computes ? rows[s] * n * q_dim : 0, &random_);
      q_bytes += Bytes(q);
      const size_t before = cache.size() / row_dim - rows[s];
      for (size_t cell = 0; computes && cell < rows[s] * n; ++cell) {
        Expect(cache, static_cast<int>(before + cell / n), l,
               static_cast<size_t>(head_begin) + cell % n, expanded,
               std::span(q).subspan(cell * q_dim, q_dim), &o, &lse);
      }
      total += rows[s];
    }
    if (expanded) lse.clear();
    if (change) change(attends_, &o, &lse);
    ++attends_;
    Add({{"kind", "attend"},
         {"step", step_},
         {"layer", layer},
         {"row_begin", 0},
         {"row_count", total},
         {"head_offset", head_begin},
         {"num_heads", heads},
         {"profile", profile},
         {"has_kv", head_begin == 0},
         {"dtype", "bf16"},
         {"kv_bytes", kv_bytes.size()},
         {"q_bytes", q_bytes.size()},
         {"o_bytes", o.size() * 4},
         {"lse_bytes", lse.size() * 4}},
        absl::StrCat(kv_bytes, q_bytes,
                     std::string(reinterpret_cast<const char*>(o.data()), o.size() * 4),
                     std::string(reinterpret_cast<const char*>(lse.data()), lse.size() * 4)));
  }

  void Expect(const std::vector<uint16_t>& cache, int position, size_t layer, size_t head,
              bool expanded, std::span<const uint16_t> q, std::vector<float>* o,
              std::vector<float>* lse) {
    std::vector<double> values;
    double sum = 0;
    if (expanded) {
      const auto uk = static_cast<size_t>(dims_.nope * dims_.lora);
      const auto uv = static_cast<size_t>(dims_.lora * dims_.v);
      values = DenseExpanded(dims_, cache, position, q,
                             std::span(weights_.uk[layer]).subspan(head * uk, uk),
                             std::span(weights_.uv[layer]).subspan(head * uv, uv));
    } else {
      std::vector<double> wide;
      for (const uint16_t value : q) wide.push_back(FromBf16(value));
      values = DenseAbsorbed(dims_, cache, position, wide, &sum);
    }
    for (const double value : values) o->push_back(static_cast<float>(value));
    lse->push_back(static_cast<float>(sum));
  }

  const Dims dims_;
  std::mt19937_64 random_;
  const Weights weights_;
  std::map<int, DenseCache> caches_;
  std::string bytes_;
  int step_ = 0, attends_ = 0;
};

// Records every feature of the format.
void RecordAll(Recorder* recorder) {
  recorder->Upload();
  recorder->Open(1);
  recorder->Open(2);
  recorder->Step({1}, {7}, "ABSORBED", 1);
  recorder->Step({2, 1}, {3, 2}, "EXPANDED", 1);
  recorder->Step({1, 2}, {1, 4}, "ABSORBED", 2, {1, 2});
  recorder->Fork(1, 3, 6);
  recorder->Step({3, 1}, {2, 1}, "EXPANDED", 4);
  recorder->Step({2}, {5}, "APPEND_ONLY", 1);
  recorder->Truncate(2, 4);
  recorder->Step({2}, {1}, "ABSORBED", 1);
  recorder->Release(3);
  recorder->Add({{"kind", "begin"},
                 {"step", 99},
                 {"sequences", {{{"sequence", 2}, {"start_position", 5}, {"rows", 1}}}}});
  recorder->Add({{"kind", "abort"}, {"step", 99}});
  recorder->Add({{"kind", "done"}});
}

class MlactlReplayTest : public testing::Test {
 protected:
  Result Replay(const std::string& words) const {
    return Shell(server_.Mlactl("replay --quiet " + words));
  }
  void ExpectNothingLeft() const {
    const json stats = json::parse(Shell(server_.Mlactl("status --json")).output);
    EXPECT_EQ(stats["sequences"], 0);
    EXPECT_EQ(stats["models"], 0);
    EXPECT_EQ(stats["open_steps"], 0);
  }

  ServerProcess server_{{}};
};

TEST_F(MlactlReplayTest, AgreesOverEveryTransport) {
  Recorder recorder(1);
  RecordAll(&recorder);
  const std::string file = recorder.Write(server_, "all.rec");
  for (const auto& [asked, used] :
       {std::pair("inline", "inline"), std::pair("shm", "shm"), std::pair("ring-futex", "ring"),
        std::pair("ring-spin", "ring"), std::pair("auto", "ring")}) {
    const Result result = Replay(absl::StrCat(file, " --output=json --transport=", asked));
    ASSERT_EQ(result.code, 0) << result.output;
    const json report = json::parse(result.output);
    EXPECT_EQ(report["format"], "mlactl-replay");
    EXPECT_EQ(report["transport"], used);
    EXPECT_EQ(report["agrees"], true);
    EXPECT_EQ(report["interrupted"], false);
    EXPECT_EQ(report["outside"], json({{"elements", 0}, {"cosine", 0}, {"lse", 0}}));
    EXPECT_EQ(report["steps"], 6);
    EXPECT_EQ(report["attends"], 2 * (1 + 1 + 2 + 4 + 1 + 1));
    EXPECT_EQ(report["server"]["backend"], "reference");
    EXPECT_LT(report["worst"]["error_of_allowed"]["value"], 1);
    EXPECT_THAT(report["worst"]["cosine"]["where"].get<std::string>(), HasSubstr("record "));
    EXPECT_LT(report["worst"]["lse"]["value"], 1e-3);
  }
  const Result text = Replay(file + " --output-dtype=bf16");
  EXPECT_EQ(text.code, 0) << text.output;
  EXPECT_THAT(text.output, HasSubstr("the outputs agree"));
  EXPECT_THAT(text.output, HasSubstr("error / max |V|"));
  ExpectNothingLeft();
}

TEST_F(MlactlReplayTest, AttendChecksAServerWithoutAFile) {
  for (const char* transport : {"inline", "shm", "ring-futex", "auto"}) {
    const Result result =
        Shell(server_.Mlactl(absl::StrCat("attend --json --transport=", transport)));
    ASSERT_EQ(result.code, 0) << result.output;
    const json report = json::parse(result.output);
    EXPECT_EQ(report["agrees"], true);
    EXPECT_EQ(report["backend"], "reference");
    EXPECT_LT(report["error_of_allowed"], 0.5);
    EXPECT_GT(report["error_of_allowed"], 0);
  }
  EXPECT_THAT(Shell(server_.Mlactl("attend")).output, HasSubstr("the outputs agree"));
  EXPECT_EQ(Shell(server_.Mlactl("attend --transport=pigeon")).code, 1);
  ExpectNothingLeft();
}

TEST_F(MlactlReplayTest, OneWrongElementIsFound) {
  Recorder recorder(2);
  recorder.change = [](int attend, std::vector<float>* o, std::vector<float>*) {
    if (attend == 5) (*o)[37] += 0.02F;
  };
  RecordAll(&recorder);
  const Result result = Replay(recorder.Write(server_, "wrong.rec"));
  EXPECT_EQ(result.code, 5);
  EXPECT_THAT(result.output, HasSubstr("the outputs DIFFER"));
  EXPECT_THAT(result.output, HasSubstr("layer 0, row 0 (position 9), head 3: element 5"));

  Recorder lse(2);
  lse.change = [](int attend, std::vector<float>*, std::vector<float>* values) {
    if (attend == 0) (*values)[3] += 0.002F;
  };
  RecordAll(&lse);
  const std::string file = lse.Write(server_, "lse.rec");
  const Result differs = Replay(file + " --json");
  EXPECT_EQ(differs.code, 5);
  EXPECT_THAT(json::parse(differs.output)["first_outside"].get<std::string>(), HasSubstr("lse"));
  EXPECT_EQ(Replay(file + " --lse=0.01").code, 0);
  ExpectNothingLeft();
}

TEST_F(MlactlReplayTest, SavedOutputsTakeThePlaceOfTheExpectedOnes) {
  Recorder recorder(3);
  recorder.change = [](int, std::vector<float>* o, std::vector<float>*) {
    for (float& value : *o) value = 0;
  };
  RecordAll(&recorder);
  const std::string file = recorder.Write(server_, "zero.rec");
  const std::string saved = server_.File("saved.rec"), again = server_.File("again.rec");
  EXPECT_EQ(Replay(absl::StrCat(file, " --save=", saved)).code, 5);
  // The reference backend gives the same bits again.
  const Result same = Replay(absl::StrCat(saved, " --json --save=", again));
  EXPECT_EQ(same.code, 0) << same.output;
  EXPECT_EQ(json::parse(same.output)["worst"]["error"]["value"], 0);
  EXPECT_EQ(Shell(absl::StrCat("cmp ", saved, " ", again)).code, 0);
  EXPECT_EQ(Shell(absl::StrCat("cmp -s ", file, " ", saved)).code, 1);
  EXPECT_EQ(Replay(absl::StrCat(file, " --save=", file)).code, 1);
  EXPECT_EQ(Replay(absl::StrCat(file, " --save=/nonexistent/x")).code, 3);
}

TEST_F(MlactlReplayTest, AnInterruptPrintsWhatThereIsAndLeavesNothing) {
  Recorder recorder(7);
  recorder.Upload();
  recorder.Open(1);
  recorder.Step({1}, {3}, "ABSORBED", 1);
  for (int i = 0; i < 12000; ++i) recorder.Step({1}, {1}, "ABSORBED", 1, {0});
  recorder.Add({{"kind", "done"}});
  const std::string file = recorder.Write(server_, "long.rec"), saved = server_.File("half.rec");
  BackgroundCommand replay(
      server_.Mlactl(absl::StrCat("replay --quiet ", file, " --json --save=", saved)));
  // Waits until the replay is in progress, however long the start takes.
  for (int i = 0; i < 500; ++i) {
    const json stats = json::parse(Shell(server_.Mlactl("status --json")).output);
    if (stats["open_steps"] != 0 || std::stoul(stats["requests_total"].get<std::string>()) > 300) {
      break;
    }
  }
  replay.Signal(SIGINT);
  const Result result = replay.Finish();
  EXPECT_EQ(result.code, 130) << result.output;
  EXPECT_THAT(result.output, HasSubstr("interrupted; what it had created is gone from the server"));
  const size_t end = result.output.rfind('}');
  ASSERT_NE(end, std::string::npos) << result.output;
  const size_t begin = result.output.find('{');
  const json report = json::parse(result.output.substr(begin, end - begin + 1));
  EXPECT_EQ(report["interrupted"], true);
  EXPECT_GT(report["attends"], 0);
  EXPECT_LT(report["steps"], 12000);
  EXPECT_EQ(report["agrees"], true);
  ExpectNothingLeft();
  EXPECT_EQ(Shell(absl::StrCat("test -e ", saved)).code, 1);  // no incomplete recording is left
}

TEST_F(MlactlReplayTest, WhatCannotBeReplayedSaysWhy) {
  Recorder recorder(4);
  RecordAll(&recorder);
  const std::string file = recorder.Write(server_, "all.rec");
  EXPECT_EQ(Shell(absl::StrCat("truncate -s -10 ", file)).code, 0);
  const Result cut = Replay(file);
  EXPECT_EQ(cut.code, 3);
  EXPECT_THAT(cut.output, HasSubstr("DATA_LOSS"));
  EXPECT_EQ(Replay("/nonexistent.rec").code, 3);
  EXPECT_EQ(Replay("").code, 1);
  EXPECT_EQ(Replay(file + " --transport=all").code, 1);

  Recorder gap(5);
  gap.Open(1);
  gap.Add({{"kind", "begin"},
           {"step", 1},
           {"sequences", {{{"sequence", 1}, {"start_position", 4}, {"rows", 1}}}}});
  gap.Add({{"kind", "done"}});
  const Result position = Replay(gap.Write(server_, "gap.rec"));
  EXPECT_EQ(position.code, 3);
  EXPECT_THAT(position.output,
              HasSubstr("record 2: start_position: got 4, the sequence has 0 rows"));

  Recorder bare(6);  // EXPANDED without weights: the server's own message, with the number of the
                     // record
  bare.Open(1);
  bare.Step({1}, {1}, "EXPANDED", 1);
  bare.Add({{"kind", "done"}});
  const Result refused = Replay(bare.Write(server_, "bare.rec"));
  EXPECT_EQ(refused.code, 3);
  EXPECT_THAT(refused.output, HasSubstr("record 3: "));
  EXPECT_THAT(refused.output, HasSubstr("reason "));
  ExpectNothingLeft();
}

}  // namespace
}  // namespace mla::integration
