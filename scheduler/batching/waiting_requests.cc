#include "scheduler/batching/waiting_requests.h"

#include <algorithm>

#include "scheduler/tables/step_table.h"

namespace mla::scheduler {

BatchKey KeyOf(const StreamRequest& request) {
  const AttendArgs& args = request.attend;
  BatchKey key;
  key.profile = args.profile;
  if (!Computes(request)) return key;
  const ModelSpec& spec = *request.engine.step->model->spec;
  key.geometry = spec.geometry;
  key.kv_format = spec.kv_format;
  key.products = spec.products();
  key.split_queries = IsExpanded(args.profile) && spec.query_precision == QueryPrecision::kSplit;
  key.rope = spec.rope;
  if (spec.windowed()) {
    key.attention = spec.attention;
    key.entry_format = spec.entry_format;
  } else if (IsSparse(args)) {
    key.attention = kernels::AttentionKind::kSparse;
  }
  key.q_dtype = args.q_dtype;
  key.o_dtype = args.o_dtype;
  return key;
}

TenantShare* WaitingRequests::FindOrAddShare(TenantKey tenant, int32_t weight) {
  const auto is_tenant = [tenant](const TenantShare* share) { return share->tenant == tenant; };
  const auto active = std::find_if(active_.begin(), active_.end(), is_tenant);
  if (active != active_.end()) {
    (*active)->weight = std::max(1, weight);
    // A queue that ran out of requests after the last Prune starts like any other idle one.
    if ((*active)->waiting == 0) {
      (*active)->virtual_time = std::max((*active)->virtual_time, virtual_now_);
    }
    return *active;
  }
  TenantShare* share = nullptr;
  const auto idle = std::find_if(idle_.begin(), idle_.end(), is_tenant);
  if (idle != idle_.end()) {
    share = *idle;
    idle_.erase(idle);
  } else if (!free_shares_.empty()) {
    share = free_shares_.back();
    free_shares_.pop_back();
  } else {
    shares_.push_back(std::make_unique<TenantShare>());
    share = shares_.back().get();
    // The lists never hold more shares than there are.
    active_.reserve(shares_.size());
    idle_.reserve(shares_.size());
    free_shares_.reserve(shares_.size());
  }
  share->tenant = tenant;
  share->weight = std::max(1, weight);
  share->virtual_time = std::max(share->virtual_time, virtual_now_);
  active_.push_back(share);
  return share;
}

RequestQueue* WaitingRequests::FindOrAddQueue(TenantShare* share, const BatchKey& key) {
  for (RequestQueue* queue : share->queues) {
    if (queue->key == key) return queue;
  }
  if (free_queues_.empty()) {
    queues_.push_back(std::make_unique<RequestQueue>());
    free_queues_.reserve(queues_.size());
    free_queues_.push_back(queues_.back().get());
  }
  RequestQueue* const queue = free_queues_.back();
  free_queues_.pop_back();
  *queue = RequestQueue();
  queue->share = share;
  queue->key = key;
  queue->virtual_time = share->queue_time;
  share->queues.push_back(queue);
  return queue;
}

void WaitingRequests::Insert(StreamRequest* request, int32_t weight) {
  StreamRequest::EngineFields& note = request->engine;
  note.state.Enter(RequestState::kWaiting);
  note.prev = tail_;
  note.next = nullptr;
  (tail_ == nullptr ? head_ : tail_->engine.next) = request;
  tail_ = request;
  ++size_;
  TenantShare* const share = FindOrAddShare(note.step->tenant, weight);
  RequestQueue* const queue = FindOrAddQueue(share, KeyOf(*request));
  ++share->waiting;
  note.queue = queue;
  StreamRequest* before = queue->tail;
  while (before != nullptr && before->engine.order > note.order) before = before->engine.queue_prev;
  StreamRequest* const after = before == nullptr ? queue->head : before->engine.queue_next;
  note.queue_prev = before;
  note.queue_next = after;
  (before == nullptr ? queue->head : before->engine.queue_next) = request;
  (after == nullptr ? queue->tail : after->engine.queue_prev) = request;
}

void WaitingRequests::Add(StreamRequest* request, int32_t weight) {
  request->engine.order = ++added_;
  Insert(request, weight);
}

void WaitingRequests::Remove(StreamRequest* request) {
  StreamRequest::EngineFields& note = request->engine;
  note.state.Enter(RequestState::kTaken);
  if (next_in_pass_ == request) next_in_pass_ = note.next;
  (note.prev == nullptr ? head_ : note.prev->engine.next) = note.next;
  (note.next == nullptr ? tail_ : note.next->engine.prev) = note.prev;
  note.prev = note.next = nullptr;
  --size_;
  RequestQueue* const queue = note.queue;
  (note.queue_prev == nullptr ? queue->head : note.queue_prev->engine.queue_next) = note.queue_next;
  (note.queue_next == nullptr ? queue->tail : note.queue_next->engine.queue_prev) = note.queue_prev;
  note.queue_prev = note.queue_next = nullptr;
  note.queue = nullptr;
  --queue->share->waiting;
}

void WaitingRequests::AddService(RequestQueue* queue, int64_t units) {
  queue->virtual_time += units;
  queue->share->virtual_time += std::max<int64_t>(1, units / queue->share->weight);
}

void WaitingRequests::Charge(TenantKey tenant, int32_t weight, int64_t units) {
  TenantShare* const share = FindOrAddShare(tenant, weight);
  share->virtual_time += std::max<int64_t>(1, units / share->weight);
}

void WaitingRequests::Serve(const RequestQueue& queue) {
  virtual_now_ = std::max(virtual_now_, queue.share->virtual_time);
  queue.share->queue_time = std::max(queue.share->queue_time, queue.virtual_time);
}

void WaitingRequests::Prune() {
  for (size_t i = active_.size(); i-- > 0;) {
    TenantShare* const share = active_[i];
    std::erase_if(share->queues, [this](RequestQueue* queue) {
      if (queue->head != nullptr) return false;
      free_queues_.push_back(queue);
      return true;
    });
    if (share->waiting > 0) continue;
    active_.erase(active_.begin() + static_cast<int64_t>(i));
    idle_.push_back(share);
  }
  std::erase_if(idle_, [this](TenantShare* share) {
    if (share->virtual_time > virtual_now_) return false;
    share->virtual_time = share->queue_time = 0;
    free_shares_.push_back(share);
    return true;
  });
}

}  // namespace mla::scheduler
