#include "kernels/hip/runtime/device_sharing.h"

#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "base/shared_library.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

// Equal in both vendors' headers.
constexpr int kPinned = 1;
constexpr int kPosixDescriptor = 1;
constexpr int kOnDevice = 1;
constexpr int kReadWrite = 3;
constexpr unsigned kEventWithoutTiming = 2;
constexpr unsigned kEventInterprocess = 4;
constexpr size_t kAllocationUnit = size_t{2} << 20;
// Attribute: memory of the virtual memory calls may be registered with network devices.
constexpr int kNvidiaRemoteReachesVirtual = 110;

struct Location {
  int type, id;
};
struct AllocationProperties {
  int type, handle_types;
  Location location;
  void* security;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
static_assert(sizeof(AllocationProperties) == 32);
struct Access {
  Location location;
  int flags;
};

}  // namespace

struct SharingTable {
  using Handle = SharedDeviceMemory::Handle;
  int (*uuid)(std::array<uint8_t, 16>*, int);
  int (*memory_handle)(Handle*, DevicePtr);
  int (*event_create)(Event*, unsigned);
  int (*event_handle)(Handle*, Event);
  int (*nvidia_attribute)(int*, int, int);  // null: not NVIDIA
  // These are the virtual memory calls; null if the library lacks them.
  int (*granularity)(size_t*, const AllocationProperties*, int);
  int (*create)(uint64_t*, size_t, const AllocationProperties*, unsigned long long);
  int (*release)(uint64_t);
  int (*export_descriptor)(void*, uint64_t, int, unsigned long long);
  int (*reserve)(DevicePtr*, size_t, size_t, DevicePtr, unsigned long long);
  int (*unreserve)(DevicePtr, size_t);
  int (*map)(DevicePtr, size_t, size_t, uint64_t, unsigned long long);
  int (*unmap)(DevicePtr, size_t);
  int (*set_access)(DevicePtr, size_t, const Access*, size_t);
};

// The destructor undoes the steps in reverse order, as far as they were done.
class SharedMemoryOfDevice final : public SharedDeviceMemory {
 public:
  SharedMemoryOfDevice(const DeviceSharing* sharing, std::shared_ptr<PinnedRanges> ranges,
                       std::chrono::milliseconds most)
      : sharing_(sharing), ranges_(std::move(ranges)), limit_(most) {}

  ~SharedMemoryOfDevice() override {
    const bool used =
        listed_ &&
        !ranges_->AwaitUnused(ranges_->Retire(reinterpret_cast<const void*>(address_)), limit_);
    // A launch that is lost still uses the memory, so it is leaked.
    if (used || !sharing_->runtime_->Bind().ok() || !WordsAreStored()) return;
    for (const Event event : events_) sharing_->runtime_->Destroy(event);
    if (words_ != nullptr) sharing_->runtime_->Destroy(words_);
    const SharingTable& api = *sharing_->api_;
    if (exported_.descriptor >= 0) close(exported_.descriptor);
    if (mapped_) (void)api.unmap(address_, size_);
    if (reserved_) (void)api.unreserve(address_, size_);
    if (created_) (void)api.release(handle_);
    if (allocated_) sharing_->runtime_->Free(address_);
  }

  absl::Status Make(int64_t bytes, int32_t events) {
    GpuRuntime& runtime = *sharing_->runtime_;
    exported_.nvidia = runtime.vendor() == Vendor::kNvidia;
    absl::Status s = runtime.Bind();
    if (s.ok()) {
      s = Check(sharing_->api_->uuid(&exported_.device_uuid, runtime.device()), "device uuid");
    }
    if (s.ok()) s = Take(bytes);
    if (s.ok()) s = Clear();
    if (s.ok()) s = MakeEvents(events);
    if (s.ok() && runtime.stores_words()) {
      absl::StatusOr<Stream> words = runtime.CreateStream();
      if (words.ok()) words_ = *words;
      s = words.status();
    }
    if (!s.ok()) return s;
    ranges_->Add(reinterpret_cast<const void*>(address_), static_cast<int64_t>(size_));
    listed_ = true;
    return s;
  }

  std::span<std::byte> bytes() const override {
    return {reinterpret_cast<std::byte*>(address_), size_};
  }
  const Export& exported() const override { return exported_; }
  absl::StatusOr<bool> Done(size_t event) override {
    return sharing_->runtime_->Done(events_[event]);
  }
  bool StoresWords() const override { return words_ != nullptr; }
  void StoreWord(uint32_t* word, uint32_t value) override {
    // If this fails, the device is lost, and so are the streams that wait for the word.
    (void)sharing_->runtime_->StoreWord(reinterpret_cast<DevicePtr>(word), value, words_);
  }

