#include "tests/fake_hip/runtime/fake_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <new>
#include <string>

#include "tests/fake_hip/runtime/fake_state.h"
#include "tests/fake_hip/runtime/shared_event.h"

namespace mla::fake_hip {
namespace {

constexpr size_t kUnit = size_t{2} << 20;
constexpr size_t kGuard = 4096;
constexpr std::align_val_t kAlignment{256};
constexpr int kOutOfMemory = 2;

bool Shareable(size_t bytes) { return bytes > 0 && bytes % kUnit == 0; }

struct Piece {
  size_t bytes;
  int file = -1;  // the file that other processes map
};
// Memory that can be shared, by address, and sizes of other processes' memory, by address.
struct Mapped {
  std::map<void*, Piece> own;
  std::map<void*, size_t> opened;
};
Mapped& Maps() {
  static Mapped& maps = *new Mapped;
  return maps;
}

// Maps `bytes` bytes followed by a guard page. Maps the file unless `file` is -1.
void* Map(int file, size_t bytes) {
  void* const at =
      mmap(nullptr, bytes + kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file, 0) != MAP_FAILED) return at;
  munmap(at, bytes + kGuard);
  return nullptr;
}

// Moves the memory at `at` to a file and maps the file there. Returns true on success.
bool MoveToFile(void* at, Piece* piece) {
  const int file = memfd_create("fake-device-memory", MFD_CLOEXEC);
  if (file < 0) return false;
  const auto bytes = static_cast<ssize_t>(piece->bytes);
  if (pwrite(file, at, piece->bytes, 0) != bytes ||
      mmap(at, piece->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) ==
          MAP_FAILED) {
    close(file);
    return false;
  }
  piece->file = file;
  return true;
}

}  // namespace

void* TakeMemory(size_t bytes) {
  if (!Shareable(bytes)) return ::operator new(bytes, kAlignment);
  void* const at = Map(-1, bytes);
  if (at != nullptr) Maps().own[at] = {bytes};
  return at;
}

void GiveMemory(void* at, size_t bytes) {
  if (!Shareable(bytes)) return ::operator delete(at, kAlignment);
  const auto found = Maps().own.find(at);
  if (found->second.file >= 0) close(found->second.file);
  Maps().own.erase(found);
  munmap(at, bytes + kGuard);
}

}  // namespace mla::fake_hip

namespace fake = mla::fake_hip;
using mla::fake_hip::Enter;
using mla::fake_hip::State;

extern "C" {

int hipIpcGetMemHandle(fake::SharedHandle* handle, void* at) {
  FAKE_ENTER("hipIpcGetMemHandle");
  const auto found = fake::Maps().own.find(at);
  if (found == fake::Maps().own.end()) return fake::kInvalidValue;
  fake::Piece& piece = found->second;
  if (piece.file < 0 && !fake::MoveToFile(at, &piece)) return fake::kOutOfMemory;
  *handle = {};
  std::snprintf(handle->data(), handle->size(), "/proc/%d/fd/%d", getpid(), piece.file);
  return 0;
}
int hipIpcOpenMemHandle(void** at, fake::SharedHandle handle, unsigned) {
  FAKE_ENTER("hipIpcOpenMemHandle");
  const std::string name(handle.data(), strnlen(handle.data(), handle.size()));
  const int file = open(name.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return fake::kInvalidValue;
  struct stat status;
  const size_t bytes = fstat(file, &status) == 0 ? static_cast<size_t>(status.st_size) : 0;
  *at = bytes > 0 ? fake::Map(file, bytes) : nullptr;
  close(file);
  if (*at == nullptr) return fake::kInvalidValue;
  fake::Maps().opened[*at] = bytes;
  return 0;
}
int hipIpcCloseMemHandle(void* at) {
  FAKE_ENTER("hipIpcCloseMemHandle");
  const auto found = fake::Maps().opened.find(at);
  if (found == fake::Maps().opened.end()) return fake::kInvalidValue;
  munmap(at, found->second + fake::kGuard);
  fake::Maps().opened.erase(found);
  return 0;
}

}  // extern "C"
