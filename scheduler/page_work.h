// Device work on pages that reservations asked for and no launch has carried yet, in the order it
// must happen.
#ifndef MLA_SCHEDULER_PAGE_WORK_H_
#define MLA_SCHEDULER_PAGE_WORK_H_

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "scheduler/kvcache/kv_cache.h"

namespace mla::scheduler {

// Owned by the engine role; keeps its capacity over Clear.
class PageWork {
 public:
  void Add(const kvcache::KvWork& work) { Append(work.pages, work.tables); }
  // Appends everything of `other`, which is later work.
  void Append(const PageWork& other) { Append(other.pages_, other.tables_); }
  // Moves the oldest work to the end of `other`: at most so many ranges of pages and of tables.
  void TakeFront(size_t pages, size_t tables, PageWork& other) {
    pages = std::min(pages, pages_.size());
    tables = std::min(tables, tables_.size());
    other.Append({pages_.data(), pages}, {tables_.data(), tables});
    pages_.erase(pages_.begin(), pages_.begin() + static_cast<std::ptrdiff_t>(pages));
    tables_.erase(tables_.begin(), tables_.begin() + static_cast<std::ptrdiff_t>(tables));
  }
  std::span<const kernels::PageRange> pages() const { return pages_; }
  std::span<const kernels::TableRange> tables() const { return tables_; }
  bool empty() const { return pages_.empty() && tables_.empty(); }
  size_t operations() const { return pages_.size() + tables_.size(); }
  void Clear() {
    pages_.clear();
    tables_.clear();
  }
  void Swap(PageWork& other) {
    pages_.swap(other.pages_);
    tables_.swap(other.tables_);
  }

 private:
  void Append(std::span<const kernels::PageRange> pages,
              std::span<const kernels::TableRange> tables) {
    pages_.insert(pages_.end(), pages.begin(), pages.end());
    tables_.insert(tables_.end(), tables.begin(), tables.end());
  }

  std::vector<kernels::PageRange> pages_;
  std::vector<kernels::TableRange> tables_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_PAGE_WORK_H_
