#include "tests/fake_ucx/fake_ucx.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/fake_ucx/fake_world.h"

namespace mla::fake_ucx {

World& TheWorld() {
  static World* const world = new World();
  return *world;
}

namespace {

constexpr size_t kAddressBytes = 24;

void Lose(Worker* worker) {
  for (Endpoint* endpoint : worker->endpoints) endpoint->lost = true;
  Notify(*worker);
}

// ------------------------------------------------------------------------------------ The calls

void GetVersion(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1;
  *minor = 13;
  *release = 1;
}

ucs_status_t ConfigRead(const char*, const char*, ucp_config_t** config) {
  *config = reinterpret_cast<ucp_config_t*>(new int(0));
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  world.transports.clear();
  return UCS_OK;
}
ucs_status_t ConfigModify(ucp_config_t*, const char* name, const char* value) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  if (std::strcmp(name, "TLS") == 0) world.transports = value;
  return UCS_OK;
}
void ConfigRelease(ucp_config_t* config) { delete reinterpret_cast<int*>(config); }

ucs_status_t InitVersion(unsigned, unsigned, const ucp_params_t*, const ucp_config_t*,
                         ucp_context_h* context) {
  if (Fails("init")) return UCS_ERR_NO_DEVICE;
  *context = reinterpret_cast<ucp_context_h>(new int(0));
  return UCS_OK;
}
ucs_status_t ContextQuery(ucp_context_h, ucp_context_attr_t* attributes) {
  attributes->memory_types = TheWorld().faults.memory_types;
  return UCS_OK;
}
void Cleanup(ucp_context_h context) { delete reinterpret_cast<int*>(context); }

ucs_status_t WorkerCreate(ucp_context_h, const ucp_worker_params_t*, ucp_worker_h* worker) {
  if (Fails("worker")) return UCS_ERR_NO_MEMORY;
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  auto* const made = new Worker();
  made->address = "worker " + std::to_string(world.next_address++);
  made->address.resize(kAddressBytes, '.');
  if (!world.faults.no_descriptor) made->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  world.workers[made->address] = made;
  *worker = reinterpret_cast<ucp_worker_h>(made);
  return UCS_OK;
}

// Recalls what a worker has sent and no other has received.
void Recall(const Worker* sender, Worker* other) {
  const auto is_theirs = [sender](const Message& message) {
    return message.sending != nullptr && message.sending->owner == sender;
  };
  std::erase_if(other->inbox, [&](const std::unique_ptr<Message>& message) {
    if (!is_theirs(*message)) return false;
    Drop(message->sending);
    return true;
  });
  std::erase_if(other->pulls, [&](Pull& pull) {
    if (!is_theirs(*pull.message)) return false;
    Drop(pull.message->sending);
    Finish(pull.receiving, UCS_ERR_CONNECTION_RESET);
    return true;
  });
}

void WorkerDestroy(ucp_worker_h handle) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  Worker* const worker = AsWorker(handle);
  world.workers.erase(worker->address);
  // Peers see that it is gone.
  for (const auto& [address, other] : world.workers) {
    for (Endpoint* endpoint : other->endpoints) {
      if (endpoint->peer == worker->address) endpoint->lost = true;
    }
    Recall(worker, other);
    Notify(*other);
  }
  for (Endpoint* endpoint : worker->endpoints) {
    for (const Put& put : endpoint->puts) Drop(put.request);
    for (Request* flush : endpoint->flushes) Drop(flush);
    delete endpoint;
  }
  for (Request* request : worker->done) Drop(request);
  for (Pull& pull : worker->pulls) {
    Finish(pull.message->sending, UCS_ERR_CONNECTION_RESET);
    Drop(pull.receiving);
  }
  for (const std::unique_ptr<Message>& message : worker->inbox) {
    if (message->sending != nullptr) Finish(message->sending, UCS_ERR_CONNECTION_RESET);
  }
  if (worker->event >= 0) close(worker->event);
  delete worker;
}

ucs_status_t WorkerGetAddress(ucp_worker_h handle, ucp_address_t** address, size_t* bytes) {
  const std::string& text = AsWorker(handle)->address;
  *bytes = text.size();
  char* const copy = static_cast<char*>(std::malloc(text.size()));
  std::memcpy(copy, text.data(), text.size());
  *address = reinterpret_cast<ucp_address_t*>(copy);
  return UCS_OK;
}
void WorkerReleaseAddress(ucp_worker_h, ucp_address_t* address) { std::free(address); }

ucs_status_t SetHandler(ucp_worker_h handle, const ucp_am_handler_param_t* param) {
  AsWorker(handle)->handlers[param->id] = *param;
  return UCS_OK;
}

ucs_status_t WorkerQuery(ucp_worker_h, ucp_worker_attr_t* attributes) {
  attributes->max_am_header = TheWorld().faults.most_header_bytes;
  return UCS_OK;
}

