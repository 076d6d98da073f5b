#include "kernels/hip/runtime/gpu_runtime.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/shared_library.h"
#include "base/status_macros.h"
#include "kernels/hip/runtime/call_watch.h"
#include "kernels/hip/runtime/runtime_table.h"

namespace mla::kernels::hip {
namespace {

// The values below are equal in both vendors' headers, except those with a vendor's name.
constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;
constexpr int kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kNvidiaRegisterMapped = 2;
constexpr int kAmdMultiprocessorCount = 63;
constexpr int kAmdHostPointersReach = 4;  // registered memory at the host's addresses
constexpr int kNvidiaMultiprocessorCount = 16;
constexpr int kNvidiaCapabilityMajor = 75;
constexpr int kNvidiaCapabilityMinor = 76;
constexpr int kNvidiaHostPointersReach = 91;  // registered memory at the host's addresses
constexpr int kNvidiaMaxDynamicShared = 8;
constexpr unsigned kNvidiaCooperative = 2;
constexpr unsigned kNvidiaProgrammaticSerialization = 6;
constexpr int kAmdHostToDevice = 1;
constexpr int kAmdDeviceToHost = 2;
constexpr int kAmdDeviceToDevice = 3;
constexpr unsigned kNvidiaHostMemory = 1, kNvidiaDeviceMemory = 2;

}  // namespace

absl::StatusOr<std::unique_ptr<GpuRuntime>> GpuRuntime::OpenLibrary(
    Vendor vendor, std::span<const std::string> libraries) {
  const std::vector<std::string> names = libraries.empty()
                                             ? RuntimeLibraries(vendor, "")
                                             : std::vector(libraries.begin(), libraries.end());
  MLA_ASSIGN_OR_RETURN(const SharedLibrary opened,
                       OpenSharedLibrary(names, LoadedCopy::kIgnore, "no GPU runtime"));
  auto table = std::make_unique<RuntimeTable>();
  MLA_RETURN_IF_ERROR(FindEntryPoints(vendor, opened.handle, table.get()));
  return std::unique_ptr<GpuRuntime>(
      new GpuRuntime(vendor, opened.name, opened.handle, std::move(table)));
}

absl::StatusOr<std::unique_ptr<GpuRuntime>> GpuRuntime::Open(
    Vendor vendor, int device, std::span<const std::string> libraries) {
  MLA_ASSIGN_OR_RETURN(auto runtime, OpenLibrary(vendor, libraries));
  MLA_RETURN_IF_ERROR(runtime->OpenDevice(device));
  return runtime;
}

absl::StatusOr<FoundRuntime> GpuRuntime::Find(Vendor vendor,
                                              std::span<const std::string> libraries) {
  MLA_ASSIGN_OR_RETURN(auto runtime, OpenLibrary(vendor, libraries));
  const absl::StatusOr<int> count = runtime->CountDevices();
  FoundRuntime result{runtime->library_, runtime->version_, count.status(), {}};
  for (int device = 0; count.ok() && device < *count; ++device) {
    runtime->device_ = device;
    runtime->name_ = runtime->arch_ = "unknown";
    if (absl::Status status = runtime->Identify(); !status.ok()) {
      runtime->name_ = std::string(status.message());
    }
    result.devices.push_back({runtime->name_, runtime->arch_});
  }
  return result;
}

GpuRuntime::GpuRuntime(Vendor vendor, std::string name, void* library,
                       std::unique_ptr<RuntimeTable> table)
    : vendor_(vendor), library_(std::move(name)), opened_(library), api_(std::move(table)) {}

GpuRuntime::~GpuRuntime() = default;

absl::Status GpuRuntime::Check(int code, const char* call) const {
  if (code == kSuccess) return absl::OkStatus();
  const char* text = nullptr;
  if (vendor_ == Vendor::kAmd) {
    text = api_->amd_error_text(code);
  } else {
    api_->nvidia_error_text(code, &text);
  }
  const std::string message =
      absl::StrCat("GPU ", call, ": ", text == nullptr ? "unknown error" : text, " (", code, ")");
  return code == kOutOfMemory ? absl::ResourceExhaustedError(message)
                              : absl::InternalError(message);
}

absl::StatusOr<int> GpuRuntime::CountDevices() {
  int count = 0;
  absl::Status status = Check(api_->init(0), "init");
  if (vendor_ == Vendor::kAmd) {
    // A runtime may say which it is although it finds no device.
    absl::Status version = Check(api_->amd_version(&version_), "runtime version");
    if (version.ok()) MLA_RETURN_IF_ERROR(CheckRocm(version_, library_));
    if (!version.ok()) version_ = 0;
    if (status.ok()) status = std::move(version);
  }
  if (status.ok()) status = Check(api_->device_count(&count), "device count");
  if (status.ok() && count > 0) return count;
  return absl::UnavailableError(
      absl::StrCat("no GPU device (", library_, ")", status.ok() ? "" : ": ", status.message()));
}

absl::Status GpuRuntime::OpenDevice(int device) {
  MLA_ASSIGN_OR_RETURN(const int count, CountDevices());
  if (device < 0 || device >= count) {
    return absl::OutOfRangeError(absl::StrCat("GPU device ", device, " of ", count));
  }
  device_ = device;
  if (vendor_ == Vendor::kNvidia) {
    MLA_RETURN_IF_ERROR(Check(api_->nvidia_retain_context(&context_, device_), "context"));
  }
  MLA_RETURN_IF_ERROR(Bind());
  return Identify();
}

absl::Status GpuRuntime::Identify() {
  char name[256] = {};
  MLA_RETURN_IF_ERROR(Check(api_->device_name(name, sizeof(name) - 1, device_), "name"));
  name_ = name;
  return vendor_ == Vendor::kAmd ? IdentifyAmd() : IdentifyNvidia();
}

absl::Status GpuRuntime::IdentifyAmd() {
  int reach = 0;
  MLA_RETURN_IF_ERROR(
      Check(api_->device_attribute(&units_, kAmdMultiprocessorCount, device_), "attribute"));
  host_pointers_reach_ =
      api_->device_attribute(&reach, kAmdHostPointersReach, device_) == kSuccess && reach != 0;
  // The struct's layout differs between releases, so this searches it for "gfx".
  std::vector<char> properties(16384, 0);
  MLA_RETURN_IF_ERROR(Check(api_->amd_properties(properties.data(), device_), "properties"));
  for (size_t i = name_.size() + 1; i + 16 < properties.size(); ++i) {
    if (std::memcmp(&properties[i], "gfx", 3) != 0) continue;
    const std::string full(&properties[i], strnlen(&properties[i], 64));
    arch_ = full.substr(0, full.find(':'));
    break;
  }
  return absl::OkStatus();
}

absl::Status GpuRuntime::IdentifyNvidia() {
  int major = 0, minor = 0;
  for (const auto& [what, into] :
       {std::pair(kNvidiaMultiprocessorCount, &units_), std::pair(kNvidiaCapabilityMajor, &major),
        std::pair(kNvidiaCapabilityMinor, &minor)}) {
    MLA_RETURN_IF_ERROR(Check(api_->device_attribute(into, what, device_), "attribute"));
  }
  arch_ = absl::StrCat("sm_", major, minor);
  // Drivers that do not know the attribute lack the capability.
  int reach = 0;
  kernels_reach_host_ =
      api_->device_attribute(&reach, kNvidiaHostPointersReach, device_) == kSuccess && reach != 0;
  return absl::OkStatus();
}

absl::Status GpuRuntime::Bind() {
  return vendor_ == Vendor::kAmd ? Check(api_->amd_set_device(device_), "set device")
                                 : Check(api_->nvidia_set_context(context_), "set context");
}

#define MLA_GPU_CALL(call, name)            \
  do {                                      \
    CallWatch::NoteDriverCall(name);        \
    MLA_RETURN_IF_ERROR(Bind());            \
    MLA_RETURN_IF_ERROR(Check(call, name)); \
  } while (false)

absl::StatusOr<int64_t> GpuRuntime::FreeMemory() {
  size_t free_bytes = 0, total = 0;
  MLA_GPU_CALL(api_->memory_info(&free_bytes, &total), "memory info");
  return static_cast<int64_t>(free_bytes);
}
absl::StatusOr<DevicePtr> GpuRuntime::Malloc(int64_t bytes) {
  DevicePtr address = 0;
  MLA_RETURN_IF_ERROR(Bind());
  absl::Status s = Check(api_->allocate(&address, static_cast<size_t>(bytes)), "malloc");
  if (!s.ok()) return absl::Status(s.code(), absl::StrCat(s.message(), " for ", bytes, " bytes"));
  return address;
}
void GpuRuntime::Free(DevicePtr at) {
  if (at != 0 && Bind().ok()) api_->free(at);
}
absl::StatusOr<void*> GpuRuntime::MallocHost(int64_t bytes) {
  void* at = nullptr;
  MLA_GPU_CALL(api_->allocate_host(&at, static_cast<size_t>(bytes), 0), "host malloc");
  return at;
}
void GpuRuntime::FreeHost(void* at) {
  if (at != nullptr && Bind().ok()) api_->free_host(at);
}
absl::Status GpuRuntime::RegisterHost(void* at, int64_t bytes) {
  // HIP maps registered memory in any case.
  const unsigned flags = vendor_ == Vendor::kNvidia ? kNvidiaRegisterMapped : 0;
  MLA_GPU_CALL(api_->register_host(at, static_cast<size_t>(bytes), flags), "host register");
  return absl::OkStatus();
}
absl::StatusOr<bool> GpuRuntime::SameAddress(void* address) {
  if (vendor_ == Vendor::kNvidia || host_pointers_reach_) return true;
  void* there = nullptr;
  MLA_GPU_CALL(api_->amd_host_address(&there, address, 0), "host address");
  return there == address;
}
absl::Status GpuRuntime::UnregisterHost(void* at) {
  MLA_GPU_CALL(api_->unregister_host(at), "host unregister");
  return absl::OkStatus();
}

absl::StatusOr<Stream> GpuRuntime::CreateStream() {
  Stream stream = nullptr;
  MLA_GPU_CALL(api_->stream_create(&stream, kStreamNonBlocking), "stream create");
  return stream;
}
void GpuRuntime::Destroy(Stream stream) {
  if (stream != nullptr && Bind().ok()) api_->stream_destroy(stream);
}
absl::StatusOr<Event> GpuRuntime::CreateEvent() {
  Event event = nullptr;
  MLA_GPU_CALL(api_->event_create(&event, 0), "event create");
  return event;
}
void GpuRuntime::Destroy(Event event) {
  if (event != nullptr && Bind().ok()) api_->event_destroy(event);
}
absl::Status GpuRuntime::Record(Event event, Stream stream) {
  MLA_GPU_CALL(api_->event_record(event, stream), "event record");
  return absl::OkStatus();
}
absl::Status GpuRuntime::WaitFor(Stream stream, Event event) {
  MLA_GPU_CALL(api_->stream_wait(stream, event, 0), "stream wait");
  return absl::OkStatus();
}
absl::StatusOr<bool> GpuRuntime::Done(Event event) {
  MLA_RETURN_IF_ERROR(Bind());
  const int code = api_->event_query(event);
  if (code == kNotReady) return false;
  MLA_RETURN_IF_ERROR(Check(code, "event query"));
  return true;
}
absl::StatusOr<int64_t> GpuRuntime::ElapsedNs(Event from, Event to) {
  float ms = 0.0f;
  MLA_GPU_CALL(api_->event_elapsed(&ms, from, to), "event elapsed");
  return static_cast<int64_t>(static_cast<double>(ms) * 1e6);
}
absl::Status GpuRuntime::Synchronize(Stream stream) {
  MLA_GPU_CALL(api_->stream_synchronize(stream), "stream synchronize");
  return absl::OkStatus();
}

absl::Status GpuRuntime::CopyIn(DevicePtr to, const void* from, int64_t bytes, Stream stream) {
  MLA_GPU_CALL(api_->copy_in(to, from, static_cast<size_t>(bytes), stream), "copy to device");
  return absl::OkStatus();
}
absl::Status GpuRuntime::CopyOut(void* to, DevicePtr from, int64_t bytes, Stream stream) {
  MLA_GPU_CALL(api_->copy_out(to, from, static_cast<size_t>(bytes), stream), "copy to host");
  return absl::OkStatus();
}
absl::Status GpuRuntime::CopyRowsIn(DevicePtr to, int64_t to_pitch, const void* from,
                                    int64_t from_pitch, int64_t bytes, int64_t rows,
                                    Stream stream) {
  return CopyRows({reinterpret_cast<void*>(to), to_pitch, true},
                  {const_cast<void*>(from), from_pitch, false}, bytes, rows, stream);
}
absl::Status GpuRuntime::CopyRowsOut(void* to, int64_t to_pitch, DevicePtr from, int64_t from_pitch,
                                     int64_t bytes, int64_t rows, Stream stream) {
  return CopyRows({to, to_pitch, false}, {reinterpret_cast<void*>(from), from_pitch, true}, bytes,
                  rows, stream);
}
absl::Status GpuRuntime::CopyRowsDevice(DevicePtr to, int64_t to_pitch, DevicePtr from,
                                        int64_t from_pitch, int64_t bytes, int64_t rows,
                                        Stream stream) {
  return CopyRows({reinterpret_cast<void*>(to), to_pitch, true},
                  {reinterpret_cast<void*>(from), from_pitch, true}, bytes, rows, stream);
}
absl::Status GpuRuntime::CopyRows(const RowsSide& target, const RowsSide& from, int64_t bytes,
                                  int64_t rows, Stream stream) {
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  if (vendor_ == Vendor::kAmd) {
    const int kind = !from.on_device    ? kAmdHostToDevice
                     : target.on_device ? kAmdDeviceToDevice
                                        : kAmdDeviceToHost;
    MLA_GPU_CALL(api_->amd_copy_rows(target.at, size(target.pitch), from.at, size(from.pitch),
                                     size(bytes), size(rows), kind, stream),
                 "copy rows");
    return absl::OkStatus();
  }
  const auto side = [&size](const RowsSide& s) {
    NvidiaCopySide result = {};
    result.type = s.on_device ? kNvidiaDeviceMemory : kNvidiaHostMemory;
    if (s.on_device) result.device = reinterpret_cast<DevicePtr>(s.at);
    if (!s.on_device) result.host = s.at;
    result.pitch = size(s.pitch);
    return result;
  };
  const NvidiaCopyRows copy = {side(from), side(target), size(bytes), size(rows)};
  MLA_GPU_CALL(api_->nvidia_copy_rows(&copy, stream), "copy rows");
  return absl::OkStatus();
}
absl::Status GpuRuntime::CopyDevice(DevicePtr to, DevicePtr from, int64_t bytes, Stream stream) {
  MLA_GPU_CALL(api_->copy_device(to, from, static_cast<size_t>(bytes), stream), "copy on device");
  return absl::OkStatus();
}
absl::Status GpuRuntime::Fill(DevicePtr to, uint8_t value, int64_t bytes, Stream stream) {
  MLA_GPU_CALL(api_->fill(to, value, static_cast<size_t>(bytes), stream), "fill");
  return absl::OkStatus();
}
bool GpuRuntime::stores_words() const { return api_->store_word != nullptr; }
absl::Status GpuRuntime::StoreWord(DevicePtr to, uint32_t value, Stream stream) {
  MLA_GPU_CALL(api_->store_word(stream, to, value, 0), "store word");
  return absl::OkStatus();
}

absl::Status GpuRuntime::EncodeMap(const BoxedRows& of, std::span<uint64_t, 16> map) const {
  // As cuda.h numbers them.
  constexpr int kOfBf16 = 9, kPlain = 0, kFillZeros = 0;
  constexpr int kNoSwizzle = 0, kSwizzle64 = 2, kSwizzle128 = 3, kPromoteTo256 = 3;
  constexpr uint32_t kDims = 3;
  if (api_->nvidia_encode_map == nullptr) {
    return absl::UnimplementedError(absl::StrCat(library_, " has no cuTensorMapEncodeTiled"));
  }
  const uint64_t dims[kDims] = {static_cast<uint64_t>(of.columns), static_cast<uint64_t>(of.rows),
                                static_cast<uint64_t>(of.pages)};
  const uint64_t strides[kDims - 1] = {static_cast<uint64_t>(of.row_stride),
                                       static_cast<uint64_t>(of.page_stride)};
  const uint32_t box[kDims] = {static_cast<uint32_t>(of.box_columns),
                               static_cast<uint32_t>(of.box_rows), 1};
  constexpr uint32_t kSteps[kDims] = {1, 1, 1};
  const int swizzle = of.box_columns == 64   ? kSwizzle128
                      : of.box_columns == 32 ? kSwizzle64
                                             : kNoSwizzle;
  if (swizzle == kNoSwizzle && of.box_columns != 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("boxes: got ", of.box_columns, " columns, want 8, 32 or 64"));
  }
  alignas(64) uint64_t encoded[16];  // the driver refuses other addresses
  MLA_RETURN_IF_ERROR(Check(
      api_->nvidia_encode_map(encoded, kOfBf16, kDims, reinterpret_cast<void*>(of.first), dims,
                              strides, box, kSteps, kPlain, swizzle, kPromoteTo256, kFillZeros),
      "encode tensor map"));
  std::copy(std::begin(encoded), std::end(encoded), map.begin());
  return absl::OkStatus();
}

