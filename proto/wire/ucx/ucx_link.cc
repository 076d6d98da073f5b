#include "proto/wire/ucx/ucx_link.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "proto/wire/ucx/frames.h"

namespace mla::wire {
namespace {

// The version of the interface that this code uses; newer libraries keep it.
constexpr unsigned kApiMajor = 1, kApiMinor = 12;
// Closing an endpoint by force waits for no peer; UCX may still need some rounds.
constexpr std::chrono::milliseconds kCloseWait{500};
// UCX reads a key as far as the lengths in it say: at most 64 parts of 255 bytes.
constexpr size_t kKeyRoom = 32768;
// A put's frame leaves after the put and a flush.
constexpr int kPutSteps = 2;

struct Setting {
  const char* name;
  std::string value;
};

// The first version without the older protocols, which 1.13 takes unless it is told otherwise.
constexpr unsigned kNewProtocolsMinor = 15;

bool HasOldProtocols(const UcxApi& api) {
  unsigned major = 0, minor = 0, release = 0;
  api.get_version(&major, &minor, &release);
  return major == 1 && minor < kNewProtocolsMinor;
}

std::string InForce(const std::string& transports) {
  const char* const environment = std::getenv("UCX_TLS");
  return transports.empty() && environment != nullptr ? environment : transports;
}

// Returns true if the list, which UCX reads, may mean one of these transports.
bool MayMean(const std::string& transports, std::initializer_list<absl::string_view> known) {
  if (transports.empty() || transports.front() == '^') return true;
  for (const absl::string_view name : absl::StrSplit(transports, ',')) {
    if (name == "all" || std::find(known.begin(), known.end(), name) != known.end()) return true;
  }
  return false;
}

// UCX warns of settings that no transport reads.
bool UsesSharedMemory(const std::string& transports) {
  return MayMean(InForce(transports), {"shm", "sm", "mm", "posix", "sysv"});
}

bool UsesRdma(const std::string& transports) {
  std::error_code none;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", none);
  const bool any = !none && devices != std::filesystem::directory_iterator();
  return any && MayMean(InForce(transports),
                        {"ib", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "ud", "ud_x", "ud_v",
                         "ud_mlx5", "ud_verbs", "dc", "dc_x", "dc_mlx5"});
}

ucs_memory_type_t TypeOf(UcxMemoryKind kind) {
  switch (kind) {
    case UcxMemoryKind::kCuda:
      return UCS_MEMORY_TYPE_CUDA;
    case UcxMemoryKind::kRocm:
      return UCS_MEMORY_TYPE_ROCM;
    case UcxMemoryKind::kHost:
      break;
  }
  return UCS_MEMORY_TYPE_HOST;
}

constexpr const char* kMemoryNames[] = {"host", "cuda", "cuda-managed", "rocm", "rocm-managed"};

ucp_request_param_t ParamOf(ucp_send_nbx_callback_t done, void* user_data,
                            UcxMemoryKind kind = UcxMemoryKind::kHost) {
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = done;
  param.user_data = user_data;
  param.memory_type = TypeOf(kind);  // not looked up for each frame
  return param;
}

}  // namespace

// A message that is under way. UCX reads the header of one that is sent until that is complete.
struct UcxLink::Message {
  UcxLink* link = nullptr;
  unsigned id = kUcxFrameId;
  std::vector<std::byte> header;
  std::vector<uint64_t> tags;     // of its frames
  int steps = 0;                  // until the frame of a put may leave
  std::vector<std::byte> sealed;  // the payload as it travels
  // For a frame that is received: the place of its payload, and how to open it.
  std::span<std::byte> payload;
  FrameSeal::Opening opening;
};

UcxLink::UcxLink(const UcxApi& api, UcxReceiver* receiver) : api_(api), receiver_(receiver) {}

absl::Status UcxLink::Check(ucs_status_t code, const char* call) const {
  if (code == UCS_OK) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("UCX: ", call, ": ", api_.status_string(code)));
}