// Runs the callback of an operation without the lock.
void RunCallback(Request* request, std::unique_lock<std::mutex>* lock) {
  lock->unlock();
  if (request->sent != nullptr) {
    request->sent(request, request->status, request->user_data);
  } else if (request->received != nullptr) {
    request->received(request, request->status, request->bytes, request->user_data);
  }
  lock->lock();
}

void Deliver(Worker* worker, std::unique_lock<std::mutex>* lock) {
  if (StopsAt(worker, "deliver")) return;
  std::unique_ptr<Message> message = TakeAt(&worker->inbox, NextOf(worker->inbox));
  Message* const raw = message.get();
  ucp_am_recv_param_t param{};
  void* data = raw->eager.data();
  if (raw->sending != nullptr) {
    param.recv_attr = UCP_AM_RECV_ATTR_FLAG_RNDV;
    data = raw;
    worker->offered.push_back(std::move(message));
  }
  const std::string header = raw->header;
  const size_t bytes = raw->bytes;
  const auto handler = worker->handlers.find(raw->id);
  if (handler != worker->handlers.end()) {  // UCX drops others
    const ucp_am_handler_param_t known = handler->second;
    lock->unlock();
    known.cb(known.arg, header.data(), header.size(), data, bytes, &param);
    lock->lock();
  }
  // One that was not asked for is dropped; its sender is told that it is gone.
  for (std::unique_ptr<Message>& left : worker->offered) Finish(left->sending, UCS_OK);
  worker->offered.clear();
}

unsigned WorkerProgress(ucp_worker_h handle) {
  World& world = TheWorld();
  std::unique_lock<std::mutex> lock(world.mutex);
  Worker* const worker = AsWorker(handle);
  if (worker->stopped) return 0;
  for (Endpoint* endpoint : worker->endpoints) {
    if (!endpoint->lost || std::exchange(endpoint->told, true)) continue;
    const ucp_err_handler_t handler = endpoint->on_error;
    lock.unlock();
    handler.cb(handler.arg, reinterpret_cast<ucp_ep_h>(endpoint), UCS_ERR_CONNECTION_RESET);
    return 1;
  }
  if (!worker->done.empty()) {
    const size_t next = NextOf(worker->done);
    if (StopsAt(worker, PointOf(*worker->done[next]))) return 0;
    RunCallback(TakeAt(&worker->done, next), &lock);
    return 1;
  }
  if (world.faults.stalled || worker->cut) return 0;
  if (DoWrite(worker)) return 1;
  if (!worker->pulls.empty()) {
    const size_t next = NextOf(worker->pulls);
    const Pull& chosen = worker->pulls[next];
    std::memcpy(chosen.receiving->to, chosen.message->payload, chosen.message->bytes / 2);
    if (StopsAt(worker, "pull")) return 0;
    const Pull pull = TakeAt(&worker->pulls, next);
    std::memcpy(pull.receiving->to, pull.message->payload, pull.message->bytes);
    if (world.faults.flips) static_cast<char*>(pull.receiving->to)[0] ^= 1;
    world.counts.payload_bytes += pull.message->bytes;
    pull.receiving->bytes = pull.message->bytes;
    Finish(pull.message->sending, UCS_OK);
    Finish(pull.receiving, UCS_OK);
    return 1;
  }
  if (worker->inbox.empty() || worker->handlers.empty()) return 0;
  Deliver(worker, &lock);
  return 1;
}

ucs_status_t WorkerArm(ucp_worker_h handle) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  Worker* const worker = AsWorker(handle);
  uint64_t count = 0;
  if (worker->event >= 0 && read(worker->event, &count, sizeof(count)) < 0) count = 0;
  const bool busy = HasWrites(*worker) || !worker->inbox.empty() || !worker->pulls.empty() ||
                    !worker->done.empty();
  return busy && !world.faults.stalled && !worker->stopped && !worker->cut ? UCS_ERR_BUSY : UCS_OK;
}

ucs_status_t WorkerGetEfd(ucp_worker_h handle, int* descriptor) {
  *descriptor = AsWorker(handle)->event;
  return *descriptor < 0 ? UCS_ERR_UNSUPPORTED : UCS_OK;
}

ucs_status_t EpCreate(ucp_worker_h handle, const ucp_ep_params_t* params, ucp_ep_h* endpoint) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  if (Fails("connection")) return UCS_ERR_UNREACHABLE;
  const std::string address(reinterpret_cast<const char*>(params->address), kAddressBytes);
  if (!world.workers.contains(address)) return UCS_ERR_INVALID_ADDR;
  auto* const made = new Endpoint();
  made->own = AsWorker(handle);
  made->peer = address;
  made->on_error = params->err_handler;
  made->own->endpoints.push_back(made);
  *endpoint = reinterpret_cast<ucp_ep_h>(made);
  return UCS_OK;
}

ucs_status_ptr_t EpClose(ucp_ep_h, const ucp_request_param_t*) { return nullptr; }

