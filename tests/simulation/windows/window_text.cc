#include "tests/simulation/windows/window_text.h"

#include <algorithm>
#include <cmath>

namespace mla::simulation {

using scheduler::testing::MakeRow;
using scheduler::testing::Row;

int EntriesAt(const scheduler::ModelSpec& model, int layer, int positions) {
  const int ratio = model.ratio(layer);
  return ratio == 0 ? 0 : positions / ratio;
}

int RowsPassed(const scheduler::ModelSpec& model, int length) {
  const int page = model.window_page_size();
  return std::max(0, length - model.window) / page * page;
}

void WindowText::CutTo(const scheduler::ModelSpec& model, int length) {
  for (int layer = 0; layer < model.layers; ++layer) {
    rows[layer].resize(static_cast<size_t>(length));
    entries[layer].resize(static_cast<size_t>(EntriesAt(model, layer, length)));
  }
  if (tail_at > length) tail = tail_at = 0;
}

double ErrorOf(const scheduler::testing::TestRequest& request, size_t packed_row,
               const std::vector<uint64_t>& keys, uint64_t q_key, int dim, double scale,
               double sink) {
  const Row q = MakeRow(q_key, dim);
  double sum = 0;
  std::vector<double> out(static_cast<size_t>(dim), 0.0);
  for (const uint64_t key : keys) {
    const Row kv = MakeRow(key, dim);
    double dot = 0;
    for (int i = 0; i < dim; ++i) dot += double{q[i]} * kv[i];
    const double weight = std::exp(dot * scale);
    sum += weight;
    for (int i = 0; i < dim; ++i) out[i] += weight * kv[i];
  }
  const double of_lse = std::abs(request.lse[packed_row] - std::log(sum));
  double worst = std::isnan(of_lse) ? 1.0 : of_lse;
  for (int i = 0; i < dim; ++i) {
    const double off = std::abs(request.output[packed_row * static_cast<size_t>(dim) + i] -
                                out[i] / (sum + std::exp(sink)));
    worst = std::isnan(off) ? 1.0 : std::max(worst, off);
  }
  return worst;
}

}  // namespace mla::simulation
