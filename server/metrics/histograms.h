// Holds every histogram of the server.
//
// All of them share one lock, so that all numbers of a launch are entered under it, each by two
// additions. A prometheus::Histogram takes a lock and several atomic operations for every number,
// which together took longer than many a launch.
//
// Threading: all methods from any thread. Observing allocates nothing.
#ifndef MLA_SERVER_METRICS_HISTOGRAMS_H_
#define MLA_SERVER_METRICS_HISTOGRAMS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "scheduler/engine.h"

namespace prometheus {
struct MetricFamily;
}

namespace mla::server {

// A cumulative histogram: counts[i] is the number of observations up to bounds[i], and the last
// count, one more than there are bounds, is that of all observations.
struct Distribution {
  std::vector<double> bounds;
  std::vector<uint64_t> counts;
};

// A request that a trace shows, kept with the bucket that counts it.
struct Exemplar {
  double value = 0;
  std::string trace_id;  // 32 hex digits
  double unix_seconds = 0;
};

// An exemplar, with the histogram and bucket that have it. `label`: the value of the histogram's
// label, or empty.
struct BucketExemplar {
  std::string family, label;
  size_t bucket = 0;
  Exemplar exemplar;
};

// Counts observations by bucket: each bucket has observations above the bound before it and up to
// its own bound; the last has the rest. Threading: its owner's lock.
class Histogram {
 public:
  using Label = std::pair<std::string, std::string>;

  // `bounds` are ascending. A histogram without a label has an empty label name.
  Histogram(const char* name, const std::vector<double>& bounds, Label label = {})
      : name_(name), label_(std::move(label)), bounds_(bounds), counts_(bounds.size() + 1) {}

  void Observe(double value) {
    ++counts_[BucketOf(value)];
    sum_ += value;
  }
  // Puts the exemplar in place of the one of its bucket. Allocates.
  void Show(Exemplar exemplar) {
    exemplars_.resize(counts_.size());
    Exemplar& slot = exemplars_[BucketOf(exemplar.value)];
    slot = std::move(exemplar);
  }
  const char* name() const { return name_; }
  const Label& label() const { return label_; }
  double sum() const { return sum_; }
  Distribution Get() const;
  // Returns an exemplar for each bucket, or none at all before Show. A bucket without one has an
  // empty trace id.
  const std::vector<Exemplar>& exemplars() const { return exemplars_; }

 private:
  size_t BucketOf(double value) const {
    size_t bucket = 0;
    while (bucket < bounds_.size() && value > bounds_[bucket]) ++bucket;
    return bucket;
  }

  const char* const name_;
  const Label label_;
  const std::vector<double> bounds_;
  std::vector<uint64_t> counts_;
  double sum_ = 0;
  std::vector<Exemplar> exemplars_;
};

class Histograms {
 public:
  Histograms();
  ~Histograms();

  void ObserveLaunch(const scheduler::LaunchReport& report);
  void ObserveRequest(const scheduler::RequestReport& report);
  void ObserveSequence(int64_t rows, int64_t open_ns);
  void ObservePageGroup(int64_t held_ns);

  // Shows a traced request in the histograms that it was counted in: durations of its kind, and
  // with `queue_ns` >= 0 the waits for a launch.
  void ShowTrace(scheduler::RequestKind kind, int64_t total_ns, int64_t queue_ns,
                 const std::string& trace_id, double unix_seconds);

  // Return seconds of Attend requests: inside the server, and from arrival to launch.
  Distribution AttendTimes() const;
  Distribution QueueTimes() const;
  // Appends one family for each name, without help texts.
  void Collect(std::vector<prometheus::MetricFamily>* families) const;
  std::vector<BucketExemplar> Exemplars() const;

 private:
  struct All;
  mutable Mutex mutex_;
  const std::unique_ptr<All> all_ ABSL_PT_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_METRICS_HISTOGRAMS_H_