ucs_status_ptr_t AmSend(ucp_ep_h handle, unsigned id, const void* header, size_t header_bytes,
                        const void* payload, size_t bytes, const ucp_request_param_t* param) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  Endpoint* const endpoint = AsEndpoint(handle);
  const auto peer = world.workers.find(endpoint->peer);
  if (Fails("send")) return UCS_STATUS_PTR(UCS_ERR_NO_MEMORY);
  if (endpoint->lost || peer == world.workers.end()) {
    return UCS_STATUS_PTR(UCS_ERR_CONNECTION_RESET);
  }
  if (world.faults.lost_after == 0) {
    Lose(endpoint->own);
    Lose(peer->second);
  } else if (world.faults.lost_after > 0) {
    --world.faults.lost_after;
  }
  ++world.counts.messages;
  CheckType(payload, *param);
  auto message = std::make_unique<Message>();
  message->id = id;
  message->header.assign(static_cast<const char*>(header), header_bytes);
  message->bytes = bytes;
  Request* request = nullptr;
  if (bytes > kEagerBytes) {
    request = NewRequest(endpoint->own, param);
    request->sent = param->cb.send;
    message->payload = payload;
    message->sending = request;
  } else {
    message->eager.assign(static_cast<const char*>(payload), bytes);
    if (world.faults.flips && bytes > 0) message->eager[0] ^= 1;
    world.counts.payload_bytes += bytes;
  }
  peer->second->inbox.push_back(std::move(message));
  Notify(*peer->second);
  StopsAt(endpoint->own, "message");
  return request;
}

ucs_status_ptr_t AmReceive(ucp_worker_h handle, void* descriptor, void* to, size_t,
                           const ucp_request_param_t* param) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  Worker* const worker = AsWorker(handle);
  std::unique_ptr<Message> message;
  for (auto it = worker->offered.begin(); it != worker->offered.end(); ++it) {
    if (it->get() != descriptor) continue;
    message = std::move(*it);
    worker->offered.erase(it);
    break;
  }
  if (message == nullptr) std::abort();  // not a descriptor of this callback
  if (Fails("receive")) {
    Finish(message->sending, UCS_ERR_CANCELED);
    return UCS_STATUS_PTR(UCS_ERR_NO_MEMORY);
  }
  Request* const request = NewRequest(worker, param);
  request->received = param->cb.recv_am;
  request->to = to;
  worker->pulls.push_back({std::move(message), request});
  return request;
}

ucs_status_t CheckStatus(void* request) { return static_cast<Request*>(request)->status; }
void FreeRequest(void* request) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  --world.counts.live_requests;
  delete static_cast<Request*>(request);
}

const char* StatusString(ucs_status_t) { return "a failure of the fake"; }

}  // namespace

void Reset(const Faults& wanted) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  world.faults = wanted;
  world.random.seed(wanted.reorder);
  world.counts = {};
  world.stop_point.clear();
}

void SetStalled(bool stalled) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  world.faults.stalled = stalled;
}

void SetFails(const std::string& name) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  world.faults.fails = name;
}

void SetFlips(bool flips) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  world.faults.flips = flips;
}

void StopAt(const std::string& point, const std::string& address) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  world.stop_point = point;
  world.stop_address = address;
}

bool Stopped() {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  for (const auto& [address, worker] : world.workers) {
    if (worker->stopped) return true;
  }
  return false;
}

void Continue() {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  for (const auto& [address, worker] : world.workers) {
    worker->stopped = false;
    Notify(*worker);
  }
}

void Cut(const std::string& address) {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  if (const auto found = world.workers.find(address); found != world.workers.end()) {
    found->second->cut = true;
  }
}

Faults& faults() { return TheWorld().faults; }

std::string Transports() {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  return world.transports;
}

Counts counts() {
  World& world = TheWorld();
  const std::lock_guard<std::mutex> lock(world.mutex);
  return world.counts;
}

wire::UcxApi Api() {
  wire::UcxApi api{};
  api.get_version = GetVersion;
  api.config_read = ConfigRead;
  api.config_modify = ConfigModify;
  api.config_release = ConfigRelease;
  api.init_version = InitVersion;
  api.context_query = ContextQuery;
  api.cleanup = Cleanup;
  api.worker_create = WorkerCreate;
  api.worker_destroy = WorkerDestroy;
  api.worker_get_address = WorkerGetAddress;
  api.worker_release_address = WorkerReleaseAddress;
  api.worker_set_am_recv_handler = SetHandler;
  api.worker_progress = WorkerProgress;
  api.worker_arm = WorkerArm;
  api.worker_get_efd = WorkerGetEfd;
  api.worker_query = WorkerQuery;
  api.ep_create = EpCreate;
  api.ep_close_nbx = EpClose;
  api.am_send_nbx = AmSend;
  api.am_recv_data_nbx = AmReceive;
  api.request_check_status = CheckStatus;
  api.request_free = FreeRequest;
  api.status_string = StatusString;
  AddPuts(&api);
  return api;
}

}  // namespace mla::fake_ucx