void UcxLink::Fail(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

absl::StatusOr<std::unique_ptr<UcxLink>> UcxLink::Open(const UcxApi& api,
                                                       const UcxLinkOptions& options,
                                                       UcxReceiver* receiver) {
  std::unique_ptr<UcxLink> link(new UcxLink(api, receiver));
  MLA_RETURN_IF_ERROR(link->Init(options));
  return link;
}

absl::Status UcxLink::Init(const UcxLinkOptions& options) {
  handles_losses_ = !HasOldProtocols(api_) || UsesRdma(options.transports);
  ucp_config_t* config = nullptr;
  absl::Status status = Check(api_.config_read(nullptr, nullptr, &config), "configuration");
  if (!status.ok()) return status;
  for (const Setting& setting :
       {Setting{"TLS", options.transports}, Setting{"NET_DEVICES", options.devices}}) {
    if (setting.value.empty() || !status.ok()) continue;
    status = Check(api_.config_modify(config, setting.name, setting.value.c_str()), setting.name);
  }
  // In these versions each protocol survives the loss of a peer in one of the two modes only, and
  // ends the process in the other.
  if (HasOldProtocols(api_)) {
    (void)api_.config_modify(config, "PROTO_ENABLE", handles_losses_ ? "y" : "n");
  }
  // Without it, transports in shared memory do not connect to peers that may be lost.
  if (handles_losses_ && UsesSharedMemory(options.transports)) {
    (void)api_.config_modify(config, "MM_ERROR_HANDLING", "y");
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  // Remote memory access only where it is wanted: UCX then has handlers for it.
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP | (options.puts ? UCP_FEATURE_RMA : 0);
  params.name = "mla";
  if (status.ok()) {
    status = Check(api_.init_version(kApiMajor, kApiMinor, &params, config, &context_), "init");
  }
  api_.config_release(config);
  if (!status.ok()) return status;
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  // Calls come from several threads, one at a time.
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  MLA_RETURN_IF_ERROR(Check(api_.worker_create(context_, &worker, &worker_), "worker"));
  if (api_.worker_get_efd(worker_, &event_descriptor_) != UCS_OK) event_descriptor_ = -1;
  MLA_RETURN_IF_ERROR(SetHandler(kUcxFrameId, OnMessage<false>));
  MLA_RETURN_IF_ERROR(SetHandler(kUcxBatchId, OnMessage<true>));
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  MLA_RETURN_IF_ERROR(Check(api_.worker_get_address(worker_, &address, &bytes), "address"));
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  api_.worker_release_address(worker_, address);
  if (bytes > kUcxMostAddressBytes) {
    return absl::UnavailableError(absl::StrCat("UCX: its address has ", bytes, " bytes, at most ",
                                               kUcxMostAddressBytes,
                                               " are possible: name devices"));
  }
  return absl::OkStatus();
}

absl::Status UcxLink::SetHandler(unsigned id, ucp_am_recv_callback_t receive) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = id;
  handler.cb = receive;
  handler.arg = this;
  return Check(api_.worker_set_am_recv_handler(worker_, &handler), "handler");
}

UcxLink::~UcxLink() {
  if (endpoint_ != nullptr && handles_losses_) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    ucs_status_ptr_t closing = api_.ep_close_nbx(endpoint_, &param);
    if (UCS_PTR_IS_PTR(closing)) {
      const auto end = std::chrono::steady_clock::now() + kCloseWait;
      while (api_.request_check_status(closing) == UCS_INPROGRESS &&
             std::chrono::steady_clock::now() < end) {
        api_.worker_progress(worker_);
      }
      api_.request_free(closing);
    }
  }
  for (const Remote& remote : remotes_) {
    if (remote.key != nullptr) api_.rkey_destroy(remote.key);
  }
  for (ucp_mem_h memory : registered_) (void)api_.mem_unmap(context_, memory);
  if (worker_ != nullptr) api_.worker_destroy(worker_);
  if (context_ != nullptr) api_.cleanup(context_);
}

// With `access` 0 the memory gets all rights that UCX gives by default.
absl::Status UcxLink::Map(std::span<std::byte> memory, unsigned access, UcxMemoryKind kind,
                          ucp_mem_h* handle) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.memory_type = TypeOf(kind);
  params.address = memory.data();
  params.length = memory.size();
  if (access != 0) params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_PROT;
  params.prot = access;
  absl::Status status = Check(api_.mem_map(context_, &params, handle), "memory");
  if (status.ok()) registered_.push_back(*handle);
  return status;
}

