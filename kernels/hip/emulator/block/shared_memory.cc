#include "kernels/hip/emulator/block/shared_memory.h"

#include <cstring>
#include <new>

#include "kernels/hip/emulator/block/block.h"

namespace mla::kernels::hip::host {
namespace {

constexpr size_t kAlignment = 1024;  // the swizzle of sm_90 assumes a multiple of 1 KiB
constexpr int kNaN = 0xff;           // for every byte: a NaN in bf16 and in fp32

}  // namespace

void CopyQueue::Add(const Copy& copy) {
  if (count_ == kMost) Fault("more copies on their way than the host keeps");
  ring_[(first_ + count_++) % kMost] = copy;
  bytes_ += copy.bytes;
}

void CopyQueue::DropOldest() {
  bytes_ -= oldest().bytes;
  first_ = (first_ + 1) % kMost;
  --count_;
}

void SharedMemory::Delete::operator()(char* memory) const {
  ::operator delete(memory, std::align_val_t{kAlignment});
}

void SharedMemory::Reset() {
  copies_only_ = false;
  taken_ = false;
  interval_ = 1;
}

char* SharedMemory::Base(size_t bytes) {
  if (taken_) {
    if (bytes != bytes_) Fault("lanes of a block take shared memory of two sizes");
    return memory_.get();
  }
  taken_ = true;
  if (memory_ == nullptr || bytes_ != bytes) {
    // Allocates exactly `bytes`, so that the address sanitizer sees accesses beyond them.
    memory_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{kAlignment})));
    bytes_ = bytes;
  }
  std::memset(memory_.get(), kNaN, bytes);
  words_.assign((bytes + 3) / 4, Word());
  return memory_.get();
}

SharedMemory::Word* SharedMemory::Words(const void* at, size_t bytes, const char* what,
                                        size_t* count) {
  const auto offset = static_cast<const char*>(at) - memory_.get();
  if (!taken_ || offset < 0 || static_cast<size_t>(offset) + bytes > bytes_) {
    Fault("%s at %td of %zu bytes of shared memory", what, offset, bytes_);
  }
  const size_t aligned = bytes < 16 ? bytes : 16;
  if (static_cast<size_t>(offset) % aligned != 0) {
    Fault("%s of %zu bytes at %td of shared memory is not aligned", what, bytes, offset);
  }
  *count = (bytes + 3) / 4;
  return &words_[static_cast<size_t>(offset) / 4];
}

void SharedMemory::Describe(const char* what, const void* at, int wave, int other) const {
  const auto offset = static_cast<const char*>(at) - memory_.get();
  Fault("wave %d %s wave %d with no barrier between them, at %td of shared memory", wave, what,
        other, offset);
}

void SharedMemory::Read(const void* address, size_t bytes, int wave) {
  size_t count = 0;
  Word* const words = Words(address, bytes, "a read", &count);
  for (size_t i = 0; i < count; ++i) {
    Word& w = words[i];
    if (w.in_flight) Fault("a read of a word before its copy has landed");
    if (copies_only_) continue;
    if (w.written == interval_ && w.writer != wave)
      Describe("reads a word written by", address, wave, w.writer);
    if (w.read != interval_) {
      w.read = interval_;
      w.readers = 0;
    }
    w.readers = static_cast<uint16_t>(w.readers | 1u << wave);
  }
}

void SharedMemory::Write(const void* address, size_t bytes, int wave) {
  size_t count = 0;
  Word* const words = Words(address, bytes, "a write", &count);
  for (size_t i = 0; i < count; ++i) {
    Word& w = words[i];
    if (w.in_flight) Fault("a write to a word before its copy has landed");
    if (copies_only_) continue;
    if (w.written == interval_ && w.writer != wave)
      Describe("writes a word written by", address, wave, w.writer);
    if (w.read == interval_ && (w.readers & ~(1u << wave)) != 0) {
      Describe("writes a word read by", address, wave, __builtin_ctz(w.readers & ~(1u << wave)));
    }
    w.written = interval_;
    w.writer = static_cast<uint8_t>(wave);
  }
}

void SharedMemory::Update(const void* address, size_t bytes, int wave) {
  size_t count = 0;
  Word* const words = Words(address, bytes, "an update", &count);
  for (size_t i = 0; i < count; ++i) {
    if (words[i].written != interval_ || words[i].writer != kUpdates) Write(address, bytes, wave);
    words[i].writer = kUpdates;
  }
}

void SharedMemory::StartCopy(CopyQueue& queue, void* target, const void* from, int bytes, int wave,
                             int turn) {
  const auto size = static_cast<size_t>(bytes);
  Write(target, size, wave);
  size_t count = 0;
  Word* const words = Words(target, size, "a copy", &count);
  for (size_t i = 0; i < count; ++i) words[i].in_flight = true;
  std::memset(target, kNaN, size);
  queue.Add({static_cast<char*>(target), from, bytes, queue.open_group(), turn});
}

void SharedMemory::Land(CopyQueue& queue, int wave) {
  const CopyQueue::Copy copy = queue.oldest();
  const auto size = static_cast<size_t>(copy.bytes);
  size_t count = 0;
  Word* const words = Words(copy.to, size, "a copy", &count);
  for (size_t i = 0; i < count; ++i) {
    words[i].in_flight = false;
    words[i].written = interval_;
    words[i].writer = static_cast<uint8_t>(wave);
  }
  if (copy.from == nullptr) {
    std::memset(copy.to, 0, size);
  } else if (copy.turn == 0) {
    std::memcpy(copy.to, copy.from, size);
  } else {
    constexpr size_t kChunk = 16;
    for (size_t at = 0; at < size; at += kChunk) {
      const size_t place = at ^ static_cast<size_t>(copy.turn) * kChunk;
      std::memcpy(copy.to + place, static_cast<const char*>(copy.from) + at, kChunk);
    }
  }
  queue.DropOldest();
}

void SharedMemory::LandAllBut(CopyQueue& queue, int younger, int wave) {
  while (queue.count() > younger) Land(queue, wave);
}

void SharedMemory::LandBefore(CopyQueue& queue, uint64_t group, int wave) {
  while (queue.count() > 0 && queue.oldest().group < group) Land(queue, wave);
}

}  // namespace mla::kernels::hip::host