 private:
  // Returns false if the words are not stored within the time that a launch may take.
  bool WordsAreStored() const {
    if (words_ == nullptr) return true;
    GpuRuntime& runtime = *sharing_->runtime_;
    const absl::StatusOr<Event> stored = runtime.CreateEvent();
    if (!stored.ok()) return false;
    bool done = false;
    const auto end = std::chrono::steady_clock::now() + limit_;
    if (runtime.Record(*stored, words_).ok()) {
      for (absl::StatusOr<bool> now = false; now.ok() && !done; now = runtime.Done(*stored)) {
        done = *now;
        if (!done && std::chrono::steady_clock::now() >= end) break;
        if (!done) std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    runtime.Destroy(*stored);
    return done;
  }
  absl::Status Check(int code, const char* call) const { return sharing_->Check(code, call); }

  // Before ROCm 7.1, HIP's import call takes a pointer to the descriptor, not the descriptor. A
  // worker that does not know that would fail at the first byte, so handles are tried first there.
  absl::Status Take(int64_t bytes) {
    const GpuRuntime& runtime = *sharing_->runtime_;
    const bool exports = sharing_->api_->create != nullptr;
    const bool handle_first =
        runtime.vendor() == Vendor::kAmd && runtime.version() < kHipImportsByValue;
    if (exports && !handle_first) {
      const absl::Status s = TakeVirtual(static_cast<size_t>(bytes));
      if (s.ok() || absl::IsResourceExhausted(s)) return s;
      Untake();
    }
    const absl::Status s = TakeAllocation(static_cast<size_t>(bytes));
    if (s.ok() || absl::IsResourceExhausted(s) || !exports || !handle_first) return s;
    Untake();
    return TakeVirtual(static_cast<size_t>(bytes));
  }

  // A handle opens the whole allocation unit, so the memory takes whole units.
  absl::Status TakeAllocation(size_t bytes) {
    size_ = (bytes + kAllocationUnit - 1) / kAllocationUnit * kAllocationUnit;
    MLA_ASSIGN_OR_RETURN(address_, sharing_->runtime_->Malloc(static_cast<int64_t>(size_)));
    allocated_ = true;
    return Check(sharing_->api_->memory_handle(&exported_.memory, address_), "memory handle");
  }

  absl::Status TakeVirtual(size_t bytes) {
    const SharingTable& api = *sharing_->api_;
    const Location here{kOnDevice, sharing_->runtime_->device()};
    AllocationProperties properties = {};
    properties.type = kPinned;
    properties.handle_types = kPosixDescriptor;
    properties.location = here;
    // Such memory must be made for it (docs/rdma.md); drivers refuse the wish where none may reach.
    int reach = 0;
    const bool known = api.nvidia_attribute != nullptr &&
                       api.nvidia_attribute(&reach, kNvidiaRemoteReachesVirtual, here.id) == 0;
    properties.rdma = known && reach != 0 ? 1 : 0;
    size_t unit = 0;
    MLA_RETURN_IF_ERROR(Check(api.granularity(&unit, &properties, 0), "allocation granularity"));
    size_ = (bytes + unit - 1) / unit * unit;
    MLA_RETURN_IF_ERROR(Check(api.create(&handle_, size_, &properties, 0), "memory create"));
    created_ = true;
    MLA_RETURN_IF_ERROR(Check(api.reserve(&address_, size_, 0, 0, 0), "address reserve"));
    reserved_ = true;
    MLA_RETURN_IF_ERROR(Check(api.map(address_, size_, 0, handle_, 0), "memory map"));
    mapped_ = true;
    const Access access{here, kReadWrite};
    MLA_RETURN_IF_ERROR(Check(api.set_access(address_, size_, &access, 1), "memory access"));
    return Check(api.export_descriptor(&exported_.descriptor, handle_, kPosixDescriptor, 0),
                 "memory export");
  }

  // Undoes either attempt after it has failed halfway.
  void Untake() {
    const SharingTable& api = *sharing_->api_;
    if (std::exchange(mapped_, false)) (void)api.unmap(address_, size_);
    if (std::exchange(reserved_, false)) (void)api.unreserve(address_, size_);
    if (std::exchange(created_, false)) (void)api.release(handle_);
    if (std::exchange(allocated_, false)) sharing_->runtime_->Free(address_);
    exported_.descriptor = -1;
  }

  // The memory may hold another process's data, so it is zeroed.
  absl::Status Clear() {
    GpuRuntime& runtime = *sharing_->runtime_;
    MLA_ASSIGN_OR_RETURN(Stream stream, runtime.CreateStream());
    absl::Status s = runtime.Fill(address_, 0, static_cast<int64_t>(size_), stream);
    if (s.ok()) s = runtime.Synchronize(stream);
    runtime.Destroy(stream);
    return s;
  }

  absl::Status MakeEvents(int32_t count) {
    const SharingTable& api = *sharing_->api_;
    handles_.resize(static_cast<size_t>(count));
    for (Handle& handle : handles_) {
      Event event = nullptr;
      MLA_RETURN_IF_ERROR(Check(api.event_create(&event, kEventInterprocess | kEventWithoutTiming),
                                "event create"));
      events_.push_back(event);
      MLA_RETURN_IF_ERROR(Check(api.event_handle(&handle, event), "event handle"));
    }
    exported_.events = handles_;
    return absl::OkStatus();
  }

  const DeviceSharing* const sharing_;
  const std::shared_ptr<PinnedRanges> ranges_;
  const std::chrono::milliseconds limit_;
  Export exported_;
  DevicePtr address_ = 0;
  size_t size_ = 0;
  uint64_t handle_ = 0;
  bool created_ = false, reserved_ = false, mapped_ = false, allocated_ = false, listed_ = false;
  std::vector<Event> events_;
  Stream words_ = nullptr;  // null: words are not stored
  std::vector<Handle> handles_;
};

DeviceSharing::DeviceSharing(GpuRuntime* runtime, std::unique_ptr<SharingTable> table)
    : runtime_(runtime), api_(std::move(table)) {}
DeviceSharing::~DeviceSharing() = default;

absl::StatusOr<std::unique_ptr<DeviceSharing>> DeviceSharing::Open(GpuRuntime* runtime) {
  auto table = std::make_unique<SharingTable>();
  SymbolTable symbols = runtime->Symbols();
  const auto find = [&](const char* amd, const char* nvidia, auto** function) {
    symbols.Need(runtime->vendor() == Vendor::kAmd ? amd : nvidia, function);
  };
  find("hipDeviceGetUuid", "cuDeviceGetUuid_v2", &table->uuid);
  find("hipIpcGetMemHandle", "cuIpcGetMemHandle", &table->memory_handle);
  find("hipEventCreateWithFlags", "cuEventCreate", &table->event_create);
  find("hipIpcGetEventHandle", "cuIpcGetEventHandle", &table->event_handle);
  if (runtime->vendor() == Vendor::kNvidia) {
    symbols.Need("cuDeviceGetAttribute", &table->nvidia_attribute);
  }
  MLA_RETURN_IF_ERROR(symbols.Check("the GPU runtime"));
  find("hipMemGetAllocationGranularity", "cuMemGetAllocationGranularity", &table->granularity);
  find("hipMemCreate", "cuMemCreate", &table->create);
  find("hipMemRelease", "cuMemRelease", &table->release);
  find("hipMemExportToShareableHandle", "cuMemExportToShareableHandle", &table->export_descriptor);
  find("hipMemAddressReserve", "cuMemAddressReserve", &table->reserve);
  find("hipMemAddressFree", "cuMemAddressFree", &table->unreserve);
  find("hipMemMap", "cuMemMap", &table->map);
  find("hipMemUnmap", "cuMemUnmap", &table->unmap);
  find("hipMemSetAccess", "cuMemSetAccess", &table->set_access);
  if (symbols.missing() != nullptr) table->create = nullptr;
  return std::unique_ptr<DeviceSharing>(new DeviceSharing(runtime, std::move(table)));
}

absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> DeviceSharing::Allocate(
    int64_t bytes, int32_t events, std::shared_ptr<PinnedRanges> ranges,
    std::chrono::milliseconds most) {
  auto made = std::make_unique<SharedMemoryOfDevice>(this, std::move(ranges), most);
  MLA_RETURN_IF_ERROR(made->Make(bytes, events));
  return std::unique_ptr<SharedDeviceMemory>(std::move(made));
}

}  // namespace mla::kernels::hip
