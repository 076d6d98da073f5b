#include "client/cpp/shared_memory/device_region.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/shared_memory/device_runtime.h"
#include "client/cpp/shared_memory/row_copier.h"

namespace mla::client {
namespace {

// Equal in both vendors' headers, unless named otherwise.
constexpr int kPosixDescriptor = 1;
constexpr int kOnDevice = 1;
constexpr int kReadWrite = 3;
constexpr unsigned kEventWithoutTiming = 2;
constexpr unsigned kLazyPeerAccess = 1;
constexpr int kNvidiaMpsEnabled = 133;
// Attributes and arguments for writes by other devices: how the GPU orders them for its kernels,
// how a host can ask for that order, and the request.
constexpr int kNvidiaRemoteFlushes = 117, kNvidiaRemoteOrder = 118;
constexpr int kOrderedForOwner = 100, kFlushByHost = 1;
constexpr int kFlushCurrentContext = 0, kFlushForOwner = 100;
constexpr unsigned kPortableAndMapped = 3;
constexpr unsigned kEqualOrLater = 0;
constexpr unsigned kWithBarrier = 0;  // earlier writes of the stream become visible first
constexpr int kAnyDirection = 4;
constexpr uint32_t kAllBits = 0xffffffffu;

using Handle = DeviceRuntime::Handle;
using Uuid = DeviceRuntime::Uuid;
using Access = DeviceRuntime::Access;

absl::Status Check(int code, const char* call) {
  if (code == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("device memory: ", call, " failed with code ", code));
}

}  // namespace

struct DeviceRegion::State {
  DeviceRuntime api{};
  wire::DeviceHeader header{};
  int device = 0, server_device = 0;
  int amd_version = 0;
  void* context = nullptr;         // NVIDIA's, of `device`
  void* server_context = nullptr;  // NVIDIA's, of the server's device
  void* base = nullptr;
  uint64_t allocation = 0;
  bool imported = false, reserved = false, mapped = false, opened = false;
  std::vector<void*> events;  // the server's, by slot
  bool recorded_here = true;  // by streams of this process's device
  // If they are recorded on another device: this process's events, and a stream of that device.
  std::vector<void*> local;
  void* relay = nullptr;
  // The memory with the words for which streams wait, as this process addresses it and as the
  // device does.
  std::span<std::byte> words;
  std::byte* words_there = nullptr;
  uint64_t nearby = 0;  // words in device memory, which streams of another device do not use
  void* nearby_stream = nullptr;
  std::unique_ptr<RowCopier> copier;  // null: the runtime's own copies are used
  std::string warning;

  bool same_device() const { return device == server_device; }
  size_t bytes() const { return static_cast<size_t>(header.bytes); }
  void* There(uint32_t* word) const {
    const auto* const first = static_cast<const std::byte*>(base);
    const auto* const byte = reinterpret_cast<const std::byte*>(word);
    if (byte >= first && byte < first + bytes()) return word;
    return words_there + (reinterpret_cast<const std::byte*>(word) - words.data());
  }

  struct Operations {
    std::array<DeviceRuntime::WordOperation, 3> all;
    unsigned count = 0;
  };
  Operations OperationsOf(const Turn& turn) const {
    Operations operations;
    for (const Word& store : turn.stores) {
      if (store.word == nullptr) continue;
      operations.all[operations.count++] = {DeviceRuntime::WordOperation::kStore, There(store.word),
                                            store.value, kWithBarrier};
    }
    operations.all[operations.count++] = {DeviceRuntime::WordOperation::kAwait,
                                          There(turn.awaited.word), turn.awaited.value,
                                          kEqualOrLater};
    return operations;
  }