absl::StatusOr<Module> GpuRuntime::Load(std::span<const std::byte> image) {
  Module module = nullptr;
  MLA_GPU_CALL(api_->module_load(&module, image.data()), "module load");
  return module;
}
void GpuRuntime::Unload(Module module) {
  if (module != nullptr && Bind().ok()) api_->module_unload(module);
}
absl::StatusOr<Function> GpuRuntime::Find(Module module, const char* name) {
  Function function = nullptr;
  MLA_RETURN_IF_ERROR(Bind());
  absl::Status s = Check(api_->module_function(&function, module, name), "module function");
  if (!s.ok()) return absl::InternalError(absl::StrCat(s.message(), ": ", name));
  return function;
}
absl::Status GpuRuntime::AllowSharedBytes(Function function, int32_t bytes) {
  if (vendor_ == Vendor::kAmd) return absl::OkStatus();  // LDS is static there
  MLA_GPU_CALL(api_->nvidia_function_attribute(function, kNvidiaMaxDynamicShared, bytes),
               "function attribute");
  return absl::OkStatus();
}

absl::Status GpuRuntime::Launch(Function function, const LaunchShape& shape, const void* args,
                                Stream stream) {
  void* parameters[] = {const_cast<void*>(args)};
  if (vendor_ == Vendor::kNvidia && (shape.overlap_predecessor || shape.blocks_meet)) {
    NvidiaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    const auto add = [&](unsigned id) {
      attributes[count].id = id;
      attributes[count++].value.flag = 1;
    };
    if (shape.overlap_predecessor) add(kNvidiaProgrammaticSerialization);
    if (shape.blocks_meet) add(kNvidiaCooperative);
    const NvidiaLaunchConfig config{
        shape.grid_x,       shape.grid_y, 1,          shape.threads, 1, 1,
        shape.shared_bytes, stream,       attributes, count};
    MLA_GPU_CALL(api_->nvidia_launch(&config, function, parameters, nullptr), "launch");
    return absl::OkStatus();
  }
  MLA_GPU_CALL(api_->launch(function, shape.grid_x, shape.grid_y, 1, shape.threads, 1, 1,
                            shape.shared_bytes, stream, parameters, nullptr),
               "launch");
  return absl::OkStatus();
}
#undef MLA_GPU_CALL

}  // namespace mla::kernels::hip
