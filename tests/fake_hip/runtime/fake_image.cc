#include "tests/fake_hip/runtime/fake_image.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string_view>

namespace mla::fake_hip {
namespace {

constexpr std::string_view kText = "fake image for ";

// Returns a library's length. A linker writes the section headers last.
size_t LibraryBytes(const void* bytes) {
  Elf64_Ehdr header;
  std::memcpy(&header, bytes, sizeof(header));
  return header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
}

const kernels::hip::host::Image* Open(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "fake runtime: %s\n", dlerror());
    return nullptr;
  }
  const auto get =
      reinterpret_cast<const kernels::hip::host::Image* (*)()>(dlsym(library, "mla_host_image"));
  return get == nullptr ? nullptr : get();
}

// Opens the library from a file in memory. The file stays open, because the loader distinguishes
// libraries by their paths.
const kernels::hip::host::Image* OpenLibrary(std::string_view library) {
  const int file = memfd_create("device code", 0);
  if (file < 0 ||
      write(file, library.data(), library.size()) != static_cast<ssize_t>(library.size())) {
    std::perror("fake runtime: device code");
    return nullptr;
  }
  return Open("/proc/self/fd/" + std::to_string(file));
}

}  // namespace

const kernels::hip::host::Image* LoadImage(const void* bytes, const std::string& arch) {
  static auto& opened = *new std::map<std::string, const kernels::hip::host::Image*, std::less<>>;
  const auto* const text = static_cast<const char*>(bytes);
  const bool library = std::memcmp(text, ELFMAG, SELFMAG) == 0;
  const std::string_view content(text, library ? LibraryBytes(bytes) : std::strlen(text));
  if (!library && content != std::string(kText) + arch) return nullptr;
  auto entry = opened.find(content);
  if (entry == opened.end()) {
    const kernels::hip::host::Image* const image =
        library ? OpenLibrary(content) : Open("kernels/hip/host_images/" + arch + ".so");
    entry = opened.emplace(content, image).first;
  }
  const kernels::hip::host::Image* const image = entry->second;
  return image != nullptr && arch == image->arch ? image : nullptr;
}

}  // namespace mla::fake_hip
