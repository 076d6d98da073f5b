// A worker of a cluster: drives steps over sequences of several servers, and compares every output
// with its own dense model.
#ifndef MLA_TESTS_INTEGRATION_CLUSTER_FLEET_WORKER_H_
#define MLA_TESTS_INTEGRATION_CLUSTER_FLEET_WORKER_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/cluster/cluster_client.h"
#include "client/cpp/cluster/cluster_step.h"
#include "client/cpp/streams/errors.h"
#include "tests/integration/dense_model.h"

namespace mla::integration {

inline constexpr char kModel[] = "m";

inline std::string ReasonIn(const absl::Status& status) {
  return client::DetailOf(status).value_or(v1::ErrorDetail()).reason();
}

// True once `condition` is, within a minute.
inline bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 6000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return condition();
}

struct FleetTrack {  // a sequence and its expected contents
  client::ClusterSequence sequence;
  DenseCache cache;
};

class FleetWorker final {
 public:
  FleetWorker(const std::string& target, const client::ClientOptions& options,
              const client::ClusterOptions& cluster, uint64_t seed = 1)
      : random_(seed) {
    auto connected = client::ClusterClient::Connect(target, options, cluster);
    EXPECT_TRUE(connected.ok()) << connected.status();
    if (!connected.ok()) return;
    client_ = *std::move(connected);
    const auto registered = client_->RegisterModel(SpecOf(dims_, kModel));
    EXPECT_TRUE(registered.ok()) << registered.status();
    session_ = client_->OpenSession();
  }

  client::ClusterClient& client() { return *client_; }
  client::ClusterSession& session() { return *session_; }
  const Dims& dims() const { return dims_; }

  FleetTrack Open(const v1::Prefix& prefix = {}) {
    auto sequence = client_->OpenSequence(kModel, prefix);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return {*std::move(sequence), DenseCache(dims_.layers)};
  }

  absl::Status Upload() {
    weights_ = RandomWeights(dims_, &random_);
    return client_->Upload(kModel, "weights", [this](client::Client* server) {
      std::vector<client::WeightsChunk> chunks = ChunksOf(dims_, weights_);
      size_t next = 0;
      return server
          ->UploadWeights(kModel,
                          [&]() -> std::optional<client::WeightsChunk> {
                            if (next == chunks.size()) return std::nullopt;
                            return chunks[next++];
                          })
          .status();
    });
  }

  using Rows = std::vector<uint32_t>;
  absl::StatusOr<std::unique_ptr<client::ClusterStep>> Begin(const std::vector<FleetTrack*>& tracks,
                                                             const Rows& rows,
                                                             bool partial = false) {
    std::vector<client::ClusterRows> begin;
    for (size_t i = 0; i < tracks.size(); ++i) begin.push_back({&tracks[i]->sequence, rows[i]});
    client::ClusterBeginOptions options;
    options.partial = partial;
    options.failed = &failed_;
    return session_->Begin(kModel, begin, options);
  }
  // Owners that failed in the latest Begin.
  const std::vector<client::FailedOwner>& failed() const { return failed_; }

