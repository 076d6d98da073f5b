#include "scheduler/kvcache/tiers/io_ring.h"

#include <liburing.h>

#include <utility>

namespace mla::kvcache {
namespace {

// Tag of entries that the kernel did not take when they were started. They stay in the queue, so
// they must do nothing when the next start brings them to the kernel.
constexpr uint64_t kRefused = ~uint64_t{0};

bool ReadsAndWrites(io_uring* ring) {
  io_uring_probe* const probe = io_uring_get_probe_ring(ring);
  if (probe == nullptr) return false;
  const bool can = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                   io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  io_uring_free_probe(probe);
  return can;
}

}  // namespace

std::unique_ptr<IoRing> IoRing::Make(uint32_t entries) {
  auto ring = std::make_unique<io_uring>();
  if (io_uring_queue_init(entries, ring.get(), 0) != 0) return nullptr;
  std::unique_ptr<IoRing> made(new IoRing(std::move(ring)));
  return ReadsAndWrites(made->ring_.get()) ? std::move(made) : nullptr;
}

IoRing::IoRing(std::unique_ptr<io_uring> ring) : ring_(std::move(ring)) {}

IoRing::~IoRing() { io_uring_queue_exit(ring_.get()); }

io_uring_sqe* IoRing::Entry() {
  io_uring_sqe* const entry = io_uring_get_sqe(ring_.get());
  if (entry != nullptr) return entry;
  io_uring_submit(ring_.get());  // refused ones fill the queue
  return io_uring_get_sqe(ring_.get());
}

bool IoRing::Submit(io_uring_sqe* entry, uint64_t tag) {
  io_uring_sqe_set_data64(entry, tag);
  int taken;
  do {
    taken = io_uring_submit(ring_.get());
  } while (taken == -EINTR);
  if (io_uring_sq_ready(ring_.get()) == 0) return true;
  io_uring_prep_nop(entry);
  io_uring_sqe_set_data64(entry, kRefused);
  return false;
}

bool IoRing::StartRead(int file, std::span<std::byte> buffer, int64_t offset, uint64_t tag) {
  io_uring_sqe* const entry = Entry();
  if (entry == nullptr) return false;
  io_uring_prep_read(entry, file, buffer.data(), static_cast<unsigned>(buffer.size()),
                     static_cast<uint64_t>(offset));
  return Submit(entry, tag);
}

bool IoRing::StartWrite(int file, std::span<const std::byte> from, int64_t offset, uint64_t tag) {
  io_uring_sqe* const entry = Entry();
  if (entry == nullptr) return false;
  io_uring_prep_write(entry, file, from.data(), static_cast<unsigned>(from.size()),
                      static_cast<uint64_t>(offset));
  return Submit(entry, tag);
}

bool IoRing::StartNothing(uint64_t tag) {
  io_uring_sqe* const entry = Entry();
  if (entry == nullptr) return false;
  io_uring_prep_nop(entry);
  return Submit(entry, tag);
}

IoRing::Ended IoRing::Next() {
  while (true) {
    io_uring_cqe* entry = nullptr;
    if (io_uring_wait_cqe(ring_.get(), &entry) != 0) continue;  // a signal, for instance
    const Ended ended = {entry->user_data, entry->res};
    io_uring_cqe_seen(ring_.get(), entry);
    if (ended.tag != kRefused) return ended;
  }
}

}  // namespace mla::kvcache
