#include "tests/integration/window_worker.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace mla::integration {
namespace {

constexpr double kTolerance = 1e-5;

absl::Status Differs(uint32_t layer, uint64_t position, size_t head, double got, double want) {
  return absl::InternalError(absl::StrCat("layer ", layer, ", position ", position, ", head ", head,
                                          ": got ", got, ", must be ", want));
}

}  // namespace

WindowWorker::WindowWorker(uint64_t seed) : random_(seed) {
  for (int i = 0; i < dims_.layers * dims_.heads; ++i) {
    sinks_.push_back(0.25f * static_cast<float>(i));
  }
}

v1::ModelSpec WindowWorker::Spec(const std::string& model_id) const {
  v1::ModelSpec spec = SpecOf(dims_, model_id);
  spec.mutable_geometry()->set_nope_dim(0);
  spec.mutable_geometry()->set_v_dim(0);
  spec.set_attention(v1::ATTENTION_KIND_SPARSE_V4);
  spec.set_window(kWindow);
  for (const uint32_t ratio : {0u, kRatio}) spec.add_ratios(ratio);
  spec.set_top_k(kTopK);
  return spec;
}

absl::Status WindowWorker::Step(client::Session* session, const std::string& model_id,
                                client::Sequence* sequence, WindowText* text, uint32_t rows,
                                const std::vector<std::vector<int32_t>>& lists) {
  const uint64_t first = sequence->length();
  auto step = session->Begin(model_id, {{sequence, rows}});
  if (!step.ok()) return step.status();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const uint64_t made = (*step)->EntriesOf(layer, 0, rows);
    const uint64_t whole = layer == 0 ? 0 : (first + rows) / kRatio - first / kRatio;
    if (made != whole) {
      return absl::InternalError(absl::StrCat(made, " entries, must be ", whole));
    }
    const auto dim = static_cast<size_t>(dims_.row());
    const auto kv = RandomBf16((rows + made) * dim, &random_);
    const auto q = RandomBf16(rows * dims_.heads * dim, &random_);
    WindowText::Layer& cached = text->layers[layer];
    const auto middle = kv.begin() + static_cast<int64_t>(rows * dim);
    cached.rows.insert(cached.rows.end(), kv.begin(), middle);
    cached.entries.insert(cached.entries.end(), middle, kv.end());
    std::vector<float> o(rows * dims_.heads * dim), lse(rows * dims_.heads);
    client::AttendCall call;
    call.layer = layer;
    call.row_count = rows;
    call.num_heads = static_cast<uint32_t>(dims_.heads);
    call.profile = v1::PROFILE_ABSORBED;
    call.o_dtype = v1::DTYPE_F32;
    call.kv = kv.data();
    call.q = q.data();
    call.o = o.data();
    call.lse = lse.data();
    std::vector<int32_t> entries, begin = {0};
    for (const auto& list : lists) {
      entries.insert(entries.end(), list.begin(), list.end());
      begin.push_back(static_cast<int32_t>(entries.size()));
    }
    const bool listed = layer == 1 && !lists.empty();
    if (listed) call.lists = {entries.data(), 0, begin.data()};
    const auto times = (*step)->Attend(call);
    if (!times.ok()) return times.status();
    messages_ = times->messages;
    const uint32_t stride = rows > 100 ? 17 : 1;
    for (uint32_t row = 0; row < rows; row += stride) {
      absl::Status same = Compare(layer, cached, first + row + 1, listed ? &lists[row] : nullptr,
                                  std::span(q).subspan(row * dims_.heads * dim),
                                  &o[row * dims_.heads * dim], &lse[row * dims_.heads]);
      if (!same.ok()) return same;
    }
  }
  return (*step)->End().status();
}

absl::Status WindowWorker::Compare(uint32_t layer, const WindowText::Layer& cached,
                                   uint64_t visible, const std::vector<int32_t>* list,
                                   std::span<const uint16_t> q, const float* o,
                                   const float* lse) const {
  const auto dim = static_cast<size_t>(dims_.row());
  Dims wide = dims_;
  wide.lora = dims_.row();  // all elements of a row are values
  wide.rope = 0;
  const size_t from = visible < kWindow ? 0 : (visible - kWindow) * dim;
  std::vector<uint16_t> keys(cached.rows.begin() + static_cast<int64_t>(from),
                             cached.rows.begin() + static_cast<int64_t>(visible * dim));
  const auto add = [&](uint64_t entry) {
    const auto at = cached.entries.begin() + static_cast<int64_t>(entry * dim);
    keys.insert(keys.end(), at, at + static_cast<int64_t>(dim));
  };
  for (uint64_t entry = 0; layer == 1 && list == nullptr && entry < visible / kRatio; ++entry) {
    add(entry);
  }
  if (list != nullptr) {
    for (const int32_t entry : *list) add(static_cast<uint64_t>(entry));
  }
  for (size_t head = 0; head < static_cast<size_t>(dims_.heads); ++head) {
    std::vector<double> query;
    for (size_t i = 0; i < dim; ++i) query.push_back(FromBf16(q[head * dim + i]));
    double want_lse = 0;
    const auto want =
        DenseAbsorbed(wide, keys, static_cast<int>(keys.size() / dim) - 1, query, &want_lse);
    if (!(std::abs(lse[head] - want_lse) <= kTolerance)) {
      return Differs(layer, visible - 1, head, lse[head], want_lse);
    }
    const double sink = sinks_[layer * dims_.heads + head];
    const double factor = 1 / (1 + std::exp(sink - want_lse));
    for (size_t i = 0; i < dim; ++i) {
      const double wanted = want[i] * factor;
      if (!(std::abs(o[head * dim + i] - wanted) <= kTolerance)) {
        return Differs(layer, visible - 1, head, o[head * dim + i], wanted);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace mla::integration
