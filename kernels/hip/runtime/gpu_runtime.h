// The GPU runtime, opened at run time: the HIP module API of libamdhip64 or the CUDA driver API of
// libcuda, behind one table, because the calls that are used differ mainly in their names. Nothing
// here is linked, so one binary runs on nodes with either vendor's driver or with none.
//
// A GpuRuntime is one device of one vendor. All calls first make the device current on the calling
// thread, so any thread may make them, one at a time. RegisterHost, UnregisterHost, Synchronize,
// Done and the calls of DeviceSharing may also overlap with other calls. Calls return the API's own
// error text with the name of the entry point: RESOURCE_EXHAUSTED if the device is out of memory,
// else INTERNAL.
#ifndef MLA_KERNELS_HIP_RUNTIME_GPU_RUNTIME_H_
#define MLA_KERNELS_HIP_RUNTIME_GPU_RUNTIME_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/shared_library.h"
#include "kernels/hip/runtime/runtime_library.h"

namespace mla::kernels::hip {

using DevicePtr = uint64_t;
struct StreamHandle;
struct EventHandle;
struct ModuleHandle;
struct FunctionHandle;
using Stream = StreamHandle*;
using Event = EventHandle*;
using Module = ModuleHandle*;
using Function = FunctionHandle*;

struct LaunchShape {
  uint32_t grid_x = 1;
  uint32_t grid_y = 1;
  uint32_t threads = 1;
  uint32_t shared_bytes = 0;
  // May start before its predecessor on the stream has ended; the kernel itself then waits.
  bool overlap_predecessor = false;
  // May start early only if the predecessor is a gate (device/kernels/gate.h), which has few
  // blocks.
  bool overlap_gate = false;
  // For NVIDIA only: the blocks wait for each other, so the kernel starts only when all of them fit
  // at the same time, and is refused if they never do.
  bool blocks_meet = false;

  bool operator==(const LaunchShape&) const = default;
};

// Rows of 16-bit elements in device memory as a tensor map describes them, for copies of boxes of
// `box_columns` columns and `box_rows` rows of one page.
struct BoxedRows {
  uint64_t first = 0;       // address, a multiple of 16
  int64_t pages = 0;        // places where a page may begin, page_stride bytes apart
  int64_t page_stride = 0;  // a multiple of 16; pages may overlap
  int64_t rows = 0;         // of a page
  int64_t row_stride = 0;   // bytes, a multiple of 16
  int32_t columns = 0;
  int32_t box_rows = 0, box_columns = 0;  // 16, 64 or 128 bytes of columns
};

// Entry points as the vendors' libraries export them; runtime_table.h has them.
struct RuntimeTable;

// A runtime that was found, with the devices that it lists.
struct FoundRuntime {
  struct Device {
    std::string name, arch;
  };
  std::string library;
  int version = 0;      // as hipRuntimeGetVersion reports it; 0: NVIDIA, or not known
  absl::Status usable;  // FAILED_PRECONDITION: too old; UNAVAILABLE: it lists no device, and why
  std::vector<Device> devices;
};

class GpuRuntime final {
 public:
  // Finds the runtime and lists its devices without using one: no context is made. `libraries` is
  // what it is for Open. UNAVAILABLE if no library can be opened, or it lacks an entry point.
  static absl::StatusOr<FoundRuntime> Find(Vendor vendor, std::span<const std::string> libraries);

  // `libraries` empty: RuntimeLibraries. UNAVAILABLE if no library can be opened (with names and
  // the loader's reason), it lacks an entry point, or it reports no device. FAILED_PRECONDITION if
  // it is older than kOldestHip. OUT_OF_RANGE if `device` is not below the count.
  static absl::StatusOr<std::unique_ptr<GpuRuntime>> Open(Vendor vendor, int device,
                                                          std::span<const std::string> libraries);
  ~GpuRuntime();
  GpuRuntime(const GpuRuntime&) = delete;
  GpuRuntime& operator=(const GpuRuntime&) = delete;

  Vendor vendor() const { return vendor_; }
  const std::string& name() const { return name_; }  // as the driver reports it
  const std::string& arch() const { return arch_; }  // "gfx950", "gfx942", "sm_90", ...
  const std::string& library() const { return library_; }
  int device() const { return device_; }    // ordinal of the device
  int32_t units() const { return units_; }  // CUs or SMs
  int version() const { return version_; }  // as hipRuntimeGetVersion reports it; 0: NVIDIA
  // True if kernels reach pinned host memory at the host's own addresses. On AMD devices only a
  // probe can tell, because a kernel's page fault ends the process there.
  bool kernels_reach_host() const { return kernels_reach_host_; }
  void set_kernels_reach_host(bool reach) { kernels_reach_host_ = reach; }
  // True if kernels may be launched as graphs (kernel_graphs.h); and the number of such launches.
  bool uses_graphs() const { return uses_graphs_; }
  void set_uses_graphs(bool uses) { uses_graphs_ = uses; }
  int64_t graph_launches() const { return graph_launches_; }
  void NoteGraphLaunch() { ++graph_launches_; }
  bool stores_words() const;  // StoreWord; some drivers lack it

