// Measures a worker of each of two servers, and one worker that uses both through the cluster's
// client; two_servers.py starts the servers and this program.
//
//   two_servers_worker --targets unix:/a/mla.sock,unix:/b/mla.sock [--profile both] [--batch 16,64]
//                      [--context 16384] [--layers 61] [--heads 128] [--seconds 3] [--goal 1.9]
//                      [--copy-threads 4] [--spin-us 20] [--json FILE]
//
// Steps of one row a sequence with DeepSeek-V3's geometry, over rings, tensors in host memory. Each
// server has `batch` sequences of `context` rows, and the rows of a step are dropped at its end.
// The ways, each for `seconds`, in rows a second through all layers:
//
//   one A, one B  a worker of one server, the other one idle
//   each          both workers at the same time
//   apart         one worker of one thread, a micro-batch at each server: a step of its own, with
//                 tensors in that server's memory, which goes on when that server has answered
//   in step       the same, but each layer waits for both servers
//   one step      one worker, a step over all sequences: the client divides and copies its tensors
//
// Rows of different sequences do not depend on each other in any layer of a model, so a worker may
// run micro-batches apart. The workers here compute nothing between two layers; a worker with one
// GPU shares it among its micro-batches.
//
// The ratio is to the better one of the two servers alone. Exits 1 where an output is another than
// that of one server alone: by more than 2^-7 of the largest value of a row and head.
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "tests/bench/fleet/lane_worker.h"
#include "tests/bench/gpu/gpu_programs.h"

namespace mla::bench {
namespace {

constexpr uint64_t kRoom = 8u << 20;  // of a region, for what is not a tensor

// The program's state: two workers of one server each, and one of both.
class Measurement final {
 public:
  explicit Measurement(const Flags& flags)
      : flags_(flags), own_{LaneWorker(flags_), LaneWorker(flags_)}, both_(flags_) {}
  absl::Status Open(const std::vector<std::string>& targets);
  absl::Status Run(const Point& point);
  ~Measurement() { both_.Detach(); }
  const std::vector<std::string>& rows() const { return rows_; }

 private:
  void Choose(const Point& point);
  absl::StatusOr<Rate> RunEach(const Point& point);
  void Report(const Point& point, const char* way, const Rate& rate, double ratio);
  absl::Status Compare(const Point& point, const char* way, std::span<const std::byte> wanted,
                       std::span<const std::byte> got) const;
  absl::Status CompareBoth(const Point& point, const char* way);