absl::Status UcxLink::Register(std::span<std::byte> memory) {
  ucp_mem_h handle = nullptr;
  return Map(memory, 0, UcxMemoryKind::kHost, &handle);
}

absl::Status UcxLink::Knows(UcxMemoryKind kind) const {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  MLA_RETURN_IF_ERROR(Check(api_.context_query(context_, &attributes), "memory types"));
  if ((attributes.memory_types >> TypeOf(kind) & 1) != 0) return absl::OkStatus();
  std::vector<absl::string_view> known;
  for (size_t i = 0; i < std::size(kMemoryNames); ++i) {
    if ((attributes.memory_types >> i & 1) != 0) known.push_back(kMemoryNames[i]);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("UCX ", UcxVersionText(api_), " cannot put into memory of the GPU: it knows ",
                   absl::StrJoin(known, ", "), ", and not ", kMemoryNames[TypeOf(kind)],
                   ": it was built without that, or ucx.transports leaves it out"));
}

absl::Status UcxLink::Connect(std::string_view address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = handles_losses_ ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
  params.err_handler.cb = OnPeerLost;
  params.err_handler.arg = this;
  absl::Status status = Check(api_.ep_create(worker_, &params, &endpoint_), "connection");
  if (!status.ok()) {
    endpoint_ = nullptr;
    Fail(status);
  }
  return status;
}

// ---------------------------------------------------------------------------------------- Frames

UcxLink::Message* UcxLink::TakeMessage(std::span<const std::byte> header) {
  if (free_.empty()) {
    if (messages_.size() == 2 * kMostFrames) return nullptr;
    messages_.push_back(std::make_unique<Message>());
    messages_.back()->link = this;
    free_.push_back(messages_.back().get());
  }
  Message* const message = free_.back();
  free_.pop_back();
  message->id = kUcxFrameId;
  message->header.assign(header.begin(), header.end());
  message->tags.clear();
  return message;
}

void UcxLink::ReturnMessage(Message* message) {
  std::vector<std::byte>().swap(message->sealed);
  free_.push_back(message);
}

void UcxLink::Encrypt(const UcxSecret& secret, FrameSeal::Sender own) {
  using Sender = FrameSeal::Sender;
  seals_.emplace(secret, own);
  opens_.emplace(secret, own == Sender::kClient ? Sender::kServer : Sender::kClient);
}

void UcxLink::BatchFrames() {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  batches_ = api_.worker_query(worker_, &attributes) == UCS_OK &&
             attributes.max_am_header >= kMostBatchBytes + FrameSeal::kOverhead;
}

absl::Status UcxLink::Send(std::span<const std::byte> header, std::span<const std::byte> payload,
                           uint64_t tag) {
  if (!status_.ok()) return status_;
  if (holds_ == 0 || !batches_) {
    return SendMessage(kUcxFrameId, header, payload, {&tag, 1});
  }
  const bool copied = payload.size() <= kMostBatchedPayload;
  const auto add = [&] { return copied ? batch_.Add(header, payload) : batch_.AddCarried(header); };
  if (!add()) {
    MLA_RETURN_IF_ERROR(SendBatch());
    add();
  }
  if (batch_tags_.empty()) first_payload_ = payload;
  if (!copied) carried_ = payload;
  batch_tags_.push_back(tag);
  return absl::OkStatus();
}

absl::Status UcxLink::SendHeld() { return --holds_ > 0 ? status_ : SendBatch(); }

absl::Status UcxLink::SendBatch() {
  if (batch_.empty() || !status_.ok()) return status_;
  absl::Status sent;
  if (BatchReader::Frame only; batch_tags_.size() == 1 && BatchReader(batch_.bytes()).Next(&only)) {
    sent = SendMessage(kUcxFrameId, only.header, first_payload_, batch_tags_);
  } else {
    sent = SendMessage(kUcxBatchId, batch_.bytes(), carried_, batch_tags_);
  }
  batch_.Clear();
  carried_ = {};
  batch_tags_.clear();
  return sent;
}