  // Makes a device current for as long as it lives.
  class Current {
   public:
    Current(const State& state, bool server) : state_(state) {
      if (state.header.nvidia != 0) {
        void* const wanted = server ? state.server_context : state.context;
        // It mostly is, in the thread that gives its GPU work, and a push and a pop take longer.
        void* now = nullptr;
        if (state.api.nvidia_current != nullptr && state.api.nvidia_current(&now) == 0 &&
            now == wanted) {
          stays_ = true;
        } else {
          code_ = state.api.nvidia_push(wanted);
        }
        return;
      }
      code_ = state.api.amd_get_device(&before_);
      if (code_ == 0) code_ = state.api.amd_set_device(server ? state.server_device : state.device);
    }
    ~Current() {
      void* popped = nullptr;
      if (code_ != 0 || stays_) return;
      if (state_.header.nvidia != 0) {
        (void)state_.api.nvidia_pop(&popped);
      } else {
        (void)state_.api.amd_set_device(before_);
      }
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    absl::Status status() const { return Check(code_, "making a device current"); }

   private:
    const State& state_;
    int code_ = 0, before_ = 0;
    bool stays_ = false;  // it was current before
  };

  ~State() {
    if (api.init == nullptr) return;
    {
      const Current current(*this, !recorded_here);
      for (void* event : events) (void)api.event_destroy(event);
      if (relay != nullptr) (void)api.stream_destroy(relay);
    }
    const Current current(*this, false);
    copier.reset();
    if (nearby_stream != nullptr) (void)api.stream_destroy(nearby_stream);
    for (void* event : local) (void)api.event_destroy(event);
    if (!words.empty()) (void)api.unregister_host(words.data());
    if (opened) (void)api.close_memory(base);
    if (mapped) (void)api.unmap(base, bytes());
    if (reserved) (void)api.unreserve(base, bytes());
    if (imported) (void)api.release(allocation);
  }

  absl::Status FindDevices() {
    absl::Status s = Check(api.init(0), "init");
    int count = 0;
    if (s.ok() && header.nvidia == 0) s = Check(api.amd_version(&amd_version), "runtime version");
    if (s.ok()) s = Check(api.device_count(&count), "device count");
    if (!s.ok()) return s;
    const bool own = device != DeviceRegionOptions::kTheServers;
    if (own && (device < 0 || device >= count)) {
      return absl::UnavailableError(absl::StrCat("device memory: device ", device, " of ", count));
    }
    server_device = -1;
    for (int i = 0; i < count && server_device < 0; ++i) {
      Uuid uuid{};
      if (s = Check(api.uuid(&uuid, i), "device uuid"); !s.ok()) return s;
      if (std::memcmp(uuid.data(), header.uuid, uuid.size()) == 0) server_device = i;
    }
    if (server_device < 0) {
      return absl::UnavailableError("device memory: the server's GPU is not visible here");
    }
    if (!own) device = server_device;
    if (header.nvidia == 0) return s;
    s = Check(api.nvidia_retain(&context, device), "context");
    if (s.ok()) s = Check(api.nvidia_retain(&server_context, server_device), "context");
    int shared = 0;
    if (s.ok() && same_device() &&
        (api.nvidia_attribute(&shared, kNvidiaMpsEnabled, device) != 0 || shared == 0)) {
      warning =
          "worker and server share a GPU without MPS, so that the driver gives it to one of them "
          "at a time: a layer takes hundreds of microseconds more";
    }
    return s;
  }

  // Opens a device for memory of this process's own.
  absl::Status UseOwnDevice() {
    absl::Status s = Check(api.init(0), "init");
    int count = 0;
    if (s.ok()) s = Check(api.device_count(&count), "device count");
    if (s.ok() && (device < 0 || device >= count)) {
      s = absl::UnavailableError(absl::StrCat("device memory: device ", device, " of ", count));
    }
    server_device = device;
    if (!s.ok() || header.nvidia == 0) return s;
    s = Check(api.nvidia_retain(&context, device), "context");
    server_context = context;
    return s;
  }

  absl::Status MapMemory(int descriptor) {
    const Current current(*this, false);
    absl::Status s = current.status();
    if (!s.ok()) return s;
    if (header.kind == wire::kDeviceHandle) {
      Handle handle;
      std::memcpy(handle.data(), header.memory, handle.size());
      s = Check(api.open_memory(&base, handle, kLazyPeerAccess), "memory open");
      opened = s.ok();
      return s;
    }
    const bool by_value = header.nvidia != 0 || amd_version >= DeviceRuntime::kAmdImportsByValue;
    void* const named = by_value ? reinterpret_cast<void*>(static_cast<intptr_t>(descriptor))
                                 : static_cast<void*>(&descriptor);
    s = Check(api.import_memory(&allocation, named, kPosixDescriptor), "memory import");
    imported = s.ok();
    if (s.ok()) s = Check(api.reserve(&base, bytes(), 0, nullptr, 0), "address reserve");
    reserved = s.ok();
    if (s.ok()) s = Check(api.map(base, bytes(), 0, allocation, 0), "memory map");
    mapped = s.ok() && reserved;
    const Access access{kOnDevice, device, kReadWrite};
    if (s.ok()) s = Check(api.set_access(base, bytes(), &access, 1), "memory access");
    return s;
  }

