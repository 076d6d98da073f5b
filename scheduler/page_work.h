// Device work on pages that reservations asked for and no launch has carried yet, in the order it
// must happen.
//
// The work of one reservation may run in any order, that of different ones may not. Parts keep
// this: inside one part copies go before scrubs (a page may be freed and promised to another tenant
// after it was copied from), and work with copies after other copies or scrubs starts a new part.
#ifndef MLA_SCHEDULER_PAGE_WORK_H_
#define MLA_SCHEDULER_PAGE_WORK_H_

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "scheduler/kvcache/kv_cache.h"

namespace mla::scheduler {

// Owned by the engine role; keeps its capacity over Clear.
class PageWork {
 public:
  void Add(const kvcache::KvWork& work) {
    const bool after_others =
        used_ > 0 && (!parts_[used_ - 1].copies.empty() || !parts_[used_ - 1].scrubs.empty());
    if (used_ == 0 || (!work.copies.empty() && after_others)) {
      if (used_ == parts_.size()) parts_.emplace_back();
      parts_[used_++].Clear();
    }
    kvcache::KvWork& last = parts_[used_ - 1];
    last.copies.insert(last.copies.end(), work.copies.begin(), work.copies.end());
    last.scrubs.insert(last.scrubs.end(), work.scrubs.begin(), work.scrubs.end());
    last.tables.insert(last.tables.end(), work.tables.begin(), work.tables.end());
  }
  // Appends everything of `other`, which is later work.
  void Append(const PageWork& other) {
    for (const kvcache::KvWork& part : other.parts()) Add(part);
  }
  std::span<const kvcache::KvWork> parts() const { return {parts_.data(), used_}; }
  bool empty() const { return used_ == 0; }
  size_t operations() const {
    size_t count = 0;
    for (const kvcache::KvWork& part : parts()) {
      count += part.copies.size() + part.scrubs.size() + part.tables.size();
    }
    return count;
  }
  void Clear() { used_ = 0; }
  void Swap(PageWork& other) {
    parts_.swap(other.parts_);
    std::swap(used_, other.used_);
  }

 private:
  std::vector<kvcache::KvWork> parts_;
  size_t used_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PAGE_WORK_H_