  // One layer; outputs of sequences in `lost` must be NaN, all others right.
  absl::Status Layer(client::ClusterStep* step, int layer, const std::vector<FleetTrack*>& tracks,
                     const Rows& rows, v1::Profile profile = v1::PROFILE_ABSORBED,
                     const std::vector<size_t>& lost = {}) {
    const bool expanded = profile == v1::PROFILE_EXPANDED;
    const auto heads = static_cast<size_t>(dims_.heads);
    const auto q_dim = static_cast<size_t>(expanded ? dims_.nope + dims_.rope : dims_.row());
    const auto o_dim = static_cast<size_t>(expanded ? dims_.v : dims_.lora);
    const size_t total = step->total_rows();
    const auto kv = RandomBf16(total * static_cast<size_t>(dims_.row()), &random_);
    const auto q = RandomBf16(total * heads * q_dim, &random_);
    std::vector<float> o(total * heads * o_dim), lse(total * heads);
    client::AttendCall call;
    call.layer = static_cast<uint32_t>(layer);
    call.row_count = static_cast<uint32_t>(total);
    call.num_heads = static_cast<uint32_t>(heads);
    call.profile = profile;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = kv.data();
    call.q = q.data();
    call.o = o.data();
    call.lse = lse.data();
    const auto times = step->Attend(call);
    if (!times.ok()) return times.status();
    size_t row = 0;
    for (size_t s = 0; s < tracks.size(); ++s) {
      std::vector<uint16_t>& cached = tracks[s]->cache.layer[static_cast<size_t>(layer)];
      const size_t before = cached.size() / static_cast<size_t>(dims_.row());
      cached.insert(cached.end(), kv.begin() + static_cast<long>(row) * dims_.row(),
                    kv.begin() + static_cast<long>(row + rows[s]) * dims_.row());
      const bool is_lost = std::find(lost.begin(), lost.end(), s) != lost.end();
      for (size_t r = 0; r < rows[s]; ++r, ++row) {
        for (size_t h = 0; h < heads; ++h) {
          const std::vector<double> expected =
              is_lost ? std::vector<double>(o_dim, NAN)
                      : Expected(layer, cached, static_cast<int>(before + r), h, profile,
                                 {q.data() + (row * heads + h) * q_dim, q_dim});
          for (size_t d = 0; d < o_dim; ++d) {
            const double got = o[(row * heads + h) * o_dim + d];
            const bool same = std::isnan(expected[d])
                                  ? std::isnan(got) && std::isnan(lse[row * heads + h])
                                  : std::abs(got - expected[d]) <= 0.01;
            if (!same) {
              return absl::InternalError(absl::StrCat("sequence ", s, " row ", r, " head ", h, ": ",
                                                      got, ", expected ", expected[d]));
            }
          }
        }
      }
    }
    return absl::OkStatus();
  }

  // A whole step. Afterwards the caches are as the sequences' lengths say.
  absl::Status Step(const std::vector<FleetTrack*>& tracks, const Rows& rows,
                    v1::Profile profile = v1::PROFILE_ABSORBED, const Rows& keep = {}) {
    auto step = Begin(tracks, rows);
    absl::Status status = step.status();
    for (int layer = 0; layer < dims_.layers && status.ok(); ++layer) {
      status = Layer(step->get(), layer, tracks, rows, profile);
    }
    if (status.ok()) status = (keep.empty() ? (*step)->End() : (*step)->End(keep)).status();
    Settle(tracks);
    return status;
  }
  void Settle(const std::vector<FleetTrack*>& tracks) {
    for (FleetTrack* track : tracks) track->cache.Truncate(dims_, track->sequence.length());
  }

 private:
  std::vector<double> Expected(int layer, const std::vector<uint16_t>& rows, int position,
                               size_t head, v1::Profile profile, std::span<const uint16_t> q) {
    if (profile == v1::PROFILE_EXPANDED) {
      const auto uk = static_cast<size_t>(dims_.nope * dims_.lora);
      const auto uv = static_cast<size_t>(dims_.lora * dims_.v);
      const auto l = static_cast<size_t>(layer);
      return DenseExpanded(dims_, rows, position, q,
                           std::span(weights_.uk[l]).subspan(head * uk, uk),
                           std::span(weights_.uv[l]).subspan(head * uv, uv));
    }
    std::vector<double> wide;
    for (const uint16_t one : q) wide.push_back(FromBf16(one));
    double lse = 0;
    return DenseAbsorbed(dims_, rows, position, wide, &lse);
  }

  const Dims dims_;
  std::mt19937_64 random_;
  Weights weights_;
  std::vector<client::FailedOwner> failed_;
  std::unique_ptr<client::ClusterClient> client_;
  std::unique_ptr<client::ClusterSession> session_;
};

inline v1::Prefix PrefixOf(uint32_t first, uint32_t count) {
  v1::Prefix prefix;
  for (uint32_t i = 0; i < count; ++i) prefix.add_token_ids(first + i);
  return prefix;
}

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_CLUSTER_FLEET_WORKER_H_
