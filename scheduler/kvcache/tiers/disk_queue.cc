#include "scheduler/kvcache/tiers/disk_queue.h"

#include <algorithm>
#include <utility>

namespace mla::kvcache {

DiskQueue::DiskQueue(TierFile* file, int32_t threads, Kind kind) : file_(file) {
  if (kind == Kind::kBest) ring_ = IoRing::Make(kMostAtOnce);
  if (ring_ != nullptr) {
    threads_.emplace_back([this] { RunRing(); });
    return;
  }
  for (int32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { RunThread(); });
}

DiskQueue::~DiskQueue() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    waiting_.clear();
    changed_.NotifyAll();
    changed_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return in_ring_ == 0; });
    while (ring_ != nullptr && !ring_->StartNothing(kStop)) std::this_thread::yield();
  }
  for (std::thread& thread : threads_) thread.join();
}

void DiskQueue::Start(DiskMove* move) {
  {
    const MutexLock lock(mutex_);
    waiting_.push_back(move);
  }
  ring_ == nullptr ? changed_.NotifyOne() : FillRing();
}

void DiskQueue::Finish(DiskMove* move, size_t done) {
  const int64_t offset = move->at + static_cast<int64_t>(done);
  const std::span<std::byte> rest = move->bytes.subspan(done);
  move->status = rest.empty()  ? absl::OkStatus()
                 : move->write ? file_->Write(offset, rest)
                               : file_->Read(offset, rest);
  move->done();
}

void DiskQueue::RunThread() {
  MutexLock lock(mutex_);
  while (true) {
    changed_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stopping_ || !waiting_.empty();
    });
    if (stopping_) return;
    DiskMove* const move = waiting_.front();
    waiting_.pop_front();
    lock.Unlock();
    Finish(move, 0);
    lock.Lock();
  }
}

void DiskQueue::RunRing() {
  while (true) {
    const IoRing::Ended ended = ring_->Next();
    if (ended.tag == kStop) return;
    {
      const MutexLock lock(mutex_);
      --in_ring_;
      changed_.NotifyAll();
    }
    FillRing();
    Finish(reinterpret_cast<DiskMove*>(ended.tag),
           static_cast<size_t>(std::max<int32_t>(ended.result, 0)));
  }
}

void DiskQueue::FillRing() {
  while (DiskMove* const refused = StartNext()) Finish(refused, 0);
}

DiskMove* DiskQueue::StartNext() {
  const MutexLock lock(mutex_);
  while (!waiting_.empty() && in_ring_ < kMostAtOnce) {
    DiskMove* const move = waiting_.front();
    waiting_.pop_front();
    const auto tag = reinterpret_cast<uint64_t>(move);
    const bool taken = move->write
                           ? ring_->StartWrite(file_->descriptor(), move->bytes, move->at, tag)
                           : ring_->StartRead(file_->descriptor(), move->bytes, move->at, tag);
    if (!taken) return move;
    ++in_ring_;
  }
  return nullptr;
}

}  // namespace mla::kvcache