  // Events are opened in the context of this process's device, so that its streams record them. If
  // the runtime opens them on their own device only, a stream of that device records them.
  absl::Status OpenEvents(std::span<const std::byte> handles) {
    if (!same_device() && OpenEventsOn(false, handles).ok()) {
      recorded_here = true;
      return absl::OkStatus();
    }
    recorded_here = same_device();
    absl::Status s = OpenEventsOn(true, handles);
    if (!s.ok() || recorded_here) return s;
    const Current current(*this, true);
    s = current.status();
    return s.ok() ? Check(api.stream_create(&relay, DeviceRuntime::kStreamNonBlocking),
                          "stream create")
                  : s;
  }

  absl::Status OpenEventsOn(bool server, std::span<const std::byte> handles) {
    const Current current(*this, server);
    absl::Status s = current.status();
    for (size_t at_byte = 0; s.ok() && at_byte < handles.size(); at_byte += sizeof(Handle)) {
      Handle handle;
      std::memcpy(handle.data(), handles.data() + at_byte, sizeof(handle));
      void* event = nullptr;
      s = Check(api.open_event(&event, handle), "event open");
      if (s.ok()) events.push_back(event);
    }
    if (s.ok()) return s;
    for (void* event : std::exchange(events, {})) (void)api.event_destroy(event);
    return s;
  }

