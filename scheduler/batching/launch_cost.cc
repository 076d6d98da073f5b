#include "scheduler/batching/launch_cost.h"

#include <algorithm>

#include "scheduler/batching/waiting_requests.h"

namespace mla::scheduler {
namespace {

// Fixed cost of any launch: submission, wake-ups of workers, small tensors.
constexpr double kLaunchNanos = 20'000;
// A rate moves by one of these shares of the error: by kUp after a launch that took longer than
// predicted, by kDown after a shorter one. The header says why they differ.
constexpr double kUp = 0.7;
constexpr double kDown = 0.2;
// One measurement moves a rate by at most this factor: a thread that lost its core does not show
// what a launch costs.
constexpr double kMostFactor = 4;
constexpr double kLeastRate = 1e-7;
constexpr double kMostRate = 1e5;

void Follow(double* rate, double share, double factor) {
  const double move = factor > 1 ? kUp : kDown;
  *rate = std::clamp(*rate * (1 + share * move * (factor - 1)), kLeastRate, kMostRate);
}

}  // namespace

int64_t ProjectedRowBytes(const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  if (args.profile != Profile::kProjected) return 0;
  const ModelSpec& spec = *request.engine.step->model->spec;
  const auto size = [](kernels::DType dtype) { return int64_t(kernels::ElementSize(dtype)); };
  const int64_t latent = spec.geometry.absorbed_q_dim() + spec.geometry.kv_lora_rank;
  const int64_t between = args.num_heads * (spec.q_dim(args.profile) * size(args.q_dtype) +
                                            spec.o_dim(args.profile) * size(args.o_dtype) +
                                            latent * size(kernels::DType::kF32));
  // Staging memory has at least two thirds of the workspace's bytes, and few heads may have wide
  // rows.
  const int64_t sent = spec.projected.q_lora_rank * size(args.q_dtype) +
                       spec.geometry.rope_dim * size(kernels::DType::kF32);
  const int64_t returned = spec.projected.hidden_size * size(args.o_dtype);
  return std::max(between, std::max(sent, returned) * 3 / 2);
}

AbsorbedCost::AbsorbedCost(const Model& model, Profile profile, int64_t heads, int64_t most_places)
    : heads_(heads),
      most_places_(most_places),
      tile_rows_(std::max(1, model.tile_rows)),
      row_bytes_(model.rows(0).row_stride),
      min_charged_rows_(model.min_charged_rows) {
  // W_UK and W_UV of a row and head cost as many products as attention to this many KV rows.
  const kernels::Geometry& g = model.spec->geometry;
  if (!IsExpanded(profile)) return;
  projected_rows_ = g.kv_lora_rank * (g.nope_dim + g.v_dim);
  if (profile == Profile::kProjected) projected_rows_ = model.spec->head_weights();
  projected_rows_ /= g.kv_row_dim() + g.kv_lora_rank;
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

int64_t LaunchCost::Nanos(const Rates& rates, const LaunchUnits& units) const {
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
  // Each rate is corrected in proportion to its share of the predicted time.
  Follow(&rates->absorbed, absorbed / predicted, factor);
  Follow(&rates->expanded, expanded / predicted, factor);
  Follow(&pages_, pages / predicted, factor);
  // A key that is used for the first time later most likely runs on the same device.
  initial_.absorbed = rates->absorbed;
  initial_.expanded = rates->expanded;
}

// An indexer looks at a key of every row that the query row sees, much as dense attention does.
RequestCost::RequestCost(const StreamRequest& request, int32_t heads)
    : model_(*request.engine.step->model),
      heads_(heads),
      appended_row_bytes_(Appends(request) ? model_.rows(0).row_stride : 0),
      computes_(Computes(request)),
      absorbed_(model_, request.attend.profile, heads,
                Selects(request.attend) ? AbsorbedCost::kAllRows : MostPlaces(request)) {}

}  // namespace mla::scheduler
