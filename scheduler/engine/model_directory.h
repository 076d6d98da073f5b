// ModelDirectory finds registered models by tenant and id, for callers that must not wait for the
// engine role: transports look up the model once a step, to size its requests.
//
// Threading: any thread; a lock is held for each look-up.
#ifndef MLA_SCHEDULER_ENGINE_MODEL_DIRECTORY_H_
#define MLA_SCHEDULER_ENGINE_MODEL_DIRECTORY_H_

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "scheduler/model.h"

namespace mla::scheduler {

class ModelDirectory {
 public:
  using Entry = std::pair<std::string, std::shared_ptr<const ModelSpec>>;  // tenant, model

  // Replaces an entry of the same tenant and id.
  void Put(const std::string& tenant, std::shared_ptr<const ModelSpec> spec) {
    const MutexLock lock(mutex_);
    const std::string key = KeyOf(tenant, spec->id);
    models_[key] = {tenant, std::move(spec)};
  }
  void Erase(const std::string& tenant, const std::string& id) {
    const MutexLock lock(mutex_);
    models_.erase(KeyOf(tenant, id));
  }
  // Returns null if the tenant does not have such a model. Allocates nothing in the steady state:
  // it is called for every step.
  std::shared_ptr<const ModelSpec> Find(const std::string& tenant, const std::string& id) const {
    thread_local std::string key;
    key.clear();
    absl::StrAppend(&key, tenant.size(), ":", tenant, id);
    const MutexLock lock(mutex_);
    const auto found = models_.find(key);
    return found == models_.end() ? nullptr : found->second.second;
  }
  // Returns all models, sorted by tenant and id.
  std::vector<Entry> All() const {
    std::vector<Entry> entries;
    {
      const MutexLock lock(mutex_);
      for (const auto& [key, entry] : models_) entries.push_back(entry);
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::tie(a.first, a.second->id) < std::tie(b.first, b.second->id);
    });
    return entries;
  }

 private:
  // The tenant's length comes first because names may hold any character.
  static std::string KeyOf(const std::string& tenant, const std::string& id) {
    return absl::StrCat(tenant.size(), ":", tenant, id);
  }

  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, Entry> models_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_MODEL_DIRECTORY_H_