  absl::Status MakeLocalEvents() {
    if (recorded_here) return absl::OkStatus();
    const Current current(*this, false);
    absl::Status s = current.status();
    while (s.ok() && local.size() < events.size()) {
      void* event = nullptr;
      s = Check(api.event_create(&event, kEventWithoutTiming), "event create");
      if (s.ok()) local.push_back(event);
    }
    return s;
  }
};

DeviceRegion::DeviceRegion(std::unique_ptr<State> state) : state_(std::move(state)) {
  blocks_.Add(0, state_->header.words > 0 ? state_->header.words : state_->header.bytes);
}
DeviceRegion::~DeviceRegion() = default;

absl::StatusOr<std::unique_ptr<DeviceRegion>> DeviceRegion::Map(
    std::span<const std::byte> part, int descriptor, uint32_t entries,
    const DeviceRegionOptions& options) {
  auto state = std::make_unique<State>();
  wire::DeviceHeader& header = state->header;
  if (part.size() < wire::DevicePartBytes(entries)) {
    return absl::UnimplementedError("device memory: the region has no room for its description");
  }
  std::memcpy(&header, part.data(), sizeof(header));
  const bool described = header.kind == wire::kDeviceDescriptor && descriptor >= 0;
  if (header.magic != wire::kHandshakeMagic || header.bytes == 0 ||
      (!described && header.kind != wire::kDeviceHandle)) {
    return absl::UnimplementedError(absl::StrCat("device memory: got kind ", header.kind, " of ",
                                                 header.bytes,
                                                 " bytes, must be 1 with a "
                                                 "descriptor, or 2"));
  }
  if (header.words % wire::kSharedAlignment != 0 || header.words > header.bytes ||
      header.bytes - header.words < wire::NearbyBytes(entries)) {
    header.words = 0;
  }
  state->device = options.device;
  MLA_ASSIGN_OR_RETURN(state->api, OpenDeviceRuntime(header.nvidia != 0, options.library));
  absl::Status s = state->FindDevices();
  if (s.ok()) s = state->MapMemory(descriptor);
  if (s.ok()) {
    s = state->OpenEvents(
        part.subspan(sizeof(header), uint64_t{entries} * wire::kDeviceHandleBytes));
  }
  if (s.ok()) s = state->MakeLocalEvents();
  if (!s.ok()) return s;
  return std::unique_ptr<DeviceRegion>(new DeviceRegion(std::move(state)));
}

absl::StatusOr<std::unique_ptr<DeviceRegion>> DeviceRegion::WithoutMemory(
    const DeviceRegionOptions& options) {
  absl::Status first;
  for (const bool nvidia : {true, false}) {
    auto state = std::make_unique<State>();
    state->header.nvidia = nvidia ? 1 : 0;
    state->header.chains = 1;
    state->device = options.device;
    absl::StatusOr<DeviceRuntime> runtime = OpenDeviceRuntime(nvidia, options.library);
    absl::Status s = runtime.status();
    if (s.ok()) {
      state->api = *runtime;
      s = state->UseOwnDevice();
    }
    if (s.ok()) return std::unique_ptr<DeviceRegion>(new DeviceRegion(std::move(state)));
    first.Update(s);
  }
  return first;
}

std::span<std::byte> DeviceRegion::memory() const {
  return {static_cast<std::byte*>(state_->base), state_->bytes()};
}
std::span<std::byte> DeviceRegion::tensors() const {
  return state_->header.words > 0 ? memory().first(state_->header.words) : memory();
}

absl::Status DeviceRegion::Bind() const {
  const DeviceRuntime& api = state_->api;
  return Check(nvidia() ? api.nvidia_push(state_->context) : api.amd_set_device(state_->device),
               "making a device current");
}

absl::Status DeviceRegion::ShowRemoteWrites() const {
  if (!nvidia()) return absl::OkStatus();
  const DeviceRuntime& api = state_->api;
  int order = 0, flushes = 0;
  // Drivers that do not know the attribute promise nothing.
  if (api.nvidia_attribute(&order, kNvidiaRemoteOrder, state_->device) != 0) order = 0;
  if (order >= kOrderedForOwner) return absl::OkStatus();
  if (api.nvidia_attribute(&flushes, kNvidiaRemoteFlushes, state_->device) != 0) flushes = 0;
  if (api.nvidia_flush_remote == nullptr || (flushes & kFlushByHost) == 0) {
    return absl::FailedPreconditionError(
        "device memory: the GPU does not order what network devices write into it");
  }
  const State::Current current(*state_, false);
  MLA_RETURN_IF_ERROR(current.status());
  return Check(api.nvidia_flush_remote(kFlushCurrentContext, kFlushForOwner),
               "showing writes of other devices");
}

bool DeviceRegion::nvidia() const { return state_->header.nvidia != 0; }
bool DeviceRegion::chains() const { return state_->header.chains != 0; }
const std::string& DeviceRegion::warning() const { return state_->warning; }

std::span<std::byte> DeviceRegion::Allocate(uint64_t bytes) {
  const std::optional<uint64_t> at = blocks_.Take(bytes);
  return at ? memory().subspan(*at, bytes) : std::span<std::byte>();
}

void DeviceRegion::Free(std::span<std::byte> block) {
  if (block.data() != nullptr) blocks_.Return(OffsetOf(block.data()));
}

bool DeviceRegion::Holds(const void* data, uint64_t bytes) const {
  const auto* const from = static_cast<const std::byte*>(data);
  const std::byte* const begin = memory().data();
  const std::byte* const end = begin + memory().size();
  return from >= begin && from <= end && bytes <= static_cast<uint64_t>(end - from);
}

absl::Status DeviceRegion::Record(uint32_t slot, void* stream) {
  const DeviceRuntime& api = state_->api;
  {
    const State::Current current(*state_, false);
    MLA_RETURN_IF_ERROR(current.status());
    void* const event = state_->recorded_here ? state_->events[slot] : state_->local[slot];
    MLA_RETURN_IF_ERROR(Check(api.event_record(event, stream), "event record"));
    if (state_->recorded_here) return absl::OkStatus();
  }
  const State::Current current(*state_, true);
  absl::Status s = current.status();
  if (s.ok()) s = Check(api.stream_wait(state_->relay, state_->local[slot], 0), "stream wait");
  if (s.ok()) s = Check(api.event_record(state_->events[slot], state_->relay), "event record");
  return s;
}

absl::Status DeviceRegion::Copy(std::span<const DeviceCopy> copies, void* stream) {
  if (copies.empty()) return absl::OkStatus();
  const DeviceRuntime& api = state_->api;
  if (api.nvidia_copy_rows == nullptr && api.amd_copy_rows == nullptr) {
    return absl::UnimplementedError("device memory: the GPU runtime copies no rows");
  }
  const State::Current current(*state_, false);
  absl::Status s = current.status();
  const auto stays = [this](const DeviceCopy& copy) {
    const uint64_t gaps = copy.rows > 0 ? (copy.rows - 1) * copy.to_pitch : 0;
    return Holds(copy.to, gaps + copy.width);
  };
  if (s.ok() && state_->copier != nullptr && std::all_of(copies.begin(), copies.end(), stays) &&
      state_->copier->Takes(copies)) {
    return Check(state_->copier->Copy(copies, stream), "copy of rows");
  }
  for (const DeviceCopy& copy : copies) {
    if (!s.ok()) return s;
    using Rows = DeviceRuntime::CopyRows;
    const Rows rows{
        {0, 0, Rows::kUnified, nullptr, const_cast<void*>(copy.from), nullptr, copy.from_pitch},
        {0, 0, Rows::kUnified, nullptr, copy.to, nullptr, copy.to_pitch},
        copy.width,
        copy.rows};
    s = Check(nvidia() ? api.nvidia_copy_rows(&rows, stream)
                       : api.amd_copy_rows(copy.to, copy.to_pitch, copy.from, copy.from_pitch,
                                           copy.width, copy.rows, kAnyDirection, stream),
              "copy of rows");
  }
  return s;
}

absl::Status DeviceRegion::MapWords(std::span<std::byte> memory) {
  const DeviceRuntime& api = state_->api;
  const bool waits = nvidia() ? api.nvidia_await_word != nullptr : api.amd_await_word != nullptr;
  if (!waits || api.store_word == nullptr || api.register_host == nullptr ||
      api.unregister_host == nullptr || api.device_address == nullptr) {
    return absl::UnimplementedError("device memory: the GPU runtime's streams wait for no words");
  }
  const State::Current current(*state_, false);
  absl::Status s = current.status();
  if (s.ok()) {
    s = Check(api.register_host(memory.data(), memory.size(), kPortableAndMapped), "host register");
  }
  if (!s.ok()) return s;
  state_->words = memory;
  void* there = nullptr;
  s = Check(api.device_address(&there, memory.data(), 0), "device address");
  state_->words_there = static_cast<std::byte*>(there);
  if (s.ok() && nvidia() && state_->base != nullptr) {
    state_->copier = RowCopier::Create(api, state_->device);
  }
  if (!s.ok() || state_->header.words == 0 || !state_->same_device()) return s;
  s = Check(api.stream_create(&state_->nearby_stream, DeviceRuntime::kStreamNonBlocking),
            "stream create");
  if (s.ok()) state_->nearby = state_->header.words;
  return s;
}

uint32_t* DeviceRegion::Nearby(uint64_t offset) const {
  if (state_->nearby == 0) return nullptr;
  return reinterpret_cast<uint32_t*>(memory().data() + state_->nearby + offset);
}

// Streams share the few connections of their context with the device, so one that waits for a word
// may keep any other from storing it. A context of its own has its own.
absl::Status DeviceRegion::ReleaseNearby(std::span<const Word> words) {
  if (words.empty() || state_->nearby == 0) return absl::OkStatus();
  const DeviceRuntime& api = state_->api;
  void* context = nullptr;
  absl::Status s = nvidia()
                       ? Check(api.nvidia_create(&context, 0, state_->device), "context create")
                       : absl::OkStatus();  // it is current now
  void* stream = nullptr;
  if (s.ok())
    s = Check(api.stream_create(&stream, DeviceRuntime::kStreamNonBlocking), "stream create");
  for (const Word& w : words) {
    if (s.ok()) s = Check(api.store_word(stream, w.word, w.value, kWithBarrier), "word store");
  }
  if (s.ok()) s = Check(api.stream_finish(stream), "stream finish");
  if (stream != nullptr) (void)api.stream_destroy(stream);
  if (context != nullptr) (void)api.nvidia_destroy(context);
  return s;
}

absl::Status DeviceRegion::SetNearby(uint32_t entries, uint32_t value) {
  if (state_->nearby == 0) return absl::OkStatus();
  void* const stream = state_->nearby_stream;
  absl::Status s = StoreWord(Nearby(0), value, stream);
  for (uint32_t slot = 0; s.ok() && slot < entries; ++slot) {
    s = StoreWord(Nearby(wire::NearbyDoneOffset(slot)), value, stream);
  }
  const State::Current current(*state_, false);
  if (s.ok()) s = current.status();
  return s.ok() ? Check(state_->api.stream_finish(stream), "stream finish") : s;
}

absl::Status DeviceRegion::AwaitWord(uint32_t* word, uint32_t value, void* stream) {
  const DeviceRuntime& api = state_->api;
  const State::Current current(*state_, false);
  MLA_RETURN_IF_ERROR(current.status());
  void* const at = state_->There(word);
  return Check(nvidia() ? api.nvidia_await_word(stream, at, value, kEqualOrLater)
                        : api.amd_await_word(stream, at, value, kEqualOrLater, kAllBits),
               "stream wait for a word");
}

absl::Status DeviceRegion::StoreWord(uint32_t* word, uint32_t value, void* stream) {
  const State::Current current(*state_, false);
  MLA_RETURN_IF_ERROR(current.status());
  return Check(state_->api.store_word(stream, state_->There(word), value, kWithBarrier),
               "stream store of a word");
}

absl::Status DeviceRegion::PassTurn(const Turn& turn, void* stream) {
  if (nvidia() && state_->api.batch_words != nullptr) {
    // One call of the driver stores all words, because on an H200 that takes half of the GPU's time
    // for three calls.
    auto operations = state_->OperationsOf(turn);
    const State::Current current(*state_, false);
    absl::Status s = current.status();
    return s.ok()
               ? Check(state_->api.batch_words(stream, operations.count, operations.all.data(), 0),
                       "batch of words")
               : s;
  }
  absl::Status s;
  for (const Word& store : turn.stores) {
    if (s.ok() && store.word != nullptr) s = StoreWord(store.word, store.value, stream);
  }
  return s.ok() ? AwaitWord(turn.awaited.word, turn.awaited.value, stream) : s;
}

absl::StatusOr<void*> DeviceRegion::CaptureTurn(const Turn& turn, void* stream) {
  constexpr int kCaptures = 1;
  const DeviceRuntime& api = state_->api;
  if (api.batch_words == nullptr || api.capture_info == nullptr || api.set_word_node == nullptr) {
    return absl::UnimplementedError("device memory: the GPU runtime's graphs wait for no words");
  }
  const State::Current current(*state_, false);
  absl::Status s = current.status();
  int captures = 0;
  uint64_t id = 0;
  void* graph = nullptr;
  void* const* last = nullptr;
  size_t count = 0;
  const auto look = [&] {
    return Check(api.capture_info(stream, &captures, &id, &graph, &last, &count), "capture info");
  };
  if (s.ok()) s = look();
  if (s.ok() && captures != kCaptures) {
    return absl::FailedPreconditionError("stream: it captures no graph");
  }
  auto operations = state_->OperationsOf(turn);
  if (s.ok()) {
    s = Check(api.batch_words(stream, operations.count, operations.all.data(), 0),
              "batch of words");
  }
  if (s.ok()) s = look();
  if (!s.ok()) return s;
  if (count != 1) return absl::InternalError("device memory: a batch of words is not one node");
  return last[0];
}

absl::Status DeviceRegion::SetTurn(const Turn& turn, void* exec, void* node) {
  auto operations = state_->OperationsOf(turn);
  const State::Current current(*state_, false);
  MLA_RETURN_IF_ERROR(current.status());
  const DeviceRuntime::WordNode params{state_->context, operations.count, operations.all.data(), 0};
  return Check(state_->api.set_word_node(exec, node, &params), "setting a graph's words");
}

}  // namespace mla::client
