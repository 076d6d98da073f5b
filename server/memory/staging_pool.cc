#include "server/memory/staging_pool.h"

#include <bit>
#include <utility>

namespace mla::server {

StagingPool::Block& StagingPool::Block::operator=(Block&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  pool_ = std::exchange(other.pool_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  order_ = other.order_;
  return *this;
}

void StagingPool::Block::Reset() {
  if (data_ != nullptr) pool_->Return(data_, order_);
  data_ = nullptr;
  size_ = 0;
}

StagingPool::StagingPool(std::unique_ptr<kernels::HostBuffer> memory) : memory_(std::move(memory)) {
  const std::span<std::byte> bytes = memory_->bytes();
  base_ = bytes.data();
  units_ = bytes.size() / kUnit;
  unit_.resize(units_);
  free_.assign(static_cast<size_t>(std::bit_width(units_)), kNone);
  // Divides the region into the largest aligned powers of two.
  uint32_t offset = 0;
  for (int order = std::bit_width(units_) - 1; order >= 0; --order) {
    if ((units_ >> order) & 1) {
      PushFree(offset, static_cast<uint8_t>(order));
      offset += uint32_t{1} << order;
    }
  }
}

uint8_t StagingPool::OrderFor(size_t bytes) {
  const size_t units = (bytes + kUnit - 1) / kUnit;
  return static_cast<uint8_t>(std::bit_width(units - 1));
}

void StagingPool::PushFree(uint32_t unit, uint8_t order) {
  unit_[unit] = {free_[order], kNone, static_cast<int8_t>(order)};
  if (free_[order] != kNone) unit_[free_[order]].prev = unit;
  free_[order] = unit;
}

void StagingPool::RemoveFree(uint32_t unit, uint8_t order) {
  const Unit& node = unit_[unit];
  if (node.prev != kNone) {
    unit_[node.prev].next = node.next;
  } else {
    free_[order] = node.next;
  }
  if (node.next != kNone) unit_[node.next].prev = node.prev;
  unit_[unit] = {};
}

StagingPool::Block StagingPool::Take(size_t bytes) {
  Block block;
  if (bytes == 0 || bytes > total_bytes()) return block;
  const uint8_t wanted = OrderFor(bytes);
  const MutexLock lock(mutex_);
  size_t order = wanted;
  while (order < free_.size() && free_[order] == kNone) ++order;
  if (order >= free_.size()) return block;
  const uint32_t unit = free_[order];
  RemoveFree(unit, static_cast<uint8_t>(order));
  while (order > wanted) {
    --order;
    PushFree(unit + (uint32_t{1} << order), static_cast<uint8_t>(order));
  }
  used_bytes_ += kUnit << wanted;
  block.pool_ = this;
  block.data_ = base_ + size_t{unit} * kUnit;
  block.size_ = bytes;
  block.order_ = wanted;
  return block;
}

void StagingPool::Return(std::byte* data, uint8_t order) {
  const MutexLock lock(mutex_);
  used_bytes_ -= kUnit << order;
  ++releases_;
  auto unit = static_cast<uint32_t>(static_cast<size_t>(data - base_) / kUnit);
  // Blocks are aligned to their size from the start of the region, so the offset of a block's buddy
  // differs in one bit.
  for (;;) {
    const uint32_t buddy = unit ^ (uint32_t{1} << order);
    if (buddy >= units_ || unit_[buddy].free_order != static_cast<int8_t>(order)) break;
    RemoveFree(buddy, order);
    unit &= buddy;
    ++order;
  }
  PushFree(unit, order);
}

uint64_t StagingPool::releases() const {
  const MutexLock lock(mutex_);
  return releases_;
}

size_t StagingPool::used_bytes() const {
  const MutexLock lock(mutex_);
  return used_bytes_;
}

}  // namespace mla::server
