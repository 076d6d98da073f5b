#include "scheduler/batching/launch_cost.h"

#include <algorithm>

namespace mla::scheduler {
namespace {

// Of any launch: submission, wake-ups of workers, small tensors.
constexpr double kLaunchNanos = 20'000;
// A rate moves by this share of the error. See the header for why they differ.
constexpr double kUp = 0.7;
constexpr double kDown = 0.2;
// One measurement moves a rate by at most this factor: a thread that lost its core says nothing of
// the launch.
constexpr double kMostFactor = 4;
constexpr double kLeastRate = 1e-7;
constexpr double kMostRate = 1e5;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that a launch's query rows see on average, when the first sees cached + 1.
int64_t MeanKvRows(int64_t rows, int64_t cached) { return cached + (rows + 1) / 2; }

void Follow(double* rate, double share, double factor) {
  const double move = factor > 1 ? kUp : kDown;
  *rate = std::clamp(*rate * (1 + share * move * (factor - 1)), kLeastRate, kMostRate);
}

}  // namespace

int64_t LaunchCost::AbsorbedUnits(const Model& model, Profile profile, int64_t rows, int64_t heads,
                                  int64_t cached, int32_t top_k) {
  if (heads == 0) return 0;
  if (top_k != kAllRows && rows > 1) {
    const int64_t row = cached + (rows + 1) / 2;
    return rows * AbsorbedUnits(model, profile, 1, heads, row - 1, top_k);
  }
  const kernels::Geometry& g = model.spec->geometry;
  const int64_t tile_rows = std::max(1, model.tile_rows);
  int64_t kv_rows = MeanKvRows(rows, cached);
  if (top_k != kAllRows) kv_rows = std::min<int64_t>(kv_rows, top_k);
  // W_UK and W_UV of a row and head cost as many products as this many KV rows.
  if (profile == Profile::kExpanded) {
    kv_rows += g.kv_lora_rank * (g.nope_dim + g.v_dim) / (g.kv_row_dim() + g.kv_lora_rank);
  }
  const int64_t packed = rows * heads;
  // Backends without a floor stream the rows once a tile, whatever it holds.
  const int64_t charged = model.min_charged_rows > 0
                              ? std::max<int64_t>(packed, model.min_charged_rows)
                              : DivideUp(packed, tile_rows) * tile_rows;
  return std::max<int64_t>(1, charged * kv_rows * model.rows(0).row_stride / tile_rows);
}

int64_t LaunchCost::ExpandedUnits(const Model& model, int64_t rows, int64_t heads, int64_t cached) {
  const kernels::Geometry& g = model.spec->geometry;
  const int64_t tile_rows = std::max(1, model.tile_rows);
  const int64_t head_dim = std::max<int64_t>(1, g.nope_dim + g.rope_dim + g.v_dim);
  const int64_t latent_dim = g.kv_row_dim() + g.kv_lora_rank;
  // Projecting K and V of a row up for a head costs as many products as this many query rows.
  const int64_t project = g.kv_lora_rank * (g.nope_dim + g.v_dim) / head_dim;
  const int64_t packed = heads * (rows * MeanKvRows(rows, cached) + project * (cached + rows));
  return std::max<int64_t>(1,
                           packed * head_dim / latent_dim * model.rows(0).row_stride / tile_rows);
}

const LaunchCost::Rates& LaunchCost::Of(const BatchKey& key) const {
  for (const Rates& rates : rates_) {
    if (rates.used && rates.key == key) return rates;
  }
  return initial_;
}

int64_t LaunchCost::Nanos(const BatchKey& key, const LaunchUnits& units) const {
  const Rates& rates = Of(key);
  return static_cast<int64_t>(kLaunchNanos + rates.absorbed * static_cast<double>(units.absorbed) +
                              rates.expanded * static_cast<double>(units.expanded) +
                              pages_ * static_cast<double>(units.pages));
}

void LaunchCost::Observe(const BatchKey& key, const LaunchUnits& units, int64_t nanos) {
  Rates* rates = &rates_[0];
  for (Rates& candidate : rates_) {
    if (candidate.used && candidate.key == key) {
      rates = &candidate;
      break;
    }
    if (candidate.last_used < rates->last_used) rates = &candidate;
  }
  if (!rates->used || !(rates->key == key)) {
    *rates = initial_;
    rates->used = true;
    rates->key = key;
  }
  rates->last_used = ++observed_;
  const double absorbed = rates->absorbed * static_cast<double>(units.absorbed);
  const double expanded = rates->expanded * static_cast<double>(units.expanded);
  const double pages = pages_ * static_cast<double>(units.pages);
  const double predicted = kLaunchNanos + absorbed + expanded + pages;
  const double took = std::max<double>(static_cast<double>(nanos), 1);
  const double factor = std::clamp(took / predicted, 1 / kMostFactor, kMostFactor);
  // Each rate answers for its share of the prediction.
  Follow(&rates->absorbed, absorbed / predicted, factor);
  Follow(&rates->expanded, expanded / predicted, factor);
  Follow(&pages_, pages / predicted, factor);
  // A key that comes later most likely runs on the same device.
  initial_.absorbed = rates->absorbed;
  initial_.expanded = rates->expanded;
}

}  // namespace mla::scheduler
