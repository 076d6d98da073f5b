#include "scheduler/kvcache/tiers/io_ring.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace mla::kvcache {
namespace {

int Enter(int ring, uint32_t submit, uint32_t wait) {
  const uint32_t flags = wait > 0 ? IORING_ENTER_GETEVENTS : 0;
  return static_cast<int>(syscall(__NR_io_uring_enter, ring, submit, wait, flags, nullptr, 0));
}

}  // namespace

bool IoRing::Mapping::Map(int ring, size_t size, int64_t offset) {
  void* const got =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, offset);
  if (got == MAP_FAILED) return false;
  data = got;
  bytes = size;
  return true;
}

IoRing::Mapping::~Mapping() {
  if (data != nullptr) munmap(data, bytes);
}

std::unique_ptr<IoRing> IoRing::Make(uint32_t entries) {
  std::unique_ptr<IoRing> ring(new IoRing);
  return ring->Prepare(entries) ? std::move(ring) : nullptr;
}

bool IoRing::Prepare(uint32_t entries) {
  io_uring_params about = {};
  ring_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &about));
  // Kernels since 5.4 map both queues at once; those without reads by address (before 5.6) answer
  // them with EINVAL, which the caller handles as any fault of the ring.
  if (ring_ < 0 || (about.features & IORING_FEAT_SINGLE_MMAP) == 0) return false;
  const size_t started = about.sq_off.array + about.sq_entries * sizeof(uint32_t);
  const size_t ended = about.cq_off.cqes + about.cq_entries * sizeof(io_uring_cqe);
  if (!queues_.Map(ring_, std::max(started, ended), IORING_OFF_SQ_RING) ||
      !entries_.Map(ring_, about.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) {
    return false;
  }
  tail_ = queues_.At<uint32_t>(about.sq_off.tail);
  array_ = queues_.At<uint32_t>(about.sq_off.array);
  mask_ = *queues_.At<uint32_t>(about.sq_off.ring_mask);
  ended_head_ = queues_.At<uint32_t>(about.cq_off.head);
  ended_tail_ = queues_.At<uint32_t>(about.cq_off.tail);
  ended_mask_ = *queues_.At<uint32_t>(about.cq_off.ring_mask);
  ended_ = queues_.At<io_uring_cqe>(about.cq_off.cqes);
  return true;
}

IoRing::~IoRing() {
  if (ring_ >= 0) close(ring_);
}

io_uring_sqe* IoRing::Entry() {
  const uint32_t place = *tail_ & mask_;
  array_[place] = place;
  io_uring_sqe* const entry = entries_.At<io_uring_sqe>(0) + place;
  std::memset(entry, 0, sizeof(*entry));
  return entry;
}

// The entry is taken at once, so the next finds its place free.
bool IoRing::Submit() {
  const std::atomic_ref<uint32_t> tail(*tail_);
  tail.fetch_add(1, std::memory_order_release);
  int taken;
  do {
    taken = Enter(ring_, 1, 0);
  } while (taken < 0 && errno == EINTR);
  if (taken == 1) return true;
  tail.fetch_sub(1, std::memory_order_release);
  return false;
}

bool IoRing::StartRead(int file, std::span<std::byte> to, int64_t at, uint64_t tag) {
  io_uring_sqe* const entry = Entry();
  entry->opcode = IORING_OP_READ;
  entry->fd = file;
  entry->addr = reinterpret_cast<uintptr_t>(to.data());
  entry->len = static_cast<uint32_t>(to.size());
  entry->off = static_cast<uint64_t>(at);
  entry->user_data = tag;
  return Submit();
}

bool IoRing::StartWrite(int file, std::span<const std::byte> from, int64_t at, uint64_t tag) {
  io_uring_sqe* const entry = Entry();
  entry->opcode = IORING_OP_WRITE;
  entry->fd = file;
  entry->addr = reinterpret_cast<uintptr_t>(from.data());
  entry->len = static_cast<uint32_t>(from.size());
  entry->off = static_cast<uint64_t>(at);
  entry->user_data = tag;
  return Submit();
}

bool IoRing::StartNothing(uint64_t tag) {
  io_uring_sqe* const entry = Entry();
  entry->opcode = IORING_OP_NOP;
  entry->user_data = tag;
  return Submit();
}

IoRing::Ended IoRing::Next() {
  const std::atomic_ref<uint32_t> head(*ended_head_), tail(*ended_tail_);
  const uint32_t at = head.load(std::memory_order_relaxed);
  while (tail.load(std::memory_order_acquire) == at) Enter(ring_, 0, 1);
  const io_uring_cqe& entry = ended_[at & ended_mask_];
  const Ended ended = {entry.user_data, entry.res};
  head.store(at + 1, std::memory_order_release);
  return ended;
}

}  // namespace mla::kvcache
