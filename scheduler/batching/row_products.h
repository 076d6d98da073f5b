// Counts the weights by which a launch multiplies whole rows of PROJECTED. A GPU has several
// kernels for each model and layer, and predictions of a launch's time do not have them.
#ifndef MLA_SCHEDULER_BATCHING_ROW_PRODUCTS_H_
#define MLA_SCHEDULER_BATCHING_ROW_PRODUCTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "scheduler/request.h"
#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

class RowProducts {
 public:
  // A launch has at most this number of pairs of model and layer.
  static constexpr size_t kMost = 32;

  // Returns false if a launch that takes the request would have too many.
  bool Fits(const StreamRequest& request) const {
    return weights_.size() < kMost || !Projects(request) || Has(Of(request));
  }
  void Add(const StreamRequest& request) {
    if (Projects(request) && !Has(Of(request))) weights_.push_back(Of(request));
  }
  void clear() { weights_.clear(); }

 private:
  struct Weights {
    const ModelContents* model;
    int32_t layer;
    friend bool operator==(const Weights&, const Weights&) = default;
  };
  static bool Projects(const StreamRequest& request) {
    return request.attend.profile == Profile::kProjected;
  }
  static Weights Of(const StreamRequest& request) {
    return {request.engine.step->model->contents.get(), request.attend.layer};
  }
  bool Has(const Weights& one) const {
    return std::find(weights_.begin(), weights_.end(), one) != weights_.end();
  }

  std::vector<Weights> weights_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_ROW_PRODUCTS_H_
