#include "client/cpp/shared_memory/block_list.h"

#include <algorithm>

#include "proto/wire/ring_layout.h"

namespace mla::client {

void BlockList::Add(uint64_t offset, uint64_t bytes) {
  const MutexLock lock(mutex_);
  free_[offset] = bytes;
}

std::optional<uint64_t> BlockList::Take(uint64_t bytes) {
  const uint64_t wanted = wire::AlignShared(std::max<uint64_t>(bytes, 1));
  const MutexLock lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < wanted) continue;
    const uint64_t offset = it->first, left = it->second - wanted;
    free_.erase(it);
    if (left > 0) free_[offset + wanted] = left;
    used_[offset] = wanted;
    return offset;
  }
  return std::nullopt;
}

void BlockList::Return(uint64_t at) {
  const MutexLock lock(mutex_);
  const auto used = used_.find(at);
  if (used == used_.end()) return;
  auto [offset, bytes] = *used;
  used_.erase(used);
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && offset + bytes == after->first) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

}  // namespace mla::client