absl::Status UcxLink::SendMessage(unsigned id, std::span<const std::byte> header,
                                  std::span<const std::byte> payload,
                                  std::span<const uint64_t> tags) {
  Message* const message = TakeMessage(header);
  if (message == nullptr) {
    return absl::ResourceExhaustedError("UCX: too many frames are under way");
  }
  message->id = id;
  message->tags.assign(tags.begin(), tags.end());
  if (!seals_.has_value()) return Post(message, payload);
  message->sealed.resize(payload.size());
  message->header.resize(header.size() + FrameSeal::kOverhead);
  seals_->Seal(header, payload, message->header.data(), message->sealed.data());
  return Post(message, message->sealed);
}

absl::Status UcxLink::Post(Message* message, std::span<const std::byte> payload) {
  const ucp_request_param_t param = ParamOf(OnMessageSent, message);
  ++messages_sent_;
  ucs_status_ptr_t const sent =
      api_.am_send_nbx(endpoint_, message->id, message->header.data(), message->header.size(),
                       payload.data(), payload.size(), &param);
  if (UCS_PTR_IS_PTR(sent)) return absl::OkStatus();  // OnMessageSent will be called
  ReturnMessage(message);
  if (UCS_PTR_IS_ERR(sent)) {
    Fail(Check(UCS_PTR_STATUS(sent), "send"));
    return status_;
  }
  for (const uint64_t tag : message->tags) receiver_->OnSent(tag);
  return absl::OkStatus();
}

void UcxLink::OnMessageSent(void* request, ucs_status_t code, void* user_data) {
  auto* const message = static_cast<Message*>(user_data);
  UcxLink* const link = message->link;
  link->api_.request_free(request);
  link->ReturnMessage(message);
  if (code != UCS_OK) return link->Fail(link->Check(code, "send"));
  for (const uint64_t tag : message->tags) link->receiver_->OnSent(tag);
}

// ------------------------------------------------------------------------------------------ Puts

absl::StatusOr<UcxTarget> UcxLink::Offer(std::span<std::byte> memory, UcxMemoryKind kind) {
  MLA_RETURN_IF_ERROR(Knows(kind));
  ucp_mem_h handle = nullptr;
  MLA_RETURN_IF_ERROR(Map(
      memory,
      UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_WRITE,
      kind, &handle));
  void* key = nullptr;
  size_t bytes = 0;
  MLA_RETURN_IF_ERROR(Check(api_.rkey_pack(context_, handle, &key, &bytes), "key"));
  UcxTarget target{reinterpret_cast<uint64_t>(memory.data()), memory.size(),
                   std::string(static_cast<const char*>(key), bytes)};
  api_.rkey_buffer_release(key);
  if (bytes <= kUcxMostKeyBytes) return target;
  return absl::UnavailableError(absl::StrCat("UCX: its key has ", bytes, " bytes, at most ",
                                             kUcxMostKeyBytes, " are possible"));
}

absl::Status UcxLink::Reach(const UcxTarget& target, UcxRemote which) {
  if (target.key.empty() || target.key.size() > kUcxMostKeyBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("UCX: key: got ", target.key.size(), " bytes, must be 1..", kUcxMostKeyBytes));
  }
  if (target.bytes > std::numeric_limits<uint64_t>::max() - target.address) {
    return absl::InvalidArgumentError(absl::StrCat("UCX: memory: got ", target.address, " + ",
                                                   target.bytes, ", must end within 2^64"));
  }
  std::vector<char> key(kKeyRoom);
  std::memcpy(key.data(), target.key.data(), target.key.size());
  ucp_rkey_h unpacked = nullptr;
  MLA_RETURN_IF_ERROR(Check(api_.ep_rkey_unpack(endpoint_, key.data(), &unpacked), "key"));
  remotes_[static_cast<size_t>(which)] = {unpacked, target.address, target.bytes};
  return absl::OkStatus();
}