  const Flags flags_;
  LaneWorker own_[kServers];
  LaneWorker both_;
  Lane alone_[kServers], of_both_[kServers], whole_;
  std::vector<std::string> rows_;
};

absl::Status Measurement::Open(const std::vector<std::string>& targets) {
  const auto batch = *std::max_element(flags_.batch.begin(), flags_.batch.end());
  // ABSORBED has the larger tensors.
  const Point half = MakePoint(flags_.heads, true, batch);
  const Point all = MakePoint(flags_.heads, true, batch * static_cast<int32_t>(kServers));
  const uint64_t in = AlignUp(std::max<uint64_t>(half.in_bytes, kFillRows * (kLora + kRope) * 2));
  const uint64_t region = in + AlignUp(half.out_bytes) + kRoom;
  absl::Status filled[kServers];
  std::vector<std::thread> threads;
  for (size_t server = 0; server < kServers; ++server) {
    threads.emplace_back([&, server] {
      LaneWorker& worker = own_[server];
      absl::Status s = worker.Connect({targets[server]}, region);
      if (s.ok()) s = worker.RegisterModel(flags_.profile != "absorbed");
      if (s.ok()) {
        const auto lane = worker.MakeLane(0, in, half.out_bytes);
        s = lane.status();
        if (lane.ok()) alone_[server] = *lane;
      }
      if (s.ok()) s = worker.Fill(alone_[server], static_cast<uint32_t>(batch), server);
      filled[server] = s;
    });
  }
  for (std::thread& one : threads) one.join();
  for (const absl::Status& one : filled) {
    if (!one.ok()) return one;
  }
  // The session of the step over both has the larger tensors, and each other server's copies.
  absl::Status s = both_.Connect(targets, AlignUp(all.in_bytes) + AlignUp(all.out_bytes) + kRoom);
  if (s.ok()) s = both_.RegisterModel(false);
  for (size_t server = 0; s.ok() && server < kServers; ++server) {
    std::vector<uint64_t> ids;
    for (const ClusterSequence& one : own_[server].sequences(0)) ids.push_back(one.id());
    s = both_.Attach(server, ids);
    if (!s.ok()) return s;
    const auto lane = both_.MakeLane(server, in, half.out_bytes);
    s = lane.status();
    if (lane.ok()) of_both_[server] = *lane;
  }
  if (!s.ok()) return s;
  const auto lane = both_.MakeLane(0, all.in_bytes, all.out_bytes);
  if (lane.ok()) whole_ = *lane;
  return lane.status();
}

// Sets the lanes' sequences, and the inputs, which are the same for the same sequence.
void Measurement::Choose(const Point& point) {
  whole_.sequences.clear();
  for (size_t server = 0; server < kServers; ++server) {
    for (Lane* lane : {&alone_[server], &of_both_[server]}) lane->sequences.clear();
    for (uint32_t i = 0; i < point.batch; ++i) {
      alone_[server].sequences.push_back(&own_[server].sequences(0)[i]);
      of_both_[server].sequences.push_back(&both_.sequences(server)[i]);
      whole_.sequences.push_back(&both_.sequences(server)[i]);
    }
  }
  const uint64_t kv_row = (kLora + kRope) * 2;
  const uint64_t q_row = (point.in_bytes - point.kv_bytes) / point.batch;
  const Point all =
      MakePoint(flags_.heads, point.absorbed, static_cast<int32_t>(point.batch * kServers));
  for (size_t server = 0; server < kServers; ++server) {
    for (uint32_t i = 0; i < point.batch; ++i) {
      const uint64_t place = server * point.batch + i;
      const auto kv = Values(kv_row / 2, 7 * place + 1);
      const auto q = Values(q_row / 2, 7 * place + 3);
      for (const Lane* lane : {&alone_[server], &of_both_[server]}) {
        std::memcpy(lane->in.data() + i * kv_row, kv.data(), kv_row);
        std::memcpy(lane->in.data() + point.kv_bytes + i * q_row, q.data(), q_row);
      }
      std::memcpy(whole_.in.data() + place * kv_row, kv.data(), kv_row);
      std::memcpy(whole_.in.data() + all.kv_bytes + place * q_row, q.data(), q_row);
    }
  }
  for (Lane* lane : {&alone_[0], &alone_[1], &of_both_[0], &of_both_[1], &whole_}) {
    std::memset(lane->out.data(), 0, lane->out.size());
  }
}

absl::StatusOr<Rate> Measurement::RunEach(const Point& point) {
  std::barrier<> together(kServers);
  absl::StatusOr<Rate> rates[kServers] = {Rate(), Rate()};
  std::vector<std::thread> threads;
  for (size_t server = 0; server < kServers; ++server) {
    threads.emplace_back([&, server] {
      rates[server] = RunFor(flags_, point.absorbed, {alone_[server]}, &together);
    });
  }
  for (std::thread& one : threads) one.join();
  Rate sum;
  for (const auto& rate : rates) {
    if (!rate.ok()) return rate.status();
    sum.rows_s += rate->rows_s;
    sum.layer_us = std::max(sum.layer_us, rate->layer_us);
  }
  return sum;
}

void Measurement::Report(const Point& point, const char* way, const Rate& rate, double ratio) {
  const char* const profile = point.absorbed ? "absorbed" : "expanded";
  const std::string goal = ratio == 0 ? ""
                                      : absl::StrFormat(", %.3f of one, %s", ratio,
                                                        ratio >= flags_.goal ? "met" : "missed");
  std::printf("%s batch %d, context %d: %-9s %10.1f rows/s, %7.1f us a layer%s\n", profile,
              static_cast<int>(point.batch), flags_.context, way, rate.rows_s, rate.layer_us,
              goal.c_str());
  std::fflush(stdout);
  rows_.push_back(
      absl::StrFormat(R"({"bench": "two_servers", "shape": "%s %s b=%d c=%d", "rows_per_s": %.1f, )"
                      R"("layer_us": %.1f, "of_one": %.4f})",
                      way, profile, static_cast<int>(point.batch), flags_.context, rate.rows_s,
                      rate.layer_us, ratio));
}

absl::Status Measurement::Compare(const Point& point, const char* way,
                                  std::span<const std::byte> wanted,
                                  std::span<const std::byte> got) const {
  if (std::all_of(wanted.begin(), wanted.end(), [](std::byte b) { return b == std::byte{0}; })) {
    return absl::DataLossError("the outputs of one server are zeros");
  }
  const double worst = WorstOfAllowed(wanted, got, point.absorbed ? kLora : kValue);
  if (worst <= 1) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrFormat("%s: outputs differ by %.3f of the bound", way, worst));
}

// Compares the outputs of the worker of both servers, and clears them for the next way.
absl::Status Measurement::CompareBoth(const Point& point, const char* way) {
  for (size_t server = 0; server < kServers; ++server) {
    const auto got = of_both_[server].out.first(point.out_bytes);
    absl::Status s = Compare(point, way, alone_[server].out.first(point.out_bytes), got);
    if (!s.ok()) return s;
    std::memset(got.data(), 0, got.size());
  }
  return absl::OkStatus();
}

absl::Status Measurement::Run(const Point& point) {
  Choose(point);
  double best = 0;
  for (size_t server = 0; server < kServers; ++server) {
    const auto rate = RunFor(flags_, point.absorbed, {alone_[server]}, nullptr);
    if (!rate.ok()) return rate.status();
    best = std::max(best, rate->rows_s);
    Report(point, server == 0 ? "one A" : "one B", *rate, 0);
  }
  const auto each = RunEach(point);
  if (!each.ok()) return each.status();
  Report(point, "each", *each, each->rows_s / best);
  const auto apart = RunApart(flags_, point.absorbed, {of_both_[0], of_both_[1]});
  if (!apart.ok()) return apart.status();
  Report(point, "apart", *apart, apart->rows_s / best);
  if (absl::Status s = CompareBoth(point, "apart"); !s.ok()) return s;
  const auto steps = RunFor(flags_, point.absorbed, {of_both_[0], of_both_[1]}, nullptr);
  if (!steps.ok()) return steps.status();
  Report(point, "in step", *steps, steps->rows_s / best);
  if (absl::Status s = CompareBoth(point, "in step"); !s.ok()) return s;
  const auto step = RunFor(flags_, point.absorbed, {whole_}, nullptr);
  if (!step.ok()) return step.status();
  Report(point, "one step", *step, step->rows_s / best);
  for (size_t server = 0; server < kServers; ++server) {
    absl::Status s = Compare(point, "one step", alone_[server].out.first(point.out_bytes),
                             whole_.out.subspan(server * point.out_bytes, point.out_bytes));
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  const std::vector<std::string> targets = absl::StrSplit(flags.targets, ',');
  if (targets.size() != kServers) return absl::InvalidArgumentError("--targets: want two");
  if (flags.batch.empty() || std::count(flags.batch.begin(), flags.batch.end(), 0) > 0 ||
      flags.layers == 0 || flags.heads == 0) {
    return absl::InvalidArgumentError("--batch, --layers, --heads: want numbers above 0");
  }
  Measurement measurement(flags);
  if (absl::Status s = measurement.Open(targets); !s.ok()) return s;
  for (const bool absorbed : {true, false}) {
    if (flags.profile == (absorbed ? "expanded" : "absorbed")) continue;
    for (const int32_t batch : flags.batch) {
      if (absl::Status s = measurement.Run(MakePoint(flags.heads, absorbed, batch)); !s.ok()) {
        return s;
      }
    }
  }
  return WriteJsonRows(flags.json, measurement.rows());
}

int Main(int argc, char** argv) {
  Flags flags;
  const Flag known[] = {{"--targets", &flags.targets}, {"--profile", &flags.profile},
                        {"--batch", &flags.batch},     {"--context", &flags.context},
                        {"--layers", &flags.layers},   {"--heads", &flags.heads},
                        {"--seconds", &flags.seconds}, {"--copy-threads", &flags.copy_threads},
                        {"--spin-us", &flags.spin_us}, {"--goal", &flags.goal},
                        {"--json", &flags.json}};
  absl::Status s = ReadFlags({argv + 1, static_cast<size_t>(argc - 1)}, known);
  if (s.ok()) s = Run(flags);
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.ToString().c_str());
  return s.ok() ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) { return mla::bench::Main(argc, argv); }