  // Encodes a tensor map. Boxes of 64 and 32 columns have the swizzle that spans these; boxes of 8
  // have none. INVALID_ARGUMENT for other widths. UNIMPLEMENTED if the runtime
  // has no such maps; the driver's error if it refuses this one.
  absl::Status EncodeMap(const BoxedRows& of, std::span<uint64_t, 16> map) const;

  // --- For calls that are not in this class.
  SymbolTable Symbols() const { return SymbolTable(opened_); }
  absl::Status Bind();  // makes the device current on the calling thread
  absl::Status Check(int code, const char* call) const;

  absl::StatusOr<int64_t> FreeMemory();  // on the device, in bytes
  absl::StatusOr<DevicePtr> Malloc(int64_t bytes);
  void Free(DevicePtr at);
  absl::StatusOr<void*> MallocHost(int64_t bytes);  // pinned
  void FreeHost(void* at);
  // Pins the caller's memory, in whole pages, until it is unregistered.
  absl::Status RegisterHost(void* at, int64_t bytes);
  absl::Status UnregisterHost(void* at);
  // Returns true if the device maps pinned memory at the host's own address.
  absl::StatusOr<bool> SameAddress(void* address);

  absl::StatusOr<Stream> CreateStream();
  void Destroy(Stream stream);
  absl::StatusOr<Event> CreateEvent();
  void Destroy(Event event);
  absl::Status Record(Event event, Stream stream);
  absl::Status WaitFor(Stream stream, Event event);
  absl::StatusOr<bool> Done(Event event);
  absl::StatusOr<int64_t> ElapsedNs(Event from, Event to);
  absl::Status Synchronize(Stream stream);

  absl::Status CopyIn(DevicePtr to, const void* from, int64_t bytes, Stream stream);
  absl::Status CopyOut(void* to, DevicePtr from, int64_t bytes, Stream stream);
  // Copy rows of `bytes` bytes each, `pitch` bytes apart on their side.
  absl::Status CopyRowsIn(DevicePtr to, int64_t to_pitch, const void* from, int64_t from_pitch,
                          int64_t bytes, int64_t rows, Stream stream);
  absl::Status CopyRowsOut(void* to, int64_t to_pitch, DevicePtr from, int64_t from_pitch,
                           int64_t bytes, int64_t rows, Stream stream);
  absl::Status CopyRowsDevice(DevicePtr to, int64_t to_pitch, DevicePtr from, int64_t from_pitch,
                              int64_t bytes, int64_t rows, Stream stream);
  absl::Status CopyDevice(DevicePtr to, DevicePtr from, int64_t bytes, Stream stream);
  absl::Status Fill(DevicePtr to, uint8_t value, int64_t bytes, Stream stream);
  // Stores the word after all earlier work on the stream has ended and is visible. REQUIRES:
  // stores_words().
  absl::Status StoreWord(DevicePtr to, uint32_t value, Stream stream);

  // Loads an image; INTERNAL with the API's text if it is for another architecture.
  absl::StatusOr<Module> Load(std::span<const std::byte> image);
  void Unload(Module module);
  absl::StatusOr<Function> Find(Module module, const char* name);
  // Lets launches of `function` ask for this much dynamic shared memory.
  absl::Status AllowSharedBytes(Function function, int32_t bytes);
  // `args` is the kernel's only parameter, passed by value.
  absl::Status Launch(Function function, const LaunchShape& shape, const void* args, Stream stream);

 private:
  GpuRuntime(Vendor vendor, std::string name, void* library, std::unique_ptr<RuntimeTable> table);
  struct RowsSide {
    void* at;
    int64_t pitch;
    bool on_device;
  };
  absl::Status CopyRows(const RowsSide& target, const RowsSide& from, int64_t bytes, int64_t rows,
                        Stream stream);
  static absl::StatusOr<std::unique_ptr<GpuRuntime>> OpenLibrary(
      Vendor vendor, std::span<const std::string> libraries);
  absl::StatusOr<int> CountDevices();
  absl::Status OpenDevice(int device);
  absl::Status Identify();  // sets name_, arch_ and units_ of device_
  absl::Status IdentifyAmd();
  absl::Status IdentifyNvidia();

  Vendor vendor_;
  std::string library_;
  void* const opened_;
  std::unique_ptr<RuntimeTable> api_;
  void* context_ = nullptr;
  int device_ = 0;
  std::string name_;
  std::string arch_ = "unknown";
  int32_t units_ = 0;
  int version_ = 0;
  bool host_pointers_reach_ = false;  // AMD's attribute, for all pinned memory
  bool kernels_reach_host_ = false;
  bool uses_graphs_ = true;
  int64_t graph_launches_ = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_GPU_RUNTIME_H_