absl::Status UcxLink::Put(std::span<const std::byte> header, std::span<const std::byte> payload,
                          uint64_t offset, uint64_t tag, UcxRemote which, UcxMemoryKind kind) {
  if (!status_.ok()) return status_;
  const Remote& remote = RemoteOf(which);
  if (offset > remote.bytes || payload.size() > remote.bytes - offset) {
    return absl::InvalidArgumentError(absl::StrCat("UCX: put: got ", offset, " + ", payload.size(),
                                                   ", must be within 0..", remote.bytes));
  }
  Message* const frame = TakeMessage(header);
  if (frame == nullptr) return absl::ResourceExhaustedError("UCX: too many frames are under way");
  frame->tags.push_back(tag);
  frame->steps = kPutSteps;
  const ucp_request_param_t param = ParamOf(OnPut, frame, kind);
  ucs_status_ptr_t const put = api_.put_nbx(endpoint_, payload.data(), payload.size(),
                                            remote.address + offset, remote.key, &param);
  if (UCS_PTR_IS_ERR(put)) {
    ReturnMessage(frame);
    Fail(Check(UCS_PTR_STATUS(put), "put"));
    return status_;
  }
  unflushed_.push_back(frame);
  if (!UCS_PTR_IS_PTR(put)) OnPutStep(frame);
  return Flush();
}

// The end of a put says that its payload may be changed, not that it has arrived. A flush does, and
// UCX promises no order of puts and messages without it.
absl::Status UcxLink::Flush() {
  while (flushing_.empty() && !unflushed_.empty() && status_.ok()) {
    flushing_.swap(unflushed_);
    const ucp_request_param_t param = ParamOf(OnFlushed, this);
    ucs_status_ptr_t const flush = api_.ep_flush_nbx(endpoint_, &param);
    if (UCS_PTR_IS_PTR(flush)) return absl::OkStatus();  // OnFlushed will be called
    if (UCS_PTR_IS_ERR(flush)) {
      Fail(Check(UCS_PTR_STATUS(flush), "flush"));
      return status_;
    }
    StepFlushed();
  }
  return status_;
}

// Frames whose puts are there leave together.
void UcxLink::StepFlushed() {
  Hold();
  for (Message* const frame : std::exchange(flushing_, {})) OnPutStep(frame);
  SendHeld().IgnoreError();  // a failure is the link's end, which its user sees there
}

void UcxLink::OnPutStep(Message* frame) {
  if (--frame->steps > 0) return;
  const uint64_t tag = frame->tags.front();
  ReturnMessage(frame);
  const std::vector<std::byte> header = std::move(frame->header);
  Send(header, {}, tag).IgnoreError();  // as above
}

void UcxLink::OnPut(void* request, ucs_status_t code, void* user_data) {
  auto* const frame = static_cast<Message*>(user_data);
  UcxLink* const link = frame->link;
  link->api_.request_free(request);
  if (code != UCS_OK) return link->Fail(link->Check(code, "put"));
  if (link->status_.ok()) link->OnPutStep(frame);
}

void UcxLink::OnFlushed(void* request, ucs_status_t code, void* user_data) {
  auto* const link = static_cast<UcxLink*>(user_data);
  link->api_.request_free(request);
  if (code != UCS_OK) return link->Fail(link->Check(code, "flush"));
  if (!link->status_.ok()) return;
  link->StepFlushed();
  link->Flush().IgnoreError();  // a failure is the link's end
}

// ---------------------------------------------------------------------------------------- Arrivals

template <bool kBatched>
ucs_status_t UcxLink::OnMessage(void* user_data, const void* header, size_t header_bytes,
                                void* data, size_t bytes, const ucp_am_recv_param_t* param) {
  Arrival arrival{};
  arrival.header = {static_cast<const std::byte*>(header), header_bytes};
  arrival.data = data;
  arrival.bytes = bytes;
  arrival.follows = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  static_cast<UcxLink*>(user_data)->Receive(arrival, kBatched);
  return UCS_OK;
}

void UcxLink::Receive(Arrival arrival, bool batched) {
  if (!status_.ok()) return;  // dropped
  const size_t longest = (batched ? kMostBatchBytes : kMostHeaderBytes) +
                         (opens_.has_value() ? FrameSeal::kOverhead : 0);
  if (arrival.header.size() > longest) {
    return Fail(absl::InvalidArgumentError(absl::StrCat(
        "UCX: header: got ", arrival.header.size(), " bytes, at most ", longest, " are possible")));
  }
  std::array<std::byte, std::max(kMostHeaderBytes, kMostBatchBytes)> clear;
  if (opens_.has_value()) {
    if (!opens_->OpenHeader(arrival.header, clear.data(), &arrival.opening)) {
      return Fail(absl::PermissionDeniedError("UCX: a frame that the peer has not encrypted"));
    }
    arrival.header = std::span(clear).first(arrival.header.size() - FrameSeal::kOverhead);
  }
  batched ? ReceiveBatch(arrival) : ReceiveFrame(arrival);
}

void UcxLink::ReceiveBatch(const Arrival& arrival) {
  BatchReader reader(arrival.header);
  while (!reader.done() && status_.ok()) {
    BatchReader::Frame frame;
    if (!reader.Next(&frame) || frame.header.size() > kMostHeaderBytes) {
      return Fail(absl::InvalidArgumentError("UCX: a batch of frames that is not well formed"));
    }
    if (frame.payload_follows) {
      Arrival carried = arrival;
      carried.header = frame.header;
      ReceiveFrame(carried);
      continue;
    }
    const absl::StatusOr<std::byte*> place = receiver_->Place(frame.header, frame.payload.size());
    if (!place.ok()) return Fail(place.status());
    if (!frame.payload.empty()) std::memcpy(*place, frame.payload.data(), frame.payload.size());
    receiver_->OnArrived(frame.header);
  }
  if (arrival.bytes > 0 && !reader.carries()) {
    Fail(absl::InvalidArgumentError("UCX: a batch of frames with a payload of none"));
  }
}

void UcxLink::ReceiveFrame(const Arrival& arrival) {
  const absl::StatusOr<std::byte*> place = receiver_->Place(arrival.header, arrival.bytes);
  if (!place.ok()) return Fail(place.status());
  Message* const frame = TakeMessage(arrival.header);
  if (frame == nullptr) {
    return Fail(absl::ResourceExhaustedError("UCX: too many frames are under way"));
  }
  frame->payload = {*place, arrival.bytes};
  frame->opening = arrival.opening;
  if (!arrival.follows) {
    if (arrival.bytes > 0) std::memcpy(*place, arrival.data, arrival.bytes);
    return Arrived(frame);
  }
  ucp_request_param_t param = ParamOf(nullptr, frame);
  param.cb.recv_am = OnPayloadReceived;
  ucs_status_ptr_t const receiving =
      api_.am_recv_data_nbx(worker_, arrival.data, *place, arrival.bytes, &param);
  if (UCS_PTR_IS_PTR(receiving)) return;  // OnPayloadReceived will be called
  if (!UCS_PTR_IS_ERR(receiving)) return Arrived(frame);
  ReturnMessage(frame);
  Fail(Check(UCS_PTR_STATUS(receiving), "receive"));
}

// The payload is in its place, as it has travelled.
void UcxLink::Arrived(Message* frame) {
  if (opens_.has_value() && !opens_->OpenPayload(frame->opening, frame->payload)) {
    Fail(absl::PermissionDeniedError("UCX: a payload that the peer has not encrypted"));
  } else {
    receiver_->OnArrived(frame->header);
  }
  ReturnMessage(frame);
}

void UcxLink::OnPayloadReceived(void* request, ucs_status_t code, size_t, void* user_data) {
  auto* const frame = static_cast<Message*>(user_data);
  UcxLink* const link = frame->link;
  link->api_.request_free(request);
  if (code != UCS_OK) {
    link->Fail(link->Check(code, "receive"));
  } else if (link->status_.ok()) {
    return link->Arrived(frame);
  }
  link->ReturnMessage(frame);
}

void UcxLink::OnPeerLost(void* user_data, ucp_ep_h, ucs_status_t code) {
  auto* const link = static_cast<UcxLink*>(user_data);
  link->Fail(link->Check(code, "the peer is lost"));
}

bool UcxLink::Progress() { return api_.worker_progress(worker_) != 0; }

bool UcxLink::Arm() {
  if (event_descriptor_ < 0) return true;
  return api_.worker_arm(worker_) == UCS_OK;
}

}  // namespace mla::wire
